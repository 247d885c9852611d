"""What all probes have in common: they listen for a step, give raw sums that ranks can add up, and finish them.

hooks -> collect: sums of this process -> ranks: sums of all processes -> finish: metrics
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from tsemon.measures.sums import NOTHING, Partial, Partials
from tsemon.probes.discovery import Block
from tsemon.probes.hooks import Hooks


class OnHost(NamedTuple):
    """A metric whose last step a device could not do without being waited for: the exporter's thread does it.

    Such a metric is of this process's own samples alone.
    """

    raw: Tensor
    finish: Callable[[Tensor], Tensor]
    """Gets `raw` in host memory, returns the metric."""


@dataclass(slots=True)
class Reading:
    """What one sampled step gave, still on the device."""

    layers: dict[str, Tensor | OnHost] = field(default_factory=dict)
    heads: dict[str, Tensor | OnHost] = field(default_factory=dict)
    scalars: dict[str, Tensor | OnHost | float] = field(default_factory=dict)
    agreed: Tensor | None = None
    """The largest of what each of several ranks passed to `Probe.collect`."""


class Part:
    """One probe of several. A step: `arm`, for one training pass `listen`, then `collect`, `finish`, `forget`."""

    METRICS: ClassVar[tuple[str, ...]] = ()

    wanted: frozenset[str] = frozenset()
    """Which of METRICS this step should give. A part from which none is wanted is left out of the step."""
    step: int = 0
    """The number of the step that is collected."""

    def arm(self, hooks: Hooks) -> None:
        """Hook what is called once a step."""

    def listen(self, hooks: Hooks) -> None:
        """Hook the blocks for the pass that begins."""

    def enter(self, block: Block, args: Any, kwargs: Any) -> None:
        """A block of the pass is about to run with these arguments."""

    def forget(self) -> None:
        """Let go of what was seen."""

    def collect(self) -> Partials:
        """Raw sums on the device, empty where nothing was seen."""
        return {}

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        """Metrics from the sums of all processes, and from what cannot be summed."""
        return Reading()

    def how(self) -> str:
        """In a few words, what the numbers of this step were made from."""
        return ""

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        """Metric to the reason why this step lacks it, in whole or in part. `why_unseen`: why no hook fired."""
        return {}


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
    """One tensor from one value per entry, on the device of the first, with `absent` for entries that are None.

    Where the values are of different sizes (heads), the shorter are filled up with `absent`.
    """
    values = list(values)
    first = next(value for value in values if value is not None)
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values if value is not None), strict=True)]
    result = first.new_full((len(values), *shape), absent)
    for entry, value in enumerate(values):
        if value is not None:
            own = result[entry]
            for axis, size in enumerate(value.shape):
                own = own.narrow(axis, 0, size)
            own.copy_(value, non_blocking=True)
    return result
