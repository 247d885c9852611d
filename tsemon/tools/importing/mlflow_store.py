"""MLflow's SQLite stores, opened read-only: a run's metrics are rows in the order in which they were logged."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from tsemon.tools.importing.source import Found, Log, Notes, Row, SourceRun, as_time, digest, some

_INFINITE = 1.7976931348623157e308
"""What MLflow writes for an infinity, since its databases have none."""


def find_runs(path: Path) -> Found:
    """The runs of a store that are not deleted."""
    try:
        with contextlib.closing(_opened(path)) as store:
            return Found(_runs(path, store), [])
    except sqlite3.Error as error:
        return Found([], [f"{path} cannot be read as a store of MLflow: {error}"])


def _opened(path: Path) -> sqlite3.Connection:
    store = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)
    store.text_factory = lambda data: data.decode(errors="replace")
    return store


def _runs(path: Path, store: sqlite3.Connection) -> list[SourceRun]:
    rows = store.execute(
        "SELECT r.run_uuid, r.name, e.name, r.status FROM runs r JOIN experiments e ON e.experiment_id = r.experiment_id "
        "WHERE r.lifecycle_stage = 'active' ORDER BY e.experiment_id, r.start_time, r.run_uuid"
    ).fetchall()
    runs = []
    used: Counter[tuple[str, str]] = Counter()
    for run_uuid, name, experiment, status in rows:
        params = dict(store.execute("SELECT key, value FROM params WHERE run_uuid = ? ORDER BY key", (run_uuid,)))
        tags = dict(store.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run_uuid,)))
        title = name or tags.get("mlflow.runName") or run_uuid
        used[experiment, title] += 1
        if used[experiment, title] > 1:  # the oldest keeps the name: it may have been imported before there were others
            title = f"{title} {run_uuid[:8]}"
        (size,) = store.execute("SELECT count(*) FROM metrics WHERE run_uuid = ?", (run_uuid,)).fetchone()
        runs.append(
            SourceRun(
                kind="mlflow",
                key=digest("mlflow", run_uuid),
                where=f"{path}, run {run_uuid}",
                project=experiment,
                name=title,
                config=params,
                tags=[f"{key}={value}" for key, value in sorted(tags.items()) if not key.startswith("mlflow.")],
                state="failed" if status in ("FAILED", "KILLED") else "finished",
                logs=[MetricRows(path, run_uuid, size)],
            )
        )
    return runs


class MetricRows(Log):
    """One run's rows in the table `metrics`."""

    def __init__(self, path: Path, run_uuid: str, size: int) -> None:
        self.name = run_uuid
        self.size = size
        self._path = path

    def rows(self, notes: Notes) -> Iterator[Row]:
        try:
            with contextlib.closing(_opened(self._path)) as store:
                unnumbered = _unnumbered(store, self.name)
                if unnumbered:
                    notes.remark(f"logged without a step, so their order is the step: {some(sorted(unnumbered))}")
                found = store.execute(
                    "SELECT key, value, timestamp, step, is_nan FROM metrics WHERE run_uuid = ? ORDER BY rowid",
                    (self.name,),
                )
                for ordinal, (key, value, timestamp_ms, step, is_nan) in enumerate(found):
                    if key in unnumbered:
                        step, unnumbered[key] = unnumbered[key], unnumbered[key] + 1
                    known = notes.step(step, str(key))
                    if known is not None and not isinstance(value, int | float):
                        notes.leave_out("values that are no numbers", str(key))
                    elif known is not None:
                        number = (
                            math.nan if is_nan else math.copysign(math.inf, value) if abs(value) >= _INFINITE else value
                        )
                        seconds = timestamp_ms / 1e3 if isinstance(timestamp_ms, int | float) else None
                        yield Row(ordinal, known, as_time(seconds, 0.0), [(str(key), float(number))], ordinal + 1)
        except sqlite3.Error as error:
            notes.damage(f"{self._path}, run {self.name}: {error}; what is before it is imported")


def _unnumbered(store: sqlite3.Connection, run_uuid: str) -> dict[str, int]:
    """The metrics with several values, all of them at step 0: `log_metric` without `step=`."""
    found = store.execute(
        "SELECT key FROM metrics WHERE run_uuid = ? GROUP BY key HAVING count(*) > 1 AND min(step) = 0 AND max(step) = 0",
        (run_uuid,),
    )
    return dict.fromkeys((key for (key,) in found), 0)
