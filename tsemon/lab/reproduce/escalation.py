"""Classic Transformers, Figure 2: which of a block's four steps makes tokens alike, and what its attention looks like.

Axes: `L` blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import linear

from tsemon.lab.reproduce.observing import Values, forward, observe
from tsemon.lab.reproduce.plotting import COLOURS, panels
from tsemon.lab.reproduce.random_encoder import NUM_TOKENS, caught, head_mix, random_encoder, random_tokens, twin
from tsemon.lab.reproduce.result import Claim, Experiment, Plot, Result, Table, verdict
from tsemon.lab.reproduce.seeds import seeds_of
from tsemon.measures import delta, omega, xi
from tsemon.models import Encoder

EXPERIMENT = Experiment(
    name="escalation",
    title="Attention makes tokens alike, block by block",
    source="Why Classic Transformers Are Shallow (arXiv 2312.06182), Figure 2",
)
MEASURES = ("token_similarity", "escalation_rate", "spectral_gap")
STEPS = ("step 1", "step 2", "step 3", "step 4")
WITHOUT_BIASES, WITHOUT_RELU = "step 3 without biases", "step 3 without biases and ReLU"
Trials = Mapping[str, Values]
"""(trials, L) of each quantity; of step 3 with parts left out for the first block alone."""


def run(quick: bool, seed: int = 0) -> Result:
    seeds = seeds_of(seed, 5 if quick else 50)
    full, by_width, causal = experiment(seeds, depth=20, width=512, heads=8, ffn=2048)
    settings = {
        "encoder": f"20 post-norm blocks, n = {NUM_TOKENS} tokens, d = 512, h = 8, alpha = 1, q = 2048, ReLU, biases "
        "in the feed-forward network only, norms without weights",
        "input": "N(0, 1)",
        "weights": "values N(0, 1/d), output identity (W of Proposition 9); query, key and feed-forward weights "
        "uniform in (-1, 1)/sqrt(fan-in), PyTorch's start",
        "trials": f"{len(seeds)} (the paper has 50), weights and input from seeds {seeds[0]} to {seeds[-1]}; the three "
        "variants of a trial share them",
        "dtype": "float32",
    }
    return Result(
        settings=settings,
        claims=claims(full, causal),
        plots={"blocks": figure(full, by_width, causal)},
        tables=[table("Full attention, scores over sqrt(d/h)", full), table("Causal attention", causal)],
        notes=[
            f"Step 3 is the surprise. Its xi_1/xi_2 in block 1 is {_first(full, 'step 3')}, "
            f"{_first(full, WITHOUT_BIASES)} without biases and {_first(full, WITHOUT_RELU)} without biases and ReLU. What "
            "ReLU lets through has a mean above zero, so that the network adds a common vector to all tokens. While tokens "
            "share little, that is much of what they share; the escalation rate 1 + (xi_1/xi_2 - 1) t_sim of the step is "
            "small all the same, as t_sim is.",
            "Eq. 2 divides the scores by sqrt(d), the code that the paper builds on by sqrt(d/h). Similarity is the "
            f"same ({_first(by_width, 'token similarity', 10)} and {_first(full, 'token similarity', 10)} after block "
            f"10); delta and omega of block 1 are {_first(by_width, 'delta')} and {_first(by_width, 'omega')} with "
            f"sqrt(d), {_first(full, 'delta')} and {_first(full, 'omega')} with sqrt(d/h).",
            "Under a causal mask delta is above 1 (1.235 for uniform attention of 64 tokens), so that the condition "
            "omega + delta < 1 of Theorem 6 never holds and its bound says nothing; |lambda_2|, the largest entry of "
            "the diagonal below the first, does.",
            "|lambda_2| is 1 less tsemon's spectral_gap; similarity and the escalation rate are its metrics, too.",
        ],
    )


def _first(found: Trials, name: str, block: int = 1) -> str:
    return f"{found[name][:, block - 1].mean():.3f}"


def experiment(seeds: Iterable[int], *, depth: int, width: int, heads: int, ffn: int) -> tuple[Trials, Trials, Trials]:
    """As the code has it, with the scores over sqrt(d) that Eq. 2 has, and with a causal mask."""
    found: tuple[list[Trials], ...] = ([], [], [])
    for seed in seeds:
        model = random_encoder(seed, depth=depth, width=width, heads=heads, ffn=ffn)
        x_BTD = random_tokens(seed, width)
        for into, other in zip(
            found, (model, twin(model, score_scale=width**-0.5), twin(model, causal=True)), strict=True
        ):
            into.append(trial(other, x_BTD))
    full, by_width, causal = (
        {name: np.stack([one[name] for one in variant]) for name in variant[0]} for variant in found
    )
    return full, by_width, causal


def trial(model: Encoder, x_BTD: Tensor) -> Trials:
    """(L,) of each quantity, of one pass."""
    with caught(model) as seen:
        frame = observe(model, lambda: forward(model, x_BTD), measures=MEASURES)
    rows = []
    for layer, block in enumerate(model.blocks):
        name = f"blocks.{layer}"
        x = seen[name][0]
        states = (x, *seen[f"{name}.norm1"], *seen[f"{name}.norm2"])  # X, Y_1 to Y_4 of Algorithm 1
        ratios = [_xi_ratio(before, after) for before, after in pairwise(states)]
        p_BHTT = head_mix(block.attention, seen[f"{name}.attention.to_query_key_value"][1])
        rows.append([*ratios, delta(p_BHTT).mean().item(), omega(x, p_BHTT).mean().item()])
    by_name = dict(zip((*STEPS, "delta", "omega"), np.array(rows).T, strict=True))
    return by_name | {
        **step_3_without(model.blocks[0].feed_forward, seen["blocks.0.norm1"][1]),
        "token similarity": frame.layers["token_similarity"][1:],
        "escalation rate": frame.layers["escalation_rate"],
        "lambda_2": 1 - frame.layers["spectral_gap"],
    }


def step_3_without(feed_forward: Any, y_BTD: Tensor) -> Trials:
    """xi_1/xi_2 of feed-forward and residual, (1,), when parts of the network are left out."""
    hidden_BTF = linear(y_BTD, feed_forward.expand.weight)
    outputs = {
        WITHOUT_BIASES: linear(hidden_BTF.relu(), feed_forward.contract.weight),
        WITHOUT_RELU: linear(hidden_BTF, feed_forward.contract.weight),
    }
    return {name: np.array([_xi_ratio(y_BTD, y_BTD + output)]) for name, output in outputs.items()}


def _xi_ratio(x_BTD: Tensor, y_BTD: Tensor) -> float:
    xi_1_B, xi_2_B = xi(x_BTD, y_BTD)
    return (xi_1_B / xi_2_B).mean().item()


def claims(full: Trials, causal: Trials) -> Sequence[Claim]:
    mean = {name: values.mean(0) for name, values in full.items()}
    masked = {name: values.mean(0) for name, values in causal.items()}
    t_sim, rate, gap = mean["token similarity"], mean["escalation rate"], 1 - masked["lambda_2"]
    away = {step: np.abs(mean[step] - 1).max() for step in STEPS}
    return [
        Claim(
            paper="Similarity rises monotonically through all blocks and nears its maximum before block 15.",
            seen=f"t_sim {t_sim[0]:.3f} after block 1, {t_sim[4]:.3f} after 5, {t_sim[9]:.3f} after 10, "
            f"{t_sim[14]:.4f} after 15; smallest rise of a block {np.diff(t_sim).min():.2g}.",
            agrees=verdict(bool((np.diff(t_sim) > 0).all()), t_sim[14] > 0.99),
        ),
        Claim(
            paper="In step 1, attention and residual, the mean of xi_1/xi_2 stays around 2 from the very beginning.",
            seen=f"Means over trials from {mean['step 1'].min():.3f} to {mean['step 1'].max():.3f}; one trial varies "
            f"by {full['step 1'].std(0, ddof=1).mean():.2f} (standard deviation).",
            agrees=verdict(bool((np.abs(mean["step 1"] - 2) < 0.2).all())),
        ),
        Claim(
            paper="The other three steps have a negligible impact: xi_1/xi_2 is about 1.",
            seen=f"Steps 2 and 4 (norms) are within {max(away['step 2'], away['step 4']):.3f} of 1. "
            "Step 3 (feed-forward) is "
            + ", ".join(f"{value:.2f}" for value in mean["step 3"][:5])
            + f" in blocks 1 to 5, from block 6 on within {np.abs(mean['step 3'][5:] - 1).max():.3f} of 1.",
            agrees=verdict(max(away["step 2"], away["step 4"]) < 0.02, away["step 3"] < 0.02),
        ),
        Claim(
            paper="delta and omega are far below 1 from the start and quickly approach 0.",
            seen=f"delta {mean['delta'][0]:.3f} to {mean['delta'][-1]:.1e}, omega {mean['omega'][0]:.3f} to "
            f"{mean['omega'][-1]:.1e}, in blocks 1 and {len(t_sim)}.",
            agrees=verdict(mean["delta"][0] < 0.2, mean["omega"][0] < 0.2, mean["delta"][-1] < 0.01),
        ),
        Claim(
            paper="Diversity shrinks at a linear rate that reaches 1/2 (Remark 8).",
            seen=f"Escalation rate of attention and residual {rate[0]:.3f} in block 1, {rate[9:].min():.2f} to "
            f"{rate[9:].max():.2f} from block 10 on; 2 is the rate 1/2.",
            agrees=verdict(bool((np.abs(rate[9:] - 2) < 0.2).all())),
        ),
        Claim(
            paper="With a triangular mask tokens escalate alike, and the spectral gap is around 0.5 (Section 2.6).",
            seen=f"t_sim {masked['token similarity'][4]:.3f} after block 5, {masked['token similarity'][9]:.3f} after "
            f"10, {masked['token similarity'][-1]:.4f} after {len(t_sim)}; gap {gap.min():.2f} to {gap.max():.2f}. "
            f"Late blocks are slower than without a mask: xi_1/xi_2 of step 1 falls from {masked['step 1'][0]:.2f} to "
            f"{masked['step 1'][-1]:.2f}.",
            agrees=verdict(masked["token similarity"][-1] > 0.99, bool((np.abs(gap - 0.5) < 0.1).all())),
        ),
    ]


def figure(full: Trials, by_width: Trials, causal: Trials) -> Plot:
    drawing, (left, middle, right) = panels("Token similarity", "xi_1 / xi_2", "Attention", x="block")
    blocks = np.arange(1, full["delta"].shape[1] + 1)
    for label, found, style in (
        ("full", full, "-"),
        ("full, Eq. 2's sqrt(d)", by_width, ":"),
        ("causal", causal, "--"),
    ):
        left.plot(blocks, found["token similarity"].mean(0), style, label=label)
    for step, colour in zip(STEPS, COLOURS, strict=False):
        middle.plot(blocks, full[step].mean(0), color=colour, label=step)
    middle.plot(blocks, causal["step 1"].mean(0), "--", color=COLOURS[0], label="step 1, causal")
    names = {"delta": "delta", "omega": "omega", "lambda_2": "|lambda_2|"}
    for (name, label), colour in zip(names.items(), COLOURS, strict=False):
        right.semilogy(blocks, full[name].mean(0), color=colour, label=label)
        right.semilogy(blocks, causal[name].mean(0), "--", color=colour)
    right.plot([], [], "--", color="grey", label="causal")
    left.set_ylabel("t_sim of the block's output")
    for panel in (left, middle, right):
        panel.set_xticks(range(0, len(blocks) + 1, 5))
        panel.legend(fontsize=8)
    return Plot(
        figure=drawing,
        caption="Means over trials. Step 1 is attention with its residual, steps 2 and 4 are the norms, step 3 is the "
        "feed-forward network with its residual; above 1 a step makes tokens more alike. On the right: 0 is attention "
        "that takes the mean over all tokens.",
    )


def table(title: str, found: Trials) -> Table:
    names = ("token similarity", *STEPS, "delta", "omega", "lambda_2", "escalation rate")
    columns = {name: found[name].mean(0) for name in names} | {"sd of step 1": found["step 1"].std(0, ddof=1)}
    return Table.numbered(f"{title}, means over trials", "block", columns)
