"""`tsemon admin`: what looks after the database. What a command needs beyond the command line is imported inside it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tsemon.errors import InvalidArgument
from tsemon.terminal import Column, examples, print_json, print_table, say
from tsemon_server.options import AnyDatabase, AsJson, url_of

if TYPE_CHECKING:
    from tsemon_server.store import Store
    from tsemon_server.store.ledger.retention import Retention
    from tsemon_server.store.series.checks import Finding

app = typer.Typer(help="Look after the server's database.", no_args_is_help=True)


@app.command(epilog=examples("tsemon admin check", "tsemon admin check --json | jq '.findings | length'"))
def check(database: AnyDatabase = None, as_json: AsJson = False) -> None:
    """Recount everything and verify every checksum; a server may run meanwhile. Exits with 1 if data is damaged."""
    findings: list[Finding] = []
    store = _open(database)
    checked = list(store.check(findings.append))
    if as_json:
        print_json(
            {"runs": [run._asdict() for run in checked], "findings": [finding._asdict() for finding in findings]}
        )
    else:
        counts = ("frames", "settled", "segments", "chunks", "damage")
        damage = Counter(finding.run_id for finding in findings)
        print_table(
            [Column("run"), *(Column(name, right=True) for name in counts)],
            [
                [
                    run.run_id,
                    f"{run.num_hot + run.num_settled:,}",
                    f"{run.num_settled:,}",
                    f"{run.num_segments:,}",
                    f"{run.num_chunks:,}",
                    f"{damage[run.run_id]:,}",
                ]
                for run in checked
            ],
        )
        for finding in findings:
            say(f"damaged: {finding.run_id + ': ' if finding.run_id else ''}{finding.where}: {finding.what}")
        say(f"{store.where}: {f'{len(findings)} findings' if findings else 'all is whole'}")
    store.close()
    if findings:
        raise typer.Exit(1)


@app.command(epilog=examples("tsemon admin vacuum --database sqlite:////var/lib/tsemon/tsemon.db"))
def vacuum(database: AnyDatabase = None) -> None:
    """Free unused space. This blocks writes; stop the server for a large database."""
    store = _open(database)
    if not store.gives_space_back:
        say("this file was made by an older version; from now on it gives space back by itself")
    before, after = store.vacuum()
    say(f"{store.where}: {before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB after")
    store.close()


@app.command(
    epilog=examples(
        "tsemon admin backup tsemon-$(date +%F).db",
        "tsemon admin backup /backup/tsemon.dump --database postgresql://tsemon@db/tsemon",
    )
)
def backup(file: Annotated[Path, typer.Argument(help="A new file.")], database: AnyDatabase = None) -> None:
    """Copy the database into a new file; a server may run meanwhile."""
    from tsemon_server.store.backups import backup as write_backup

    write_backup(url_of(database), file)
    say(f"{file}: {file.stat().st_size / 1e6:,.1f} MB")


@app.command(epilog=examples("tsemon admin restore tsemon-2026-01-31.db --database sqlite:///new.db"))
def restore(
    file: Annotated[Path, typer.Argument(help="The file that `backup` wrote.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the runs that the database holds.")] = False,
    database: AnyDatabase = None,
) -> None:
    """Restore a backup in place of the data in the database. Stop the server first."""
    import time

    from tsemon_server.store.backups import restore as read_backup

    read_backup(url_of(database), file, time.time(), force=force)
    store = _open(database)
    say(f"{store.where}: as in {file}")
    store.close()


@app.command(
    epilog=examples(
        "tsemon admin retention  # show what is set",
        "tsemon admin retention sweeps --samples 30d --rollups 26w --runs 52w",
        "tsemon admin retention sweeps --forever",
    )
)
def retention(
    project: Annotated[str | None, typer.Argument(help="The project to set; all are shown.")] = None,
    samples: Annotated[
        str | None, typer.Option(help="Keep single samples for this time: 12h, 30d, 2w, forever.")
    ] = None,
    rollups: Annotated[str | None, typer.Option(help="Keep rollups of about 16 samples for this time.")] = None,
    runs: Annotated[str | None, typer.Option(help="Delete runs that were last seen this long ago.")] = None,
    forever: Annotated[bool, typer.Option("--forever", help="Reset the times that are not given to forever.")] = False,
    database: AnyDatabase = None,
    as_json: AsJson = False,
) -> None:
    """Show or set how long projects keep data. Dropped data does not come back."""
    from tsemon_answers.runs import RunFilter

    is_set = forever or samples is not None or rollups is not None or runs is not None
    if is_set and project is None:
        raise InvalidArgument(
            "expected a project whose retention is to be set, as in `retention default --samples 30d`"
        )
    store = _open(database)
    if is_set and project is not None:
        _set_retention(store, project, samples, rollups, runs, forever)
    with store.read() as reader:
        shown = [kept for kept in reader.retention.all() if project in (None, kept.project)]
        has_runs = project is None or reader.runs.count(RunFilter(project=project), 1) > 0
    if not has_runs:  # it is kept: they may come
        say(f"the service has no runs of project {project!r}", err=True)
    if as_json:
        print_json([kept._asdict() for kept in shown])
    elif shown:
        for kept in shown:
            say(_line_of(kept))
    else:
        say(f"{'all projects keep' if project is None else f'{project} keeps'} everything for ever")
    store.close()


def _set_retention(
    store: Store, project: str, samples: str | None, rollups: str | None, runs: str | None, forever: bool
) -> None:
    from tsemon_server.durations import seconds_of
    from tsemon_server.store.ledger.retention import Retention

    with store.write() as writer:
        known = next((kept for kept in writer.retention.all() if kept.project == project), Retention(project))
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
        writer.retention.keep(kept)


def _line_of(kept: Retention) -> str:
    from tsemon_server.durations import written_out

    ages = ((name, getattr(kept, f"{name}_s")) for name in ("samples", "rollups", "runs"))
    return f"{kept.project}: " + ", ".join(f"{name} {written_out(age_s)}" for name, age_s in ages)


def _open(database: str | None) -> Store:
    from tsemon_server.store import Store

    return Store(url_of(database), migrate=False)
