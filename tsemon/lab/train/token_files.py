"""Text files as tokens in files beside them, which are mapped into memory: a text may be larger than that.

They are made once for each text and tokenizer, in `.tsemon-tokens`, and are found again by the names, sizes and times of the
text's files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument
from tsemon.lab.train import tokenizers
from tsemon.lab.train.documents import Piece, Split, find_files, read_pieces
from tsemon.lab.train.tokenizers import Bytes, Tokenizer

FOLDER = ".tsemon-tokens"
GROUP = 64
"""Pieces that are encoded at once."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Tokens (N,) to train on and to validate with, whole numbers of 1, 2 or 4 bytes below `vocab`."""

    train: Tensor
    validation: Tensor
    vocab: int
    bytes_per_token: float | None
    """Of the text as UTF-8, separators not counted; what turns a loss into bits per byte.

    None where the tokens do not give the text back: what is lost costs no bits.
    """


@dataclass(frozen=True, kw_only=True)
class About:
    """What is kept beside the tokens."""

    vocab: int
    item_bytes: int
    num_tokens: tuple[int, ...]
    """Of the parts of a Split."""
    bytes_per_token: float | None


def read_text(
    path: Path,
    *,
    tokenizer: str = "bytes",
    vocab: int = 8192,
    separator: str | None = None,
    validation_ratio: float = 0.05,
    cache: Path | None = None,
) -> Text:
    """The text files at `path` as tokens, from the cache where they have been read before.

    tokenizer: "bytes", "bpe" or "words", learned from the text with up to `vocab` tokens, or the path of a tokenizer.json.
    separator: the token of that file which ends a document, where it is none of the usual names.
    validation_ratio: the share at the end of the text that is for validation, where the data have no files for it.
    cache: folder for the tokens, by default one beside the text.
    """
    split = find_files(path)
    folder = _made(split, tokenizer, vocab, separator, cache or (path if path.is_dir() else path.parent) / FOLDER)
    about = _read_about(folder)
    if about is None:
        raise InvalidArgument(f"the tokens in {folder} are damaged and cannot be replaced; remove that folder")
    train, validation = (_mapped(folder / f"{part}.bin", about.item_bytes) for part in Split._fields)
    if not split.validation:
        train, validation = split_text(train, validation_ratio)
    return Text(train=train, validation=validation, vocab=about.vocab, bytes_per_token=about.bytes_per_token)


def split_text(tokens: Tensor, validation_ratio: float) -> tuple[Tensor, Tensor]:
    """The beginning to train on, the end to validate with."""
    if not 0 <= validation_ratio < 1:
        raise InvalidArgument(f"validation_ratio is a share from 0 to less than 1, got {validation_ratio}")
    num_train = len(tokens) - int(len(tokens) * validation_ratio)
    return tokens[:num_train], tokens[num_train:]


def _made(split: Split, tokenizer: str, vocab: int, separator: str | None, cache: Path) -> Path:
    """The folder that has the tokens, made now unless it is there and whole. It appears whole or not at all."""
    known: Tokenizer | None = None
    if tokenizer == "bytes":
        known = Bytes()
    elif tokenizer not in ("bpe", "words"):
        known = tokenizers.load(Path(tokenizer), separator)
    name = known.key if known else f"{tokenizer} {vocab}"
    folder = cache / _fingerprint(split, name)
    if _read_about(folder) is None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(prefix="part-", dir=cache))
        except OSError as error:
            raise InvalidArgument(
                f"the tokens cannot be kept in {cache} ({error}); choose another folder: cache="
            ) from error
        try:
            _write(part, split, known or _learned(split, tokenizer, vocab))
            if _read_about(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # another process was faster
                os.rename(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _read_about(folder: Path) -> About | None:
    """None where there are no tokens, or not those that were written."""
    try:
        about = About(**json.loads((folder / "about.json").read_text()))
        sizes = [(folder / f"{part}.bin").stat().st_size for part in Split._fields]
        return about if sizes == [number * about.item_bytes for number in about.num_tokens] else None
    except (OSError, ValueError, TypeError):
        return None


def _learned(split: Split, kind: str, vocab: int) -> Tokenizer:
    texts = (piece.text for piece in read_pieces(split.train))
    return (tokenizers.train_bpe if kind == "bpe" else tokenizers.train_words)(texts, vocab)


def _fingerprint(split: Split, tokenizer: str) -> str:
    files = [[(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in part] for part in split]
    return hashlib.sha256(json.dumps([tokenizer, files]).encode()).hexdigest()[:16]


def _write(folder: Path, split: Split, tokenizer: Tokenizer) -> None:
    code = "B" if tokenizer.vocab <= 1 << 8 else "H" if tokenizer.vocab <= 1 << 16 else "I"
    sizes = [
        _encode(read_pieces(files), tokenizer, folder / f"{part}.bin", code)
        for part, files in zip(Split._fields, split, strict=True)
    ]
    # Bits per byte are told of the validation files where there are some.
    num_tokens, num_bytes = sizes[1] if split.validation else sizes[0]
    about = About(
        vocab=tokenizer.vocab,
        item_bytes=array(code).itemsize,
        num_tokens=tuple(number for number, _ in sizes),
        bytes_per_token=num_bytes / max(num_tokens, 1) if tokenizer.is_lossless else None,
    )
    tokenizer.save(folder / "tokenizer.json")
    (folder / "about.json").write_text(json.dumps(asdict(about)))


def _encode(pieces: Iterable[Piece], tokenizer: Tokenizer, path: Path, code: str) -> tuple[int, int]:
    """Writes the tokens of all documents, each with the separator behind it; returns how many, and the bytes of the text."""
    num_tokens = num_bytes = 0
    with path.open("wb") as file:
        for group in tokenizers.in_groups(pieces, GROUP):
            for piece, tokens in zip(group, tokenizer.encode([piece.text for piece in group]), strict=True):
                row = array(code, tokens)
                if piece.ends_document and tokenizer.separator is not None:
                    row.append(tokenizer.separator)
                row.tofile(file)
                num_tokens += len(row)
                num_bytes += len(piece.text.encode())
    return num_tokens, num_bytes


def _mapped(path: Path, item_bytes: int) -> Tensor:
    dtype = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[item_bytes]
    size = path.stat().st_size // item_bytes
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype) if size else torch.empty(0, dtype=dtype)
