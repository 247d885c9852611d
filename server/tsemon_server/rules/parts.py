"""A piece of a rule's definition, and where in the whole it stands: what is wrong in it can be pointed at."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tsemon.catalogue import most_alike

UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn"}
"""Unicode categories: control, format, surrogate, private, unassigned."""
Path = tuple[str | int, ...]


class Mistake(Exception):
    """Something in a definition that is not as it must be."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(text)
        self.path = path


@dataclass(frozen=True)
class Part:
    """Plain data as YAML or JSON gives it, with the keys that lead to it."""

    data: Any
    path: Path = ()

    def wrong(self, expected: str) -> Mistake:
        return Mistake(self.path, f"expected {expected}, got {_shown(self.data)}")

    def __getitem__(self, key: str | int) -> Part:
        return Part(self.data[key], (*self.path, key))

    def __contains__(self, key: str) -> bool:
        return isinstance(self.data, Mapping) and key in self.data

    def has_keys(self, required: Sequence[str], optional: Sequence[str] = ()) -> Part:
        """This part, once it is sure that it is a mapping with all of `required` and none but those and `optional`."""
        if not isinstance(self.data, Mapping):
            raise self.wrong(f"a mapping with {', '.join(required) or 'any of ' + ', '.join(optional)}")
        for key in self.data:
            if key not in required and key not in optional:
                raise unknown_key(self.path, str(key), (*required, *optional))
        for key in required:
            if key not in self.data:
                raise Mistake(self.path, f"{key!r} is missing; expected {', '.join(required)}")
        return self

    def items(self, least: int = 1) -> Iterator[Part]:
        """The parts of a list."""
        if not isinstance(self.data, list) or len(self.data) < least:
            raise self.wrong(f"a list of at least {least}")
        return (self[place] for place in range(len(self.data)))

    def number(self) -> float:
        if isinstance(self.data, bool) or not isinstance(self.data, int | float):
            raise self.wrong("a number")
        if not math.isfinite(self.data):
            raise self.wrong("a finite number")
        return float(self.data)

    def share(self) -> float:
        value = self.number()
        if not 0 <= value <= 1:
            raise self.wrong("a number from 0 to 1")
        return value

    def whole(self, least: int, most: int) -> int:
        is_number = isinstance(self.data, int | float) and not isinstance(self.data, bool)
        if not is_number or self.data % 1 or not least <= self.data <= most:
            raise self.wrong(f"a whole number from {least} to {most}")
        return int(self.data)

    def text(self, most: int = 4000) -> str:
        if not isinstance(self.data, str) or not self.data.strip() or len(self.data) > most:
            raise self.wrong(f"text of at most {most} characters")
        if any(unicodedata.category(sign) in UNSEEN and sign not in "\n\t" for sign in self.data):
            raise self.wrong("text without control characters and the like, which no database takes or nobody sees")
        return self.data.strip()

    def one_of(self, options: Sequence[str]) -> str:
        if self.data not in options:
            raise self.wrong(f"one of {', '.join(options)}")
        return str(self.data)


def unknown_key(path: Path, key: str, known: Sequence[str]) -> Mistake:
    """A key that a mapping cannot have."""
    near = most_alike(key[:128], known)
    hint = f"did you mean {near}?" if near else f"expected {', '.join(known)}"
    return Mistake((*path, key), f"unknown key {key[:80]!r}; {hint}")


_WORDS = {None: "nothing", True: "true", False: "false"}
"""Values as YAML and JSON write them."""


def _shown(data: Any) -> str:
    if data is None or isinstance(data, bool):
        return _WORDS[data]
    text = repr(data)
    return text if len(text) <= 80 else text[:77] + "..."
