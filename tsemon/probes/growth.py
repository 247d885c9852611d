"""How the norm of the parameters grows over a run: a power law through what was seen so far."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tsemon.measures.growth import PowerLawFit, norm_growth_fit

MAX_POINTS = 512
"""Kept of the curve, evenly in log t."""


class NormGrowth:
    """p in |w_t| - |w_0| = c t^p. t counts optimizer steps from the first sample of this attach, whose norm is |w_0|.

    Runs on the exporter's thread. Where the norm shrank rather than grew there is no such p.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._fit: PowerLawFit | None = None

    def exponent(self, step: int, norm: Tensor) -> Tensor:
        """p, with this sample; NaN until there are enough."""
        fit = self._with(step, norm)
        return torch.tensor(math.nan) if fit is None else fit.exponent

    def r2(self, step: int, norm: Tensor) -> Tensor:
        """The share of the variance of log(|w_t| - |w_0|) that the power law explains."""
        fit = self._with(step, norm)
        return torch.tensor(math.nan) if fit is None else fit.r2

    def _with(self, step: int, norm: Tensor) -> PowerLawFit | None:
        if self._points and step <= self._points[-1][0]:
            return self._fit  # the other of the two has been here
        value = norm.item()
        if math.isfinite(value):
            self._points.append((step, value))
            self._thin()
            t, norms = torch.tensor(self._points, dtype=torch.float64).unbind(1)
            self._fit = norm_growth_fit(t, norms)
        return self._fit

    def _thin(self) -> None:
        """Drop the point whose neighbours are the nearest to each other in log t. The first and the last stay."""
        if len(self._points) > MAX_POINTS:
            t = [step - self._points[0][0] for step, _ in self._points]
            del self._points[min(range(2, len(t) - 1), key=lambda i: t[i + 1] / t[i - 1])]
