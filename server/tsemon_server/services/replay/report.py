"""What came of replayed recordings, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tsemon.terminal import Cell, Column, count, print_json, print_table, say
from tsemon_server.services.replay.replaying import Fired, Replayed

STYLES = {"critical": "bold red", "warning": "yellow", "info": "dim"}


def to_json(results: Sequence[Replayed], *, evidence: bool) -> str:
    """One list of runs with the alerts that fired on each."""
    return json.dumps(
        [{"run": result.run, "alerts": [_alert(alert, evidence) for alert in result.alerts]} for result in results],
        indent=2,
    )


def _alert(alert: Fired, evidence: bool) -> dict[str, Any]:
    hidden = () if evidence else ("evidence", "advice")
    return {name: value for name, value in vars(alert).items() if name not in hidden}


def print_found(results: Sequence[Replayed], *, evidence: bool) -> None:
    """A row for each alert, and a last line that counts."""
    steps = [Column(name, right=True) for name in ("fired", "resolved")]
    rows: list[list[Cell]] = [
        [
            (result.run, STYLES[alert.severity]),
            (alert.rule, STYLES[alert.severity]),
            (alert.severity, STYLES[alert.severity]),
            count(alert.firing_step),
            count(alert.resolved_step),
            alert.summary,
        ]
        for result in results
        for alert in result.alerts
    ]
    if rows:
        print_table(
            [Column("run", flexible=True), Column("rule"), Column("severity"), *steps, Column("summary", wraps=True)],
            rows,
        )
    for result in results if evidence else ():
        for alert in result.alerts:
            _print_evidence(result.run, alert)
    say(_counted(results))


def _print_evidence(run: str, alert: Fired) -> None:
    say(f"\n{run}: {alert.rule} at step {alert.firing_step:,}")
    say(f"{alert.summary}\n\n{alert.advice.get('text', '')}\n")
    print_json(alert.evidence)


def _counted(results: Sequence[Replayed]) -> str:
    alerts = [alert for result in results for alert in result.alerts]
    severities = Counter(alert.severity for alert in alerts)
    shown = ", ".join(f"{severities[severity]} {severity}" for severity in STYLES if severities[severity])
    num_fired = sum(bool(result.alerts) for result in results)
    num_frames = sum(result.num_frames for result in results)
    counts = f"runs: {len(results):,}, with alerts: {num_fired:,}; frames: {num_frames:,}; alerts: {len(alerts):,}"
    return f"{counts} ({shown})" if shown else counts
