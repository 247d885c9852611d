"""The result of one sampled step: metrics on the device, and sums of all entries in one tensor each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tsemon.measures.sums import NOTHING, Partial, Partials


class Undefined(Exception):
    """Raised by `OnHost.finish`: the metric is left out, for the reason of the message."""


class OnHost(NamedTuple):
    """A metric whose last step a device could not do without being waited for: the exporter's thread does it."""

    raw: Tensor
    finish: Callable[[Tensor], Tensor | None]
    """Gets `raw` in host memory, returns the metric; None leaves it out."""
    is_merged: bool = False
    """Whether `raw` is of all processes; else it is of this process's own samples alone."""


@dataclass(slots=True)
class Reading:
    """The result of one sampled step, still on the device."""

    layers: dict[str, Tensor | OnHost] = field(default_factory=dict)
    heads: dict[str, Tensor | OnHost] = field(default_factory=dict)
    scalars: dict[str, Tensor | OnHost | float] = field(default_factory=dict)
    notes: list[OnHost] = field(default_factory=list)
    """What only the host can say something about: their results go nowhere."""
    later: list[OnHost] = field(default_factory=list)
    """Decisions that the training thread makes a sample later, when the copy is long done, so that they never depend on
    which thread is faster."""
    agreed: Tensor | None = None
    """The largest of what each of several ranks passed to `Probe.collect`."""


def by_entry(found: Mapping[int, Partials], entries: Iterable[int]) -> Partials:
    """The sums of all entries in one tensor per name, with nothing for entries in which it was not found."""
    merges = {name: partial.merge for sums in found.values() for name, partial in sums.items()}
    entries = list(entries)
    return {
        name: Partial(stacked((_value(found, entry, name) for entry in entries), NOTHING[merge]), merge)
        for name, merge in merges.items()
    }


def _value(found: Mapping[int, Partials], entry: int, name: str) -> Tensor | None:
    partial = found.get(entry, {}).get(name)
    return None if partial is None else partial.value


def stacked(values: Iterable[Tensor | None], absent: float = 0.0) -> Tensor:
    """One tensor from one value per entry, on the device of the first, with `absent` for entries without a value.

    If the values have different sizes (heads), the shorter are filled up with `absent`.
    """
    values = list(values)
    first = next(value for value in values if value is not None)
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values if value is not None), strict=True)]
    if all(value is None or [*value.shape] == shape for value in values):
        absent_value = first.new_full(shape, absent)
        of_all = [absent_value if value is None else value for value in values]
        return torch.stack([value.to(first.device, first.dtype, non_blocking=True) for value in of_all])
    result = first.new_full((len(values), *shape), absent)
    for entry, value in enumerate(values):
        if value is not None:
            own = result[entry]
            for axis, size in enumerate(value.shape):
                own = own.narrow(axis, 0, size)
            own.copy_(value, non_blocking=True)
    return result
