"""Classic Transformers, Figure 8: how near xi_1/xi_2 stays to the ratio of the expected values.

Axes: `N` draws, `T` tokens, `D` width; `S` sizes t of the perturbation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tsemon.lab.reproduce.observing import Values
from tsemon.lab.reproduce.plotting import panels
from tsemon.lab.reproduce.result import Claim, Experiment, Plot, Result, Table, verdict
from tsemon.measures import mu_squared, xi
from tsemon.models import attend

EXPERIMENT = Experiment(
    name="concentration",
    title="The escalation rate concentrates as the width grows",
    source="Why Classic Transformers Are Shallow (arXiv 2312.06182), Figure 8",
    num_seeds=3,
)
NUM_TOKENS = 100
WIDTHS = (10, 20, 40)
DRAWS = 50


@dataclass(frozen=True, kw_only=True)
class Eta:
    """eta = E[xi_1]/E[xi_2] - xi_1/xi_2, for each t."""

    mean_S: Values
    """Mean of `DRAWS` draws, with the expected values of Eq. 9."""
    sampled_S: Values
    """The same with the draws' own means for the expected values."""
    expected_S: Values
    """E[eta], from many draws and Eq. 9."""
    spread_S: Values
    """Standard deviation of one draw."""


def run(quick: bool, seed: int = 0) -> Result:
    many = 1000 if quick else 10_000
    sizes_S = np.linspace(0.05, 1, 20)
    found = {width: experiment(width, sizes_S, many, seed) for width in WIDTHS}
    return Result(
        settings={
            "tokens": f"n = {NUM_TOKENS}, X = e v' + t Q with e = 1/sqrt(n), v and Q from N(0, 1), drawn once for "
            "each d",
            "widths": f"d = {', '.join(map(str, WIDTHS))}; t = 0.05, 0.10 ... 1",
            "attention": "one head, scores X Wq (X Wk)' / sqrt(d), Wq and Wk uniform in (-1, 1)/sqrt(d), drawn once "
            "for each d",
            "draws": f"{DRAWS} of W from N(0, 1/d) for each X as in the paper, and {many} others for E[eta] and the "
            "spread",
            "dtype": "float32",
        },
        claims=claims(found, sizes_S),
        plots={"eta": figure(found, sizes_S)},
        tables=[table(found, sizes_S)],
        notes=[
            "By Eq. 9 E[xi_i] = 1 + mu_i^2, with sigma = 1/sqrt(d). The paper does not say whether it took these or "
            f"the means of its {DRAWS} draws (it speaks of the sample mean). The figure that it describes is the one "
            "with sample means.",
            "Near rank one attention moves nothing but the mean token: xi_2 is 1, and xi_1 = |v + W'v|^2 / |v|^2 has "
            "mean 2 and variance 6/d for every t. With sample means that noise cancels, with Eq. 9 it stays, and eta "
            "of one draw is no nearer to 0 for small t than for large t; it is the width alone that concentrates it.",
        ],
    )


def experiment(width: int, sizes_S: Values, many: int, seed: int = 0) -> Eta:
    generator = torch.Generator().manual_seed(seed)
    v_D = torch.randn(width, generator=generator)
    q_TD = torch.randn(NUM_TOKENS, width, generator=generator)
    to_query_DD, to_key_DD = (torch.rand(2, width, width, generator=generator) * 2 - 1) * width**-0.5
    rows = []
    for size in sizes_S:
        x_TD = v_D / NUM_TOKENS**0.5 + float(size) * q_TD
        p_TT = softmax_attention(x_TD @ to_query_DD, x_TD @ to_key_DD)
        few, others = (drawn(x_TD, p_TT, draws, generator) for draws in (DRAWS, many))
        mu_1_squared, mu_2_squared = mu_squared(x_TD, p_TT)
        expected = (1 + mu_1_squared) / (1 + mu_2_squared)
        eta_N = expected - others[0] / others[1]
        rows.append(
            (
                expected - (few[0] / few[1]).mean(),
                few[0].mean() / few[1].mean() - (few[0] / few[1]).mean(),
                eta_N.mean(),
                eta_N.std(),
            )
        )
    mean_S, sampled_S, expected_S, spread_S = np.array(rows).T
    return Eta(mean_S=mean_S, sampled_S=sampled_S, expected_S=expected_S, spread_S=spread_S)


def softmax_attention(query_TD: Tensor, key_TD: Tensor) -> Tensor:
    """P of Eq. 2, (T, T): what attention makes of the rows of the identity."""
    query, key, values = (x[None, None] for x in (query_TD, key_TD, torch.eye(len(query_TD))))
    return attend(query, key, values, causal=False, path="materialised")[0, 0]


def drawn(x_TD: Tensor, p_TT: Tensor, draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """xi_1 and xi_2 of Y = X + P X W, (N,) each, for as many W."""
    width = x_TD.shape[1]
    w_NDD = torch.randn(draws, width, width, generator=generator) * width**-0.5
    y_NTD = x_TD + p_TT @ x_TD @ w_NDD
    return xi(x_TD.expand_as(y_NTD), y_NTD)


def claims(found: Mapping[int, Eta], sizes_S: Values) -> Sequence[Claim]:
    is_small, is_large = sizes_S <= 0.25, sizes_S >= 0.75
    narrow = found[WIDTHS[0]]
    exact = {width: float(np.abs(eta.mean_S).mean()) for width, eta in found.items()}
    sampled = {width: float(np.abs(eta.sampled_S[is_large]).mean()) for width, eta in found.items()}
    spread = {width: float(eta.spread_S.mean()) for width, eta in found.items()}
    small, large = (
        {"exact": np.abs(narrow.mean_S[where]).mean(), "sampled": np.abs(narrow.sampled_S[where]).mean()}
        for where in (is_small, is_large)
    )
    at_small, at_large = (narrow.spread_S[where].mean() for where in (is_small, is_large))
    return [
        Claim(
            paper="(a) Near rank one (t small) the mean of eta is close to 0 even for d = 10.",
            seen=f"For t up to 0.25 |mean eta| is {small['sampled']:.1e} on average with sample means, "
            f"{small['exact']:.2f} with the expected values of Eq. 9, where xi_1/xi_2 is about 2 and a standard error "
            f"{at_small / DRAWS**0.5:.2f}.",
            agrees=verdict(small["sampled"] < 0.01, small["exact"] < 0.01),
        ),
        Claim(
            paper="(b) For t near 1 it varies more.",
            seen=f"For d = 10 and t from 0.75 on |mean eta| is {large['sampled']:.1e} with sample means, so much more "
            f"than for small t, and {large['exact']:.2f} with Eq. 9, which is noise: one draw varies by "
            f"{at_large:.2f}, for small t by {at_small:.2f}.",
            agrees=verdict(large["sampled"] > 2 * small["sampled"], at_large > 1.2 * at_small),
        ),
        Claim(
            paper="(c) As d grows eta concentrates at 0, for large t too.",
            seen="Standard deviation of one draw, |mean eta| with Eq. 9, and for t from 0.75 on with sample means: "
            + "; ".join(f"d = {d}: {spread[d]:.2f}, {exact[d]:.3f}, {sampled[d]:.1e}" for d in WIDTHS)
            + f". The first falls {spread[10] / spread[40]:.2f}-fold from d = 10 to 40; 1/sqrt(d) would be 2.",
            agrees=verdict(spread[10] > spread[20] > spread[40], sampled[10] > sampled[20] > sampled[40]),
        ),
    ]


def figure(found: Mapping[int, Eta], sizes_S: Values) -> Plot:
    drawing, axes = panels(
        "Mean eta, E from the draws' means", "Mean eta, E from Eq. 9", "Standard deviation of eta, Eq. 9", x="t"
    )
    for width, eta in found.items():
        for panel, values_S in zip(axes, (eta.sampled_S, eta.mean_S, eta.spread_S), strict=True):
            panel.plot(sizes_S, values_S, "o-", ms=3, label=f"d = {width}")
    axes[2].legend(fontsize=8, loc="lower right")
    axes[2].set_ylim(bottom=0)
    return Plot(
        figure=drawing,
        caption=f"eta = E[xi_1]/E[xi_2] - xi_1/xi_2 for X = e v' + t Q; left and middle means of {DRAWS} draws. Left "
        "is what the paper describes; mind the scales: in the middle the noise of the draws has not cancelled.",
    )


def table(found: Mapping[int, Eta], sizes_S: Values) -> Table:
    names = ("mean, sampled E", "mean, Eq. 9", "E[eta]", "sd")
    values = [each for eta in found.values() for each in (eta.sampled_S, eta.mean_S, eta.expected_S, eta.spread_S)]
    return Table(
        title="eta",
        columns=("t", *(f"{name}, d = {width}" for width in found for name in names)),
        rows=[tuple(map(float, row)) for row in np.stack([sizes_S, *values], axis=1)],
    )
