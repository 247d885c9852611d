"""What a training loop can do by itself at an alert or an incident: `attach(..., on_incident=when(do=[...]))`.

All of it happens inside `monitor.step()`, on the training thread, after the optimizer's step, and on every rank of
`process_group` at the same step. What goes wrong in one action is contained and counted, and the others are done.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument
from tsemon.wire import Alert, Incident

Severity = Literal["info", "warning", "critical"]
Per = Literal["incident", "alert"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""What a parameter group and its schedulers derive the learning rate from."""
FAMILIES = frozenset({"tse", "entropy", "rank", "norm", "dead", "diverge", "data", "loss", "liveness", "custom"})
"""Families of the server's rules. Users write rules, but no families."""
LIVENESS = frozenset({"liveness"})
"""The family of alerts about the process, its loop and tsemon itself."""


class Training(Protocol):
    """The training that an action acts on: a Monitor."""

    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Any]

    @property
    def num_steps(self) -> int: ...

    def stop(self) -> None: ...

    def burst(self, *, steps: int = 50, every: int = 1) -> None: ...


class Action:
    """One thing to do. Without `when`, it is done once for every incident, and not for alerts that are `info`."""

    needs_all_ranks: ClassVar[bool] = False
    """Whether ranks that train together must do it at the same step."""
    passes_over: ClassVar[frozenset[str]] = frozenset()
    """Families whose alerts lead to it only where `when` names families or rules."""

    @property
    def settings(self) -> Mapping[str, object]:
        """What must be the same on all ranks, beside the type."""
        return {}

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise InvalidArgument where it cannot be done in a training with these optimizers."""

    def act(self, alert: Alert | Incident, training: Training) -> None:
        """Do it, now. May raise. alert: its cause, which is an incident for `on_incident`."""
        raise NotImplementedError


class Limit:
    """At most so many times in a training, and so many steps from one time to the next."""

    def __init__(self, at_most: int, pause: int) -> None:
        self._at_most, self._pause = checked_count("at_most", at_most), checked_count("pause", pause)
        self._times = 0
        self._last_step: int | None = None

    @property
    def settings(self) -> dict[str, object]:
        return {"at_most": self._at_most, "pause": self._pause}

    def allows(self, step: int) -> bool:
        # A step before the last time is another training's, with the same action.
        is_paused = self._last_step is not None and 0 <= step - self._last_step < self._pause
        return self._times < self._at_most and not is_paused

    def count(self, step: int) -> None:
        self._times += 1
        self._last_step = step


class SaveCheckpoint(Action):
    """Call `save` with the alert or the incident. The training waits for it as for any checkpoint."""

    def __init__(self, save: Callable[[Any], object]) -> None:
        if not callable(save):
            raise InvalidArgument(f"SaveCheckpoint takes a function that is called with the alert, got {save!r}")
        self._save = save

    def act(self, alert: Alert | Incident, training: Training) -> None:
        self._save(alert)


class Stop(Action):
    """Make `monitor.should_stop` true. A plain loop asks for it; the callbacks of integrations do.

    Alerts of the family liveness are about the process and not the model: they stop a run only where `when` names them.
    """

    needs_all_ranks = True
    passes_over = LIVENESS

    def act(self, alert: Alert | Incident, training: Training) -> None:
        training.stop()


class Burst(Action):
    """Sample every `every` steps for `steps` steps, with the measures of the slow tier too, whatever the budget is.

    So that the steps after an alert are on record. A rule that fires again and again does not make it sample for ever:
    at_most: how many bursts, over the whole training.
    pause: steps from the beginning of one to that of the next, by default 10 times `steps`.
    """

    def __init__(self, *, steps: int = 50, every: int = 1, at_most: int = 5, pause: int | None = None) -> None:
        self._steps, self._every = checked_count("steps", steps), checked_count("every", every)
        self._limit = Limit(at_most, 10 * steps if pause is None else pause)

    @property
    def settings(self) -> Mapping[str, object]:
        return {"steps": self._steps, "every": self._every} | self._limit.settings

    def act(self, alert: Alert | Incident, training: Training) -> None:
        if self._limit.allows(training.num_steps):
            self._limit.count(training.num_steps)
            training.burst(steps=self._steps, every=self._every)


class LowerLearningRate(Action):
    """Multiply the learning rate by `factor`, in the optimizers' parameter groups and in what schedulers start from.

    optimizers: by default those that were attached to. schedulers: those that drive them, by default those that an
    integration knows of. A scheduler that is not told computes the rate from its own `base_lrs` and overwrites the lower
    one at its next step. A loop that assigns the rate itself multiplies it by `scale`.
    at_most: how often, over the whole training; alerts after that leave the rate as it is.
    pause: steps before it is lowered again.
    Alerts of the family liveness are about the process and not the model: they lower it only where `when` names them.
    """

    needs_all_ranks = True
    passes_over = LIVENESS

    def __init__(
        self,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        *,
        factor: float = 0.5,
        schedulers: Any = (),
        at_most: int = 3,
        pause: int = 100,
    ) -> None:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1:
            raise InvalidArgument(f"factor is what the learning rate is multiplied by, between 0 and 1, got {factor!r}")
        self._optimizers = _several(optimizers)
        self._schedulers = _several(schedulers)
        self._limit = Limit(at_most, pause)
        self._factor = factor
        self.scale = 1.0
        """By what the rate was multiplied so far."""
        for optimizer in self._optimizers:
            if not hasattr(optimizer, "param_groups"):
                raise InvalidArgument(
                    f"LowerLearningRate takes optimizers of torch.optim, got {type(optimizer).__name__}"
                )
            _check_schedulers(optimizer, self._schedulers)

    @property
    def settings(self) -> Mapping[str, object]:
        return {"factor": self._factor} | self._limit.settings

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not (self._optimizers or optimizers):
            raise InvalidArgument(
                "LowerLearningRate() lowers the rate of the optimizers that were attached to, and there is none: give it "
                "one, or attach(model, optimizer, ...)"
            )

    def act(self, alert: Alert | Incident, training: Training) -> None:
        if not self._limit.allows(training.num_steps):
            return
        optimizers = self._optimizers or tuple(training.optimizers)
        schedulers = self._schedulers or tuple(training.schedulers)
        for optimizer in optimizers:
            _check_schedulers(optimizer, schedulers)
        self._limit.count(training.num_steps)
        self.scale *= self._factor
        scaled: set[int] = set()
        for container, key in (*_rates_of_groups(optimizers), *_rates_of_schedulers(schedulers)):
            rate = container[key]
            if not isinstance(rate, Tensor):
                container[key] = rate * self._factor
            elif id(rate) not in scaled:
                scaled.add(id(rate))
                rate.mul_(self._factor)  # in place: a graph that was captured reads it where it is


@dataclass(frozen=True, kw_only=True)
class When:
    """Which alerts lead to which actions. Made by `when`."""

    do: tuple[Action, ...]
    severity: Severity = "warning"
    families: frozenset[str] | None = None
    rules: frozenset[str] | None = None
    per: Per = "incident"

    def __str__(self) -> str:
        names = [f" of {name} {sorted(given)}" for name in ("families", "rules") if (given := getattr(self, name))]
        return f"from {self.severity} on{''.join(names)}, once per {self.per}"

    def occasion(self, alert: Alert | Incident) -> tuple[str, str]:
        """The incident or the alert for which an action is done once."""
        if isinstance(alert, Alert) and (self.per == "alert" or alert.incident_id is None):
            return "alert", alert.alert_id
        return "incident", str(alert.incident_id)

    def holds(self, alert: Alert | Incident, action: Action) -> bool:
        """Whether it is meant to lead to this action, and has just begun or, as an incident, has another verdict."""
        is_named = self.families is not None or self.rules is not None
        return (
            alert.state in ("firing", "open")
            and SEVERITIES.index(alert.severity) >= SEVERITIES.index(self.severity)
            and (self.families is None or alert.family in self.families)
            and (self.rules is None or alert.rule in self.rules)
            and (is_named or alert.family not in action.passes_over)
        )


def when(
    *,
    do: Action | Iterable[Action],
    severity: Severity = "warning",
    families: str | Iterable[str] | None = None,
    rules: str | Iterable[str] | None = None,
    per: Per = "incident",
) -> When:
    """Do these things, in this order, once for each incident with an alert that fires and matches.

    Given as `on_incident`, they are done once for each incident whose cause matches, also if that turns out later.

    per: "incident", or "alert" for once per alert. An incident is one failure, with all alerts that belong to it. A server
    without incidents sends alerts alone, and the actions are then done once per alert.
    severity: the lowest that counts. families, rules: the names that count; without them all do, but for Stop and
    LowerLearningRate, which pass over the family liveness.
    """
    actions = _several(do)
    if not actions:
        raise InvalidArgument("when(do=) takes actions such as Stop(), got none")
    for action in actions:
        if not isinstance(action, Action):
            raise InvalidArgument(f"when(do=) takes actions such as Stop(), got {action!r}")
    if severity not in SEVERITIES:
        raise InvalidArgument(f"severity is one of {', '.join(SEVERITIES)}, got {severity!r}")
    if per not in ("incident", "alert"):
        raise InvalidArgument(f"per must be 'incident' or 'alert', got {per!r}")
    named = {"families": _names("families", families), "rules": _names("rules", rules)}
    if unknown := (named["families"] or frozenset()) - FAMILIES:
        raise InvalidArgument(f"families are among {', '.join(sorted(FAMILIES))}, got {', '.join(sorted(unknown))}")
    return When(do=actions, severity=severity, per=per, **named)


OnAlert = Callable[[Alert], None] | When | Action
OnIncident = Callable[[Incident], object] | When | Action


@dataclass(frozen=True)
class Handler:
    """What to call for every change of an alert, or of an incident."""

    call: Callable[[Any, Training], object]
    is_action: bool
    """Whether it may change the training; what is not one is a function of the user's that looks on."""

    def __call__(self, changed: Alert | Incident, training: Training) -> None:
        self.call(changed, training)


def handlers_of(
    given: OnAlert | OnIncident | Sequence[OnAlert | OnIncident] | None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    of_incidents: bool = False,
    is_one_of_several: bool = False,
) -> list[Handler]:
    """One for each function and action, in order. Raises InvalidArgument for what cannot be done.

    of_incidents: whether they are given as `on_incident`. is_one_of_several: whether this process trains with others that
    are not told of its alerts.
    """
    handlers: list[Handler] = []
    for one in _given(given):
        condition = _as_when(one)
        if condition is None:
            handlers.append(_plain(one))
            continue
        if of_incidents and condition.per == "alert":
            raise InvalidArgument(
                "when(per='alert') is for on_alert=; on_incident= does an action once for each incident"
            )
        for action in condition.do:
            action.check(optimizers)
            if action.needs_all_ranks and is_one_of_several:
                raise InvalidArgument(
                    f"{type(action).__name__}() would act on this process alone, and several train together: pass "
                    "attach(..., process_group=) on all of them"
                )
            handlers.append(_once(condition, action))
    return handlers


def in_words(given: OnAlert | OnIncident | Sequence[OnAlert | OnIncident] | None) -> list[str]:
    """The actions in it and their settings, for ranks to compare."""
    conditions = [condition for condition in map(_as_when, _given(given)) if condition is not None]
    return [f"{_in_words(action)} {condition}" for condition in conditions for action in condition.do]


def _in_words(action: Action) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in action.settings.items())
    return f"{type(action).__name__}({settings})"


def checked_count(name: str, value: object) -> int:
    """Raises InvalidArgument."""
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if count < 1:
        raise InvalidArgument(f"{name} is an int of at least 1, got {value!r}")
    return count


def _given(handlers: Any) -> list[Any]:
    if handlers is None:
        return []
    return list(handlers) if isinstance(handlers, list | tuple) else [handlers]


def _as_when(one: OnAlert | OnIncident) -> When | None:
    return When(do=(one,)) if isinstance(one, Action) else one if isinstance(one, When) else None


def _plain(one: Any) -> Handler:
    if isinstance(one, type) and issubclass(one, Action):
        raise InvalidArgument(
            f"an action is made by a call: expected {one.__name__}(...), got the class {one.__name__}"
        )
    if not callable(one):
        raise InvalidArgument(f"on_alert and on_incident must be functions, actions, or lists of them, got {one!r}")
    open_ids = set[str]()

    def handle(changed: Alert | Incident, _: Training) -> None:
        if isinstance(changed, Incident):
            is_told = changed.is_active and changed.incident_id in open_ids  # and only its verdict has changed
            (open_ids.add if changed.is_active else open_ids.discard)(changed.incident_id)
            if is_told:
                return
        one(changed)

    return Handler(handle, is_action=False)


def _once(condition: When, action: Action) -> Handler:
    done = set[tuple[str, str]]()

    def handle(alert: Alert | Incident, training: Training) -> None:
        if condition.holds(alert, action) and condition.occasion(alert) not in done:
            done.add(condition.occasion(alert))
            action.act(alert, training)

    return Handler(handle, is_action=True)


def _check_schedulers(optimizer: torch.optim.Optimizer, schedulers: Sequence[Any]) -> None:
    if not schedulers and any("initial_lr" in group for group in optimizer.param_groups):
        raise InvalidArgument(
            "a scheduler drives this optimizer and would overwrite a lower learning rate at its next step: name it, "
            "LowerLearningRate(optimizer, schedulers=scheduler)"
        )


def _rates_of_groups(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[Any, Any]]:
    for optimizer in optimizers:
        yield from ((group, key) for group in optimizer.param_groups for key in RATES if key in group)


def _rates_of_schedulers(schedulers: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    for scheduler in schedulers:
        for name in ("base_lrs", "max_lrs"):
            rates = getattr(scheduler, name, ())
            yield from ((rates, index) for index in range(len(rates)))
        wrapped = [scheduler.scheduler] if hasattr(scheduler, "scheduler") else []  # Accelerate's
        yield from _rates_of_schedulers([*getattr(scheduler, "_schedulers", ()), *wrapped])  # SequentialLR's


def _several(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, Iterable) and not hasattr(values, "step") else (values,)


def _names(name: str, values: str | Iterable[str] | None) -> frozenset[str] | None:
    if values is None:
        return None
    names = [values] if isinstance(values, str) else list(values) if isinstance(values, Iterable) else [values]
    if not names or not all(isinstance(one, str) for one in names):
        raise InvalidArgument(f"{name} are names, got {values!r}")
    return frozenset(names)
