"""Trainings in which one sub-step of one block is damaged in mid-run.

Two public models and two of tsemon's own, each with every damage that its blocks can have, twice, in different blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from trials import subjects as s
from trials.defects import Defect, Lab
from trials.recording import Trial

STEPS, EVENT = 700, 400
SubStep = Literal["norm", "residual", "attention", "feed-forward"]


@dataclass(frozen=True)
class Parts:
    """Names of the modules in a block."""

    output: str
    second: str
    """Last layer of the feed-forward part."""
    norms: tuple[str, str]
    packed: str | None = None
    """Layer that makes queries, keys and values."""
    separate: tuple[str, str, str] = ("", "", "")
    """The three layers, if they are not one."""

    def weight(self, block: nn.Module, kind: int) -> Tensor:
        """The weight of queries (0), keys (1) or values (2), as a view."""
        if self.packed is None:
            return block.get_submodule(self.separate[kind]).weight.data
        weight = block.get_submodule(self.packed).weight.data
        by_output = weight if weight.shape[0] > weight.shape[1] else weight.T
        return by_output.chunk(3)[kind]


OWN = Parts("attention.to_output", "feed_forward.contract", ("norm1", "norm2"), "attention.to_query_key_value")
GPT2 = Parts("attn.c_proj", "mlp.c_proj", ("ln_1", "ln_2"), "attn.c_attn")
BERT = Parts(
    "attention.output.dense",
    "output.dense",
    ("attention.output.LayerNorm", "output.LayerNorm"),
    separate=("attention.self.query", "attention.self.key", "attention.self.value"),
)
Damage = Callable[[nn.Module, Parts, random.Random], None]


def _output(block: nn.Module, parts: Parts, _: random.Random) -> None:
    block.get_submodule(parts.output).weight.data.mul_(20)


def _values(block: nn.Module, parts: Parts, _: random.Random) -> None:
    parts.weight(block, 2).mul_(20)


def _queries_and_keys(block: nn.Module, parts: Parts, _: random.Random) -> None:
    for kind in (0, 1):
        parts.weight(block, kind).mul_(25)


def _feed_forward(block: nn.Module, parts: Parts, _: random.Random) -> None:
    block.get_submodule(parts.second).weight.data.mul_(20)


def _constant_feed_forward(block: nn.Module, parts: Parts, _: random.Random) -> None:
    second = block.get_submodule(parts.second)
    second.weight.data.zero_()
    second.bias.data.normal_(std=5)


def _norm(block: nn.Module, parts: Parts, rng: random.Random) -> None:
    block.get_submodule(rng.choice(parts.norms)).weight.data.mul_(30)


def _zero(norm: nn.Module, _args: object) -> None:
    norm.weight.data.zero_()  # type: ignore[operator]


def _zeroed_norm(block: nn.Module, parts: Parts, rng: random.Random) -> None:
    """It stays 0, too: otherwise the model would recover within 20 steps."""
    norm = block.get_submodule(rng.choice(parts.norms))
    norm.register_forward_pre_hook(_zero)


def _residual(block: nn.Module, parts: Parts, _: random.Random) -> None:
    """Y = 0.05 X + A in place of X + A, in a post-norm block."""
    inputs: list[Tensor] = []
    block.register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
    norm = block.get_submodule(parts.norms[0])
    norm.register_forward_pre_hook(lambda _module, args: (args[0] - 0.95 * inputs.pop(),))


DAMAGES: Mapping[str, tuple[SubStep, str, Damage]] = {
    "output": ("attention", "the output layer of attention times 20", _output),
    "values": ("attention", "values times 20", _values),
    "logits": ("attention", "queries and keys times 25", _queries_and_keys),
    "second": ("feed-forward", "the second layer of the feed-forward part times 20", _feed_forward),
    "constant": ("feed-forward", "the feed-forward part returns a constant", _constant_feed_forward),
    "norm": ("norm", "the gain of a norm times 30", _norm),
    "zeroed": ("norm", "the gain of a norm is and stays 0", _zeroed_norm),
    "residual": ("residual", "a residual of weight 0.05", _residual),
}


@dataclass(frozen=True)
class Kind:
    """A model, and how it is trained."""

    subject: Callable[[int], s.Make]
    """By number of blocks."""
    about: str
    rate: float
    parts: Parts
    is_post: bool = False


def _text(depth: int) -> s.Make:
    return partial(s.language, depth=depth)


def _post(depth: int) -> s.Make:
    return partial(s.language, depth=depth, norm="post")


def _gpt2(depth: int) -> s.Make:
    return partial(s.gpt2, layers=depth)


def _bert(depth: int) -> s.Make:
    return partial(s.bert, layers=depth)


KINDS = {
    "text": Kind(_text, "tsemon's language model, pre-norm", 2.5e-3, OWN),
    "post": Kind(_post, "tsemon's language model, post-norm", 1.5e-3, OWN, is_post=True),
    "gpt2": Kind(_gpt2, "Hugging Face's GPT-2", 1.5e-3, GPT2),
    "bert": Kind(_bert, "Hugging Face's BERT", 1.5e-3, BERT, is_post=True),
}


@dataclass(frozen=True)
class Plant:
    """A training, and the cause that tsemon should name."""

    trial: Trial
    control: Trial
    """The same training without the damage."""
    block: int
    sub_step: SubStep


def plants(seeds: Sequence[int], depth: int) -> Iterator[Plant]:
    """Return every damage in every model for each seed. The seed also draws the block."""
    for seed in seeds:
        for name, kind in KINDS.items():
            control = Trial(
                name=f"{name}-{seed}",
                subject=kind.subject(depth),
                about=kind.about,
                seed=seed,
                rate=kind.rate,
                warmup=100 if kind.is_post else 40,
                steps=STEPS,
                every=None,
            )
            for damage, (sub_step, about, apply) in DAMAGES.items():
                if damage == "residual" and not kind.is_post:
                    continue  # where the norm comes first, the residual alone cannot be scaled from outside
                rng = random.Random(f"{name} {damage} {seed}")
                block = rng.randrange(depth)
                trial = control.failing(
                    f"{name}-{damage}-{seed}",
                    "fresh",
                    f"{kind.about}: {about}, block {block}",
                    _defect(apply, block, kind.parts, rng),
                    event_step=EVENT,
                    shows_in_loss=False,
                )
                yield Plant(trial, control, block, sub_step)


def _defect(damage: Damage, block: int, parts: Parts, rng: random.Random) -> Defect:
    @torch.no_grad()
    def apply(lab: Lab) -> None:
        damage(lab.blocks[block], parts, rng)

    return apply
