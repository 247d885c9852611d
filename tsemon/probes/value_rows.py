"""Find in a pass which rows of a packed projection make the values: its other rows make queries and keys.

By its name alone, a projection is split as is usual for that name. Attention mostly multiplies its weights with a view of
the projection's output: the place of the view tells the rows, without a look at any number. If the values are a copy, the
host later compares the sums of all rows with the sums of the values' entries.

Axes: B samples, H heads, S keys, K width of a head, N entries of the values of all heads (H K), R rows of the projection.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tsemon.measures.sums import Partials
from tsemon.probes.calls import Calls
from tsemon.probes.discovery import Block
from tsemon.probes.hooks import Hooks
from tsemon.probes.packing import Packing
from tsemon.probes.query_key import packed_projections
from tsemon.probes.reading import OnHost, Reading
from tsemon.probes.tap import AttentionPart, Place, Seen

MAX_SAMPLES = 3
"""Samples after which attention that no pass has shown is not looked for any more."""
SAME = 1e-9
"""Relative difference of two sums of the same numbers in float64."""


class Learner(Protocol):
    """Gets to know where the values lie, as a mask (R,) on the host."""

    def learn_values(self, block: Block, projection: nn.Module, is_value_R: Tensor, *, now: bool) -> None:
        """`now`: within the pass. Otherwise between two samples."""

    def doubt_values(self, block: Block) -> None:
        """Nothing has shown them yet, in the sample that is collected."""


class ValueRows(AttentionPart):
    """Shows to `learner` the rows of values in each packed projection, once. It measures nothing."""

    TAKES_ROWS = True

    def __init__(self, blocks: list[Block], depth: int, packing: Packing, calls: Calls, learner: Learner) -> None:
        self._learner = learner
        self._open: dict[Block, list[nn.Module]] = {}
        """Packed projections that no pass has shown."""
        self._compared: dict[Block, int] = {}
        """Number of comparisons that the host has not made yet."""
        self._doubted: list[Block] = []
        self._num_samples, self._is_needed = 0, False
        self._outputs: dict[nn.Module, Tensor] = {}
        """Output of each projection in the attention that runs."""
        self._later: list[OnHost] = []
        super().__init__(blocks, depth, packing, calls)
        attentions = {id(block.attention): block for block in reversed(calls.to_hook)}
        for block in attentions.values():
            if block.attention is not None and (projections := packed_projections(block.attention)):
                self._open[block] = projections

    def forget(self) -> None:
        super().forget()
        self._outputs.clear()

    def want(self, names: Collection[str]) -> None:
        super().want(names)
        self._num_samples += "grad_norm_qk" in names
        if self._num_samples > MAX_SAMPLES:
            self._open.clear()
        self._doubted = [*self._open, *self._compared]
        self._is_needed = "grad_norm_qk" in names and bool(self._doubted)

    @property
    def is_wanted(self) -> bool:
        return self._is_needed

    def listen(self, hooks: Hooks) -> None:
        super().listen(hooks)
        projections = [of for block, of in self._open.items() if not self._calls.is_compiled(block)]
        for projection in {one for of_block in projections for one in of_block}:
            hooks.after(projection, partial(self._keep, projection))

    def _keep(self, projection: nn.Module, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            self._outputs[projection] = first.detach()

    @contextmanager
    def tap(self, hooks: Hooks, block: Block, places: Iterable[Place]) -> Iterator[None]:
        if block not in self._open or not hooks.are_concerned:
            yield
            return
        try:
            with super().tap(hooks, block, places):
                yield
        finally:
            self._outputs.clear()

    def look(self, block: Block, seen: Seen) -> bool:
        values_BHSK = None if seen.values is None else seen.values()
        if values_BHSK is None or not values_BHSK.numel():
            return False
        projections = self._open.pop(block, [])
        for projection, output in [(one, self._outputs[one]) for one in projections if one in self._outputs]:
            if (is_value_R := rows_of_view(values_BHSK, output)) is not None:
                self._learner.learn_values(block, projection, is_value_R, now=True)
            elif output.device.type != "mps":  # it has no float64
                sums = torch.cat([sums_of(values_BHSK, (0, 2)), sums_of(output.flatten(0, -2), (0,))], dim=1)
                self._later.append(OnHost(sums, partial(self._compare, block, projection, output.shape[-1])))
                self._compared[block] = self._compared.get(block, 0) + 1
        if block not in self._compared:
            self._doubted.remove(block)
        return True

    def _compare(self, block: Block, projection: nn.Module, num_rows: int, sums: Tensor) -> Tensor:
        """Values that are no entries of the output were changed on the way, and say nothing."""
        self._compared[block] -= 1
        if not self._compared[block]:
            del self._compared[block]
        try:
            is_value_R = rows_of_copy(sums[:, :-num_rows], sums[:, -num_rows:])
        except Alike:
            self._open.setdefault(block, []).append(projection)
            return sums
        if is_value_R is not None:
            self._learner.learn_values(block, projection, is_value_R, now=False)
        return sums

    def collect(self) -> Partials:
        for block in self._doubted:
            self._learner.doubt_values(block)
        return {}

    def finish(self, sums: Any) -> Reading:
        later, self._later = self._later, []
        return Reading(later=later)

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        return {}


def rows_of_view(values: Tensor, output: Tensor) -> Tensor | None:
    """Return which entries of the last axis of `output` (..., R) the values view, as a mask (R,) on the host.

    None if they are no view of it, or one that does not have the same entries of all tokens.
    """
    if type(values) is not Tensor or type(output) is not Tensor or not output.is_contiguous():
        return None
    if values.untyped_storage().data_ptr() != output.untyped_storage().data_ptr():
        return None
    num_rows = output.shape[-1]
    within = [(size, stride) for size, stride in zip(values.shape, values.stride(), strict=True) if stride % num_rows]
    if math.prod(size for size, _ in within) > num_rows:
        return None
    rows = torch.tensor([values.storage_offset() - output.storage_offset()], device="cpu")
    for size, stride in within:
        rows = (rows[:, None] + stride * torch.arange(size, device="cpu")).flatten()
    return torch.zeros(num_rows, dtype=torch.bool, device="cpu").index_fill_(0, rows % num_rows, value=True)


def sums_of(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Sums and lengths over the axes, (2, entries), in float64."""
    lengths = torch.linalg.vector_norm(x, dim=axes, dtype=torch.float64)
    return torch.stack([x.sum(axes, dtype=torch.float64).flatten(), lengths.flatten()])


class Alike(Exception):
    """Values are in one of several rows with the same numbers, such as zeros. A later pass may decide."""


def rows_of_copy(values_2N: Tensor, output_2R: Tensor) -> Tensor | None:
    """Return which rows have the sums and lengths of the values, as a mask (R,).

    None if an entry of the values is in no row. Raises Alike if it is in one of several rows that are alike.
    """
    order_R = output_2R[1].argsort()
    output_2R = output_2R[:, order_R]
    place_N = torch.searchsorted(output_2R[1], values_2N[1] * (1 - SAME)).clamp(max=len(order_R) - 1)
    if not _are_same(values_2N, output_2R[:, place_N]).all():
        return None
    is_value_R = torch.zeros_like(order_R, dtype=torch.bool).index_fill_(0, place_N, value=True)
    are_alike = _are_same(output_2R[:, 1:], output_2R[:, :-1])
    if (are_alike & (is_value_R[1:] | is_value_R[:-1])).any():
        raise Alike
    return is_value_R[order_R.argsort()]


def _are_same(some_2N: Tensor, others_2N: Tensor) -> Tensor:
    """A sum may cancel, so it is as exact as the length is."""
    by_2N, most_N = (some_2N - others_2N).abs(), SAME * others_2N[1]
    return (by_2N[0] <= 1e3 * most_N) & (by_2N[1] <= most_N)
