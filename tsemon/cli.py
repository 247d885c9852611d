"""The commands of `tsemon`. What a command needs beyond the command line is imported inside it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import tsemon
from tsemon.errors import InvalidArgument, MissingPackage
from tsemon_server import admin, rule_commands
from tsemon_server.notify import commands as notify_commands

app = typer.Typer(
    help="Looks inside transformers while they train.", no_args_is_help=True, pretty_exceptions_enable=False
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(tsemon.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on (TSEMON_HOST, default 127.0.0.1).")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on (TSEMON_PORT, default 8731).", min=0, max=65535)
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="Database URL (TSEMON_DATABASE, default sqlite:///tsemon.db).")
    ] = None,
    spool: Annotated[
        str | None,
        typer.Option(help="Spool folder to show, read-only, in place of a database (TSEMON_SPOOL)."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that answer (TSEMON_WORKERS, default 1).", min=1, max=64)
    ] = None,
    notify: Annotated[
        str | None, typer.Option(help="YAML file that says who is told of alerts (TSEMON_NOTIFY).")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen where others can reach it, although there is no login.")
    ] = False,
) -> None:
    """Start the service: REST, alerts, Prometheus metrics and the page."""
    _require("fastapi", "uvicorn", "sqlalchemy", "alembic", extra="server")
    from tsemon_server.main import serve as serve_forever
    from tsemon_server.settings import settings_from_environment

    if spool is not None and database is not None:
        raise InvalidArgument("expected --spool or --database, got both; a spool folder is shown without a database")
    settings = settings_from_environment()
    serve_forever(
        dataclasses.replace(
            settings,
            host=settings.host if host is None else host,
            port=settings.port if port is None else port,
            database=settings.database if database is None else database,
            spool=settings.spool if spool is None and database is None else spool,
            workers=settings.workers if workers is None else workers,
            notify=settings.notify if notify is None else notify,
            insecure=insecure,
        )
    )


@app.command()
def demo(
    text: Annotated[
        bool, typer.Option("--text", help="Language models on Python's sources instead of digits.")
    ] = False,
    port: Annotated[
        int, typer.Option(help="Port of the service; another free one where it is taken.", min=0, max=65535)
    ] = 8731,
    database: Annotated[Path, typer.Option(help="File that keeps the demo's runs.")] = Path(".tsemon/demo.db"),
) -> None:
    """Train a deep post-norm transformer and its de-escalated twin, and watch the first one fail."""
    _require("fastapi", "uvicorn", "sqlalchemy", "alembic", "httpx", "sklearn", extra="demo")
    with _leaving_at_ctrl_c():
        from tsemon.demo import run_demo

    run_demo(text=text, port=port, database=database)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="An experiment, or `all`. `list` names them.")],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller and fewer: minutes instead of an hour.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for pages, figures and numbers.")] = Path("reproduction"),
    jobs: Annotated[int, typer.Option(help="Experiments at a time, one thread each.", min=1)] = os.cpu_count() or 1,
) -> None:
    """Repeat the papers' experiments and write down what they say beside what we see.

    TSEMON_TEXT names the files or folders of text, as in PATH, on which value-residual-82m trains.
    """
    _require("matplotlib", "numpy", "sklearn", "transformers", extra="reproduce")
    with _leaving_at_ctrl_c():
        from tsemon.reproduce import EXPERIMENTS, available
        from tsemon.reproduce import reproduce as run

    if name == "list":
        for experiment in EXPERIMENTS.values():
            chosen_by = f"; {experiment.chosen_by}" if experiment.chosen_by else ""
            typer.echo(f"{experiment.name:<20} {experiment.title} ({experiment.source}){chosen_by}")
        return
    index = run(available() if name == "all" else [name], out, quick=quick, jobs=jobs, tell=typer.echo)
    typer.echo(f"all in one table: {index}")


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help="Name of a recipe; --list shows them.")] = None,
    data: Annotated[Path | None, typer.Option(help="Text or images to use: a file or a folder.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", min=1)] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Another setting of the recipe: seed=1, sizes.depth=8. Repeatable."
        ),
    ] = None,
    run: Annotated[
        str | None,
        # torchrun takes --run, wherever it stands, for its own --run-path.
        typer.Option("--run", "--run-name", help="Name of the run (default: the recipe's and the time)."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    checkpoints: Annotated[Path, typer.Option(help="Folder of checkpoints, one below it for each run.")] = Path(
        "checkpoints"
    ),
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints (default: a tenth of all).", min=1)
    ] = None,
    keep: Annotated[int, typer.Option(help="Checkpoints to keep, the newest ones.", min=1)] = 2,
    monitor: Annotated[bool, typer.Option("--monitor/--no-monitor", help="Watch the run with tsemon.")] = True,
    every: Annotated[
        int | None, typer.Option(help="Sample each so many steps (default: within 1 % of the time).", min=1)
    ] = None,
    server: Annotated[str | None, typer.Option(envvar="TSEMON_SERVER", help="Base URL of the service.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show the recipes and exit.")] = False,
) -> None:
    """Train a reference model. `torchrun --nproc-per-node 8 -m tsemon train ...` shares the work among processes."""
    _require("numpy", "rich", extra="train")
    with _leaving_at_ctrl_c():
        from tsemon.train.command import Options, run_recipe
        from tsemon.train.recipe import changed
        from tsemon.train.recipes import RECIPES, recipe_named
    if show_list or recipe is None:
        for known in RECIPES.values():
            typer.echo(f"{known.name}\n    {known.about}")
        return
    chosen = dict(_key_and_value(setting) for setting in settings or ())
    if data is not None:
        chosen["data.path"] = str(data)
    if steps is not None:
        chosen["steps"] = str(steps)
    run_recipe(
        changed(recipe_named(recipe), chosen),
        Options(
            run=run,
            resume=resume,
            folder=checkpoints,
            checkpoint_every=checkpoint_every,
            keep=keep,
            monitor=monitor,
            every=every,
            server=server,
            device=device,
        ),
    )


def _key_and_value(setting: str) -> tuple[str, str]:
    key, sign, value = setting.partition("=")
    if not key or not sign:
        raise InvalidArgument(f"--set takes key=value, got {setting!r}")
    return key, value


@app.command()
def replay(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="Traces (.jsonl, .jsonl.gz), spool folders, or folders of either."),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(help="File of rules to use instead of the built-in ones.", exists=True, dir_okay=False),
    ] = None,
    database: Annotated[str | None, typer.Option(help="Database URL that holds the runs of --run.")] = None,
    server: Annotated[str | None, typer.Option(help="Base URL of a service that holds the runs of --run.")] = None,
    runs: Annotated[list[str] | None, typer.Option("--run", help="Id or name of a stored run. Repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the alerts as JSON.")] = False,
    evidence: Annotated[bool, typer.Option("--evidence", help="Show what each rule saw, and its advice.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes that read files.", min=1)] = os.cpu_count() or 1,
) -> None:
    """Say which alerts the rules raise over recorded runs: files, spools, or what a service or a database holds.

    Exits 1 where a recording cannot be read; the others are shown all the same.
    """
    _require("numpy", "pydantic", "rich", "sqlalchemy", "yaml", extra="server")
    from tsemon_server.replay import command

    if not command.run(files or (), rules, database, server, runs or (), as_json=as_json, evidence=evidence, jobs=jobs):
        raise typer.Exit(1)


@app.command()
def sync(
    server: Annotated[str, typer.Option(envvar="TSEMON_SERVER", help="Base URL of the service.")],
    folder: Annotated[Path, typer.Argument(help="Spool folder, as attach() wrote it.")] = Path(".tsemon"),
) -> None:
    """Send runs that wait in a spool folder to a service."""
    from tsemon.transport import sync as sync_folder

    results = sync_folder(folder, server)
    for result in results:
        typer.echo(result)
    if not results:
        typer.echo(f"no spools in {folder}: nothing to send")
    if any(result.error for result in results):
        raise typer.Exit(1)


@contextlib.contextmanager
def _leaving_at_ctrl_c() -> Iterator[None]:
    """For slow imports. A KeyboardInterrupt in the middle of PyTorch's is a C++ abort; nothing is there to end yet."""
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _require(*packages: str, extra: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackage(f"this command needs {', '.join(missing)}; pip install 'tsemon[{extra}]'")


app.add_typer(
    admin.app, name="admin", callback=lambda: _require("sqlalchemy", "alembic", "numpy", "zstandard", extra="server")
)
app.add_typer(
    notify_commands.app, name="notify", callback=lambda: _require("sqlalchemy", "alembic", "yaml", extra="server")
)
app.add_typer(rule_commands.app, name="rules", callback=lambda: _require("numpy", "yaml", extra="server"))
