"""What became of the trainings, as tables in Markdown."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
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
    harmed = [verdict for verdict in verdicts if verdict.is_harmed]
    healthy = [verdict for verdict in verdicts if not verdict.trial.is_failing]
    parts = (_families(harmed), _healthy(healthy), _runs(harmed), _notes(verdicts))
    return "\n".join([conditions(len(verdicts)), *("\n".join(part) + "\n" for part in parts)])


def _families(harmed: Sequence[Verdict]) -> Iterator[str]:
    yield "| family | runs | called | right family | loss rules | or plateau | lead | over plateau too | delay |"
    yield "|---|---|---|---|---|---|---|---|---|"
    families = dict.fromkeys(verdict.trial.family for verdict in harmed)
    groups = {family: [v for v in harmed if v.trial.family == family] for family in families}
    for title, group in (groups | {"all": harmed, "those kept back": _kept_back(harmed)}).items():
        if group:
            yield f"| {title} | {_figures(Summary.of(group))} |"


def _figures(s: Summary) -> str:
    shares = " | ".join(f"{share:.2f}" for share in (s.recall, s.named, s.accident_recall, s.standstill_recall))
    steps = " | ".join(f"{steps:+.0f}" for steps in (s.lead_over_accident, s.lead_over_standstill, s.delay))
    return f"{s.num_runs} | {shares} | {steps}"


def _healthy(healthy: Sequence[Verdict]) -> Iterator[str]:
    yield "| healthy | runs | steps | with an alarm | by the loss rules | or plateau |"
    yield "|---|---|---|---|---|---|"
    for title, group in (("all", healthy), ("those kept back", _kept_back(healthy))):
        num_steps = sum(v.num_steps for v in group)
        told = [sum(bool(v.false) for v in group), *(sum(s < NEVER for s in steps) for steps in _by_loss(group))]
        yield f"| {title} | {len(group)} | {num_steps:,} | {' | '.join(map(str, told))} |"


def _by_loss(group: Sequence[Verdict]) -> tuple[list[float], list[float]]:
    return [v.accident for v in group], [v.standstill for v in group]


def _kept_back(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.trial.name in KEPT_BACK]


def _runs(harmed: Sequence[Verdict]) -> Iterator[str]:
    yield "| run | what is wrong | onset | loss rules | or plateau | first alarm | lead | family |"
    yield "|---|---|---|---|---|---|---|---|"
    for v in harmed:
        name = v.trial.name + "*" * (v.trial.name in KEPT_BACK)
        loss = " | ".join(map(_step, (v.onset, v.accident, v.standstill)))
        first = "-" if v.first is None else f"{v.first.step} {v.first.rule}"
        lead = "-" if v.first_inner is None else f"{v.lead(v.standstill):+.0f}"
        yield f"| {name} | {v.trial.about} | {loss} | {first} | {lead} | {_named(v)} |"


def _named(verdict: Verdict) -> str:
    if verdict.first is None:
        return "missed"
    return "right" if verdict.is_named else verdict.first.family


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
