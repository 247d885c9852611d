"""What a model is run on: token ids of a file, a text, or random ones.

Axes: B sequences, T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument, MissingData, reason

NUM_SEQUENCES = 8
NUM_TOKENS = 64
"""The most of each that are run."""
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where tokens come from; random ones where neither is given."""

    text: Path | None = None
    """A text, for a model that has its tokenizer beside it or reads bytes."""
    tokens: Path | None = None
    """Token ids as JSON: a list, or a list of lists of one length."""

    def __post_init__(self) -> None:
        if self.text is not None and self.tokens is not None:
            raise InvalidArgument("expected --text or --tokens, got both")
        for path in (self.text, self.tokens):
            if path is not None and not path.is_file():
                raise MissingData(f"{path} is not there or is no file")


def token_ids(source: Source, encode: Callable[[str], list[int]] | None, vocab: int, length: int) -> tuple[Tensor, str]:
    """Tokens (B, T) below `vocab`, and in words where they are from. Raises InvalidArgument for what does not fit."""
    length = min(length, NUM_TOKENS)
    if source.text is not None:
        if encode is None:
            raise InvalidArgument("there is no tokenizer beside the checkpoints; give token ids (--tokens)")
        ids = encode(source.text.read_text(encoding="utf-8", errors="replace")[: 64 * NUM_SEQUENCES * NUM_TOKENS])
        ids_BT, words = _cut(ids, length, source.text), f"the text {source.text.name}"
    elif source.tokens is not None:
        ids_BT, words = _read(source.tokens, length), f"the token ids in {source.tokens.name}"
    else:
        generator = torch.Generator().manual_seed(SEED)
        return torch.randint(vocab, (NUM_SEQUENCES, length), generator=generator), f"random tokens (seed {SEED})"
    lowest, highest = int(ids_BT.min()), int(ids_BT.max())
    if lowest < 0 or highest >= vocab:
        raise InvalidArgument(f"token ids are from 0 to {vocab - 1}, got {lowest} to {highest}")
    return ids_BT, words


def random_images(channels: int, size: int) -> tuple[Tensor, str]:
    """(B, channels, size, size) of standard normal noise."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(NUM_SEQUENCES, channels, size, size, generator=generator), f"random images (seed {SEED})"


def _read(path: Path, length: int) -> Tensor:
    try:
        ids = torch.tensor(json.loads(path.read_bytes()), dtype=torch.int64)
    except (ValueError, TypeError, RuntimeError, RecursionError) as error:
        raise InvalidArgument(
            f"{path} holds a list of token ids as JSON, or lists of one length: {reason(error)}"
        ) from error
    return ids[:NUM_SEQUENCES, :length] if ids.ndim == 2 and ids.numel() else _cut(ids.flatten().tolist(), length, path)


def _cut(ids: list[int], length: int, path: Path) -> Tensor:
    """Sequences of full length one after the other; a short text is one short sequence."""
    if len(ids) < 2:
        raise InvalidArgument(f"{path} has {len(ids)} tokens, expected at least 2")
    length = min(length, len(ids))
    rows = min(NUM_SEQUENCES, len(ids) // length)
    return torch.tensor(ids[: rows * length]).reshape(rows, length)
