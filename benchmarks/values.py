"""The values of a long run: levels that drift, with noise, equal for equal arguments.

Only numpy is needed, so that other tools can be fed the same numbers in an environment of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LAYERS = 48
METRICS = (
    "attention_entropy",
    "grad_norm",
    "update_ratio",
    "param_norm",
    "attention_entropy_min",
    "attention_entropy_se",
    "importance_entropy",
    "sink_share",
    "max_attention_logit",
    "positions_attended",
    "spectral_gap",
    "first_value_norm_ratio",
    "value_top_eigenvalue",
    "grad_norm_qk",
    "update_norm",
    "update_alignment",
    "gradient_alignment",
    "escalation_rate",
    "dead_units",
    "deescalated_token_similarity",
)
"""Metrics of the catalogue with one value per block."""

_BLOCK = 512
_WAVES = 3


class Size(NamedTuple):
    """How much of a run there is."""

    steps: int
    metrics: int
    """So many of METRICS, 48 values each."""

    def __str__(self) -> str:
        return f"{self.steps:,} x {self.metrics}"

    @property
    def name(self) -> str:
        return f"steps_{self.steps}_metrics_{self.metrics}"

    @property
    def num_values(self) -> int:
        return self.steps * self.metrics * LAYERS


def blocks(size: Size) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """The first step and the values of some hundred steps at a time: T steps, M metrics, L layers."""
    levels = _Levels(size.metrics)
    for number, first in enumerate(range(0, size.steps, _BLOCK)):
        noise_TML = np.random.default_rng([2, number]).standard_normal((_BLOCK, size.metrics, LAYERS), np.float32)
        values_TML = levels.over(first) * (1 + levels.noise_ratio_M1 * noise_TML)
        yield first, values_TML[: size.steps - first].astype(np.float32)


class _Levels:
    """Where each metric of each layer is around, and how that drifts over tens of thousands of steps."""

    def __init__(self, num_metrics: int) -> None:
        draw = np.random.default_rng(1)
        shape = len(METRICS), LAYERS
        self._level_ML = (10 ** draw.uniform(-3, 2, (len(METRICS), 1)) * draw.uniform(0.5, 2, shape))[:num_metrics]
        self._phase_WML = draw.uniform(0, 2 * np.pi, (_WAVES, *shape))[:, :num_metrics]
        self._period_WML = 10 ** draw.uniform(3, 5, (_WAVES, *shape))[:, :num_metrics]
        self.noise_ratio_M1 = (10 ** draw.uniform(-3, -1, (len(METRICS), 1)))[:num_metrics].astype(np.float32)

    def over(self, first: int) -> NDArray[np.float32]:
        """The levels of a block: straight lines between its ends."""
        start_ML, end_ML = self._at(first), self._at(first + _BLOCK)
        share_T11 = np.linspace(0, 1, _BLOCK, endpoint=False, dtype=np.float32)[:, None, None]
        levels_TML: NDArray[np.float32] = start_ML + share_T11 * (end_ML - start_ML)
        return levels_TML

    def _at(self, step: int) -> NDArray[np.float32]:
        waves_ML = np.sin(self._phase_WML + 2 * np.pi * step / self._period_WML).mean(axis=0)
        return (self._level_ML * (1 + 0.3 * waves_ML)).astype(np.float32)
