"""What came of replayed recordings, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from tsemon_server.replay.replaying import Fired, Replayed

STYLES = {"critical": "bold red", "warning": "yellow", "info": "dim"}
PLAIN_WIDTH = 160
"""Characters in a line where the output is no terminal."""


def to_json(results: Sequence[Replayed], *, evidence: bool) -> str:
    """One list of runs with the alerts that fired on each."""
    return json.dumps(
        [{"run": result.run, "alerts": [_alert(alert, evidence) for alert in result.alerts]} for result in results],
        indent=2,
    )


def _alert(alert: Fired, evidence: bool) -> dict[str, Any]:
    fields = (
        alert.__dict__ if evidence else {k: v for k, v in alert.__dict__.items() if k not in ("evidence", "advice")}
    )
    return dict(fields)


def print_table(results: Sequence[Replayed], *, evidence: bool) -> None:
    """A line for each alert, and a last one that counts."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    steps = [Column(name, justify="right") for name in ("fired", "resolved")]
    table = Table("run", "rule", "severity", *steps, "summary", box=box.SIMPLE)
    for result in results:
        for alert in result.alerts:
            resolved = "-" if alert.resolved_step is None else f"{alert.resolved_step:,}"
            cells = (result.run, alert.rule, alert.severity, f"{alert.firing_step:,}", resolved, alert.summary)
            table.add_row(*map(escape, cells), style=STYLES[alert.severity])
    if table.row_count:
        console.print(table)
    for result in results if evidence else ():
        for alert in result.alerts:
            _print_evidence(console, result.run, alert)
    console.print(_counted(results), highlight=False)


def _print_evidence(console: Console, run: str, alert: Fired) -> None:
    console.rule(f"{escape(run)}: {alert.rule} at step {alert.firing_step:,}", align="left")
    console.print(f"{alert.summary}\n\n{alert.advice.get('text', '')}\n", markup=False, highlight=False)
    console.print_json(data=alert.evidence)


def _counted(results: Sequence[Replayed]) -> str:
    alerts = [alert for result in results for alert in result.alerts]
    severities = Counter(alert.severity for alert in alerts)
    shown = ", ".join(f"{severities[severity]} {severity}" for severity in STYLES if severities[severity])
    num_fired = sum(bool(result.alerts) for result in results)
    num_frames = sum(result.num_frames for result in results)
    counts = f"runs: {len(results):,}, with alerts: {num_fired:,}; frames: {num_frames:,}; alerts: {len(alerts):,}"
    return f"{counts} ({shown})" if shown else counts
