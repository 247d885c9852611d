"""Runs that a database holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from tsemon.errors import UnknownRun
from tsemon_answers.runs import RunFilter
from tsemon_server.rules.views import views_in_order
from tsemon_server.services.replay.recording import Attempt
from tsemon_server.store.reading import Reader


class StoredRun:
    """A run by its id, each attempt with all its frames: also those that a later one hides. Raises UnknownRun."""

    def __init__(self, reader: Reader, run_id: str) -> None:
        self.problems: list[str] = []
        self._reader = reader
        self._run = reader.runs.detail(run_id)
        self.name = self._run.run

    def attempts(self, own: Collection[str] = ()) -> Iterator[Attempt]:
        run_id, of = self._run.run_id, self._reader.frames
        for attempt in self._run.attempts:
            frames = of.export(run_id, attempt=attempt.attempt)
            in_order = (frame.to_wire() for frame in frames.frames())
            yield Attempt(
                attempt.resume_step or 0,
                views_in_order(
                    of.with_newest(run_id, attempt.attempt, in_order, -1, None, own) if own else in_order,
                    *self._reader.runs.model(run_id, attempt.attempt),
                ),
                partial(bool, attempt.state in ("finished", "failed")),
            )
            if frames.num_dropped:
                self._tell(attempt.attempt, f"{frames.num_dropped:,} values are gone by the project's retention")
            if frames.num_damaged:
                self._tell(attempt.attempt, f"{frames.num_damaged:,} values are damaged")

    def _tell(self, attempt: int, what: str) -> None:
        self.problems.append(f"run {self.name}, attempt {attempt}: {what}; the rules did not see them")


def find_run(reader: Reader, run: str) -> str:
    """The id of the run of this name, or else of this id. Raises UnknownRun."""
    named = reader.runs.find(RunFilter(run=run), order="-updated", limit=2)
    if len(named) > 1:
        raise UnknownRun(several(run, [found.project for found in named]))
    return named[0].run_id if named else reader.runs.get(run).run_id


def several(run: str, projects: Sequence[str]) -> str:
    return f"expected one run named {run!r}, but projects {' and '.join(projects)} have one each; give its id"
