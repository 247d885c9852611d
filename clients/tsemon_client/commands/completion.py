"""What the shell offers at Tab: names that the service knows, and nothing where it does not answer at once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from tsemon_client.commands.options import DEFAULT_SERVER

if TYPE_CHECKING:
    from tsemon_client import Client

TIMEOUT_S = 1.0
MAX_OFFERED = 50
# zsh evaluates what is offered, and bash expands it. A name with other characters has to be typed.
HARMLESS = re.compile(r"[\w.][\w./+@,%:-]*")


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    try:
        with _client(ctx) as client:
            runs = list(client.runs(q=incomplete.rpartition("/")[2] or None, limit=MAX_OFFERED))
    except Exception:  # a half-typed command line is no place for errors
        return []
    names = [run.run for run in runs]
    return _offered(
        [f"{run.project}/{run.run}" if names.count(run.run) > 1 else run.run for run in runs], incomplete
    ) or (_offered([f"{run.project}/{run.run}" for run in runs], incomplete))


def complete_project(ctx: typer.Context, incomplete: str) -> list[str]:
    try:
        with _client(ctx) as client:
            return _offered({run.project for run in client.runs(q=incomplete or None, limit=MAX_OFFERED)}, incomplete)
    except Exception:
        return []


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


def complete_rule(ctx: typer.Context, incomplete: str) -> list[str]:
    try:
        with _client(ctx) as client:
            return _offered([rule.name for rule in client.rules()], incomplete)
    except Exception:
        return []


def complete_tag(ctx: typer.Context, incomplete: str) -> list[str]:
    try:
        with _client(ctx) as client:
            return _offered([tag.tag for tag in client.tags()], incomplete)
    except Exception:
        return []


def _client(ctx: typer.Context) -> Client:
    from tsemon_client import Client

    server = ctx.params.get("server") or os.environ.get("TSEMON_SERVER") or DEFAULT_SERVER
    return Client(server, timeout_s=TIMEOUT_S, retries=0)


def _offered(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted({name for name in names if name.startswith(incomplete) and HARMLESS.fullmatch(name)})
