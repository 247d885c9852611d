"""By which law the norm of the parameters grew over a folder of checkpoints, and what that says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tsemon.measures.growth import MIN_POINTS, norm_growth_fit, sqrt_fit

MIN_R2 = 0.9
"""Of the logarithms. Below that the curve has another form, whatever the exponent."""


@dataclass(frozen=True, slots=True)
class Law:
    """|w_t| - |w_0| = c t^exponent, with t from the first checkpoint, and |w_t| = a sqrt(t) + b."""

    exponent: float
    r2: float
    """Share of the variance of log(|w_t| - |w_0|) that the power law explains."""
    sqrt_slope: float
    """a, per square root of a step; t is the step itself, as in the paper."""
    sqrt_r2: float
    """Share of the variance of |w_t| that the square root explains: high for other laws, too."""


def growth_law(steps: Sequence[int], norms: Sequence[float]) -> Law | None:
    """None where the norm was seen above the first one fewer than 8 times, or less often than not."""
    t, norm = torch.tensor(steps, dtype=torch.float64), torch.tensor(norms, dtype=torch.float64)
    power, root = norm_growth_fit(t, norm), sqrt_fit(t, norm)
    if power.exponent.isnan():
        return None
    return Law(power.exponent.item(), power.r2.item(), root.slope.item(), root.r2.item())


def in_words(law: Law | None, norms: Sequence[float]) -> str:
    """What the growth says, in one sentence."""
    if not all(map(math.isfinite, norms)):
        return "no growth law: a norm is not finite"
    if law is None:
        num_grown = sum(norm > norms[0] for norm in norms[1:])
        return (
            f"no growth law: of {len(norms) - 1} checkpoints after the first, {num_grown} have a larger norm than it; "
            f"it takes {MIN_POINTS}, and most of them"
        )
    p, fits = law.exponent, f"(r2 {law.r2:.3f}; r2 of a square root {law.sqrt_r2:.3f})"
    if law.r2 < MIN_R2:
        return f"no power of steps fits the growth of the norm: the nearest is t^{p:.2f} {fits}"
    if p < 0.35:
        says = "slower than the square root of steps: weight decay or a falling learning rate bends it"
    elif p <= 0.65:
        says = "about the square root of steps, as T5's in the paper"
    elif p <= 1.2:
        says = "faster than the square root of steps, as at a constant learning rate"
    else:
        says = "faster than steps go by: look for weights that nothing bounds"
    return f"the norm grows like t^{p:.2f} {fits}, {says}"
