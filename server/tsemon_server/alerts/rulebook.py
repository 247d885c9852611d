"""What people make of the rules: each edit is a new version, and the newest version of a rule is the one.

With a `project` an edit is that project's own, and counts there in place of the server's until it is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from tsemon.catalogue import nearest
from tsemon.errors import InvalidArgument, InvalidRules, UnknownRule
from tsemon_answers.rules import ExplainedRule, RuleHistory, Rules, RuleVersion
from tsemon_server.alerts.explaining import explain
from tsemon_server.rules.bounds import check_all
from tsemon_server.rules.documents import load, stored
from tsemon_server.rules.rule import Rule
from tsemon_server.store import Store
from tsemon_server.store.ledger.rules import Definition, RuleChanges
from tsemon_server.store.ledger.rules import Rules as KnownRules
from tsemon_server.store.writing import Writer


class Rulebook:
    """Versions of the rules of a pack, and of those that people have added. What is in force, `ActiveRules` says."""

    def __init__(self, pack: Sequence[Rule]) -> None:
        self._pack = {rule.name: rule for rule in pack}
        self._explained: dict[str, ExplainedRule] = {}
        """By digest: reading a definition takes longer than all else that `rules` does."""

    def register(self, store: Store) -> None:
        """Let each rule of the pack that says something new have a version, unless somebody has edited it."""
        with store.write() as writer:
            edited = {version.name for version in writer.rules.newest() if version.origin == "edited"}
            writer.rules.add_versions([_definition(r) for r in self._pack.values() if r.name not in edited], "built-in")

    def newest(self, rules: KnownRules, project: str | None = None) -> list[RuleVersion]:
        """The active version of each rule, including disabled ones, by name."""
        return [v for v in rules.newest(project) if v.origin == "edited" or v.name in self._pack]

    def rules(
        self, store: Store, project: str | None = None, is_shown: Callable[[str], bool] = lambda _: True
    ) -> Rules:
        """The rules that the server knows, also in words. `is_shown` is true for projects that the token may read."""
        with store.read() as reader:
            newest = self.newest(reader.rules, project)
            projects = [name for name in reader.rules.projects() if is_shown(name)]
        return Rules(project=project, projects=projects, rules=newest, explained=self._in_words(newest))

    def history(self, store: Store, name: str, project: str | None = None) -> RuleHistory:
        """All versions of a rule. Raises UnknownRule."""
        with store.read() as reader:
            return RuleHistory(versions=self.versions(reader.rules, name, project))

    def put(self, store: Store, text: str, project: str | None = None) -> None:
        """Let the rules of a file be in force: all of them, or none if one is wrong."""
        rules = load(text, "body")
        with store.write() as writer:
            self.edit(writer.rules, rules, project)

    def put_one(self, store: Store, name: str, text: str, project: str | None = None) -> RuleHistory:
        """Let the one rule of a file, which has this name, be in force."""
        rule = one_rule(text, name)
        with store.write() as writer:
            self.edit(writer.rules, [rule], project)
        return self.history(store, name, project)

    def edit(self, book: RuleChanges, rules: Iterable[Rule], project: str | None = None) -> None:
        """Activate these rules. A rule that equals the built-in one counts as built in again. A project does not keep a rule
        that equals the server's as its own. Raises InvalidRules if they cost too much with the others."""
        servers = {} if project is None else {version.name: version for version in self.newest(book)}
        before, is_own = _added(book, project), False
        for rule in rules:
            known = servers.get(rule.name)
            if project is not None and known is not None and known.enabled and known.digest == rule.digest:
                _give_up(book, known, project)
                continue
            builtin = self._pack.get(rule.name)
            is_as_built_in = project is None and builtin is not None and builtin.digest == rule.digest
            book.add_versions([_definition(rule)], "built-in" if is_as_built_in else "edited", project=project)
            is_own = is_own or not is_as_built_in
        if is_own:
            whose = (
                "the server's rules that are not built in"
                if project is None
                else f"the own rules of project {project!r}"
            )
            check_all(_rules(_added(book, project)), whose, before=lambda: _rules(before))

    def disable(self, writer: Writer, name: str, project: str | None = None) -> None:
        """Disable the rule and resolve its alerts. If the server disables it, projects with their own version keep it."""
        newest = self.versions(writer.rules, name, project)[0]
        writer.rules.add_versions([_said(newest)], "edited", enabled=False, project=project)
        _end_alerts(writer, name, project, besides=() if project else writer.rules.projects(name))

    def restore(self, writer: Writer, name: str, project: str | None = None) -> None:
        """Let a rule of the pack be in force as it came; in a project, let the server's count again."""
        if project is not None:
            self._restore_servers(writer, name, project)
        elif name not in self._pack:
            known = self.versions(writer.rules, name)[0]
            raise UnknownRule(
                f"{known.name!r} is not a built-in rule, so there is no original to restore; disable it, or put another one"
            )
        else:
            self.edit(writer.rules, [self._pack[name]])

    def _restore_servers(self, writer: Writer, name: str, project: str) -> None:
        known = {version.name: version for version in self.newest(writer.rules)}.get(name)
        if known is None:
            self.versions(writer.rules, name, project)
            raise UnknownRule(
                f"the server has no rule {name!r} that project {project!r} could return to; disable the rule"
            )
        _give_up(writer.rules, known, project)
        if not known.enabled:
            _end_alerts(writer, name, project)

    def versions(self, rules: KnownRules, name: str, project: str | None = None) -> list[RuleVersion]:
        """All versions of a rule, the active one first. Raises UnknownRule."""
        found = rules.versions(name, project)
        if not found:
            known = [version.name for version in self.newest(rules, project)]
            raise UnknownRule(f"no rule is named {name!r}; {nearest(name, known)}")
        return found

    def _in_words(self, versions: Sequence[RuleVersion]) -> dict[str, ExplainedRule]:
        known = self._explained
        for version in versions:
            if version.digest in known:
                continue
            with suppress(InvalidRules):
                known[version.digest] = explain(stored(version.definition, version.name))
        return {version.name: known[version.digest] for version in versions if version.digest in known}


def _end_alerts(writer: Writer, rule: str, project: str | None, besides: Collection[str] = ()) -> None:
    for run_id in writer.alerts.runs_of_rule(rule, project, besides=besides):
        writer.runs.hold(run_id)  # their incidents depend on alerts that others may change now
    writer.alerts.end_of_rule(rule, project, besides=besides)


def _added(book: KnownRules, project: str | None) -> list[RuleVersion]:
    """The own rules of the project, or the rules added to the server."""
    known = book.newest() if project is None else book.own(project)
    return [version for version in known if version.origin == "edited" and version.enabled]


def _rules(versions: Iterable[RuleVersion]) -> list[Rule]:
    found = list[Rule]()
    for version in versions:
        with suppress(InvalidRules):  # written for another version of tsemon: it reads no frame
            found.append(stored(version.definition, version.name))
    return found


def one_rule(text: str, name: str) -> Rule:
    """The rule of a file with this one rule, or of its definition alone as JSON."""
    rules = load(as_file(text), "body")
    if [rule.name for rule in rules] != [name]:
        found = ", ".join(rule.name for rule in rules) or "none"
        raise InvalidArgument(f"body: expected the one rule {name}, got {found}; PUT /api/v1/rules takes a whole file")
    return rules[0]


def _give_up(book: RuleChanges, servers: RuleVersion, project: str) -> None:
    """Return the project to the server's version if it has its own."""
    if servers.name in {version.name for version in book.own(project)}:
        book.add_versions([_said(servers)], "server", enabled=servers.enabled, project=project)


def _said(version: RuleVersion) -> Definition:
    return Definition(version.name, version.digest, version.definition)


def as_file(text: str) -> str:
    """The text of a rule file, or the definition of one rule as JSON as such a file."""
    # On one line, so that the lines of mistakes stay what they were.
    is_alone = text.lstrip().startswith("{") and '"rules"' not in text
    return f'{{"rules": [{text}]}}' if is_alone else text


def _definition(rule: Rule) -> Definition:
    return Definition(rule.name, rule.digest, rule.definition)
