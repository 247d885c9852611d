"""The commands of `tsemon`. What a command needs beyond the command line is imported inside it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

import tsemon
from tsemon.errors import InvalidArgument, MissingPackage, one_of
from tsemon.terminal import Column, examples, print_json, print_table, progress_bar, say
from tsemon_client.commands import alerts, incidents, runs, series, silence, sub_step, tail
from tsemon_client.commands.completion import complete_run
from tsemon_client.commands.options import DEFAULT_SERVER, LOOK, Server
from tsemon_server import admin, rule_commands
from tsemon_server.access import commands as token_commands
from tsemon_server.notify import commands as notify_commands

TRAIN, BRING, SERVE = "Train", "Bring runs", "Serve"
"""Where the help shows the commands that are no mere looking."""
EACH_CPU = "one for each CPU"
"""How the help shows a default that depends on the machine."""

app = typer.Typer(
    help="Looks inside transformers while they train.",
    epilog=examples(
        "tsemon demo  # see it at work, in two minutes",
        "tsemon serve  # start the server",
        "tsemon runs  # what there is",
        "tsemon tail  # watch the latest run",
        "tsemon --install-completion  # names of runs and metrics at Tab",
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
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


@app.command(
    rich_help_panel=SERVE,
    epilog=examples(
        "tsemon serve",
        "tsemon serve --port 9000 --database sqlite:////var/lib/tsemon/tsemon.db",
        "tsemon serve --spool .tsemon  # show a spool directory, without a database",
        "tsemon serve --host 0.0.0.0 --allowed-host gpu1 --notify notify.yaml",
    ),
)
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
        typer.Option(help="Spool directory to show, read-only, in place of a database (TSEMON_SPOOL)."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of server processes (TSEMON_WORKERS, default 1).", min=1, max=64)
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="json, text, or auto: text on a terminal (TSEMON_LOG_FORMAT, default auto).")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error (TSEMON_LOG_LEVEL, default info).")
    ] = None,
    notify: Annotated[str | None, typer.Option(help="YAML file with the receivers of alerts (TSEMON_NOTIFY).")] = None,
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="Require tokens also at a loopback address, as behind a proxy (TSEMON_TOKENS)."),
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Another host name of the server, besides its address. Repeatable (TSEMON_HOSTS)."),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Require no tokens: anyone who reaches the address can change everything."),
    ] = False,
) -> None:
    """Start the server: REST API, alerts, Prometheus metrics and web UI."""
    _require("fastapi", "uvicorn", "sqlalchemy", "alembic", extra="server")
    from tsemon_server.logs import LOG_FORMATS, LOG_LEVELS
    from tsemon_server.main import serve as serve_forever
    from tsemon_server.settings import host_names, settings_from_environment

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
            log_format=one_of(LOG_FORMATS, log_format, "--log-format") or settings.log_format,
            log_level=one_of(LOG_LEVELS, log_level, "--log-level") or settings.log_level,
            notify=settings.notify if notify is None else notify,
            tokens=settings.tokens or tokens,
            hosts=settings.hosts if allowed_host is None else host_names(allowed_host),
            insecure=insecure,
        )
    )


@app.command(
    rich_help_panel=TRAIN,
    epilog=examples(
        "tsemon demo",
        "tsemon demo --text --port 9000",
    ),
)
def demo(
    text: Annotated[
        bool, typer.Option("--text", help="Language models on Python's sources instead of digits.")
    ] = False,
    port: Annotated[
        int, typer.Option(help="Port of the server; another free one if it is taken.", min=0, max=65535)
    ] = 8731,
    database: Annotated[Path, typer.Option(help="File that keeps the demo's runs.")] = Path(".tsemon/demo.db"),
) -> None:
    """Train a deep post-norm transformer and a de-escalated one; within a minute or two the first one fails."""
    _require("fastapi", "uvicorn", "sqlalchemy", "alembic", "httpx", "sklearn", "torch", extra="demo")
    with _leaving_at_ctrl_c():
        from tsemon.lab.demo import run_demo
        from tsemon.lab.demo.twins import DIGITS, TEXT

    run_demo(TEXT if text else DIGITS, port=port, database=database)


@app.command(
    rich_help_panel=TRAIN,
    epilog=examples(
        "tsemon reproduce list",
        "tsemon reproduce all --quick",
        "tsemon reproduce escalation --out paper",
    ),
)
def reproduce(
    name: Annotated[str, typer.Argument(help="An experiment, or `all`. `list` names them.")],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller and fewer: minutes instead of an hour.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for pages, figures and numbers.")] = Path("reproduction"),
    jobs: Annotated[
        int, typer.Option(help="Parts of experiments at a time, one thread each.", min=1, show_default=EACH_CPU)
    ] = os.cpu_count() or 1,
    seed: Annotated[int, typer.Option(help="Other random numbers. The pages in docs have 0.", min=0)] = 0,
) -> None:
    """Repeat the papers' experiments.

    Writes pages with the papers' statements beside our figures. If it is
    interrupted, the same command continues with the rest. TSEMON_TEXT names the files or
    folders of text, as in PATH, on which value-residual-82m trains.
    """
    _require("matplotlib", "numpy", "sklearn", "torch", "transformers", extra="reproduce")
    with _leaving_at_ctrl_c():
        from tsemon.lab.reproduce import EXPERIMENTS, available
        from tsemon.lab.reproduce import reproduce as run

    if name == "list":
        print_table(
            [Column("experiment"), Column("what it shows", wraps=True)],
            [
                [known.name, f"{known.title} ({known.source})" + (f"; {known.chosen_by}" if known.chosen_by else "")]
                for known in EXPERIMENTS.values()
            ],
        )
        return
    with _raising_at_termination(), progress_bar() as (tell, progress):
        names = available() if name == "all" else [name]
        index = run(names, out, quick=quick, jobs=jobs, seed=seed, tell=tell, progress=progress)
    say(f"all in one table: {index}")


@app.command(
    rich_help_panel=TRAIN,
    epilog=examples(
        "tsemon train --list",
        "tsemon train small-digits --steps 500 --run try-1",
        "tsemon train small-digits --set sizes.depth=8 --set seed=1",
        "tsemon train small-digits --run try-1 --resume",
    ),
)
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
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    checkpoints: Annotated[Path, typer.Option(help="Folder of checkpoints, one below it for each run.")] = Path(
        "checkpoints"
    ),
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints (default: a tenth of all).", min=1)
    ] = None,
    keep: Annotated[int, typer.Option(help="Checkpoints to keep, the newest ones.", min=1)] = 2,
    monitor: Annotated[bool, typer.Option("--monitor/--no-monitor", help="Watch the run with tsemon.")] = True,
    every: Annotated[
        int | None, typer.Option(help="Steps between samples (default: within 1 % of the time).", min=1)
    ] = None,
    server: Annotated[str | None, typer.Option(envvar="TSEMON_SERVER", help="Base URL of the server.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show the recipes and exit.")] = False,
) -> None:
    """Train a reference model.

    `torchrun --nproc-per-node 8 -m tsemon train ...` shares the work among
    processes.
    """
    _require("numpy", "rich", "torch", extra="train")
    with _leaving_at_ctrl_c():
        from tsemon.lab.train.command import Options, run_recipe
        from tsemon.lab.train.recipe import changed
        from tsemon.lab.train.recipes import RECIPES, recipe_named
    if show_list or recipe is None:
        for known in RECIPES.values():
            say(f"{known.name}\n    {known.about}")
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


@app.command(
    rich_help_panel=LOOK,
    epilog=examples(
        "tsemon replay run.jsonl.gz .tsemon",
        "tsemon replay --server http://127.0.0.1:8731 --run vision/vit-80 --evidence",
        "tsemon replay run.jsonl.gz --rules mine.yaml --json",
    ),
)
def replay(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="Traces (.jsonl, .jsonl.gz), spool directories, or folders of either."),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(help="File of rules to use instead of the built-in ones.", exists=True, dir_okay=False),
    ] = None,
    database: Annotated[str | None, typer.Option(help="Database URL that holds the runs of --run.")] = None,
    server: Annotated[str | None, typer.Option(help="Base URL of a server that holds the runs of --run.")] = None,
    runs: Annotated[
        list[str] | None,
        typer.Option(
            "--run",
            help="Id or name of a stored run, or project/name of a server's. Repeatable.",
            autocompletion=complete_run,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the incidents and alerts as JSON.")] = False,
    alerts: Annotated[bool, typer.Option("--alerts", help="Also list each alert of the incidents.")] = False,
    evidence: Annotated[bool, typer.Option("--evidence", help="Show what each rule saw, and its advice.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes that read files.", min=1, show_default=EACH_CPU)] = os.cpu_count()
    or 1,
) -> None:
    """Run the rules on recorded runs and print the incidents.

    The runs are in files, spools, a server or a database. If a recording cannot
    be read, the others are shown, and the exit code is 1.
    """
    _require("numpy", "pydantic", "rich", "sqlalchemy", "yaml", extra="server")
    from tsemon_server.services.replay import command

    shown = {"as_json": as_json, "alerts": alerts, "evidence": evidence}
    if not command.run(files or (), rules, database, server, runs or (), **shown, jobs=jobs):
        raise typer.Exit(1)


@app.command(
    rich_help_panel=BRING,
    epilog=examples(
        "tsemon sync --server http://gpu1:8731",
        "tsemon sync /scratch/.tsemon --server http://gpu1:8731 --json",
    ),
)
def sync(
    folder: Annotated[Path, typer.Argument(help="Spool directory, as attach() wrote it.")] = Path(".tsemon"),
    server: Server = DEFAULT_SERVER,
    as_json: Annotated[bool, typer.Option("--json", help="Print what became of each spool as JSON.")] = False,
) -> None:
    """Send the runs of a spool directory to a server.

    Exits with 1 if a run could not be sent completely.
    """
    from tsemon.transport import sync as sync_folder

    results = sync_folder(folder, server)
    if as_json:
        print_json([result.as_dict() for result in results])
    elif not results:
        say(f"no spools in {folder}: nothing to send")
    else:
        for result in results:
            say(str(result))
    if any(result.error for result in results):
        raise typer.Exit(1)


def _check_is_named(name: str | None) -> str | None:
    if name is not None and not name.strip():
        raise typer.BadParameter("expected a name, got an empty one")
    return name


@app.command(
    "import",
    rich_help_panel=BRING,
    epilog=examples(
        "tsemon import runs/ --dry-run  # show names, layers and left-out values; send nothing",
        "tsemon import wandb wandb/  # the kind, then the folder",
        "tsemon import mlflow.db --only 'gpt*'",
        "tsemon import runs/ --pattern 'attn_{name}_L{layer}' --map entropy=attention_entropy",
    ),
)
def import_runs(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="[KIND] PATH...",
            help="Files or folders, after their kind where it cannot be seen: tfevents, wandb, mlflow, table, neptune.",
        ),
    ],
    server: Annotated[
        str | None, typer.Option(help=f"Base URL of the server (TSEMON_SERVER, default {DEFAULT_SERVER}).")
    ] = None,
    spool: Annotated[
        Path | None,
        typer.Option(help="Write into this spool directory instead; `tsemon sync` sends it.", file_okay=False),
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(help="Project of the runs (default: the source's, or default).", callback=_check_is_named),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(help="Name of the run, where there is one (default: the source's).", callback=_check_is_named),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Names of runs to import, with * and ?. Repeatable.", metavar="NAME")
    ] = None,
    patterns: Annotated[
        list[str] | None,
        typer.Option(
            "--pattern",
            help="How names fold into layers, as in 'attn_{name}_L{layer}', or a regular expression with groups `layer` and "
            "`name`. Repeatable; goes before the built-in ones.",
        ),
    ] = None,
    same: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="NAME=METRIC",
            help="Metric for a name, before or after the fold: attn.entropy=attention_entropy. Repeatable.",
        ),
    ] = None,
    step_column: Annotated[str | None, typer.Option(help="Column of the step in a table.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Hide frames of a run of this name that are from another source.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be imported, and under which names.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what became of each run as JSON.")] = False,
) -> None:
    """Import runs of TensorBoard, W&B, MLflow or Neptune, or tables. If repeated, import only new rows.

    If a file or a part of it cannot be read, the rest is imported, and the exit code is 1.
    """
    _require("rich", extra="client")
    from tsemon.tools.importing import command
    from tsemon.tools.importing.naming import Naming

    if server is not None and spool is not None:
        raise InvalidArgument("expected --server or --spool, got both")
    pairs = [pair.rpartition("=") for pair in same or ()]
    try:
        naming = Naming(tuple(patterns or ()), tuple((name, metric) for name, _, metric in pairs))
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None
    if wrong := next((metric for name, _, metric in pairs if not name), None):
        raise typer.BadParameter(f"--map takes NAME=METRIC, got {wrong!r}")
    if not command.run(
        sources,
        server=server or os.environ.get("TSEMON_SERVER") or DEFAULT_SERVER,
        spool=spool,
        project=project,
        name=run,
        only=only or (),
        naming=naming,
        step_column=step_column,
        replace=replace,
        dry_run=dry_run,
        as_json=as_json,
    ):
        raise typer.Exit(1)


@app.command(
    rich_help_panel=BRING,
    epilog=examples(
        "tsemon scan checkpoints/my-run",
        "tsemon scan checkpoints/my-run --server http://127.0.0.1:8731 --project old --run t5-norms",
        "tsemon scan checkpoints/my-run --text book.txt  # saturation on your text",
        r"tsemon scan checkpoints/my-run --step-pattern 'epoch_(\d+)' --json",
        "tsemon scan checkpoints/my-run --follow  # continue while the training writes more",
    ),
)
def scan(
    folder: Annotated[Path, typer.Argument(help="Folder of checkpoints: PyTorch's, safetensors, or folders of those.")],
    run: Annotated[
        str | None, typer.Option(help="Name of the run (default: the folder's and -scan).", callback=_check_is_named)
    ] = None,
    project: Annotated[str, typer.Option(help="Project of the run.", callback=_check_is_named)] = "default",
    server: Annotated[str | None, typer.Option(help="Base URL of the server (TSEMON_SERVER).")] = None,
    spool: Annotated[
        Path | None, typer.Option(help="Spool directory to write to (default: .tsemon, without a server).")
    ] = None,
    step_pattern: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help=r"Finds the step in a name, as its only group: 'model_(\d+)\.pt'."),
    ] = None,
    blocks: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Stack of blocks, where none is found: transformer.h. Repeatable."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text on which saturation is measured.")] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Token ids on which saturation is measured: JSON, a list or lists.")
    ] = None,
    saturation: Annotated[
        bool, typer.Option("--saturation/--no-saturation", help="Build the model, where it is known, and run it.")
    ] = True,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for further checkpoints until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that was found as one JSON document.")] = False,
) -> None:
    """Compute norms, their growth, direction and saturation over the checkpoints of a folder, and store a run."""
    _require("rich", "torch", extra="scan")
    with _leaving_at_ctrl_c():
        from tsemon.tools.scanning.command import Options, run_scan
    run_scan(
        Options(
            folder=folder,
            run=run,
            project=project,
            server=server,
            spool=spool,
            step_pattern=step_pattern,
            blocks=tuple(blocks or ()),
            text=text,
            tokens=tokens,
            saturation=saturation,
            follow=follow,
            as_json=as_json,
        )
    )


@contextlib.contextmanager
def _leaving_at_ctrl_c() -> Iterator[None]:
    """For slow imports. A KeyboardInterrupt in the middle of PyTorch's is a C++ abort; nothing is there to end yet."""
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _raising_at_termination() -> Iterator[None]:
    """For commands with processes of their own, which would otherwise outlive them."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    for one, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(one, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _require(*packages: str, extra: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackage(f"this command needs {', '.join(missing)}; pip install 'tsemon[{extra}]'")


def _requiring(*packages: str) -> Callable[[], None]:
    return lambda: _require(*packages, extra="server")


for known in (runs, series, incidents, sub_step, alerts, tail, silence):
    app.add_typer(known.app)
for name, commands, needed in (
    ("admin", admin.app, ("sqlalchemy", "alembic", "numpy", "zstandard")),
    ("token", token_commands.app, ("sqlalchemy", "alembic")),
    ("notify", notify_commands.app, ("sqlalchemy", "alembic", "yaml")),
    ("rules", rule_commands.app, ("numpy", "yaml")),
):
    app.add_typer(commands, name=name, rich_help_panel=SERVE, callback=_requiring(*needed))
