"""A run's alerts, as the rules' events change them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsemon_server.rules import Event, Rule
from tsemon_server.store import Writer


class AlertBook:
    """Enters events of one attempt. May go back to an earlier step first, to enter again what came since."""

    def __init__(self, writer: Writer, run_id: str, attempt: int, versions: Mapping[str, int]) -> None:
        self.run_id, self.attempt = run_id, attempt
        self.resolved: list[int] = []
        """The ids of alerts that ended."""
        self._writer = writer
        self._versions = versions
        self._taken_back: dict[tuple[str, bool], list[int]] = {}

    def go_back_to(self, step: int, rules: Sequence[Rule]) -> None:
        """Let the alerts of `rules` be as they were after `step`. Those that open again keep their ids."""
        self._taken_back = self._writer.take_back_alerts(self.run_id, self.attempt, step, [rule.name for rule in rules])

    def close(self) -> None:
        """Once all is entered: what did not open again goes away, or, where people were told of it, is over."""
        for alert_ids in self._taken_back.values():
            for alert_id in alert_ids:
                if self._writer.drop_alert(alert_id):
                    self.resolved.append(alert_id)

    def enter(self, event: Event) -> None:
        if event.kind == "pending":
            self._open(event)
        elif event.kind == "firing":
            if self._taken_back.get((event.rule.name, True)):
                self._writer.withdraw_alert(self.run_id, event.rule.name)  # people know the one that had fired
                self._open(event)
            elif self._change(event, "pending", **_seen(event)) is None:
                self._open(event)
        elif event.kind == "resolved":
            # Summary and evidence stay those of the firing: they are the reason to look at it afterwards.
            ended = self._change(event, "firing", resolved_step=event.resolved_step)
            self.resolved += [] if ended is None else [ended]
        else:
            self._writer.withdraw_alert(self.run_id, event.rule.name)

    def _change(self, event: Event, from_state: Any, **values: Any) -> int | None:
        return self._writer.change_alert(self.run_id, event.rule.name, from_state, state=event.kind, **values)

    def _open(self, event: Event) -> None:
        rule = event.rule
        values = {
            "state": event.kind,
            "family": rule.family,
            "severity": rule.severity,
            "rule_version": self._versions.get(rule.name),
            **_seen(event),
        }
        again = self._taken_back.get((rule.name, event.kind == "firing"))
        if again:
            self._writer.revise_alert(again.pop(0), **values)
        else:
            self._writer.open_alert(self.run_id, self.attempt, rule.name, **values)


def _seen(event: Event) -> dict[str, Any]:
    return {
        "pending_step": event.pending_step,
        "firing_step": event.firing_step,
        "summary": event.summary,
        "evidence": event.evidence,
        "advice": event.advice,
    }
