"""The sequences with the largest losses around an incident, and whether they came before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tsemon.catalogue import PLACES
from tsemon.wire import Frame

FAMILIES = ("loss", "diverge", "data")
"""Families of incidents that a few sequences may cause."""
STANDS_OUT = 2.0
"""A sequence stands out if its loss is this many times the mean of its batch."""


@dataclass(frozen=True, kw_only=True)
class SequenceLoss:
    """A sequence of a batch with a large loss."""

    step: int
    id: int | None
    loss: float | None
    """None if it is not finite."""
    times_mean: float | None
    """Relative to the mean of the finite losses of the batch that the sequences are of."""
    seen_step: int | None
    stands_out: bool
    text: str


def largest_losses(frames: Iterable[Frame]) -> list[SequenceLoss]:
    """Return up to 4 sequences, each once.

    Sequences that stand out from their batch come first, by `times_mean`: later batches may have larger losses only because
    the model diverges. Then follow the others, and the batches in which all are lost.
    """
    found = sorted((one for frame in frames for one in _in_frame(frame)), key=_rank)
    by_id: dict[tuple[int | None, int], list[SequenceLoss]] = {}
    for one in found:
        by_id.setdefault((one.id, one.step if one.id is None else 0), []).append(one)
    return [_with_others(first, others) for first, *others in list(by_id.values())[: len(PLACES)]]


def _with_others(one: SequenceLoss, others: Sequence[SequenceLoss]) -> SequenceLoss:
    """The sequence with the other samples in which its loss is among the four largest."""
    num = len({other.step for other in others} - {one.step})  # a batch may hold a sequence several times
    if not num:
        return one
    samples = f"{num} other sample" + "s" * (num > 1)
    return replace(one, text=f"{one.text} Its loss is among the four largest in {samples} of the incident, too.")


def _rank(one: SequenceLoss) -> tuple[int, float]:
    if one.loss is None:
        return (0 if one.stands_out else 3), one.step
    return (1 if one.stands_out else 2), -(one.times_mean or 0.0)


def _in_frame(frame: Frame) -> Iterator[SequenceLoss]:
    mean = frame.scalars.get("sequence_loss_mean", math.nan)
    places = [place for place in range(1, len(PLACES) + 1) if f"sequence_loss_{place}" in frame.scalars]
    losses = [frame.scalars[f"sequence_loss_{place}"] for place in places]
    are_all_lost = len(losses) > 1 and not any(map(math.isfinite, losses))
    for place, loss in zip(places, losses, strict=True):
        known = loss if math.isfinite(loss) else None
        ratio = loss / mean if loss > 0 and mean > 0 else math.nan
        times = ratio if math.isfinite(ratio) and ratio > 0 else None
        own, seen = (_integer(frame.scalars.get(f"sequence_{kind}_{place}", math.nan)) for kind in ("id", "seen"))
        stands_out = not are_all_lost if known is None else times is not None and times >= STANDS_OUT
        one = SequenceLoss(
            step=frame.step, id=own, loss=known, times_mean=times, seen_step=seen, stands_out=stands_out, text=""
        )
        yield replace(one, text=_text(one, are_all_lost=are_all_lost))


def _integer(value: float) -> int | None:
    return int(value) if 0 <= value < 2**53 else None


def _text(one: SequenceLoss, *, are_all_lost: bool) -> str:
    name = "a sequence" if one.id is None else f"sequence {one.id}"
    size = "that is not finite" if one.loss is None else f"of {one.loss:.4g}"
    times = one.times_mean
    mean = "" if times is None else f", {times:{',.1f' if times < 1e6 else '.1e'}} times the mean of the batch"
    text = f"At step {one.step}, {name} had a loss {size}{mean}."
    if are_all_lost or (times is not None and not one.stands_out):
        text += " No single sequence stands out."
    if one.seen_step is not None:
        text += f" It was also in the batch of step {one.seen_step}."
    elif one.id is not None:
        text += " It is not in the earlier sampled batches that tsemon keeps."
    return text
