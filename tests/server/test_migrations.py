"""A database of an earlier version, filled as that version filled it, is one of today's after a start."""

import json
import struct

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine

from tests.databases import with_driver
from tsemon.stacks import Stacks
from tsemon_server.store import Store
from tsemon_server.store.engine import MIGRATIONS
from tsemon_server.store.ledger.progress import Progress
from tsemon_server.store.series.settling import Sizes

from .conftest import Api, loss_frame

STEPS = range(0, 60, 5)
HIGH_FROM = 35
"""From this step on the loss is 20, which the rule calls high."""


def states(found):
    return [(a["state"], a["pending_step"], a["firing_step"], a["resolved_step"]) for a in found]


def upgrade(database, revision):
    engine = create_engine(with_driver(database.url))
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    engine.dispose()


def insert(database, table, **values):
    columns, places = ", ".join(values), ", ".join(f":{name}" for name in values)
    database.execute(f"INSERT INTO {table} ({columns}) VALUES ({places})", **values)


def fill_first_tables(database):
    """A run of two blocks in two attempts, the second of which starts at step 30 and is firing an alert."""
    row = {"run_id": "aa11", "project": "pretrain", "run": "gpt", "state": "running", "attempt": 2}
    row |= {"config": '{"lr":0.1}', "tags": '["old"]', "created_at": 1000.5, "updated_at": 1055.5, "num_frames": 18}
    row |= {"last_attempt": 2, "last_writer": "w", "last_seq": 55, "last_step": 55, "loss": 20.0}
    insert(database, "run", **row)
    for attempt, resume_step, hidden_from in ((1, None, 30), (2, 30, 2**63 - 1)):
        row = {"run_id": "aa11", "attempt": attempt, "attempt_key": f"key{attempt}", "resume_step": resume_step}
        row |= {"hidden_from": hidden_from, "blocks": '["h.0","h.1"]', "started_at": 1000.0 + attempt}
        insert(database, "attempt", **row)
    slots = [("scalars", "loss", 0, 1, 1), ("layers", "grad_norm", 8, 2, 1), ("heads", "sink_share", 16, 2, 3)]
    for kind, metric, offset_bytes, num_rows, num_columns in slots:
        row = {"run_id": "aa11", "layout_id": 77, "kind": kind, "metric": metric, "offset_bytes": offset_bytes}
        insert(database, "layout", **row, num_rows=num_rows, num_columns=num_columns)
    for attempt, steps in ((1, STEPS), (2, STEPS[6:])):
        for step in steps:
            blob = struct.pack("<d2f6f", 20.0 if step >= HIGH_FROM else 2.0, step, float("nan"), *range(6))
            row = {"run_id": "aa11", "attempt": attempt, "writer": "w", "seq": step, "step": step}
            insert(database, "frame", **row, time=1000.0 + step, layout_id=77, blob=blob)
    row = {"run_id": "aa11", "attempt": 2, "rule": "high_loss", "family": "loss", "severity": "warning"}
    row |= {"state": "firing", "pending_step": 35, "firing_step": 45, "summary": "loss is 20.0", "evidence": "{}"}
    row |= {"opened_at": 1035.0, "updated_at": 1045.0}
    insert(database, "alert", **row, advice='{"text":"stop"}')
    track = {"state": "firing", "pending_step": 35, "firing_step": 45, "last_step": 55, "streak": None}
    tracks = json.dumps({"high_loss": {**track, "window": [{"step": 55, "loss": 20.0, "bad": float("inf")}]}})
    insert(database, "rule_state", run_id="aa11", attempt=2, step=55, tracks=tracks)
    insert(database, "alert", **row | {"rule": "other", "state": "pending", "firing_step": None}, advice="{}")


@pytest.fixture(params=["0001", "0002"])
def api(request, empty_database):
    """The service of today on a database of an earlier version."""
    upgrade(empty_database, request.param)
    fill_first_tables(empty_database)
    api = Api(empty_database)
    yield api
    api.close()


@pytest.fixture(params=["hot", "settled"])
def moved(request, api):
    """The same, before and after its frames have moved to where frames go today."""
    if request.param == "settled":
        api.http.patch("/api/v1/runs/aa11", json={"state": "finished"})
        store = Store(api.database.url)
        assert store.settle(sizes=Sizes(kept=0)) == 2
        store.close()
    return api


class TestADatabaseOfAnEarlierVersion:
    def test_tells_of_its_runs(self, api):
        run = api.get("/runs/aa11")
        told = ("project", "run", "state", "attempt", "num_blocks", "tags", "config", "num_frames", "last_step", "loss")
        assert [run[name] for name in told] == [
            *("pretrain", "gpt", "running", 2, 2, ["old"], {"lr": 0.1}, 18, 55, 20.0)
        ]
        assert run["latest"] == {"step": 55, "time": 1055.0, "scalars": {"loss": 20.0}}
        assert run["metrics"] == {
            "scalars": ["loss"], "layers": {"grad_norm": 2}, "heads": {"sink_share": [2, 3]}
        }  # fmt: skip
        assert [(a["attempt"], a["resume_step"]) for a in run["attempts"]] == [(1, None), (2, 30)]
        assert [listed["run_id"] for listed in api.get("/runs")["runs"]] == ["aa11"]

    def test_has_its_frames(self, moved):
        assert moved.losses("aa11") == {step: 20.0 if step >= HIGH_FROM else 2.0 for step in STEPS}
        assert list(moved.losses("aa11", attempt=2)) == [*STEPS[6:]]
        grown = moved.get("/runs/aa11/heatmap", metric="grad_norm")
        assert grown["step"] == [*STEPS]
        assert grown["values"] == [[float(step), None] for step in STEPS]
        assert moved.get("/runs/aa11/series", metric="sink_share", layer=1, head=2)["mean"] == [5.0] * len(STEPS)

    def test_knows_the_frames_that_come_again(self, moved):
        sent = [loss_frame(step) for step in (*STEPS, 60)]
        receipt = moved.send_ok("aa11", sent, attempt=2)
        assert (receipt["accepted"], receipt["duplicates"]) == (7, 6)  # 0 to 25 are of the first attempt
        receipt = moved.send_ok("aa11", sent, attempt=1)
        assert (receipt["accepted"], receipt["duplicates"]) == (1, 12)

    def test_has_what_fired_until_the_run_ends_and_not_what_was_pending(self, api):
        (alert,) = api.send_ok("aa11", [loss_frame(step, 1.0) for step in (60, 61, 62)], attempt=2)["alerts"]
        told = ("state", "firing_step", "rule_version", "resolved_reason", "acknowledged_at", "silenced")
        assert [alert[name] for name in told] == ["firing", 45, None, None, None, False]
        assert alert["advice"] == {"text": "stop"}
        assert api.get("/alerts")["alerts"] == [alert]
        api.http.patch("/api/v1/runs/aa11", json={"state": "finished"})
        assert states(api.get("/alerts")["alerts"]) == [("resolved", 35, 45, 62)]

    def test_can_do_what_came_since(self, api):
        assert api.get("/runs/aa11")["frozen_blocks"] == []
        assert api.get("/runs/aa11")["stacks"] == [{"name": "", "blocks": 2, "first_block": 0, "first_state": 0}]
        assert api.get("/runs/aa11")["not_measured"] == {}
        assert api.get("/runs/aa11")["quantities"] == {}
        path = "/api/v1/alerts/1/ack"
        assert api.http.post(path, json={"by": "on-call"}).json()["state"] == "acknowledged"
        with api.app.state.parts.store.write() as writer:
            assert writer.progress.of("aa11", 2) is None
            assert writer.runs.model("aa11", 1) == (frozenset(), Stacks.of(2))
            writer.progress.keep("aa11", 2, Progress(read_to=5))

    def test_is_upgraded_once(self, api):
        Store(api.database.url).close()
        assert len(api.database.execute("SELECT version_num FROM alembic_version")) == 1
        assert api.get("/runs/aa11")["num_frames"] == 18
