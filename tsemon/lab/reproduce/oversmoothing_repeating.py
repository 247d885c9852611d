"""The 'repeating' models of the oversmoothing theory (Figure 4): one layer again and again, with and without norms.

Axes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from tsemon.lab.reproduce.observing import Values, forward, observe
from tsemon.lab.reproduce.oversmoothing_theory import random_attention
from tsemon.lab.reproduce.plotting import COLOURS, legend_beside, panels
from tsemon.lab.reproduce.result import Claim, Plot, verdict
from tsemon.models import RepeatingTransformer, RepeatingTransformerConfig
from tsemon.models.reparameterised import RANGES, Reparameterisation

REPEATING = {"depth": 48, "width": 64, "num_tokens": 32}
MATRICES: Mapping[str, bool] = {"A of Eq. 1": False, "A and H symmetric": True}
"""Whether the model's two matrices are symmetric: then all eigenvalues are real, and none of H is stretched by its basis."""
KINDS: tuple[Reparameterisation, ...] = ("sharpening", "smoothing")
NORMS: Mapping[str, Mapping[str, Any]] = {
    "no norm": {},
    "post-LN, gamma > 0": {"norm": "post", "gamma": "positive"},
    "post-LN, gamma < 0": {"norm": "post", "gamma": "negative"},
    "pre-LN, gamma > 0": {"norm": "pre", "gamma": "positive"},
    "pre-LN, gamma < 0": {"norm": "pre", "gamma": "negative"},
}


def repeating_curve(
    kind: Reparameterisation, norm: str, matrices: str, *, depth: int, width: int, num_tokens: int, seeds: Sequence[int]
) -> Values:
    """HFC/LFC of a repeating model after 0 to `depth` layers, the geometric mean over seeds.

    Symmetric ones have eigenvalues of H all over their range; the others, which start as trained models do, many zeros.
    """
    curves = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        model = RepeatingTransformer(
            RepeatingTransformerConfig(
                depth=depth, width=width, reparameterisation=kind, orthogonal=MATRICES[matrices], **NORMS[norm]
            )
        )
        x_BTD = torch.randn(8, num_tokens, width, generator=generator)
        a_BTT = None
        if MATRICES[matrices]:
            a_BTT = random_attention("symmetric", 8, num_tokens, generator).float()
            nn.init.uniform_(model.get_parameter("blocks.0.attention.psi"), *RANGES[kind])
        run = partial(forward, model, x_BTD, a_BTT)
        curves.append(observe(model, run, measures=["hfc_lfc"]).layers["hfc_lfc"])
    mean: Values = np.exp(np.log(np.stack(curves)).mean(axis=0))
    return mean


Curves = Mapping[tuple[str, str, str], Values]
"""HFC/LFC over depth, by matrices, kind of weights and norm."""


def repeating_curves(seeds: Sequence[int]) -> Curves:
    return {
        (matrices, kind, norm): repeating_curve(kind, norm, matrices, seeds=seeds, **REPEATING)
        for matrices in MATRICES
        for kind in KINDS
        for norm in NORMS
    }


def claims_of_repetition(curves: Curves) -> Iterator[Claim]:
    def at_end(kind: str, norm: str) -> list[float]:
        return [float(curves[matrices, kind, norm][-1]) for matrices in MATRICES]

    def shown(kind: str, norm: str) -> str:
        return " and ".join(f"{value:.2g}" for value in at_end(kind, norm))

    def smallest_factor(kind: str, norm: str, other: str) -> float:
        """By how much a norm's model ends above another's, for both pairs of matrices."""
        return min(a / b for a, b in zip(at_end(kind, norm), at_end(kind, other), strict=True))

    start = [float(curves[matrices, "sharpening", "no norm"][0]) for matrices in MATRICES]
    yield Claim(
        paper="Repeating models: HFC/LFC of smoothing goes to 0, that of sharpening grows (Fig. 4, left)",
        seen=f"from {start[0]:.1f} to {shown('smoothing', 'no norm')} and to {shown('sharpening', 'no norm')} "
        "(with A of Eq. 1, and with A and H symmetric)",
        agrees=verdict(
            all(value < 1e-3 for value in at_end("smoothing", "no norm")),
            all(value > first for value, first in zip(at_end("sharpening", "no norm"), start, strict=True)),
        ),
    )
    yield Claim(
        paper="Post-LN leaves smoothing as it is; sharpening becomes erratic, its trend stays",
        seen=f"smoothing ends at {shown('smoothing', 'post-LN, gamma > 0')}, sharpening at "
        f"{shown('sharpening', 'post-LN, gamma > 0')} (from {start[0]:.1f})",
        agrees=verdict(
            all(
                value < first / 100
                for value, first in zip(at_end("smoothing", "post-LN, gamma > 0"), start, strict=True)
            ),
            all(value > first for value, first in zip(at_end("sharpening", "post-LN, gamma > 0"), start, strict=True)),
        ),
    )
    yield Claim(
        paper="Pre-LN with negative weights reverses what is expected: smoothing models sharpen and sharpening ones smooth",
        seen=f"smoothing ends at {shown('smoothing', 'pre-LN, gamma > 0')} with positive gamma and at "
        f"{shown('smoothing', 'pre-LN, gamma < 0')} with negative; sharpening at "
        f"{shown('sharpening', 'pre-LN, gamma > 0')} and {shown('sharpening', 'pre-LN, gamma < 0')}",
        agrees=verdict(
            smallest_factor("smoothing", "pre-LN, gamma < 0", "pre-LN, gamma > 0") > 2,
            smallest_factor("sharpening", "pre-LN, gamma > 0", "pre-LN, gamma < 0") > 2,
        ),
    )


def repeating_plot(curves: Curves) -> Plot:
    shown = [(matrices, kind) for matrices in MATRICES for kind in KINDS]
    figure, axes = panels(*(f"{kind}, {matrices}" for matrices, kind in shown), x="layer")
    for panel, (matrices, kind) in zip(axes, shown, strict=True):
        for colour, norm in zip((6, 0, 4, 2, 1), NORMS, strict=True):
            style = "--" if norm == "post-LN, gamma < 0" else "-"
            panel.semilogy(curves[matrices, kind, norm], style, color=COLOURS[colour], label=norm)
        panel.set_ylim(1e-8, 1e9)
    axes[0].set_ylabel("HFC/LFC")
    legend_beside(figure, axes[0])
    return Plot(
        figure=figure,
        caption="One layer, repeated (Fig. 4), sharpening on the left of each pair. By the theory sharpening grows without "
        "a norm and smoothing falls. Whether the sign of a norm's weights matters shows where its two curves part.",
    )
