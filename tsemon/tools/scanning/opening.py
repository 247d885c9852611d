"""Opens checkpoints tensor by tensor. Nothing that a file asks for is run: only tensors and plain values are read."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pickle
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tsemon.errors import reason
from tsemon.tools.scanning.grouping import Entry
from tsemon.tools.scanning.memory import free_bytes

STATE_KEYS = ("state_dict", "model_state_dict", "model", "module", "net", "weights", "params")
"""Where trainers keep a model's parameters in what they save."""
STEP_KEYS = ("step", "global_step", "steps", "iteration", "iter", "num_updates")
"""Where they keep the number of steps done."""
YOUNG_S = 60.0
"""For so long after it was written a file may be written anew."""
MAX_DEPTH = 8
"""Of dicts in dicts, in which tensors are looked for."""


class NotACheckpoint(Exception):
    """A file that is left out; the text says why, in a sentence."""


class Weights(Protocol):
    """An open checkpoint."""

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    @property
    def extra(self) -> Mapping[str, Any]:
        """What the file holds besides, as plain values."""
        ...

    @property
    def is_overwritten(self) -> bool:
        """Whether what is mapped into memory is not any more what was opened."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One tensor, as it was saved."""
        ...

    def close(self) -> None: ...


def open_weights(paths: list[Path]) -> Weights:
    """One checkpoint in one file or in several shards. Raises NotACheckpoint for what is none, or cannot be read."""
    if len(paths) == 1:
        return _open_file(paths[0])
    return _Shards(paths)


def step_in(extra: Mapping[str, Any]) -> int | None:
    """The step that the checkpoint itself tells."""
    for key in STEP_KEYS:
        value = extra.get(key)
        if isinstance(value, str) and value.isdecimal():  # of safetensors, all is text
            value = int(value)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def _open_file(path: Path) -> Weights:
    try:
        if path.suffix == ".safetensors":
            return _Safetensors(path)
        return _Pickled(path)
    except NotACheckpoint:
        raise
    except FileNotFoundError as error:
        raise NotACheckpoint(f"{path.name} is not there") from error
    except Exception as error:  # a damaged file fails in the reader's many ways
        kind, why = type(error).__name__, reason(error)
        raise NotACheckpoint(
            f"it cannot be read, is it half-written? The reader of {path.suffix} files ends with "
            f"{why if why == kind else f'{kind}: {why}'}"
        ) from error


class _Mapped:
    """A file that is mapped into memory, and that a trainer may write over in its place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = _stamp(path)

    @property
    def is_overwritten(self) -> bool:
        try:
            return _stamp(self._path)[0] == self._stamp[0] and _stamp(self._path) != self._stamp
        except OSError:  # what is deleted or replaced stays as it was to whoever has it open
            return False


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


class _Pickled:
    """What torch.save wrote, mapped into memory: a tensor takes memory once it is looked at."""

    def __init__(self, path: Path) -> None:
        self._mapped = None if _is_in_the_making(path) else _Mapped(path)
        saved = _load(path, is_mapped=self._mapped is not None)
        if not isinstance(saved, Mapping):
            raise NotACheckpoint(f"it holds one {type(saved).__name__}, expected a dict of tensors")
        self._tensors, self.extra = _parameters(saved)
        if not self._tensors:
            raise NotACheckpoint(
                f"it holds no parameters of a model, only {', '.join(map(str, list(saved)[:5])) or 'nothing'}"
            )
        self.entries = dict(_entries(self._tensors))

    @property
    def is_overwritten(self) -> bool:
        return self._mapped is not None and self._mapped.is_overwritten

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors = {}
        self.extra = {}


def _is_in_the_making(path: Path) -> bool:
    """Whether a trainer may be about to write over it, and it is small enough to be read as a whole.

    To read a mapped page that is cut off meanwhile ends the process (SIGBUS).
    """
    stat = path.stat()
    return time.time() - stat.st_mtime < YOUNG_S and stat.st_size < free_bytes() / 8


def _load(path: Path, *, is_mapped: bool) -> Any:
    # Files of before 2020 are no zip, and cannot be mapped.
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip and is_mapped)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL ([\w.]+)|safe_globals\(\[([\w.]+)", str(error)):
            raise NotACheckpoint(
                f"it holds more than tensors and plain values ({found[1] or found[2]}), which could run code when it is "
                "loaded, so it was not opened; save the parameters alone: torch.save(model.state_dict(), ...)"
            ) from error
        raise


def _parameters(saved: Mapping[Any, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of the model by dotted name, and what was saved beside them."""
    for key in STATE_KEYS:
        inner = saved.get(key)
        if isinstance(inner, Mapping) and (tensors := dict(_flat(inner))):
            return tensors, {str(k): v for k, v in saved.items() if k != key}
    return dict(_flat({k: v for k, v in saved.items() if k not in ("optimizer", "optimizer_state_dict")})), {
        str(k): v for k, v in saved.items() if not isinstance(v, Tensor | Mapping) or k in STEP_KEYS
    }


def _flat(tree: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """All tensors but those of optimizers."""
    if {"state", "param_groups"} <= tree.keys():
        return
    for key, value in tree.items():
        if isinstance(value, Tensor) and not value.is_sparse and not value.is_quantized:
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping) and depth < MAX_DEPTH:
            yield from _flat(value, f"{prefix}{key}.", depth + 1)


def _entries(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Entry]]:
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        known = first.setdefault(place, name) if tensor.numel() else name
        yield name, Entry(tuple(tensor.shape), tensor.is_floating_point(), None if known == name else known)


class _Safetensors(_Mapped):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if importlib.util.find_spec("safetensors") is None:
            raise NotACheckpoint("reading it needs the package safetensors: pip install 'tsemon[scan]'")
        from safetensors import safe_open

        self._stack = ExitStack()
        self._file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118  # it is no dict
        if not slices:
            raise NotACheckpoint("it holds no tensors")
        self.entries = {
            name: Entry(tuple(found.get_shape()), found.get_dtype().startswith(("F", "BF")))
            for name, found in slices.items()
        }
        self.extra: Mapping[str, Any] = dict(self._file.metadata() or {})

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def close(self) -> None:
        self._stack.close()


class _Shards:
    """Several files that hold one model's parameters together."""

    def __init__(self, paths: list[Path]) -> None:
        self._of: dict[str, Weights] = {}
        entries: dict[str, Entry] = {}
        extra: dict[str, Any] = {}
        with ExitStack() as stack:
            for path in paths:
                try:
                    shard = _open_file(path)
                except NotACheckpoint as error:
                    raise NotACheckpoint(f"{path.name}: {error}") from error
                stack.callback(shard.close)
                entries |= shard.entries
                extra |= shard.extra
                self._of |= dict.fromkeys(shard.entries, shard)
            self.entries, self.extra = entries, extra
            self._stack = stack.pop_all()

    @property
    def is_overwritten(self) -> bool:
        return any(shard.is_overwritten for shard in self._of.values())

    def tensor(self, name: str) -> Tensor:
        return self._of[name].tensor(name)

    def close(self) -> None:
        self._of = {}
        self._stack.close()


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file beside a checkpoint holds; nothing where it is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_bytes())
        return value if isinstance(value, dict) else {}
    return {}
