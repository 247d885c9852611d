"""What Neptune's exporter leaves: Parquet files with a row for each value of each attribute of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tsemon.tools.importing.source import FileLog, Found, Notes, Row, SourceRun, as_time, digest, files_in
from tsemon.tools.importing.tables import read_parquet

COLUMNS = {"project_id", "run_id", "attribute_path", "attribute_type", "step", "timestamp"}
_SINGLE = {name: f"{name}_value" for name in ("int", "float", "string", "bool", "datetime", "string_set")}


def is_export(path: Path) -> bool:
    """Whether a Parquet file has the columns of the exporter."""
    import pyarrow.parquet as pq

    try:
        return {*pq.read_schema(path).names} >= COLUMNS
    except (OSError, ValueError):
        return False


def find_runs(path: Path) -> Found:
    """The runs of an export: one file, or a folder with such files in it and below."""
    by_run: dict[tuple[str, str], list[Part]] = {}
    damages: list[str] = []
    for file in files_in(path, damages):
        if file != path and file.suffix != ".parquet":
            continue
        try:
            part = Part(file)
        except (OSError, ValueError, KeyError) as error:
            damages.append(f"{file} cannot be read as a file of neptune-exporter: {error}")
            continue
        if part.run_id:
            by_run.setdefault((part.project, part.run_id), []).append(part)
    runs = []
    for (project, run_id), parts in sorted(by_run.items()):
        parts.sort(key=lambda part: (len(part.name), part.name))  # part_10 is after part_9
        single = {name: value for part in parts for name, value in part.single.items()}
        tags = single.get("sys/tags")
        runs.append(
            SourceRun(
                kind="neptune",
                key=digest("neptune", project, run_id),
                where=str(parts[0].path),
                project=project,
                name=run_id,
                config={
                    name: value for name, value in single.items() if not name.startswith("sys/") or name == "sys/name"
                },
                tags=[str(tag) for tag in tags] if isinstance(tags, list) else [],
                state="failed" if single.get("sys/failed") is True else "finished",
                logs=list(parts),
            )
        )
    return Found(runs, damages)


class Part(FileLog):
    """One file of one run."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.project = self.run_id = ""
        self.single: dict[str, Any] = {}
        for record in read_parquet(
            path, ["project_id", "run_id", "attribute_path", "attribute_type", *_SINGLE.values()]
        ):
            self.project, self.run_id = str(record["project_id"]), str(record["run_id"])
            if (column := _SINGLE.get(record["attribute_type"])) is not None:
                value = record[column]
                self.single[record["attribute_path"]] = (
                    value if isinstance(value, bool | int | float | list) else str(value)
                )

    def rows(self, notes: Notes) -> Iterator[Row]:
        modified = self.modified
        columns = ["attribute_path", "attribute_type", "step", "timestamp", "float_value"]
        for ordinal, record in enumerate(read_parquet(self.path, columns)):
            name, kind = str(record["attribute_path"]), record["attribute_type"]
            if kind in _SINGLE:
                continue
            if kind != "float_series" or record["float_value"] is None:
                notes.leave_out(str(kind), name)
                continue
            step = notes.step(None if record["step"] is None else float(record["step"]), name)
            when = record["timestamp"].timestamp() if record["timestamp"] is not None else None
            if step is not None:
                yield Row(ordinal, step, as_time(when, modified), [(name, float(record["float_value"]))], self.size)
