"""How the norm of the parameters grows while small language models train, and how near to saturation that brings them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tsemon.lab.reproduce.growth import (
    BLOCKS,
    FACTORS,
    QUICK,
    SCALE,
    Grown,
    Setup,
    Sizes,
    grid_growth,
    grown,
    homogeneity,
)
from tsemon.lab.reproduce.observing import Values
from tsemon.lab.reproduce.plotting import COLOURS, panels
from tsemon.lab.reproduce.result import OURS, Claim, Experiment, Numbers, Plot, Result, Spread, Table, Trial, verdict
from tsemon.lab.reproduce.seeds import seeds_of

EXPERIMENT = Experiment(
    name="norm-growth",
    title="Growth of the parameter norm, and saturation",
    source="Effects of Parameter Norm Growth During Transformer Training (arXiv 2010.09697), Figures 1 to 6",
)
PRINTED = "branch norm", "post-norm"
"""The blocks of the paper's small language models."""
T5 = "pre-norm", "Adafactor"
"""Block and rule nearest to T5."""
T5_READING = "pre-norm", "inverse sqrt"
"""The same schedule with AdamW."""
FEW = 1.5
"""A head that attends to fewer positions attends to one (argmax)."""
NEAR_FUTURE = 0.1
"""A head attends to all later positions if its number of positions is this near to their mean number."""
ALIGNED = 0.15
"""The largest alignment in Figure 5."""
MODE = 0.1
"""This fraction of the heads is a mode of their distribution."""
ASSUMED = 0.1
"""The size of steps is in proportion to the learning rate and the norm if it is this near."""
ALIKE = 0.1
"""Curves of Figure 4 are similar if they differ by less everywhere."""
RAPID = 32.0
"""A cosine that is above 0.9 from this factor on approaches 1 rapidly."""


def trials(quick: bool, seed: int) -> dict[str, Trial]:
    sizes = _sizes(quick, seed)
    found: dict[str, Trial] = {str(setup): partial(grown, setup, sizes) for setup in sizes.setups()}
    for block, seed in _pairs(sizes):
        found[_homogeneous(block, seed)] = partial(homogeneity, block, seed, sizes)
    for rate, decay, seed in _grid(sizes):
        found[_cell(rate, decay, seed)] = partial(grid_growth, rate, decay, seed, sizes)
    return found


def _pairs(sizes: Sizes) -> Iterator[tuple[str, int]]:
    return ((block, seed) for block in (*PRINTED, "pre-norm") for seed in sizes.seeds)


def _grid(sizes: Sizes) -> Iterator[tuple[float, float, int]]:
    return ((r, decay, seed) for r in sizes.rates for decay in sizes.decays for seed in sizes.seeds)


def _homogeneous(block: str, seed: int) -> str:
    return f"homogeneity of {block}, seed {seed}"


def _cell(rate: float, decay: float, seed: int) -> str:
    return f"rate {rate:g}, decay {decay:g}, seed {seed}"


def _sizes(quick: bool, seed: int) -> Sizes:
    sizes = QUICK if quick else Sizes()
    return replace(sizes, seeds=seeds_of(seed, len(sizes.seeds)))


def result(quick: bool, seed: int, found: Mapping[str, Numbers]) -> Result:
    sizes = _sizes(quick, seed)
    runs = Runs(
        sizes=sizes,
        of_setup={setup: Grown(**found[str(setup)]) for setup in sizes.setups()},
        curves={pair: found[_homogeneous(*pair)] for pair in _pairs(sizes)},
        grid={cell: found[_cell(*cell)]["growth"] for cell in _grid(sizes)},
    )
    plots = {
        "norm": norm_plot(runs),
        "dynamics": dynamics_plot(runs),
        "saturation": saturation_plot(runs),
        "heads": heads_plot(runs),
        "homogeneity": homogeneity_plot(runs),
    }
    return Result(
        settings=settings(sizes),
        claims=claims(runs),
        plots=plots,
        tables=[fits_table(runs), dynamics_table(runs), grid_table(runs), attended_table(runs)],
        notes=NOTES,
    )


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The numbers of all trials."""

    sizes: Sizes
    of_setup: Mapping[Setup, Grown]
    curves: Mapping[tuple[str, int], Mapping[str, Sequence[float]]]
    """By block and seed: the curves of Figure 4."""
    grid: Mapping[tuple[float, float, int], float]
    """Growth by rate, weight decay and seed."""

    def over_seeds(self, block: str, rule: str) -> list[Grown]:
        return [self.of_setup[Setup(block=block, rule=rule, seed=seed)] for seed in self.sizes.seeds]

    def spread(self, of: Callable[[Grown], float], block: str, rule: str) -> Spread:
        return Spread([of(run) for run in self.over_seeds(block, rule)])

    def heads(self, block: str) -> Values:
        """Positions attended by each head of all seeds and both schedules, in the scaled network."""
        rules = ("constant", "inverse sqrt")
        return np.concatenate([run.attended for rule in rules for run in self.over_seeds(block, rule)])

    def curve(self, block: str, name: str) -> Values:
        """Mean over seeds."""
        curves = [self.curves[block, seed][name] for seed in self.sizes.seeds]
        return np.asarray(np.mean(curves, axis=0))

    def cell(self, rate: float, decay: float) -> Spread:
        return Spread([self.grid[rate, decay, seed] for seed in self.sizes.seeds])


def claims(runs: Runs) -> list[Claim]:
    return [*claims_of_growth(runs), *claims_of_dynamics(runs), *claims_of_saturation(runs), *claims_of_decay(runs)]


def claims_of_growth(runs: Runs) -> Iterator[Claim]:
    spread = runs.spread
    growth = {block: spread(lambda run: run.growth, block, "constant") for block in BLOCKS}
    yield Claim(
        paper="The parameter norm grows during training for practical transformer language models",
        seen=f"AdamW, constant rate: by factors of {each(growth, PRINTED)}",
        reading=each(growth, ["pre-norm"]),
        agrees=verdict(*(growth[block].is_above(1.0) for block in PRINTED)),
    )

    def square_root(block: str, rule: str) -> tuple[Spread, Spread, Spread]:
        return (
            spread(lambda run: run.fits.exponent, block, rule),
            spread(lambda run: run.fits.sqrt_r2, block, rule),
            spread(lambda run: run.fits.linear_r2, block, rule),
        )

    def fitted(found: tuple[Spread, Spread, Spread]) -> str:
        return f"exponent of growth in the second half {found[0]}; r2 of a line in sqrt(t) {found[1]}, in t {found[2]}"

    printed, reading = square_root(*T5), square_root(*T5_READING)
    yield Claim(
        paper="The T5 norm follows a sqrt(t) trend (r2 = 1.00; AdaFactor, learning rate 1 / sqrt(t))",
        seen=fitted(printed),
        reading=f"with AdamW: {fitted(reading)}",
        agrees=verdict(is_square_root(printed[0]), printed[1].mean > max(0.99, printed[2].mean)),
    )
    held, falling = (
        {block: spread(lambda run: run.fits.exponent, block, rule) for block in BLOCKS}
        for rule in ("constant", "inverse sqrt")
    )
    yield Claim(
        paper="We expect the growth trend to depend heavily on the learning rate schedule",
        seen=f"exponent with a constant rate {each(held, PRINTED)}; with the falling one {each(falling, PRINTED)}",
        reading=f"{each(held, ['pre-norm'])}; {each(falling, ['pre-norm'])}",
        agrees=verdict(*(held[block].is_above(falling[block]) for block in PRINTED)),
    )
    fits = [run.fits for run in runs.of_setup.values()]
    high = [fit for fit in fits if fit.sqrt_r2 > 0.95]
    yield Claim(
        paper="Does a high r2 of the fit to sqrt(t) show growth in proportion to sqrt(t)?",
        seen=f"{len(high)} of {len(fits)} runs have an r2 above 0.95, and "
        f"{sum(abs(fit.exponent - 0.5) < 0.15 for fit in high)} of these an exponent within 0.15 of 1/2",
        agrees=OURS,
    )

    def later(block: str, rule: str) -> Spread:
        """Mean slope of the later half of the layers over the mean slope of the earlier half."""
        depth = runs.sizes.depth
        return spread(
            lambda run: run.layer_slopes[depth // 2 :].mean() / run.layer_slopes[: depth // 2].mean(), block, rule
        )

    yield Claim(
        paper="Generally, the norm grows more quickly in later layers than in earlier ones (T5)",
        seen=f"slope of later layers over the slope of earlier ones {later(*T5)}",
        reading=f"with AdamW {later(*T5_READING)}",
        agrees=verdict(later(*T5).is_above(1.0)),
    )


def claims_of_dynamics(runs: Runs) -> Iterator[Claim]:
    spread, every = runs.spread, runs.sizes.every

    def aligned(block: str, rule: str) -> tuple[Spread, Spread, Spread]:
        return (
            spread(lambda run: every * run.peak, block, rule),
            spread(lambda run: max(run.alignments), block, rule),
            spread(lambda run: run.alignments[-1], block, rule),
        )

    def shown(found: tuple[Spread, Spread, Spread]) -> str:
        return f"largest at step {found[0].mean:.0f}, {found[1]}; at the end {found[2]}"

    printed, reading = aligned(*T5), aligned(*T5_READING)
    yield Claim(
        paper="The alignment initially rapidly increases to about 0.15, and then decays to near 0 (T5)",
        seen=shown(printed),
        reading=f"with AdamW: {shown(reading)}",
        agrees=verdict(
            printed[0].mean < runs.sizes.num_steps / 4 and 0.5 < printed[1].mean / ALIGNED < 2,
            printed[2].is_below(Spread([v / 2 for v in printed[1].values])),
        ),
    )

    def assumed(block: str, rule: str) -> tuple[Spread, Spread]:
        """How the size of steps changes from half of the training to its end, and how Assumption 1 predicts it."""
        hold, steps = runs.sizes.hold, np.array(runs.over_seeds(block, rule)[0].steps)
        rates = (hold / np.maximum(steps + 1, hold)) ** 0.5
        rate = rates[-10:].mean() / rates[len(rates) // 2 :][:10].mean()
        return spread(lambda run: run.step_ratio, block, rule), spread(lambda run: rate * run.norm_ratio, block, rule)

    (seen, predicted), (adamw, adamw_predicted) = assumed(*T5), assumed(*T5_READING)
    yield Claim(
        paper="Assumption 1: for large enough t, the size of a step is approximately proportional to the learning rate and "
        "the norm of the parameters (T5)",
        seen=f"from half of the training to its end, steps become {seen} times as large; predicted {predicted}",
        reading=f"with AdamW {adamw}; predicted {adamw_predicted}",
        agrees=verdict(abs(seen.mean / predicted.mean - 1) < ASSUMED),
    )

    def checkpoints(block: str, rule: str) -> tuple[Spread, Spread]:
        return spread(lambda run: run.checkpoints[0], block, rule), spread(lambda run: run.checkpoints[-1], block, rule)

    first, last = checkpoints(*T5)
    yield Claim(
        paper="The cosine similarity between each parameter checkpoint and its predecessor rapidly approaches 1 (T5)",
        seen=f"{runs.sizes.checkpoint_every} steps apart it is {first} at first and {last} at the end",
        reading="with AdamW {} and {}".format(*checkpoints(*T5_READING)),
        agrees=verdict(last.is_above(first)),
    )


def claims_of_saturation(runs: Runs) -> Iterator[Claim]:
    spread, sizes = runs.spread, runs.sizes
    starts = {block: spread(lambda run: float(np.mean(run.saturation[0][1:])), block, "constant") for block in BLOCKS}
    ends = {block: spread(lambda run: run.saturation[1][-1], block, "constant") for block in BLOCKS}
    yield Claim(
        paper="The similarity of a randomly initialized network is about 0 (BERT, RoBERTa, XLNet: post-norm)",
        seen=f"mean over layers: {each(starts, ['post-norm'])}",
        reading=each(starts, ["branch norm", "pre-norm"]),
        agrees=verdict(starts["post-norm"].mean < 0.2),
    )
    yield Claim(
        paper="Each of the transformers trained on Wikitext-2 and PTB reached a saturation level of 1.00",
        seen=f"last layer: {each(ends, PRINTED)}",
        reading=each(ends, ["authors' code", "pre-norm"]),
        agrees=verdict(*(ends[block].mean > 0.98 for block in PRINTED)),
    )
    printed, reading = runs.heads("authors' code"), runs.heads("branch norm")
    near = printed[np.abs(printed / sizes.mean_future - 1) < NEAR_FUTURE]
    second = f", at {near.mean():.1f} on average" if near.size else ""
    others = reading[reading >= FEW]
    yield Claim(
        paper="The distribution is bimodal, with one mode at 1, and the other around 41, the mean sequence length of an "
        "83-length encoder with positional masking",
        seen=f"code of the authors, whose mask multiplies: {np.mean(printed < FEW):.0%} of {printed.size} heads attend to "
        f"fewer than {FEW} positions, {near.size / printed.size:.0%} to {sizes.mean_future:g} within "
        f"{NEAR_FUTURE:.0%}{second}; {sizes.mean_future:g} is the mean number of later positions",
        reading=f"with a mask that excludes: {np.mean(reading < FEW):.0%} of {reading.size} heads attend to fewer than "
        f"{FEW} positions" + (f", the others to {others.mean():.1f} on average" if others.size else ""),
        agrees=verdict(bool(np.mean(printed < FEW) >= MODE), near.size / printed.size >= MODE),
    )
    at = FACTORS.index(RAPID)
    bare, biased = (
        {block: runs.curve(block, name) for block in BLOCKS_OF_CURVES} for name in ("without", "with biases")
    )
    apart = {block: float(np.abs(bare[block] - biased[block]).max()) for block in BLOCKS_OF_CURVES}
    yield Claim(
        paper="An approximately homogeneous function rapidly approaches 1.0 as c increases. We find similar curves for "
        "transformers with and without biases (Figure 4)",
        seen=f"cosine at c = {RAPID:g} without biases: {listed_by(bare, at, PRINTED)}; with: "
        f"{listed_by(biased, at, PRINTED)}; largest difference {max(apart[block] for block in PRINTED):.3f}",
        reading=f"{listed_by(bare, at, ['pre-norm'])}; {listed_by(biased, at, ['pre-norm'])}",
        agrees=verdict(all(bare[block][at] > 0.9 for block in PRINTED), all(apart[block] < ALIKE for block in PRINTED)),
    )


BLOCKS_OF_CURVES = (*PRINTED, "pre-norm")


def claims_of_decay(runs: Runs) -> Iterator[Claim]:
    sizes, usual = runs.sizes, 0.01
    growths = {rate: runs.cell(rate, usual) for rate in sizes.rates}
    strongest = {rate: runs.cell(rate, sizes.decays[-1]) for rate in sizes.rates}
    yield Claim(
        paper="Norm growth is probable when lambda = 0.01; if lambda is set too large, weight decay can prevent norm growth",
        seen="growth with 0.01: "
        + ", ".join(f"{growth} at rate {rate:g}" for rate, growth in growths.items())
        + f"; with {sizes.decays[-1]:g}: "
        + ", ".join(str(growth) for growth in strongest.values()),
        agrees=verdict(
            all(growth.is_above(1.0) for growth in growths.values()),
            any(growth.is_below(1.0) for growth in strongest.values()),
        ),
    )
    grows = {decay: [runs.cell(rate, decay).is_above(1.0) for rate in sizes.rates] for decay in sizes.decays}
    yield Claim(
        paper="Norm growth seems to largely depend on weight decay, with a threshold for lambda between 0.01 and 0.001",
        seen="the norm grows at "
        + ", ".join(f"{sum(are)} of {len(are)} rates with {decay:g}" for decay, are in grows.items()),
        agrees=verdict(
            all(all(are) if decay < usual else not any(are) for decay, are in grows.items()),
        ),
    )


def is_square_root(exponent: Spread) -> bool:
    return abs(exponent.mean - 0.5) < 0.15


def each(of_block: Mapping[str, Spread], blocks: Iterable[str]) -> str:
    return ", ".join(f"{of_block[block]} ({block})" for block in blocks)


def listed_by(curves: Mapping[str, Values], at: int, blocks: Iterable[str]) -> str:
    return ", ".join(f"{curves[block][at]:.3f} ({block})" for block in blocks)


def drawn(panel: Axes, runs: Runs, x: Callable[[Grown], Any], y: Callable[[Grown], Any]) -> None:
    """The first seed of each block and schedule."""
    for setup, run in runs.of_setup.items():
        if setup.seed == runs.sizes.seeds[0]:
            style = {"constant": "-", "inverse sqrt": "--"}.get(setup.rule, ":")
            colour = COLOURS[list(BLOCKS).index(setup.block)]
            panel.plot(x(run), y(run), style, color=colour, label=f"{setup.block}, {setup.rule}")
    panel.set_xlabel("step")


def since_start(norms: Sequence[float]) -> Values:
    return np.array(norms) - norms[0]


def norm_plot(runs: Runs) -> Plot:
    figure, (norm, layers) = panels("growth of the norm since step 0", "by layer: pre-norm, Adafactor", x="sqrt(step)")
    drawn(norm, runs, lambda run: np.sqrt(run.steps), lambda run: since_start(run.norms))
    run = runs.over_seeds(*T5)[0]
    for layer, norms in enumerate(run.layer_norms, start=1):
        layers.plot(np.sqrt(run.steps), since_start(norms), label=f"layer {layer}")
    norm.set(xlabel="sqrt(step)", ylabel="|w_t| - |w_0|")
    for panel in (norm, layers):
        panel.legend(fontsize=6)
    return Plot(
        figure=figure,
        caption="Seed 0. Growth in proportion to sqrt(step) is a straight line; faster growth bends upwards.",
    )


def dynamics_plot(runs: Runs) -> Plot:
    figure, axes = panels("cosine of a step with the parameters", "size of a step")
    drawn(axes[0], runs, lambda run: run.steps, lambda run: run.alignments)
    drawn(axes[1], runs, lambda run: run.steps, lambda run: run.step_sizes)
    axes[1].set(yscale="log", ylabel="norm")
    axes[0].legend(fontsize=6)
    return Plot(
        figure=figure,
        caption="Seed 0. A cosine near 0 on the left is a step at right angles to the parameters (Fig. 5).",
    )


def saturation_plot(runs: Runs) -> Plot:
    figure, axes = panels("saturation at random initial weights", "after training, constant rate", x="layer")
    for place, panel in enumerate(axes):
        for block in BLOCKS:
            values = np.mean([run.saturation[place] for run in runs.over_seeds(block, "constant")], axis=0)
            panel.plot(np.arange(1, len(values)), values[1:], "o-", label=block)
        panel.set(ylabel="cosine with the scaled network", ylim=(-0.1, 1.05), xticks=range(1, runs.sizes.depth + 1))
    axes[1].legend(fontsize=8)
    return Plot(
        figure=figure,
        caption="Mean over seeds (Fig. 2). At 1 the scaled network gives the same direction. Training adds the difference "
        "between the two panels.",
    )


def heads_plot(runs: Runs) -> Plot:
    figure, axes = panels("mask that multiplies (the authors' code)", "mask that excludes", x="positions attended")
    for panel, block in zip(axes, ("authors' code", "branch norm"), strict=True):
        panel.hist(runs.heads(block), bins=np.linspace(0, runs.sizes.context, 33).tolist(), color=COLOURS[0])
        panel.axvline(runs.sizes.mean_future, color="grey", linestyle=":")
        panel.set(ylabel="heads")
    return Plot(
        figure=figure,
        caption="Heads of the scaled networks of all seeds and schedules (Fig. 3). Dotted: the mean number of later "
        "positions.",
    )


def homogeneity_plot(runs: Runs) -> Plot:
    figure, axes = panels("without biases", "with biases", x="c")
    for panel, name in zip(axes, ("without", "with biases"), strict=True):
        for block in BLOCKS_OF_CURVES:
            panel.semilogx(FACTORS, runs.curve(block, name), "o-", label=block)
        panel.set(ylabel="cosine with the saturated network", ylim=(-0.1, 1.05))
    axes[0].legend(fontsize=8)
    return Plot(
        figure=figure, caption="Last block at random initial weights, mean over seeds (Fig. 4). Saturated: c = 1,000."
    )


def fits_table(runs: Runs) -> Table:
    columns: dict[str, Callable[[Grown], float]] = {
        "loss, last 50 steps": lambda run: run.loss,
        "norm, start": lambda run: run.norms[0],
        "end": lambda run: run.norms[-1],
        "r2 of sqrt(t)": lambda run: run.fits.sqrt_r2,
        "r2 of t": lambda run: run.fits.linear_r2,
        "exponent of growth, second half": lambda run: run.fits.exponent,
        "over all steps, as tsemon reports it": lambda run: run.exponent,
    }
    return _over_seeds("Growth of the norm", runs, columns)


def dynamics_table(runs: Runs) -> Table:
    columns: dict[str, Callable[[Grown], float]] = {
        "largest alignment": lambda run: max(run.alignments),
        "last": lambda run: run.alignments[-1],
        "first step size": lambda run: run.step_sizes[0],
        "last size": lambda run: run.step_sizes[-1],
        f"cosine of checkpoints {runs.sizes.checkpoint_every} steps apart, last": lambda run: run.checkpoints[-1],
        "saturation of the last layer, start": lambda run: run.saturation[0][-1],
        "saturation, end": lambda run: run.saturation[1][-1],
    }
    return _over_seeds("Steps, direction and saturation", runs, columns)


def _over_seeds(title: str, runs: Runs, columns: Mapping[str, Callable[[Grown], float]]) -> Table:
    kinds = dict.fromkeys((setup.block, setup.rule) for setup in runs.of_setup)
    rows = [(*kind, *(str(runs.spread(of, *kind)) for of in columns.values())) for kind in kinds]
    return Table(title=title, columns=("block", "optimizer", *columns), rows=rows)


def grid_table(runs: Runs) -> Table:
    sizes = runs.sizes
    return Table(
        title=f"Growth of the norm in {sizes.num_grid_steps} steps, by weight decay and learning rate (Figure 6)",
        columns=("weight decay", *(f"rate {rate:g}" for rate in sizes.rates)),
        rows=[(f"{decay:g}", *(str(runs.cell(rate, decay)) for rate in sizes.rates)) for decay in sizes.decays],
    )


def attended_table(runs: Runs) -> Table:
    return Table(
        title="Positions attended, seed 0",
        columns=("block", "optimizer", f"parameters times {SCALE:g}, by head", "as they are, by head"),
        rows=[
            (setup.block, setup.rule, listed(run.attended), listed(run.attended_unscaled))
            for setup, run in runs.of_setup.items()
            if setup.seed == runs.sizes.seeds[0]
        ],
    )


def listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def settings(sizes: Sizes) -> dict[str, Any]:
    return {
        "models": f"depth {sizes.depth}, width {sizes.width}, {sizes.heads} heads, FFN {sizes.ffn}, ReLU, no dropout, "
        "PyTorch's initial weights (the paper: depth 12, width 768, 12 heads, FFN 512; and T5-base)",
        "blocks": "branch norm is the paper's pre-norm, x + LN(f(x)), with scaled scores (Definitions 4 to 6); the "
        "authors' code has unscaled scores and multiplies the scores of later positions by 0; pre-norm, x + f(LN(x)), is "
        "T5's",
        "data": f"bytes of the standard library's sources, batches of {sizes.batch} x {sizes.context} (the paper: words of "
        "WikiText-2 and Penn Treebank; C4)",
        "optimizers": f"constant: AdamW, learning rate {sizes.learning_rate:g}, weight decay 0.01, PyTorch's default; "
        f"inverse sqrt: AdamW with T5's schedule, 1 / sqrt(max(t, {sizes.hold})), without weight decay; Adafactor: torch's, "
        f"with this schedule from a rate of {sizes.adafactor_rate:g} on, relative to the size of each parameter",
        "steps": f"{sizes.num_steps}, every {sizes.every}th measured; checkpoints {sizes.checkpoint_every} steps apart; "
        f"grid of Figure 6: {sizes.num_grid_steps}",
        "norms": "of all parameters but embeddings and scalars; saturation at c = 1024, positions attended at c = 1000, of "
        "weights above 1e-5",
        "agrees": f"exponents within 0.15 of 1/2; the largest alignment within a factor of 2 of {ALIGNED:g}, and the last "
        f"one below half of it; Assumption 1 within {ASSUMED:.0%}; a saturation above 0.98 is 1.00; a "
        f"tenth of the heads is a mode; curves of Figure 4 above 0.9 at c = {RAPID:g}, and less than {ALIKE:g} apart",
        "seeds and dtype": f"{len(sizes.seeds)} for weights and batches, from {sizes.seeds[0]} on; float32",
    }


NOTES = (
    "An r2 near 1 alone proves little: all smooth growth is nearly a straight line in sqrt(t) over a short range. The page "
    "therefore adds the r2 of a line in t, and the exponent p of |w_t| - |w_0| = c t^p.",
    "The branch norm block's residual stream is 1-homogeneous in the parameters by construction and is saturated without "
    "training: saturation can be compared within one architecture only.",
    "Attention scores grow with the fourth power of c, and ties are rare in real numbers, so a head of the scaled network "
    "picks one position. The authors' code multiplies masked scores by 0 and not by minus infinity. If all scores of a "
    "query are negative, its later positions win together. Their second mode of 41 positions out of 83 is the mean number "
    "of later positions, 41; uniform causal attention has 42. Such a head looks ahead.",
    "Adafactor makes each step of a parameter proportional to the rate and to the parameter's norm, clipping apart, so "
    "Assumption 1 is largely built into it; AdamW does not have it built in.",
    "PyTorch's AdamW subtracts learning rate times weight decay times weights. Eq. 3 of the paper subtracts weight decay "
    "times weights, whatever the rate, so its thresholds may belong to another optimizer.",
)
