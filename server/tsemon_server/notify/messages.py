"""What a message says, whoever gets it: which alerts it is about, a title, some lines, and a link."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from tsemon_server.notify.configuration import SEVERITIES
from tsemon_server.store import Alert, NoticeKind

MAX_SHOWN = 10
"""So many alerts a message names one by one, the worst first; of the others it says how many there are."""
MAX_EVIDENCE_BYTES = 16_384
"""Evidence that is larger than this is left to the page."""
LEVELS = {"info": "info", "warning": "warn", "critical": "error"}
"""Severities in the words of trackio, whose payload the webhook's is."""


@dataclass(frozen=True)
class Notice:
    """That an alert fires, or that it is over."""

    kind: NoticeKind
    alert: Alert
    is_repeat: bool = False

    @property
    def step(self) -> int | None:
        return self.alert.firing_step if self.kind == "firing" else self.alert.resolved_step

    @property
    def line(self) -> str:
        """The run, and what happens there."""
        alert = self.alert
        where = f"{alert.project}/{alert.run}" + ("" if self.step is None else f", step {self.step}")
        return f"{where}: {alert.summary if self.kind == 'firing' else self._over}"

    @property
    def _over(self) -> str:
        since, reason = self.alert.firing_step, self.alert.resolved_reason
        why = "" if reason in (None, "clear") else f" ({reason})"
        return f"over{why}" + ("" if since is None else f"; it fired from step {since} on")


@dataclass(frozen=True)
class Message:
    """About some alerts. `base_url` is where the page is, `time` when it was made."""

    notices: Sequence[Notice]
    base_url: str | None
    time: datetime

    @cached_property
    def shown(self) -> list[Notice]:
        """Those that are named, the worst first."""
        return sorted(
            self.notices, key=lambda n: (n.kind != "firing", -SEVERITIES.index(n.alert.severity), int(n.alert.alert_id))
        )[:MAX_SHOWN]

    @property
    def num_firing(self) -> int:
        return sum(notice.kind == "firing" for notice in self.notices)

    @property
    def state(self) -> NoticeKind:
        return "firing" if self.num_firing else "resolved"

    @property
    def severity(self) -> str:
        """The worst of what fires, or of what did."""
        return self.shown[0].alert.severity

    def common(self, name: str) -> Any:
        """What all alerts have in this field, or None."""
        found = {getattr(notice.alert, name) for notice in self.notices}
        return found.pop() if len(found) == 1 else None

    @property
    def title(self) -> str:
        """One line: which rule fires, or is over, and where."""
        rule = self.common("rule")
        fires, over = ("fires", "is over") if rule else ("fire", "are over")
        if all(notice.is_repeat for notice in self.notices if notice.kind == "firing"):
            fires = f"still {fires}"
        parts = [
            f"{verb} in {_where(found)}" for verb, kind in ((fires, "firing"), (over, "resolved"))
            if (found := [notice for notice in self.notices if notice.kind == kind])
        ]  # fmt: skip
        what = rule or f"{len({notice.alert.rule for notice in self.notices})} rules"
        return f"{what} {' and '.join(parts)}"

    @property
    def lines(self) -> list[str]:
        """A line for each alert that is named, and one for the others."""
        num_more = len(self.notices) - len(self.shown)
        return [notice.line for notice in self.shown] + ([f"and {num_more:,} more"] if num_more else [])

    @property
    def advice(self) -> str | None:
        """What to try, where all that fires is of one kind."""
        if not self.num_firing or self.common("rule") is None:
            return None
        advice = self.shown[0].alert.advice
        source = advice.get("source")
        return f"{advice['text']} ({source})" if source and advice.get("text") else advice.get("text")

    @property
    def text(self) -> str:
        """All of it for people, besides title and link."""
        return "\n".join([*self.lines, *(["", f"What to try: {self.advice}"] if self.advice else [])])

    @property
    def url(self) -> str | None:
        """The page of the run, or that of all runs."""
        run_id = self.common("run_id")
        return self.base_url and f"{self.base_url}/#/{f'run/{run_id}' if run_id else ''}"

    def url_of(self, notice: Notice) -> str | None:
        return self.base_url and f"{self.base_url}/#/run/{notice.alert.run_id}"


def _where(notices: Sequence[Notice]) -> str:
    """The run and the step, or how many runs."""
    num_runs = len({notice.alert.run_id for notice in notices})
    projects = {notice.alert.project for notice in notices}
    if num_runs > 1:
        return f"{num_runs:,} runs of {f'{len(projects)} projects' if len(projects) > 1 else projects.pop()}"
    alert, step = notices[0].alert, notices[0].step
    return f"{alert.project}/{alert.run}" + ("" if step is None else f" at step {step}")


def evidence_of(alert: Alert) -> dict[str, Any] | None:
    """None where it is too large for a message."""
    return alert.evidence if len(json.dumps(alert.evidence)) <= MAX_EVIDENCE_BYTES else None
