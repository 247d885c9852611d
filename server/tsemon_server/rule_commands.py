"""`tsemon rules`: reads rule files, and shows the built-in rules. What a command needs is imported inside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tsemon.catalogue import LAYERED, nearest
from tsemon.errors import InvalidArgument, UnknownRule

if TYPE_CHECKING:
    from tsemon_server.rules import Rule

app = typer.Typer(help="Read rule files, and show the built-in rules.", no_args_is_help=True)


@app.command()
def check(files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Rule files, as YAML or JSON.")]) -> None:
    """Say whether rule files can be read, or what is wrong first and in which line. Exits 1 where one cannot."""
    from tsemon_server.rules import load_file

    is_sound = True
    for file in files:
        try:
            rules = load_file(file)
            count = "1 rule" if len(rules) == 1 else f"{len(rules)} rules"
            typer.echo(f"{file}: {count}: {', '.join(rule.name for rule in rules)}")
            for note in _notes(rules):
                typer.echo(f"{file}: note: {note}")
        except InvalidArgument as error:
            is_sound = False
            typer.echo(str(error), err=True)
    if not is_sound:
        raise typer.Exit(1)


@app.command()
def show(
    name: Annotated[
        str | None, typer.Argument(help="A rule by its name, or those with an alias; all are listed.")
    ] = None,
) -> None:
    """List the built-in rules, or show one as a rule file: a start for one of your own."""
    from tsemon_server.rules import PACK

    if name is None:
        for rule in PACK:
            typer.echo(f"{rule.name:<32} {rule.severity:<8} {rule.family:<8} {rule.title}")
        return
    typer.echo(_as_file(_found(PACK, name)), nl=False)


def _notes(rules: tuple[Rule, ...]) -> Iterator[str]:
    """What may be a slip: layers of a name that tsemon does not measure can still come from another writer."""
    for rule in rules:
        for measure in sorted(rule.measures):
            if measure.kind != "scalar" and measure.name not in LAYERED:
                yield (
                    f"rule {rule.name} reads {measure.kind} {measure.name!r}, which tsemon does not measure; "
                    + nearest(measure.name, list(LAYERED))
                )


def _found(rules: tuple[Rule, ...], name: str) -> list[Rule]:
    found = [rule for rule in rules if rule.name == name] or [rule for rule in rules if name in rule.aliases]
    if found:
        return found
    raise UnknownRule(f"no built-in rule is named {name!r}; {nearest(name, [rule.name for rule in rules])}")


def _as_file(rules: list[Rule]) -> str:
    import yaml

    return yaml.safe_dump(
        {"rules": [rule.definition for rule in rules]}, sort_keys=False, allow_unicode=True, width=100
    )
