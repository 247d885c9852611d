"""A database with the tables and columns of each earlier version is whole after a start, and has all it had.

Its rows are made by today's code: a change of how frames are packed would not show here.
"""

import json
from contextlib import closing
from itertools import groupby

import numpy as np
import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text

from tests.databases import ENGINES, with_driver
from tests.server.frames import frames_of_a_long_run
from tests.server.store.contract.test_frames import exactly, values_of, written_out
from tests.server.test_admin import admin_of_url
from tests.server.test_migrations import upgrade
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.store import Store
from tsemon_server.store.engine import MIGRATIONS
from tsemon_server.store.ledger.liveness import Watched
from tsemon_server.store.ledger.retention import Retention
from tsemon_server.store.series.frames import HotFrame
from tsemon_server.store.series.packing import layout_id, pack
from tsemon_server.store.series.settling import marked, packed
from tsemon_server.store.streams import Stream

REVISIONS = sorted(script.revision for script in ScriptDirectory(MIGRATIONS).walk_revisions())
RUN, GONE = "aa11", "dd44"
FRAMES = [*frames_of_a_long_run(200)]
NUM_SETTLED, RESUME_AT = 120, 150
OF_ATTEMPTS = {1: FRAMES[:180], 2: FRAMES[RESUME_AT:]}
"""The second attempt begins with the 150th frame."""
KURTOSIS = {"axis": "block", "title": "tails", "equation": "", "unit": "1", "low": 0.0, "high": None, "log_scale": True}


class Old:
    """A database of an earlier version, past the store. `columns` says what the version had."""

    def __init__(self, database, connection):
        self.database, self._connection = database, connection
        self.columns = {
            table: {column["name"] for column in inspect(connection).get_columns(table)}
            for table in inspect(connection).get_table_names()
        }

    def insert(self, table, **values):
        """As far as the version had the table and its columns."""
        if table in self.columns:
            known = {name: value for name, value in values.items() if name in self.columns[table]}
            columns, places = ", ".join(known), ", ".join(f":{name}" for name in known)
            self._connection.execute(text(f"INSERT INTO {table} ({columns}) VALUES ({places})"), known)


def fill(old):
    """A run in two attempts, part of whose frames have settled where there were segments, and one that is deleted."""
    last = FRAMES[-1]
    has_segments = "segment" in old.columns
    about = {"project": "pretrain", "run": "gpt", "state": "running", "config": '{"lr":0.1}', "tags": '["old"]'}
    about |= {"quantities": json.dumps({"kurtosis": KURTOSIS})}
    newest = {"last_attempt": 2, "last_writer": "w", "last_seq": last.seq, "last_step": last.step}
    heard = {"created_at": 1000.5, "updated_at": 2000.5, "process_step": last.step, "stepped_at": 1900.0}
    newest |= {"loss": last.scalars["loss"], "latest": json.dumps({"time": last.time, "scalars": last.scalars})}
    num_frames = sum(map(len, OF_ATTEMPTS.values()))
    old.insert("run", run_id=RUN, attempt=2, num_frames=num_frames, **about, **newest, **heard)
    old.insert("tally", run_id=RUN, num_frames=num_frames)
    start = FRAMES[RESUME_AT].step
    for attempt, resume_step, hidden_from in ((1, None, start), (2, start, 2**63 - 1)):
        row = {"run_id": RUN, "attempt": attempt, "attempt_key": f"key{attempt}", "resume_step": resume_step}
        row |= {"hidden_from": hidden_from, "blocks": '["h.0","h.1"]', "started_at": 1000.0 + attempt}
        stacks = '[{"name":"all","blocks":2}]'
        old.insert("attempt", **row, stacks=stacks, frozen_blocks="[1]", not_measured="{}")
    for attempt, frames in OF_ATTEMPTS.items():
        settled = frames[:NUM_SETTLED] if has_segments and attempt == 1 else []
        fill_frames(old, Stream(RUN, attempt, "w"), frames, {frame.seq for frame in settled})
    if has_segments:
        fill_frames(old, Stream(GONE, 1, "w"), FRAMES[:9], ())
        old.insert("tombstone", run_id=GONE)
    fill_alerts(old)
    fill_rules(old)
    old.insert("retention", project="pretrain", samples_s=None, rollups_s=None, runs_s=1e9)
    of_token = {"name": "ci", "digest": "d" * 64, "scopes": '["read"]', "project": None, "created_at": 1000.0}
    old.insert("token", token_id="t1", **of_token)


def fill_frames(old, stream, frames, settled):
    hot, layouts = [], {}
    for frame in frames:
        layout, blob, crcs = pack(frame)
        number = layout_id(layout.slots)
        layouts[number] = layout
        hot.append(HotFrame(stream.attempt, stream.writer, frame.seq, frame.step, frame.time, number, blob, crcs))
    for number, layout in layouts.items() if stream.attempt == 1 else ():
        for slot in layout.slots:
            old.insert("layout", run_id=stream.run_id, layout_id=number, **slot._asdict())
    for frame in hot:
        if frame.seq not in settled:
            old.insert("frame", run_id=stream.run_id, **frame._asdict())
    if settled:
        segment = packed(stream, [frame for frame in hot if frame.seq in settled], layouts)
        about = {"number": 0, "num_chunks": len(segment.chunks), "settled_at": 1500.0, "finest": "samples"}
        old.insert("segment", **segment.row, **about)
        for chunk in segment.chunks:
            old.insert("chunk", **chunk, number=0)
        for page, seqs in groupby(sorted(settled), key=lambda seq: seq // 512):
            old.insert("settled", **stream._asdict(), page=page, seqs=marked(bytes(64), seqs))


def fill_alerts(old):
    row = {"run_id": RUN, "attempt": 2, "rule": "high-loss", "family": "loss", "severity": "warning", "summary": "high"}
    row |= {"evidence": "{}", "advice": "{}", "opened_at": 1035.0, "updated_at": 1045.0, "rule_version": 1}
    steps = {"pending_step": 35, "firing_step": 45}
    old.insert("alert", **row, **steps, state="firing", acknowledged_at=1046.0, acknowledged_by="ada", note="seen")
    silence = {"rule": "other", "until": 4e9, "created_at": 1000.0, "created_by": "ada", "reason": "known"}
    old.insert("silence", **silence)
    old.insert("notice", alert_id=1, run_id=RUN, has_fired=True, queued_at=1045.0)
    sent = {"run_id": RUN, "alert_id": 1, "turn": 1, "kind": "firing", "receiver": "team", "topic": "t"}
    times = {"created_at": 1045.0, "changed_at": 1045.0, "sent_at": 1045.0}
    old.insert("delivery", **sent, **times, status="sent", is_held=False, attempts=1)


def _state(last_step, num_samples):
    """What rules remember that have no memory."""
    state = Evaluator(()).start()
    state.first_step, state.last_step, state.num_samples = 0, last_step, num_samples
    return Evaluator(()).dump(state)


def fill_rules(old):
    old.insert("rule_state", run_id=RUN, attempt=2, state=_state(35, 20), step=35, tracks="{}")
    old.insert(
        "rule_progress",
        run_id=RUN,
        attempt=2,
        revision=0,
        read_to=35,
        num_read=20,
        writers="{}",
        num_late=0,
        num_skipped=0,
    )
    for step, num_read in ((30, 15), (35, 20)) if "rule_progress" in old.columns else ((30, 15),):
        state = _state(step, num_read)
        old.insert("rule_checkpoint", run_id=RUN, attempt=2, step=step, num_read=num_read, state=state)
    version = {"name": "mine", "version": 1, "origin": "edited", "enabled": True, "digest": "d", "definition": "{}"}
    old.insert("rule_version", **version, created_at=1000.0)
    if "project" in old.columns.get("rule_version", ()):
        old.insert("rule_version", **version | {"version": 2, "project": "pretrain"}, created_at=1001.0)
    old.insert("watched", run_id=RUN, attempt=2, pulse="{}", rules=b"state")


@pytest.fixture(params=ENGINES)
def engine(request):
    """Those that earlier versions wrote to."""
    return request.param


@pytest.fixture(params=REVISIONS)
def old(request, empty_database):
    upgrade(empty_database, request.param)
    engine = create_engine(with_driver(empty_database.url))
    with engine.begin() as connection:
        old = Old(empty_database, connection)
        fill(old)
    engine.dispose()
    return old


@pytest.mark.both_engines
class TestADatabaseOfEachEarlierVersion:
    def test_is_whole_and_has_all_it_had(self, old):
        has = {*old.columns}
        with closing(Store(old.database.url)) as store:
            findings = []
            (checked,) = store.check(findings.append)
            assert findings == []
            assert checked.num_hot + checked.num_settled == 230
            assert checked.num_settled == (NUM_SETTLED if "segment" in has else 0)
            self.has_its_run(store, has, old.columns)
            self.has_its_frames(store)
            self.has_what_came_with_its_version(store, has)
            self.has_its_rules(store, old.columns.get("rule_version", ()))
            self.goes_on(store)
            assert old.database.execute(f"SELECT count(*) FROM frame WHERE run_id = '{GONE}'") == [(0,)]
        code, shown = admin_of_url(old.database.url)("check")
        assert (code, "all is whole" in shown) == (0, True)

    def has_its_run(self, store, has, columns):
        with store.read() as reader:
            run = reader.runs.detail(RUN)
        assert (run.run, run.num_frames, run.last_step, run.attempt) == ("gpt", 230, FRAMES[-1].step, 2)
        assert (run.config, run.tags, run.attempts[0].resume_step) == ({"lr": 0.1}, ["old"], None)
        assert run.latest.time == FRAMES[-1].time
        assert run.latest.scalars.keys() == FRAMES[-1].scalars.keys()
        own = {name: quantity.model_dump() for name, quantity in run.quantities.items()}
        assert own == ({"kurtosis": KURTOSIS} if "quantities" in columns["run"] else {})
        assert [stack.name for stack in run.stacks] == ["all" if "stacks" in columns["attempt"] else ""]
        assert run.frozen_blocks == ([1] if "rule_checkpoint" in has else [])

    def has_its_frames(self, store):
        with store.read() as reader:
            assert exactly(reader.frames.export(RUN).frames()) == exactly(FRAMES)
            for attempt, frames in OF_ATTEMPTS.items():
                pieces = reader.frames.export(RUN, attempt=attempt).pieces()
                assert values_of(pieces) == dict(written_out(frames, attempt))
            found = reader.frames.metric(RUN, "layers", "token_similarity").points(10, ends_alone=True)
        assert found.cells.spans[:, 2].sum() == len(FRAMES)
        assert found.num_damaged == 0

    def has_what_came_with_its_version(self, store, has):
        with store.read() as reader:
            (alert,) = reader.alerts.find()
            assert (alert.state, alert.firing_step) == (("acknowledged" if "silence" in has else "firing"), 45)
            assert len(reader.silences.all()) == ("silence" in has)
            if "rule_checkpoint" in has:
                assert reader.progress.of(RUN, 2)[:3] == (0, 35, 20)
                assert reader.progress.checkpoint_steps(RUN, 2) == [(35, 20), (30, 15)]
                assert reader.progress.before(RUN, 2, 36).state == _state(35, 20)
            assert reader.liveness.watched([RUN]) == [Watched(RUN, 2, {}, b"state")] * ("watched" in has)
            assert reader.retention.all() == [Retention("pretrain", runs_s=1e9)] * ("retention" in has)
        assert len(store.notices.log()) == ("delivery" in has)
        assert (store.tokens.find("t1") is not None) == ("token" in has)

    def has_its_rules(self, store, columns):
        """Those of before are the whole server's."""
        with store.read() as reader:
            servers, of_project = reader.rules.newest(), reader.rules.newest("pretrain")
        assert [(v.name, v.version, v.project) for v in servers] == [("mine", 1, None)] * bool(columns)
        assert of_project == servers if "project" not in columns else [v.project for v in of_project] == ["pretrain"]

    def goes_on(self, store):
        """Frames are known when they come again, new ones are counted, and all of it settles."""
        new = [*frames_of_a_long_run(205)]
        with store.write() as writer:
            assert writer.frames.add(RUN, 1, "w", FRAMES[:180]).frames == []
            assert writer.frames.add(RUN, 2, "w", new[RESUME_AT:]).frames == new[200:]
            writer.runs.change(RUN, state="finished")
        assert store.settle() == 2
        store.purge()
        with store.read() as reader:
            assert reader.runs.get(RUN).num_frames == 235
            steps = reader.frames.metric(RUN, "scalars", "loss").samples().steps
        np.testing.assert_array_equal(steps, [frame.step for frame in new])
