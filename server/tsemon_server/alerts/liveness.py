"""Lets the rules on the clock look at each running run: is its process silent, stuck, slow, or well?

    silent   nothing is heard of the process, not even a heartbeat
    stuck    it is heard of, and its step does not change
    slow     it steps, at a pace that is not its own

Nobody is called silent by a service that could not hear: after a start, and after a time in which the service itself stood
still or had no database, it listens first, and counts from there. What it saw before it remembers: an alert that fires
goes on, and is over only when the run is heard of.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from tsemon_server.alerts.active import ActiveRules, InForce
from tsemon_server.alerts.book import AlertBook
from tsemon_server.alerts.pulse import Pulse
from tsemon_server.rules.evaluator import Event
from tsemon_server.rules.program import View
from tsemon_server.rules.state import State, UnreadableState
from tsemon_server.store import Store
from tsemon_server.store.ledger.liveness import RunningRun, Watched
from tsemon_server.store.reading import Reader
from tsemon_server.store.writing import Writer

LOOK_EVERY_S = 10.0
"""Between two looks."""
LISTEN_S = 60.0
"""How long the service listens before it judges: twice the time between two heartbeats."""
MAX_GAP_S = 45.0
"""After so long without a look the service itself was away."""
HEARD_WITHIN_S = 7 * 86_400.0
"""Runs that have been silent for longer are left as they are."""
KEEP_S = 300.0
"""How often it is written down what is remembered of a run of which there is nothing to say."""
RUNS_PER_COMMIT = 100


@dataclass
class _Run:
    """One attempt of a run."""

    attempt: int
    in_force: InForce
    pulse: Pulse
    state: State
    began_at: float
    began_tick: int
    """Rules count seconds, without those in which nobody looked."""
    alerts: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """Of each rule whose alert is open: at which optimizer steps it became pending, and fired."""
    kept_at: float = -math.inf

    def tick(self, now: float) -> int:
        return self.began_tick + int(now - self.began_at)

    def follow(self, in_force: InForce) -> None:
        """Go by the rules in force: those that were edited since the last look begin anew, the others go on."""
        if in_force.on_clock is not self.in_force.on_clock:
            self.state = in_force.on_clock.load(self.in_force.on_clock.dump(self.state))
        self.in_force = in_force

    def by_step(self, event: Event, step: int) -> Event:
        """The event with optimizer steps in place of seconds, where alerts have steps."""
        pending_step, firing_step = self.alerts.pop(event.rule.name, (step, None))
        if event.kind == "firing":
            firing_step = step
        is_over = event.kind in ("resolved", "withdrawn")
        if not is_over:
            self.alerts[event.rule.name] = pending_step, firing_step
        return replace(
            event,
            pending_step=pending_step,
            firing_step=firing_step,
            resolved_step=step if is_over else None,
            evidence=_by_second(event.evidence, step),
        )


def _scalars(found: RunningRun, run: _Run, now: float) -> dict[str, float]:
    return {**run.pulse.scalars(now), "unevaluated_frames": float(found.num_skipped)}


def _by_second(evidence: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Of a rule on the clock: what it calls steps are seconds."""
    held, now = evidence["held"], evidence["step"]
    return {
        **evidence,
        "step": step,
        "held": {"samples": held["samples"], "seconds": held["steps"]},
        "window": [{"seconds": row["step"] - now} | _without(row, "step") for row in evidence["window"]],
    }


def _without(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


class Liveness:
    """Looks at the runs of `store`. `monotonic` is a clock that nobody sets, `clock` the one by which runs are dated."""

    def __init__(
        self,
        store: Store,
        active: ActiveRules,
        *,
        listen_s: float = LISTEN_S,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._active = active
        self._listen_s = listen_s
        self._clock, self._monotonic = clock, monotonic
        self._runs: dict[str, _Run] = {}
        self._began_at = self._looked_at = -math.inf

    def look(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """One round. The next one is a start where this one raises StoreError, or is stopped: what is not written down is
        not to be remembered."""
        is_written = False
        try:
            is_written = self._look(self._monotonic(), is_stopped)
        finally:
            if not is_written:
                self._runs.clear()
                self._looked_at = -math.inf

    def _look(self, now: float, is_stopped: Callable[[], bool]) -> bool:
        if now - self._looked_at > MAX_GAP_S:
            self._began_at = now
            self._runs.clear()
        with self._store.read() as reader:
            running = reader.liveness.running(self._clock() - HEARD_WITHIN_S)
            in_force = self._active.of_projects(reader.rules, {run.project for run in running})
            self._meet(reader, running, in_force, now)
        for found in running:
            self._runs[found.run_id].follow(in_force[found.project])
            self._runs[found.run_id].pulse.look(now, found.heard_at, found.process_step)
        self._looked_at = now
        return now - self._began_at < self._listen_s or self._judge(running, now, is_stopped)

    def _meet(self, reader: Reader, running: Sequence[RunningRun], in_force: Mapping[str, InForce], now: float) -> None:
        """Keep those that run, in the attempt that they are in; remember what was kept of the new ones."""
        known = {run.run_id: run for run in running}
        self._runs = {
            run_id: run
            for run_id, run in self._runs.items()
            if run_id in known and known[run_id].attempt == run.attempt
        }
        new = [run_id for run_id in known if run_id not in self._runs]
        kept = {watched.run_id: watched for part in _parts(new) for watched in reader.liveness.watched(part)}
        for run_id in new:
            found = known[run_id]
            self._runs[run_id] = _run(found.attempt, in_force[found.project], kept.get(run_id), now)

    def _judge(self, running: Sequence[RunningRun], now: float, is_stopped: Callable[[], bool]) -> bool:
        """Let the rules look at them; whether what came of it is written down."""
        self._end_superseded()
        changed: list[tuple[RunningRun, list[Event]]] = []
        for found in running:
            run = self._runs[found.run_id]
            events = run.in_force.on_clock.advance(run.state, View(run.tick(now), _scalars(found, run, now)))
            if events or self._is_due(run, now):
                changed.append((found, events))
        for part in _parts(changed):
            if is_stopped():
                return False
            with self._store.write() as writer:
                writer.liveness.keep([self._noted(writer, found, events, now) for found, events in part])
        return True

    def _end_superseded(self) -> None:
        with self._store.read() as reader:
            silent = reader.liveness.superseded(self._clock())
        for part in _parts(silent):
            with self._store.write() as writer:
                for found in part:
                    writer.runs.replace_silent(found.run_id, found.attempt)

    def _is_due(self, run: _Run, now: float) -> bool:
        """Whether it shall be written down what is remembered of a run of which there is nothing to say."""
        is_quiet = all(track.state == "quiet" for track in run.state.tracks)
        return now - run.kept_at >= (KEEP_S if is_quiet else 0)

    def _noted(self, writer: Writer, found: RunningRun, events: Sequence[Event], now: float) -> Watched:
        run = self._runs[found.run_id]
        run.kept_at = now
        if events and writer.liveness.is_running(found.run_id, found.attempt):
            book = AlertBook(writer.alerts, found.run_id, found.attempt, run.in_force.versions)
            for event in events:
                book.enter(run.by_step(event, found.process_step or 0))
            book.close()
        pulse = run.pulse.to_json(now) | {"alerts": run.alerts}
        return Watched(found.run_id, found.attempt, pulse, run.in_force.on_clock.dump(run.state))


def _run(attempt: int, in_force: InForce, kept: Watched | None, now: float) -> _Run:
    evaluator = in_force.on_clock
    state = evaluator.start()
    if kept is None or kept.attempt != attempt:
        return _Run(attempt, in_force, Pulse(now), state, now, 0)
    with suppress(UnreadableState):  # of another version
        state = evaluator.load(kept.rules)
    tick = 0 if state.last_step is None else state.last_step + 1
    return _Run(attempt, in_force, Pulse(now, kept.pulse), state, now, tick, dict(kept.pulse.get("alerts", {})))


def _parts(entries: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (entries[start : start + RUNS_PER_COMMIT] for start in range(0, len(entries), RUNS_PER_COMMIT))
