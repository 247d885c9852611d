"""A model of the zoo and its known structure: blocks, stacks, and the places where a test can read hidden states.

Axes: B samples, n tokens, d width, H heads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.setups.matrix import (
    ATTENTION,
    BIT_EQUAL,
    BLOCKS,
    CLEAN,
    GRADIENTS,
    HIDDEN_STATES,
    PARAMETERS,
    SATURATION,
    UPDATES,
    Row,
)

KIND = "Public models and loops"
BATCH, TOKENS, WIDTH, HEADS, VOCABULARY = 3, 12, 32, 4, 100
COLUMNS = (BLOCKS, BIT_EQUAL, HIDDEN_STATES, ATTENTION, PARAMETERS, GRADIENTS, UPDATES, SATURATION, CLEAN)

Batch = Mapping[str, Any]
"""Keyword arguments of the model's forward."""


@dataclass(frozen=True)
class Place:
    """Where to read a hidden state: an input or an output of a module."""

    module: nn.Module
    is_input: bool = False
    pick: int | str = 0
    """Which input or output: its position, or the name of a keyword argument."""


def batch_first(x):
    return x


def tokens_first(x):
    return x.transpose(0, 1)


def one_row(x):
    """For (n, d), without a batch axis."""
    return x.unsqueeze(0)


def grid(x):
    """For (B, height, width, d)."""
    return x.flatten(1, 2)


def whole(batch, size, num_tokens):
    """Each sample is one sequence."""
    return [(sample, torch.arange(num_tokens)) for sample in range(size)]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Blocks in sequence, which pass one hidden state on."""

    places: Sequence[Place]
    """Input of the first block, then the output of each block."""
    parts: Sequence[Sequence[nn.Module]]
    """Modules of each block."""
    attentions: Sequence[int | None] | None = None
    """Index of each block's self-attention among all attention calls of a forward pass; None if the block has none.

    By default, each block makes one call, after those of the previous stacks.
    """
    layout: Callable[[torch.Tensor], torch.Tensor] = batch_first
    """Returns a hidden state as (B, n, d)."""
    sequences: Callable[[Batch, int, int], Sequence[tuple[int, torch.Tensor]]] = whole
    """From a batch, B and n: for each sequence its sample and the positions of its tokens."""

    @property
    def depth(self):
        return len(self.parts)


def stack(blocks, **known):
    """Blocks that are modules called in order."""
    blocks = list(blocks)
    places = [Place(blocks[0], is_input=True), *map(Place, blocks)]
    return Stack(places=places, parts=[[block] for block in blocks], **known)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A built model and its training settings."""

    model: nn.Module
    batch: Callable[[int], Batch]
    """From the number of a forward pass: the inputs of the model."""
    loss: Callable[[Any], torch.Tensor]
    """From the output of the model."""
    stacks: Sequence[Stack]
    views: Sequence[Sequence[int]] = ()
    """Indexes of the stacks that tsemon may report, if there is more than one correct answer: one stream of a diffusion
    transformer, or both. All stacks by default."""
    is_one_depth: bool = False
    """True if the stacks are stages of one depth, which tsemon may report as one stack."""
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(
        parameters, lr=1e-2
    )
    num_passes: int = 1
    """Forward and backward passes per step."""
    clip: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of attach."""

    def all_views(self):
        return self.views or [range(len(self.stacks))]

    def depths(self):
        """Correct numbers of blocks per stack, as the table shows them."""
        views = [[self.stacks[number].depth for number in view] for view in self.all_views()]
        return [" + ".join(map(str, view)) for view in views] + [str(sum(view)) for view in views if self.is_one_depth]


@dataclass(frozen=True, kw_only=True, eq=False)
class Specimen(Row):
    """A model or training loop of the zoo."""

    build: Callable[[], Subject]
    kind: str = KIND
    columns: Sequence[str] = COLUMNS
    package: str = ""
    """The tests are skipped if it is not installed."""
    is_representative: bool = False
    """True if `make test` runs it, as the example of its mechanism."""

    def __str__(self):
        return self.name


def ids(step, size=BATCH, tokens=TOKENS):
    return torch.randint(3, VOCABULARY, (size, tokens), generator=torch.Generator().manual_seed(100 + step))


def images(step, channels=3, pixels=16):
    return torch.randn(BATCH, channels, pixels, pixels, generator=torch.Generator().manual_seed(100 + step))


def own_loss(output):
    return output.loss


def to_a_target(output):
    """Mean squared error to a fixed tensor."""
    if not isinstance(output, torch.Tensor):
        output = output[0]
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
    return (output - target).square().mean()


def enliven(model):
    """Draw weights so large that tokens, heads and blocks differ and a wrong number cannot pass for a correct one."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            if parameter.ndim > 1:
                scale = 1.4 * parameter[0].numel() ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model
