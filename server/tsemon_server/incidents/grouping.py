"""From the alerts of an attempt to its incidents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tsemon_answers.alerts import Severity
from tsemon_answers.incidents import Verdict
from tsemon_server.incidents.order import ORDER, Order

SETTLES_AFTER = 60
"""Steps after which the verdict no longer changes. Alerts that fire later are consequences, unless one of them was pending
before the incident and explains all of it."""
SLACK = 10
"""A cause may be seen this many steps after its consequence: two samples, 5 steps apart."""
SLACK_OF_LOSS = 5
"""The same for consequences that rules on the loss see, because these read the loss of every step."""
FLAPS_WITHIN = 300
"""Steps after an incident within which the same rule, or a consequence of an alert that cleared, reopens it."""
SHOWN_AFTER = 60
"""Steps after which a loss that has not fallen again is pending as a stall."""
STALL = "loss-stall"
"""Rule whose info alert, pending or firing, says that the loss has not fallen. It opens no incident, but keeps one open."""
FINAL = "loss-not-finite", "non-finite-update", "non-finite-gradient", "non-finite-activations"
"""Rules of failures that end the training."""
SEVERITIES = "info", "warning", "critical"


@dataclass(frozen=True)
class Symptom:
    """An alert that is pending, fires, or is over."""

    rule: str
    family: str
    severity: Severity
    left_step: int
    """First sample that was not healthy; of a loss that stalls, the step of its lowest value."""
    pending_step: int
    firing_step: int | None
    """None if it is pending, or never fired."""
    blocks: tuple[int, int] | None
    where: str | None = None
    """The blocks in words."""
    stack: str | None = None
    """Name of their stack, if the model has several."""
    head: int | None = None
    """Attention head that stands out, if the rule is on attention heads."""
    resolved_step: int | None = None
    is_cleared: bool = False
    """Whether its condition is over, and not only the attempt."""
    incident: int | None = None
    """Key of the stored incident that it belongs to, if it does."""
    key: int | None = None
    """Key of the stored alert."""

    @property
    def is_stall(self) -> bool:
        """False for a rule that users made more severe: they want an incident."""
        return self.rule == STALL and self.severity == "info"

    @classmethod
    def of(
        cls,
        rule: str,
        family: str,
        severity: Severity,
        pending_step: int,
        firing_step: int | None,
        seen: Mapping[str, Any],
    ) -> Symptom:
        """An open alert. `seen`: its evidence."""
        blocks, left_step = seen.get("blocks"), seen.get("left_step", pending_step)
        if family == "liveness":
            left_step = pending_step  # an older server stored seconds
        if rule == STALL and severity == "info":
            left_step = seen["step"] - int(seen["numbers"].get("stalled_steps") or 0)
        between = None if blocks is None else (blocks[0], blocks[1])
        place = seen.get("where"), seen.get("stack"), seen.get("head")
        return cls(rule, family, severity, left_step, pending_step, firing_step, between, *place)

    def has_fired(self, step: int) -> bool:
        return self.firing_step is not None and self.firing_step <= step

    def as_of(self, step: int) -> Symptom:
        """The same alert, without an end after this step."""
        is_over = self.resolved_step is None or self.resolved_step <= step
        return self if is_over else replace(self, resolved_step=None, is_cleared=False)

    def ended(self, step: int | None, *, is_cleared: bool) -> Symptom:
        """The same alert, resolved or withdrawn."""
        return replace(self, resolved_step=step, is_cleared=is_cleared)

    def stored(self, key: int, incident: int | None, resolved_step: int | None, *, is_cleared: bool) -> Symptom:
        """The same alert with its keys."""
        return replace(self, key=key, incident=incident, resolved_step=resolved_step, is_cleared=is_cleared)


@dataclass
class Incident:
    """Alerts that belong together."""

    key: int | None = None
    """Key of a stored incident."""
    symptoms: list[Symptom] = field(default_factory=list)
    """Alerts that fired, in that order."""
    pending: list[Symptom] = field(default_factory=list)
    """Alerts that may still fire."""
    stalls: list[Symptom] = field(default_factory=list)
    """Times at which the loss did not fall, noticed since this incident began."""

    @property
    def opened_step(self) -> int:
        """Step of the first alert."""
        return min(symptom.firing_step for symptom in self.symptoms if symptom.firing_step is not None)

    @property
    def left_step(self) -> int:
        """First step at which something was not healthy."""
        return min(symptom.left_step for symptom in self.symptoms)

    @property
    def settles_step(self) -> int:
        """From this step on, alerts that fire, or are over, are not reasons for another verdict."""
        return self.opened_step + (0 if self._is_of_process else SETTLES_AFTER)  # no step may follow a silent process

    @property
    def _is_of_process(self) -> bool:
        """True if it says nothing about the model, such as that the process is silent."""
        return self.symptoms[0].family == "liveness"

    @property
    def ended_step(self) -> int | None:
        """Step at which the last alert was resolved; None while one is not."""
        ended = [symptom.resolved_step for symptom in self.symptoms]
        return None if None in ended else max(step for step in ended if step is not None)

    def open_until(self, as_of: int | None = None) -> int | None:
        """Step at which it ended: the last alert was resolved, and the loss fell again. None if it was open at that step."""
        return self._end(as_of)[0]

    def _end(self, as_of: int | None = None) -> tuple[int | None, bool]:
        """The step at which it ended, and whether it recovered. Only a recovery waits for the loss.

        A stall that was withdrawn before it fired keeps the incident open until then, and leaves no trace.
        """
        until, is_cleared = self.ended_step, all(one.is_cleared for one in self.symptoms)
        for stall in self.stalls if is_cleared else ():
            if stall.firing_step is None and stall.resolved_step is not None and stall.is_cleared:
                if as_of is not None and stall.pending_step <= as_of < stall.resolved_step:
                    return None, False
            elif until is not None and stall.left_step <= until:
                until = None if stall.resolved_step is None else max(until, stall.resolved_step)
                is_cleared = stall.is_cleared
        return until, is_cleared

    def verdict(
        self, order: Order, step: int | None = None, *, has_loss: bool = True, last_step: int | None = None
    ) -> Verdict:
        """The verdict that people read.

        step: the newest one, if the attempt is still running. has_loss: if the run gives none, nothing shows a recovery.
        last_step: the newest one, if the attempt is over: without enough steps since the end, nothing shows it either.
        """
        cause = self.cause(order, step)
        until, is_cleared = self._end()
        ended_step, is_open = self.ended_step, until is None
        has_stalled = until is not None and ended_step is not None and until > ended_step
        is_shown = last_step is None or ended_step is None or has_stalled or last_step >= ended_step + SHOWN_AFTER
        shows_recovery = (has_loss and is_shown) or self._is_of_process
        return Verdict(
            family=cause.family,
            severity=max((symptom.severity for symptom in self.symptoms), key=SEVERITIES.index),
            rule=cause.rule,
            step=self.opened_step,
            left_step=cause.left_step,
            settles_step=self.settles_step,
            blocks=cause.blocks,
            where=cause.where,
            stack=cause.stack,
            head=cause.head,
            state="open" if is_open else "recovered" if is_cleared and shows_recovery else "ended",
            ended_step=until,
            alerts=list(dict.fromkeys((cause.rule, *(symptom.rule for symptom in self.symptoms)))),
        )

    def cause(self, order: Order, step: int | None = None) -> Symptom:
        """The likeliest cause of the alerts that fired until the verdict settled, as they were then.

        It may also be an alert that became pending before them and explains all of them, even if it fires later.
        """
        early = [one.as_of(self.settles_step) for one in self.symptoms if one.has_fired(self.settles_step)]
        late = [one for one in self.symptoms if not one.has_fired(self.settles_step)]
        if step is not None and step < self.settles_step:
            late += self.pending
        lasting = [one for one in late if one.pending_step < self.opened_step]
        early += [one for one in lasting if all(_explains(one, other, order) for other in early)]
        roots = [one for one in early if not any(_explains(other, one, order) for other in early)]
        first = min(roots, key=lambda one: one.left_step)
        together = [one for one in roots if one.left_step <= first.left_step + _slack(first)]
        return min(together, key=lambda one: (-SEVERITIES.index(one.severity), one.left_step, order.place(one.rule)))


def _explains(cause: Symptom, other: Symptom, order: Order) -> bool:
    lasts = cause.resolved_step is None or cause.resolved_step > cause.pending_step + SETTLES_AFTER
    return order.can_cause(cause.rule, other.rule, lasts=lasts) and cause.left_step <= other.left_step + _slack(other)


def _slack(one: Symptom) -> int:
    return SLACK_OF_LOSS if one.family == "loss" else SLACK


def incidents_of(symptoms: Iterable[Symptom]) -> list[Incident]:
    """The incidents of an attempt, in the order in which they were reported.

    Alerts on the process itself, such as that it is silent, are no consequences of the training and have their own.
    """
    incidents = list[Incident]()
    told = [one for one in symptoms if one.severity != "info" or one.is_stall]
    for is_of_process in (False, True):
        incidents += _grouped([one for one in told if (one.family == "liveness") is is_of_process])
    return sorted(incidents, key=lambda incident: incident.opened_step)


def _grouped(symptoms: Sequence[Symptom]) -> list[Incident]:
    incidents, known = list[Incident](), dict[int, Incident]()
    stalls = [one for one in symptoms if one.is_stall]
    fired = [one for one in symptoms if not one.is_stall and one.firing_step is not None]
    fired.sort(key=lambda one: (one.incident is None, one.firing_step, one.pending_step, one.left_step))
    for symptom in fired:  # those of stored incidents first: a late frame may bring an alert from before them
        incident = known.get(-1 if symptom.incident is None else symptom.incident)
        if symptom.incident is None:
            incident = next((one for one in reversed(incidents) if _belongs(symptom, one)), None)
        if incident is None:
            incidents.append(incident := Incident(symptom.incident))
        if symptom.incident is not None:
            known[symptom.incident] = incident
        incident.symptoms.append(symptom)
        incident.stalls = [one for one in stalls if one.pending_step >= incident.left_step]
    if incidents and incidents[-1].open_until() is None:
        incidents[-1].pending = [one for one in symptoms if one.firing_step is None and one.resolved_step is None]
    return incidents


def _belongs(symptom: Symptom, incident: Incident) -> bool:
    assert symptom.firing_step is not None
    until = incident.open_until(as_of=symptom.firing_step)
    if symptom.resolved_step is not None and symptom.resolved_step < incident.left_step - SLACK:
        return False
    if until is None or until >= symptom.left_step:
        return not (_is_another(symptom, incident) or _is_later(symptom, incident))
    if _begins_elsewhere(symptom, incident):
        return False
    if symptom.firing_step <= until + FLAPS_WITHIN:
        return any(one.rule == symptom.rule or _leads_to(one, symptom) for one in incident.symptoms)
    # Samples may be hundreds of steps apart, so an alert flaps that comes again after as many steps as it lasted.
    return any(one.rule == symptom.rule and symptom.firing_step <= until + _duration(one) for one in incident.symptoms)


def _begins_elsewhere(symptom: Symptom, incident: Incident) -> bool:
    """True for NaN that comes again, but from another block."""
    before = [one.blocks for one in incident.symptoms if one.rule == symptom.rule and one.blocks is not None]
    return symptom.rule in FINAL and symptom.blocks is not None and bool(before) and symptom.blocks not in before


def _duration(over: Symptom) -> int:
    return 0 if over.resolved_step is None or over.firing_step is None else over.resolved_step - over.firing_step


def _is_later(symptom: Symptom, incident: Incident) -> bool:
    """True for an unrelated failure at a time at which only a loss that stalls, perhaps for ever, kept the incident open."""
    over = incident.ended_step
    if over is None or symptom.left_step <= over + FLAPS_WITHIN:
        return False
    return not any(one.rule == symptom.rule or _explains(one, symptom, ORDER) for one in incident.symptoms)


def _is_another(symptom: Symptom, incident: Incident) -> bool:
    """True for a failure that begins after the verdict has settled and needs a message of its own.

    A critical one does if nothing there can cause it. If people know of something critical already, it does only after a
    while, and only if it is of another family.
    """
    later = symptom.left_step - incident.settles_step
    if any(one.rule == symptom.rule for one in incident.symptoms):
        return False
    is_worst = all(one.severity != "critical" for one in incident.symptoms)
    if not any(ORDER.knows(one.rule) for one in incident.symptoms):  # the user's own rules explain nothing
        return later > 0 or (ORDER.knows(symptom.rule) and symptom.severity == "critical" and is_worst)
    if later <= 0 or symptom.severity != "critical":
        return False
    if symptom.rule in FINAL:
        is_told = any(one.rule in FINAL for one in incident.symptoms)
    elif ORDER.knows(symptom.rule):
        is_told = any(
            _explains(one, symptom, ORDER) or _shows(one, symptom) or (not is_worst and one.family == symptom.family)
            for one in incident.symptoms
        )
    else:
        is_told = False
    return not is_told and (is_worst or later > FLAPS_WITHIN)


def _shows(loss: Symptom, other: Symptom) -> bool:
    """True if the loss may have shown the same failure before."""
    return loss.family == "loss" and other.left_step <= loss.left_step + FLAPS_WITHIN


def _leads_to(over: Symptom, later: Symptom) -> bool:
    """True if the later alert may be a consequence of an alert that cleared. A more severe alert is a failure of its own."""
    is_worse = SEVERITIES.index(later.severity) > SEVERITIES.index(over.severity)
    return over.is_cleared and not is_worse and ORDER.can_cause(over.rule, later.rule)
