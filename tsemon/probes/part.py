"""What all probes have in common: they listen for a step, give raw sums that ranks can add up, and finish them.

hooks -> collect: sums of this process -> ranks: sums of all processes -> finish: metrics
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from tsemon.measures.sums import Partials, mean
from tsemon.probes.discovery import Block
from tsemon.probes.hooks import Hooks
from tsemon.probes.quantities import NONE
from tsemon.probes.reading import Reading, by_entry
from tsemon.quantity import Where


class Part:
    """One probe of several. A step: `arm`, for one training pass `listen`, then `collect`, `finish`, `forget`."""

    METRICS: ClassVar[tuple[str, ...]] = ()

    own = NONE
    """The user's own quantities of the tensors that this part sees."""

    wanted: frozenset[str] = frozenset()
    """Which of METRICS this step should give. A part from which nothing is wanted is left out of the step."""
    step: int = 0
    """The number of the step that is collected."""

    def __init__(self, blocks: Sequence[Block] = (), depth: int = 0) -> None:
        self._blocks = blocks
        self._depth = depth
        """Number of blocks in the whole model; `blocks` may be one pipeline stage."""
        self.forget()

    def arm(self, hooks: Hooks) -> None:
        """Hook what is called once a step."""

    def listen(self, hooks: Hooks) -> None:
        """Hook the blocks for the pass that begins."""

    def want(self, names: Collection[str]) -> None:
        """Say which metrics the next step should give."""
        self.wanted = frozenset(self.METRICS) & frozenset(names)
        self.own.wanted = frozenset(self.own.names) & frozenset(names)

    @property
    def is_wanted(self) -> bool:
        return bool(self.wanted or self.own.wanted)

    def enter(self, block: Block, args: Any, kwargs: Any) -> None:
        """A block of the pass is about to run with these arguments."""

    def forget(self) -> None:
        """Let go of what was seen. Subclasses set up the state of one step here."""
        self._of_layers: dict[int, Partials] = {}
        """Sums by block number."""

    def collect(self) -> Partials:
        """Raw sums on the device, empty where nothing was seen."""
        return by_entry(self._of_layers, range(self._depth))

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        """Metrics from the sums of all processes, and from what cannot be summed."""
        return Reading({name: mean(sums, name) for name in self.METRICS if name in sums})

    def how(self) -> str:
        """In a few words, what the numbers of this step were made from."""
        return ""

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        """Metric to the reason why this step lacks it, in whole or in part.

        `why_unseen`: why no pass through the model was seen; empty if one was.
        """
        return {}

    def why_not_own(self, where: Where, why_unseen: str) -> str:
        """Why no tensors came for the user's own quantities of them."""
        return why_unseen or next(iter(self.why_missing(why_unseen).values()), "the pass showed no such tensor")


NO_TOKENS = "the pass had no tokens"
SINGLE_TOKEN = "sequences have one token, and no other to compare it with"
NOT_CALLED = "no module around the blocks was called: the model runs them from another method than forward"


def by_reason(what: str, missed: Sequence[Block], num_blocks: int, why: Callable[[Block], str]) -> str:
    """Say what is missing, with the number of blocks for each reason; empty if no block was missed."""
    reasons = Counter(map(why, missed))
    return "; ".join(f"{what} in {num} of {num_blocks} blocks: {reason}" for reason, num in reasons.items())
