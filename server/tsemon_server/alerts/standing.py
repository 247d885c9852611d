"""How the rules stand on a run: what they wait for, what they say, and what they lack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from tsemon_answers.alerts import Alert
from tsemon_answers.rules import RuleStanding, RuleStandings
from tsemon_answers.runs import Recorded
from tsemon_server.alerts.active import ActiveRules
from tsemon_server.alerts.recall import state_now
from tsemon_server.rules.evaluator import RuleStatus
from tsemon_server.rules.program import Program
from tsemon_server.rules.rule import Rule, compile_rule
from tsemon_server.store.reading import Reader

HELD_BACK = "a sample in which only_while holds"
"""`waits_for` of a rule if its guard did not hold in the newest sample."""


def standings(reader: Reader, active: ActiveRules, run_id: str) -> RuleStandings:
    """Read from what the rules remember. Raises UnknownRun."""
    run, in_force = reader.runs.detail(run_id), active.of_run(reader, run_id)
    progress = reader.progress.of(run_id, run.attempt)
    state = None if progress is None else state_now(reader, active, run_id, run.attempt, progress)
    state = in_force.evaluator.start() if state is None else state
    on_clock = _of_the_clock(in_force.on_clock.rules, reader.alerts.to_tell(run_id, run.attempt))
    found = [*in_force.evaluator.statuses(state), *on_clock]
    return RuleStandings(step=state.last_step, rules=[_standing(status, run.metrics) for status in found])


def _of_the_clock(rules: Sequence[Rule], alerts: Iterable[Alert]) -> list[RuleStatus]:
    """They remember nothing but their alerts."""
    states: dict[str, Literal["pending", "firing"]] = {
        alert.rule: "pending" if alert.state == "pending" else "firing" for alert in alerts
    }
    return [RuleStatus(rule, states.get(rule.name, "quiet"), None) for rule in rules]


def _standing(status: RuleStatus, recorded: Recorded) -> RuleStanding:
    rule = status.rule
    has = {"scalar": recorded.scalars, "layers": recorded.layers, "heads": recorded.heads}
    measures = compile_rule(rule, Program()).when.measures if rule.on == "frame" else ()
    not_measured = sorted({measure.name for measure in measures if measure.name not in has[measure.kind]})
    return RuleStanding(
        rule=rule.name,
        title=rule.title,
        family=rule.family,
        severity=rule.severity,
        state=status.state,
        judged_step=status.judged_step,
        not_measured=not_measured,
        waits_for="" if not_measured else status.waits_for or HELD_BACK * status.is_held_back,
    )
