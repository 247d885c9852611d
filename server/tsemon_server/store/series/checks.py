"""Whether chunks and blocks are whole, and go with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tsemon_server.store.series.blocks import summed_up
from tsemon_server.store.series.cells import Cells, Floats, Ints, merged, of_samples, starts_of
from tsemon_server.store.series.chunks import DamagedChunk, Frames, crc_of, unpack_coarse, unpack_fine, unpack_samples

_TOLERANCE = 1e-5
"""Of rollups kept in float32, whose rounding is 6e-8 of a value, and whose sums may be added in another order."""


class Finding(NamedTuple):
    """Something that is not as it must be."""

    run_id: str
    where: str
    what: str


class Checked(NamedTuple):
    """What was looked at in one run."""

    run_id: str
    num_hot: int
    num_settled: int
    num_segments: int
    num_chunks: int


Report = Callable[[Finding], None]


def problem_of_block(row: Any, rows: Sequence[Any]) -> str | None:
    """Return the faults of a block, given its chunks."""
    if crc_of(row.cells, row.stats) != row.crc:
        return "is damaged"
    expected = next(summed_up(rows), None) if rows else {}
    if expected is None:
        return None  # a chunk of it is damaged, and reported
    if all(getattr(row, name) == value for name, value in expected.items() if name not in ("stats", "crc")):
        found, again = (
            unpack_coarse(row.cells, stats, row.kind, row.num_rows * row.num_columns)
            for stats in (row.stats, expected.get("stats", b""))
        )
        if expected and _is_close(found, again):
            return None
    return "does not go with its chunks"


def problems_of_chunk(row: Any) -> Iterator[str]:
    """Return the faults of a chunk, given with num_frames, finest, from_step and to_step of its segment."""
    if row.num_frames is None:
        yield "its segment is missing"
    elif row.num_samples > row.num_frames or row.first_step < row.from_step or row.last_step > row.to_step:
        yield f"{row.num_samples} samples from step {row.first_step} to {row.last_step} do not fit into its segment"
    elif (row.samples is not None, row.fine is not None) != (row.finest == "samples", row.finest != "coarse"):
        yield f"its segment says that it has its {row.finest}, which is not so"
    levels: dict[str, Cells] = {}
    for level, read in (("samples", _samples), ("fine", _fine), ("coarse", _coarse)):
        if getattr(row, level) is None:
            continue
        try:
            levels[level] = cells = read(row)
        except DamagedChunk:
            yield f"its {level} are damaged" if level == "samples" else f"its {level} rollup is damaged"
            continue
        if _extent(cells) != (row.first_step, row.last_step, row.num_samples):
            yield f"its {level} tell first step, last step and samples as {_extent(cells)}, its row does not"
    yield from _disagreements(row, levels)


def _disagreements(row: Any, levels: dict[str, Cells]) -> Iterator[str]:
    """Each rollup against the finest level that can be read."""
    if not levels:
        return
    finest, cells = next(iter(levels.items()))
    for level, shift in (("fine", row.fine_shift), ("coarse", row.coarse_shift)):
        if level in levels and level != finest:
            expected = merged(cells, starts_of(cells.spans[:, 0] >> shift))
            if not _is_close(levels[level], expected):
                yield f"its {level} rollup does not go with its {finest}"


def _samples(row: Any) -> Cells:
    found: tuple[Ints, Floats] = unpack_samples(row.samples, row.kind, row.num_samples, row.num_rows * row.num_columns)
    return of_samples(*found)


def _fine(row: Any) -> Cells:
    return unpack_fine(row.fine, row.kind, row.num_samples, row.num_rows * row.num_columns)


def _coarse(row: Any) -> Cells:
    if crc_of(row.coarse_cells, row.coarse) != row.coarse_crc:
        raise DamagedChunk
    return unpack_coarse(row.coarse_cells, row.coarse, row.kind, row.num_rows * row.num_columns)


def _extent(cells: Cells) -> tuple[int, int, int]:
    spans = cells.spans
    return (int(spans[0, 0]), int(spans[-1, 1]), int(spans[:, 2].sum())) if len(spans) else (0, 0, 0)


def _is_close(found: Cells, expected: Cells) -> bool:
    if not np.array_equal(found.spans, expected.spans) or found.stats.shape != expected.stats.shape:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        return np.allclose(found.stats, expected.stats, _TOLERANCE, _TOLERANCE, equal_nan=True)


def is_sorted(frames: Frames) -> bool:
    """True if the steps never fall."""
    return bool((np.diff(frames.steps) >= 0).all())
