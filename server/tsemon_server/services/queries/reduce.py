"""Cells as the buckets of a chart: pure arithmetic on arrays."""

from __future__ import annotations

import numpy as np

from tsemon_server.store.series.cells import Cells, merged
from tsemon_server.store.series.metric import Points


def bucketed(points: Points, *, ends_alone: bool) -> Cells:
    """A bucket for all cells of one span of the grid.

    With `ends_alone` the first and the last step have buckets of their own, because charts and people read the ends.
    """
    cells, shift, _ = points
    if not len(cells.spans):
        return cells
    first_steps, last_steps = cells.spans[:, 0], cells.spans[:, 1]
    is_new = np.diff(first_steps >> shift, prepend=-1) != 0
    if ends_alone:
        for is_end in (last_steps == first_steps[0], first_steps == last_steps.max()):
            is_new |= np.diff(is_end, prepend=False)
    return merged(cells, np.flatnonzero(is_new))
