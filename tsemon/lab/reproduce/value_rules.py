"""Llama-like language models with the value rules of Value Residual Learning, all on the same batches.

Axes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tsemon.lab.reproduce.observing import Frame, Values, forward, observe, recorded
from tsemon.lab.reproduce.result import Numbers, Spread
from tsemon.lab.train.batches import Batch
from tsemon.lab.train.loop import autocast, on_device, train_steps
from tsemon.lab.train.schedules import cosine
from tsemon.lab.train.tasks import Task
from tsemon.lab.train.text import text_batches
from tsemon.measures import value_spectrum
from tsemon.models import Llama

MEASURES = (
    "token_similarity",
    "attention_entropy",
    "importance_entropy",
    "sink_share",
    "first_value_norm_ratio",
    "first_hidden_norm_ratio",
    "value_top_eigenvalue",
)


LAMBDAS: Mapping[str, float] = {"lambda 1": 1.0, "lambda 2": 2.0, "lambda 3": 3.0}
"""V_n + lambda V_1 (Fig. 8); they stand beside the rules of tsemon.models.llama, which has one of them."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    size: str = "2m"
    """Of tsemon.models.llama, with the fields of `model` in place of its own."""
    model: Mapping[str, int]
    rules: tuple[str, ...] = ("vanilla", "resformer", "svformer", "neutreno", "denseformer")
    """Of tsemon.models.llama, or of LAMBDAS; trained for all steps."""
    short_rules: tuple[str, ...] = ()
    """As those, trained for the first `short_steps` of the same schedule."""
    batch_size: int = 8
    steps: int
    short_steps: int = 0
    warmup: int = 120
    learning_rate: float = 6e-4
    window: int = 100
    """Steps over which losses are averaged."""
    seeds: range = range(1)
    device: str = "cpu"
    precision: torch.dtype = torch.float32
    compiled: bool = False

    @property
    def steps_of(self) -> Mapping[str, int]:
        """Number of steps by rule."""
        return dict.fromkeys(self.rules, self.steps) | dict.fromkeys(self.short_rules, self.short_steps)


@dataclass(frozen=True, kw_only=True)
class Trained:
    loss: Values
    """Of each step."""
    start: Frame
    """What a pass over the validation sequences shows before the first step."""
    end: Frame
    val_loss: float
    spectrum: Values
    """Eigenvalues of the first layer's values, mean over the validation sequences, descending."""

    def numbers(self) -> Numbers:
        """The same in plain values."""
        return {
            "loss": self.loss.tolist(),
            "start": _plain(self.start),
            "end": _plain(self.end),
            "val_loss": self.val_loss,
            "spectrum": self.spectrum.tolist(),
        }

    @staticmethod
    def of(numbers: Numbers) -> Trained:
        """From the numbers."""
        return Trained(
            loss=np.array(numbers["loss"]),
            start=_frame(numbers["start"]),
            end=_frame(numbers["end"]),
            val_loss=numbers["val_loss"],
            spectrum=np.array(numbers["spectrum"]),
        )


def _plain(frame: Frame) -> dict[str, Any]:
    body = asdict(frame)
    return body | {kind: {name: of.tolist() for name, of in body[kind].items()} for kind in ("layers", "heads")}


def _frame(body: Mapping[str, Any]) -> Frame:
    arrays = {kind: {name: np.array(of) for name, of in body[kind].items()} for kind in ("layers", "heads")}
    return Frame(step=body["step"], scalars=body["scalars"], **arrays)


@dataclass(frozen=True)
class Runs:
    """All models, one mapping by rule for each seed."""

    seeds: Sequence[Mapping[str, Trained]]

    @property
    def rules(self) -> Sequence[str]:
        return list(self.seeds[0])

    def of(self, rule: str) -> list[Trained]:
        """The models of a rule."""
        return [trained[rule] for trained in self.seeds]

    def spread(self, rule: str, of: Callable[[Trained], float]) -> Spread:
        """A number of each model of a rule."""
        return Spread([float(of(trained)) for trained in self.of(rule)])

    def mean(self, rule: str, of: Callable[[Trained], Values]) -> Values:
        """The mean over the models of a rule."""
        return np.asarray(np.mean([of(trained) for trained in self.of(rule)], axis=0))


def with_bos(batches: Iterable[Batch], bos: int) -> Iterator[Batch]:
    """The same windows with one more token in front, so that their first token is to be told, too."""
    for inputs_BT, targets_BT in batches:
        whole_BT = torch.cat([inputs_BT[:, :1], targets_BT], dim=1)
        yield torch.nn.functional.pad(whole_BT[:, :-1], (1, 0), value=bos), whole_BT


def train_all(sizes: Sizes, text: Tensor, *, num_val: int = 32) -> Runs:
    """Each rule with each seed."""
    return Runs(
        [{rule: train(rule, seed, sizes, text, num_val=num_val) for rule in sizes.steps_of} for seed in sizes.seeds]
    )


def train(rule: str, seed: int, sizes: Sizes, text: Tensor, *, num_val: int = 32) -> Trained:
    """Train on the text but its last twentieth, of which `num_val` sequences validate. Rules with equal seeds see the same
    batches and begin with the same weights."""
    bos, context = sizes.model["vocab"] - 1, sizes.model["context"]
    num_held = len(text) // 20
    val = next(with_bos(text_batches(text[-num_held:], context - 1, num_val, seed=1000), bos))
    batches = with_bos(text_batches(text[:-num_held], context - 1, sizes.batch_size, seed=seed), bos)
    torch.manual_seed(seed)
    model = model_of(rule, sizes).to(sizes.device)
    val_tokens_BT = val[0].to(sizes.device)
    start = seen_of(model, val_tokens_BT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = cosine(optimizer, warmup=sizes.warmup, total=sizes.steps)
    runner: nn.Module = torch.compile(model) if sizes.compiled else model  # type: ignore[assignment]
    some = itertools.islice(batches, sizes.steps_of[rule])
    with recorded(model, optimizer, measures=["loss"]) as recording:
        for loss in train_steps(runner, optimizer, some, schedule, clip_norm=1.0, precision=sizes.precision):
            recording.monitor.step(loss)
    with torch.no_grad(), autocast(val_tokens_BT.device, sizes.precision):
        val_loss = Task().loss(model, *on_device(val, val_tokens_BT.device)).item()
    return Trained(
        loss=recording.series("loss")[1],
        start=start,
        end=seen_of(model, val_tokens_BT),
        val_loss=val_loss,
        spectrum=first_spectrum(model, val_tokens_BT),
    )


def model_of(rule: str, sizes: Sizes) -> Llama:
    if rule in LAMBDAS:
        return Llama.from_preset(f"resformer-{sizes.size}", **sizes.model, value_weights=(1.0, LAMBDAS[rule]))
    return Llama.from_preset(f"{rule}-{sizes.size}", **sizes.model)


def seen_of(model: Llama, tokens_BT: Tensor) -> Frame:
    return observe(model, partial(forward, model, tokens_BT), measures=MEASURES, attention_rows="all")


def first_spectrum(model: Llama, tokens_BT: Tensor) -> Values:
    """Eigenvalues of the first layer's values (Eq. 12), mean over sequences, heads side by side."""
    block = model.blocks[0]
    with torch.no_grad():
        values_BTD = block.attention.to_value(block.norm1(model.embed(tokens_BT)))  # type: ignore[union-attr,operator]
    return np.asarray(value_spectrum(values_BTD).mean(dim=0).cpu())
