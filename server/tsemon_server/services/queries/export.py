"""Samples as a table for other programs: a row per value, as CSV or Parquet, made while it is read."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tsemon.errors import MissingPackage
from tsemon.terminal import as_cell
from tsemon_answers.runs import Run
from tsemon_answers.series import ExportFormat
from tsemon_server.store.series.exporting import Piece, Table

MEDIA_TYPES: dict[ExportFormat, str] = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}

COLUMNS = (
    "project", "run", "run_id", "attempt", "writer", "seq", "step", "time", "metric", "layer", "head", "value",
)  # fmt: skip
ROWS_PER_GROUP = 100_000
"""Of a Parquet file; a smaller group costs more than it saves, and the writer keeps something of each till the end."""


def file_name(run: Run, format: ExportFormat) -> str:
    """A name that is safe in a header and on any disk."""
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{run.project}-{run.run}").strip(".-")
    return f"{words[:100] or run.run_id}.{format}"


def check_format(format: ExportFormat) -> None:
    """Raise MissingPackage where this service cannot make it."""
    if format == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise MissingPackage(
            "Parquet needs pyarrow in the service; pip install 'tsemon[export]', or ask for format=csv"
        )


def csv_parts(run: Run, table: Table) -> Iterator[bytes]:
    """Numbers as they are, NaN and infinities as NaN, inf and -inf. What is missing is told by a comment at the end."""
    yield _csv_line(COLUMNS).encode()
    for piece in table.pieces():
        yield "".join(_csv_lines(run, piece)).encode()
    if table.num_dropped or table.num_damaged:
        yield f"# missing: {_missing(table)}\n".encode()


def _csv_lines(run: Run, piece: Piece) -> Iterator[str]:
    start = _csv_line((run.project, run.run, run.run_id, piece.stream.attempt, piece.stream.writer))[:-1]
    metric = _csv_line((piece.metric,))[:-1]
    ends = [f",{metric},{layer},{head}," for layer, head in _places(piece)]
    frames = zip(piece.seqs.tolist(), piece.steps.tolist(), piece.times.tolist(), piece.values.tolist(), strict=True)
    for seq, step, time, values in frames:
        of_frame = f"{start},{seq},{step},{time!r}"
        for end, value in zip(ends, values, strict=True):
            yield f"{of_frame}{end}{value if value == value else 'NaN'}\n"


def _csv_line(values: tuple[Any, ...]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(map(as_cell, values))
    return line.getvalue()


def _places(piece: Piece) -> list[tuple[int | str, int | str]]:
    """Layer and head of each value of a frame, empty where there is none."""
    num_values = piece.values.shape[1]
    if piece.kind == "scalars":
        return [("", "")] * num_values
    if piece.kind == "layers":
        return [(layer, "") for layer in range(num_values)]
    return [divmod(index, piece.num_columns) for index in range(num_values)]


def parquet_parts(run: Run, table: Table) -> Iterator[bytes]:
    """Row groups of about 100,000 rows. What is missing is told by the file's metadata, under `tsemon`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = pa.dictionary(pa.int32(), pa.string())
    types = (names, names, names, pa.int32(), names, pa.int64(), pa.int64(), pa.float64(), names)
    schema = pa.schema(list(zip(COLUMNS, (*types, pa.int32(), pa.int32(), pa.float64()), strict=True)))
    sink = _Sink()
    writer = pq.ParquetWriter(sink, schema, compression="zstd")
    waiting: list[Any] = []
    num_waiting = 0
    for piece in table.pieces():
        waiting.append(_table(pa, schema, run, piece))
        num_waiting += waiting[-1].num_rows
        if num_waiting >= ROWS_PER_GROUP:
            writer.write_table(pa.concat_tables(waiting).unify_dictionaries(), row_group_size=2 * ROWS_PER_GROUP)
            waiting, num_waiting = [], 0
            yield sink.taken()
    if waiting:
        writer.write_table(pa.concat_tables(waiting).unify_dictionaries(), row_group_size=2 * ROWS_PER_GROUP)
    missing = {"dropped": table.num_dropped, "damaged": table.num_damaged}
    writer.add_key_value_metadata({"tsemon": json.dumps({"missing_samples": missing})})
    writer.close()
    yield sink.taken()


def _table(pa: Any, schema: Any, run: Run, piece: Piece) -> Any:
    num_frames, num_values = piece.values.shape
    layers, heads = (_tiled(place, num_frames) for place in zip(*_places(piece), strict=True))

    def same(value: str) -> Any:
        return pa.DictionaryArray.from_arrays(np.zeros(num_frames * num_values, np.int32), pa.array([value]))

    def each(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, num_values)

    columns = (
        same(run.project), same(run.run), same(run.run_id),
        np.full(num_frames * num_values, piece.stream.attempt), same(piece.stream.writer),
        each(piece.seqs), each(piece.steps), each(piece.times), same(piece.metric),
        pa.array(layers[0], mask=layers[1]), pa.array(heads[0], mask=heads[1]),
        piece.values.astype(np.float64).reshape(-1),
    )  # fmt: skip
    return pa.table(
        [
            pa.array(column).cast(field.type) if isinstance(column, np.ndarray) else column
            for column, field in zip(columns, schema, strict=True)
        ],
        schema=schema,
    )


def _tiled(places: tuple[int | str, ...], num_frames: int) -> tuple[np.ndarray, np.ndarray]:
    """For each frame these layers, or heads; and which of them are none."""
    is_none = np.array([place == "" for place in places])
    numbers = np.array([0 if place == "" else place for place in places], np.int32)
    return np.tile(numbers, num_frames), np.tile(is_none, num_frames)


class _Sink(io.RawIOBase):
    """Where Parquet is written to, and taken from before there is much of it."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def taken(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _missing(table: Table) -> str:
    return f"{table.num_dropped} samples dropped by retention, {table.num_damaged} damaged"


PARTS: dict[ExportFormat, Callable[[Run, Table], Iterator[bytes]]] = {"csv": csv_parts, "parquet": parquet_parts}
