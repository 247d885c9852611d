"""A rule, as its definition says it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal, cast

from tsemon.catalogue import OWN_FAMILY
from tsemon_server.rules import deciding, line
from tsemon_server.rules.conditions import Comparison
from tsemon_server.rules.grammar import condition, value
from tsemon_server.rules.parts import Mistake, Part
from tsemon_server.rules.program import Measure, Program, Term
from tsemon_server.rules.scanning import MAX_SAMPLES_HELD, MAX_STEPS_HELD
from tsemon_server.rules.where import Where

FAMILIES = "tse", "entropy", "rank", "norm", "dead", "diverge", "data", "loss", "liveness", OWN_FAMILY
SEVERITIES = "info", "warning", "critical"
Severity = Literal["info", "warning", "critical"]

_REQUIRED = "name", "when"
_OPTIONAL = (
    *("family", "severity", "title", "advice", "source", "origin", "aliases"),
    *("on", "clear", "only_while", "for", "clear_for", "after", "evidence", "where"),
)
KEYS = (*_REQUIRED, *_OPTIONAL)
"""All that a definition may have."""
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_EVIDENCE = re.compile(r"[a-z0-9_]{1,64}")
_AFTER_SENTENCE = re.compile(r"(?<=\.) ")
_PLACE = re.compile(r"\{([a-z0-9_]+)\}")
WHERE = "block", "blocks", "step"
"""Names that titles and advice may use besides those of `evidence`: the first block, all blocks in words, and the step."""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """How long a verdict must last before it counts.

    Both bounds are needed, because cadences differ by a factor of 500. Samples alone: at every step, three samples
    are one model seen thrice. Steps alone: at every 500th step, a single odd batch would do.
    """

    samples: int = 3
    """Number of consecutive samples, including the first and the last. Two could still be one odd batch and its echo."""
    steps: int = 10
    """Optimizer steps from the first to the last of them: three samples, 5 steps apart."""


@dataclass(frozen=True)
class Rule:
    """A definition that has been read. `Compiled` is what runs."""

    name: str
    family: str
    severity: Severity
    title: str
    """One sentence, without its full stop."""
    on: Literal["frame", "clock"]
    hold: Hold
    clear_hold: Hold
    after: Hold
    advice: str
    """What to try; `{name}` stands for a number of the evidence. Empty if the rule gives none."""
    source: str
    """Source of the advice, or empty."""
    origin: str
    """Basis of the thresholds, or empty."""
    aliases: tuple[str, ...]
    """Other tools' names for the same."""
    definition: Mapping[str, Any] = field(repr=False, hash=False)
    """The text of the rule as plain data, with its lines unparsed."""
    tree: Mapping[str, Any] = field(repr=False, hash=False, compare=False)
    """The definition with its lines parsed: conditions are mappings, values are lists, holds are mappings."""

    @property
    def measures(self) -> frozenset[Measure]:
        """The metrics that its condition reads."""
        return compile_rule(self, Program()).when.measures

    @property
    def all_measures(self) -> frozenset[Measure]:
        """The metrics that its conditions and its evidence read."""
        compiled = compile_rule(self, Program())
        terms = (compiled.when, compiled.clear, compiled.only_while, *compiled.evidence.values())
        return frozenset().union(*(term.measures for term in terms if term is not None))

    @property
    def digest(self) -> str:
        """Of the definition: two rules with one digest say the same."""
        return sha256(json.dumps(self.definition, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Compiled:
    """The nodes of a rule in a program."""

    rule: Rule
    when: Term
    clear: Term | None
    only_while: Term | None
    comparisons: tuple[Comparison, ...]
    evidence: Mapping[str, Term]
    where: Where

    @property
    def terms(self) -> list[Term]:
        """All terms that it compares and shows, without those that say where it is met."""
        known = (term for term in (self.when, self.clear, self.only_while) if term is not None)
        return [*known, *self.evidence.values()]

    @property
    def measures(self) -> frozenset[Measure]:
        """The measures of its condition and of its further numbers."""
        return self.when.measures.union(*(term.measures for term in self.evidence.values()))

    @property
    def is_of_layers(self) -> bool:
        """True if it shows anything of single layers."""
        return any(measure.kind != "scalar" for measure in self.measures)


def rule(part: Part) -> Rule:
    """Read a definition. Raises Mistake."""
    definition = part.has_keys(_REQUIRED, _OPTIONAL).data
    name = _name(part["name"])
    part = Part(_parsed(part), part.path)
    read = Rule(
        name=name,
        family=part["family"].one_of(FAMILIES) if "family" in part else OWN_FAMILY,
        severity=cast(Severity, part["severity"].one_of(SEVERITIES)) if "severity" in part else "warning",
        title=part["title"].text(200).rstrip(".") if "title" in part else name.replace("-", " ").capitalize(),
        on=cast(Any, part["on"].one_of(["frame", "clock"])) if "on" in part else "frame",
        hold=_hold(part, "for", Hold()),
        clear_hold=_hold(part, "clear_for", _hold(part, "for", Hold())),
        after=_hold(part, "after", Hold(samples=0, steps=0)),
        advice=_text(part, "advice"),
        source=_text(part, "source"),
        origin=_text(part, "origin"),
        aliases=tuple(alias.text(128) for alias in part["aliases"].items(0)) if "aliases" in part else (),
        definition=definition,
        tree=part.data,
    )
    compiled = compile_rule(read, Program(), part)
    for key, term in zip(_CLAUSES, (compiled.when, compiled.clear, compiled.only_while), strict=True):
        if term is not None:
            deciding.check(part[key].data, (*part.path, key))
            deciding.check_measures((*part.path, key), term.measures, read.on)
    for key, text in (("title", read.title), ("advice", read.advice)):
        for name in _PLACE.findall(text):
            if name not in (*compiled.evidence, *WHERE):
                known = ", ".join(f"{{{one}}}" for one in WHERE)
                raise Mistake(
                    (*part.path, key), f"{{{name}}} is not in evidence; expected one of its names, or {known}"
                )
    return read


def _name(part: Part) -> str:
    if not isinstance(part.data, str) or not _NAME.fullmatch(part.data) or len(part.data) > 128:
        raise part.wrong("a name of small letters, digits and hyphens, such as loss-spike")
    return part.data


def _text(part: Part, key: str) -> str:
    return part[key].text() if key in part else ""


_CLAUSES = {"when": {"for": "for", "after": "after"}, "clear": {"for": "clear_for"}, "only_while": {}}
"""Keys with the meaning of a clause at the end of a line, by its first word."""


def _parsed(part: Part) -> dict[str, Any]:
    """The definition with its lines parsed."""
    tree = dict(part.data)
    for key, clauses in _CLAUSES.items():
        if key not in tree or isinstance(tree[key], dict):
            continue
        if not isinstance(tree[key], str):
            raise part[key].wrong("a line such as loss > 10")
        read = line.condition(part[key], clauses)
        tree[key] = read.tree
        for word, lasting in read.clauses.items():
            if clauses[word] in tree:
                raise Mistake(
                    (*part.path, clauses[word]), f"the line of {key!r} has `{word}`, too; expected one of them"
                )
            tree[clauses[word]] = dict(lasting)
    if isinstance(tree.get("where"), str):
        tree["where"] = line.mask(part["where"]).tree
    if isinstance(tree.get("evidence"), dict):
        tree["evidence"] = {
            name: line.value(part["evidence"][name]).tree if isinstance(given, str) else given
            for name, given in tree["evidence"].items()
        }
    return tree


def _hold(part: Part, key: str, default: Hold) -> Hold:
    if key not in part:
        return default
    hold = part[key].has_keys([], ["samples", "steps"])
    least = 0 if key == "after" else 1
    return Hold(
        samples=hold["samples"].whole(least, MAX_SAMPLES_HELD) if "samples" in hold else least,
        steps=hold["steps"].whole(0, MAX_STEPS_HELD) if "steps" in hold else 0,
    )


def compile_rule(rule: Rule, program: Program, part: Part | None = None) -> Compiled:
    """Add the nodes of a rule to a program. Raises Mistake, which is not to be expected of a rule that was read."""
    part = Part(rule.tree) if part is None else part
    comparisons: list[Comparison] = []
    when = condition(part["when"], program, comparisons)
    clear = condition(part["clear"], program) if "clear" in part else None
    only_while = condition(part["only_while"], program) if "only_while" in part else None
    evidence, where = _evidence(part, program), Where(part, program)
    return Compiled(rule, when, clear, only_while, tuple(comparisons), evidence, where)


def shown_numbers(compiled: Compiled, program: Program) -> Mapping[str, str]:
    """The numbers that the rule holds against something, and by which key the program has their last samples."""
    numbers = [comparison.value for comparison in compiled.comparisons if not comparison.value.axes]
    return {term.says: program.show(term) for term in numbers}


def _evidence(part: Part, program: Program) -> dict[str, Term]:
    if "evidence" not in part:
        return {}
    if not isinstance(part["evidence"].data, dict):
        raise part["evidence"].wrong("a mapping from names to values")
    terms = {str(name): value(part["evidence"][name], program) for name in part["evidence"].data}
    for name, term in terms.items():
        if not _EVIDENCE.fullmatch(name):
            raise Mistake((*part.path, "evidence", name), f"expected small letters, digits and _, got {name[:80]!r}")
        if term.axes:
            raise Mistake((*part.path, "evidence", name), "expected one number, got layers; reduce over layers")
    return terms


def filled(text: str, numbers: Mapping[str, float | str | None]) -> str:
    """The text with the numbers in their places. Of several sentences those are left out whose numbers are not known."""
    sentences = _AFTER_SENTENCE.split(text)
    known = [one for one in sentences if all(numbers.get(name) is not None for name in _PLACE.findall(one))]
    return _PLACE.sub(lambda place: _shown(numbers.get(place[1])), " ".join(known or sentences))


def _shown(number: float | str | None) -> str:
    if isinstance(number, str):
        return number
    return "(not known)" if number is None else f"{number:.3g}"
