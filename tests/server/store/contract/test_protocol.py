"""An engine, asked through its Protocol alone, answers as frames in a dict do, whatever was done in which order."""

import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import inspect

from tests.databases import SqliteFile
from tests.server.conftest import loss_frame
from tests.server.frames import frames_of_a_long_run
from tests.server.store.contract.test_frames import exactly, values_of
from tests.server.store.memory import MemorySeries
from tsemon.wire import Array, Frame
from tsemon_server.services.queries.reduce import bucketed
from tsemon_server.store.engine import Database, Unit
from tsemon_server.store.ledger import tables as ledger
from tsemon_server.store.series.settling import Sizes
from tsemon_server.store.series.sql import SqlSeries
from tsemon_server.store.streams import Address, At, Span, Standing, Stream

SIZES = Sizes(segment=6, kept=2)
ALL = [Span(1, 0, 99), Span(2, 0, 99)]
METRICS = (("scalars", "loss"), ("layers", "norm"), ("heads", "entropy"), ("scalars", "none"))


class SqlEngine:
    """The engine on a database that has no table of the ledger."""

    def __init__(self, url):
        self._database = Database(url)
        with self._database.writing() as connection:
            for table in {*ledger.run.metadata.tables} & {*inspect(connection).get_table_names()}:
                if table in vars(ledger):
                    connection.exec_driver_sql(f"DROP TABLE {table}")
            connection.exec_driver_sql("CREATE TABLE run (run_id TEXT)")  # a connection asks for this name
        self.series = SqlSeries(self._database)

    def close(self):
        self._database.close()

    @contextmanager
    def writing(self):
        with self._database.writing() as connection:
            unit = Unit(connection)
            yield unit
        for remember in unit.after_commit:
            remember()

    @contextmanager
    def reading(self):
        with self._database.reading() as connection:
            yield Unit(connection)


@contextmanager
def sqlite_engine():
    with tempfile.TemporaryDirectory() as folder:
        database = SqliteFile(Path(folder, "tsemon.db"))
        database.migrate()
        engine = SqlEngine(database.url)
        yield engine
        engine.close()


@contextmanager
def postgresql_engine(server):
    database = server.new_database()
    engine = SqlEngine(database.url)
    yield engine
    engine.close()
    server.drop(database)


numbers = st.sampled_from([0.0, 1.0, -2.5, float("nan"), float("inf"), 3e38])
frames = st.builds(
    lambda seq, step, loss, norm, depth: Frame(
        seq,
        step,
        100.0 + 2 * step,  # of one step alike, or it would matter which frame comes first
        {"loss": loss} if loss is not None else {},
        {"norm": Array.of([norm] * depth)} if depth else {},
        {"entropy": Array.of([norm, seq, 0.5, step], (2, 2))} if depth == 3 else {},
    ),
    seq=st.integers(0, 40),
    step=st.integers(0, 60),
    loss=st.none() | numbers,
    norm=numbers,
    depth=st.integers(0, 3),
)
streams = st.builds(Stream, run_id=st.sampled_from("ab"), attempt=st.integers(1, 2), writer=st.sampled_from("vw"))
deeds = st.lists(
    st.one_of(
        st.tuples(st.just("add"), streams, st.lists(frames, max_size=25)),
        st.tuples(st.just("settle"), st.booleans(), st.none() | st.integers(0, 2)),
        st.tuples(st.just("reduce"), st.sampled_from(["fine", "coarse"]), st.sampled_from("ab")),
        st.tuples(st.just("drop"), st.sampled_from("ab")),
    ),
    min_size=1,
    max_size=12,
)
spans = st.lists(
    st.builds(
        lambda of, first, length: Span(of, first, first + length),
        st.integers(1, 2),
        st.integers(0, 50),
        st.integers(0, 60),
    ),
    min_size=1,
    max_size=2,
    unique_by=lambda span: span.attempt,
)


class Pair:
    """The engine and the reference, to which the same is done."""

    def __init__(self, engine):
        self._engine, self.reference, self._now = engine, MemorySeries(), 1000.0
        self._dropped = set()

    def do(self, deed, *about):
        self._now += 1
        getattr(self, deed)(*about)

    def add(self, stream, frames):
        if stream.run_id in self._dropped:
            return
        with self._engine.writing() as unit:
            assert self._engine.series.add(unit, stream, frames) == self.reference.add(None, stream, frames)

    def settle(self, is_over, most):
        def standing(run_ids):
            return {run_id: Standing({2}, is_over, newest.get(run_id)) for run_id in run_ids}

        newest = {}
        for run_id in "ab":
            found = self.reference.newest(None, run_id, ALL)
            if found is not None:
                newest[run_id] = Address(Stream(run_id, found.attempt, found.writer), found.seq, found.step)
        done = []
        for series in (self._engine.series, self.reference):
            left = iter(range(10**6 if most is None else most))
            done.append(series.settle(standing, self._now, SIZES, lambda left=left: next(left, None) is None))
        assert done[0] == done[1]

    def reduce(self, left, run_id):
        found = [
            series.reduce(left, self._now, lambda run_ids: [run_id] if run_id in run_ids else [], lambda: False)
            for series in (self._engine.series, self.reference)
        ]
        assert found[0] == found[1]

    def drop(self, run_id):
        assert self._engine.series.drop(run_id, lambda: False)
        self.reference.drop(run_id, lambda: False)
        self._dropped.add(run_id)

    def check(self, run_id, visible, step):
        findings = []
        found = self._engine.series.check(run_id, findings.append)
        assert findings == []
        assert found[:4] == self.reference.check(run_id, None)[:4]
        with self._engine.reading() as unit:
            for series in (self._engine.series, self.reference):
                self._answers = [*getattr(self, "_answers", [])[-1:], self.answers(series, unit, run_id, visible, step)]
        for name, mine in self._answers[0].items():
            assert mine == self._answers[1][name], name

    def answers(self, series, unit, run_id, visible, step):
        """All that can be asked, in a form that can be compared."""
        export, again = series.export(unit, run_id, visible), series.export(unit, run_id, visible)
        newest = series.newest(unit, run_id, visible)
        at = series.at(unit, {run_id: At(step, 1)}).get(run_id, ())
        steps = np.array([0, step, 99])
        answers = {
            "known": dict(series.known(unit, run_id)),
            "newest": repr(None if newest is None else (*newest[:5], *newest.scalars.items())),
            "frames": exactly(frame for frame in export.frames() if not _is_empty(frame)),
            "pieces": values_of(again.pieces()),
            "missing": (export.num_damaged, again.num_damaged),
            "at": [(frame[:5], exactly([frame])) for frame in at if not _is_empty(frame)],
            "nearest": series.nearest(unit, run_id, visible, step),
            "live": self._live(series, unit, run_id),
            "seconds": repr(series.seconds_at(unit, run_id, visible, steps).tolist()),
            "backlog": series.backlog(unit, 1000),
            "run_ids": {of for _, of in series.run_ids(unit)},
        }
        for kind, metric in METRICS:
            for entry in (None, (0, 0), (1, 0)):
                found = series.read(unit, run_id, visible, kind, metric, entry)
                samples = found.samples()
                rows = sorted(zip(samples.steps.tolist(), map(repr, samples.values.tolist()), strict=True))
                answers[f"{metric} {entry}"] = rows, found.extent()
                answers[f"points of {metric} {entry}"] = buckets(found.points(5, ends_alone=True))
            answers[f"rows of {metric}"] = series.read(unit, run_id, ALL, kind, metric).num_rows()
        return answers

    def _live(self, series, unit, run_id):
        newest = self.reference.newest(None, run_id, [Span(attempt, 0, 10**6) for attempt in (1, 2)])
        if newest is None:
            return None
        address = Address(Stream(run_id, newest.attempt, newest.writer), newest.seq, newest.step)
        measured = series.live(unit, [address]).get(run_id, ())
        return [
            (
                one.writer,
                {name: repr(array) for arrays in one.values.values() for name, array in sorted(arrays.items())},
            )
            for one in measured
        ]


def buckets(points):
    """What charts get. Means are kept in float32."""
    cells = bucketed(points, ends_alone=True)
    return cells.spans.tolist(), [f"{value:.4g}" for value in cells.stats.ravel()]


def _is_empty(frame):
    """Of such a frame no engine need know whether retention has reduced it, for there is nothing of it to reduce."""
    return not (frame.scalars or frame.layers or frame.heads)


def compare(engine, deeds, run_id, visible, step):
    pair = Pair(engine)
    for deed in deeds:
        pair.do(*deed)
    pair.check(run_id, visible, step)


def told(max_examples):
    return settings(
        max_examples=max_examples,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


class TestAnEngineWithoutALedger:
    @given(deeds, st.sampled_from("ab"), spans, st.integers(0, 60))
    @told(40)
    def test_answers_as_the_reference_does(self, deeds, run_id, visible, step):
        with sqlite_engine() as engine:
            compare(engine, deeds, run_id, visible, step)

    def test_answers_as_the_reference_does_on_postgresql(self, postgresql_server):
        @given(deeds, st.sampled_from("ab"), spans, st.integers(0, 60))
        @told(5)
        def story(deeds, run_id, visible, step):
            with postgresql_engine(postgresql_server) as engine:
                compare(engine, deeds, run_id, visible, step)

        story()

    @pytest.mark.parametrize("is_over", [False, True])
    def test_answers_as_the_reference_does_of_a_long_run(self, is_over):
        stream = Stream("a", 1, "v")
        long = [*frames_of_a_long_run(400)]
        story = [("add", stream, long[:300]), ("settle", is_over, None), ("add", stream, long)]
        with sqlite_engine() as engine:
            compare(engine, [*story, ("add", Stream("a", 2, "w"), [loss_frame(7)])], "a", [Span(1, 50, 900)], 60)
