"""The axes of the hidden states: (batch, tokens, width), (tokens, batch, width) or others.

A state alone does not say it, nor does the name of anything. The attention of the block does: it gets as many queries as
a sequence has tokens. If it is not seen, or there are as many sequences as tokens, the modules and the model's inputs
speak for one. Whatever attention alone does not decide, an experiment does, see `experiment`; if sources contradict each
other before that, the state is not measured. In a grid (batch, height, width of the picture, D), each place is a token, and
D is the axis as long as the block is wide.

Axes: B samples, T tokens, D width, G any grid of tokens, N sequences of each sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument
from tsemon.measures.scores import Size
from tsemon.probes.discovery import Block
from tsemon.probes.held import Inputs

Layout = Literal["BTC", "TBC", "TC"]
Found = Layout | Literal["BGC", "BCG", "BNTC"]
IN_WORDS = {
    "BTC": "batch first",
    "TBC": "tokens first",
    "TC": "no batch axis",
    "BGC": "a grid of tokens, width last",
    "BCG": "a grid of tokens, width second",
    "BNTC": "several sequences a sample",
}
NUM_AXES = {"BTC": 3, "TBC": 3, "TC": 2, "BGC": 4, "BCG": 4, "BNTC": 4}


def check_layout(layout: object) -> Layout | None:
    """Raises InvalidArgument for what `attach(layout=...)` does not take."""
    if layout is None or layout in get_args(Layout):
        return layout  # type: ignore[return-value]
    raise InvalidArgument(
        "layout is the order of the axes of the blocks' hidden states, 'BTC' for (batch, tokens, width), 'TBC' for "
        f"(tokens, batch, width) or 'TC' for (tokens, width), got {layout!r}"
    )


@dataclass(slots=True)
class _Stack:
    """The layout of one stack of blocks, as far as it is known."""

    block: Block
    """The first."""
    layout: Found | None = None
    why: str = ""
    """The evidence, or the reason why evidence is missing."""
    size: Size | None = None
    """Size of the first attention in this pass."""
    is_final: bool = False
    """Whether it was given, or decided by attention or an experiment: neither modules nor inputs change it any more."""
    is_given: bool = False
    is_by_experiment: bool = False
    is_contradicted: bool = False
    is_confirmed: bool = False
    """Whether attention or an experiment has agreed with the given layout."""
    like_ids: Found | None = None
    """The layout if the token ids are (batch, tokens), in the newest pass in which shapes show it."""


class Layouts:
    """The layout of each stack of blocks, as far as it is known."""

    def __init__(self, blocks: Sequence[Block], given: Layout | None = None) -> None:
        self._stacks = {block.stack: _Stack(block) for block in reversed(blocks)}
        self._tokens_first = {block.stack for block in blocks if block.tokens_first}
        self._shapes: dict[int, torch.Size] = {}
        """Shape of the newest state of each stack."""
        self._changed: dict[int, str] = {}
        """Stacks that were measured in this pass with another layout than an experiment has shown since."""
        self._met = set[int]()
        """Stacks whose attention has decided it in this pass."""
        self._ids: list[torch.Size] = []
        """Shapes of token ids (B, T) among the model's inputs."""
        self._images: list[torch.Size] = []
        """Shapes of images (B, channels, height, width) among them."""
        if given is not None:
            for stack in self._stacks.values():
                stack.layout, stack.why, stack.is_final, stack.is_given = given, f"attach(layout={given!r})", True, True

    def of(self, block: Block) -> Found | None:
        """None while it is not decided."""
        return self._stacks[block.stack].layout

    def shape_of(self, block: Block) -> torch.Size | None:
        """Shape of the newest state that entered a block of this stack."""
        return self._shapes.get(block.stack)

    def layout_of(self, stack: int) -> Found | None:
        return self._stacks[stack].layout

    def is_open(self, block: Block) -> bool:
        """Whether attention may still decide it."""
        stack = self._stacks[block.stack]
        return not stack.is_final and not stack.is_contradicted

    @property
    def may_ask(self) -> bool:
        """Whether an experiment may yet be needed."""
        known = (stack.is_confirmed if stack.is_given else stack.is_final for stack in self._stacks.values())
        return not all(known)

    @property
    def is_undecided(self) -> bool:
        """Whether a pass has left the layout of some stack to an experiment."""
        return any(self.asks_about(stack) for stack in self._stacks)

    def asks_about(self, stack: int) -> bool:
        """Whether an experiment should decide the layout of this stack, or confirm it."""
        found, shape = self._stacks[stack], self._shapes.get(stack)
        is_known = found.is_confirmed if found.is_given else found.is_final
        has_two = shape is not None and len(shape) == 3 and shape[:2] != (1, 1)
        return has_two and not is_known and not found.is_contradicted

    def oriented(self, block: Block, x: Tensor) -> Tensor | None:
        """The state as (B, T, D), detached; None while the layout is not decided."""
        layout = self.of(block)
        return None if layout is None else turned(x.detach(), layout)

    def are_tokens_of(self, block: Block, z: Tensor) -> bool:
        """Whether z, the input of a layer inside the block, has an entry for each token of the block's state."""
        shape = self._shapes.get(block.stack)
        return shape is not None and z.shape[:-1] == shape[:-1]

    def begin(self) -> None:
        """A forward pass begins."""
        self._shapes.clear()
        self._met.clear()
        self._changed.clear()
        for stack in self._stacks.values():
            stack.size = None

    def forget_inputs(self) -> None:
        self._ids, self._images = [], []

    def meet_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The arguments of the model, or of a module around the blocks."""
        tensors = list(Inputs(args, kwargs).tensors)
        self._ids += [x.shape for x in tensors if x.ndim == 2 and not x.is_floating_point()]
        self._images += [x.shape for x in tensors if x.ndim == 4 and x.is_floating_point()]

    def meet_state(self, block: Block, x: Tensor) -> None:
        """The state that goes into a block."""
        self._shapes[block.stack] = x.shape
        stack = self._stacks[block.stack]
        if stack.block is block:
            self._check_axes(stack, x.shape)

    def meet_attention(self, block: Block, size: Size) -> None:
        """The attention that the block computes on the state. The first in a pass that says something counts."""
        shape, stack = self._shapes.get(block.stack), self._stacks[block.stack]
        if shape is None or stack.is_contradicted or stack.is_by_experiment or block.stack in self._met:
            return
        stack.size = stack.size or size
        if (found := _from_attention(shape, size)) is None:
            return
        self._met.add(block.stack)
        seen = f"attention of {size.queries} queries on a state of shape {tuple(shape)}"
        others = {layout: why for layout, why in self._votes(block.stack, shape).items() if layout != found}
        if stack.is_final and stack.layout != found:
            self._contradict(stack, f"{seen} says {IN_WORDS[found]}")
        elif others and not stack.is_final and not (found == "TBC" and block.stack in self._tokens_first):
            # Windows may have as many queries as there are samples.
            stack.layout, stack.why = None, _disputed({found: seen} | others)
        else:
            stack.layout, stack.why, stack.is_final, stack.is_confirmed = found, seen, True, True

    def settle(self, block: Block) -> None:
        """Decide without attention, which was not seen or says nothing, as far as that can be."""
        stack, shape = self._stacks[block.stack], self._shapes.get(block.stack)
        if not self.is_open(block) or shape is None or block.stack in self._met:
            return
        if len(shape) != 3:
            stack.layout, stack.why = _of_grid(shape, stack.block.width, stack.size, has_images=bool(self._images))
            return
        votes = self._votes(block.stack, shape)
        if block.stack in self._tokens_first:
            votes.setdefault("TBC", "nn.MultiheadAttention with batch_first=False")
        if shape[:2] == (1, 1):
            stack.layout, stack.why = "BTC", "a single token"
        elif len(votes) == 1:
            [(stack.layout, stack.why)] = votes.items()
        elif votes:
            stack.layout, stack.why = None, _disputed(votes)
        elif stack.layout is None:
            stack.why = (
                f"it is not known which axis of a state of shape {tuple(shape)} holds the tokens: neither "
                "attention nor the model's inputs show it. Give attach(..., layout='BTC') or layout='TBC'"
            )

    def conclude(self, stack: int, layout: Layout) -> None:
        """An experiment has decided it."""
        found = self._stacks[stack]
        why = "an experiment: one token was changed, and the outputs differ along this axis of tokens"
        if found.is_contradicted:
            return
        if found.is_given and found.layout != layout:
            self._contradict(found, f"{why} says {IN_WORDS[layout]}")
        elif found.is_given:
            found.is_confirmed = True
        elif not found.is_final:
            if found.layout not in (None, layout):
                self._changed[stack] = f"{found.why} says {IN_WORDS[found.layout]}, {why} says {IN_WORDS[layout]}"
            found.layout, found.why, found.is_final, found.is_by_experiment = layout, why, True, True

    def _votes(self, stack: int, shape: torch.Size) -> dict[Found, str]:
        """Layouts that the inputs suggest by convention, each with the evidence. Inputs may also be (tokens, batch)."""
        found: dict[Found, str] = {}
        if len(shape) == 3:
            for ids in self._ids:
                if (layout := _of_axes(shape, ids)) is not None:
                    found[layout] = f"token ids of shape {tuple(ids)} and a state of shape {tuple(shape)}"
            for images in self._images:
                if (layout := _of_batch(shape, images[0])) is not None:
                    found[layout] = f"images of shape {tuple(images)} and a state of shape {tuple(shape)}"
        return found

    def _check_axes(self, stack: _Stack, shape: torch.Size) -> None:
        """Contradict the layout if the shape does not fit, because attention may not show it."""
        if not stack.is_contradicted and len(shape) == 3 and shape[2] != stack.block.width in shape[:2]:
            stack.layout, stack.is_contradicted = None, True
            stack.why = f"the last axis of a state of shape {tuple(shape)} is not its width {stack.block.width}"
            return
        before, found = stack.like_ids, {layout for ids in self._ids if (layout := _of_axes(shape, ids)) is not None}
        if len(found) == 1:
            [stack.like_ids] = found
        if not stack.is_final or stack.layout is None:
            return
        if len(shape) != NUM_AXES[stack.layout]:
            self._contradict(stack, f"a state of shape {tuple(shape)} has another number of axes")
        elif before is not None and stack.like_ids != before:
            self._contradict(
                stack,
                f"the first axes of a state of shape {tuple(shape)} and of the token ids no longer have the same order",
            )

    def _contradict(self, stack: _Stack, why: str) -> None:
        assert stack.layout is not None
        stack.is_contradicted = True
        stack.why = f"{stack.why} says {IN_WORDS[stack.layout]}, {why}; states whose axes change place are not measured"
        stack.layout = None

    def why_not(self, block: Block) -> str:
        """Why a stack's states are not measured; empty if they are."""
        stack = self._stacks[block.stack]
        return self._changed.get(block.stack, "") if stack.layout is not None else stack.why

    def how(self) -> str:
        found = {f"{IN_WORDS[stack.layout]}, from {stack.why}" for stack in self._stacks.values() if stack.layout}
        return "; ".join(sorted(found))


def turned(x: Tensor, layout: Found) -> Tensor | None:
    """The state as (B, T, D); None if it has another number of axes than the layout."""
    if x.ndim != NUM_AXES[layout]:
        return None
    if layout == "TBC":
        return x.transpose(0, 1)
    if layout == "TC":
        return x.unsqueeze(0)
    if layout == "BNTC":
        return x.flatten(0, 1)
    return x if layout == "BTC" else x.flatten(1, 2) if layout == "BGC" else x.flatten(2).mT


def _disputed(found: dict[Found, str]) -> str:
    sides = ", ".join(f"{why} says {IN_WORDS[layout]}" for layout, why in found.items())
    return f"{sides}. Give attach(..., layout='BTC') or layout='TBC'"


def _from_attention(shape: torch.Size, size: Size) -> Found | None:
    """None if both axes are as long as the attention has queries, or if neither is."""
    if len(shape) == 2:
        return "TC" if size.queries == shape[0] else None
    if len(shape) != 3:
        return None
    batch_first, tokens_first = (
        size.queries == tokens and batch > 0 and size.batch % batch == 0
        for batch, tokens in ((shape[0], shape[1]), (shape[1], shape[0]))
    )
    if batch_first == tokens_first:
        return None
    return "BTC" if batch_first else "TBC"


def _of_grid(shape: torch.Size, width: int | None, size: Size | None, *, has_images: bool) -> tuple[Found | None, str]:
    """The layout of a state with two or four axes with the evidence, or None with the reason."""
    state = f"a state of shape {tuple(shape)}"
    if len(shape) == 2:
        seen = "attention was not seen on it" if size is None else f"its attention has {size.queries} queries"
        return None, (
            f"{state} may be the tokens of one sequence or of several, and {seen}. Give attach(..., layout='TC') if it is "
            "one, with documents=... if several are packed into it"
        )
    if width is None or (shape[1] == width) == (shape[-1] == width):
        return (
            None,
            f"it is not known which axis of {state} is the width: the width of the block is {width or 'unknown'}",
        )
    if shape[-1] == width and size is not None and not has_images:
        seen = f"attention of {size.queries} queries in {size.batch} rows on {state}"
        if size.queries == shape[2] and size.batch == shape[0] * shape[1]:
            return "BNTC", seen
        if size.queries == shape[1] and size.batch == shape[0]:
            return None, f"{seen} does not show what its third axis is"
    return "BGC" if shape[-1] == width else "BCG", f"{state} in a block that is {width} wide"


def _of_axes(shape: torch.Size, ids: torch.Size) -> Found | None:
    if len(shape) != 3 or shape[0] == shape[1]:
        return None
    return "BTC" if shape[:2] == ids else "TBC" if (shape[1], shape[0]) == ids else None


def _of_batch(shape: torch.Size, batch: int) -> Found | None:
    if shape[0] == shape[1]:
        return None
    return "BTC" if shape[0] == batch else "TBC" if shape[1] == batch else None
