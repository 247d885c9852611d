"""What is remembered of one run between its frames, and the bytes that it is stored as.

All of it is numbers, under the digests of what they belong to: rules that were edited find what they still share.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tsemon_server.rules.engine import Kind, Streak, Track, TrackState
from tsemon_server.rules.memory import Cell
from tsemon_server.rules.program import KEY_BYTES

_HEAD = struct.Struct("<BHHqqq")
_VERSION = 1
_SEVERAL = 2
"""The version of several states in a row, each with its size before it."""
_SIZE = struct.Struct("<I")
_STATES: tuple[TrackState, ...] = ("quiet", "pending", "firing")
_KINDS: tuple[Kind, ...] = ("pending", "firing", "resolved", "withdrawn")


@dataclass
class State:
    """Of one attempt of a run; changed in place by `Evaluator.advance`."""

    cells: list[list[Cell]]
    tracks: list[Track]
    first_step: int | None = None
    last_step: int | None = None
    num_samples: int = 0
    others: list[State] = field(default_factory=list)
    """In a model with several stacks, the states of all stacks but the first."""


class UnreadableState(Exception):
    """Bytes that are no state, or of a form that this version does not know."""


def dump(state: State, cell_nodes: Sequence[tuple[bytes, int]], rule_keys: Sequence[bytes]) -> bytes:
    """The state as bytes: the keys of the nodes that remember and of the rules, then all numbers; this for each stack."""
    own = _dump_one(state, cell_nodes, rule_keys)
    if not state.others:
        return own
    each = [own, *(_dump_one(other, cell_nodes, rule_keys) for other in state.others)]
    return b"".join([bytes([_SEVERAL]), *(_SIZE.pack(len(one)) + one for one in each)])


def _dump_one(state: State, cell_nodes: Sequence[tuple[bytes, int]], rule_keys: Sequence[bytes]) -> bytes:
    numbers = array("d")
    for _, node in cell_nodes:
        held = state.cells[node]
        numbers.append(len(held))
        for cell in held:
            numbers.append(len(cell))
            numbers.extend(cell)
    for track in state.tracks:
        numbers.extend(_of_track(track))
    first = -1 if state.first_step is None else state.first_step
    last = -1 if state.last_step is None else state.last_step
    head = _HEAD.pack(_VERSION, len(cell_nodes), len(rule_keys), first, last, state.num_samples)
    return b"".join((head, *(key for key, _ in cell_nodes), *rule_keys, _little(numbers).tobytes()))


def load(raw: bytes, start: Callable[[], State], nodes: dict[bytes, int], rules: dict[bytes, int]) -> State:
    """A state from `start` with everything that `raw` has for it. Raises UnreadableState."""
    if raw[:1] != bytes([_SEVERAL]):
        return _load_one(raw, start(), nodes, rules)
    states, place = list[State](), 1
    while place < len(raw):
        try:
            (size,) = _SIZE.unpack_from(raw, place)
        except struct.error as error:
            raise UnreadableState(str(error)) from error
        place += _SIZE.size + size
        if place > len(raw):
            raise UnreadableState(f"expected {place} bytes, got {len(raw)}")
        states.append(_load_one(raw[place - size : place], start(), nodes, rules))
    if not states:
        raise UnreadableState("expected several states, got none")
    states[0].others = states[1:]
    return states[0]


def _load_one(raw: bytes, fresh: State, nodes: dict[bytes, int], rules: dict[bytes, int]) -> State:
    try:
        version, num_nodes, num_rules, first, last, fresh.num_samples = _HEAD.unpack_from(raw)
        if version != _VERSION:
            raise UnreadableState(f"expected version {_VERSION}, got {version}")
        start = _HEAD.size + KEY_BYTES * (num_nodes + num_rules)
        keys = [raw[at : at + KEY_BYTES] for at in range(_HEAD.size, start, KEY_BYTES)]
        numbers = array("d")
        numbers.frombytes(raw[start:])
        place = 0
        numbers = _little(numbers)
        for key in keys[:num_nodes]:
            held, place = _cells(numbers, place)
            if key in nodes:
                fresh.cells[nodes[key]] = held
        for key in keys[num_nodes:]:
            if key in rules:
                fresh.tracks[rules[key]] = _track(numbers[place : place + _TRACK_NUMBERS])
            place += _TRACK_NUMBERS
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise UnreadableState(str(error)) from error
    fresh.first_step, fresh.last_step = (None if step < 0 else step for step in (first, last))
    return fresh


def _cells(numbers: array[float], place: int) -> tuple[list[Cell], int]:
    held, num_cells = [], int(numbers[place])
    place += 1
    for _ in range(num_cells):
        end = place + 1 + int(numbers[place])
        held.append(numbers[place + 1 : end].tolist())
        place = end
    return held, place


_TRACK_NUMBERS = 7


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
    ]


def _track(numbers: Sequence[float]) -> Track:
    state, pending, firing, judged, towards, since, samples = numbers
    streak = None if towards < 0 else Streak(_KINDS[int(towards)], int(since), int(samples))
    return Track(_STATES[int(state)], _step(pending), _step(firing), _step(judged), streak)


def _step(number: float) -> int | None:
    return None if math.isnan(number) else int(number)


def _number(step: int | None) -> float:
    return math.nan if step is None else float(step)


def _little(numbers: array[float]) -> array[float]:
    """Little-endian on every machine: services of one database may run on different ones."""
    if struct.pack("=H", 1) == b"\x01\x00":
        return numbers
    swapped = numbers[:]
    swapped.byteswap()
    return swapped
