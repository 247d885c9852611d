"""Tell the sequences of a state from its tokens by an experiment: change one token, and see what follows.

A block mixes the tokens of a sequence, but not the sequences. If one token of one sequence changes, the outputs change
within that sequence only, along the axis of the tokens. It takes two passes over the held sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tsemon.probes.boundaries import after_block
from tsemon.probes.discovery import Block
from tsemon.probes.hooks import Hooks
from tsemon.probes.layout import Layout, Layouts
from tsemon.probes.reading import OnHost
from tsemon.probes.states import hidden_state

LAYOUTS: tuple[Layout, Layout] = ("BTC", "TBC")


class Experiment:
    """Compares the outputs of the last block of each stack, before and after the change."""

    def __init__(self, blocks: list[Block], layouts: Layouts) -> None:
        self._last = {block.stack: block for block in blocks}
        self._layouts = layouts
        self._before: dict[int, Tensor] = {}
        self._flags: dict[int, Tensor] = {}

    def listen(self, hooks: Hooks) -> None:
        """Hook the stacks that are undecided: for the first pass, and again for the second."""
        for stack, block in self._last.items():
            if self._layouts.asks_about(stack):
                after_block(hooks, block, lambda _, args, kwargs, output, block=block: self._see(block, output))

    def finish(self) -> dict[int, Tensor]:
        """Decide what can be decided now. Return by stack whether the pass was measured with the wrong layout.

        On a CPU that is known now, and the states are not measured. Elsewhere only the device knows.
        """
        wrong = {}
        for stack, flags in self._flags.items():
            if flags.device.type == "cpu":
                self._conclude(stack, flags)
            elif (layout := self._layouts.layout_of(stack)) in LAYOUTS:
                wrong[stack] = flags[1 - LAYOUTS.index(layout)] > flags[LAYOUTS.index(layout)]
        return wrong

    def take_notes(self) -> list[OnHost]:
        """Flags for the host, which decides the layouts from the next sample on."""
        flags, self._before, self._flags = self._flags, {}, {}
        return [
            OnHost(of_stack, functools.partial(self._conclude, stack))
            for stack, of_stack in flags.items()
            if of_stack.device.type != "cpu"
        ]

    def _see(self, block: Block, output: object) -> None:
        x = hidden_state(output, block.width, self._layouts.shape_of(block))
        if x is None or x.ndim != 3:
            return
        if (before := self._before.get(block.stack)) is None:
            self._before[block.stack] = x.detach().clone()
        elif before.shape == x.shape:
            self._flags[block.stack] = _where((before != x.detach()).any(dim=-1))

    def _conclude(self, stack: int, flags: Tensor) -> Tensor:
        is_along_second, is_along_first = (flag > 0 for flag in flags)
        if is_along_second != is_along_first:
            self._layouts.conclude(stack, LAYOUTS[0 if is_along_second else 1])
        return flags


def with_other_token() -> Callable[[Tensor], Tensor]:
    """Changes one entry of the first tensor of several axes that it gets, and copies the others.

    The entry is in the middle of the second axis, where there is the least padding.
    """
    has_changed = False

    def change(tensor: Tensor) -> Tensor:
        nonlocal has_changed
        tensor = tensor.clone()
        if tensor.ndim < 2 or has_changed or not tensor.numel() or tensor.dtype == torch.bool:
            return tensor
        has_changed = True
        middle = tensor.shape[1] // 2
        if tensor.is_floating_point():
            tensor[0, middle] += 1
        else:  # another id that there is
            flat_N = tensor.flatten()
            is_other_N = flat_N != tensor[0, middle].flatten()[0]
            tensor[0, middle] = flat_N.index_select(0, is_other_N.int().argmax(dim=0, keepdim=True))[0]
        return tensor

    return change


def _where(differ_MN: Tensor) -> Tensor:
    """Whether one of M alone differs, in several of N, and the other way round."""
    num_M, num_N = (differ_MN.any(dim=axis).sum() for axis in (1, 0))
    return torch.stack([(num_M == 1) & (num_N > 1), (num_N == 1) & (num_M > 1)]).float()
