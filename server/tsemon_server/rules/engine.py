"""From verdicts on single frames to pending, firing and resolved.

    quiet --met--> pending --met for the hold--> firing --clear for the hold--> quiet
                   pending --not met for the hold--> quiet

A frame between the two thresholds breaks either count. A frame that could not be read changes nothing: absence of
evidence neither opens nor closes an alert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tsemon_server.rules.rule import Rule

Verdict = Literal["met", "clear", "between", "unknown"]
TrackState = Literal["quiet", "pending", "firing"]
Kind = Literal["pending", "firing", "resolved", "withdrawn"]
APPROACHES_WITHIN = 300
"""Steps from leaving the healthy range to a pending alert. A quantity that takes longer was only just outside of its range,
and its failure begins when the alert is pending."""


@dataclass
class Streak:
    """Samples in a row that all speak for the same change."""

    towards: Kind
    since_step: int
    samples: int


@dataclass
class Track:
    """All that is remembered of one rule on one run, besides its numbers."""

    state: TrackState = "quiet"
    pending_step: int | None = None
    firing_step: int | None = None
    judged_step: int | None = None
    """The last step at which all that it needs was there; None before there was one."""
    streak: Streak | None = None
    left_step: int | None = None
    """Before it is pending: the first step since which `clear` held in no sample; None if it held in the newest. While the
    alert is open: first sample that was not healthy."""
    is_held_back: bool = False
    """Whether `only_while` did not hold in the newest sample."""


@dataclass(frozen=True)
class Change:
    """Of an alert's state."""

    kind: Kind
    left_step: int
    """First sample that was not healthy, at most `pending_step`."""
    pending_step: int
    firing_step: int | None
    since_step: int
    """Where the row of samples began that decided it."""
    samples: int | None
    """None if it is not known, because the alert was about another stack of the model meanwhile."""


def left_after(left: int | None, clear: Sequence[bool | None], steps: Sequence[int]) -> int | None:
    """The first step since which `clear` held in no sample, after more of them. `left`: the same before."""
    since = None
    for is_clear, step in zip(reversed(clear), reversed(steps), strict=True):
        if is_clear:
            return since
        if is_clear is not None:
            since = step
    return since if left is None else left


def advance(rule: Rule, track: Track, verdict: Verdict, step: int) -> Change | None:
    """Take note of the next frame's verdict: the change, if there was one."""
    if verdict == "unknown":
        return None
    track.judged_step = step
    towards = _towards(track.state, verdict)
    if towards is None:
        track.streak = None
        return None
    if track.streak is None or track.streak.towards != towards:
        track.streak = Streak(towards, step, 0)
    track.streak.samples += 1
    hold = rule.clear_hold if towards == "resolved" else rule.hold
    if track.streak.samples >= hold.samples and step - track.streak.since_step >= hold.steps:
        return _change(track, track.streak, towards, step)
    if track.state == "quiet":
        return _change(track, track.streak, "pending", step)
    return None


def _towards(state: TrackState, verdict: Verdict) -> Kind | None:
    """The change that this verdict speaks for in this state."""
    if state == "firing":
        return "resolved" if verdict == "clear" else None
    if verdict == "met":
        return "firing"
    return "withdrawn" if state == "pending" else None


def _change(track: Track, streak: Streak, kind: Kind, step: int) -> Change:
    if track.pending_step is None:
        track.pending_step = step
        if track.left_step is None or step - track.left_step > APPROACHES_WITHIN:
            track.left_step = step
    if kind == "firing":
        track.firing_step = step
    assert track.left_step is not None
    change = Change(kind, track.left_step, track.pending_step, track.firing_step, streak.since_step, streak.samples)
    if kind == "pending":
        track.state = "pending"
    elif kind == "firing":
        track.state, track.streak = "firing", None
    else:
        track.state, track.pending_step, track.firing_step, track.streak, track.left_step = (
            "quiet",
            None,
            None,
            None,
            None,
        )
    return change
