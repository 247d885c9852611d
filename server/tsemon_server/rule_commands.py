"""`tsemon rules`: checks rule files, shows rules, changes a server's. Commands import their packages themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tsemon.catalogue import most_alike, nearest
from tsemon.errors import InvalidArgument, UnknownRule
from tsemon.terminal import Column, examples, print_json, print_table, say
from tsemon_client.commands.completion import complete_project, complete_rule, complete_run
from tsemon_client.commands.options import DEFAULT_SERVER, Server, connect

if TYPE_CHECKING:
    from tsemon_client import Client
    from tsemon_client.models import Recorded, RuleVersion
    from tsemon_server.rules.rule import Rule


def _names(incomplete: str) -> list[str]:
    """For the shell."""
    try:
        from tsemon_server.rules import PACK
    except ImportError:
        return []
    return [rule.name for rule in PACK if rule.name.startswith(incomplete)]


app = typer.Typer(help="Read rule files, and show and change the rules of a server.", no_args_is_help=True)
RuleNamed = Annotated[str, typer.Argument(metavar="NAME", help="Name of the rule.", autocompletion=complete_rule)]
InProject = Annotated[
    str | None,
    typer.Option(help="Only for runs of this project; without it, for all.", autocompletion=complete_project),
]
MAX_RUNS = 1000
"""Maximum number of runs whose projects are searched for a similar name."""


@app.command(
    epilog=examples(
        "tsemon rules check mine.yaml",
        "tsemon rules check mine.yaml --run vision/vit-80  # also: does this run have the metrics?",
        "tsemon rules check rules/*.yaml --json | jq -r '.[].error'",
    )
)
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Rule files, as YAML or JSON.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    run: Annotated[
        str | None,
        typer.Option(
            help="Also name metrics and scalars that this run of the server lacks: its name, project/name or id.",
            autocompletion=complete_run,
        ),
    ] = None,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Check rule files: print the first mistake of each with its line and column. Exits with 1 if there is one."""
    from tsemon_server.rules.documents import load_file

    recorded = None if run is None else _recorded(server, run)
    found: list[dict[str, Any]] = []
    for file in files:
        try:
            rules = load_file(file)
            names, notes = [rule.name for rule in rules], list(_notes(rules))
            notes += [] if recorded is None else _lacks(rules, recorded)
            found.append({"file": str(file), "rules": names, "notes": notes, "error": None})
        except InvalidArgument as error:
            found.append({"file": str(file), "rules": [], "notes": [], "error": str(error)})
    if as_json:
        print_json(found)
    for one in found if not as_json else ():
        if one["error"]:
            say(f"tsemon: {one['error']}", err=True)
            continue
        count = "1 rule" if len(one["rules"]) == 1 else f"{len(one['rules'])} rules"
        say(f"{one['file']}: {count}: {', '.join(one['rules'])}")
        for note in one["notes"]:
            say(f"{one['file']}: note: {note}")
    if any(one["error"] for one in found):
        raise typer.Exit(1)


@app.command(
    epilog=examples(
        "tsemon rules show",
        "tsemon rules show loss-spike > mine.yaml  # a start for a rule of your own",
        "tsemon rules show --project vision  # the rules that are active there, and which of them are its own",
        "tsemon rules show --json | jq -r '.[].name'",
    )
)
def show(
    name: Annotated[
        str | None,
        typer.Argument(help="A rule by its name, or those with an alias; all are listed.", autocompletion=_names),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rules as JSON, as rule files write them.")] = False,
    server: Annotated[
        str | None, typer.Option(help="Show the active rules of this server in place of the built-in ones.")
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(help="Show the rules that are active in this project. The server is --server or TSEMON_SERVER."),
    ] = None,
) -> None:
    """List the built-in rules, or show one as a rule file: a start for one of your own."""
    known, own = _known(server, project)
    rules = [*known] if name is None else _found(known, name)
    if as_json:
        print_json([rule.definition for rule in rules])
    elif name is not None:
        say(_as_file(rules).removesuffix("\n"))
    else:
        columns = [Column("rule"), Column("severity"), Column("family"), Column("what it finds", wraps=True)]
        rows = [[rule.name, rule.severity, rule.family, rule.title] for rule in rules]
        if project is not None:
            columns.insert(1, Column("of"))
            for row in rows:
                row.insert(1, "project" if row[0] in own else "server")
        print_table(columns, rows)


@app.command(
    epilog=examples(
        "tsemon rules put mine.yaml",
        "tsemon rules put mine.yaml --project vision",
        "tsemon rules put mine.yaml --server https://tsemon.example.org  # with the token in TSEMON_TOKEN",
    )
)
def put(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A rule file, as YAML or JSON.")],
    project: InProject = None,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Activate the rules of a file on a server. Other rules stay. If one rule has a mistake, nothing changes."""
    from tsemon_server.rules.documents import load_file

    names = [rule.name for rule in load_file(file)]  # a mistake is reported with the name of the file
    with connect(server) as client:
        before = {version.name: version for version in client.rules(project)}
        after = {version.name: version for version in client.put_rules(file.read_text("utf-8"), project)}
        for name in names:
            say(_changed(before.get(name), after[name], project))
        _note_project(client, project)


@app.command(epilog=examples("tsemon rules disable loss-stall", "tsemon rules disable loss-stall --project vision"))
def disable(name: RuleNamed, project: InProject = None, server: Server = DEFAULT_SERVER) -> None:
    """Disable a rule of a server and resolve its alerts. Its versions are kept."""
    with connect(server) as client:
        before = _active(client, name, project)
        say(_changed(before, client.disable_rule(name, project)[0], project))
        _note_project(client, project)


@app.command(epilog=examples("tsemon rules restore loss-spike", "tsemon rules restore loss-spike --project vision"))
def restore(name: RuleNamed, project: InProject = None, server: Server = DEFAULT_SERVER) -> None:
    """Return a built-in rule to its original definition, or a project to the server's rule."""
    with connect(server) as client:
        before = _active(client, name, project)
        say(_changed(before, client.restore_rule(name, project)[0], project))
        _note_project(client, project)


def _active(client: Client, name: str, project: str | None) -> RuleVersion | None:
    return next((version for version in client.rules(project) if version.name == name), None)


def _changed(before: RuleVersion | None, after: RuleVersion, project: str | None) -> str:
    """The version of a rule after a change, in one line, and for whom."""
    whom = "all projects" if project is None else f"project {project}"
    is_servers = project is not None and after.project is None
    version = f"the server's version {after.version}" if is_servers else f"version {after.version}"
    if not after.enabled:
        version += " (disabled)"
    is_same = before is not None and (before.version, before.enabled) == (after.version, after.enabled)
    return f"{after.name}: {'unchanged' if is_same else 'now'} {version}, for {whom}"


def _note_project(client: Client, project: str | None) -> None:
    """Note that a project has no runs, with the most similar name of one that has: its name may be misspelled."""
    if project is None or next(client.runs(project=project, limit=1), None) is not None:
        return
    near = most_alike(project, {run.project for run in client.runs(limit=MAX_RUNS)})
    hint = f"; did you mean {near}?" if near else ""
    say(f"note: project {project} has no runs yet{hint}", err=True)


def _known(server: str | None, project: str | None) -> tuple[tuple[Rule, ...], set[str]]:
    """Return the active rules of a server, or the built-in rules, and the names of the project's own rules."""
    from tsemon_server.rules import PACK
    from tsemon_server.rules.documents import stored

    if server is None and project is None:
        return PACK, set()
    address = server or os.environ.get("TSEMON_SERVER") or DEFAULT_SERVER
    with connect(address) as client:
        found = [version for version in client.rules(project) if version.enabled]
    rules = tuple(stored(version.definition, f"rule {version.name} of {address}") for version in found)
    return rules, {version.name for version in found if version.project is not None}


def _recorded(server: str, run: str) -> Recorded:
    """The names of the metrics of a run."""
    from tsemon_client.commands.finding import find_run

    with connect(server) as client:
        return client.run(find_run(client, run).run_id).metrics


def _lacks(rules: tuple[Rule, ...], recorded: Recorded) -> Iterator[str]:
    from tsemon_server.rules.checking import lacks

    has = {"scalar": recorded.scalars, "layers": recorded.layers, "heads": recorded.heads}
    for rule in rules:
        for lack in lacks(rule, has) if rule.on == "frame" else ():
            yield f"rule {rule.name}: the run has {lack}"


def _notes(rules: tuple[Rule, ...]) -> Iterator[str]:
    """Possible slips (layers of an unknown name can still come from another writer), and trees that could be lines."""
    from tsemon_server.rules.checking import unmeasured
    from tsemon_server.rules.printing import condition

    for rule in rules:
        for key in ("when", "clear", "only_while"):
            if isinstance(rule.definition.get(key), dict):
                yield f"rule {rule.name} can have {key!r} in one line: {condition(rule.definition[key])}"
        yield from unmeasured(rule)


def _found(rules: tuple[Rule, ...], name: str) -> list[Rule]:
    found = [rule for rule in rules if rule.name == name] or [rule for rule in rules if name in rule.aliases]
    if found:
        return found
    raise UnknownRule(f"no rule is named {name!r}; {nearest(name, [rule.name for rule in rules])}")


def _as_file(rules: list[Rule]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Long text is folded below its key, so that a condition needs no quotes."""

    Dumper.add_representer(str, lambda to, text: to.represent_str(text) if len(text) <= _SHORT else _folded(to, text))
    definitions = {"rules": [rule.definition for rule in rules]}
    return str(yaml.dump(definitions, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100))


_SHORT = 90


def _folded(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=">")
