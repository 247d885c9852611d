"""Tables: a row for each step, a column for each metric, as `run.scan_history()` of W&B and many scripts give them.

CSV, JSON lines, a JSON list and Parquet. TensorBoard's own download (`Wall time,Step,Value`) is one metric a file.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tsemon.errors import InvalidArgument, needing
from tsemon.tools.importing.source import FileLog, Found, Notes, Row, SourceRun, as_step, as_time, digest, files_in

ENDINGS = (".csv", ".jsonl", ".json", ".parquet")
STEPS = ("_step", "step", "Step", "global_step", "trainer/global_step", "train/global_step", "iteration")
"""Columns of the step; the first that there is counts."""
TIMES = ("_timestamp", "timestamp", "time", "Wall time")
"""Columns of the time, in seconds since 1970."""
_NO_METRICS = {"_runtime", "_wandb", "_gitversion"}
_OF_EXPORT = {"run_id", "writer", "seq", "metric", "layer", "head", "value"}
"""Columns of `GET /runs/{run_id}/export`."""
_LARGEST_JSON = 2**28
_LARGEST_FIELD = 2**28
"""Of a CSV. Python's own limit, 128 KiB, is less than a picture in a cell has."""
_OF_CHART = re.compile(r"(.+) - (.+?)(?:__MIN|__MAX)?")
"""A column in what W&B's page downloads of a chart: a run and a metric. The extremes are those of the same values."""


def find_runs(path: Path, step_column: str | None = None) -> Found:
    """A run for each table: one file, or those in a folder and below."""
    runs: list[SourceRun] = []
    damages: list[str] = []
    for file in files_in(path, damages):
        if file != path and file.suffix not in ENDINGS:
            continue
        try:
            runs += _runs_in(file, file.relative_to(path) if file != path else Path(file.name), step_column)
        except InvalidArgument as error:
            damages.append(str(error))
        except (OSError, ValueError) as error:
            damages.append(f"{file} cannot be read: {error}")
    return Found(runs, damages)


def _runs_in(file: Path, below: Path, step_column: str | None) -> Iterator[SourceRun]:
    log = Table(file, step_column)
    columns = log.columns()
    if columns is None:
        raise InvalidArgument(f"{file} has no rows")
    if {*columns} >= _OF_EXPORT:
        raise InvalidArgument(
            f"{file} is an export of tsemon with a row for each value; a table has a row for each step. To move runs to "
            "another server, use `tsemon admin backup` and `tsemon admin restore`"
        )
    if not log.step_of(columns):
        missing = f"for the step (one of {', '.join(STEPS)}); --step-column names it"
        if step_column is not None:
            missing = f"{step_column!r}, which --step-column names"
        has = ", ".join(name[:40] for name in sorted(columns)[:8])
        raise InvalidArgument(f"{file} has no column {missing}. It has {has}")
    of_all = ",".join(sorted(columns)) if file.suffix in (".csv", ".parquet") else ""
    charted = _runs_of_chart(column for column in columns if column != log.step_of(columns))
    for name in charted or [below.with_suffix("").as_posix()]:
        own = Table(file, step_column, name) if charted else log
        key = digest("table", file.name, own.opening(), *([name] if charted else []))
        yield SourceRun(kind="table", key=key, columns=of_all, where=str(file), name=name, logs=[own])


def _runs_of_chart(columns: Iterable[str]) -> list[str]:
    """The runs, where the columns are those of a chart of W&B."""
    found = [_OF_CHART.fullmatch(column) for column in columns]
    return list(dict.fromkeys(match[1] for match in found if match)) if all(found) else []


class _Record(NamedTuple):
    """A row as it stands in the file."""

    cells: Mapping[str, Any]
    place: int
    where: str
    """For people: its line, or its row."""


class Table(FileLog):
    """One file of rows; of a chart's file the columns of one run."""

    def __init__(self, path: Path, step_column: str | None, run: str | None = None) -> None:
        super().__init__(path)
        self._step_column = step_column
        self._run = run

    def columns(self) -> list[str] | None:
        """Those of the first row, of JSON of the first with a step; None where there is none."""
        records = self._records(Notes())
        first = next(records, None)
        if first is None:
            return None
        if self.path.suffix in (".json", ".jsonl") and not self.step_of(first.cells):
            first = next((record for record in records if self.step_of(record.cells)), first)
        return list(first.cells)

    def step_of(self, columns: Iterable[str]) -> str | None:
        """The column of the step."""
        wanted = STEPS if self._step_column is None else (self._step_column,)
        return next((name for name in wanted if name in columns), None)

    def opening(self) -> str:
        """What the first row with a metric says; a training that takes the place of another begins with another one.

        Cells without a value do not count: some tools write the file anew with a column that came later.
        """
        for record, _, _ in self._records(Notes()):
            known = (self.step_of(record) or "", *TIMES)
            where = {name: str(_number(record[name])) for name in known if name in record}
            cells = {}
            for name, value in record.items():
                called = self._called(name, record)
                if called is not None and name not in where and name not in _NO_METRICS:
                    number = _number(value)
                    cells[called] = str(value if number is None else number)
            cells = {name: text for name, text in cells.items() if text not in ("", "nan", "None")}
            if cells:
                return json.dumps([where, cells], sort_keys=True)
        return ""

    def rows(self, notes: Notes) -> Iterator[Row]:
        modified = self.modified
        for ordinal, (record, place, where) in enumerate(self._records(notes)):
            column = self.step_of(record)
            said = record.get(column or "")
            step = None if isinstance(said, bool) else as_step(_number(said))
            if step is None:
                notes.leave_out("rows without a step that is a whole number from 0 to 2^53 - 1", where)
                continue
            when = next((_number(record[name]) for name in TIMES if name in record), None)
            values = []
            for name, value in record.items():
                called = self._called(name, record)
                if name == column or name in _NO_METRICS or name in TIMES or called is None:
                    continue
                number = _number(value)
                if number is not None:
                    values.append((called, number))
                elif value not in (None, ""):
                    notes.leave_out("values that are no numbers", name)
            if values:
                yield Row(ordinal, step, as_time(when, modified), values, place)

    def _called(self, column: str, record: Mapping[str, Any]) -> str | None:
        """The metric in a column; None where it is not this run's."""
        if self._run is not None:
            whose, _, metric = column.rpartition(" - ")
            return metric if whose == self._run and not metric.endswith(("__MIN", "__MAX")) else None
        return self.path.stem if column == "Value" and "Wall time" in record else column

    def _records(self, notes: Notes) -> Iterator[_Record]:
        if self.path.suffix == ".csv":
            return self._csv(notes)
        if self.path.suffix == ".parquet":
            rows = enumerate(read_parquet(self.path), 1)
            return (_Record(record, self.size, f"row {number}") for number, record in rows)
        return self._json(notes)

    def _open(self, newline: str | None = None) -> TextIO:
        """The file as text. Raises ValueError for one in which a character takes two bytes, as PowerShell writes it."""
        with open(self.path, "rb") as file:
            if b"\0" in file.read(64):
                raise ValueError("it is not UTF-8 but, it seems, UTF-16; save it as UTF-8")
        return open(self.path, encoding="utf-8-sig", errors="replace", newline=newline)

    def _csv(self, notes: Notes) -> Iterator[_Record]:
        place = 0

        def lines() -> Iterator[str]:
            nonlocal place
            for line in file:
                place += len(line)
                # Half a number is a number, too.
                if line.endswith(("\n", "\r")) or not self.is_growing(notes):
                    yield line

        with self._open(newline="") as file:
            csv.field_size_limit(_LARGEST_FIELD)
            try:
                rows = csv.DictReader(lines())
                for name, number in Counter(rows.fieldnames or ()).items():
                    if name and number > 1:
                        notes.leave_out("all but the last column of a name that several have", name)
                for record in rows:
                    where = f"line {rows.line_num}"
                    record.pop("", None)  # pandas counts rows in a column without a name
                    if record.pop(None, None) is not None or None in record.values():
                        notes.leave_out("cells of rows with more or fewer of them than there are columns", where)
                    yield _Record(record, place, where)
            except csv.Error as error:
                raise ValueError(f"{error} (before byte {place})") from error

    def _json(self, notes: Notes) -> Iterator[_Record]:
        with self._open() as file:
            start = file.read(64).lstrip()[:1]
            file.seek(0)
            if start == "[":
                if self.size > _LARGEST_JSON:
                    raise InvalidArgument(
                        f"{self.path} is one JSON list of more than 256 MiB; write JSON lines instead"
                    )
                try:
                    records = json.load(file)
                except RecursionError as error:
                    raise ValueError("it is nested too deep") from error
                for number, record in enumerate(records, 1):
                    if isinstance(record, dict):
                        yield _Record(record, self.size, f"row {number}")
                return
            place = 0
            for number, line in enumerate(file, 1):
                place += len(line)
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    if line.endswith("\n"):
                        notes.damage(f"{self.path}, line {number} is no JSON, and is left out")
                    else:
                        self.is_torn(notes)
                    record = None
                yield _Record(record if isinstance(record, dict) else {}, place, f"line {number}")


def read_parquet(path: Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file, a few thousand at a time in memory. Raises OSError or ValueError."""
    with needing("Parquet needs pyarrow; pip install 'tsemon[export]'"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=8192, columns=columns):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error


def _number(value: object) -> float | None:
    if isinstance(value, str):
        try:
            # Python reads 1_000 and the digits of other scripts, which no tool writes.
            return float(value) if value.isascii() and "_" not in value else None
        except ValueError:
            return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
    return None
