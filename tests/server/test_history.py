"""Scalars of steps without a frame, over HTTP: taken, refused, read by rules, replayed, and drawn."""

import json
import math
import re

import pytest

import tsemon
from tests import zoo
from tests.server.conftest import loss_frame, problem
from tsemon.transport.packing import pack_frames
from tsemon.wire import MAX_ROWS, PACKED, Frame, Rows, frames_to_body
from tsemon_server.rules.documents import load
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.services.ingest.schemas import read_frames
from tsemon_server.services.ingest.usual import UsualFrames, read_json
from tsemon_server.services.replay.many import replay_files
from tsemon_server.services.replay.replaying import replay
from tsemon_server.services.replay.stored import StoredRun

TEXT = """
rules:
  - {name: poor, when: scalar("acc") < 0.5 for 1 sample, clear: scalar("acc") > 0.6 for 1 sample, severity: warning}
"""
OWN = load(TEXT)
ROWS = {"seq": 0, "step": [1, 2], "time": [1.5, 2.5], "scalars": {"loss": [2.5, None], "val/acc": [0.5, 1]}}


def body_of(*history, frames=(), **fields):
    return json.dumps({"writer": "w", "attempt": 1, "frames": list(frames), "history": list(history)} | fields).encode()


def rows(steps, seq=0, **columns):
    return Rows(seq, steps, [1000.0 + step for step in steps], columns)


@pytest.fixture
def run_id(api):
    return api.register()


def values_of(api, run_id, metric):
    series = api.get(f"/runs/{run_id}/series", metric=metric, points=10_000)
    return dict(zip(series["step"], series["mean"], strict=True))


class TestRows:
    def test_are_one_series_with_frames(self, api, run_id):
        api.send_ok(run_id, [loss_frame(0, 5.0), loss_frame(3, 4.0)])
        reply = api.post_raw(run_id, body_of(ROWS))
        assert (reply.status_code, reply.json()["accepted"], reply.json()["last_seq"]) == (200, 0, None)
        assert values_of(api, run_id, "loss") == {0: 5.0, 1: 2.5, 2: None, 3: 4.0}
        assert values_of(api, run_id, "val/acc") == {1: 0.5, 2: 1.0}
        assert {"loss", "val/acc"} <= {*api.get(f"/runs/{run_id}")["metrics"]["scalars"]}

    def test_sent_twice_are_stored_once_and_of_two_writers_twice(self, api, run_id):
        for writer in ("w", "w", "v"):
            assert api.post_raw(run_id, body_of(ROWS, writer=writer)).status_code == 200
        lines = api.http.get(f"/api/v1/runs/{run_id}/export", params={"format": "csv", "metric": "val/acc"}).text
        assert re.findall(r",([vw]),\d+,(\d),", lines) == [("v", "1"), ("v", "2"), ("w", "1"), ("w", "2")]

    def test_come_packed_as_well(self, api, run_id):
        texts = [loss_frame(0, 5.0).to_json(), rows([1, 2], loss=[2.5, math.inf]).to_json()]
        reply = api.post_raw(run_id, pack_frames("w", 1, texts), **{"Content-Type": PACKED})
        assert reply.json()["accepted"] == 1
        assert values_of(api, run_id, "loss") == {0: 5.0, 1: 2.5, 2: None}

    def test_tell_where_the_process_is_and_its_newest_loss(self, api, run_id):
        api.send_ok(run_id, [loss_frame(0, 5.0)])
        api.post_raw(run_id, body_of(ROWS | {"step": [7, 8], "scalars": {"loss": [2.5, 2.25]}}))
        run = api.get(f"/runs/{run_id}")
        assert (run["process_step"], run["loss"], run["last_step"], run["num_frames"]) == (8, 2.25, 0, 1)

    def test_are_in_the_export_and_in_comparisons(self, api, run_id):
        api.send_ok(run_id, [loss_frame(0, 5.0)])
        api.post_raw(run_id, body_of(ROWS))
        lines = api.http.get(f"/api/v1/runs/{run_id}/export", params={"format": "csv", "metric": "loss"}).text
        assert re.findall(r",(\d+),[^,]*,loss,,,(\S+)", lines) == [("0", "5.0"), ("1", "2.5"), ("2", "NaN")]
        (compared,) = api.get("/compare", run=run_id, metric="loss")["runs"]
        assert compared["step"] == [0, 1, 2]

    def test_of_many_steps_show_a_spike_in_few_points(self, api, run_id):
        for first in range(0, 8000, 4000):
            losses = [1e4 if step == 777 else 1.0 for step in range(first, first + 4000)]
            some = rows([*range(first, first + 4000)], first, loss=losses)
            assert api.post_raw(run_id, frames_to_body("w", 1, [some.to_json()])).status_code == 200
        series = api.get(f"/runs/{run_id}/series", metric="loss", points=100)
        assert max(series["max"]) == 1e4
        assert len(series["step"]) <= 100


def changed(**fields):
    return body_of(ROWS | fields)


BAD = {
    "another key": (changed(extra=1), "extra: Extra inputs are not permitted"),
    "no step": (body_of({name: value for name, value in ROWS.items() if name != "step"}), "step: Field required"),
    "no rows": (changed(step=[], time=[], scalars={"loss": []}), "step: List should have at least 1 item"),
    "no scalars": (changed(scalars={}), "scalars: Dictionary should have at least 1 item"),
    "fewer times": (changed(time=[1.5]), r"Steps, times and all scalars should have as many entries, not \[1, 2\]"),
    "fewer values": (changed(scalars={"loss": [1.0]}), r"should have as many entries, not \[1, 2\]"),
    "a step below 0": (changed(step=[-1, 2]), "step.*greater than or equal to 0"),
    "a step beyond all": (changed(step=[1, 2**53]), "step.*less than or equal to"),
    "a step true": (changed(step=[True, 2]), "step.*valid integer"),
    "a seq true": (changed(seq=True), "seq.*valid integer"),
    "a time below 0": (changed(time=[-1.0, 2.0]), "time.*greater than or equal to 0"),
    "a word for a number": (changed(scalars={"loss": [1.0, "low"]}), "expected a finite number.* got 'low'"),
    "NaN as it is": (changed(scalars={"loss": [1.0, math.nan]}), "expected a finite number"),
    "a list in a column": (changed(scalars={"loss": [1.0, [2.0]]}), "expected a finite number"),
    "a name with a control character": (changed(scalars={"a\x00b": [1.0, 2.0]}), "match pattern"),
    "a name without end": (changed(scalars={"a" * 129: [1.0, 2.0]}), "at most 128 characters"),
    "too many names": (changed(scalars={f"n{i}": [1.0, 2.0] for i in range(1001)}), "at most 1000 items"),
    "too many rows": (
        changed(step=[1] * 4097, time=[1.0] * 4097, scalars={"loss": [1.0] * 4097}),
        "at most 4096 items",
    ),
    "too many rows in all": (
        body_of(*[ROWS | {"step": [1] * 3000, "time": [1.0] * 3000, "scalars": {"loss": [1.0] * 3000}}] * 2),
        "A body should have at most 4096 rows, not 6000",
    ),
    "no list": (body_of(history={}), "history: Input should be a valid array"),
}


class TestWhatIsWrong:
    @pytest.mark.parametrize("what", BAD)
    def test_is_refused_with_its_reason_and_loses_nothing(self, api, run_id, what):
        body, reason = BAD[what]
        api.send_ok(run_id, [loss_frame(0, 5.0)])
        status, error, detail = problem(api.post_raw(run_id, body))
        assert (status, error) == (422, "invalid_frame")
        assert re.search(reason, detail), detail
        assert values_of(api, run_id, "loss") == {0: 5.0}

    def test_is_refused_with_the_frames_of_its_body(self, api, run_id):
        frame = {"seq": 1, "step": 1, "time": 1.0, "scalars": {"loss": 2.0}}
        assert api.post_raw(run_id, body_of(ROWS | {"step": [1]}, frames=[frame])).status_code == 422
        assert api.get(f"/runs/{run_id}")["num_frames"] == 0

    def test_is_a_name_too_many(self, api, run_id):
        for first in range(0, 10_000, 1000):
            names = {f"n{first + i}": [1.0, 2.0] for i in range(1000)}
            assert api.post_raw(run_id, body_of(ROWS | {"seq": 2 * first, "scalars": names})).status_code == 200
        status, _, detail = problem(api.post_raw(run_id, body_of(ROWS | {"seq": 10**6})))
        assert status == 422
        assert "metrics" in detail


class TestTheTwoReaders:
    @pytest.mark.parametrize("what", ["as it is", *BAD])
    def test_read_the_same(self, what):
        raw = body_of(ROWS) if what == "as it is" else BAD[what][0]

        def read(reader):
            try:
                return reader(raw).to_rows()
            except Exception as error:
                return str(error)

        found = read(read_json), read(read_frames)
        assert repr(found[0]) == repr(found[1])  # NaN is not NaN

    def test_are_one_for_usual_rows(self):
        assert type(read_json(body_of(ROWS, frames=[]))) is UsualFrames
        assert (
            len(
                read_json(
                    body_of(
                        ROWS | {"step": [1] * MAX_ROWS, "time": [1.0] * MAX_ROWS, "scalars": {"a": [1.0] * MAX_ROWS}}
                    )
                )
                .to_rows()[0]
                .steps
            )
            == MAX_ROWS
        )


class TestARuleOnTheUsersScalars:
    @pytest.fixture
    def api(self, start):
        return start(rules=OWN)

    def test_reads_those_of_steps_without_a_frame_with_the_next_one(self, api):
        run_id = api.register()
        api.send_ok(run_id, [Frame(0, 0, 1.0, {"loss": 1.0})])
        api.post_raw(run_id, frames_to_body("w", 1, [rows([3, 7], acc=[0.9, 0.4]).to_json()]))
        assert api.get("/alerts")["alerts"] == []
        api.send_ok(run_id, [Frame(1, 10, 1.0, {"loss": 1.0})])
        (alert,) = api.get("/alerts")["alerts"]
        assert (alert["rule"], alert["firing_step"], alert["state"]) == ("poor", 10, "firing")
        texts = [rows([15], 2, acc=[0.8]).to_json(), Frame(2, 20, 1.0, {"loss": 1.0}).to_json()]
        api.post_raw(run_id, frames_to_body("w", 1, texts))
        (alert,) = api.get("/alerts")["alerts"]
        assert (alert["state"], alert["resolved_step"]) == ("resolved", 20)
        with api.parts.store.read() as reader:
            (again,) = replay(StoredRun(reader, run_id), Evaluator(OWN)).alerts
        assert (again.firing_step, again.resolved_step) == (10, 20)

    def test_reads_them_though_frames_come_late(self, api):
        run_id = api.register()
        api.send_ok(run_id, [Frame(0, 0, 1.0, {"loss": 1.0}), Frame(3, 30, 1.0, {"loss": 1.0})])
        api.post_raw(run_id, frames_to_body("w", 1, [rows([7], acc=[0.4]).to_json()]))
        api.send_ok(run_id, [Frame(1, 10, 1.0, {"loss": 1.0})])
        (alert,) = api.get("/alerts")["alerts"]
        assert (alert["rule"], alert["firing_step"]) == ("poor", 10)

    def test_reads_them_in_a_spool(self, tmp_path):
        model, _ = zoo.torch_encoder()
        with tsemon.attach(model, run="r", every=20, spool_dir=tmp_path / "spool") as monitor:
            for step in range(50):
                monitor.step(loss=1.0, **({"acc": 0.4} if step == 33 else {}))
        (tmp_path / "rules.yaml").write_text(TEXT)
        (found,) = replay_files([tmp_path / "spool"], tmp_path / "rules.yaml", 1)
        assert [(alert.rule, alert.firing_step) for alert in found.alerts] == [("poor", 40)]
