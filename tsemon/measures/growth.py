"""How parameters grow over training. Axes: B any leading axes, N points of a curve."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tsemon.errors import ShapeError
from tsemon.measures.linear import ratio

__all__ = ["PowerLawFit", "SqrtFit", "norm_growth_exponent", "norm_growth_r2", "power_law_fit", "sqrt_fit"]

MIN_POINTS = 8
"""Points after the first that an exponent of growth takes: a line through two points fits perfectly."""


class SqrtFit(NamedTuple):
    """norm = slope sqrt(t) + intercept; each field has the leading axes of the curve, in float64."""

    slope: Tensor
    intercept: Tensor
    r2: Tensor
    """Fraction of the variance that the line explains, 0 to 1; NaN for a constant curve."""


class PowerLawFit(NamedTuple):
    """y = exp(log_c) t^exponent; each field has the leading axes of the curve, in float64."""

    exponent: Tensor
    log_c: Tensor
    r2: Tensor
    """Fraction of the variance of log y that the line explains, 0 to 1; NaN for a constant curve."""


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


def norm_growth_exponent(t_BN: Tensor, norm_BN: Tensor) -> Tensor:
    """Return the exponent of a norm's growth from its first value.

    p in |theta_t| - |theta_0| = c t^p, least squares on logarithms        (Parameter Norm Growth, arXiv 2010.09697, App. E)

    Takes steps (N,) or (..., N) and norms (..., N) in the order of steps; the first step is t = 0. Returns (...) in
    float64. Points that are not above the first have no logarithm and do not count. NaN unless 8 of the later
    points are above the first, and at least half of them. Raises ShapeError if the axes do not fit.
    """
    return norm_growth_fit(t_BN, norm_BN).exponent


def norm_growth_r2(t_BN: Tensor, norm_BN: Tensor) -> Tensor:
    """Return how well a power law fits a norm's growth from its first value.

    1 - sum of squared residuals / sum of squares around the mean, of log(|theta_t| - |theta_0|)      (tsemon)

    Takes what `norm_growth_exponent` takes and is NaN where that is; returns (...) in float64, at most 1.
    """
    return norm_growth_fit(t_BN, norm_BN).r2


def norm_growth_fit(t_BN: Tensor, norm_BN: Tensor) -> PowerLawFit:
    """The power law of a norm's growth from its first value: `norm_growth_exponent` and `norm_growth_r2` are parts of it."""
    t_BN, norm_BN = _curve(t_BN, norm_BN)
    t_BN, growth_BN = t_BN[..., 1:] - t_BN[..., :1], norm_BN[..., 1:] - norm_BN[..., :1]
    if growth_BN.shape[-1] < MIN_POINTS:
        return PowerLawFit(*[norm_BN.new_full(norm_BN.shape[:-1], torch.nan)] * 3)
    num_grown_B = (growth_BN > 0).sum(dim=-1)
    is_defined_B = (num_grown_B >= MIN_POINTS) & (2 * num_grown_B >= growth_BN.shape[-1])
    fit = power_law_fit(t_BN, growth_BN)
    return PowerLawFit(*(torch.where(is_defined_B, value_B, torch.nan) for value_B in fit))


def _curve(t_BN: Tensor, y_BN: Tensor) -> tuple[Tensor, Tensor]:
    if 0 in y_BN.shape or y_BN.ndim == 0 or t_BN.shape not in (y_BN.shape, y_BN.shape[-1:]):
        raise ShapeError(
            f"a curve needs values (..., points >= 1) and steps of the same axes, or (points,), got {tuple(y_BN.shape)} "
            f"and {tuple(t_BN.shape)}"
        )
    return t_BN.detach().double().expand_as(y_BN), y_BN.detach().double()


def _line(x_BN: Tensor, y_BN: Tensor, keep_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slope, intercept and r2 over the points to keep. Other points count as 0."""
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
