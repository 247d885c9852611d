"""A deep Transformer-XL on text: does post-norm learn, which tau makes it learn, and which mean looks ahead?

Axes: `B` batch, `T` tokens, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tsemon.lab.reproduce.plotting import COLOURS, panels
from tsemon.lab.reproduce.result import (
    OURS,
    Claim,
    Experiment,
    Numbers,
    Plot,
    Result,
    Spread,
    Table,
    Trial,
    verdict,
)
from tsemon.lab.reproduce.seeds import seeds_of
from tsemon.lab.reproduce.training import train
from tsemon.lab.train import standard_library_text, text_streams
from tsemon.lab.train.schedules import constant
from tsemon.lab.train.tasks import RecurrentTask, cross_entropy
from tsemon.models import TransformerXL, TransformerXLConfig

EXPERIMENT = Experiment(
    name="deep-transformer-xl",
    title="Training a deep Transformer-XL, with and without a look ahead",
    source="Classic Transformers (arXiv 2312.06182), Section 3.4 and Figure 7",
)
MEASURES = ("token_similarity", "token_diversity", "grad_norm")
TAUS = (0.2, 0.3, 0.5, 1.0)
TRAIN_BYTES, VAL_BYTES = 2_000_000, 1_000_000
SIMILAR = 0.05
"""Losses that differ by less are similar: Figure 7 shows no numbers."""
HUGE = 0.5
"""A performance gap of more nats per byte is huge."""
LEARNT = 0.1
"""A model has learned if its loss is this far below that of the frequencies of bytes."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A block: post-norm, pre-norm, or post-norm with a de-escalation at the feed-forward network's input."""

    norm: str = "post"
    tau: float | None = None
    full_mean: bool = False

    def __str__(self) -> str:
        if self.tau is None:
            return f"{self.norm}-norm"
        return f"{'full' if self.full_mean else 'prefix'} mean, tau {self.tau:g}"

    def fields(self) -> dict[str, Any]:
        place = {} if self.tau is None else {"tau_at": "feed_forward"}
        return {"norm": self.norm, "tau": self.tau, "full_mean": self.full_mean} | place


POST, PRE = Variant(), Variant(norm="pre")
PRINTED = Variant(tau=1.0, full_mean=True)
"""Eq. 21 as it is printed: the mean of all tokens, and tau = 1."""


def prefix(tau: float) -> Variant:
    return Variant(tau=tau)


def full(tau: float) -> Variant:
    return Variant(tau=tau, full_mean=True)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    depths: tuple[int, ...] = (12, 48)
    taus: tuple[float, ...] = TAUS
    seeds: range = range(3)
    width: int = 64
    context: int = 32
    """Of a segment, and of the memory."""
    batch: int = 8
    num_steps: int = 240
    learning_rate: float = 1e-3
    warmup: int = 20
    every: int = 10
    num_val_rows: int = 64

    @property
    def depth(self) -> int:
        """The depth at which the paper's claims are tested."""
        return self.depths[-1]

    @property
    def window(self) -> int:
        """The last sixth of the steps, over which a loss is averaged."""
        return self.num_steps // 6

    def variants(self) -> list[Variant]:
        return [POST, PRE, *map(full, self.taus), *map(prefix, self.taus)]

    def model(self, variant: Variant, depth: int, seed: int) -> TransformerXL:
        config = TransformerXLConfig(
            vocab=256,
            context=self.context,
            memory=self.context,
            depth=depth,
            width=self.width,
            heads=4,
            ffn=2 * self.width,
            activation="relu",
            init_std=1 / math.sqrt(3 * self.width),  # the variance of PyTorch's linear layers; 0.02 is for 1,000 wide
            **variant.fields(),
        )
        torch.manual_seed(seed)
        return TransformerXL(config)


QUICK = Sizes(
    depths=(8, 24), taus=(0.3, 1.0), seeds=range(1), num_steps=72, learning_rate=2e-3, warmup=10, num_val_rows=24
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The losses, diversity and gradients of one model."""

    losses: Sequence[float]
    """One for each step, from before it."""
    at_once: float
    """Nats per byte of text not trained on, if a whole segment is read in one pass."""
    token_by_token: float
    """The same, where each byte is predicted from those before it and nothing else."""
    steps: Sequence[int]
    diversity: Sequence[float]
    """Token diversity of the last block's output, before the operator of the next one, at these steps."""
    gradients: Sequence[float]
    """Norm of each block's gradient at step 0."""

    def training_loss(self, window: int) -> float:
        return float(np.mean(self.losses[-window:]))


def trials(quick: bool, seed: int) -> dict[str, Trial]:
    sizes = _sizes(quick, seed)
    return {_key(*run): partial(trained, *run, sizes) for run in _runs(sizes)}


def _runs(sizes: Sizes) -> Iterator[tuple[Variant, int, int]]:
    """The deepest models first: they take the longest."""
    for depth in reversed(sizes.depths):
        for variant in sizes.variants():
            for seed in sizes.seeds:
                yield variant, depth, seed


def _key(variant: Variant, depth: int, seed: int) -> str:
    return f"{variant}, depth {depth}, seed {seed}"


def _sizes(quick: bool, seed: int) -> Sizes:
    sizes = QUICK if quick else Sizes()
    return replace(sizes, seeds=seeds_of(seed, len(sizes.seeds)))


def result(quick: bool, seed: int, found: Mapping[str, Numbers]) -> Result:
    sizes = _sizes(quick, seed)
    outcomes = Outcomes(sizes, {run: Outcome(**found[_key(*run)]) for run in _runs(sizes)})
    return Result(
        settings=settings(sizes),
        claims=claims(outcomes),
        plots={"training": training_plot(outcomes), "tau": tau_plot(outcomes)},
        tables=[table(outcomes, depth) for depth in reversed(sizes.depths)],
        notes=NOTES,
    )


def trained(variant: Variant, depth: int, seed: int, sizes: Sizes) -> Numbers:
    """All variants see the same text in the same order."""
    text = standard_library_text(TRAIN_BYTES + VAL_BYTES)
    model = sizes.model(variant, depth, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=sizes.learning_rate)
    training = train(
        model,
        optimizer,
        text_streams(text[:TRAIN_BYTES], sizes.context, sizes.batch),
        sizes.num_steps,
        every=sizes.every,
        measures=MEASURES,
        schedule=constant(optimizer, warmup=sizes.warmup),
        task=RecurrentTask(),
    )
    val = text[TRAIN_BYTES:]
    steps, diversity = training.recording.series("token_diversity", -1)
    return {
        "losses": training.losses.tolist(),
        "at_once": val_loss(model, val, sizes, at_once),
        "token_by_token": val_loss(model, val, sizes, token_by_token),
        "steps": steps.tolist(),
        "diversity": diversity.tolist(),
        "gradients": training.first_gradients.tolist(),
    }


@torch.no_grad()
def val_loss(
    model: TransformerXL, text: Tensor, sizes: Sizes, predict: Callable[[TransformerXL, Tensor, list[Tensor]], Tensor]
) -> float:
    """Of the second segment of each row; the first, which lies in the past as a whole, gives the memory."""
    batches = text_streams(text, sizes.context, sizes.num_val_rows)
    model.eval()
    _, memory = model(next(batches)[0])
    inputs, targets = next(batches)
    return float(cross_entropy(predict(model, inputs, memory), targets))


def at_once(model: TransformerXL, tokens_BT: Tensor, memory: list[Tensor]) -> Tensor:
    """(B, T, V), as in training."""
    log_probabilities: Tensor = model(tokens_BT, memory)[0]
    return log_probabilities


def token_by_token(model: TransformerXL, tokens_BT: Tensor, memory: list[Tensor]) -> Tensor:
    """(B, T, V), those of token t from a pass over tokens 0 to t alone."""
    ends = range(1, tokens_BT.shape[1] + 1)
    return torch.stack([model(tokens_BT[:, :end], memory)[0][:, -1] for end in ends], dim=1)


@cache
def frequency_loss() -> float:
    """Nats per byte of a model that knows how often each byte occurs and nothing else."""
    shares = torch.bincount(standard_library_text(TRAIN_BYTES).long()).double() / TRAIN_BYTES
    return float(torch.special.entr(shares).sum())


@dataclass(frozen=True)
class Outcomes:
    sizes: Sizes
    of_run: Mapping[tuple[Variant, int, int], Outcome]

    def over_seeds(self, variant: Variant, depth: int | None = None) -> list[Outcome]:
        depth = self.sizes.depth if depth is None else depth
        return [self.of_run[variant, depth, seed] for seed in self.sizes.seeds]

    def training(self, variant: Variant, depth: int | None = None) -> Spread:
        return Spread([one.training_loss(self.sizes.window) for one in self.over_seeds(variant, depth)])

    def honest(self, variant: Variant, depth: int | None = None) -> Spread:
        return Spread([one.token_by_token for one in self.over_seeds(variant, depth)])

    def at_once(self, variant: Variant, depth: int | None = None) -> Spread:
        return Spread([one.at_once for one in self.over_seeds(variant, depth)])

    def gradient(self, variant: Variant, block: int, depth: int | None = None) -> float:
        """The geometric mean over seeds of a block's gradient norm at step 0."""
        return Spread([one.gradients[block] for one in self.over_seeds(variant, depth)]).geometric_mean

    def best_prefix(self, depth: int | None = None) -> Variant:
        """The one with the lowest loss on other text, token by token."""
        return min(map(prefix, self.sizes.taus), key=lambda variant: self.honest(variant, depth).order)


def claims(outcomes: Outcomes) -> list[Claim]:
    learnt = frequency_loss() - LEARNT
    post, pre, printed = (outcomes.training(variant) for variant in (POST, PRE, PRINTED))
    best = outcomes.best_prefix()
    honest_pre, honest_best = outcomes.honest(PRE), outcomes.honest(best)
    gap = abs(pre.mean - printed.mean)
    lowest = min((outcomes.training(full(tau)) for tau in outcomes.sizes.taus), key=lambda loss: loss.order)
    first, last = (outcomes.gradient(PRINTED, block) for block in (0, -1))
    first_of_prefix = outcomes.gradient(prefix(1.0), 0)
    fails = not post.is_below(learnt)  # NaN, too
    is_huge = printed.is_below(post) and post.mean - printed.mean > HUGE
    return [
        Claim(
            paper="There is a huge performance gap between the post-norm and our de-escalated post-norm models (the former "
            "essentially failed, thus was cut short)",
            seen=f"training loss {post} and {printed} (huge: more than {HUGE} apart); the frequencies of bytes alone give "
            f"{frequency_loss():.3f}",
            reading=f"on other text, token by token: post-norm {outcomes.honest(POST)}; {best} {honest_best}",
            agrees=verdict(fails and is_huge, printed.is_below(learnt)),
        ),
        Claim(
            paper="The pre-norm model and our de-escalated post-norm model performed similarly",
            seen=f"training loss {pre} and {printed}: {gap:.3f} apart, {'less' if gap < SIMILAR else 'more'} than {SIMILAR}",
            reading=f"on other text, token by token: {honest_pre} and {outcomes.honest(PRINTED)}; {best} {honest_best}",
            agrees=verdict(gap < SIMILAR),
        ),
        Claim(
            paper="tau = 1 fixed without any tuning",
            seen=f"training loss {printed}; the best full mean of the grid has {lowest}. Gradient norm at step 0: "
            f"{first:.2g} in the first block, {last:.2g} in the last",
            reading=f"with the mean of the prefix {outcomes.training(prefix(1.0))}; gradient norm "
            f"{first_of_prefix:.2g} in the first block",
            agrees=verdict(printed.is_below(learnt), not lowest.is_below(printed)),
        ),
        Claim(
            paper="Does the mean of the whole segment look ahead?",
            seen=f"Eq. 21 as printed, on other text: {outcomes.at_once(PRINTED)} a segment at once, "
            f"{outcomes.honest(PRINTED)} token by token",
            reading=f"{best}: {outcomes.at_once(best)} and {honest_best}",
            agrees=OURS,
        ),
        Claim(
            paper="Which tau trains a causal model?",
            seen="; ".join(
                f"depth {depth}: {outcomes.best_prefix(depth)}, {outcomes.honest(outcomes.best_prefix(depth), depth)} "
                f"(post-norm {outcomes.honest(POST, depth)}, pre-norm {outcomes.honest(PRE, depth)})"
                for depth in outcomes.sizes.depths
            ),
            reading="; ".join(
                f"tau {tau:g} learns at depth {', '.join(map(str, depths)) or 'none'}"
                for tau, depths in learning_depths(outcomes).items()
            ),
            agrees=OURS,
        ),
    ]


def learning_depths(outcomes: Outcomes) -> dict[float, list[int]]:
    """By tau of the prefix mean: the depths at which the model learns."""
    learnt = frequency_loss() - LEARNT
    return {
        tau: [depth for depth in outcomes.sizes.depths if outcomes.honest(prefix(tau), depth).is_below(learnt)]
        for tau in outcomes.sizes.taus
    }


def training_plot(outcomes: Outcomes) -> Plot:
    figure, (loss, diversity) = panels("training loss", "token diversity, last block")
    for variant in (POST, PRE, PRINTED, outcomes.best_prefix()):
        curves = np.mean([one.losses for one in outcomes.over_seeds(variant)], axis=0)
        width = min(10, len(curves))
        smooth = curves[: len(curves) // width * width].reshape(-1, width).mean(axis=1)
        loss.plot(np.arange(width / 2, len(smooth) * width, width), smooth, label=str(variant))
        seeds = outcomes.over_seeds(variant)
        diversity.semilogy(seeds[0].steps, np.exp(np.mean([np.log(one.diversity) for one in seeds], axis=0)))
    loss.axhline(frequency_loss(), color="grey", linestyle=":", label="frequencies of bytes")
    loss.set(xlabel="step", ylabel="nats per byte, mean of 10 steps and all seeds")
    diversity.set(xlabel="step", ylabel="t_div, geometric mean of all seeds")
    loss.legend(fontsize=7)
    return Plot(
        figure=figure,
        caption=f"Depth {outcomes.sizes.depth}. Training predicts a segment at once, so the full mean can look ahead: "
        "compare its loss with the next picture. The smaller t_div, the more alike the tokens are.",
    )


def tau_plot(outcomes: Outcomes) -> Plot:
    figure, axes = panels("training loss", "other text, token by token", x="tau")
    for panel, value in zip(axes, (outcomes.training, outcomes.honest), strict=True):
        for colour, depth in zip(COLOURS, outcomes.sizes.depths, strict=False):
            for make, style in ((full, "--"), (prefix, "-")):
                losses = [value(make(tau), depth) for tau in outcomes.sizes.taus]
                panel.errorbar(
                    outcomes.sizes.taus,
                    [loss.mean for loss in losses],
                    [loss.deviation for loss in losses],
                    color=colour,
                    linestyle=style,
                    marker=".",
                    label=f"{make(1.0)}".split(",")[0] + f", depth {depth}",
                )
            panel.axhline(value(PRE, depth).mean, color=colour, linestyle=":", linewidth=1)
        panel.axhline(frequency_loss(), color="grey", linewidth=1)
        panel.set_ylabel("nats per byte")
    axes[0].legend(fontsize=7)
    return Plot(
        figure=figure,
        caption="Mean and standard deviation over seeds. Dotted: pre-norm of the same depth. Gray: the frequencies of "
        "bytes. With the full mean, the right picture shows the loss without a look ahead.",
    )


def table(outcomes: Outcomes, depth: int) -> Table:
    rows = [
        (
            str(variant),
            str(outcomes.training(variant, depth)),
            str(outcomes.at_once(variant, depth)),
            str(outcomes.honest(variant, depth)),
            float(np.mean([one.diversity[0] for one in outcomes.over_seeds(variant, depth)])),
            float(np.mean([one.diversity[-1] for one in outcomes.over_seeds(variant, depth)])),
            outcomes.gradient(variant, 0, depth),
            outcomes.gradient(variant, -1, depth),
        )
        for variant in outcomes.sizes.variants()
    ]
    columns = ("model", "training loss, end", "other text, a segment at once", "token by token")
    gradient = ("gradient norm at step 0, first block", "last block")
    return Table(
        title=f"Depth {depth}", columns=(*columns, "t_div of the last block, start", "end", *gradient), rows=rows
    )


def settings(sizes: Sizes) -> dict[str, Any]:
    return {
        "model": f"Transformer-XL, depths {', '.join(map(str, sizes.depths))}, width {sizes.width}, 4 heads, FFN "
        f"{2 * sizes.width}, ReLU, segments and memory of {sizes.context} tokens, no dropout (the paper: depth 60, FFN 820, "
        "201M parameters)",
        "initial weights": f"normal, standard deviation 1 / sqrt(3 x width) = {1 / math.sqrt(3 * sizes.width):.3f}",
        "de-escalation": "at the feed-forward network's input, as the paper has it; its tau is 1",
        "data": f"{TRAIN_BYTES:,} bytes of the standard library's sources, in reading order; losses of other text over "
        f"{sizes.num_val_rows} segments of the {VAL_BYTES:,} bytes that follow (the paper: WikiText-103)",
        "optimizer": f"Adam, learning rate {sizes.learning_rate:g}, constant after {sizes.warmup} steps of warm-up, no "
        f"clipping; {sizes.num_steps} steps of {sizes.batch} segments (the paper: 50,000 of 40)",
        "seeds and dtype": f"{len(sizes.seeds)} for the weights, from {sizes.seeds[0]} on, the same text for all; float32",
    }


NOTES = (
    "The paper does not say how the mean is taken in this causal model. Eq. 21 as printed takes the mean of all tokens, "
    "which tells each token about later ones. The paper compares training losses, which do not show this.",
    "Token by token means that the logits of token t come from a pass over the memory and tokens 0 to t. The memory holds "
    "the segment before, all of it past, so it leaks nothing.",
    "A model whose tokens have become alike gives a constant, which each training step adjusts to the memory that earlier "
    "weights have left. On other text, with a memory of its own, its loss may be higher than in training.",
    "With prefix means, tau = 1 turns the first token of each segment into zeros. Biases start at zero, so a LayerNorm gets "
    "an exact zero, and its gradient explodes.",
    "Weights with a standard deviation of 0.02, Transformer-XL's own, mix next to nothing in a model this narrow: "
    "similarity then does not escalate. The weights here have the product of width and variance that PyTorch's layers have.",
)
