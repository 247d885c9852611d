"""Choose a few of many entries, evenly spread, without waiting for the device.

Axes: N entries, R chosen ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


def evenly_spread(valid_N: Tensor, at_most: int) -> tuple[Tensor, Tensor]:
    """Indices of up to `at_most` true entries, one from the middle of each of equally long stretches of them.

    Returns as many indices as fit, whatever the entries are, and which of them to use: how many are true is known to the
    device alone.
    """
    size = min(valid_N.shape[0], at_most)
    nth_N = valid_N.cumsum(dim=0)
    rank_R = (torch.arange(size, device=valid_N.device) * 2 + 1) * nth_N[-1].clamp_min(size) // (2 * size)
    index_R = torch.searchsorted(nth_N, rank_R, right=True).clamp_max(valid_N.shape[0] - 1)
    return index_R, rank_R < nth_N[-1]
