"""States of a training in a folder of their own. A file appears whole or not at all, and the newest few are kept."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from tsemon.errors import InvalidArgument, MissingData

NAME = re.compile(r"step-(\d+)\.pt")


class Checkpoints:
    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise InvalidArgument(f"at least 1 checkpoint is kept, got {keep}")
        self.folder = folder
        self._keep = keep

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Writes the file, then deletes the oldest ones that are too many."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{step:08}.pt"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # otherwise the name may outlive the content when the machine stops
        part.replace(path)
        for old in self.paths()[: -self._keep]:
            old.unlink()
        return path

    def paths(self) -> list[Path]:
        """In the order of steps."""
        found = [path for path in self.folder.glob("step-*.pt") if NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")))

    def load_newest(self) -> dict[str, Any]:
        """Tensors and plain values alone: nothing that a file asks for is run. Raises MissingData where there is none."""
        paths = self.paths()
        if not paths:
            raise MissingData(f"no checkpoint in {self.folder}; start the run without --resume")
        try:
            state: dict[str, Any] = torch.load(paths[-1], map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file fails in the reader's many ways
            raise InvalidArgument(f"{paths[-1]} cannot be read as a checkpoint: {error}") from error
        return state


def newest_run(root: Path, recipe: str) -> str:
    """Of the runs that have their name from the recipe and the time, the one that was saved last."""
    named = re.compile(rf"{re.escape(recipe)}-\d{{8}}-\d{{6}}")
    names = [path.name for path in root.glob("*") if named.fullmatch(path.name) and Checkpoints(path).paths()]
    if not names:
        raise MissingData(
            f"{root} holds no run of {recipe} with a checkpoint; start one without --resume, or name it: --run"
        )
    return max(names, key=lambda name: Checkpoints(root / name).paths()[-1].stat().st_mtime_ns)
