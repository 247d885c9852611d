"""Which frames of a run are current, and whether more of them will come.

A later attempt hides what earlier ones wrote from its first step on.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, String, and_, or_, select
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from tsemon_server.store.engine import table_of
from tsemon_server.store.ledger import tables
from tsemon_server.store.schema import NEVER
from tsemon_server.store.streams import Address, Span, Standing, Stream, Which

_attempt, _run = tables.attempt.c, tables.run.c
ONE_OF = table_of("run_ids", run_id=String)
"""Some runs. Their ids come with each execution, as `run_ids`."""


def values_of(run_ids: Collection[str]) -> str:
    """Ids as that parameter."""
    return json.dumps([[run_id] for run_id in run_ids])


def visible(connection: Connection, run_id: str, which: Which) -> list[Span]:
    """The intervals that no later attempt hides, or all of one attempt, cut to the steps that are asked for."""
    attempt, first, to_step = which.get("attempt"), which.get("from_step") or 0, which.get("to_step")
    last = NEVER if to_step is None else to_step
    if attempt is not None:
        return [Span(attempt, first, last)]
    query = select(_attempt.attempt, _attempt.hidden_from).where(
        _attempt.run_id == run_id, _attempt.hidden_from > first
    )
    rows = connection.execute(query.order_by(_attempt.attempt))
    return [Span(number, first, min(last, hidden_from - 1)) for number, hidden_from in rows]


def standings(connection: Connection, run_ids: Collection[str], silent_before: float) -> dict[str, Standing]:
    """How those of these runs stand that are there. One that was not heard of since then sends no more."""
    is_over = or_(_run.state != "running", _run.updated_at < silent_before)
    newest = (_run.last_attempt, _run.last_writer, _run.last_seq, _run.last_step)
    chosen = {"run_ids": values_of(run_ids)}
    others = select(_attempt.run_id, _attempt.attempt).join(ONE_OF, ONE_OF.c.run_id == _attempt.run_id)
    live: dict[str, set[int]] = {}
    for run_id, attempt in connection.execute(others.where(_attempt.state == "running"), chosen):
        live.setdefault(run_id, set()).add(attempt)
    query = select(_run.run_id, _run.attempt, is_over, *newest).join(ONE_OF, ONE_OF.c.run_id == _run.run_id)
    rows = connection.execute(query, chosen)
    return {
        run_id: Standing(
            {attempt} | live.get(run_id, set()),
            is_over,
            None if seq is None else Address(Stream(run_id, of, writer), seq, step),
        )
        for run_id, attempt, is_over, of, writer, seq, step in rows
    }


LEASE_S = 90.0
"""After so long without a frame or a heartbeat, an attempt is not live any more. A writer sends something every 30 s."""
HEARD_S = 5.0
"""Precision of `heard_at`."""


def is_live(
    now: float | ColumnElement[float], of: ReadOnlyColumnCollection[str, Column[Any]] = _attempt
) -> ColumnElement[bool]:
    """Whether an attempt's process is taken to be alive."""
    return and_(of.state == "running", of.heard_at >= now - LEASE_S - HEARD_S)


def live_besides(connection: Connection, run_id: str, attempt: int, now: float) -> list[int]:
    """The run's other attempts that are live."""
    query = select(_attempt.attempt).where(_attempt.run_id == run_id, _attempt.attempt != attempt, is_live(now))
    return list(connection.execute(query.order_by(_attempt.attempt)).scalars())


def state_of(connection: Connection, run_id: str, attempt: int) -> str | None:
    """running, finished, failed or replaced, to the end of this transaction; None if there is no such attempt."""
    query = select(_attempt.state).where(_attempt.run_id == run_id, _attempt.attempt == attempt)
    return connection.execute(query.with_for_update()).scalar_one_or_none()
