"""Classic Transformers, Figure 5: how much of the mean token must go, and where, for tokens to stay diverse.

Axes: `L` blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tsemon.lab.reproduce.observing import Values, forward, observe
from tsemon.lab.reproduce.plotting import COLOURS, panels
from tsemon.lab.reproduce.random_encoder import NUM_TOKENS, caught, random_encoder, random_tokens, twin
from tsemon.lab.reproduce.result import Claim, Experiment, Plot, Result, Table, verdict
from tsemon.lab.reproduce.seeds import seeds_of
from tsemon.measures import token_diversity
from tsemon.models import Encoder
from tsemon.models.blocks import Place

EXPERIMENT = Experiment(
    name="de-escalation",
    title="De-escalation keeps tokens diverse above a critical tau",
    source="Why Classic Transformers Are Shallow (arXiv 2312.06182), Figure 5",
)
TAUS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
PLACES: Mapping[str, Place] = {
    "after the block's last norm": "output",
    "at the feed-forward input": "feed_forward",
    "after attention": "attention",
}
ALPHAS = (0.5, 1.0, 2.0)
OFFSETS = (-0.1, -0.05, 0.05, 0.1)
"""From the critical tau."""
AFTER = "after the block's last norm, seen after it"
Curves = Mapping[str, Mapping[float, Values]]
"""Of each place and tau, mean diversity of each block's output, (L,)."""


def run(quick: bool, seed: int = 0) -> Result:
    ffn = 1024 if quick else 2048
    runs, others, critical_runs = (1, 1, 1) if quick else (20, 4, 4)
    seeds = seeds_of(seed, runs)
    at_places = dict(zip(PLACES.values(), (seeds, seeds[:others], seeds[:others]), strict=True))
    curves = experiment(at_places, depth=40, width=512, heads=8, ffn=ffn)
    growth = around_critical(seeds[:critical_runs], depth=40, width=512, heads=8, ffn=ffn)
    return Result(
        settings={
            "encoder": f"that of Figure 2 with 40 blocks: n = {NUM_TOKENS}, d = 512, h = 8, alpha = 1, q = "
            f"{ffn}, X from N(0, 1)",
            "runs": f"{runs} at the block's output (the paper has 20), {others} at the two other places, "
            f"{critical_runs} around each critical tau; weights and input from seeds counted from {seeds[0]}, shared by all "
            "tau, places and alpha",
            "operator": "(I - tau P) X with the mean over all tokens, tau 0, 0.1 ... 0.5",
            "dtype": "float32",
        },
        claims=claims(curves, growth),
        plots={"places": figure(curves), "critical": critical_figure(growth)},
        tables=[*map(table, curves, curves.values()), growth],
        notes=[
            "At the block's output tsemon looks before the operator, as afterwards tau = 1 would hide everything. "
            "What the next block gets is the panel beside it (token_diversity of the output).",
            "Why there is a critical tau: attention and residual multiply the odds t_sim/t_div by xi_1/xi_2, 1 + "
            "alpha^2 where attention is near its mean (Eq. 9), and the operator by (1 - tau)^2. The product is 1 at "
            "tau = 1 - 1/sqrt(1 + alpha^2): 0.106, 0.293 and 0.553 for alpha 0.5, 1 and 2.",
            "Above the critical tau the odds settle where that product balances the similarity that feed-forward "
            "network and chance add in each block.",
        ],
    )


def experiment(
    seeds: Mapping[Place, Sequence[int]], *, taus: Sequence[float] = TAUS, depth: int, width: int, heads: int, ffn: int
) -> Curves:
    labels = {place: label for label, place in PLACES.items()}
    found: dict[str, dict[float, list[Values]]] = {}
    for seed in sorted(set().union(*seeds.values())):
        model = random_encoder(seed, depth=depth, width=width, heads=heads, ffn=ffn)
        for place in (place for place, chosen in seeds.items() if seed in chosen):
            for tau in taus:
                seen, after = diversity(twin(model, tau=tau, tau_at=place), seed)
                found.setdefault(labels[place], {}).setdefault(tau, []).append(seen)
                if place == "output":
                    found.setdefault(AFTER, {}).setdefault(tau, []).append(after)
    return {label: {tau: np.mean(each, axis=0) for tau, each in of.items()} for label, of in found.items()}


def diversity(model: Encoder, seed: int) -> tuple[Values, Values]:
    """Of each block, (L,): as tsemon sees it, before an operator at the output, and of what the next block gets."""
    x_BTD = random_tokens(seed, model.config.width)
    with caught(model) as seen:
        frame = observe(model, lambda: forward(model, x_BTD), measures=["token_diversity"])
    after = [token_diversity(seen[f"blocks.{layer}"][1]).item() for layer in range(model.config.depth)]
    return frame.layers["token_diversity"][1:], np.array(after)


def critical(alpha: float) -> float:
    return 1 - 1 / math.sqrt(1 + alpha**2)


def around_critical(seeds: Iterable[int], *, depth: int, width: int, heads: int, ffn: int) -> Table:
    """How fast the odds t_sim/t_div grow over the second half of the blocks, below and above the critical tau."""
    found: dict[tuple[float, float], list[Values]] = {
        (alpha, critical(alpha) + offset): [] for alpha in ALPHAS for offset in OFFSETS
    }
    for seed in seeds:
        model = random_encoder(seed, depth=depth, width=width, heads=heads, ffn=ffn)
        for (alpha, tau), each in found.items():
            each.append(diversity(twin(model, alpha=alpha, tau=tau), seed)[0])
    rows = []
    for (alpha, tau), each in found.items():
        odds = np.array([(1 - values) / values for values in each])
        growth = (odds[:, -1] / odds[:, depth // 2 - 1]) ** (2 / depth)
        expected = max(1.0, (1 + alpha**2) * (1 - tau) ** 2)
        rows.append((alpha, critical(alpha), tau, expected, float(growth.mean()), float(np.mean(each, axis=0)[-1])))
    return Table(
        title="Around the critical tau, operator at the block's output, seen before it",
        columns=(
            "alpha",
            "critical tau",
            "tau",
            "growth of the odds per block, expected",
            "measured",
            "t_div at the end",
        ),
        rows=rows,
    )


def claims(curves: Curves, growth: Table) -> Sequence[Claim]:
    after = curves[AFTER]
    last = {label: np.array([of[tau][-1] for tau in TAUS]) for label, of in curves.items()}
    steady = {tau: after[tau][9] - after[tau][-1] for tau in (0.4, 0.5)}
    places = [last[label] for label in PLACES]
    apart = np.ptp(np.stack(places), axis=0)
    apart_after = np.ptp(np.stack([last[AFTER], *places[1:]]), axis=0)
    _, _, _, expected, measured, end = np.array(growth.rows, dtype=float).T
    is_below = expected > 1
    return [
        Claim(
            paper="Once tau reaches 0.4 token similarity no longer escalates.",
            seen="Diversity of the last block's output, for tau = 0, 0.1 ... 0.5: "
            f"{', '.join(f'{x:.3g}' for x in last[AFTER])}. From block 10 on it changes by {-steady[0.4]:+.3f} for "
            f"tau = 0.4 and {-steady[0.5]:+.3f} for 0.5; for 0.3 by {after[0.3][-1] - after[0.3][9]:+.3f}, still "
            "falling.",
            agrees=verdict(max(steady.values()) < 0.01, after[0.3][19] - after[0.3][-1] > 0.01),
        ),
        Claim(
            paper="At other places in the block the operator gives almost identical plots.",
            seen="For tau = 0, 0.1 ... 0.5 the three places differ at the last block by "
            f"{', '.join(f'{x:.1g}' for x in apart)} where one looks before the operator, by "
            f"{', '.join(f'{x:.1g}' for x in apart_after)} where one looks after it: at tau = 0.3 the output has "
            f"{places[0][3]:.2f} before and {last[AFTER][3]:.2f} after it, the other places have {places[1][3]:.2f} "
            f"and {places[2][3]:.2f}.",
            agrees=verdict(bool((apart < 0.05).all()), bool((apart_after < 0.05).all())),
        ),
        Claim(
            paper="(What Eq. 9 implies) The critical tau is 1 - 1/sqrt(1 + alpha^2), for other alpha too.",
            seen="Over the second half of the blocks the odds t_sim/t_div grow per block as (1 + alpha^2)(1 - tau)^2 "
            f"has it, within {np.abs(measured / expected - 1)[is_below].max():.1%} below the critical tau, where "
            f"diversity ends at {end[is_below].min():.1g} to {end[is_below].max():.2g}; above it they grow by "
            f"{np.abs(measured - 1)[~is_below].max():.1%} a block at most and end at {end[~is_below].min():.2f} to "
            f"{end[~is_below].max():.2f}.",
            agrees=verdict(
                bool((np.abs(measured / expected - 1) < 0.05).all()), end[is_below].max() < 0.5 < end[~is_below].min()
            ),
        ),
    ]


def figure(curves: Curves) -> Plot:
    before, *elsewhere = PLACES
    labels = (before, AFTER, *elsewhere)
    drawing, axes = panels(
        "Operator at the output, seen before it",
        "Operator at the output, seen after it",
        "Operator at the feed-forward input",
        "Operator after attention",
        x="block",
    )
    for panel, label in zip(axes, labels, strict=True):
        for tau, mean in curves[label].items():
            panel.plot(np.arange(1, len(mean) + 1), mean, label=f"tau = {tau}")
        panel.set_ylim(0, 1.02)
    axes[0].set_ylabel("t_div of the block's output")
    axes[-1].legend(fontsize=8)
    return Plot(
        figure=drawing,
        caption="Diversity of tokens, mean over runs, for the operator at each of the three places. A curve that goes on "
        "falling is one of escalation.",
    )


def critical_figure(growth: Table) -> Plot:
    drawing, (panel, right) = panels("Growth of the odds per block", "Diversity at the last block", x="tau")
    for alpha, colour in zip(ALPHAS, COLOURS, strict=False):
        rows = np.array([row for row in growth.rows if row[0] == alpha], dtype=float)
        _, _, tau, _, measured, end = rows.T
        panel.plot(tau, measured, "o", color=colour, label=f"alpha = {alpha}")
        smooth = np.linspace(tau.min(), tau.max(), 50)
        panel.plot(smooth, np.maximum(1, (1 + alpha**2) * (1 - smooth) ** 2), "-", color=colour)
        right.semilogy(tau, end, "o-", color=colour, label=f"alpha = {alpha}")
        for each in (panel, right):
            each.axvline(critical(alpha), color=colour, linestyle=":")
    panel.set_ylabel("growth of t_sim / t_div")
    right.set_ylabel("t_div")
    right.legend(fontsize=8, loc="lower left")
    return Plot(
        figure=drawing,
        caption="Dotted: the critical tau of each alpha. Left: points are measured over the second half of the blocks, "
        "lines are (1 + alpha^2)(1 - tau)^2 where that is above 1.",
    )


def table(label: str, curves: Mapping[float, Values]) -> Table:
    depth = len(curves[0.0])
    blocks = sorted({1, 2, *range(5, depth + 1, 5), depth})
    return Table(
        title=f"t_div by block, operator {label}",
        columns=("block", *(f"tau {tau}" for tau in curves)),
        rows=[(block, *(float(mean[block - 1]) for mean in curves.values())) for block in blocks],
    )
