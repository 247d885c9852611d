"""How parameters grow over training, and what that does to the network. Axes: B any leading axes, N points of a curve."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tsemon.errors import ShapeError
from tsemon.measures.linear import as_tokens, length, ratio


class SqrtFit(NamedTuple):
    """norm = slope sqrt(t) + intercept; each field has the leading axes of the curve, in float64."""

    slope: Tensor
    intercept: Tensor
    r2: Tensor
    """Share of the variance that the line explains, 0 to 1; NaN for a constant curve."""


class PowerLawFit(NamedTuple):
    """y = exp(log_c) t^exponent; each field has the leading axes of the curve, in float64."""

    exponent: Tensor
    log_c: Tensor
    r2: Tensor
    """Share of the variance of log y that the line explains, 0 to 1; NaN for a constant curve."""


def sqrt_fit(t_BN: Tensor, norm_BN: Tensor) -> SqrtFit:
    """Ordinary least squares of a norm on the square root of the step, with intercept.

    |theta_t| = slope sqrt(t) + intercept            (Parameter Norm Growth, arXiv 2010.09697, Section 3)

    Takes steps >= 0 (N,) or (..., N) and norms (..., N). r2 is no evidence for the square root: curves with
    exponents 0.4 to 0.6 all have 0.997 and more, so look at `power_law_fit` too. NaN for fewer than two different
    steps, and where anything is not finite or a step is negative. Raises ShapeError where the axes do not fit.
    """
    t_BN, norm_BN = _curve(t_BN, norm_BN)
    return SqrtFit(*_line(t_BN.sqrt(), norm_BN, torch.ones_like(t_BN, dtype=torch.bool)))


def power_law_fit(t_BN: Tensor, y_BN: Tensor) -> PowerLawFit:
    """Ordinary least squares of log y on log t: the exponent of growth.

    y = c t^exponent                                 (Parameter Norm Growth, arXiv 2010.09697, Appendix E, of |theta_t|)

    For the growth of a norm give y = norm - norm[0]; its start hides the exponent otherwise. Takes t (N,) or
    (..., N) and y (..., N). Points with t <= 0 or y <= 0 have no logarithm and are left out. NaN for fewer than two
    different steps left, and where anything is not finite. Raises ShapeError where the axes do not fit.
    """
    t_BN, y_BN = _curve(t_BN, y_BN)
    is_left_out_BN = (t_BN <= 0) | (y_BN <= 0)  # not NaN, which must show
    log_t_BN, log_y_BN = (torch.where(is_left_out_BN, 1.0, values_BN).log() for values_BN in (t_BN, y_BN))
    return PowerLawFit(*_line(log_t_BN, log_y_BN, ~is_left_out_BN))


def saturation(f_BTD: Tensor, f_scaled_BTD: Tensor) -> Tensor:
    """How near a network is to its limit of infinitely large parameters: mean cosine of its tokens in both.

    mean over i of cos(f_i(x; theta), f_i(x; c theta)), c large      (Parameter Norm Growth, arXiv 2010.09697, Section
    4.1)

    Takes both representations (..., T, D), returns (...) in [-1, 1]: 1 saturated. Comparable only within one
    architecture. NaN where a token is zero, or holds NaN or infinities. Raises ShapeError where the two differ in
    shape.
    """
    if f_BTD.shape != f_scaled_BTD.shape:
        raise ShapeError(
            f"both representations need the same axes (..., tokens, width), got {tuple(f_BTD.shape)} and "
            f"{tuple(f_scaled_BTD.shape)}"
        )
    f_BTD, f_scaled_BTD = as_tokens(f_BTD), as_tokens(f_scaled_BTD)
    unit_BTD, unit_scaled_BTD = (ratio(x, length(x, -1)[..., None]) for x in (f_BTD, f_scaled_BTD))
    return (unit_BTD * unit_scaled_BTD).sum(dim=-1).mean(dim=-1).clamp(-1, 1)


def _curve(t_BN: Tensor, y_BN: Tensor) -> tuple[Tensor, Tensor]:
    if 0 in y_BN.shape or y_BN.ndim == 0 or t_BN.shape not in (y_BN.shape, y_BN.shape[-1:]):
        raise ShapeError(
            f"a curve needs values (..., points >= 1) and steps of the same axes, or (points,), got {tuple(y_BN.shape)} "
            f"and {tuple(t_BN.shape)}"
        )
    return t_BN.detach().double().expand_as(y_BN), y_BN.detach().double()


def _line(x_BN: Tensor, y_BN: Tensor, keep_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slope, intercept and r2 over the points to keep. What is left out counts as 0."""
    num_B1 = keep_BN.sum(dim=-1, keepdim=True)
    # Differences to one kept value first: of a constant curve they are exactly zero.
    reference = keep_BN.to(torch.int8).argmax(dim=-1, keepdim=True)
    x_0, y_0 = x_BN.gather(-1, reference), y_BN.gather(-1, reference)
    x_BN, y_BN = ((values - first) * keep_BN for values, first in ((x_BN, x_0), (y_BN, y_0)))
    x_mean, y_mean = x_BN.sum(dim=-1, keepdim=True) / num_B1, y_BN.sum(dim=-1, keepdim=True) / num_B1
    x_BN, y_BN = (x_BN - x_mean) * keep_BN, (y_BN - y_mean) * keep_BN
    slope_B1 = ratio((x_BN * y_BN).sum(dim=-1, keepdim=True), x_BN.square().sum(dim=-1, keepdim=True))
    intercept_B1 = y_0 + y_mean - slope_B1 * (x_0 + x_mean)
    unexplained_B = (y_BN - slope_B1 * x_BN).square().sum(dim=-1)
    return slope_B1[..., 0], intercept_B1[..., 0], 1 - ratio(unexplained_B, y_BN.square().sum(dim=-1))
