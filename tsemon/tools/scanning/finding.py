"""Which files of a folder are checkpoints, and of which step, by their names. No file is opened but JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tsemon.errors import InvalidArgument, MissingData
from tsemon.tools.scanning.opening import read_json
from tsemon.wire import MAX_STEP

SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".safetensors"}
WHOLE_MODEL = ("model.safetensors", "pytorch_model.bin")
"""What libraries call a whole model, the better form first. Files beside it are none, unless a name tells another step."""
BESIDE = re.compile(r"^(optimizer|scheduler|scaler|rng_state|random_states|training_args|sampler)", re.IGNORECASE)
"""What trainers put beside the parameters."""
SHARD = re.compile(r"^(?P<stem>.+?)[-_](?P<number>\d+)-of-(?P<total>\d+)$")
STEP = re.compile(
    r"(?:^|[^a-z])(?:global[-_]?)?(?:steps?|iter(?:ation)?s?|checkpoint|ckpt|it|updates?)[-_= ]*(\d[a-z\d]*)", re.I
)
"""A word for the step and what follows it, which is none where letters are among its digits: `100k`, `1e3`."""
LAST_NUMBER = re.compile(r"(?:^|[-_.= ])(\d+)[-_.= ]*$")
NO_STEP = re.compile(
    r"epochs?[-_= ]*\d+"
    r"|(?<!\d)(?:\d\d)?\d\d([-_.])\d\d\1\d\d(?!\d)"  # a date, a time
    r"|(?<!\d)\d{8}[-_T]\d{4,6}(?!\d)",  # both
    re.I,
)
MAX_DEPTH = 4
"""Folders in folders, in which is looked."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be a checkpoint."""

    name: str
    """Relative to the folder that is scanned; of shards, that of their index or of the first."""
    paths: tuple[Path, ...]
    """One file, or the shards."""
    step: int | None
    """The step that its name tells."""
    problem: str | None = None
    """Why it cannot be read."""

    @property
    def folder(self) -> Path:
        return self.paths[0].parent

    @property
    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Changes where the files do; empty where they are gone."""
        try:
            return tuple((stat.st_mtime_ns, stat.st_size) for stat in (path.stat() for path in self.paths))
        except OSError:
            return ()


def step_pattern(text: str | None) -> re.Pattern[str] | None:
    """Raises InvalidArgument for what is no regular expression with a group."""
    if text is None:
        return None
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise InvalidArgument(f"--step-pattern is a regular expression, got {text!r}: {error}") from error
    if pattern.groups != 1:
        raise InvalidArgument(rf"--step-pattern has one group, that of the step, as in 'model_(\d+)\.pt'; got {text!r}")
    return pattern


def find_candidates(folder: Path, pattern: re.Pattern[str] | None = None) -> list[Candidate]:
    """All of the folder and of those in it, by step and name. Raises MissingData where there is no such folder."""
    if not folder.is_dir():
        why = "is a file: give the folder that it lies in" if folder.exists() else "is not there"
        raise MissingData(f"expected a folder of checkpoints, but {folder} {why}")
    closed: list[OSError] = []
    found = [candidate for place in _folders(folder, closed.append) for candidate in _in_folder(folder, place, pattern)]
    for error in closed:
        if isinstance(error, PermissionError):  # others: a trainer has just deleted the folder
            place = Path(error.filename)
            found.append(
                Candidate(str(place.relative_to(folder)), (place,), None, f"it cannot be read: {error.strerror}")
            )
    return sorted(found, key=lambda candidate: (candidate.step is None, candidate.step or 0, candidate.name))


def _folders(root: Path, on_error: Callable[[OSError], object]) -> Iterator[Path]:
    for place, folders, _ in os.walk(root, onerror=on_error):
        depth = len(Path(place).relative_to(root).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and depth < MAX_DEPTH)
        yield Path(place)


def _in_folder(root: Path, place: Path, pattern: re.Pattern[str] | None) -> Iterator[Candidate]:
    def candidate(name: str, paths: Sequence[Path], problem: str | None = None) -> Candidate:
        relative = (place / name).relative_to(root)
        return Candidate(str(relative), tuple(paths), _step_of(relative, pattern), problem)

    try:
        names = sorted(path.name for path in place.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError:  # a trainer has just deleted the folder
        return
    files = [name for name in names if Path(name).suffix in SUFFIXES and not BESIDE.match(name)]
    found: list[Candidate] = []
    known: set[str] = set()
    whole = next((form for name in WHOLE_MODEL for form in (f"{name}.index.json", name) if form in names), None)
    if whole is not None:
        shards = _shards_of(place / whole) if whole.endswith(".json") else [whole]
        problem = None if shards else "it names no shards in its folder"
        if missing := [name for name in shards if name not in names]:
            problem = f"the shard {missing[0]} is not there, is it half-written?"
        found.append(candidate(whole, [place / name for name in ([whole] if problem else shards)], problem))
        known.update((whole, *shards))
    for name in files:
        if name in known:
            continue
        own, problem = [name], None
        if shard := SHARD.match(Path(name).stem):
            own = [n for n in files if (s := SHARD.match(Path(n).stem)) and s["stem"] == shard["stem"]]
            if len(own) != int(shard["total"]):
                problem = f"{len(own)} of its {int(shard['total'])} shards are there"
        found.append(candidate(name, [place / n for n in own], problem))
        known.update(own)
    if whole is not None and all(one.step in (None, found[0].step) for one in found):
        why = f"it is passed over: {whole} beside it is the whole model"
        found[1:] = [replace(one, problem=why) for one in found[1:]]
    yield from found
    if any(name.endswith(".distcp") for name in names):
        told = (
            "a distributed checkpoint; make one file of it: "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {place.name} model.pt"
        )
        yield Candidate(str(place.relative_to(root)), (place,), None, told)


def _shards_of(index: Path) -> list[str]:
    """The files that the index names, all of them in its own folder."""
    weight_map = read_json(index).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    is_sound = all(isinstance(name, str) and Path(name).name == name for name in names)
    return sorted(names) if is_sound else []


def _step_of(relative: Path, pattern: re.Pattern[str] | None) -> int | None:
    if pattern is not None:
        found = pattern.search(str(relative))
        return _number(found[1]) if found else None
    stem = relative.name
    for suffix in (".index.json", *SUFFIXES):
        stem = stem.removesuffix(suffix)
    if shard := SHARD.match(stem):
        stem = shard["stem"]
    parts = (stem, *reversed(relative.parent.parts))
    for part in parts:
        if steps := STEP.findall(part):
            return _number(steps[-1])
    for part in parts:
        if number := LAST_NUMBER.search(NO_STEP.sub("", part)):
            return _number(number[1])
    return None


def _number(text: str | None) -> int | None:
    number = int(text) if text and text.isdecimal() and len(text) < 20 else None
    return number if number is not None and number <= MAX_STEP else None
