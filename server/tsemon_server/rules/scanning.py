"""The text of a line before it is parsed: its limits, its quotes and parentheses, and `for` at its end.

What passes here is short, shallow and plain, so that Python's parser has no trouble with it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from tsemon_server.rules.parts import UNSEEN, Mistake, Part

MAX_CHARACTERS = 4_000
MAX_PARENTHESES = 40
"""Number of parentheses that may be open at once."""
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
_HELD = re.compile(r"([0-9]{1,12})\s+(sample|step)s?")
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
"""What people paste, and how it is written here."""
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


class Wrong(Exception):
    """A place in the text of a line, from 0, and what is wrong there."""

    def __init__(self, place: int, text: str, example: str = "") -> None:
        super().__init__(text)
        self.place = place
        self.example = example

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


@dataclass(frozen=True)
class Scanned:
    """A line that may be parsed."""

    expression: str
    """The text before `for`, in one line and as long as it was, so that places stay what they are."""
    hold: Mapping[str, int] | None
    """The samples and steps after `for`; None if there is no `for`."""
    hold_place: int


def scan(text: str, *, may_hold: bool) -> Scanned:
    """Check the text, and cut off `for ...` at its end. Raises Wrong."""
    if len(text) > MAX_CHARACTERS:
        raise Wrong(MAX_CHARACTERS, f"expected at most {MAX_CHARACTERS:,} characters, got {len(text):,}")
    if not text.strip():
        raise Wrong(0, "expected an expression, got nothing", "loss > 10")
    for place, sign in enumerate(text):
        if unicodedata.category(sign) in UNSEEN and sign not in "\n\t":
            raise Wrong(place, f"expected visible characters, got the character U+{ord(sign):04X}")
    end = _end_of_expression(text)
    hold = None
    if end is not None:
        if not may_hold:
            raise Wrong(end, "`for` is not possible here; only `when` and `clear` have it")
        hold = _hold(text, end)
    return Scanned(re.sub(r"\s", " ", text[:end]), hold, len(text) if end is None else end)


def _end_of_expression(text: str) -> int | None:
    """The place of `for`, if there is one outside of quotes and parentheses."""
    opened: list[int] = []
    for token in _TOKEN.finditer(text):
        place, found = token.start(), token[0]
        if token.lastgroup == "number" and not _NUMBER.fullmatch(found):
            raise Wrong(place, f"expected a number such as 5, 0.5 or 5e-4, got {found[:20]!r}")
        if token.lastgroup == "word" and found == "for" and not opened:
            return place
        if token.lastgroup == "sign":
            _check(text, place, opened)
    if opened:
        raise Wrong(opened[-1], "this parenthesis is never closed")
    return None


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


def _hold(text: str, start: int) -> Mapping[str, int]:
    example = "loss > 10 for 4 samples, 20 steps"
    hold: dict[str, int] = {}
    place = start + len("for")
    for told in re.split(r"(,|\band\b)", text[place:]):
        if told not in (",", "and"):
            at = place + len(told) - len(told.lstrip())
            held = _HELD.fullmatch(told.strip())
            if not held:
                raise Wrong(
                    at, f"expected a number of samples or steps after `for`, got {told.strip()[:40]!r}", example
                )
            unit = f"{held[2]}s"
            if unit in hold:
                raise Wrong(at, f"`for` has two numbers of {unit}; expected one", example)
            try:
                hold[unit] = Part(int(held[1])).whole(
                    *((1, MAX_SAMPLES_HELD) if unit == "samples" else (0, MAX_STEPS_HELD))
                )
            except Mistake as mistake:
                raise Wrong(at, f"{mistake} {unit}", example) from None
        place += len(told)
    return hold
