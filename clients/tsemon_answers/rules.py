"""Rules: their versions, what they say in words, their status on a run, and tests of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from tsemon.catalogue import OWN_FAMILY
from tsemon_answers.alerts import Severity
from tsemon_answers.incidents import Verdict
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

    @property
    def family(self) -> str:
        """Kind of failure that the rule detects. A definition can leave it out."""
        return str(self.definition.get("family", OWN_FAMILY))


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
    waits_for: str = ""
    """The samples and steps that must still come before the rule can fire, such as `9 more samples with loss and 10 more
    steps`. Empty if enough have come, and if a metric is missing. A rule that would fire at its first sample waits for
    nothing before it. `1 more sample with loss whose values are all defined` means that a value was NaN or a divisor 0 in
    every sample so far. `a sample in which only_while holds`: in the newest sample, this guard of the rule does not hold."""


class RuleStandings(Record):
    """The status of the rules on a run."""

    step: int | None
    """Last step of the current attempt that the rules have evaluated; null if there is none."""
    rules: list[RuleStanding]
    """The active rules."""


class RuleMistake(Record):
    """Something in a rule that the server cannot read."""

    field: str
    """Key of the rule with the mistake, such as `when` or `for.samples`; empty for the rule as a whole."""
    text: str
    """The mistake, and the correction."""
    column: int | None
    """Column of the mistake in a condition or value in one line, from 1; null elsewhere."""
    length: int | None
    """Number of characters from this column on that are wrong; 0 if something is missing at the end."""
    nearest: str | None
    """The known name that is most like an unknown one."""
    example: str | None
    """A line that is right."""


class CheckedRule(Record):
    """Whether the server could read a rule, and the rule in words."""

    mistakes: list[RuleMistake]
    """Mistakes of the rule, at most one for each key; empty if it can be put in force."""
    lines: dict[str, str]
    """Conditions of the rule (`when`, `clear`, `only_while`) as tsemon prints them, without `for` and `after`."""
    explained: ExplainedRule | None
    """The rule in words; null if it has mistakes."""
    notes: list[str]
    """Names with layers in it that tsemon does not measure: misspellings, or metrics of another writer."""


class TracedPoint(Record):
    """One sample of a comparison, in the layer that decides it."""

    step: int
    """Step of the sample."""
    seen: float | None
    """Value that was compared; null if it is not finite or was not measured."""
    layer: str | None
    """Layer of the value: "3", or "decoder 3" in a model with several stacks; null for a number without layers."""
    bounds: dict[str, float | None]
    """Bounds of the value (`above`, `below`, `at_least`, `at_most`)."""
    holds: bool | None
    """Answer of the comparison; null if it is unknown."""


class TracedComparison(Record):
    """A comparison of a rule over the steps of an attempt."""

    text: str
    """The comparison in words."""
    value: str
    """The compared value in words."""
    points: list[TracedPoint]
    """Samples in the order of steps. If a point stands for several, it is the one that comes closest to holding."""
    num_held: int
    """Number of samples in which the comparison held."""
    num_known: int
    """Number of samples in which the answer was known."""
    nearest: TracedPoint | None
    """Sample that came closest to holding; null if no answer was known."""


class TracedSpan(Record):
    """One time that a rule was met."""

    pending_step: int
    """Step at which the condition was first met."""
    firing_step: int | None
    """Step at which it had held for long enough; null if it never did."""
    end_step: int | None
    """Step at which the alert was resolved or withdrawn; null if that did not happen before the end of the attempt."""


class RuleTrace(Record):
    """The comparisons of a rule over one attempt of a run, and when the rule was met."""

    rule: str
    """Name of the rule."""
    attempt: int
    """Number of the attempt, from 1."""
    first_step: int | None
    """Step of the first frame; null without frames."""
    last_step: int | None
    """Step of the last frame."""
    num_samples: int
    """Number of frames that the rule read."""
    samples_per_point: int
    """Number of samples that one point stands for."""
    comparisons: list[TracedComparison]
    """Comparisons of its condition, at most the first 12, without those below `not`."""
    spans: list[TracedSpan]
    """When the rule was met, at most the first 200 times."""
    num_spans: int
    """Number of times that the rule was met."""
    not_measured: list[str]
    """Metrics of the rule that the attempt never had."""


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


class Lacking(Record):
    """A metric that a rule reads and a run does not have."""

    kind: str
    """`scalar`, `layers` or `heads`."""
    name: str
    """Name of the metric."""
    nearest: str | None
    """The metric of the run that is most like it, as a line names it; null if none is."""


class NotJudged(Record):
    """A rule whose condition was unknown in every frame."""

    rule: str
    """Name of the rule."""
    lacks: list[Lacking]
    """Metrics of the condition that no frame has. Empty if the run has all of them: a layer may be missing."""
    waits_for: str = ""
    """Samples and steps that the rule still needs, as in its status. Empty if a metric is missing."""


class Waiting(Record):
    """A rule that was evaluated, but could not fire because each attempt had too few samples or steps."""

    rule: str
    """Name of the rule."""
    waits_for: str
    """Samples and steps that were missing at the end of the last attempt."""


class Tried(Record):
    """What the rules would have said."""

    alerts: list[TriedAlert]
    """Alerts that would have fired, in that order."""
    incidents: list[Verdict] = Field([])
    """Incidents that these alerts would have made."""
    num_frames: int
    """Number of frames that the rules have read."""
    problems: list[str]
    """What of the run the rules could not see."""
    not_judged: list[NotJudged] = Field([])
    """Rules that were never evaluated, because their condition was unknown in every frame."""
    waiting: list[Waiting] = Field([])
    """Rules that were evaluated, but could not fire because each attempt had too few samples or steps."""
    traces: list[RuleTrace] = Field([])
    """A trace of each rule in each attempt, if `points` was asked for."""
