"""The incidents and alerts of replayed recordings, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tsemon.terminal import Cell, Column, count, print_facts, print_json, print_line, print_table, say, terminal
from tsemon_answers.incidents import Verdict
from tsemon_answers.rules import NotJudged
from tsemon_server.rules.checking import Lack
from tsemon_server.services.replay.replaying import Fired, Replayed

STYLES = {"critical": "bold red", "warning": "yellow", "info": "dim"}
NUM_WAITING_SHOWN = 3
STATE_STYLES = {"open": "bold red", "recovered": "green", "ended": "yellow"}


def to_json(results: Sequence[Replayed], *, evidence: bool) -> str:
    """One list of runs with the alerts that fired on each, and the rules that were never evaluated or could not fire."""
    return json.dumps([_result(result, evidence) for result in results], indent=2)


def _result(result: Replayed, evidence: bool) -> dict[str, Any]:
    return {
        "run": result.run,
        "alerts": [_alert(alert, evidence) for alert in result.alerts],
        "incidents": [verdict.model_dump() for verdict in result.incidents],
        "not_judged": [one.model_dump() for one in result.not_judged],
        "waiting": [one.model_dump() for one in result.waiting],
    }


def _alert(alert: Fired, evidence: bool) -> dict[str, Any]:
    hidden = () if evidence else ("evidence", "advice")
    return {name: value for name, value in vars(alert).items() if name not in hidden}


def print_found(results: Sequence[Replayed], *, alerts: bool, evidence: bool, has_own_rules: bool) -> None:
    """Print the incidents of each run, the rules that were never evaluated or could not fire, and a last line that counts.

    `alerts` adds a row for each alert. Without it, only alerts that belong to no incident have a row.
    Many runs lack metrics of some built-in rules, so those rules are only counted.
    """
    _print_incidents([(result, one) for result in results for one in result.incidents])
    _print_alerts(
        [(result.run, one) for result in results for one in result.alerts if alerts or _is_alone(one, result)]
    )
    for result in results if evidence else ():
        for alert in result.alerts:
            _print_evidence(result.run, alert)
    for result in results if has_own_rules else ():
        for unknown in result.not_judged:
            say(_unknown(result.run, result.num_frames, unknown))
    num_unknown = len({unknown.rule for result in results for unknown in result.not_judged})
    if num_unknown and not has_own_rules:
        say(f"rules that were never evaluated on some of these runs: {num_unknown}; --json says why")
    waiting = {one.rule: one.waits_for for result in results for one in result.waiting}
    if waiting:
        shown = [f"{rule} needs {text}" for rule, text in waiting.items()][:NUM_WAITING_SHOWN]
        more = [f"{len(waiting) - len(shown)} others; --json lists them"] if len(waiting) > len(shown) else []
        say(f"rules that could not fire on some of these runs: {', '.join([*shown, *more])}")
    say(_counted(results))


def _is_alone(alert: Fired, result: Replayed) -> bool:
    return not any(alert.rule in one.alerts for one in result.incidents)


def _print_incidents(found: Sequence[tuple[Replayed, Verdict]]) -> None:
    """Print a few lines per incident on a terminal, and a row in a pipe."""
    rows = [_cells(result, one) for result, one in found]
    if terminal() is None:
        columns = [Column(name, right=name in ("since", "fired")) for row in rows[:1] for name in row]
        if rows:
            print_table(columns, [[*row.values()] for row in rows])
        return
    for row in rows:
        where = [] if row["where"] == "-" else [row["where"]]
        head = ((str(row["run"]), "bold"), row["state"], row["severity"], row["family"], *where)
        print_line(*head, f"since step {row['since']}", f"fired at {row['fired']}")
        print_facts([("", f"{row['rule']}: {row['title']}")], indent=7, name_width=0)
        if row["also fired"] != "-":
            print_facts([("", (f"also fired: {row['also fired']}", "dim"))], indent=7, name_width=0)


def _cells(result: Replayed, one: Verdict) -> dict[str, Cell]:
    return {
        "run": result.run,
        "state": (one.state, STATE_STYLES[one.state]),
        "severity": (one.severity, STYLES[one.severity]),
        "family": one.family,
        "rule": one.rule,
        "where": one.where or "-",
        "since": count(one.left_step),
        "fired": count(one.step),
        "title": _title(one.rule, result.alerts),
        "also fired": ", ".join(one.alerts[1:]) or "-",
    }


def _title(rule: str, alerts: Iterable[Fired]) -> str:
    """The title of a rule, with which the summaries of its alerts begin."""
    return next((alert.summary.partition(": ")[0].removesuffix(".") for alert in alerts if alert.rule == rule), rule)


def _print_alerts(alerts: Sequence[tuple[str, Fired]]) -> None:
    steps = [Column(name, right=True) for name in ("fired", "resolved")]
    rows: list[list[Cell]] = [
        [
            (run, STYLES[alert.severity]),
            (alert.rule, STYLES[alert.severity]),
            (alert.severity, STYLES[alert.severity]),
            count(alert.firing_step),
            count(alert.resolved_step),
            alert.summary,
        ]
        for run, alert in alerts
    ]
    if rows:
        print_table(
            [Column("run", flexible=True), Column("rule"), Column("severity"), *steps, Column("summary", wraps=True)],
            rows,
        )


def _unknown(run: str, num_frames: int, rule: NotJudged) -> str:
    lacks = [str(Lack(one.kind, one.name, one.nearest)) for one in rule.lacks]
    why = f"the run has {' and '.join(lacks)}" if lacks else _OTHERWISE.format(num_frames, rule.waits_for)
    return f"{run}: rule {rule.rule} was never evaluated: {why}"


_OTHERWISE = "its condition was unknown in all {} frames: a layer is missing, or it needs {}"


def _print_evidence(run: str, alert: Fired) -> None:
    say(f"\n{run}: {alert.rule} at step {alert.firing_step:,}")
    say(f"{alert.summary}\n\n{alert.advice.get('text', '')}\n")
    print_json(alert.evidence)


def _counted(results: Sequence[Replayed]) -> str:
    alerts = [alert for result in results for alert in result.alerts]
    severities: Counter[str] = Counter(alert.severity for alert in alerts)
    shown = ", ".join(f"{severities[severity]} {severity}" for severity in STYLES if severities[severity])
    num_incidents = sum(len(result.incidents) for result in results)
    num_failing = sum(bool(result.incidents) for result in results)
    num_frames = sum(result.num_frames for result in results)
    counts = (
        f"runs: {len(results):,}, with incidents: {num_failing:,}; frames: {num_frames:,}; "
        f"incidents: {num_incidents:,}; alerts: {len(alerts):,}"
    )
    return f"{counts} ({shown})" if shown else counts
