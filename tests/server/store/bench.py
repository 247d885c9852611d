"""The store without HTTP, on each engine that keeps frames. A further engine is a further name in ENGINES."""

from contextlib import contextmanager

import numpy as np

from tests.databases import SqliteFile
from tests.server.store.memory import MemorySeries
from tsemon_answers.alerts import AlertsQuery
from tsemon_answers.runs import RunFilter
from tsemon_server.alerts import ActiveRules, Watch
from tsemon_server.services.queries.reduce import bucketed
from tsemon_server.store import Store
from tsemon_server.store.engine import Unit
from tsemon_server.store.series.sql import SqlSeries
from tsemon_server.store.streams import Stream

ENGINES = ("sqlite", "postgresql", "memory")


class Engine:
    """A ledger in a database, and an engine for frames that may be part of it."""

    def __init__(self, name, database, series=SqlSeries):
        self.name, self.database, self._series = name, database, series
        self.shares_transactions = series is SqlSeries

    def open(self, *clock):
        """As one process does; others may have opened it, too."""
        return Store(self.database.url, *clock, series=self._series)


@contextmanager
def opened(name, folder, postgresql_server=None):
    """A new one that is empty."""
    if name == "postgresql":
        with postgresql_server.borrowed() as database:
            yield Engine(name, database)
        return
    database = SqliteFile(folder / "tsemon.db")
    database.migrate()
    if name == "sqlite":
        yield Engine(name, database)
    else:
        series = MemorySeries()
        yield Engine(name, database, lambda _: series)


class Bench:
    """The shortest way from frames to charts."""

    def __init__(self, engine, store, rules=()):
        self.engine, self.store = engine, store
        self.watch = Watch(ActiveRules(rules))

    def register(self, run="gpt", num_blocks=2, resume_step=None, attempt_key=None):
        blocks = [f"h.{number}" for number in range(num_blocks)]
        about = {"config": None, "tags": None, "resume_step": resume_step, "attempt_key": attempt_key}
        with self.store.write() as writer:
            return writer.runs.register("p", run, blocks=blocks, **about).run_id

    def send(self, run_id, frames, writer="w", attempt=1):
        """The number of frames that were new."""
        with self.store.write() as write:
            added = write.frames.add(run_id, attempt, writer, frames)
            if added.unread:
                self.watch.observe(write, run_id, attempt, writer, added.unread)
        return len(added.frames)

    def send_rows(self, run_id, rows, writer="w", attempt=1):
        with self.store.write() as write:
            write.frames.add_rows(run_id, attempt, writer, [rows])

    def send_without_a_word(self, run_id, frames, writer="w", attempt=1):
        """What an engine of its own does before its process ends: it commits the frames, and the ledger nothing."""
        with self.store._database.writing() as connection:
            self.store._series.add(Unit(connection), Stream(run_id, attempt, writer), frames)

    def fill(self, run_id, frames, **where):
        frames = list(frames)
        for start in range(0, len(frames), 100):
            self.send(run_id, frames[start : start + 100], **where)

    def end(self, run_id):
        with self.store.write() as writer:
            writer.runs.change(run_id, state="finished")

    def delete(self, run_id):
        with self.store.write() as writer:
            writer.runs.delete(run_id)

    def keep(self, retention):
        with self.store.write() as writer:
            writer.retention.keep(retention)
        self.store.expire()

    def findings(self):
        found = []
        checked = list(self.store.check(found.append))
        return checked, found

    # What is asked

    def detail(self, run_id):
        with self.store.read() as reader:
            return reader.runs.detail(run_id).model_dump()

    def runs(self):
        with self.store.read() as reader:
            return reader.runs.find(RunFilter(), order="name", limit=99)

    def alerts(self, run_id):
        with self.store.read() as reader:
            return reader.alerts.find(AlertsQuery(run_id=run_id))

    def samples(self, run_id, kind, metric, **where):
        with self.store.read() as reader:
            return reader.frames.metric(run_id, kind, metric, **where).samples()

    def losses(self, run_id, **where):
        series = self.series(run_id, "loss", points=10_000, **where)
        return dict(zip(series["step"], series["mean"], strict=True))

    def series(self, run_id, metric, *, layer=None, head=None, points=1000, **where):
        kind = "scalars" if layer is None else "layers" if head is None else "heads"
        with self.store.read() as reader:
            found = reader.frames.metric(run_id, kind, metric, entry=(layer or 0, head or 0), **where)
            found = found.points(points, ends_alone=True)
        spans, stats = bucketed(found, ends_alone=True)
        least, mean, most, num_finite = stats[:, 0].T
        return {
            "step": ((spans[:, 0] + spans[:, 1]) // 2).tolist(),
            "min": _nullable(least),
            "mean": _nullable(mean),
            "max": _nullable(most),
            "nonfinite": (spans[:, 2] - num_finite).astype(int).tolist(),
            "damaged": found.num_damaged,
        }

    def heatmap(self, run_id, metric, *, columns=200, **where):
        with self.store.read() as reader:
            num_layers = reader.frames.recorded(run_id).layers.get(metric, 0)
            found = reader.frames.metric(run_id, "layers", metric, **where).points(columns, ends_alone=False)
        spans, stats = bucketed(found, ends_alone=False)
        return {
            "step": ((spans[:, 0] + spans[:, 1]) // 2).tolist(),
            "layers": stats.shape[1] if len(spans) else num_layers,
            "values": [_nullable(column) for column in stats[..., 1]],
            "samples": spans[:, 2].tolist(),
            "damaged": found.num_damaged,
        }


def _nullable(values):
    return [value if np.isfinite(value) else None for value in values.tolist()]
