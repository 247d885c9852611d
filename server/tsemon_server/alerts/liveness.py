"""Time-based rules: is the process of each running attempt silent, stuck, slow, or well?

    silent   the process sends nothing, not even a heartbeat
    stuck    it sends something, and its step does not change
    slow     it steps, at a pace that is not its own

Nobody is called silent by a service that could not hear: after a start, and after a time in which the service itself stood
still or had no database, it listens first, and counts from there. What it saw before it remembers: an alert that fires
continues, and is over only when the process sends something.
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
from tsemon_server.store.ledger.attempts import HEARD_S, LEASE_S
from tsemon_server.store.ledger.liveness import RunningAttempt, Watched
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
"""How often the memory of an attempt without events is stored."""
ATTEMPTS_PER_COMMIT = 100
REPLACED_AFTER_S = 600.0
"""An earlier attempt that was killed while a later one lived keeps its alert for so long."""

_Which = tuple[str, int]
"""A run and an attempt."""


@dataclass
class _Attempt:
    """The memory of one attempt."""

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
            evidence=_by_second(event.evidence, step) | {"left_step": pending_step},
        )


def _which(found: RunningAttempt | Watched) -> _Which:
    return found.run_id, found.attempt


def _scalars(found: RunningAttempt, attempt: _Attempt, now: float) -> dict[str, float]:
    return {**attempt.pulse.scalars(now), "unevaluated_frames": float(found.num_skipped or 0)}


def _step(found: RunningAttempt) -> int:
    """The step for alerts. For an earlier attempt it is the last one that the rules have read."""
    return max(found.read_to or 0, 0) if found.process_step is None else found.process_step


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
        self._attempts: dict[_Which, _Attempt] = {}
        self._began_at = self._looked_at = -math.inf

    def look(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """One round. The next one is a start where this one raises StoreError, or is stopped: what is not written down is
        not to be remembered."""
        is_written = False
        try:
            is_written = self._look(self._monotonic(), is_stopped)
        finally:
            if not is_written:
                self._attempts.clear()
                self._looked_at = -math.inf

    def _look(self, now: float, is_stopped: Callable[[], bool]) -> bool:
        if now - self._looked_at > MAX_GAP_S:
            self._began_at = now
            self._attempts.clear()
        with self._store.read() as reader:
            running = reader.liveness.running(self._clock() - HEARD_WITHIN_S)
            in_force = self._active.of_projects(reader.rules, {found.project for found in running})
            self._meet(reader, running, in_force, now)
        for found in running:
            attempt = self._attempts[_which(found)]
            attempt.follow(in_force[found.project])
            attempt.pulse.look(now, found.heard_at, found.process_step)
        self._looked_at = now
        return now - self._began_at < self._listen_s or self._judge(running, now, is_stopped)

    def _meet(
        self, reader: Reader, running: Sequence[RunningAttempt], in_force: Mapping[str, InForce], now: float
    ) -> None:
        """Forget attempts that do not run any more, and load the stored memory of new ones."""
        known = {_which(found): found for found in running}
        self._attempts = {which: attempt for which, attempt in self._attempts.items() if which in known}
        new = [which for which in known if which not in self._attempts]
        run_ids = sorted({run_id for run_id, _ in new})
        kept = {_which(watched): watched for part in _parts(run_ids) for watched in reader.liveness.watched(part)}
        for which in new:
            self._attempts[which] = _attempt(in_force[known[which].project], kept.get(which), now)

    def _judge(self, running: Sequence[RunningAttempt], now: float, is_stopped: Callable[[], bool]) -> bool:
        """Let the rules look at them; whether what came of it is written down."""
        self._end_replaced(running, now)
        changed: list[tuple[RunningAttempt, list[Event]]] = []
        for found in running:
            if found.is_replaced:
                continue
            attempt = self._attempts[_which(found)]
            view = View(attempt.tick(now), _scalars(found, attempt, now))
            events = attempt.in_force.on_clock.advance(attempt.state, view)
            if events or self._is_due(attempt, now):
                changed.append((found, events))
        for part in _parts(changed):
            if is_stopped():
                return False
            with self._store.write() as writer:
                # Held in the order in which the bodies of frames hold them.
                there = [(found, events) for found, events in part if writer.runs.hold(found.run_id)]
                writer.liveness.keep([self._noted(writer, found, events, now) for found, events in there])
        return True

    def _end_replaced(self, running: Sequence[RunningAttempt], now: float) -> None:
        """Mark silent earlier attempts as replaced: after a restart when the lease ends, after a kill later."""
        heard_since = self._clock() - LEASE_S - HEARD_S
        silent = [
            found
            for found in running
            if (found.is_replaced and found.heard_at < heard_since)
            or (found.followed_at is not None and self._silence_s(found, now) >= REPLACED_AFTER_S)
        ]
        for part in _parts(silent):
            with self._store.write() as writer:
                for found in part:
                    if writer.runs.hold(found.run_id):
                        writer.runs.replace_silent(found.run_id, found.attempt, found.attempt)

    def _silence_s(self, found: RunningAttempt, now: float) -> float:
        return self._attempts[_which(found)].pulse.scalars(now)["silent_seconds"]

    def _is_due(self, attempt: _Attempt, now: float) -> bool:
        """Whether to store the memory of an attempt without events."""
        is_quiet = all(track.state == "quiet" for track in attempt.state.tracks)
        return now - attempt.kept_at >= (KEEP_S if is_quiet else 0)

    def _noted(self, writer: Writer, found: RunningAttempt, events: Sequence[Event], now: float) -> Watched:
        attempt = self._attempts[_which(found)]
        attempt.kept_at = now
        if events and writer.liveness.is_running(found.run_id, found.attempt):
            book = AlertBook(writer.alerts, found.run_id, found.attempt, attempt.in_force)
            for event in events:
                book.enter(attempt.by_step(event, _step(found)))
            book.close()
        pulse = attempt.pulse.to_json(now) | {"alerts": attempt.alerts}
        return Watched(found.run_id, found.attempt, pulse, attempt.in_force.on_clock.dump(attempt.state))


def _attempt(in_force: InForce, kept: Watched | None, now: float) -> _Attempt:
    evaluator = in_force.on_clock
    state = evaluator.start()
    if kept is None:
        return _Attempt(in_force, Pulse(now), state, now, 0)
    with suppress(UnreadableState):  # of another version
        state = evaluator.load(kept.rules)
    tick = 0 if state.last_step is None else state.last_step + 1
    return _Attempt(in_force, Pulse(now, kept.pulse), state, now, tick, dict(kept.pulse.get("alerts", {})))


def _parts(entries: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (entries[start : start + ATTEMPTS_PER_COMMIT] for start in range(0, len(entries), ATTEMPTS_PER_COMMIT))
