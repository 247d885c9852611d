"""Text as one long row of tokens, batches of it, and a text that needs no download.

Axes: `N` tokens of the text, `B` batch, `T` tokens of a sequence.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument, MissingPackage
from tsemon.lab.train.batches import Batch, Batches, generator


def standard_library_text(size_bytes: int = 2_000_000) -> Tensor:
    """The first `size_bytes` bytes of the Python standard library's sources, in the order of their paths: (N,) uint8.

    The text is that of the running Python, so figures compare only within one Python version.
    Raises MissingPackage where the interpreter has no standard library as source files.
    """
    if size_bytes < 1:
        raise InvalidArgument(f"size_bytes must be at least 1, got {size_bytes}")
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _sources(root):
        text += path.read_bytes()
        if len(text) >= size_bytes:
            break
    if not text:
        raise MissingPackage(f"no Python sources under {root}; use a Python that has its standard library as files")
    return torch.frombuffer(text[:size_bytes], dtype=torch.uint8)


def _sources(folder: Path) -> Iterator[Path]:
    """All .py files in the order of their paths, without walking through installed packages."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in ("site-packages", "dist-packages"):
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def text_batches(text: Tensor, context: int, batch_size: int, seed: int) -> Batches:
    """Endless (inputs, targets), both (B, T) int64: random windows, and the same windows one token later."""
    return _Windows(text, context, batch_size, seed)


def mixed_batches(
    texts: Sequence[Tensor], proportions: Sequence[float], context: int, batch_size: int, seed: int
) -> Batches:
    """As `text_batches`, each window from a text drawn with these proportions."""
    return _Mixture(texts, proportions, context, batch_size, seed)


def text_streams(text: Tensor, context: int, batch_size: int) -> Batches:
    """Endless (inputs, targets), both (B, T) int64, in reading order: each row goes on where it ended in the last batch.

    The text is cut into `batch_size` equal streams, one a row. What does not fill a batch at their end is left out, and
    each begins anew; a model with a memory then remembers the end of the text for one segment.
    """
    return _Streams(text, context, batch_size)


def text_in_order(text: Tensor, context: int, batch_size: int) -> Iterator[Batch]:
    """One pass for an evaluation: windows side by side, (B, T) int64 and a last batch with fewer rows."""
    _check(text, context, batch_size)
    starts = torch.arange(0, len(text) - context, context)
    for some in torch.split(starts, batch_size):
        yield _windows(text, some[:, None], context)


class _Windows(Batches):
    def __init__(self, text: Tensor, context: int, batch_size: int, seed: int) -> None:
        _check(text, context, batch_size)
        self._text, self._context, self._batch_size = text, context, batch_size
        self._generator = generator(seed)

    def __next__(self) -> Batch:
        num_starts = len(self._text) - self._context
        starts = torch.randint(num_starts, (self._batch_size, 1), generator=self._generator)
        return _windows(self._text, starts, self._context)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


class _Mixture(Batches):
    def __init__(
        self, texts: Sequence[Tensor], proportions: Sequence[float], context: int, batch_size: int, seed: int
    ) -> None:
        for text in texts:
            _check(text, context, batch_size)
        self._texts, self._context, self._batch_size = texts, context, batch_size
        self._proportions = torch.tensor(proportions, dtype=torch.float64)
        self._generator = generator(seed)

    def __next__(self) -> Batch:
        texts_B = self._proportions.multinomial(self._batch_size, replacement=True, generator=self._generator)
        rows = []
        for text in (self._texts[index] for index in texts_B.tolist()):
            starts = torch.randint(len(text) - self._context, (1, 1), generator=self._generator)
            rows.append(_windows(text, starts, self._context))
        inputs, targets = zip(*rows, strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


class _Streams(Batches):
    def __init__(self, text: Tensor, context: int, batch_size: int) -> None:
        _check(text, context, batch_size)
        self._num_segments = (len(text) - 1) // (batch_size * context)
        if self._num_segments < 1:
            raise InvalidArgument(
                f"{batch_size} streams of {context} tokens need {batch_size * context + 1} tokens, the text has {len(text)}"
            )
        self._text, self._context = text, context
        self._starts = torch.arange(batch_size)[:, None] * ((len(text) - 1) // batch_size)
        self._segment = 0

    def __next__(self) -> Batch:
        batch = _windows(self._text, self._starts + self._segment * self._context, self._context)
        self._segment = (self._segment + 1) % self._num_segments
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"segment": self._segment}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._segment = state["segment"]


def _windows(text: Tensor, starts_B1: Tensor, context: int) -> Batch:
    tokens = text[starts_B1 + torch.arange(context + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def _check(text: Tensor, context: int, batch_size: int) -> None:
    if batch_size < 1 or not 1 <= context < len(text):
        raise InvalidArgument(
            f"batch_size must be at least 1 and context from 1 to {len(text) - 1} for this text, "
            f"got batch_size {batch_size} and context {context}"
        )
