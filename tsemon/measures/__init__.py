"""Pure functions on tensors: the quantities of the papers, batched over leading axes.

Undefined is NaN, never a made-up number. Half precision is widened to float32 first. Nothing here has a gradient.
"""

from tsemon.measures.attention import (
    first_token_importance,
    importance,
    importance_entropy,
    normalized_row_entropy,
    positions_attended,
    row_entropy,
    saturated_attention,
)
from tsemon.measures.escalation import (
    delta,
    escalation_rate,
    estimate1_rate,
    estimate2_rate,
    expected_rate,
    mu_squared,
    omega,
    second_eigenvalue,
    xi,
)
from tsemon.measures.growth import PowerLawFit, SqrtFit, power_law_fit, saturation, sqrt_fit
from tsemon.measures.parameters import alignment, checkpoint_cosine, param_norm, step_size
from tsemon.measures.tokens import (
    TokenStatistics,
    cosine_similarity,
    deescalate,
    effective_rank,
    hfc_lfc,
    token_diversity,
    token_similarity,
    token_statistics,
)
from tsemon.measures.values import first_value_norm_ratio, value_spectrum
from tsemon.measures.weights import DominatingEigenvalue, dominating_eigenvalue

__all__ = [
    "DominatingEigenvalue",
    "PowerLawFit",
    "SqrtFit",
    "TokenStatistics",
    "alignment",
    "checkpoint_cosine",
    "cosine_similarity",
    "deescalate",
    "delta",
    "dominating_eigenvalue",
    "effective_rank",
    "escalation_rate",
    "estimate1_rate",
    "estimate2_rate",
    "expected_rate",
    "first_token_importance",
    "first_value_norm_ratio",
    "hfc_lfc",
    "importance",
    "importance_entropy",
    "mu_squared",
    "normalized_row_entropy",
    "omega",
    "param_norm",
    "positions_attended",
    "power_law_fit",
    "row_entropy",
    "saturated_attention",
    "saturation",
    "second_eigenvalue",
    "sqrt_fit",
    "step_size",
    "token_diversity",
    "token_similarity",
    "token_statistics",
    "value_spectrum",
    "xi",
]
