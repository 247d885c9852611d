"""Classic Transformers, Figure 3: what theory expects of attention and residual, against draws of their weights.

Axes: `N` draws, `H` heads, `T` tokens, `D` width, `K` width of a head, `L` blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tsemon.lab.reproduce.observing import Values, forward, observe
from tsemon.lab.reproduce.plotting import panels
from tsemon.lab.reproduce.random_encoder import NUM_TOKENS, caught, head_mix, random_encoder, random_tokens
from tsemon.lab.reproduce.result import Claim, Experiment, Plot, Result, Table, verdict
from tsemon.measures import escalation_rate as rate_of
from tsemon.measures import estimate1_rate, estimate2_rate, expected_rate, xi

EXPERIMENT = Experiment(
    name="estimates",
    title="How fast tokens grow alike, expected and drawn",
    source="Why Classic Transformers Are Shallow (arXiv 2312.06182), Figure 3",
    num_seeds=3,
)
CHUNK = 50
"""Draws at a time, for the sake of memory."""
EXPECTED = {"Eq. 13": expected_rate, "Estimate 1": estimate1_rate, "Estimate 2": estimate2_rate}


def run(quick: bool, seed: int = 0) -> Result:
    draws = 100 if quick else 1000
    found = experiment(draws, seed, depth=20, width=512, heads=8, ffn=2048)
    return Result(
        settings={
            "encoder": f"that of Figure 2: 20 post-norm blocks, n = {NUM_TOKENS}, d = 512, h = 8, alpha = 1, q = "
            f"2048; one draw of all weights and of X from N(0, 1), scores over sqrt(d/h)",
            "draws": f"{draws} of W from N(0, 1/d) in step 1 of each block (the paper has 1000), X and P fixed",
            "dtype": "float32",
        },
        claims=claims(found, draws),
        plots={"blocks": figure(found)},
        tables=[table(found)],
        notes=[
            "With eight heads the estimates take the mean over heads of (1 - omega)^2, delta^2 and |lambda_2|^2, as "
            "the paper has it after Proposition 9.",
            "Eq. 13 is taken without E[eta]; the first claim says whether the draws tell that from 0.",
        ],
    )


def experiment(draws: int, seed: int = 0, *, depth: int, width: int, heads: int, ffn: int) -> Mapping[str, Values]:
    """(L,) of the tokens' similarity before each block, and of what step 1 does to it, drawn and expected."""
    model = random_encoder(seed, depth=depth, width=width, heads=heads, ffn=ffn)
    x_BTD = random_tokens(seed, width)
    with caught(model) as seen:
        frame = observe(model, lambda: forward(model, x_BTD), measures=["token_similarity"])
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for layer, block in enumerate(model.blocks):
        x_TD = seen[f"blocks.{layer}"][0][0]
        p_HTT = head_mix(block.attention, seen[f"blocks.{layer}.attention.to_query_key_value"][1])[0]
        ratio_N, rate_N = drawn(x_TD, p_HTT, draws, generator)
        rates = {name: expect(x_TD, p_HTT).item() for name, expect in EXPECTED.items()}
        similarity = frame.layers["token_similarity"][layer]
        rows.append(
            {
                "token similarity": similarity,
                "xi_1/xi_2 - 1": ratio_N.mean().item() - 1,
                "standard error": ratio_N.std().item() / draws**0.5,
                "r": rate_N.mean().item(),
                **{f"{name}, factor": (rate - 1) / similarity for name, rate in rates.items()},
                **{f"{name}, r": rate for name, rate in rates.items()},
            }
        )
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def drawn(x_TD: Tensor, p_HTT: Tensor, draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """xi_1/xi_2 and r(X, Y) of Y = X + [P_1 X W_1 ... P_h X W_h], (N,), for as many W."""
    heads, width = p_HTT.shape[0], x_TD.shape[1]
    mixed_HTD = p_HTT @ x_TD
    ratios, rates = [], []
    for start in range(0, draws, CHUNK):
        shape = (min(CHUNK, draws - start), heads, width, width // heads)
        w_NHDK = torch.randn(shape, generator=generator) * width**-0.5
        y_NTD = x_TD + (mixed_HTD @ w_NHDK).transpose(1, 2).flatten(2)
        x_NTD = x_TD.expand_as(y_NTD)
        xi_1_N, xi_2_N = xi(x_NTD, y_NTD)
        ratios.append(xi_1_N / xi_2_N)
        rates.append(rate_of(x_NTD, y_NTD))
    return torch.cat(ratios), torch.cat(rates)


def claims(found: Mapping[str, Values], draws: int) -> Sequence[Claim]:
    mean, error, r = found["xi_1/xi_2 - 1"], found["standard error"], found["r"]
    off = {name: found[f"{name}, factor"] - mean for name in EXPECTED}
    off_r = {name: np.abs(found[f"{name}, r"] - r).max() for name in EXPECTED}
    apart = np.abs(found["Estimate 1, factor"] - found["Estimate 2, factor"]) > 2 * error
    is_closer = np.abs(off["Estimate 2"]) < np.abs(off["Estimate 1"])
    return [
        Claim(
            paper="The expected rate is that of Eq. 13: xi_1/xi_2 concentrates at the ratio of the expected values.",
            seen=f"The mean of xi_1/xi_2 - 1 over {draws} draws is {mean.min():.3f} to {mean.max():.3f}, Eq. 13's "
            f"factor {found['Eq. 13, factor'].min():.3f} to {found['Eq. 13, factor'].max():.3f}; they differ by at "
            f"most {np.abs(off['Eq. 13']).max():.3f}, the standard error of the mean is {error.mean():.3f}.",
            agrees=verdict(bool((np.abs(off["Eq. 13"]) < 3.5 * error).all())),  # of 20 blocks all, 99 % of the time
        ),
        Claim(
            paper="Estimate 1 (Theorem 6) is a guaranteed lower bound.",
            seen=f"It lies below the mean by {-off['Estimate 1'].min():.3f} at most and above it by "
            f"{off['Estimate 1'].max():.3f} at most; it is {found['Estimate 1, factor'][0]:.3f} in block 1 and "
            f"{found['Estimate 1, factor'][-1]:.4f} in the last.",
            agrees=verdict(bool((off["Estimate 1"] < 3.5 * error).all())),
        ),
        Claim(
            paper="Estimate 2, the spectral gap alone, is closer than Estimate 1.",
            seen=f"In {int((is_closer & apart).sum())} of the {int(apart.sum())} blocks in which the two differ by "
            "more than two standard errors of what is drawn"
            + (f", the last of them block {int(apart.nonzero()[0].max()) + 1}." if apart.any() else "."),
            agrees=verdict(bool(apart.any() and is_closer[apart].all())),
        ),
        Claim(
            paper="The three curves of r are nearly identical.",
            seen=f"Estimate 1 is off by at most {off_r['Estimate 1']:.3f}, Estimate 2 by {off_r['Estimate 2']:.3f}, "
            f"where r goes from {r.min():.3f} to {r.max():.3f}.",
            agrees=verdict(off_r["Estimate 1"] < 0.05, off_r["Estimate 2"] < 0.05),
        ),
    ]


def figure(found: Mapping[str, Values]) -> Plot:
    drawing, (left, middle, right) = panels(
        "Token similarity of X", "xi_1 / xi_2 - 1", "Escalation rate r of step 1", x="block"
    )
    blocks = np.arange(1, len(found["r"]) + 1)
    left.plot(blocks, found["token similarity"])
    middle.errorbar(
        blocks, found["xi_1/xi_2 - 1"], found["standard error"], fmt="o-", ms=3, label="drawn, with standard error"
    )
    right.plot(blocks, found["r"], "o-", ms=3, label="drawn")
    for name, style in zip(EXPECTED, ("-", "--", ":"), strict=True):
        middle.plot(blocks, found[f"{name}, factor"], style, label=name)
        right.plot(blocks, found[f"{name}, r"], style, label=name)
    for panel in (left, middle, right):
        panel.set_xticks(range(0, len(blocks) + 1, 5))
    for panel in (middle, right):
        panel.legend(fontsize=8)
    return Plot(
        figure=drawing,
        caption="What step 1 of each block does, drawn and expected: the factor xi_1/xi_2 - 1 (middle), and r, which is 1 "
        "and this factor times the similarity on the left.",
    )


def table(found: Mapping[str, Values]) -> Table:
    return Table.numbered("Step 1 of each block", "block", found)
