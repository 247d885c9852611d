"""What became of the trainings, as tables in Markdown."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

import torch

from trials.judging import NEVER, Summary, Verdict
from trials.runs import KEPT_BACK


def conditions(num_trainings: int) -> str:
    """Where, when and on what."""
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, one thread of {platform.machine()}, torch {torch.__version__}, Python "
        f"{platform.python_version()}; {num_trainings} trainings\n"
    )


def report(verdicts: Sequence[Verdict]) -> str:
    """All tables, and what they leave out."""
    return "\n".join("\n".join(lines) + "\n" for lines in (*_tables(verdicts).values(), _notes(verdicts)))


def page(text: str, verdicts: Sequence[Verdict]) -> str:
    """The text with each table between its marks."""
    return filled(text, _tables(verdicts))


def filled(text: str, tables: Mapping[str, Sequence[str]]) -> str:
    """The same for any tables."""
    for name, lines in tables.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)", re.DOTALL)
        assert marked.search(text), f"the page has lost its marks around {name}"
        text = marked.sub(lambda found, lines=lines: found[1] + "\n".join(lines) + found[2], text)
    return text


def _tables(verdicts: Sequence[Verdict]) -> dict[str, list[str]]:
    harmed = [verdict for verdict in verdicts if verdict.is_harmed]
    healthy = [verdict for verdict in verdicts if not verdict.trial.is_failing]
    return {
        "conditions": [conditions(len(verdicts)).strip()],
        "families": list(_families(harmed)),
        "healthy": list(_healthy(healthy)),
        "runs": list(_runs(harmed)),
    }


def _families(harmed: Sequence[Verdict]) -> Iterator[str]:
    yield (
        "| family | runs | detected | verdict right | incidents per run | alerts per run | critical, wrong family "
        "| loss rules | with plateau | lead | lead over plateau | delay |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    families = dict.fromkeys(verdict.trial.family for verdict in harmed)
    groups = {family: [v for v in harmed if v.trial.family == family] for family in families}
    for title, group in (groups | {"all": harmed, "held out": _held_out(harmed)}).items():
        if group:
            yield f"| {title} | {_figures(Summary.of(group))} |"


def _figures(s: Summary) -> str:
    detected, named, misled, accident, standstill = (
        f"{share * s.num_runs:.0f}" for share in (s.recall, s.named, s.misled, s.accident_recall, s.standstill_recall)
    )
    steps = [f"{steps:+.0f}" for steps in (s.lead_over_accident, s.lead_over_standstill, s.delay)]
    per_run = [f"{s.incidents_per_run:.1f}", f"{s.alarms_per_run:.1f}"]
    counts = [str(s.num_runs), detected, named, *per_run, misled, accident, standstill]
    return " | ".join([*counts, *steps])


def _healthy(healthy: Sequence[Verdict]) -> Iterator[str]:
    yield "| healthy | runs | steps | with an alert | by the loss rules | with plateau |"
    yield "|---|---|---|---|---|---|"
    for title, group in (("all", healthy), ("held out", _held_out(healthy))):
        num_steps = sum(v.num_steps for v in group)
        told = [sum(bool(v.false) for v in group), *(sum(s < NEVER for s in steps) for steps in _by_loss(group))]
        yield f"| {title} | {len(group)} | {num_steps:,} | {' | '.join(map(str, told))} |"


def _by_loss(group: Sequence[Verdict]) -> tuple[list[float], list[float]]:
    return [v.accident for v in group], [v.standstill for v in group]


def _held_out(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.trial.name in KEPT_BACK]


def _runs(harmed: Sequence[Verdict]) -> Iterator[str]:
    yield "| run | defect | onset | loss rules | with plateau | first alert | lead over plateau | verdict |"
    yield "|---|---|---|---|---|---|---|---|"
    for v in harmed:
        name = v.trial.name + "*" * (v.trial.name in KEPT_BACK)
        loss = " | ".join(map(_step, (v.onset, v.accident, v.standstill)))
        first = "-" if v.first is None else f"{v.first.step} {v.first.rule}"
        lead = "-" if v.first_inner is None else f"{v.lead(v.standstill):+.0f}"
        yield f"| {name} | {v.trial.about} | {loss} | {first} | {lead} | {told(v)} |"


def told(verdict: Verdict) -> str:
    """The rule and the blocks of the verdict, and its family if that is wrong."""
    incident = verdict.incident
    if incident is None:
        return "missed"
    place = f", {incident.where}" if incident.where else ""
    return incident.rule + place + ("" if verdict.is_named else f" (wrong: {incident.family})")


def _notes(verdicts: Sequence[Verdict]) -> Iterator[str]:
    for verdict in verdicts:
        if verdict.false:
            when = ", before its defect" if verdict.trial.is_failing else ""
            yield f"false alarm: {verdict.trial.name}{when}: {_alarms(verdict)}"
    for verdict in verdicts:
        if verdict.trial.is_failing and not verdict.is_harmed:
            yield f"not harmed, and not counted: {verdict.trial.name}: {_alarms(verdict)}"


def _alarms(verdict: Verdict) -> str:
    return ", ".join(f"{alarm.rule} at {alarm.step}" for alarm in verdict.alarms) or "no alarm"


def _step(step: float) -> str:
    return "-" if step == NEVER else f"{step:.0f}"
