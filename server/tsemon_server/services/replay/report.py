"""What came of replayed recordings, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tsemon.terminal import Cell, Column, count, print_json, print_table, say
from tsemon_answers.rules import NotJudged
from tsemon_server.rules.checking import Lack
from tsemon_server.services.replay.replaying import Fired, Replayed

STYLES = {"critical": "bold red", "warning": "yellow", "info": "dim"}


def to_json(results: Sequence[Replayed], *, evidence: bool) -> str:
    """One list of runs with the alerts that fired on each, and the rules that were never evaluated."""
    return json.dumps([_result(result, evidence) for result in results], indent=2)


def _result(result: Replayed, evidence: bool) -> dict[str, Any]:
    return {
        "run": result.run,
        "alerts": [_alert(alert, evidence) for alert in result.alerts],
        "incidents": [verdict.model_dump() for verdict in result.incidents],
        "not_judged": [one.model_dump() for one in result.not_judged],
    }


def _alert(alert: Fired, evidence: bool) -> dict[str, Any]:
    hidden = () if evidence else ("evidence", "advice")
    return {name: value for name, value in vars(alert).items() if name not in hidden}


def print_found(results: Sequence[Replayed], *, evidence: bool, has_own_rules: bool) -> None:
    """Print a row for each alert, the rules that were never evaluated, and a last line that counts.

    Many runs lack metrics of some built-in rules, so those rules are only counted.
    """
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
    for result in results if has_own_rules else ():
        for unknown in result.not_judged:
            say(_unknown(result.run, result.num_frames, unknown))
    num_unknown = len({unknown.rule for result in results for unknown in result.not_judged})
    if num_unknown and not has_own_rules:
        say(
            f"rules that were never evaluated on some of these runs: {num_unknown}; --json names the metrics that they lack"
        )
    say(_counted(results))


def _unknown(run: str, num_frames: int, rule: NotJudged) -> str:
    lacks = [str(Lack(one.kind, one.name, one.nearest)) for one in rule.lacks]
    why = f"the run has {' and '.join(lacks)}" if lacks else _OTHERWISE.format(num_frames)
    return f"{run}: rule {rule.rule} was never evaluated: {why}"


_OTHERWISE = "its condition was unknown in all {} frames, for example because a layer is missing or a window is longer"


def _print_evidence(run: str, alert: Fired) -> None:
    say(f"\n{run}: {alert.rule} at step {alert.firing_step:,}")
    say(f"{alert.summary}\n\n{alert.advice.get('text', '')}\n")
    print_json(alert.evidence)


def _counted(results: Sequence[Replayed]) -> str:
    alerts = [alert for result in results for alert in result.alerts]
    severities: Counter[str] = Counter(alert.severity for alert in alerts)
    shown = ", ".join(f"{severities[severity]} {severity}" for severity in STYLES if severities[severity])
    num_fired = sum(bool(result.alerts) for result in results)
    num_frames = sum(result.num_frames for result in results)
    counts = f"runs: {len(results):,}, with alerts: {num_fired:,}; frames: {num_frames:,}; alerts: {len(alerts):,}"
    return f"{counts} ({shown})" if shown else counts
