"""What the shell offers at Tab: names that the service knows, and nothing where it does not answer at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

from tsemon_client.commands.options import DEFAULT_SERVER

if TYPE_CHECKING:
    from tsemon_client import Client

TIMEOUT_S = 1.0
MAX_OFFERED = 50
# zsh evaluates what is offered, and bash expands it. A name with other characters has to be typed.
HARMLESS = re.compile(r"[\w.][\w./+@,%:-]*")


Complete = Callable[[typer.Context, str], list[str]]


def _asking(names: Callable[[Client, str], Iterable[str]]) -> Complete:
    """Offer what `names` finds for the incomplete word. A half-typed command line is no place for errors."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        try:
            with _client(ctx) as client:
                return _offered(names(client, incomplete), incomplete)
        except Exception:
            return []

    return complete


def _runs(client: Client, incomplete: str) -> Iterable[str]:
    runs = list(client.runs(q=incomplete.rpartition("/")[2] or None, limit=MAX_OFFERED))
    with_project = [f"{run.project}/{run.run}" for run in runs]
    names = [run.run for run in runs]
    short = [name if names.count(name) == 1 else long for name, long in zip(names, with_project, strict=True)]
    return short if _offered(short, incomplete) else with_project


complete_run = _asking(_runs)
complete_project = _asking(
    lambda client, incomplete: (run.project for run in client.runs(q=incomplete or None, limit=MAX_OFFERED))
)
complete_rule = _asking(lambda client, _: (rule.name for rule in client.rules()))
complete_tag = _asking(lambda client, _: (tag.tag for tag in client.tags()))


def complete_metric(ctx: typer.Context, incomplete: str) -> list[str]:
    """Those of the run that was named before; the catalogue's where that is not known."""
    from tsemon.catalogue import CATALOGUE

    try:
        from tsemon_client.commands.finding import find_run

        # Before an option without its value yet, arguments are not told from each other: `tail RUN --metric`.
        run: str = ctx.params["run"] or ctx.args[0]
        with _client(ctx) as client:
            recorded = client.run(find_run(client, run).run_id).metrics
        return _offered([*recorded.scalars, *recorded.layers, *recorded.heads], incomplete)
    except Exception:
        return _offered([metric.name for metric in CATALOGUE], incomplete)


def _client(ctx: typer.Context) -> Client:
    from tsemon_client import Client

    server = ctx.params.get("server") or os.environ.get("TSEMON_SERVER") or DEFAULT_SERVER
    return Client(server, timeout_s=TIMEOUT_S, retries=0)


def _offered(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted({name for name in names if name.startswith(incomplete) and HARMLESS.fullmatch(name)})
