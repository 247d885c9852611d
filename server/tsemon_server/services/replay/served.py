"""Runs that a service holds: it replays them itself, so that no frame travels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tsemon_client import Client
from tsemon_client.commands.finding import find_run
from tsemon_server.rules.documents import load_file
from tsemon_server.services.replay.replaying import Fired, Replayed


def replay_served(server: str, runs: Sequence[str], rules: Path | None) -> Iterator[Replayed]:
    """What comes of runs of a service, by id or name; by the rules in force there where no file is given.

    Raises UnknownRun, InvalidRules and ServerUnreachable.
    """
    if rules is not None:
        load_file(rules)  # the service would say what is wrong in it without its name
    text = None if rules is None else rules.read_text(encoding="utf-8")
    with Client(server) as client:
        for run in runs:
            found = find_run(client, run)
            tried = client.test_rules(found.run_id, text)
            alerts = [Fired(**alert.model_dump()) for alert in tried.alerts]
            yield Replayed(
                run=found.run,
                alerts=alerts,
                incidents=tried.incidents,
                num_frames=tried.num_frames,
                problems=tried.problems,
                not_judged=tried.not_judged,
                waiting=tried.waiting,
            )
