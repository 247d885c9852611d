"""A run's alerts, as the rules' events change them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from tsemon_server.alerts.active import InForce
from tsemon_server.rules.evaluator import Event
from tsemon_server.store.ledger.alerts import AlertChanges, TakenBack


class _Opened(NamedTuple):
    event: Event
    version: int | None


class AlertBook:
    """Enters events of one attempt. May go back to an earlier step first, to enter again what came since.

    An alert is written once it is known how long it was open: by that, those that were taken back are told apart.
    """

    def __init__(self, alerts: AlertChanges, run_id: str, attempt: int, in_force: InForce) -> None:
        self.run_id, self.attempt = run_id, attempt
        self.resolved: list[int] = []
        """The ids of alerts that ended."""
        self._alerts = alerts
        self._versions = in_force.versions
        self._open: dict[str, _Opened] = {}
        """What is open by the events entered, and not written yet, by rule."""
        self._taken_back: dict[str, list[TakenBack]] = {}
        self._may_reopen = False

    def go_back_to(self, step: int, rules: Collection[str]) -> None:
        """Let the alerts of `rules` be as they were after `step`. Those that open again keep their ids."""
        self._taken_back = self._alerts.take_back(self.run_id, self.attempt, step, rules)
        self._may_reopen = True

    def go_on_with(self, in_force: InForce) -> None:
        """Continue with the events of these rules. The alerts of rules that are not active any more stay as they are."""
        self._versions = in_force.versions
        active = {rule.name for rule in in_force.rules}
        self._open = {name: opened for name, opened in self._open.items() if name in active}

    def enter(self, event: Event) -> None:
        if event.kind in ("pending", "firing"):
            self._open[event.rule.name] = _Opened(event, self._versions.get(event.rule.name))
            return
        opened = self._open.pop(event.rule.name, None)
        if event.kind == "resolved":
            if opened is not None:
                self._write(opened, event.resolved_step)
            # Summary and evidence stay those of the firing: they are the reason to look at it afterwards.
            ended = self._change(event, "firing", state="resolved", resolved_step=event.resolved_step)
            self.resolved += [] if ended is None else [ended]
        elif opened is None:
            self._alerts.withdraw(self.run_id, self.attempt, event.rule.name)

    def close(self) -> None:
        """Once all is entered: what did not open again goes away, or, where people were told of it, is over."""
        for opened in self._open.values():
            self._write(opened, None)
        for alerts in self._taken_back.values():
            self.resolved += [alert.alert_id for alert in alerts if self._alerts.drop(alert.alert_id)]
        if self._open or self._may_reopen:
            self._alerts.end_of_ended(self.run_id, self.attempt)

    def _write(self, opened: _Opened, resolved_step: int | None) -> None:
        event = opened.event
        again = self._find_again(event, resolved_step)
        if again is not None:
            self._alerts.revise(again.alert_id, **_values(opened))
        elif event.kind == "pending" or self._change(event, "pending", **_values(opened)) is None:
            self._alerts.open(self.run_id, self.attempt, event.rule.name, **_values(opened))

    def _find_again(self, opened: Event, resolved_step: int | None) -> TakenBack | None:
        """The alert that this was before. What people called over stays so however often it opened until then."""
        alerts = self._taken_back.get(opened.rule.name, [])
        for alert in alerts:
            could_be = opened.kind == "firing" or alert.firing_step is None or not alert.is_of_rules
            if could_be and alert.meets(opened.pending_step, resolved_step):
                if alert.is_of_rules:
                    alerts.remove(alert)
                return alert
        return None

    def _change(self, event: Event, from_state: Any, **values: Any) -> int | None:
        return self._alerts.change(self.run_id, self.attempt, event.rule.name, from_state, **values)


def _values(opened: _Opened) -> dict[str, Any]:
    rule = opened.event.rule
    return {
        "state": opened.event.kind,
        "family": rule.family,
        "severity": rule.severity,
        "rule_version": opened.version,
        **_seen(opened.event),
    }


def _seen(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in ("pending_step", "firing_step", "summary", "evidence", "advice")}
