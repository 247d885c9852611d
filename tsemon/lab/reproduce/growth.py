"""Small language models whose norms grow: how they train, and their measurements."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tsemon.lab.reproduce.observing import Frame, Values, forward, observe
from tsemon.lab.reproduce.random_encoder import caught
from tsemon.lab.reproduce.result import Numbers
from tsemon.lab.reproduce.training import Training, train
from tsemon.lab.train import standard_library_text, text_batches
from tsemon.lab.train.loop import train_steps
from tsemon.measures import checkpoint_cosine, param_norm, power_law_fit, saturation, sqrt_fit
from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig

MEASURES = ("total_param_norm", "norm_growth_exponent", "step_size", "update_alignment", "param_norm")
SCALE = 1000.0
"""The paper's c: what parameters are multiplied by to see the saturated network."""
FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
"""Smaller c, for Figure 4."""
BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "branch norm": {"norm": "branch"},
    "post-norm": {"norm": "post"},
    "authors' code": {"norm": "branch", "score_scale": 1.0, "masking": "multiply"},
    "pre-norm": {"norm": "pre"},
}
"""The paper's pre-norm x + LN(f(x)) of Definitions 4 to 6, its post-norm, the block that its authors' code has, and the
pre-norm of the field, which T5 has."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An optimizer with its schedule."""

    weight_decay: float = 0.0
    is_constant: bool = False
    """Otherwise the rate falls as 1 / sqrt(t), as T5's does."""
    is_adafactor: bool = False
    """Otherwise the optimizer is AdamW."""

    def optimizer(self, model: nn.Module, sizes: Sizes) -> torch.optim.Optimizer:
        if self.is_adafactor:  # its rate is relative to the size of each parameter
            return torch.optim.Adafactor(model.parameters(), lr=sizes.adafactor_rate, weight_decay=self.weight_decay)
        return torch.optim.AdamW(model.parameters(), lr=sizes.learning_rate, weight_decay=self.weight_decay)

    def share(self, step: int, hold: int) -> float:
        """The learning rate over its largest value."""
        return 1.0 if self.is_constant else inverse_sqrt(step, hold)


RULES: Mapping[str, Rule] = {
    "constant": Rule(is_constant=True, weight_decay=0.01),
    "inverse sqrt": Rule(),
    "Adafactor": Rule(is_adafactor=True),
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
    """The inverse square root begins after this step."""
    learning_rate: float = 1e-3
    adafactor_rate: float = 1e-2
    every: int = 10
    seeds: range = range(3)
    num_grid_steps: int = 200
    rates: tuple[float, ...] = (1e-4, 1e-3, 3e-3)
    decays: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)

    @property
    def checkpoint_every(self) -> int:
        """Checkpoints are an eighth of the steps apart."""
        return self.num_steps // 8

    @property
    def mean_future(self) -> float:
        """Mean number of later positions."""
        return (self.context - 1) / 2

    def setups(self) -> Iterator[Setup]:
        for seed in self.seeds:
            for block in BLOCKS:
                for rule in ("constant", "inverse sqrt"):
                    yield Setup(block=block, rule=rule, seed=seed)
            yield Setup(block="pre-norm", rule="Adafactor", seed=seed)

    def model(self, block: str, seed: int = 0) -> CausalLanguageModel:
        """Equal weights at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
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


QUICK = Sizes(
    width=64,
    ffn=256,
    batch=8,
    num_steps=200,
    hold=25,
    every=4,
    seeds=range(1),
    num_grid_steps=50,
    rates=(1e-3,),
    decays=(1e-2, 10.0),
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model to train."""

    block: str
    rule: str
    """A key of RULES."""
    seed: int

    def __str__(self) -> str:
        return f"{self.block}, {self.rule}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Grown:
    """Measurements of a trained model."""

    loss: float
    """Mean of the last 50 steps."""
    steps: Sequence[float]
    norms: Sequence[float]
    step_sizes: Sequence[float]
    alignments: Sequence[float]
    layer_norms: Sequence[Sequence[float]]
    """By layer and step."""
    exponent: float
    """Exponent of growth over all steps, as tsemon reports it."""
    checkpoints: Sequence[float]
    """Cosine of the parameters at each checkpoint with those at the checkpoint before."""
    saturation: Sequence[Sequence[float]]
    """At the start and at the end; entry 0 is the first block's input."""
    attended: Sequence[float]
    """By head of all blocks, in the network with its parameters times `SCALE`."""
    attended_unscaled: Sequence[float]

    @property
    def growth(self) -> float:
        return self.norms[-1] / self.norms[0]

    @property
    def fits(self) -> Fits:
        return Fits.of(np.array(self.steps), np.array(self.norms))

    @property
    def peak(self) -> int:
        """Index of the largest alignment."""
        return int(np.argmax(self.alignments))

    @property
    def step_ratio(self) -> float:
        """Size of the last steps over the size of those at half the training."""
        return _late(self.step_sizes)

    @property
    def norm_ratio(self) -> float:
        """The same for the norm of the parameters."""
        return _late(self.norms)

    @property
    def layer_slopes(self) -> Values:
        """The slope of each layer's norm, per sqrt(step)."""
        steps = torch.tensor(self.steps)
        return np.array([float(sqrt_fit(steps, torch.tensor(norms)).slope) for norms in self.layer_norms])


def _late(values: Sequence[float]) -> float:
    return float(np.mean(values[-10:]) / np.mean(values[len(values) // 2 :][:10]))


def grown(setup: Setup, sizes: Sizes) -> Numbers:
    rule, model = RULES[setup.rule], sizes.model(setup.block, setup.seed)
    optimizer = rule.optimizer(model, sizes)
    start = saturations(model, sizes)
    training = train(
        model,
        optimizer,
        text_batches(standard_library_text(), sizes.context, sizes.batch, seed=setup.seed),
        sizes.num_steps,
        every=sizes.every,
        measures=MEASURES,
        schedule=LambdaLR(optimizer, lambda step: rule.share(step, sizes.hold)),
        evaluate=cosine_with_the_last_checkpoint(model),
        evaluate_every=sizes.checkpoint_every,
    )
    return asdict(_measured(training, start, model, sizes))


def _measured(training: Training, start: Values, model: nn.Module, sizes: Sizes) -> Grown:
    series = training.recording.series
    steps, norms = series("total_param_norm")
    return Grown(
        loss=training.mean_loss(50),
        steps=steps.tolist(),
        norms=norms.tolist(),
        step_sizes=series("step_size")[1].tolist(),
        alignments=series("update_alignment")[1].tolist(),
        layer_norms=[series("param_norm", layer)[1].tolist() for layer in range(sizes.depth)],
        exponent=float(series("norm_growth_exponent")[1][-1]),
        checkpoints=training.evaluations[1].tolist(),
        saturation=[start.tolist(), saturations(model, sizes).tolist()],
        attended=positions_attended(scaled(model), sizes).ravel().tolist(),
        attended_unscaled=positions_attended(model, sizes).ravel().tolist(),
    )


def grid_growth(rate: float, decay: float, seed: int, sizes: Sizes) -> Numbers:
    """The factor by which the norm of the paper's pre-norm grows at a constant rate (Figure 6)."""
    model = sizes.model("branch norm", seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    before = float(param_norm(checkpoint(model)))
    batches = text_batches(standard_library_text(), sizes.context, sizes.batch, seed=seed)
    for _ in train_steps(model, optimizer, islice(batches, sizes.num_grid_steps)):
        pass
    return {"growth": float(param_norm(checkpoint(model))) / before}


def homogeneity(block: str, seed: int, sizes: Sizes) -> Numbers:
    """The cosine of the last block's output with the output of the saturated network, at random initial weights: for each
    of FACTORS, with and without biases (Figure 4)."""
    found = {}
    for name, has_biases in (("with biases", True), ("without", False)):
        model = sizes.model(block, seed)
        if not has_biases:
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("bias"):
                    parameter.data.zero_()
        limit = last_states(scaled(model), sizes)
        found[name] = [float(saturation(last_states(scaled(model, factor), sizes), limit).mean()) for factor in FACTORS]
    return found


@torch.no_grad()
def last_states(model: nn.Module, sizes: Sizes) -> Tensor:
    last = f"blocks.{sizes.depth - 1}"
    with caught(model) as seen:
        model(held_out_tokens(sizes))
    return seen[last][1]


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


def saturations(model: nn.Module, sizes: Sizes) -> Values:
    return observed(model, sizes, "saturation").layers["saturation"]


def positions_attended(model: nn.Module, sizes: Sizes) -> Values:
    return observed(model, sizes, "positions_attended").heads["positions_attended"]


def observed(model: nn.Module, sizes: Sizes, measure: str) -> Frame:
    return observe(model, partial(forward, model, held_out_tokens(sizes)), measures=[measure], attention_rows="all")


def held_out_tokens(sizes: Sizes) -> Tensor:
    """Sequences that it has not been trained on: another seed draws them."""
    return next(text_batches(standard_library_text(), sizes.context, 4, seed=1000))[0]


@torch.no_grad()
def scaled(model: nn.Module, factor: float = SCALE) -> nn.Module:
    """f(x; c theta): a copy with all its parameters multiplied."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.mul_(factor)
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
