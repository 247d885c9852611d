"""Text files, read piece by piece.

Read are `.txt`, `.md` and `.py`, WikiText's `wiki.*.tokens`, and SlimPajama's `.jsonl` and `.jsonl.zst`. A document is a
file, an article of WikiText, or a line of jsonl.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from tsemon.errors import InvalidArgument, MissingData, needing

SUFFIXES = (".txt", ".md", ".py", ".tokens", ".jsonl", ".jsonl.zst")
PIECE_CHARACTERS = 1 << 20
COMPRESSED_BYTES = 1 << 17
"""Read at once."""
WIKITEXT = ("wiki.train.tokens", "wiki.valid.tokens")
HEADING = re.compile(r" = [^=](.*[^=])? = \n?$")
"""WikiText's heading of the first level; sections have ` = = two = = ` and more."""


class Piece(NamedTuple):
    """Some text, cut at a line's end, so that a tokenizer never has a large file in its hands."""

    text: str
    ends_document: bool


class Split(NamedTuple):
    """Files to train on and, where the data come with them, files to validate with."""

    train: tuple[Path, ...]
    validation: tuple[Path, ...]


def find_files(path: Path) -> Split:
    """The text files at `path`, a file or a folder, in the order of their paths.

    WikiText's own validation file and the folders `train` and `validation` of SlimPajama are told apart.
    Raises MissingData where there is none.
    """
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise MissingData(f"{path} is none of the text files that are read: {', '.join(SUFFIXES)}")
        return Split((path,), ())
    if all((path / name).is_file() for name in WIKITEXT):
        return Split((path / WIKITEXT[0],), (path / WIKITEXT[1],))
    if (path / "train").is_dir() and (path / "validation").is_dir():
        return Split(_below(path / "train"), _below(path / "validation"))
    return Split(_below(path), ())


def read_pieces(files: tuple[Path, ...]) -> Iterator[Piece]:
    """The documents of all files, one after another."""
    for path in files:
        if path.name.endswith((".jsonl", ".jsonl.zst")):
            yield from (Piece(text, True) for text in _json_lines(path))
        elif path.name.endswith(".tokens"):
            yield from _articles(path)
        else:
            yield from _whole(path)


def _below(folder: Path) -> tuple[Path, ...]:
    if not folder.is_dir():
        raise MissingData(f"{folder} is not there; expected a text file or a folder of them ({', '.join(SUFFIXES)})")
    # Hidden folders hold what tools keep, tsemon's own token files too.
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.name.endswith(SUFFIXES) and path.is_file())
    found = tuple(folder / name for name in sorted(names) if not any(part.startswith(".") for part in name.parts))
    if not found:
        raise MissingData(f"{folder} holds no text: expected files of the kinds {', '.join(SUFFIXES)}")
    return found


def _open(path: Path) -> IO[str]:
    return path.open(encoding="utf-8", errors="replace", newline="")


def _whole(path: Path) -> Iterator[Piece]:
    with _open(path) as file:
        texts = ("".join(lines) for lines in iter(lambda: file.readlines(PIECE_CHARACTERS), []))
        yield from _with_end(texts)


def _with_end(texts: Iterator[str]) -> Iterator[Piece]:
    """The pieces of one document: the last one ends it."""
    before = next(texts, None)
    for text in texts:
        assert before is not None
        yield Piece(before, False)
        before = text
    if before is not None:
        yield Piece(before, True)


def _articles(path: Path) -> Iterator[Piece]:
    """Each begins with its heading, which follows a blank line; what comes before the first belongs to it."""
    article: list[str] = []
    has_text = False
    with _open(path) as file:
        for line in file:
            if has_text and HEADING.match(line) and not article[-1].strip():
                yield Piece("".join(article), True)
                article, has_text = [], False
            article.append(line)
            has_text = has_text or bool(line.strip())
    if article:
        yield Piece("".join(article), True)


def _json_lines(path: Path) -> Iterator[str]:
    with path.open("rb") as raw:
        for number, line in enumerate(_lines(raw, path), start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidArgument(f'{path}, line {number}: expected a JSON object with a "text"') from error
            if not isinstance(text, str):
                raise InvalidArgument(f'{path}, line {number}: "text" is a string, got {type(text).__name__}')
            yield text


def _lines(raw: IO[bytes], path: Path) -> Iterator[bytes]:
    if not path.name.endswith(".zst"):
        return iter(raw)
    with needing(f"{path.name} needs zstandard; pip install 'tsemon[train]'"):
        import zstandard
    return _decompressed(raw, path, zstandard)


def _decompressed(raw: IO[bytes], path: Path, zstandard: Any) -> Iterator[bytes]:
    """The lines of a file of frames one after another, as parallel compressors write them."""
    frame, line = zstandard.ZstdDecompressor().decompressobj(), b""
    for part in iter(lambda: raw.read(COMPRESSED_BYTES), b""):
        while part:
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                *lines, line = (line + frame.decompress(part)).split(b"\n")
            except zstandard.ZstdError as error:
                raise InvalidArgument(f"{path} is damaged, or no zst file ({error}); fetch it again") from error
            yield from lines
            part = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise InvalidArgument(f"{path} is cut off: expected a whole zst file; fetch it again")
    yield line
