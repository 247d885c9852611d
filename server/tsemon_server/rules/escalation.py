"""The built-in rule for token similarity escalation (TSE): tokens become the same from block to block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tsemon_server.rules.engine import Hold, Reading, View

FLOOR_RATIO = 1e-13
"""A float32 forward pass leaves this much diversity where there is none. Smaller values, and 0, count as this much."""

CEILING_RATIO = 0.999
"""Larger values count as this much: what 1000 independent tokens share by chance says nothing of the model."""

MIN_ENTRIES = 4
"""A line through fewer points fits whatever it is given: three blocks and their input are the least."""

DIVERSITY = "token_diversity"
CENTRED = "centred_token_similarity"

ADVICE: Mapping[str, str] = {
    "text": (
        "Take a share tau of the token mean away at the end of each block (de-escalation): any tau above the critical "
        "tau in the evidence stops the growth; 0.4 is enough where attention and residual weigh the same. In a causal "
        "model use the mean of the tokens so far. Or normalise at the input of each sublayer (pre-norm), or pass the "
        "first block's values on to the later ones (value residual). Where it began with the first steps, try a lower "
        "learning rate or a longer warm-up first."
    ),
    "source": (
        "De-escalation: Classic Transformers (arXiv 2312.06182), Eq. 21; the critical tau follows from its escalation "
        "factor 1 + alpha^2: tau = 1 - 1 / sqrt(1 + alpha^2). Pre-norm: same paper, Section 3.1. Value residual: "
        "Value Residual Learning (arXiv 2410.17897). Learning rate and warm-up: tsemon's recorded runs, docs/rules.md."
    ),
}


@dataclass(frozen=True)
class Fall:
    """The line through log10 of the odds t_div / t_sim against the block, over the part of the model where they fall.

    Escalation is geometric in the odds, not in the diversity: each block multiplies t_sim / t_div by 1 + alpha^2
    (Classic Transformers, Section 2.2), from the first block on. Where tokens are all but equal the two are the same.
    """

    first_layer: int
    last_layer: int
    slope: float
    """Decades per block; negative where tokens become more alike."""
    r_squared: float
    """The share of the variance that the line explains; 0 where nothing varies."""

    @property
    def ratio_per_block(self) -> float:
        """What one block leaves of the odds t_div / t_sim that it is given."""
        return float(10**self.slope)

    @property
    def critical_tau(self) -> float:
        """The de-escalation strength that just undoes one block: (1 - tau)^2 equals the ratio per block."""
        return float(1 - math.sqrt(min(1.0, self.ratio_per_block)))


def fall_over_depth(diversity: NDArray[np.float64]) -> Fall | None:
    """Fit the fall of the odds over depth; None with fewer than four finite entries.

    The fit ends where diversity comes within a decade of its lowest: below that lies the rounding of the model's
    precision (1e-13 in float32, 5e-5 in bfloat16), a plateau that says nothing of how it was reached.
    """
    layers = np.flatnonzero(np.isfinite(diversity))
    if len(layers) < MIN_ENTRIES:
        return None
    clipped = np.clip(diversity[layers], FLOOR_RATIO, CEILING_RATIO)
    bottom = int(np.argmax(clipped <= 10 * clipped.min()))
    end = max(bottom + 1, MIN_ENTRIES)
    x, y = layers[:end].astype(np.float64), np.log10(clipped[:end] / (1 - clipped[:end]))
    x_centred, y_centred = x - x.mean(), y - y.mean()
    slope = float(x_centred @ y_centred / (x_centred @ x_centred))
    total = float(y_centred @ y_centred)
    residual = y_centred - slope * x_centred
    r_squared = 1 - float(residual @ residual) / total if total > 0 else 0.0
    return Fall(int(layers[0]), int(layers[end - 1]), slope, r_squared)


@dataclass(frozen=True, kw_only=True)
class TokenSimilarityEscalation:
    """Met where tokens are all but equal after the last block and came to it block by block, in one of two ways.

    Either what is left belongs to the sample (`high_centred`), or next to nothing is left (`total_collapse_diversity`).
    All on one frame. Token similarity alone is no sign: healthy deep pre-norm models sit at 0.995. `docs/rules.md` has
    the recorded runs behind each number.
    """

    name: str = "token-similarity-escalation"
    family: str = "tse"
    severity: Literal["info", "warning", "critical"] = "critical"

    low_diversity: float = 5e-4
    """Share of energy. At or below this the last block's tokens are all but equal. Midway, in decades,
    between what the lowest healthy run stays under for three samples (1.95e-3, post-norm, in its first steps; 1.35e-3
    for one) and what the mildest that escalates does (9.5e-5; the others go on below 1e-6)."""
    clear_diversity: float = 1e-2
    """Share of energy. Above this the alert may close: twenty times the other, because a collapsed model swings by a
    factor of ten from sample to sample while it stays collapsed."""
    max_slope: float = -0.03
    """Decades per block: at least 7 % of the odds lost in each. The slowest escalation known is a BERT of 100 layers
    at random initialisation, 9 % (-0.039). It tells a fall over depth from tokens alike in the input already."""
    min_r_squared: float = 0.8
    """The line explains at least this share. Escalation fits with 0.90 and more; one bad block does not."""
    high_centred: float = 0.5
    """Share of energy. At or above this most of what is left, once the mean of the whole batch is taken out, belongs
    to the sequence and not to the token. Under a direction that all samples share
    it stays below 0.3."""
    total_collapse_diversity: float = 1e-6
    """Share of energy. At or below this the collapse is total, whatever the centred similarity: by then the differences
    between samples have vanished together with those between tokens, and a ratio of the two no longer tells a harmless
    shared direction from collapse. No healthy recorded run comes within three decades of it (1.35e-3)."""
    hold: Hold = field(default_factory=Hold)
    advice: Mapping[str, str] = field(default_factory=lambda: dict(ADVICE))

    def read(self, view: View) -> Reading:
        diversity, centred = _entries(view, DIVERSITY), _entries(view, CENTRED)
        last, last_centred = _last(diversity), _last(centred)
        sample = {f"last_{DIVERSITY}": _number(last), f"last_{CENTRED}": _number(last_centred)}
        fall = fall_over_depth(diversity)
        missing = _missing(view, diversity, centred)
        conditions: dict[str, bool | None] = {
            "low_diversity": _ask(last, last <= self.low_diversity),
            "falls_over_depth": None
            if fall is None
            else fall.slope <= self.max_slope and fall.r_squared >= self.min_r_squared,
            "shared_within_samples": _ask(last_centred, last_centred >= self.high_centred),
            "total_collapse": _ask(last, last <= self.total_collapse_diversity),
        }
        verdict, summary = self._judge(last, last_centred, fall, conditions, len(diversity) - 1, missing)
        evidence: dict[str, Any] = {
            "step": view.step,
            "layers": _profile(diversity, centred),
            "fit": fall
            and {
                "first_layer": fall.first_layer,
                "last_layer": fall.last_layer,
                "slope": _number(fall.slope),
                "ratio_per_block": _number(fall.ratio_per_block),
                "r_squared": _number(fall.r_squared),
                "critical_tau": _number(fall.critical_tau),
            },
            "conditions": conditions,
            "thresholds": {
                "low_diversity": self.low_diversity,
                "clear_diversity": self.clear_diversity,
                "max_slope": self.max_slope,
                "min_r_squared": self.min_r_squared,
                "high_centred": self.high_centred,
                "total_collapse_diversity": self.total_collapse_diversity,
                "hold_samples": self.hold.samples,
                "hold_steps": self.hold.steps,
            },
            "not_measured": missing,
        }
        return Reading(verdict, summary, evidence, sample)

    def _judge(
        self,
        last: float,
        last_centred: float,
        fall: Fall | None,
        conditions: Mapping[str, bool | None],
        num_blocks: int,
        missing: Sequence[str],
    ) -> tuple[Literal["met", "clear", "between", "unknown"], str]:
        differ = f"after {num_blocks} blocks tokens differ in {last:.2g} of their energy"
        if last > self.clear_diversity:
            return "clear", f"Tokens are apart: {differ} (clear above {self.clear_diversity:g})."
        is_shared, is_total = conditions["shared_within_samples"], conditions["total_collapse"]
        needed = {
            "low diversity": conditions["low_diversity"],
            "falls over depth": conditions["falls_over_depth"],
            "shared within samples or total collapse": is_total or is_shared,
        }
        if math.isnan(last) or (None in needed.values() and False not in needed.values()):
            return "unknown", f"Token similarity escalation cannot be judged: {'; '.join(missing)}."
        if fall is None or not all(needed.values()):
            failed = ", ".join(name for name, holds in needed.items() if holds is False)
            return "between", f"No escalation, but not clear of it: {differ}; not met: {failed}."
        total = f", a total collapse (at most {self.total_collapse_diversity:g})" if is_total else ""
        shared = f", and share {last_centred:.2f} of what is not common to the whole batch" if is_shared else ""
        return "met", (
            f"Tokens become the same over depth: {differ}{total}{shared}; "
            f"each block leaves {fall.ratio_per_block:.2g} of the difference (r² {fall.r_squared:.2f})."
        )


def _entries(view: View, metric: str) -> NDArray[np.float64]:
    """One value per activation, in depth order; what is not finite is NaN, what was not measured is empty."""
    values = np.asarray(view.layers.get(metric, ()), dtype=np.float64).ravel()
    return np.where(np.isfinite(values), values, np.nan)


def _last(values: NDArray[np.float64]) -> float:
    return float(values[-1]) if len(values) else math.nan


def _ask(value: float, answer: bool) -> bool | None:
    return None if math.isnan(value) else answer


def _number(value: float) -> float | None:
    """Six digits are what float32 holds, and NaN is not JSON."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _at(values: NDArray[np.float64], layer: int) -> float | None:
    return _number(float(values[layer])) if layer < len(values) else None


def _profile(diversity: NDArray[np.float64], centred: NDArray[np.float64]) -> dict[str, dict[str, float | None]]:
    """The first, middle, last and worst activation. Layer 0 is the first block's input, layer k what block k gives."""
    if not len(diversity):
        return {}
    where = {"first": 0, "middle": len(diversity) // 2, "last": len(diversity) - 1}
    if np.isfinite(diversity).any():
        where["worst"] = int(np.nanargmin(diversity))
    return {
        name: {"layer": layer, DIVERSITY: _at(diversity, layer), CENTRED: _at(centred, layer)}
        for name, layer in where.items()
    }


def _missing(view: View, diversity: NDArray[np.float64], centred: NDArray[np.float64]) -> list[str]:
    missing = []
    for metric, values in ((DIVERSITY, diversity), (CENTRED, centred)):
        if metric not in view.layers:
            missing.append(f"{metric} was not measured")
        elif np.isnan(values).any():
            missing.append(f"{metric} is undefined at layers {', '.join(map(str, np.flatnonzero(np.isnan(values))))}")
    if DIVERSITY in view.layers and len(diversity) < MIN_ENTRIES:
        missing.append(f"a fall over depth needs {MIN_ENTRIES - 1} blocks, the model has {max(0, len(diversity) - 1)}")
    return missing
