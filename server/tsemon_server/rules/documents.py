"""Rule files: YAML with a list of rules, read with the line of every mistake."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from tsemon.errors import InvalidDocument, InvalidRules
from tsemon_server.rules.bounds import MAX_RULES, check_all, check_one
from tsemon_server.rules.parts import Mistake, Part
from tsemon_server.rules.parts import Path as Keys
from tsemon_server.rules.rule import Rule, rule
from tsemon_server.yaml_lines import LineOf, parse, written

MAX_CHARACTERS = 2**20
"""Of a rule file: ten times what all built-in rules take."""


def load_file(path: Path) -> tuple[Rule, ...]:
    """The rules of a file. Raises InvalidDocument or InvalidRules."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise InvalidDocument(f"{path}: the rule file cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InvalidDocument(f"{path} line {line}: expected text in UTF-8; save the file in this encoding") from None
    return load(text, str(path))


def load(text: str, origin: str = "rules") -> tuple[Rule, ...]:
    """The rules of a file. Raises InvalidDocument or InvalidRules, which name `origin`, the line and the place.

    They must be within the limits of cost. `stored` reads rules from a database.
    """
    if not text.strip():
        raise InvalidDocument(f"{origin}: expected rules, got an empty text")
    if len(text) > MAX_CHARACTERS:
        raise InvalidRules(f"{origin}: expected at most {MAX_CHARACTERS:,} characters of rules, got {len(text):,}")
    data, line_of = parse(text, origin)
    try:
        listed = Part(data).has_keys(["rules"])["rules"]
        parts = [*listed.items()]
        if len(parts) > MAX_RULES:
            raise Mistake(listed.path, f"expected at most {MAX_RULES} rules, got {len(parts):,}")
        read = tuple(map(rule, parts))
        _refuse_twins(read, listed.path)
        for one, part in zip(read, parts, strict=True):
            check_one(one, part.path)
    except Mistake as mistake:
        raise InvalidRules(_explained(mistake, origin, line_of, data)) from None
    check_all(read, f"{origin}: its rules")
    return read


def stored(definition: Mapping[str, Any], origin: str) -> Rule:
    """The rule of a definition from a database; limits of cost do not apply. Raises InvalidRules."""
    try:
        return rule(Part(definition))
    except Mistake as mistake:
        where = f"{written(mistake.path)}: " if mistake.path else ""
        raise InvalidRules(f"{origin}: {where}{mistake}") from None


def pack() -> tuple[Rule, ...]:
    """The built-in rules, in the order of their files."""
    files = sorted((resources.files("tsemon_server.rules") / "pack").iterdir(), key=lambda file: file.name)
    return tuple(
        read for file in files if file.name.endswith(".yaml") for read in load(file.read_text("utf-8"), file.name)
    )


def _refuse_twins(rules: Iterable[Rule], path: Keys) -> None:
    seen: set[str] = set()
    for place, read in enumerate(rules):
        if read.name in seen:
            raise Mistake((*path, place, "name"), f"a second rule {read.name!r}; give each a name of its own")
        seen.add(read.name)


def _explained(mistake: Mistake, origin: str, line_of: LineOf, data: object) -> str:
    path = mistake.path
    where = f"{written(path)}: " if path else ""
    about = ""
    if len(path) > 1 and path[0] == "rules" and isinstance(path[1], int):
        about = f" (rule {Part(data)['rules'][path[1]].data.get('name', '?')})" if _is_mapping(data, path[1]) else ""
    said, *below = str(mistake).split("\n")  # below is the line of a condition, with a mark
    return "\n".join([f"{origin} line {line_of(path)}: {where}{said}{about}", *below])


def _is_mapping(data: object, place: int) -> bool:
    return isinstance(Part(data)["rules"][place].data, dict)
