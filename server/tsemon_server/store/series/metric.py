"""One metric of a run, put together from hot frames, chunks and blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tsemon_server.store.series.cells import Cells, Floats, Ints, joined, of_samples, smallest_shift
from tsemon_server.store.series.chunks import DamagedChunk, crc_of, unpack_coarse, unpack_fine, unpack_samples
from tsemon_server.store.series.packing import Kind, are_pages_sound, item_type

log = logging.getLogger(__name__)


class Samples(NamedTuple):
    """One metric over the frames of a run, in step order."""

    steps: Ints
    """int64, (n,)"""
    values: Floats
    """(n, entries)"""
    num_damaged: int = 0
    """Samples that are stored and cannot be read."""


class Points(NamedTuple):
    """One metric over the frames of a run as cells, no finer than was asked for."""

    cells: Cells
    shift: int
    """Steps that are the same but for their last `shift` bits belong together."""
    num_damaged: int = 0


Extent = tuple[int, int, int]
"""First step, last step, number of samples."""


class Metric(Protocol):
    """One metric of a run within the visible intervals: all entries, or one."""

    def samples(self) -> Samples:
        """Return all samples; those of one step in any order. What retention reduced to rollups is not among them."""

    def extent(self) -> Extent | None:
        """Return the extent of the stored samples; None if there are no samples."""

    def points(self, most: int, *, ends_alone: bool, shift: int | None = None) -> Points:
        """Return cells that fit into at most `most` buckets on a grid of steps; single samples if these are no more.

        With `ends_alone` the first and the last step are buckets of their own. With `shift` the grid is given.
        """

    def num_rows(self) -> int:
        """Return the largest number of rows (layers) of frames that may be visible, 0 if there are none."""


class Joined:
    """A Metric whose samples are in two places, each in one of them."""

    def __init__(self, one: Metric, other: Metric) -> None:
        self._parts = one, other

    def samples(self) -> Samples:
        parts = [part.samples() for part in self._parts]
        steps = np.concatenate([part.steps for part in parts])
        order = np.argsort(steps, kind="stable")
        values = _stacked([part.values for part in parts])
        return Samples(steps[order], values[order], sum(part.num_damaged for part in parts))

    def extent(self) -> Extent | None:
        return _joint([extent for part in self._parts if (extent := part.extent()) is not None])

    def points(self, most: int, *, ends_alone: bool, shift: int | None = None) -> Points:
        if shift is None and (extent := self.extent()) is not None:
            shift = shift_of(extent, most, ends_alone=ends_alone)
        parts = [part.points(most, ends_alone=ends_alone, shift=shift) for part in self._parts]
        cells = joined([part.cells for part in parts])
        return Points(cells, shift or 0, sum(part.num_damaged for part in parts))

    def num_rows(self) -> int:
        return max(part.num_rows() for part in self._parts)


class MetricRows(Protocol):
    """One metric within the visible intervals, as an engine reads it.

    A row of a chunk has its key (attempt, writer, number, part), num_samples, num_rows, num_columns, and the first and
    the last visible step of its attempt (from_step, to_step). `between` holds the first and the last step that may be
    rolled up, and the shift of the grid.
    """

    def hot(self) -> Sequence[tuple[int, bytes, bytes | None, int, int]]:
        """Of hot frames, step, pages that hold the metric, their checksums, and where in the pages it is: start, bytes."""

    def extent_of_blocks(self) -> tuple[int, int, int | None]:
        """First step, last step and number of samples of the blocks that are wholly visible."""

    def alone(self) -> Sequence[Any]:
        """Chunks outside of such blocks: first_step, last_step, and whether they are wholly visible (is_inside)."""

    def blocks(self, between: Mapping[str, int]) -> Sequence[Any]:
        """cells, stats, crc, attempt, writer, number, num_rows, num_columns of the blocks that are coarse enough."""

    def inside(self, between: Mapping[str, int]) -> Sequence[Any]:
        """Chunks that are wholly visible and in none of these blocks.

        Of each the coarsest level that is fine enough: level, blob, coarse_cells, coarse_crc.
        """

    def of_block(self, block: Any, between: Mapping[str, int]) -> Sequence[Any]:
        """The same of the chunks of one block."""

    def levels(self, chunk: Any) -> Any:
        """samples, fine, coarse, coarse_cells, coarse_crc of a chunk."""

    def samples(self) -> Sequence[Any]:
        """samples of all visible chunks."""

    def num_rows(self) -> int:
        """The largest number of rows."""


class PackedMetric:
    """A Metric of packed frames."""

    def __init__(self, rows: MetricRows, run_id: str, kind: Kind, metric: str, entry: tuple[int, int] | None) -> None:
        self._rows, self._run_id, self._kind, self._metric, self._entry = rows, run_id, kind, metric, entry

    def samples(self) -> Samples:
        parts = [self._hot()]
        num_damaged = parts[0].num_damaged
        for row in self._rows.samples():
            try:
                parts += [self._unpacked_samples(row)] if row.samples is not None else []
            except DamagedChunk:
                num_damaged += self._report(row, "samples")
        steps = np.concatenate([part.steps for part in parts])
        order = np.argsort(steps, kind="stable")
        return Samples(steps[order], _stacked([part.values for part in parts])[order], num_damaged)

    def extent(self) -> Extent | None:
        parts = [_cells(self._hot())]
        return _joint(self._plan(parts)[0] + _extents(parts))

    def points(self, most: int, *, ends_alone: bool, shift: int | None = None) -> Points:
        hot = self._hot()
        parts = [_cells(hot)]
        extents, num_damaged = self._plan(parts)
        num_damaged += hot.num_damaged
        extent = _joint(extents + _extents(parts))
        if extent is None:
            return Points(parts[0], shift or 0, num_damaged)
        first, last, _ = extent
        if shift is None:
            shift = shift_of(extent, most, ends_alone=ends_alone)
        if extents:
            between = {"first": first + ends_alone, "last": last - ends_alone, "shift": shift}
            num_damaged += self._add_blocks(parts, between)
            num_damaged += self._add_inside(parts, self._rows.inside(between))
        return Points(joined(parts), shift, num_damaged)

    def num_rows(self) -> int:
        return self._rows.num_rows()

    def _plan(self, parts: list[Cells]) -> tuple[list[Extent], int]:
        """The extents of what is wholly inside, still to be read at the level that they ask for.

        Chunks that reach over an edge are added to `parts` at once. How many samples of those cannot be read comes second.
        """
        first, last, num_samples = self._rows.extent_of_blocks()
        extents = [(first, last, int(num_samples))] if num_samples else []
        num_damaged = 0
        for row in self._rows.alone():
            if row.is_inside:
                extents.append((row.first_step, row.last_step, row.num_samples))
            else:
                num_damaged += self._add_finest(row, parts)
        return extents, num_damaged

    # -- hot frames

    def _hot(self) -> Samples:
        # Rows of one layout are checked and cut together: one by one, that takes five times as long.
        alike: dict[tuple[int, ...], list[tuple[int, bytes, bytes | None]]] = {}
        rows = self._rows.hot()
        for step, pages, crcs, start, num_bytes in rows:
            sizes = (start, num_bytes, len(pages), -1 if crcs is None else len(crcs))
            alike.setdefault(sizes, []).append((step, pages, crcs))
        dtype = item_type(self._kind)
        steps, values = [np.empty(0, np.int64)], [np.empty((0, 1), dtype)]
        for (start, num_bytes, page_bytes, _), group in alike.items():
            if page_bytes >= start + num_bytes:
                steps_of, pages_of, crcs_of = zip(*group, strict=True)
                is_sound = are_pages_sound(pages_of, crcs_of)
                data = np.frombuffer(b"".join(pages_of), np.uint8).reshape(len(group), -1)
                steps.append(np.array(steps_of, np.int64)[is_sound])
                values.append(np.ascontiguousarray(data[is_sound, start : start + num_bytes]).view(dtype))
        found = np.concatenate(steps)
        if num_damaged := len(rows) - len(found):
            log.error("%d frames of run %s are damaged; `tsemon admin check` lists them all", num_damaged, self._run_id)
        return Samples(found, _stacked(values), num_damaged)

    # -- chunks and blocks

    def _add_blocks(self, parts: list[Cells], between: Mapping[str, int]) -> int:
        """Add the cells of blocks, or of the chunks of those that are damaged; how many samples cannot be read."""
        found, num_damaged = _Coarse(self._kind), 0
        for block in self._rows.blocks(between):
            if crc_of(block.cells, block.stats) == block.crc:
                found.add(block.cells, block.stats, block.num_rows, block.num_columns)
                continue
            log.error(
                "block %d of %s in run %s is damaged; its chunks are read", block.number, self._metric, self._run_id
            )
            num_damaged += self._add_inside(parts, self._rows.of_block(block, between))
        parts += [Cells(spans, self._of_entry(stats, columns)) for spans, stats, columns in found.cells()]
        return num_damaged

    def _add_inside(self, parts: list[Cells], rows: Sequence[Any]) -> int:
        """Add the cells of chunks that are wholly inside; how many samples cannot be read."""
        coarse, num_damaged = _Coarse(self._kind), 0
        for row in rows:
            try:
                if row.level == "coarse":
                    _check_coarse(row.coarse_cells, row.blob, row.coarse_crc)
                    coarse.add(row.coarse_cells, row.blob, row.num_rows, row.num_columns)
                else:
                    parts.append(self._cells_of(row, row.level, row.blob))
            except DamagedChunk:
                self._report(row, row.level)
                num_damaged += self._add_finest(row, parts, unsound=row.level)
        parts += [Cells(spans, self._of_entry(stats, columns)) for spans, stats, columns in coarse.cells()]
        return num_damaged

    def _add_finest(self, row: Any, parts: list[Cells], unsound: str = "") -> int:
        """Add the cells of the finest level that is there and sound, cut to what was asked for.

        Returns how many samples are left out: all where no level is sound, else those of cells that reach beyond.
        """
        stored, is_damaged = self._rows.levels(row), bool(unsound)
        for level in ("samples", "fine", "coarse"):
            blob = getattr(stored, level)
            if blob is None or level == unsound:
                continue
            try:
                if level == "coarse":
                    _check_coarse(stored.coarse_cells, blob, stored.coarse_crc)
                cells = self._cells_of(row, level, blob, stored.coarse_cells)
            except DamagedChunk:
                self._report(row, level)
                is_damaged = True
                continue
            first, last, num_samples = cells.spans.T
            is_wanted = (first >= row.from_step) & (last <= row.to_step)
            is_cut = (first <= row.to_step) & (last >= row.from_step) & ~is_wanted
            parts.append(Cells(cells.spans[is_wanted], cells.stats[is_wanted]))
            return int(num_samples[is_cut].sum()) if is_damaged else 0
        return int(row.num_samples)

    def _cells_of(self, row: Any, level: str, blob: bytes, coarse_cells: bytes = b"") -> Cells:
        num_entries = row.num_rows * row.num_columns
        if level == "samples":
            steps, values = unpack_samples(blob, self._kind, row.num_samples, num_entries)
            return of_samples(steps, self._of_entry(values, row.num_columns))
        if level == "fine":
            cells = unpack_fine(blob, self._kind, row.num_samples, num_entries)
        else:
            cells = unpack_coarse(coarse_cells, blob, self._kind, num_entries)
        return Cells(cells.spans, self._of_entry(cells.stats, row.num_columns))

    def _unpacked_samples(self, row: Any) -> Samples:
        steps, values = unpack_samples(row.samples, self._kind, row.num_samples, row.num_rows * row.num_columns)
        is_wanted = (steps >= row.from_step) & (steps <= row.to_step)
        return Samples(steps[is_wanted], self._of_entry(values, row.num_columns)[is_wanted])

    def _of_entry(self, values: Floats, num_columns: int) -> Floats:
        """Of all entries, which are the second axis, the one that was asked for."""
        if self._entry is None:
            return values
        index = self._entry[0] * num_columns + self._entry[1]
        return values[:, index : index + 1]

    def _report(self, row: Any, what: str) -> int:
        log.error(
            "the %s of %s %s in run %s, attempt %d, writer %s, chunk %d are damaged; `tsemon admin check` lists them all",
            what, self._kind, self._metric, self._run_id, row.attempt, row.writer, row.number,
        )  # fmt: skip
        return int(row.num_samples)


def shift_of(extent: Extent, most: int, *, ends_alone: bool) -> int:
    """The finest grid on which so much fits into at most `most` buckets."""
    first, last, num_samples = extent
    return 0 if num_samples <= most else smallest_shift(first, last, most - 2 * ends_alone)


def _extents(parts: list[Cells]) -> list[Extent]:
    return [(int(s[:, 0].min()), int(s[:, 1].max()), int(s[:, 2].sum())) for s, _ in parts if len(s)]


def _joint(extents: list[Extent]) -> Extent | None:
    if not extents:
        return None
    firsts, lasts, nums_samples = zip(*extents, strict=True)
    return min(firsts), max(lasts), sum(nums_samples)


class _Coarse:
    """Coarse rollups of many rows, unpacked all at once: a chart over a long run has hundreds."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._by_shape: dict[tuple[int, int], tuple[list[bytes], list[bytes]]] = {}

    def add(self, cells: bytes, stats: bytes, num_rows: int, num_columns: int) -> None:
        of_shape = self._by_shape.setdefault((num_rows, num_columns), ([], []))
        of_shape[0].append(cells)
        of_shape[1].append(stats)

    def cells(self) -> Iterator[tuple[Ints, Floats, int]]:
        """Spans, values and the number of columns, one triple per shape."""
        for (num_rows, num_columns), (cells, stats) in self._by_shape.items():
            found = unpack_coarse(b"".join(cells), b"".join(stats), self._kind, num_rows * num_columns)
            yield found.spans, found.stats, num_columns


def _check_coarse(cells: bytes, stats: bytes, crc: int) -> None:
    if crc_of(cells, stats) != crc:
        raise DamagedChunk


def _cells(samples: Samples) -> Cells:
    return of_samples(samples.steps, samples.values)


def _stacked(parts: list[Floats]) -> Floats:
    """One below the other. Attempts may differ in depth: where one is shallower its rows end in NaN."""
    parts = [part for part in parts if len(part)] or parts[:1]
    widths = {part.shape[1] for part in parts}
    if len(widths) == 1:
        return np.concatenate(parts)
    stacked = np.full((sum(map(len, parts)), max(widths)), np.nan, np.result_type(*parts))
    at = 0
    for part in parts:
        stacked[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return stacked
