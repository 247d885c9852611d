"""YAML as plain data with the line of everything in it, so that an error can say where it is.

Read event by event: nothing but text, numbers, true, false, null, lists and mappings comes out, keys are text as they
are written (`on` is no truth value), and what lets a small document become a large one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import yaml

from tsemon.errors import InvalidDocument

Path = tuple[str | int, ...]
"""Keys and places in lists, from the outside in."""
LineOf = Callable[[Path], int]
"""The line where what is at the path begins, from 1; what is not there is where it should be."""

MAX_DEPTH = 40
"""So many lists and mappings inside one another are read."""

# The core schema of YAML 1.2. That of 1.1, which the library has, takes `no` for false, 1e-7 for text, 1:30 for 90.
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}


def parse(text: str, origin: str) -> tuple[Any, LineOf]:
    """The data in `text`, and where in it things are. Raises InvalidDocument, which names `origin` and the line."""
    reader = _Reader(text, origin)
    data = reader.document()

    def line_of(path: Path) -> int:
        while path not in reader.lines:
            path = path[:-1]
        return reader.lines[path]

    return data, line_of


def written(path: Path) -> str:
    """The path as people write it: receivers[2].url"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


class _Reader:
    def __init__(self, text: str, origin: str) -> None:
        self._origin, self._given = origin, text
        self._events = self._explained(yaml.parse(text, Loader=yaml.SafeLoader))
        self.lines: dict[Path, int] = {(): 1}

    def document(self) -> Any:
        next(self._events)
        if isinstance(next(self._events), yaml.StreamEndEvent):
            if self._given.lstrip().startswith("#") and "\n" not in self._given:
                raise InvalidDocument(f"{self._origin} line 1: the whole text is one comment; {_LINE_BREAKS_LOST}")
            return None
        data = self._value(next(self._events), ())
        next(self._events)
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise self._problem(after, "expected one document, a second one begins here; write a file for each")
        return data

    def _value(self, event: Any, path: Path) -> Any:
        self.lines.setdefault(path, _line(event.start_mark))
        self._refuse_shorthand(event)
        if len(path) > MAX_DEPTH:
            raise self._problem(event, f"expected at most {MAX_DEPTH} lists and mappings inside one another, got more")
        if isinstance(event, yaml.SequenceStartEvent):
            return [self._value(item, (*path, place)) for place, item in enumerate(self._until(yaml.SequenceEndEvent))]
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        return _plain(event.value) if event.implicit[0] else self._text(event)

    def _mapping(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for event in self._until(yaml.MappingEndEvent):
            key = self._key(event)
            place = (*path, key)
            if key in found:
                raise self._problem(event, f"{key!r} stands there a second time, first in line {self.lines[place]}")
            self.lines[place] = _line(event.start_mark)
            found[key] = self._value(next(self._events), place)
        return found

    def _key(self, event: Any) -> str:
        self._refuse_shorthand(event)
        if not isinstance(event, yaml.ScalarEvent):
            raise self._problem(event, "expected a word before the colon, got a list or a mapping")
        return self._text(event)

    def _text(self, event: Any) -> str:
        """The text in quotes. JSON writes some characters as two halves, which YAML leaves apart."""
        text: str = event.value
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise self._problem(event, "expected whole characters, got half of one (a lone surrogate)") from None

    def _until(self, end: type) -> Iterator[Any]:
        while not isinstance(event := next(self._events), end):
            yield event

    def _refuse_shorthand(self, event: Any) -> None:
        if event.anchor is not None:
            raise self._problem(event, "expected everything written out, got an anchor or alias (& or *)")
        if event.tag is not None:
            raise self._problem(event, f"expected a value without a tag, got {event.tag!r}")

    def _explained(self, events: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from events
        except yaml.MarkedYAMLError as error:
            mark, advice = _explained(error, self._given)
            where = f"{self._origin} line {_line(mark)}: column {mark.column + 1}"
            raise InvalidDocument(f"{where}: {advice}") from error
        # Characters that may not stand in it, or that are none.
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            raise InvalidDocument(f"{self._origin}: expected YAML: {error}") from error

    def _problem(self, event: Any, what: str) -> InvalidDocument:
        return InvalidDocument(f"{self._origin} line {_line(event.start_mark)}: {what}")


_LINE_BREAKS_LOST = "if curl sent it, use --data-binary instead of -d, which removes the line breaks of a file"
_QUOTED = re.compile(r"""\s*(- +)?[\w.-]+: +(["'])""")
_SECOND_KEY = re.compile(r"\s*(- +)?[\w.-]+: +\S")


def _explained(error: yaml.MarkedYAMLError, text: str) -> tuple[Any, str]:
    """The place at which a text stops being YAML, and advice."""
    problem, mark = str(error.problem), cast(Any, error.problem_mark)
    line = (text.splitlines() or [""])[min(_line(mark), len(text.splitlines())) - 1]
    before, rest = line[: mark.column], line[mark.column :]
    if "not allowed here" in problem and "\n" not in text:
        return mark, f"expected a line for each key; {_LINE_BREAKS_LOST}"
    if _QUOTED.match(before) and rest.strip() and not problem.startswith("found unknown escape"):
        quote = "double" if '"' in before else "single"
        advice = (
            f"the {quote} quotes end before the text does; put the line in single quotes, with double quotes inside"
        )
        return mark, f"{advice}: when: 'scalar(\"val/loss\") > 3'"
    if problem.startswith("mapping values"):
        if _SECOND_KEY.match(before):
            return mark, "a second colon in one line; give each key a line of its own, or put the text in single quotes"
        return mark, "this key is indented in another way than the keys above it; indent all keys of a mapping alike"
    if problem.startswith("found character '\\t'"):
        return mark, "this line is indented with a tab; use spaces"
    if problem.startswith("found character"):
        return mark, f"a text cannot begin with {rest[:1]!r}; put it in single quotes"
    if problem.startswith("found unknown escape"):
        return mark, "in double quotes, a backslash begins an escape sequence; put the line in single quotes"
    if problem.startswith("found unexpected end of stream"):
        return error.context_mark or mark, "this quote is never closed"
    if problem.startswith("could not find expected ':'"):
        return error.context_mark or mark, "expected a key and a colon, such as when: loss > 10"
    if problem.startswith("expected <block end>"):
        return mark, "this line is indented in another way than the lines above it; indent all keys of a mapping alike"
    return mark, f"expected YAML: {problem}"


def _line(mark: Any) -> int:
    return int(mark.line) + 1


def _plain(text: str) -> Any:
    """What a word without quotes stands for."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if text in _NOT_FINITE or _FLOAT.fullmatch(text):
        return float(_NOT_FINITE.get(text, text))
    return text
