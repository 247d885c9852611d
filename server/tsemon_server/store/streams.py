"""Which frames are meant: the words in which the ledger and the series speak about them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypedDict


class Stream(NamedTuple):
    """What one writer sent in one attempt."""

    run_id: str
    attempt: int
    writer: str


_HISTORY = ".h"


def history_of(run_id: str) -> str:
    """The id under which a series keeps the rows of a run: scalars of steps without a frame.

    They are apart from its frames, because readers of the newest frames want frames with layers.
    """
    return f"{run_id}{_HISTORY}"


def run_of(series_id: str) -> str:
    """The run of such an id, or of a run's own."""
    return series_id.removesuffix(_HISTORY)


class Which(TypedDict, total=False):
    """Which frames of a run a question is about: all of one attempt, or what no later attempt hides."""

    attempt: int | None
    from_step: int | None
    to_step: int | None
    """The first and the last step are both included; without them, or with None, there is no bound."""


class Span(NamedTuple):
    """Steps of one attempt, the first and the last included."""

    attempt: int
    first_step: int
    last_step: int


Visible = Sequence[Span]
"""Where a question looks. No two spans share a step of one attempt."""


class At(NamedTuple):
    """A step that an attempt has a frame of."""

    step: int
    attempt: int


class Address(NamedTuple):
    """One frame, and its step."""

    stream: Stream
    seq: int
    step: int


class Newest(NamedTuple):
    """The newest frame of a run. Compared by step, attempt, seq and writer, in this order."""

    step: int
    attempt: int
    seq: int
    writer: str
    time: float
    scalars: Mapping[str, float]


class Standing(NamedTuple):
    """The state of a run, as far as its frames are concerned."""

    attempts: Collection[int]
    """The current attempt, and earlier ones that are live. The others send no more frames."""
    is_over: bool
    """True if these send no more frames either."""
    newest: Address | None
    """The newest frame, which stays hot."""
