"""The contents of a message for any receiver: its incidents and alerts, a title, some lines, and a link."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any
from urllib.parse import urlencode

from tsemon_answers.alerts import CLEARED, Alert, NoticeKind
from tsemon_server.notify.configuration import SEVERITIES
from tsemon_server.store.ledger.incidents import NoticedIncident

MAX_SHOWN = 10
"""So many alerts a message names one by one, the worst first; of the others it says how many there are."""
MAX_RULES = 3
"""So many rules a title names, the worst first."""
BRIEF = timedelta(minutes=1)
"""What nobody was told of, and what was over by itself within this, calls nobody, unless it is critical."""
MAX_EVIDENCE_BYTES = 16_384
"""Evidence that is larger than this is left to the page."""
LEVELS = {"info": "info", "warning": "warn", "critical": "error"}
"""Severities in the words of trackio, whose payload the webhook's is."""


@dataclass(frozen=True)
class Notice:
    """News of an incident or alert: it fires, it is over, or both at once."""

    kind: NoticeKind
    alert: Alert
    """The alert, or the incident in the form of one."""
    is_repeat: bool = False
    was_told: bool = True
    """Of an end: whether it was told before that the alert fires. If not, this tells both."""
    was_over: bool = False
    """True if an earlier message reported its end."""

    @property
    def rule(self) -> str:
        """Rule in the messages, which stays the same."""
        return self.alert.labels["rule"] if isinstance(self.alert, NoticedIncident) else self.alert.rule

    @property
    def has_other_cause(self) -> bool:
        """Whether another cause turned out to be more likely than the one in the title."""
        return self.rule != self.alert.rule

    @property
    def place(self) -> str:
        """Query of the link to the run: the metric, the block or layer, the step, and the attempt.

        The step of an incident is the one at which its rule named the block: at the first step of the cause, other blocks
        may have been the only ones. Without a block, it is that first step.
        """
        metric, layer = _seen_at(self.alert.evidence)
        about = {"metric": metric, "layer": layer, "step": self.alert.firing_step}
        if isinstance(self.alert, NoticedIncident):
            blocks, since = self.alert.blocks if metric is not None else None, self.alert.left_step
            step = self.alert.evidence.get("step", since) if blocks else since
            about = {"metric": metric, "block": blocks and blocks[0], "step": step}
        about["attempt"] = self.alert.attempt  # a later attempt may have the same steps
        return urlencode({name: value for name, value in about.items() if value is not None})

    @property
    def tells_firing(self) -> bool:
        return self.kind == "firing" or not self.was_told

    @property
    def is_alarming(self) -> bool:
        """Whether people are to look."""
        alert = self.alert
        # Of one that is critical the times say too little: after an outage all of it comes within seconds.
        passed_soon = alert.resolved_reason in CLEARED and alert.updated_at - alert.opened_at <= BRIEF
        is_harmless = passed_soon and alert.severity != "critical"
        return self.kind == "firing" or not (self.was_told or is_harmless)

    @property
    def is_unrecovered(self) -> bool:
        """True if it lasted until the end of its attempt, or nearly."""
        return self.kind == "resolved" and self.alert.resolved_reason in (*_LASTS, "too soon")

    @property
    def step(self) -> int | None:
        return self.alert.firing_step if self.tells_firing else self.alert.resolved_step

    @property
    def line(self) -> str:
        """The run, and what happens there."""
        alert = self.alert
        where = f"{alert.project}/{alert.run}" + ("" if self.step is None else f", step {self.step}")
        return f"{where}: {self._what}"

    @property
    def _what(self) -> str:
        if self.kind == "firing":
            return " ".join([self._summary, *self._where] if self._where else [self.alert.summary])
        if self.was_told:
            return " ".join((self._over, *self._cause))
        return " ".join((self._summary, *self._where, self._end, *self._also))

    @property
    def _summary(self) -> str:
        return self.alert.summary.removesuffix(".") + "."

    @property
    def _where(self) -> list[str]:
        """The blocks and the first step of an incident, and the step until which its cause may change."""
        alert = self.alert
        if not isinstance(alert, NoticedIncident):
            return []
        blocks = "" if alert.where is None else f"in {alert.where}, "
        where = f"{blocks}since step {alert.left_step}."
        found = [where[0].upper() + where[1:]]
        if self.kind == "firing" and alert.settles_step is not None:
            found.append(f"Until step {alert.settles_step}, another cause may turn out to be more likely.")
        return found

    @property
    def _cause(self) -> list[str]:
        """The final cause of an incident that is over, and the other rules that fired."""
        if not isinstance(self.alert, NoticedIncident):
            return []
        return [f"Cause: {self.alert.rule}. {self._summary}", *self._where, *self._also]

    @property
    def _also(self) -> list[str]:
        rules = self.alert.also_fired if isinstance(self.alert, NoticedIncident) else []
        return [f"Also fired: {', '.join(rules)}."] if rules else []

    @property
    def _end(self) -> str:
        """How what was not told before came to its end."""
        reason, step = self.alert.resolved_reason, self.alert.resolved_step
        if reason in _ENDS:
            return f"Then {_ENDS[reason]}."
        return "It was over" + ("." if step is None else f" at step {step}.")

    @property
    def _over(self) -> str:
        since, reason = self.alert.firing_step, self.alert.resolved_reason
        why = "" if reason in (None, "clear") else f" ({reason})"
        why = _UNKNOWN.get(reason or "", why)
        if isinstance(self.alert, NoticedIncident):
            return f"{'over' if why else 'recovered'}{why}; it was open from step {since} on."
        return f"over{why}" + ("" if since is None else f"; it fired from step {since} on")


@dataclass(frozen=True)
class Message:
    """About some incidents and alerts. `base_url` is where the page is, `time` when it was made."""

    notices: Sequence[Notice]
    base_url: str | None
    time: datetime
    thread: str | None = None
    """Thread of the first message on the same incidents, as `channels.send` returned it."""

    @property
    def shown(self) -> list[Notice]:
        """Those that are named."""
        return self._sorted[:MAX_SHOWN]

    @cached_property
    def _sorted(self) -> list[Notice]:
        """All, the worst first."""
        return sorted(
            self.notices,
            key=lambda n: (
                not n.is_alarming,
                not n.tells_firing,
                -SEVERITIES.index(n.alert.severity),
                int(n.alert.alert_id),
            ),
        )

    @property
    def is_alarming(self) -> bool:
        return self.shown[0].is_alarming

    @property
    def is_unrecovered(self) -> bool:
        """True if an incident or alert lasted until the end of its attempt."""
        return any(notice.is_unrecovered for notice in self.notices)

    @property
    def state(self) -> NoticeKind:
        return "firing" if any(notice.kind == "firing" for notice in self.notices) else "resolved"

    @property
    def severity(self) -> str:
        """The worst of what people are to look at, or of what is over."""
        return self.shown[0].alert.severity

    def common(self, name: str) -> Any:
        """What all alerts have in this field, or None."""
        found = {getattr(notice.alert, name) for notice in self.notices}
        return found.pop() if len(found) == 1 else None

    @property
    def title(self) -> str:
        """One line: which rules fire, fired and ended, or are over, and where."""
        parts, before = [], ""
        for found in self._parts():
            rules = _rules(found)
            parts.append(_sentence("" if rules == before else f"{rules} ", found))
            before = rules
        return ("; " if any(not notice.was_told for notice in self.notices) else " and ").join(parts)

    def _parts(self) -> Iterator[list[Notice]]:
        """What fires, what fired and ended, and what is over; without what there is none of."""
        for what in (("firing", True), ("resolved", True), ("resolved", False)):
            if found := [notice for notice in self._sorted if (notice.kind, notice.tells_firing) == what]:
                yield found

    @property
    def lines(self) -> list[str]:
        """A line for each alert that is named, and one for the others."""
        num_more = len(self.notices) - len(self.shown)
        is_one_rule = len({notice.rule for notice in self.notices}) == 1
        lines = [notice.line if is_one_rule else f"{notice.rule} in {notice.line}" for notice in self.shown]
        return lines + ([f"and {num_more:,} more"] if num_more else [])

    @property
    def advice(self) -> str | None:
        """What to try against a cause that was not told before, if there is only one."""
        worst = self.shown[0]
        if not (worst.tells_firing or worst.has_other_cause) or self.common("rule") is None:
            return None
        advice = worst.alert.advice
        source = advice.get("source")
        return f"{advice['text']} ({source})" if source and advice.get("text") else advice.get("text")

    @property
    def text(self) -> str:
        """All of it for people, besides title and link."""
        return "\n".join([*self.lines, *(["", f"What to try: {self.advice}"] if self.advice else [])])

    @property
    def url(self) -> str | None:
        """The page of the run, or that of all runs."""
        if self.common("run_id"):
            return self.url_of(self.shown[0])
        return self.base_url and f"{self.base_url}/#/"

    @property
    def links(self) -> list[tuple[str, str]]:
        """The pages of all that is named, each after its name; none without `base_url`."""
        if self.base_url is None or self.url is None:
            return []
        if len(self.notices) == 1:
            return [("Open the page", self.url)]
        named = [(f"{n.rule} in {n.alert.project}/{n.alert.run}", self.url_of(n) or "") for n in self.shown]
        return named + ([("all runs", f"{self.base_url}/#/")] if len(named) < len(self.notices) else [])

    def url_of(self, notice: Notice) -> str | None:
        """The page of the run, at the cause."""
        place = f"?{notice.place}" if notice.place else ""
        return self.base_url and f"{self.base_url}/#/run/{notice.alert.run_id}{place}"


_LASTS = {"run ended": "the run ended", "new attempt": "a new attempt began"}
"""Ends of alerts that fire until their attempt ends."""
_UNKNOWN = {
    "no loss": ", and the run gives no loss that could show a recovery",
    "too soon": ", and the run ended too soon to show a recovery",
}
"""Ends of incidents that may have recovered or not."""
_ENDS = {
    **_LASTS,
    "rule disabled": "its rule was disabled",
    "by hand": "a person resolved it",
}
"""How an alert ends besides that its condition is over."""


def _seen_at(evidence: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Return the first measured metric of the conditions that has layers, and the layer of its condition if there is one."""
    if not isinstance(profiles := evidence.get("layers"), Mapping):
        return None, None
    metrics = [metric for metric, profile in profiles.items() if profile]
    for condition in evidence.get("conditions", ()):
        named = [metric for metric in re.split(r"\W+", condition["value"]) if metric in metrics]
        if named:
            return named[0], condition.get("layer")
    return (metrics[0] if metrics else None), None


def _rules(notices: Sequence[Notice]) -> str:
    """Their names."""
    names = list(dict.fromkeys(notice.rule for notice in notices))
    num_more = len(names) - MAX_RULES
    *first, last = names if num_more <= 1 else [*names[:MAX_RULES], f"{num_more} more rules"]
    return f"{', '.join(first)} and {last}" if first else last


def _sentence(subject: str, notices: Sequence[Notice]) -> str:
    """What happens to alerts to which the same does."""
    is_one, where = len({notice.rule for notice in notices}) == 1, _where(notices)
    over = "is over" if is_one else "are over"
    if notices[0].kind == "firing":
        verb = "fires" if is_one else "fire"
        again = " again" if all(notice.was_over for notice in notices) else ""
        return f"{subject}{'still ' if all(notice.is_repeat for notice in notices) else ''}{verb}{again} in {where}"
    ends = {_ENDS.get(notice.alert.resolved_reason or "", over) for notice in notices}
    if ends == {"the run ended"} and len({notice.alert.run_id for notice in notices}) > 1:
        ends = {"the runs ended"}
    if notices[0].was_told:
        if all(notice.alert.resolved_reason in _LASTS for notice in notices) and len(ends) == 1:
            return f"{subject}had not recovered in {_where(notices, has_step=False)} when {ends.pop()}"
        return f"{subject}{over} in {where}"
    return f"{subject}fired in {where}, and {ends.pop() if len(ends) == 1 else over}"


def _where(notices: Sequence[Notice], *, has_step: bool = True) -> str:
    """The run and the step, or how many runs."""
    num_runs = len({notice.alert.run_id for notice in notices})
    projects = {notice.alert.project for notice in notices}
    if num_runs > 1:
        return f"{num_runs:,} runs of {f'{len(projects)} projects' if len(projects) > 1 else projects.pop()}"
    alert, step = notices[0].alert, notices[0].step
    return f"{alert.project}/{alert.run}" + (f" at step {step}" if has_step and step is not None else "")


def evidence_of(alert: Alert) -> dict[str, Any] | None:
    """None where it is too large for a message."""
    return alert.evidence if len(json.dumps(alert.evidence)) <= MAX_EVIDENCE_BYTES else None
