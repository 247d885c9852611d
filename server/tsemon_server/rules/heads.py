"""The attention head of a block that is unlike the others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

SIGNS = {"max_attention_logit": 1, "attention_entropy": -1}
"""Metrics of heads, and whether large or small values are a failure."""
FACTOR = 2.0
"""A head stands out if its value is off by this factor from the median of the block's other heads."""


def head_of(heads: Mapping[str, NDArray[np.floating] | None], block: int) -> int | None:
    """Return the head whose logits or entropy stand out, from 0; None if no single head does, or it is not known.

    heads: (blocks, heads) by metric.
    """
    for name, sign in SIGNS.items():
        values_NH = heads.get(name)
        if values_NH is None or block >= len(values_NH) or len(values_NH[block]) < 2:
            continue
        values_H = np.abs(np.asarray(values_NH[block], dtype=np.float64))
        if not np.isfinite(values_H).all():
            continue
        head = int(np.argmax(sign * values_H))
        others = float(np.median(np.delete(values_H, head)))
        if (values_H[head] > FACTOR * others) if sign > 0 else (FACTOR * values_H[head] < others):
            return head
    return None
