"""Which runs a list shows, and in which order."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    case,
    exists,
    func,
    literal,
    literal_column,
    not_,
    or_,
    select,
    tuple_,
)

from tsemon.wire import AlertState
from tsemon_answers.runs import RunFilter, RunOrder
from tsemon_server.store.engine import contains_text, items_of
from tsemon_server.store.ledger import tables

OPEN: tuple[AlertState, ...] = ("pending", "firing")

SILENT_RULES, STUCK_RULES = ("process-silent", "process-lost"), ("training-stuck", "training-hangs")
"""Built-in ones. While one fires, this is how the run's process does."""

Keys = tuple[ColumnElement[Any], ...]


class Place(NamedTuple):
    """A place between two entries of an ordered list: after the entry with this key."""

    key: tuple[float | str | None, ...]


def where(which: RunFilter) -> Iterator[ColumnElement[bool]]:
    """What holds for them, first what takes the least time to see."""
    run = tables.run.c
    for column, value in ((run.project, which.project), (run.run, which.run), (run.state, which.state)):
        if value is not None:
            yield column == value
    if which.condition is not None:
        has_ended = which.condition in ("finished", "failed")
        yield run.state == (which.condition if has_ended else "running")
        yield condition() == which.condition
    tag = items_of(run.tags).table_valued("value").c.value
    for wanted in which.tags:
        yield exists(literal_column("1")).where(tag == wanted).correlate(tables.run)
    if which.q:
        text = which.q.lower()
        in_tag = exists(literal_column("1")).where(contains_text(tag, text)).correlate(tables.run)
        yield or_(contains_text(run.run, text), contains_text(run.project, text), in_tag)


def condition() -> ColumnElement[str]:
    """Of a run: how its process does."""
    state = tables.run.c.state
    by_rules = (_fires(SILENT_RULES), "silent"), (_fires(STUCK_RULES), "stuck")
    return case((state != "running", state), *by_rules, else_="running")


def _fires(rules: Sequence[str]) -> ColumnElement[bool]:
    alert = tables.alert.c
    return exists().where(alert.run_id == tables.run.c.run_id, alert.state == "firing", alert.rule.in_(rules))


def open_alerts() -> ColumnElement[int]:
    """Of a run: how many alerts it has that are pending or firing."""
    alert = tables.alert.c
    of_run = select(func.count()).where(alert.run_id == tables.run.c.run_id, alert.state.in_(OPEN))
    return of_run.scalar_subquery()


def fired_to_the_end() -> ColumnElement[bool]:
    """Of an alert of a run: whether it still fired, as more than information, when its attempt ended.

    An attempt that had ended before a later one began is superseded, and does not count.
    """
    alert, later = tables.alert.c, tables.attempt.alias("later")
    is_superseded = exists().where(
        later.c.run_id == alert.run_id, later.c.attempt > alert.attempt, later.c.started_at > alert.updated_at
    )
    return and_(alert.resolved_reason == "run ended", alert.severity != "info", not_(is_superseded))


def run_ids(connection: Connection, which: RunFilter, order: RunOrder, limit: int, after: Place | None) -> list[str]:
    """At most `limit` runs in `order`, from `after` on."""
    query, found = select(tables.run.c.run_id).where(*where(which)), list[str]()
    descending = order == "live" or order.startswith("-")
    for is_in, keys, place in _parts(order, after):
        part = page_of(query.where(*is_in), keys, descending, limit - len(found), place)
        found += connection.execute(part).scalars()
        if len(found) == limit:
            break
    return found


def num_runs(connection: Connection, which: RunFilter, most: int) -> int:
    """How many there are; they are counted up to `most`."""
    found = select(literal_column("1")).select_from(tables.run).where(*where(which)).limit(most).subquery()
    return int(connection.execute(select(func.count()).select_from(found)).scalar_one())


def _parts(order: RunOrder, after: Place | None) -> Iterator[tuple[Sequence[ColumnElement[bool]], Keys, Place | None]]:
    """Runs one after the other: which they are, what orders them, and where they begin.

    Frames move no run that is live: what orders those is when they were made. What has no step, or no finite loss, comes
    last in either direction.
    """
    run, by = tables.run.c, order.removeprefix("-")
    always: dict[str, Keys] = {
        "updated": (run.updated_at, run.run_id),
        "created": (run.created_at, run.run_id),
        "name": (run.run, run.project),
        "alerts": (open_alerts(), run.created_at, run.run_id),  # many have as many; when they were made never changes
    }
    if by in always:
        yield (), always[by], after
        return
    if by == "live":
        is_live = and_(run.state == "running", not_(_fires(SILENT_RULES)))
        is_past = after is not None and not after.key[0]
        place = None if after is None else Place(after.key[1:])
        if not is_past:
            yield (is_live,), always["created"], place
        yield (not_(is_live),), always["updated"], place if is_past else None
        return
    value = run.last_step if by == "step" else run.loss
    has_value = value.is_not(None) if by == "step" else value.between(-sys.float_info.max, sys.float_info.max)
    is_past = after is not None and after.key[0] is None
    if not is_past:
        yield (has_value,), (value, run.run_id), after
    place = Place(after.key[1:]) if after is not None and is_past else None
    yield (or_(value.is_(None), not_(has_value)),), (run.run_id,), place


def matching(
    query: Select[Any],
    wanted: Iterable[tuple[ColumnElement[Any], object]],
    updated_at: ColumnElement[float],
    since: object,
) -> Select[Any]:
    """Rows with these values, except for values that are None, that changed since then."""
    query = query.where(*(column == value for column, value in wanted if value is not None))
    return query.where(updated_at >= since.timestamp()) if isinstance(since, datetime) else query


def page_of(query: Select[Any], keys: Keys, descending: bool, limit: int | None, after: Place | None) -> Select[Any]:
    """`limit` rows in the order of `keys`, from `after` on: by key, so that rows written meanwhile shift nothing."""
    if after is not None:
        place = tuple_(*keys), tuple_(*(literal(value) for value in after.key))
        query = query.where(place[0] < place[1] if descending else place[0] > place[1])
    return query.order_by(*(key.desc() if descending else key for key in keys)).limit(limit)
