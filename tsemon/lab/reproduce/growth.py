"""Small language models whose norms grow: how they train, and what is measured of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tsemon.lab.reproduce.observing import Frame, Values, forward, observe
from tsemon.lab.reproduce.training import Training, train
from tsemon.lab.train import standard_library_text, text_batches
from tsemon.measures import checkpoint_cosine, power_law_fit, sqrt_fit
from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig

MEASURES = ("total_param_norm", "norm_growth_exponent", "step_size", "update_alignment", "param_norm")
SCALE = 1000.0
"""The paper's c: what parameters are multiplied by to see the saturated network."""
BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "pre-norm": {"norm": "pre"},
    "post-norm": {"norm": "post"},
    "branch norm": {"norm": "branch", "score_scale": 1.0},
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    depth: int = 4
    width: int = 128
    heads: int = 4
    ffn: int = 512
    context: int = 64
    batch: int = 16
    num_steps: int = 800
    hold: int = 100
    """The inverse square root begins after so many steps."""
    learning_rate: float = 1e-3
    every: int = 10

    @property
    def checkpoint_every(self) -> int:
        """Checkpoints are an eighth of the steps apart."""
        return self.num_steps // 8

    def model(self, block: str) -> CausalLanguageModel:
        """Equal weights at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return CausalLanguageModel(
                CausalLanguageModelConfig(
                    vocab=256,
                    context=self.context,
                    depth=self.depth,
                    width=self.width,
                    heads=self.heads,
                    ffn=self.ffn,
                    activation="relu",
                    **BLOCKS[block],
                )
            )


QUICK = Sizes(width=64, ffn=256, batch=8, num_steps=200, hold=25, every=4)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    name: str
    is_constant: bool
    weight_decay: float


SCHEDULES = (
    Schedule(name="constant", is_constant=True, weight_decay=0.01),
    Schedule(name="inverse sqrt", is_constant=False, weight_decay=0.0),
)
DECAYED = Schedule(name="constant, weight decay 1", is_constant=True, weight_decay=1.0)


@dataclass(frozen=True, kw_only=True)
class Grown:
    """A trained model, and what was measured of it."""

    training: Training
    saturation: tuple[Values, Values]
    """At the start and at the end; entry 0 is the first block's input."""
    attended: Values
    """By (block, head), in the network with its parameters times `SCALE`."""
    attended_unscaled: Values

    def series(self, metric: str, layer: int | None = None) -> tuple[Values, Values]:
        return self.training.recording.series(metric, layer)

    @property
    def checkpoint_cosines(self) -> tuple[Values, Values]:
        return self.training.evaluations

    @property
    def norms(self) -> tuple[Values, Values]:
        return self.series("total_param_norm")


def grown(block: str, schedule: Schedule, sizes: Sizes) -> Grown:
    model = sizes.model(block)
    text = standard_library_text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.learning_rate, weight_decay=schedule.weight_decay)
    start = saturation(model, sizes)
    training = train(
        model,
        optimizer,
        text_batches(text, sizes.context, sizes.batch, seed=0),
        sizes.num_steps,
        every=sizes.every,
        measures=MEASURES,
        schedule=LambdaLR(optimizer, lambda step: 1.0 if schedule.is_constant else inverse_sqrt(step, sizes.hold)),
        evaluate=cosine_with_the_last_checkpoint(model),
        evaluate_every=sizes.checkpoint_every,
    )
    return Grown(
        training=training,
        saturation=(start, saturation(model, sizes)),
        attended=positions_attended(scaled(model), sizes),
        attended_unscaled=positions_attended(model, sizes),
    )


def cosine_with_the_last_checkpoint(model: nn.Module) -> Callable[[nn.Module], float]:
    """Each call is a checkpoint, held against the one before; the first against the weights as they are now."""
    last = checkpoint(model)

    def cosine(model: nn.Module) -> float:
        nonlocal last
        before, last = last, checkpoint(model)
        return float(checkpoint_cosine(before, last))

    return cosine


def checkpoint(model: nn.Module) -> list[Tensor]:
    """All parameters but embeddings and scalars, as tsemon's norm counts them."""
    named = model.named_parameters()
    return [p.detach().clone() for name, p in named if not name.startswith(("embed", "positions"))]


def inverse_sqrt(step: int, hold: int) -> float:
    """T5's: 1 / sqrt(max(t, hold)), as a share of its largest value."""
    return math.sqrt(hold / max(step + 1, hold))


def saturation(model: nn.Module, sizes: Sizes) -> Values:
    return observed(model, sizes, "saturation").layers["saturation"]


def positions_attended(model: nn.Module, sizes: Sizes) -> Values:
    return observed(model, sizes, "positions_attended").heads["positions_attended"]


def observed(model: nn.Module, sizes: Sizes, measure: str) -> Frame:
    """On sequences that it has not been trained on: another seed draws them."""
    tokens_BT, _ = next(text_batches(standard_library_text(), sizes.context, 4, seed=1))
    return observe(model, partial(forward, model, tokens_BT), measures=[measure], attention_rows="all")


@torch.no_grad()
def scaled(model: nn.Module) -> nn.Module:
    """f(x; c theta): a copy with all its parameters multiplied."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.mul_(SCALE)
    return copied


@dataclass(frozen=True, kw_only=True)
class Fits:
    """How well lines in sqrt(t) and in t explain a norm, and the exponent of its growth."""

    sqrt_r2: float
    linear_r2: float
    exponent: float
    """p in |theta_t| - |theta_0| = c t^p, over the second half of the steps: the local exponent."""

    @staticmethod
    def of(steps: Values, norms: Values) -> Fits:
        t, norm = torch.from_numpy(steps), torch.from_numpy(norms)
        return Fits(
            sqrt_r2=float(sqrt_fit(t, norm).r2),
            linear_r2=float(sqrt_fit(t.double().square(), norm).r2),  # the square root of t^2 is t
            exponent=float(power_law_fit(t[len(t) // 2 :], (norm - norm[0])[len(t) // 2 :]).exponent),
        )


def layer_slopes(run: Grown) -> Values:
    """Of each layer's norm, per sqrt(step)."""
    depth = len(run.training.recording.frames[0].layers["param_norm"])
    curves = [run.series("param_norm", layer) for layer in range(depth)]
    return np.array([float(sqrt_fit(*map(torch.from_numpy, curve)).slope) for curve in curves])
