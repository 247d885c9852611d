"""What can be asked of the service, as values: both clients send these.

A function here is a method of `Client` and of `AsyncClient`, with its signature and its docstring. It returns what is to
be asked: one question after the other where one needs the answer to another (`Talk`), a list that comes in pages
(`Listing`), a file (`Download`), or a stream of events (`Listening`).
"""

from __future__ import annotations

import getpass
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, cast
from urllib.parse import quote

from tsemon import errors
from tsemon.wire import AlertState, RunState
from tsemon_client import models
from tsemon_client.checking import checked
from tsemon_client.models import Along, Condition, EventKind, Record, Records, RunOrder, Severity

T = TypeVar("T")
M = TypeVar("M", bound=Record)
R = TypeVar("R", bound=Record)

PAGE = 200
"""Records asked for at once."""
TRIAL_S = 600.0
"""How long rules may take to read a stored run."""
SILENCE_S = 45.0
"""A stream of events that says nothing for so long is lost: the service sends a comment every 15 seconds."""


@dataclass(frozen=True)
class Request(Generic[M]):
    """One question, and what its answer is read as."""

    path: str
    model: type[M]
    query: Mapping[str, Any] = field(default_factory=dict)
    """What is None is left out."""
    method: str = "GET"
    body: Mapping[str, Any] | None = None
    timeout_s: float | None = None
    """How long to wait for the answer, where that is not what the client waits for others."""
    is_idempotent: bool = True
    """Whether asking twice is the same as asking once, and no great work: then it is asked again when no answer came."""

    @property
    def params(self) -> dict[str, Any]:
        """The query without what is None."""
        return {name: value for name, value in self.query.items() if value is not None}


Talk = Generator[Request[Any], Any, T]
"""Yields requests, is sent their answers, and returns what the caller wanted to know."""


@dataclass(frozen=True)
class Listing(Generic[R]):
    """A list that comes in pages, each of which says where the next one begins."""

    path: str
    page: type[Record]
    key: str
    """The field of the page with the records."""
    model: type[R]
    query: Mapping[str, Any]
    limit: int | None
    """So many records at most; None for all."""
    cursor: str | None = None
    """Where it goes on."""

    @property
    def request(self) -> Request[Any]:
        """The next page."""
        size = PAGE if self.limit is None else min(PAGE, self.limit)
        return Request(self.path, self.page, {**self.query, "limit": size, "cursor": self.cursor})

    def records(self, page: Any) -> list[R]:
        """Those of a page."""
        found: list[R] = getattr(page, self.key)
        return found

    def after(self, page: Any) -> Listing[R] | None:
        """What follows; None where that was all, or enough."""
        left = None if self.limit is None else self.limit - len(self.records(page))
        if page.next_cursor is None or left == 0:
            return None
        return replace(self, limit=left, cursor=page.next_cursor)


@dataclass(frozen=True)
class Download:
    """What is written to a file as it comes."""

    request: Request[Any]
    path: Path

    @contextmanager
    def opened(self) -> Generator[BinaryIO, None, None]:
        """A file beside the path, which takes its place when the block ends well and is gone when it does not."""
        partial = self.path.with_name(f"{self.path.name}.partial")
        try:
            with partial.open("wb") as file:
                yield file
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class Listening:
    """A stream of events."""

    request: Request[Any]


def ask(request: Request[M]) -> Talk[M]:
    """One question."""
    answer = yield request
    return cast(M, answer)


def ask_list(request: Request[M], key: str, model: type[R]) -> Talk[Records[R]]:
    """One question, whose answer has a list under `key`."""
    answer = yield request
    return Records(model, getattr(answer, key))


def path_of(*parts: str) -> str:
    """A path of the interface, whose parts are segments. Raises InvalidArgument for what would be another path."""
    for part in parts:
        if not part or "/" in part or part in (".", ".."):
            raise errors.InvalidArgument(f"expected an id or a name, without a slash, got {part!r}")
    return "".join("/" + quote(part, safe="") for part in parts)


@checked
def runs(
    *,
    project: str | None = None,
    run: str | None = None,
    state: RunState | None = None,
    condition: Condition | None = None,
    tags: Sequence[str] = (),
    q: str | None = None,
    order: RunOrder = "-updated",
    limit: int | None = None,
) -> Listing[models.Run]:
    """The runs that match all that is given, page by page while they are read.

    `run` is a name, `q` a part of a run's name, project or tag, `tags` are words that a run must all have; `order` names a
    field, with "-" for descending, or is "live"; `limit` is how many to read at most. A run that is updated between two
    pages changes its place in the order by update; in the others it does not.
    """
    query = {"project": project, "run": run, "state": state, "condition": condition, "q": q, "order": order}
    return _listing("/runs", models.RunPage, "runs", models.Run, {**query, "tag": list(tags) or None}, limit)


@checked
def find_run(name: str, project: str = "default") -> Talk[models.RunDetail]:
    """The run of this name, with all that `run` tells. Raises UnknownRun."""
    page = yield from ask(Request("/runs", models.RunPage, {"project": project, "run": name, "limit": 1}))
    if not page.runs:
        raise errors.UnknownRun(f"the service has no run {name!r} in project {project!r}")
    return (yield from run(page.runs[0].run_id))


@checked
def run(run_id: str) -> Talk[models.RunDetail]:
    """One run with its blocks, config, attempts, recorded metrics and latest scalars. Raises UnknownRun."""
    return ask(Request(path_of("runs", run_id), models.RunDetail))


@checked
def series(
    run_id: str,
    metric: str,
    *,
    layer: int | None = None,
    head: int | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
    points: int = 1000,
    attempt: int | None = None,
) -> Talk[models.Series]:
    """One metric over steps, as min, mean and max of at most `points` (3 to 10,000) buckets; each step where all fit.

    `layer` is needed for a metric with a value per layer: from 0, and -1 is the last; `head` for one that is recorded per
    head. `from_step` and `to_step` are included. `attempt` is one attempt as it was; without it, what no later one hides.
    Raises UnknownRun, UnknownMetric, UnknownLayer, UnknownAttempt, InvalidRange.
    """
    query = {"metric": metric, "layer": layer, "head": head, "points": points, "attempt": attempt}
    return ask(Request(path_of("runs", run_id, "series"), models.Series, query | _span(from_step, to_step)))


@checked
def heatmap(
    run_id: str,
    metric: str,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    columns: int = 200,
    attempt: int | None = None,
    extremes: bool | None = None,
) -> Talk[models.Heatmap]:
    """One metric over layers and steps: the mean of each layer in at most `columns` (1 to 2000) spans of steps.

    With `extremes` also what a mean hides: the value farthest from it, and how many are not finite.
    Raises UnknownRun, UnknownMetric, UnknownAttempt, InvalidRange.
    """
    query = {"metric": metric, "columns": columns, "attempt": attempt, "extremes": extremes}
    return ask(Request(path_of("runs", run_id, "heatmap"), models.Heatmap, query | _span(from_step, to_step)))


@checked
def compare(
    run_ids: Sequence[str],
    metric: str,
    *,
    layer: int | None = None,
    head: int | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
    points: int = 1000,
    along: Along | None = None,
) -> Talk[models.Comparison]:
    """One metric of up to 20 runs over the same buckets of steps. `layer=-1` is the last layer of each run.

    `along` says what the `x` of each bucket is: its step, seconds since the run's first frame, or tokens.
    A run without the metric is empty; if all are, raises UnknownMetric or UnknownLayer. Else as `series`.
    """
    _check_count(run_ids, least=1, most=20)
    query = {"run": list(run_ids), "metric": metric, "layer": layer, "head": head, "points": points, "along": along}
    return ask(Request("/compare", models.Comparison, query | _span(from_step, to_step)))


@checked
def frame(run_id: str, step: int | None = None, *, attempt: int | None = None) -> Talk[models.RecordedFrame]:
    """All that was recorded of the step nearest to `step`; of the newest one without it.

    Raises UnknownRun, UnknownAttempt, UnknownFrame where nothing is recorded.
    """
    query = {"step": step, "attempt": attempt}
    return ask(Request(path_of("runs", run_id, "frame"), models.RecordedFrame, query))


@checked
def alerts(
    *,
    state: AlertState | Sequence[AlertState] | None = None,
    run_id: str | None = None,
    project: str | None = None,
    rule: str | None = None,
    family: str | None = None,
    severity: Severity | None = None,
    acknowledged: bool | None = None,
    silenced: bool | None = None,
    at_end: bool | None = None,
    since: datetime | str | None = None,
    limit: int | None = None,
) -> Listing[models.Alert]:
    """The alerts that match all that is given, the newest first, page by page while they are read.

    `state` is one or several. `at_end`: those that `alerts_at_end` of their run counts, or only others. `since` is an aware
    time, or one as ISO text with its zone: alerts that changed then or later.
    """
    query = {
        "state": state,
        "run": run_id,
        "project": project,
        "rule": rule,
        "family": family,
        "severity": severity,
        "acknowledged": acknowledged,
        "silenced": silenced,
        "at_end": at_end,
        "since": since.isoformat() if isinstance(since, datetime) else since,
    }
    return _listing("/alerts", models.AlertPage, "alerts", models.Alert, query, limit)


@checked
def alert(alert_id: str) -> Talk[models.Alert]:
    """One alert. Raises UnknownAlert."""
    return ask(Request(path_of("alerts", alert_id), models.Alert))


@checked
def acknowledge(alert_id: str, *, note: str | None = None, by: str | None = None) -> Talk[models.Alert]:
    """Say that somebody has seen to an alert: it goes on, and nobody is told of it any more.

    `by` is who says so, without it the name of the user who runs this. Whoever said so first stays. Returns the alert.
    Raises UnknownAlert, WrongAlertState where it does not fire, Forbidden where the token is for reading only.
    """
    body = {"by": by or _user(), "note": note}
    return ask(Request(path_of("alerts", alert_id, "ack"), models.Alert, method="POST", body=body))


def rules() -> Talk[Records[models.RuleVersion]]:
    """The newest version of each rule, by name; also of those that are disabled."""
    return ask_list(Request("/rules", models.Rules), "rules", models.RuleVersion)


@checked
def rule(name: str) -> Talk[Records[models.RuleVersion]]:
    """All versions of a rule, the newest first: that one is in force. Raises UnknownRule."""
    return ask_list(Request(path_of("rules", name), models.RuleHistory), "versions", models.RuleVersion)


@checked
def standing(run_id: str) -> Talk[models.RuleStandings]:
    """How the rules in force stand on a run: what each says, when it was last judged, what it lacks. Raises UnknownRun."""
    return ask(Request(path_of("runs", run_id, "rules"), models.RuleStandings))


@checked
def test_rules(run_id: str, rules: str | None = None) -> Talk[models.Tried]:  # noqa: PT028  no test of pytest's
    """What rules would have said of a stored run. `rules` is the text of a rule file; without it, those in force.

    It may take minutes for a long run, so it is asked once. Raises UnknownRun, InvalidRules, Busy.
    """
    body = {"run_id": run_id} | ({} if rules is None else {"rules": rules})
    once = Request("/rules/test", models.Tried, method="POST", body=body, timeout_s=TRIAL_S, is_idempotent=False)
    return ask(once)


@checked
def tags(*, project: str | None = None) -> Talk[Records[models.TagUse]]:
    """The 200 tags that most runs have, with how many do."""
    return ask_list(Request("/tags", models.Tags, {"project": project}), "tags", models.TagUse)


@checked
def glances(run_ids: Sequence[str], *, points: int = 40) -> Talk[Records[models.Glance]]:
    """Of up to 100 runs the loss in a few points and the layer in most trouble."""
    _check_count(run_ids, least=0, most=100)
    if not run_ids:
        return Records(models.Glance)
    query = {"run": list(run_ids), "points": points}
    return (yield from ask_list(Request("/glances", models.Glances, query), "glances", models.Glance))


def _check_count(run_ids: Sequence[str], *, least: int, most: int) -> None:
    if not least <= len(run_ids) <= most:
        raise errors.InvalidArgument(f"run_ids: expected {least} to {most} ids, got {len(run_ids) or 'an empty list'}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError) as error:  # a container may run under a number without a name
        raise errors.InvalidArgument(
            "expected who says so as `by`: this process belongs to nobody with a name"
        ) from error


def _span(from_step: int | None, to_step: int | None) -> dict[str, int | None]:
    return {"from_step": from_step, "to_step": to_step}


def _listing(
    path: str, page: type[Record], key: str, model: type[R], query: Mapping[str, Any], limit: int | None
) -> Listing[R]:
    if limit is not None and limit < 1:
        raise errors.InvalidArgument(f"expected how many to read at most as `limit`, from 1, got {limit}")
    return Listing(path, page, key, model, query, limit)


@checked
def export(
    run_id: str,
    path: str | Path,
    *,
    metrics: Sequence[str] | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
    attempt: int | None = None,
) -> Download:
    """Write all raw samples to a file that ends in .parquet or .csv, a row per value; nothing is there until all of it is.

    Returns the path. Raises UnknownRun, UnknownMetric, UnknownAttempt, InvalidRange, MissingPackage where the service
    cannot make Parquet, Busy.
    """
    path = Path(path)
    if path.suffix not in (".parquet", ".csv"):
        raise errors.InvalidArgument(f"expected a file that ends in .parquet or .csv, got {path}")
    if not path.parent.is_dir():
        raise errors.InvalidArgument(
            f"expected a file in a folder that is there, got {path}; make the folder {path.parent} before"
        )
    query = {"format": path.suffix[1:], "metric": metrics, "attempt": attempt}
    return Download(Request(path_of("runs", run_id, "export"), Record, query | _span(from_step, to_step)), path)


@checked
def events(*run_ids: str, kinds: Sequence[EventKind] = ()) -> Listening:
    """What happens to these runs, up to 100, from now on; without any, to all that the token may read. It has no end.

    With `kinds` of events no others are told, but for RunDeleted.

    The first event is Connected: read then what you show. A lost connection is made anew for as long as it takes; another
    Connected tells that events may have been missed, so read it again. Raises ServerUnreachable where the first
    connection fails; Unauthorized, Forbidden and UnknownRun at any time.
    """
    query = {"run": list(run_ids) or None, "kind": list(kinds) or None}
    return Listening(Request("/events", Record, query, timeout_s=SILENCE_S))
