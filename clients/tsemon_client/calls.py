"""What can be asked of the server: each question is a method of `Client` and of `AsyncClient`.

A question with a query string takes its arguments from the query's class in `tsemon_answers`.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, cast
from urllib.parse import quote

from pydantic import Field

from tsemon import errors
from tsemon_answers.alerts import Alert, AlertPage, AlertsQuery, Silence, Silences
from tsemon_answers.events import EventKind, EventsQuery
from tsemon_answers.incidents import Incident, IncidentDetail, IncidentPage, IncidentsQuery, SubStepQuery, Within
from tsemon_answers.record import Query, Record
from tsemon_answers.rules import CheckedRule, RuleHistory, Rules, RuleStandings, RuleVersion, Tried
from tsemon_answers.runs import (
    Glance,
    Glances,
    GlancesQuery,
    Run,
    RunDetail,
    RunPage,
    RunsQuery,
    Tags,
    TagsQuery,
    TagUse,
    Zoom,
)
from tsemon_answers.series import (
    CompareQuery,
    Comparison,
    ExportFilter,
    FrameQuery,
    Heatmap,
    HeatmapQuery,
    RecordedFrame,
    Series,
    SeriesQuery,
)
from tsemon_client.asking import Download, Listing, Request, Talk, asks, hears, lists, saves
from tsemon_client.checking import checked, made_of
from tsemon_client.models import Records

P = ParamSpec("P")
M = TypeVar("M", bound=Record)
R = TypeVar("R", bound=Record)

TRIAL_S = 600.0
"""How long rules may take to read a stored run."""
SILENCE_S = 45.0
"""A stream of events without any data for this long is lost: the server sends a comment every 15 seconds."""


def ask(request: Request[M]) -> Talk[M]:
    """One question."""
    answer = yield request
    return cast(M, answer)


def ask_list(request: Request[Any], key: str, model: type[R]) -> Talk[Records[R]]:
    """One question, whose answer has a list under `key`."""
    answer = yield request
    return Records(model, getattr(answer, key))


def path_of(*parts: str) -> str:
    """A path of the interface, whose parts are segments. Raises InvalidArgument for what would be another path."""
    for part in parts:
        if not part or "/" in part or part in (".", ".."):
            raise errors.InvalidArgument(f"expected an id or a name, without a slash, got {part!r}")
    return "".join("/" + quote(part, safe="") for part in parts)


def _of_run(part: str, query: Callable[P, Query], answer: type[M]) -> Callable[Concatenate[str, P], Talk[M]]:
    """A question about one run, whose id comes before the fields of `query`."""

    def make(asked: Query, run_id: str) -> Talk[M]:
        return ask(Request(path_of("runs", run_id, part), answer, asked.params()))

    make.__annotations__["return"] = f"Talk[{answer.__name__}]"
    return made_of(query, make)


class _Listed(Query):
    limit: Annotated[int | None, Field(ge=1, exclude=True)] = None
    """Maximum number of records to read; None for all."""


class _AllRuns(_Listed, RunsQuery):
    __doc__ = RunsQuery.__doc__


class _AllAlerts(_Listed, AlertsQuery):
    __doc__ = AlertsQuery.__doc__


class _AllIncidents(_Listed, IncidentsQuery):
    __doc__ = IncidentsQuery.__doc__


def _runs(asked: _AllRuns) -> Listing[Run]:
    return Listing("/runs", RunPage, "runs", Run, asked.params(), asked.limit)


def _alerts(asked: _AllAlerts) -> Listing[Alert]:
    return Listing("/alerts", AlertPage, "alerts", Alert, asked.params(), asked.limit)


def _incidents(asked: _AllIncidents) -> Listing[Incident]:
    return Listing("/incidents", IncidentPage, "incidents", Incident, asked.params(), asked.limit)


def _compare(asked: CompareQuery) -> Talk[Comparison]:
    return ask(Request("/compare", Comparison, asked.params()))


def _tags(asked: TagsQuery) -> Talk[Records[TagUse]]:
    return ask_list(Request("/tags", Tags, asked.params()), "tags", TagUse)


def _export(asked: ExportFilter, run_id: str, path: str | Path) -> Download:
    path = Path(path)
    if path.suffix not in (".parquet", ".csv"):
        raise errors.InvalidArgument(f"expected a file that ends in .parquet or .csv, got {path}")
    if not path.parent.is_dir():
        raise errors.InvalidArgument(
            f"expected a file in a folder that is there, got {path}; make the folder {path.parent} before"
        )
    params = {"format": path.suffix[1:], **asked.params()}
    return Download(Request(path_of("runs", run_id, "export"), Record, params), path)


def _glances(asked: GlancesQuery) -> Talk[Records[Glance]]:
    if not asked.run_ids:
        return Records(Glance)
    return (yield from ask_list(Request("/glances", Glances, asked.params()), "glances", Glance))


@checked
def _find_run(name: str, project: str = "default") -> Talk[RunDetail]:
    """The run of this name, with all that `run` returns. Raises UnknownRun."""
    page = yield from ask(Request("/runs", RunPage, {"project": project, "run": name, "limit": 1}))
    if not page.runs:
        raise errors.UnknownRun(f"the service has no run {name!r} in project {project!r}")
    return (yield from _run(page.runs[0].run_id))


@checked
def _run(run_id: str) -> Talk[RunDetail]:
    """One run with its blocks, config, attempts, recorded metrics and latest scalars. Raises UnknownRun."""
    return ask(Request(path_of("runs", run_id), RunDetail))


@checked
def _zoom(run_id: str) -> Talk[Zoom]:
    """Ask a live run for four samples, 4 or 5 steps apart. Until its process has the request, asking again changes nothing.

    The samples come later than `after_step`. None come if the training samples every N steps, or if it has used up its
    zooms. Raises UnknownRun, RunNotLive if it has ended or is silent, Forbidden if the token is for reading only.
    """
    return ask(Request(path_of("runs", run_id, "zoom"), Zoom, method="POST"))


@checked
def _alert(alert_id: str) -> Talk[Alert]:
    """One alert. Raises UnknownAlert."""
    return ask(Request(path_of("alerts", alert_id), Alert))


@checked
def _incident(incident_id: str) -> Talk[IncidentDetail]:
    """One incident, with the sub-step that caused it. Raises UnknownIncident."""
    return ask(Request(path_of("incidents", incident_id), IncidentDetail))


@checked
def _acknowledge(alert_id: str, *, note: str | None = None, by: str | None = None) -> Talk[Alert]:
    """Acknowledge an alert: it goes on, and nobody is notified of it any more.

    `by` is who acknowledges it, by default the name of the user who runs this. The first acknowledgement stays. Returns the
    alert. Raises UnknownAlert, WrongAlertState if it is not firing, Forbidden if the token is for reading only.
    """
    body = {"by": by or _user(), "note": note}
    return ask(Request(path_of("alerts", alert_id, "ack"), Alert, method="POST", body=body))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError) as error:  # a container may run under a number without a name
        raise errors.InvalidArgument(
            "expected who says so as `by`: this process belongs to nobody with a name"
        ) from error


@checked
def _silences(project: str | None = None) -> Talk[Records[Silence]]:
    """Active silences, the first to end first; with `project`, only silences of this project."""
    return ask_list(Request("/silences", Silences, _of(project)), "silences", Silence)


@checked
def _silence(
    *,
    until: datetime,
    rule: str | None = None,
    run: str | None = None,
    project: str | None = None,
    family: str | None = None,
    reason: str = "",
    by: str | None = None,
) -> Talk[Silence]:
    """Stop messages about alerts that match all given names, at least one, until a time with a zone.

    In the name of the `run`, * stands for any characters and ? for one. `by` is recorded, by default the name of the current
    user. Returns the silence. Raises InvalidArgument if nothing is named, Forbidden if the token is for reading only.
    """
    named = {"rule": rule, "run": run, "project": project, "family": family}
    body = named | {"until": until.isoformat(), "created_by": by or _user(), "reason": reason}
    return ask(Request("/silences", Silence, method="POST", body=body, is_idempotent=False))


@checked
def _end_silence(silence_id: str) -> Talk[None]:
    """End a silence before its time. Raises UnknownSilence, Forbidden if the token is for reading only."""
    yield Request(path_of("silences", silence_id), Record, method="DELETE")


def _rules(project: str | None = None) -> Talk[Records[RuleVersion]]:
    """The active version of each rule, by name, including disabled ones. A `project` can have its own."""
    return ask_list(Request("/rules", Rules, _of(project)), "rules", RuleVersion)


@checked
def _rule(name: str, project: str | None = None) -> Talk[Records[RuleVersion]]:
    """All versions of a rule, the active one first. With `project`, its own and the server's. Raises UnknownRule."""
    return ask_list(Request(path_of("rules", name), RuleHistory, _of(project)), "versions", RuleVersion)


def _of(project: str | None) -> dict[str, str]:
    return {} if project is None else {"project": project}


@checked
def _put_rules(rules: str, project: str | None = None) -> Talk[Records[RuleVersion]]:
    """Activate the rules of a rule file, on the server or in a project. If one has a mistake, nothing changes.

    `rules` is the text of the file. Other rules stay as they are. A rule that has changed gets a new version.
    Returns what `rules` returns. Raises InvalidDocument or InvalidRules, and Forbidden if the token is not for that.
    """
    return ask_list(Request("/rules", Rules, _of(project), method="PUT", text=rules), "rules", RuleVersion)


@checked
def _disable_rule(name: str, project: str | None = None) -> Talk[Records[RuleVersion]]:
    """Disable a rule, on the server or in a project, and resolve its alerts. Returns what `rule` returns.

    Raises UnknownRule, and Forbidden if the token is not for changing this rule.
    """
    request = Request(path_of("rules", name), RuleHistory, _of(project), method="DELETE")
    return ask_list(request, "versions", RuleVersion)


@checked
def _restore_rule(name: str, project: str | None = None) -> Talk[Records[RuleVersion]]:
    """Return a built-in rule to its original definition, or a project to the server's rule. Returns what `rule` returns.

    Raises UnknownRule, and Forbidden if the token is not for changing this rule.
    """
    request = Request(path_of("rules", name, "restore"), RuleHistory, _of(project), method="POST")
    return ask_list(request, "versions", RuleVersion)


@checked
def _standing(run_id: str) -> Talk[RuleStandings]:
    """The status of the active rules on a run: state, last evaluated step, missing metrics. Raises UnknownRun."""
    return ask(Request(path_of("runs", run_id, "rules"), RuleStandings))


@checked
def _check_rule(definition: Mapping[str, Any]) -> Talk[CheckedRule]:
    """Whether the server can read a rule, as `{"name": ..., "when": ...}`: its mistakes, or the rule in words."""
    return ask(Request("/rules/check", CheckedRule, method="POST", body={"rules": [definition]}))


@checked
def _test_rules(run_id: str, rules: str | None = None) -> Talk[Tried]:
    """What rules would have said of a stored run. `rules` is the text of a rule file; without it, the active rules.

    It may take minutes for a long run, so it is asked once. Raises UnknownRun, InvalidRules, Busy.
    """
    body = {"run_id": run_id} | ({} if rules is None else {"rules": rules})
    return ask(Request("/rules/test", Tried, method="POST", body=body, timeout_s=TRIAL_S, is_idempotent=False))


@checked
def _events(*run_ids: str, kinds: Sequence[EventKind] = ()) -> Request[Record]:
    """Changes of these runs, up to 100, from now on; without any, of all runs that the token may read. It has no end.

    With `kinds` of events no others are told, but for RunDeleted.

    The first event is Connected: read then what you show. A lost connection is made anew for as long as it takes; another
    Connected tells that events may have been missed, so read it again. Raises ServerUnreachable if the first
    connection fails; Unauthorized, Forbidden and UnknownRun at any time.
    """
    asked = EventsQuery(run_ids=run_ids, kinds=kinds)
    return Request("/events", Record, asked.params(), timeout_s=SILENCE_S)


class Calls:
    """Every question, as a method of a client."""

    runs = lists(made_of(_AllRuns, _runs))
    find_run = asks(_find_run)
    run = asks(_run)
    series = asks(_of_run("series", SeriesQuery, Series))
    heatmap = asks(_of_run("heatmap", HeatmapQuery, Heatmap))
    compare = asks(made_of(CompareQuery, _compare))
    frame = asks(_of_run("frame", FrameQuery, RecordedFrame))
    alerts = lists(made_of(_AllAlerts, _alerts))
    alert = asks(_alert)
    acknowledge = asks(_acknowledge)
    silences = asks(_silences)
    silence = asks(_silence)
    end_silence = asks(_end_silence)
    incidents = lists(made_of(_AllIncidents, _incidents))
    incident = asks(_incident)
    sub_step = asks(_of_run("sub-step", SubStepQuery, Within))
    zoom = asks(_zoom)
    rules = asks(_rules)
    rule = asks(_rule)
    standing = asks(_standing)
    put_rules = asks(_put_rules)
    disable_rule = asks(_disable_rule)
    restore_rule = asks(_restore_rule)
    check_rule = asks(_check_rule)
    test_rules = asks(_test_rules)
    tags = asks(made_of(TagsQuery, _tags))
    glances = asks(made_of(GlancesQuery, _glances))
    export = saves(made_of(ExportFilter, _export))
    events = hears(_events)
