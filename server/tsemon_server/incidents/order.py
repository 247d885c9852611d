"""Which failure can cause which, as `order.yaml` has it."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from importlib import resources

from tsemon.errors import InvalidRules
from tsemon_server.rules import PACK
from tsemon_server.rules.parts import Mistake, Part
from tsemon_server.yaml_lines import parse


class Order:
    """Says whether a rule's failure can cause the alert of another rule."""

    def __init__(self, text: str, origin: str, families: Mapping[str, str]) -> None:
        """`families`: rule to family. Raises InvalidRules for unknown names, and for a failure that causes itself."""
        data, _ = parse(text, origin)
        self._consequences: dict[str, set[str]] = {rule: set() for rule in families}
        self._lasting = set[tuple[str, str]]()
        """Pairs of a cause that must last and its consequence."""
        try:
            for entry in Part(data).has_keys(["order"])["order"].items():
                self._read(entry.has_keys(["causes", "can_cause", "because"], ["must_last"]), families)
            self._sort()
        except Mistake as mistake:
            raise InvalidRules(f"{origin}: {'.'.join(map(str, mistake.path))}: {mistake}") from None

    def _read(self, entry: Part, families: Mapping[str, str]) -> None:
        causes = [_known(part, families) for part in entry["causes"].items()]
        for part in entry["can_cause"].items():
            named = [
                rule
                for rule, family in families.items()
                if (family == part.data or fnmatchcase(rule, str(part.data))) and rule not in causes
            ]
            for cause in causes:
                consequences = named or [_known(part, families)]
                self._consequences[cause].update(consequences)
                if "must_last" in entry:
                    self._lasting.update((cause, consequence) for consequence in consequences)

    def _sort(self) -> None:
        try:
            last_first = [*TopologicalSorter(self._consequences).static_order()]
        except CycleError as error:
            raise Mistake(
                ("order",), f"a failure cannot cause itself: {' -> '.join(reversed(error.args[1]))}"
            ) from None
        self._places = {rule: place for place, rule in enumerate(reversed(last_first))}

    def knows(self, rule: str) -> bool:
        """False for rules of the user's own."""
        return rule in self._places

    def place(self, rule: str) -> int:
        """Its place among the failures, before all failures that it can cause."""
        return self._places.get(rule, len(self._places))

    def can_cause(self, cause: str, consequence: str, *, lasts: bool = True) -> bool:
        """Whether an alert of the second rule may be a consequence of the first rule's failure.

        lasts: False if the cause was over soon.
        """
        is_possible = consequence in self._consequences.get(cause, ())
        return is_possible and (lasts or (cause, consequence) not in self._lasting)


def _known(part: Part, families: Mapping[str, str]) -> str:
    if part.data not in families:
        raise part.wrong(
            "the name of a built-in rule, a pattern such as output-ignores-*, or a family with other rules"
        )
    return str(part.data)


def _families() -> Mapping[str, str]:
    return {rule.name: rule.family for rule in PACK}


def built_in(families: Mapping[str, str] | None = None) -> Order:
    """The order that comes with tsemon."""
    text = (resources.files("tsemon_server.incidents") / "order.yaml").read_text("utf-8")
    return Order(text, "order.yaml", _families() if families is None else families)


ORDER = built_in()
