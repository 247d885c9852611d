"""The text of a line before it is parsed: its limits, its quotes and parentheses, and `for` and `after` at its end.

A text that passes is short, shallow and plain, so that Python's parser has no trouble with it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tsemon_server.rules.parts import UNSEEN, Mistake, Part

MAX_CHARACTERS = 4_000
MAX_PARENTHESES = 40
"""Maximum number of open parentheses."""
MAX_SAMPLES_HELD = 10_000
MAX_STEPS_HELD = 10**9

_SHOWN = 50
"""Number of characters before and after the place of an error."""
_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\["'\\nt]|\\u[0-9a-fA-F]{4})*"|'(?:[^'\\]|\\["'\\nt]|\\u[0-9a-fA-F]{4})*')"""
    r"""|(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>[0-9][A-Za-z0-9_.]*)|(?P<space>[ \n\t]+)|(?P<sign>.)""",
    re.DOTALL,
)
_NUMBER = re.compile(r"[0-9][0-9_]*(\.[0-9_]*)?([eE][0-9]*)?")
_LASTING = re.compile(r"([0-9]+)\s+(sample|step)s?")
CLAUSES = "for", "after"
_CLAUSE = re.compile(r"\b(for|after)\b")
_WHERE = {"for": "only `when` and `clear` have it", "after": "only `when` has it"}
_EXAMPLE = "any(grad_norm > 10) for 4 samples, 20 steps after 1000 steps"
_PLAIN = {
    "≤": "<=",
    "≥": ">=",
    "×": "*",
    "·": "*",
    "÷": "/",
    "−": "-",
    "–": "-",
    "“": '"',
    "”": '"',
    "‘": "'",
    "’": "'",
}
"""Characters that people paste, and the ASCII for each."""
_UNSUPPORTED = {
    "%": "write 20% as 0.2",
    "&": "write and",
    "|": "write or",
    "~": "write not",
    "^": "write x * x",
    "[": "write layer(x, 3) for one layer, slice(x, 1) for some",
    "{": "write conditions with and, or, not",
    "@": "write *",
    "#": "a comment has no place in a line",
    ";": "write and",
}


_WORDS = {
    **dict.fromkeys(("above", "over", "exceeds", "greater", "larger"), ">"),
    **dict.fromkeys(("below", "under", "less", "smaller"), "<"),
    **{word: word for word in ("and", "or", "not", *CLAUSES)},
}
"""Words that people write in lower or upper case, and the word of the language for each."""


class Wrong(Exception):
    """A mistake at a place in the text of a line, counted from 0."""

    def __init__(self, place: int, text: str, example: str = "", *, end: int | None = None, nearest: str = "") -> None:
        super().__init__(text)
        self.place = place
        self.example = example
        self.nearest = nearest
        """The known name that is most like the unknown one, if one is."""
        self._end = end

    def length_in(self, line: str) -> int:
        """Number of characters that are wrong: by default the word, number, text or sign at the place; 0 at the end."""
        token = _TOKEN.match(line, min(self.place, len(line)))
        end = self._end if self._end is not None else token.end() if token else self.place
        return max(0, min(end, len(line)) - self.place)

    def shown_in(self, line: str) -> str:
        """The error with its column, the text with a mark below the place, and an example."""
        plain = "".join(" " if sign.isspace() or unicodedata.category(sign) in UNSEEN else sign for sign in line)
        place = max(0, min(self.place, len(plain)))
        start, end = max(0, place - _SHOWN), place + _SHOWN
        before, after = "..." if start else "", "..." if end < len(plain) else ""
        shown = f"{before}{plain[start:end]}{after}"
        mark = " " * (len(before) + place - start) + "^"
        example = f"\n    for example: {self.example}" if self.example else ""
        return f"column {place + 1}: {self}\n    {shown.rstrip()}\n    {mark}{example}"


def guessed(text: str) -> Wrong | None:
    """The first word that the language writes in another way, in a text that is no expression."""
    for token in _TOKEN.finditer(text):
        meant = _WORDS.get(token[0].lower()) if token.lastgroup == "word" else None
        if meant is not None and meant != token[0]:
            return Wrong(
                token.start(), f"`{token[0]}` is not understood; write `{meant}`", end=token.end(), nearest=meant
            )
    return None


@dataclass(frozen=True)
class Scanned:
    """A line that may be parsed."""

    expression: str
    """The text before `for` and `after`. Other white space is a space, so that no place moves."""
    clauses: Mapping[str, Mapping[str, int]]
    """The samples and steps after `for` and `after`, if the line ends in them."""


def scan(text: str, allowed: Collection[str] = ()) -> Scanned:
    """Check the text, and cut off the clauses at its end; only those in `allowed` may be there. Raises Wrong."""
    if len(text) > MAX_CHARACTERS:
        raise Wrong(MAX_CHARACTERS, f"expected at most {MAX_CHARACTERS:,} characters, got {len(text):,}")
    if not text.strip():
        raise Wrong(0, "expected an expression, got nothing", "loss > 10")
    for place, sign in enumerate(text):
        if unicodedata.category(sign) in UNSEEN and sign not in "\n\t":
            raise Wrong(place, f"expected visible characters, got the character U+{ord(sign):04X}")
    end = _end_of_expression(text)
    return Scanned(re.sub(r"\s", " ", text[:end]), dict(_clauses(text, end, allowed)))


def _end_of_expression(text: str) -> int:
    """The place of the first clause outside of quotes, or the end of the text."""
    opened: list[int] = []
    for token in _TOKEN.finditer(text):
        place, found = token.start(), token[0]
        if token.lastgroup == "number" and not _NUMBER.fullmatch(found):
            raise Wrong(place, f"expected a number such as 5, 0.5 or 5e-4, got {found[:20]!r}")
        if token.lastgroup == "word" and found in CLAUSES:
            if opened:
                raise Wrong(place, f"`{found}` must stand at the end, after all parentheses", _EXAMPLE)
            return place
        if token.lastgroup == "sign":
            _check(text, place, opened)
    if opened:
        raise Wrong(opened[-1], "this parenthesis is never closed")
    return len(text)


def _check(text: str, place: int, opened: list[int]) -> None:
    sign = text[place]
    if sign == "(":
        opened.append(place)
        if len(opened) > MAX_PARENTHESES:
            raise Wrong(place, f"expected at most {MAX_PARENTHESES} parentheses inside one another, got more")
    elif sign == ")":
        if not opened:
            raise Wrong(place, "this parenthesis was never opened")
        opened.pop()
    elif sign in "\"'":
        raise Wrong(
            place, "this text has no closing quote, or a backslash that is not allowed", 'scalar("val/loss") > 3'
        )
    elif sign in _PLAIN:
        raise Wrong(place, f"{sign!r} is not understood; write {_PLAIN[sign]} instead")
    elif not sign.isascii():
        name = unicodedata.name(sign, "unnamed character")
        raise Wrong(place, f"{sign!r} is not an ASCII character ({name}); names of other characters stand in quotes")
    elif sign in _UNSUPPORTED:
        raise Wrong(place, f"`{sign}` is not supported; {_UNSUPPORTED[sign]}")
    elif sign in "\\`$?":
        raise Wrong(place, f"{sign!r} is not part of the language of rules")


def _clauses(text: str, start: int, allowed: Collection[str]) -> Iterator[tuple[str, Mapping[str, int]]]:
    seen: set[str] = set()
    found = [*_CLAUSE.finditer(text, start)]
    ends = [*(one.start() for one in found), len(text)][1:]
    for clause, end in zip(found, ends, strict=True):
        word = clause[0]
        if word not in allowed:
            raise Wrong(clause.start(), f"`{word}` is not possible here; {_WHERE[word]}")
        if word in seen:
            raise Wrong(clause.start(), f"a second `{word}`; expected one", _EXAMPLE)
        seen.add(word)
        yield word, _lasting(text, clause.end(), end, word)


def _lasting(text: str, start: int, end: int, word: str) -> Mapping[str, int]:
    """The samples and steps that stand between the two places."""
    numbers: dict[str, int] = {}
    place = start
    for told in re.split(r"(,|\band\b)", text[start:end]):
        at = place + len(told) - len(told.lstrip())
        place += len(told)
        if told in (",", "and"):
            continue
        lasting = _LASTING.fullmatch(told.strip())
        if not lasting:
            said = f"expected a number of samples or steps after `{word}`, got {told.strip()[:40]!r}"
            raise Wrong(at, said, _EXAMPLE)
        unit = f"{lasting[2]}s"
        if unit in numbers:
            raise Wrong(at, f"`{word}` has two numbers of {unit}; expected one", _EXAMPLE)
        least, most = (int(word == "for"), MAX_SAMPLES_HELD) if unit == "samples" else (0, MAX_STEPS_HELD)
        try:
            numbers[unit] = Part(int(lasting[1])).whole(least, most)
        except Mistake as mistake:
            raise Wrong(at, f"{mistake} {unit}", _EXAMPLE) from None
    return numbers
