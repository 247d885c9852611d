"""What `tsemon replay` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tsemon.errors import InvalidArgument
from tsemon.terminal import say
from tsemon_server.services.replay.many import replay_files, replay_stored
from tsemon_server.services.replay.replaying import Replayed
from tsemon_server.services.replay.report import print_found, to_json


def run(
    files: Sequence[Path],
    rules: Path | None,
    database: str | None,
    server: str | None,
    runs: Sequence[str],
    *,
    as_json: bool,
    alerts: bool = False,
    evidence: bool,
    jobs: int,
) -> bool:
    """Replay and print; whether everything could be read."""
    if not files and not runs:
        raise InvalidArgument("expected files to replay, or runs: --run NAME with --server URL or --database URL")
    if len([where for where in (database, server) if where is not None]) != bool(runs):
        raise InvalidArgument(
            "--run names a run of a service or a database: expected it with either --server or --database"
        )
    results = [*(replay_files(files, rules, jobs) if files else ())]
    if database is not None:
        results += replay_stored(database, runs, rules)
    if server is not None:
        from tsemon_server.services.replay.served import replay_served

        results += replay_served(server, runs, rules)
    found = [result for result in results if isinstance(result, Replayed)]
    refused = [result for result in results if isinstance(result, str)]
    print(to_json(found, evidence=evidence)) if as_json else print_found(
        found, alerts=alerts, evidence=evidence, has_own_rules=rules is not None
    )
    for problem in _problems(found, refused):
        say(f"tsemon: {problem}", err=True)
    return not refused


def _problems(found: Sequence[Replayed], refused: Sequence[str]) -> Iterator[str]:
    yield from refused
    for result in found:
        yield from result.problems
