"""From readings of single frames to pending, firing and resolved.

    quiet --met--> pending --met for the hold--> firing --clear for the hold--> quiet
                   pending --not met for the hold--> quiet

A frame between the two thresholds breaks either count. A frame that could not be read changes nothing: absence of
evidence neither opens nor closes an alert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["met", "clear", "between", "unknown"]
State = Literal["quiet", "pending", "firing"]
Kind = Literal["pending", "firing", "resolved", "withdrawn"]

WINDOW_SAMPLES = 8
"""How many of the last samples an event shows: enough to see a trend, few enough to read in a message."""


@dataclass(frozen=True)
class View:
    """One frame as rules see it. NaN is what could not be computed; a missing name is what was not measured."""

    step: int
    scalars: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, NDArray[np.floating[Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """What a rule says of one frame alone."""

    verdict: Verdict
    summary: str
    """One sentence for people."""
    evidence: dict[str, Any]
    """What the rule saw and held it against, as plain JSON."""
    sample: Mapping[str, float | None] = field(default_factory=dict)
    """The few numbers by which this frame is remembered in the window of later events."""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """How long a reading must last before it counts.

    Both bounds are needed, because cadences differ by a factor of 500. Samples alone: at every step, three samples
    are one model seen thrice. Steps alone: at every 500th step, a single odd batch would do.
    """

    samples: int = 3
    """So many samples in a row, the first and the last included. Two could still be one odd batch and its echo."""
    steps: int = 10
    """So many optimizer steps from the first to the last of them: three samples of the usual five-step cadence."""

    def is_reached(self, streak: Streak, step: int) -> bool:
        """Whether the streak has lasted long enough at `step`, its last sample."""
        return streak.samples >= self.samples and step - streak.since_step >= self.steps


class Rule(Protocol):
    """A frozen value with a pure method."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def severity(self) -> Literal["info", "warning", "critical"]: ...
    @property
    def advice(self) -> Mapping[str, str]:
        """What to try (`text`) and where that comes from (`source`)."""

    @property
    def hold(self) -> Hold: ...
    def read(self, view: View) -> Reading:
        """What this frame alone says; the same frame always gives the same reading."""


@dataclass(frozen=True)
class Streak:
    """Samples in a row that all speak for the same change."""

    towards: Kind
    since_step: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class Track:
    """All that is remembered of one rule on one run: stored between frames, so a restart loses nothing."""

    state: State = "quiet"
    pending_step: int | None = None
    firing_step: int | None = None
    last_step: int | None = None
    streak: Streak | None = None
    window: tuple[Mapping[str, float | None], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON. `Track.from_json` gives the same track again."""
        streak = self.streak and [self.streak.towards, self.streak.since_step, self.streak.samples]
        return {
            "state": self.state,
            "pending_step": self.pending_step,
            "firing_step": self.firing_step,
            "last_step": self.last_step,
            "streak": streak,
            "window": [dict(sample) for sample in self.window],
        }

    @classmethod
    def from_json(cls, obj: Mapping[str, Any] | None) -> Track:
        """Read a stored track; None, a run never looked at before, is a fresh one."""
        if obj is None:
            return cls()
        return cls(
            state=obj["state"],
            pending_step=obj["pending_step"],
            firing_step=obj["firing_step"],
            last_step=obj["last_step"],
            streak=Streak(*obj["streak"]) if obj["streak"] else None,
            window=tuple(obj["window"]),
        )


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change of an alert's state."""

    kind: Kind
    pending_step: int
    firing_step: int | None
    resolved_step: int | None
    """Where it ended; for a withdrawn alert too."""
    summary: str
    evidence: dict[str, Any]


def advance(rule: Rule, track: Track, view: View) -> tuple[Track, Event | None]:
    """Look at the next frame of a run: the track afterwards, and the change if there was one.

    A frame whose step is not after the last one changes nothing. A new attempt of a run starts with a fresh track.
    """
    if track.last_step is not None and view.step <= track.last_step:
        return track, None
    reading = rule.read(view)
    window = (*track.window, {"step": view.step, **reading.sample})[-WINDOW_SAMPLES:]
    track = replace(track, last_step=view.step, window=window)
    if reading.verdict == "unknown":
        return track, None
    towards = _towards(track.state, reading.verdict)
    if towards is None:
        return replace(track, streak=None), None
    streak = _extend(track.streak, towards, view.step)
    track = replace(track, streak=streak)
    if rule.hold.is_reached(streak, view.step):
        return _change(track, towards, reading)
    if track.state == "quiet":
        return _change(track, "pending", reading)
    return track, None


def _towards(state: State, verdict: Verdict) -> Kind | None:
    """The change that this verdict speaks for in this state."""
    if state == "firing":
        return "resolved" if verdict == "clear" else None
    if verdict == "met":
        return "firing"
    return "withdrawn" if state == "pending" else None


def _extend(streak: Streak | None, towards: Kind, step: int) -> Streak:
    if streak is None or streak.towards != towards:
        return Streak(towards, step, 1)
    return replace(streak, samples=streak.samples + 1)


def _change(track: Track, kind: Kind, reading: Reading) -> tuple[Track, Event]:
    step, streak = track.last_step, track.streak
    assert step is not None
    assert streak is not None
    pending_step = step if track.pending_step is None else track.pending_step
    event = Event(
        kind=kind,
        pending_step=pending_step,
        firing_step=step if kind == "firing" else track.firing_step,
        resolved_step=step if kind in ("resolved", "withdrawn") else None,
        summary=reading.summary,
        evidence={
            **reading.evidence,
            "held": {"since_step": streak.since_step, "samples": streak.samples, "steps": step - streak.since_step},
            "window": [dict(sample) for sample in track.window],
        },
    )
    if kind == "pending":
        return replace(track, state="pending", pending_step=pending_step), event
    if kind == "firing":
        return replace(track, state="firing", pending_step=pending_step, firing_step=step, streak=None), event
    return Track(last_step=step, window=track.window), event
