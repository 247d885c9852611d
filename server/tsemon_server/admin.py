"""`tsemon admin`: what looks after the database. What a command needs beyond the command line is imported inside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tsemon.errors import InvalidArgument

if TYPE_CHECKING:
    from tsemon_server.store import Finding, Retention, Store

app = typer.Typer(help="Look after the service's database.", no_args_is_help=True)

AnyDatabase = Annotated[
    str | None, typer.Option("--database", help="Database URL (TSEMON_DATABASE, default sqlite:///tsemon.db).")
]


@app.command()
def check(database: AnyDatabase = None) -> None:
    """Recount everything and decode every checksum. Changes nothing, works beside a service; exits 1 at damage."""
    findings: list[Finding] = []
    store = _open(database)
    typer.echo(f"{'run':<16} {'frames':>10} {'settled':>10} {'segments':>9} {'chunks':>9} {'damage':>7}")
    for run in store.check(findings.append):
        num_found = sum(finding.run_id == run.run_id for finding in findings)
        typer.echo(
            f"{run.run_id:<16} {run.num_hot + run.num_settled:>10,} {run.num_settled:>10,} {run.num_segments:>9,} "
            f"{run.num_chunks:>9,} {num_found:>7,}"
        )
    for finding in findings:
        typer.echo(f"damaged: {finding.run_id + ': ' if finding.run_id else ''}{finding.where}: {finding.what}")
    typer.echo(f"{store.where}: {f'{len(findings)} findings' if findings else 'all is whole'}")
    store.close()
    if findings:
        raise typer.Exit(1)


@app.command()
def vacuum(database: AnyDatabase = None) -> None:
    """Give back all space that holds nothing. Nobody can write meanwhile; stop the service for a large database."""
    store = _open(database)
    if not store.gives_space_back:
        typer.echo("this file was made by an older version; from now on it gives space back by itself")
    before, after = store.vacuum()
    typer.echo(f"{store.where}: {before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB after")
    store.close()


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="A new file.")],
    database: AnyDatabase = None,
) -> None:
    """Copy the database as it is now into a file, while the service goes on."""
    from tsemon_server.store import backup as write_backup

    write_backup(_url(database), file)
    typer.echo(f"{file}: {file.stat().st_size / 1e6:,.1f} MB")


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(help="What `backup` wrote.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the runs that the database holds.")] = False,
    database: AnyDatabase = None,
) -> None:
    """Put a backup in place of what the database holds. Stop the service first."""
    import time

    from tsemon_server.store import restore as read_backup

    read_backup(_url(database), file, time.time(), force=force)
    store = _open(database)
    typer.echo(f"{store.where}: as in {file}")
    store.close()


@app.command()
def retention(
    project: Annotated[str | None, typer.Argument(help="The project to set; all are shown.")] = None,
    samples: Annotated[str | None, typer.Option(help="Keep single samples so long: 12h, 30d, 2w, forever.")] = None,
    rollups: Annotated[str | None, typer.Option(help="Keep rollups of about 16 samples so long.")] = None,
    runs: Annotated[str | None, typer.Option(help="Delete runs that were not heard of for so long.")] = None,
    forever: Annotated[bool, typer.Option("--forever", help="Keep all that is not given for ever.")] = False,
    database: AnyDatabase = None,
) -> None:
    """Show or set how long projects keep what they have. What is dropped does not come back."""
    is_set = forever or samples is not None or rollups is not None or runs is not None
    if is_set and project is None:
        raise InvalidArgument(
            "expected a project whose retention is to be set, as in `retention default --samples 30d`"
        )
    store = _open(database)
    if is_set and project is not None:
        _set_retention(store, project, samples, rollups, runs, forever)
    with store.read() as reader:
        shown = [kept for kept in reader.retentions() if project in (None, kept.project)]
    for kept in shown:
        typer.echo(_line_of(kept))
    if not shown:
        typer.echo(f"{'all projects keep' if project is None else f'{project} keeps'} everything for ever")
    store.close()


def _set_retention(
    store: Store, project: str, samples: str | None, rollups: str | None, runs: str | None, forever: bool
) -> None:
    from tsemon_server.durations import seconds_of
    from tsemon_server.store import Retention

    with store.write() as writer:
        known = next((kept for kept in writer.retentions() if kept.project == project), Retention(project))
        before = Retention(project) if forever else known
        kept = Retention(
            project,
            before.samples_s if samples is None else seconds_of(samples),
            before.rollups_s if rollups is None else seconds_of(rollups),
            before.runs_s if runs is None else seconds_of(runs),
        )
        if kept.rollups_s is not None and (kept.samples_s is None or kept.samples_s > kept.rollups_s):
            raise InvalidArgument(
                f"expected rollups to be kept at least as long as samples, got {_line_of(kept)}; "
                "samples are what takes the room"
            )
        writer.keep_for(kept)


def _line_of(kept: Retention) -> str:
    from tsemon_server.durations import written_out

    ages = ((name, getattr(kept, f"{name}_s")) for name in ("samples", "rollups", "runs"))
    return f"{kept.project}: " + ", ".join(f"{name} {written_out(age_s)}" for name, age_s in ages)


def _url(database: str | None) -> str:
    from tsemon_server.settings import settings_from_environment

    return settings_from_environment().database if database is None else database


def _open(database: str | None) -> Store:
    from tsemon_server.store import Store

    return Store(_url(database), migrate=False)
