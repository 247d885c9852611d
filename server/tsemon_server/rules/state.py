"""What is remembered of one run between its frames, and the bytes that it is stored as.

All of it is numbers, under the digests of what they belong to: rules that were edited find what they still share.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tsemon_server.rules.engine import Kind, Streak, Track, TrackState
from tsemon_server.rules.memory import Cell
from tsemon_server.rules.program import KEY_BYTES

_HEAD = struct.Struct("<BHHqqq")
_VERSION = 4
_TRACK_NUMBERS = {1: 7, 3: 8, _VERSION: 9}
"""By version. Version 1 lacks `left_step`, version 3 lacks `is_held_back`."""
_SEVERAL = 2
"""The version of several states in a row, each with its size before it."""
_SIZE = struct.Struct("<I")
_STATES: tuple[TrackState, ...] = ("quiet", "pending", "firing")
_KINDS: tuple[Kind, ...] = ("pending", "firing", "resolved", "withdrawn")


@dataclass
class State:
    """Of one attempt of a run; changed in place by `Evaluator.read`."""

    cells: list[list[Cell]]
    """Each memory has one, or one for each layer."""
    tracks: list[Track]
    first_step: int | None = None
    last_step: int | None = None
    num_samples: int = 0
    others: list[State] = field(default_factory=list)
    """In a model with several stacks, the states of all stacks but the first."""


class UnreadableState(Exception):
    """Bytes that are no state, or of a form that this version does not know."""


def dump(state: State, memory_keys: Sequence[bytes], rule_keys: Sequence[bytes]) -> bytes:
    """The state as bytes: the keys of the memories and of the rules, then all numbers; this for each stack."""
    keys = b"".join((*memory_keys, *rule_keys))
    each = [_dump_one(one, keys) for one in (state, *state.others)]
    if len(each) == 1:
        return each[0]
    return b"".join([bytes([_SEVERAL]), *(_SIZE.pack(len(one)) + one for one in each)])


def _dump_one(state: State, keys: bytes) -> bytes:
    numbers: list[float] = []
    for held in state.cells:
        numbers.append(len(held))
        for cell in held:
            numbers.append(len(cell))
            numbers += cell
    for track in state.tracks:
        numbers += _of_track(track)
    first = -1 if state.first_step is None else state.first_step
    last = -1 if state.last_step is None else state.last_step
    head = _HEAD.pack(_VERSION, len(state.cells), len(state.tracks), first, last, state.num_samples)
    return b"".join((head, keys, struct.pack(f"<{len(numbers)}d", *numbers)))


def load(raw: bytes, start: Callable[[], State], memories: dict[bytes, int], rules: dict[bytes, int]) -> State:
    """A state from `start` with everything that `raw` has for it. Raises UnreadableState."""
    if raw[:1] != bytes([_SEVERAL]):
        return _load_one(raw, start(), memories, rules)
    states, place = list[State](), 1
    while place < len(raw):
        try:
            (size,) = _SIZE.unpack_from(raw, place)
        except struct.error as error:
            raise UnreadableState(str(error)) from error
        place += _SIZE.size + size
        if place > len(raw):
            raise UnreadableState(f"expected {place} bytes, got {len(raw)}")
        states.append(_load_one(raw[place - size : place], start(), memories, rules))
    if not states:
        raise UnreadableState("expected several states, got none")
    states[0].others = states[1:]
    return states[0]


def _load_one(raw: bytes, fresh: State, memories: dict[bytes, int], rules: dict[bytes, int]) -> State:
    try:
        version, num_memories, num_rules, first, last, fresh.num_samples = _HEAD.unpack_from(raw)
        if version not in _TRACK_NUMBERS:
            raise UnreadableState(f"expected version {_VERSION}, got {version}")
        num_in_track = _TRACK_NUMBERS[version]
        start = _HEAD.size + KEY_BYTES * (num_memories + num_rules)
        keys = [raw[at : at + KEY_BYTES] for at in range(_HEAD.size, start, KEY_BYTES)]
        numbers, place = struct.unpack(f"<{(len(raw) - start) // 8}d", raw[start:]), 0
        for key in keys[:num_memories]:
            held, place = _cells(numbers, place)
            if key in memories:
                fresh.cells[memories[key]] = held
        for key in keys[num_memories:]:
            if key in rules:
                fresh.tracks[rules[key]] = _track(numbers[place : place + num_in_track])
            place += num_in_track
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise UnreadableState(str(error)) from error
    fresh.first_step, fresh.last_step = (None if step < 0 else step for step in (first, last))
    return fresh


def _cells(numbers: Sequence[float], place: int) -> tuple[list[Cell], int]:
    held, num_cells = [], int(numbers[place])
    place += 1
    for _ in range(num_cells):
        end = place + 1 + int(numbers[place])
        held.append([*numbers[place + 1 : end]])
        place = end
    return held, place


def _of_track(track: Track) -> list[float]:
    streak = track.streak
    return [
        _STATES.index(track.state),
        _number(track.pending_step),
        _number(track.firing_step),
        _number(track.judged_step),
        -1 if streak is None else _KINDS.index(streak.towards),
        0 if streak is None else streak.since_step,
        0 if streak is None else streak.samples,
        _number(track.left_step),
        track.is_held_back,
    ]


def _track(numbers: Sequence[float]) -> Track:
    state, pending, firing, judged, towards, since, samples, *later = numbers
    streak = None if towards < 0 else Streak(_KINDS[int(towards)], int(since), int(samples))
    left, is_held_back = [*later, *(pending, 0.0)[len(later) :]]
    return Track(
        _STATES[int(state)], _step(pending), _step(firing), _step(judged), streak, _step(left), is_held_back > 0
    )


def _step(number: float) -> int | None:
    return None if math.isnan(number) else int(number)


def _number(step: int | None) -> float:
    return math.nan if step is None else float(step)
