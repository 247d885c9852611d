"""Answers about runs, metrics and alerts. No HTTP here."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tsemon.catalogue import LAYERED, SCALARS, nearest
from tsemon.errors import InvalidArgument, InvalidRange, UnknownAttempt, UnknownLayer, UnknownMetric
from tsemon_answers.alerts import AlertPage, AlertPageQuery, NotificationPage, NotificationsQuery
from tsemon_answers.incidents import IncidentPage, IncidentPageQuery, IncidentsQuery
from tsemon_answers.record import Page, Record, Span
from tsemon_answers.runs import Run, RunDetail, RunPage, RunPageQuery
from tsemon_answers.series import (
    ComparedRun,
    CompareQuery,
    Comparison,
    ExportQuery,
    Heatmap,
    HeatmapQuery,
    Series,
    SeriesQuery,
)
from tsemon_server.services.queries.export import MEDIA_TYPES, PARTS, check_format, file_name
from tsemon_server.services.queries.reduce import bucketed
from tsemon_server.store import Store
from tsemon_server.store.frames import Frames
from tsemon_server.store.ledger.listing import Place
from tsemon_server.store.reading import Reader
from tsemon_server.store.series.cells import Cells
from tsemon_server.store.series.metric import Points, shift_of
from tsemon_server.store.series.packing import Kind

R = TypeVar("R", bound=Record)

COUNTED_RUNS = 10_000
"""What is more than that is not counted."""


class _Key(NamedTuple):
    """What places a run in an order."""

    types: tuple[Any, ...]
    of: Callable[[Run], tuple[float | str | None, ...]]


def _place_of_live(run: Run) -> tuple[int, float, str]:
    if run.condition in ("running", "stuck"):
        return 1, run.created_at.timestamp(), run.run_id
    return 0, run.updated_at.timestamp(), run.run_id


_KEYS: Mapping[str, _Key] = {
    "live": _Key((int, float, str), _place_of_live),
    "updated": _Key((float, str), lambda run: (run.updated_at.timestamp(), run.run_id)),
    "created": _Key((float, str), lambda run: (run.created_at.timestamp(), run.run_id)),
    "name": _Key((str, str), lambda run: (run.run, run.project)),
    "step": _Key((int | None, str), lambda run: (run.last_step, run.run_id)),
    "loss": _Key((float | None, str), lambda run: (run.loss, run.run_id)),
    "alerts": _Key((int, float, str), lambda run: (run.open_alerts, run.created_at.timestamp(), run.run_id)),
}


def list_runs(store: Store, asked: RunPageQuery) -> RunPage:
    """A page of the runs that fit."""
    order, limit = asked.order, asked.limit
    key = _KEYS[order.removeprefix("-")]
    after = _place(asked.cursor, f"runs {order}", key.types)
    with store.read() as reader:
        runs = reader.runs.find(asked, order=order, limit=limit + 1, after=after)
        are_all = asked.cursor is None and len(runs) <= limit
        total = len(runs) if are_all else reader.runs.count(asked, COUNTED_RUNS)
    last = key.of(runs[limit - 1]) if len(runs) > limit else None
    return RunPage(runs=runs[:limit], next_cursor=_cursor(f"runs {order}", last), total=total)


def _check_since(since: object) -> None:
    if isinstance(since, datetime) and since.tzinfo is None:
        raise InvalidArgument(f"expected `since` with a time zone, as in 2026-01-31T12:00:00Z, got {since.isoformat()}")


def list_alerts(store: Store, asked: AlertPageQuery) -> AlertPage:
    """A page of the alerts that fit. The time since when they changed needs a time zone."""
    _check_since(asked.since)
    with store.read() as reader:
        alerts, cursor = _page("alerts", asked, partial(reader.alerts.find, asked))
    return AlertPage(alerts=alerts, next_cursor=cursor)


def list_incidents(store: Store, asked: IncidentPageQuery) -> IncidentPage:
    """A page of the incidents that fit. The time since when they changed needs a time zone."""
    _check_since(asked.since)
    with store.read() as reader:
        incidents, cursor = _page("incidents", asked, partial(reader.incidents.find, asked))
    return IncidentPage(incidents=incidents, next_cursor=cursor)


def incidents_of_run(store: Store, run_id: str) -> IncidentPage:
    """All incidents of a run, newest first."""
    with store.read() as reader:
        reader.runs.get(run_id)  # raises UnknownRun
        return IncidentPage(incidents=reader.incidents.find(IncidentsQuery(run_id=run_id)), next_cursor=None)


def list_notifications(store: Store, asked: NotificationsQuery) -> NotificationPage:
    """A page of what receivers were told, and are to be told."""
    find = partial(store.notices.log, receiver=asked.receiver, status=asked.status)
    notifications, cursor = _page("notifications", asked, find)
    return NotificationPage(notifications=notifications, next_cursor=cursor)


def _page(kind: str, asked: Page, find: Callable[..., list[R]]) -> tuple[list[R], str | None]:
    """At most `limit` records in the order of their ids, and the cursor of the next page."""
    limit = asked.limit
    found = find(limit=limit + 1, after=_place(asked.cursor, kind, (int,)))
    key = (int(getattr(found[limit - 1], f"{kind[:-1]}_id")),) if len(found) > limit else None
    return found[:limit], _cursor(kind, key)


def series(store: Store, run_id: str, asked: SeriesQuery) -> Series:
    """The metric's finite minimum, mean and maximum in buckets.

    A negative layer counts from the end: of those that the attempt recorded, or the run.
    """
    _check_range(asked)
    metric, head, attempt, layer = asked.metric, asked.head, asked.attempt, asked.layer
    with store.read() as reader:
        detail = checked_detail(reader, run_id, attempt)
        num_recorded = 0
        if layer is not None and layer < 0 and attempt is not None:
            of_attempt = reader.frames.metric(run_id, "layers" if head is None else "heads", metric, attempt=attempt)
            num_recorded = of_attempt.num_rows()
        layer = _counted_from_the_start(detail, metric, layer, head, num_recorded)
        kind = _kind(detail, metric, layer, head)
        values = reader.frames.metric(run_id, kind, metric, entry=(layer or 0, head or 0), **_which(asked))
        found = values.points(asked.points, ends_alone=True)
    return Series(metric=metric, layer=layer, head=head, **_buckets(found, ends_alone=True))


def compare(store: Store, asked: CompareQuery) -> Comparison:
    """The metric of several runs in buckets, on the grid that all of them together need.

    A negative layer counts from the end of each run's own layers, because models that are compared may differ in depth.
    """
    _check_range(asked)
    metric, points = asked.metric, asked.points
    with store.read() as reader:
        details = [reader.runs.detail(run_id) for run_id in dict.fromkeys(asked.run_ids)]
        readers = {
            run_id: reader.frames.metric(run_id, kind, metric, entry=entry, **_which(asked))
            for run_id, (kind, entry) in _places(details, asked).items()
        }
        extents = [extent for found in readers.values() if (extent := found.extent())]
        shift = 0
        if extents:
            firsts, lasts, nums_samples = zip(*extents, strict=True)
            shift = shift_of((min(firsts), max(lasts), max(nums_samples)), points, ends_alone=False)
        found = {run_id: one.points(points, ends_alone=False, shift=shift) for run_id, one in readers.items()}
        runs = []
        for detail in details:
            of_run = found.get(detail.run_id, NO_POINTS)
            runs.append(
                ComparedRun(
                    run_id=detail.run_id,
                    project=detail.project,
                    run=detail.run,
                    x=_along(reader.frames, detail.run_id, asked, of_run),
                    **_buckets(of_run, ends_alone=False),
                )
            )
    return Comparison(metric=metric, layer=asked.layer, head=asked.head, along=asked.along, runs=runs)


def _along(frames: Frames, run_id: str, asked: CompareQuery, points: Points) -> list[float | None]:
    """Where the buckets of a run lie."""
    spans, _ = bucketed(points, ends_alone=False)
    steps = (spans[:, 0] + spans[:, 1]) // 2
    if asked.along == "step" or not len(steps):
        return nullable(steps)
    if asked.along == "time":
        return nullable(frames.seconds_at(run_id, steps))
    counted = frames.metric(run_id, "scalars", "tokens", **_which(asked))
    of_tokens = bucketed(counted.points(len(steps), ends_alone=False, shift=points.shift), ends_alone=False)
    means = dict(zip((of_tokens.spans[:, 0] >> points.shift).tolist(), nullable(of_tokens.stats[:, 0, 1]), strict=True))
    return [means.get(bucket) for bucket in (spans[:, 0] >> points.shift).tolist()]


def _places(details: Sequence[RunDetail], asked: CompareQuery) -> dict[str, tuple[Kind, tuple[int, int]]]:
    """Where the runs that can have the metric record it. Raises what is wrong with the question if none can."""
    places: dict[str, tuple[Kind, tuple[int, int]]] = {}
    metric, head = asked.metric, asked.head
    problem: UnknownMetric | UnknownLayer | None = None
    for detail in details:
        try:
            own_layer = _counted_from_the_start(detail, metric, asked.layer, head)
            places[detail.run_id] = (_kind(detail, metric, own_layer, head), (own_layer or 0, head or 0))
        except (UnknownMetric, UnknownLayer) as error:
            problem = problem or error
    if problem is not None and not places:
        raise problem
    return places


def _counted_from_the_start(
    detail: RunDetail, metric: str, layer: int | None, head: int | None, num_recorded: int = 0
) -> int | None:
    """The layer from 0, of one that may be counted from the end: -1 is the last of so many, or of those of the run."""
    if layer is None or layer >= 0:
        return layer
    length = num_recorded or (_num_layers(detail, metric) if head is None else _num_heads(detail, metric)[0])
    if layer < -length < 0:
        raise UnknownLayer(f"{metric!r} has {length} layers, -1 is the last and {-length} the first, got {layer}")
    return layer + length


NO_POINTS = Points(Cells(np.empty((0, 3), np.int64), np.empty((0, 1, 4))), 0)


def _buckets(points: Points, *, ends_alone: bool) -> dict[str, Any]:
    """The fields of Buckets."""
    spans, stats = bucketed(points, ends_alone=ends_alone)
    least, mean, most, num_finite = stats[:, 0].T
    return {
        "step": middles(spans),
        "min": nullable(least),
        "mean": nullable(mean),
        "max": nullable(most),
        "nonfinite": (spans[:, 2] - num_finite.astype(np.int64)).tolist(),
        "damaged": points.num_damaged,
    }


MAX_CELLS = 2**18
"""Of a heat map: a deep model has fewer columns."""


def heatmap(store: Store, run_id: str, asked: HeatmapQuery) -> Heatmap:
    """The mean of the metric's finite values per layer in spans of steps.

    With `extremes` also what a mean hides: the value farthest from it, and how many are not finite.
    """
    _check_range(asked)
    metric, extremes = asked.metric, asked.extremes
    with store.read() as reader:
        detail = checked_detail(reader, run_id, asked.attempt)
        num_layers = _num_layers(detail, metric)
        columns = min(asked.columns, max(1, MAX_CELLS // max(num_layers, 1)))
        found = reader.frames.metric(run_id, "layers", metric, **_which(asked)).points(columns, ends_alone=False)
    spans, stats = bucketed(found, ends_alone=False)
    return Heatmap(
        metric=metric,
        step=middles(spans),
        layers=stats.shape[1] if len(spans) else num_layers,
        values=[nullable(column) for column in stats[..., 1]],
        samples=spans[:, 2].tolist(),
        farthest=[nullable(column) for column in _farthest(stats)] if extremes else None,
        nonfinite=(spans[:, 2:] - stats[..., 3].astype(np.int64)).tolist() if extremes else None,
        damaged=found.num_damaged,
    )


def _farthest(stats: np.ndarray) -> np.ndarray:
    """Of each cell the least or the largest value, whichever is farther from the mean."""
    least, mean, most, _ = np.moveaxis(stats, -1, 0)
    found: np.ndarray = np.where(mean - least > most - mean, least, most)
    return found


class Download(NamedTuple):
    """A file that is made while it is sent."""

    name: str
    media_type: str
    parts: Generator[bytes, None, None]


def export(store: Store, run_id: str, asked: ExportQuery) -> Download:
    """All raw samples as a long table."""
    check_format(asked.format)
    _check_range(asked)
    with store.read() as reader:
        detail = checked_detail(reader, run_id, asked.attempt)
    for metric in asked.metrics:
        _check_metric(detail, metric)

    def parts() -> Generator[bytes, None, None]:
        with store.read() as reader:  # one state of the database, from the first part to the last
            found = reader.frames.table(run_id, metrics=asked.metrics or None, **_which(asked))
            yield from PARTS[asked.format](detail, found)

    return Download(file_name(detail, asked.format), MEDIA_TYPES[asked.format], parts())


def checked_detail(reader: Reader, run_id: str, attempt: int | None) -> RunDetail:
    """The run. Raises UnknownAttempt where it has not had so many."""
    detail = reader.runs.detail(run_id)
    if attempt is not None and not 1 <= attempt <= detail.attempt:
        raise UnknownAttempt(f"the run {run_id} has no attempt {attempt}, its attempts are 1 to {detail.attempt}")
    return detail


def _check_range(asked: Span) -> None:
    from_step, to_step = asked.from_step, asked.to_step
    if from_step is not None and to_step is not None and from_step > to_step:
        raise InvalidRange(f"expected from_step <= to_step, got {from_step} > {to_step}; swap them")


def _which(asked: Span) -> dict[str, Any]:
    """The steps that are asked for, and the attempt where the question has one: arguments of `Frames`."""
    return asked.model_dump(include={"attempt", "from_step", "to_step"})


def _kind(detail: RunDetail, metric: str, layer: int | None, head: int | None) -> Kind:
    """Where the values are recorded. Some names stand for a number per layer and for one of the run as a whole."""
    recorded = detail.metrics
    if layer is None and (metric in recorded.scalars or (metric in SCALARS and metric not in recorded.layers)):
        if head is not None:
            raise UnknownLayer(f"{metric!r} is one number per step without heads; leave head out")
        return "scalars"
    is_layered = metric in recorded.layers or metric in LAYERED or metric in recorded.heads
    if layer is not None and not is_layered and (metric in recorded.scalars or metric in SCALARS):
        raise UnknownLayer(f"{metric!r} is one number per step without layers; leave layer out")
    if head is None:
        _check_index("layer", metric, layer, _num_layers(detail, metric))
        return "layers"
    num_blocks, num_heads = _num_heads(detail, metric)
    _check_index("layer", metric, layer, num_blocks)
    if num_heads is not None:
        _check_index("head", metric, head, num_heads)
    return "heads"


def _num_layers(detail: RunDetail, metric: str) -> int:
    if metric in detail.metrics.layers:
        return detail.metrics.layers[metric]
    if metric in LAYERED:
        return detail.depth.num_entries(LAYERED[metric].axis)
    if metric in detail.metrics.heads:
        raise UnknownLayer(f"{metric!r} is recorded per head only; give a head")
    if metric in detail.metrics.scalars or metric in SCALARS:
        raise UnknownLayer(f"{metric!r} is one number per step without layers; ask for it as a series without layer")
    _check_metric(detail, metric)  # of all that is known something was said above
    raise AssertionError(metric)


def _check_metric(detail: RunDetail, metric: str) -> None:
    known = {*LAYERED, *SCALARS, *detail.metrics.scalars, *detail.metrics.layers, *detail.metrics.heads}
    if metric not in known:
        raise UnknownMetric(
            f"no metric {metric!r} in the catalogue or in run {detail.run_id}; {nearest(metric, list(known))}"
        )


def _num_heads(detail: RunDetail, metric: str) -> tuple[int, int | None]:
    """Blocks and heads of a metric; heads are None where none is recorded yet."""
    if metric in detail.metrics.heads:
        return detail.metrics.heads[metric]
    if metric in LAYERED and LAYERED[metric].per_head:
        return detail.num_blocks, None
    _num_layers(detail, metric)  # a name that nobody knows is told as such
    raise UnknownLayer(f"{metric!r} is not recorded per head; leave head out")


def _check_index(word: str, metric: str, index: int | None, length: int) -> None:
    if not length:
        raise UnknownLayer(f"{metric!r} has no {word}s in this run; ask for a metric of the run as a whole")
    if index is None:
        raise InvalidArgument(f"{metric!r} has a value per layer; give {word}, from 0 to {length - 1}")
    if not 0 <= index < length:
        raise UnknownLayer(f"{metric!r} has the {word}s 0 to {length - 1}, got {index}")


def middles(spans: np.ndarray) -> list[int]:
    middles: list[int] = ((spans[:, 0] + spans[:, 1]) // 2).tolist()
    return middles


def nullable(values: np.ndarray) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]


def _cursor(what: str, key: Sequence[float | str | None] | None) -> str | None:
    return None if key is None else base64.urlsafe_b64encode(json.dumps([what, *key]).encode()).decode()


def _place(cursor: str | None, what: str, types: tuple[Any, ...]) -> Place | None:
    if cursor is None:
        return None
    try:
        found, *key = json.loads(base64.urlsafe_b64decode(cursor))
        if found == what and len(key) == len(types) and all(map(isinstance, key, types)) and all(map(_is_sane, key)):
            return Place(tuple(key))
    except (ValueError, TypeError, RecursionError):
        pass
    raise InvalidArgument(f"expected a cursor that a list of {what} answered as next_cursor, got {cursor[:80]!r}")


def _is_sane(part: Any) -> bool:
    """Whether every database takes it."""
    if isinstance(part, str):
        return "\x00" not in part and part == part.encode("utf-8", "ignore").decode()  # no half of a character
    if isinstance(part, float):
        return math.isfinite(part)
    return part is None or (not isinstance(part, bool) and abs(part) < 2**53)
