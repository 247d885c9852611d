"""Rules: their versions, what they say in words, their status on a run, and tests of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from tsemon_answers.alerts import Severity
from tsemon_answers.record import Query, Record


class RulesQuery(Query):
    """Whose rules."""

    project: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """The rules of this project: its own, and the server's for the rest. Without it, the server's rules."""


class RuleVersion(Record):
    """A rule as it was from some moment on."""

    name: str
    """Name of the rule."""
    version: int
    """Number of the version, from 1. The server and all projects share one sequence, so numbers can be missing in each."""
    project: str | None = None
    """Project that the version is for. It replaces the server's version there. Null: the version is the server's."""
    origin: Literal["built-in", "edited", "server"]
    """Whether the version came with the server or over REST. server: the project was set back to the server's rule."""
    enabled: bool
    """True if the rule is evaluated."""
    digest: str
    """Digest of the definition: equal definitions have equal digests."""
    definition: dict[str, Any]
    """The rule, as rule files write it."""
    created_at: datetime
    """Time at which the version was made, or first found in the server."""


class ExplainedLine(Record):
    """One line of a condition, as people read it."""

    depth: int
    """Indentation: the line belongs to the last line above it that is indented less."""
    text: str
    """A comparison, or what joins the lines below it."""


class ExplainedHold(Record):
    """How long something must last: both numbers must be reached."""

    samples: int
    """Number of consecutive samples."""
    steps: int
    """Number of steps from the first to the last of these samples; for a time-based rule, seconds."""


class ExplainedRule(Record):
    """A rule in words, with the defaults that its definition leaves out."""

    watches: list[str]
    """Metrics that the condition reads."""
    when: list[ExplainedLine]
    """Condition of the rule."""
    hold: ExplainedHold
    """How long the condition must hold before the alert fires."""
    clear: list[ExplainedLine]
    """Condition under which the alert is over; empty if that is when the condition of the rule does not hold."""
    clear_hold: ExplainedHold
    """How long the alert must be over before it is resolved."""
    only_while: list[ExplainedLine]
    """Condition under which the rule is evaluated; empty for always."""
    after: ExplainedHold
    """Length of the start of an attempt in which the rule is not evaluated."""


class Rules(Record):
    """The rules that the server knows."""

    project: str | None = None
    """Project that the rules are active in; null: every project without its own."""
    projects: Sequence[str] = ()
    """Projects with rules of their own that the token may read."""
    rules: list[RuleVersion]
    """Active version of each rule, including disabled ones, by name."""
    explained: dict[str, ExplainedRule]
    """Each rule in words, by name. A rule that was written for another version of tsemon is missing."""


class RuleHistory(Record):
    """All that a rule has been."""

    versions: list[RuleVersion]
    """All versions, newest first. The first one is active. For a project: its own versions and the server's, the active ones
    first."""


class RuleStanding(Record):
    """The status of one rule on a run."""

    rule: str
    """Name of the rule."""
    title: str
    """What the rule detects."""
    family: str
    """Kind of failure."""
    severity: Severity
    """Severity of that failure."""
    state: Literal["quiet", "pending", "firing", "unknown"]
    """unknown: the rule has never had all metrics that it needs."""
    judged_step: int | None
    """Last step at which the rule had all metrics that it needs; null for time-based rules."""
    not_measured: list[str]
    """Metrics that the rule reads and that the run has never had."""


class RuleStandings(Record):
    """The status of the rules on a run."""

    step: int | None
    """Last step of the current attempt that the rules have evaluated; null if there is none."""
    rules: list[RuleStanding]
    """The active rules."""


class TriedAlert(Record):
    """An alert that the rules would have opened."""

    rule: str
    """Name of the rule."""
    family: str
    """Kind of failure that the rule detects."""
    severity: Severity
    """Severity of that failure."""
    pending_step: int
    """Step at which the condition was first met."""
    firing_step: int
    """Step at which the condition had held for long enough."""
    resolved_step: int | None
    """Step at which the alert was over; null if it fires until the end."""
    summary: str
    """One sentence for people."""
    evidence: dict[str, Any]
    """Values that the rule saw when the alert fired."""
    advice: dict[str, str]
    """What to try (`text`), and the source of that advice (`source`)."""


class Tried(Record):
    """What the rules would have said."""

    alerts: list[TriedAlert]
    """Alerts that would have fired, in that order."""
    num_frames: int
    """Number of frames that the rules have read."""
    problems: list[str]
    """What of the run the rules could not see."""
