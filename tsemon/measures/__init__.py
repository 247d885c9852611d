"""Pure functions on tensors: the quantities of the papers, batched over leading axes.

Undefined is NaN, never a made-up number. Half precision is widened to float32 first.
"""

from tsemon.measures.attention import normalized_row_entropy, row_entropy
from tsemon.measures.parameters import alignment, param_norm, step_size
from tsemon.measures.tokens import (
    TokenStatistics,
    cosine_similarity,
    deescalate,
    token_diversity,
    token_similarity,
    token_statistics,
)

__all__ = [
    "TokenStatistics",
    "alignment",
    "cosine_similarity",
    "deescalate",
    "normalized_row_entropy",
    "param_norm",
    "row_entropy",
    "step_size",
    "token_diversity",
    "token_similarity",
    "token_statistics",
]
