"""The rows of whole frames of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import BigInteger, Connection, Integer, Select, String, and_, bindparam, select, tuple_

from tsemon_server.store.engine import table_of
from tsemon_server.store.series.frames import HotFrame
from tsemon_server.store.series.packing import Kind, Layout, Slot
from tsemon_server.store.series.segments import SegmentKey
from tsemon_server.store.series.sql import tables
from tsemon_server.store.series.sql.spans import SPAN, has_frame, overlaps, values_of
from tsemon_server.store.streams import At, Span, Visible

_FRAMES_AT_A_TIME = 512
_frame, _segment, _chunk, _layout = tables.frame.c, tables.segment.c, tables.chunk.c, tables.layout.c

HOT_FRAME = tuple(_frame[name] for name in HotFrame._fields)
Layouts = Mapping[int, Layout]


def layouts_of(connection: Connection, run_id: str, layout_ids: Collection[int] | None = None) -> dict[int, Layout]:
    """These layouts of a run, or all."""
    about = (_layout.kind, _layout.metric, _layout.offset_bytes, _layout.num_rows, _layout.num_columns)
    query = select(_layout.layout_id, *about).where(_layout.run_id == run_id)
    if layout_ids is not None:
        query = query.where(_layout.layout_id.in_(layout_ids))
    slots: dict[int, list[Slot]] = {number: [] for number in layout_ids or ()}
    for number, *slot in connection.execute(query):
        slots.setdefault(number, []).append(Slot(*slot))
    return {number: Layout.of(of_layout) for number, of_layout in slots.items()}


class SqlFrameRows:
    """FrameRows of one run. `layouts` finds some of its layouts."""

    def __init__(
        self, connection: Connection, run_id: str, layouts: Callable[[Connection, str, Collection[int]], Layouts]
    ) -> None:
        self._connection, self._run_id, self._layouts = connection, run_id, layouts

    def layouts(self, layout_ids: Collection[int]) -> Layouts:
        return self._layouts(self._connection, self._run_id, layout_ids)

    def keys(self) -> Sequence[tuple[Kind, str]]:
        return [(kind, metric) for kind, metric in self._rows(_KEYS)]

    # -- settled frames

    def segments(self, visible: Visible) -> Sequence[SegmentKey]:
        rows = self._rows(_SEGMENTS, visible=values_of(visible))
        return [SegmentKey._make((*row[:6], Span._make(row[6:]))) for row in rows]

    def frames(self, segments: Sequence[SegmentKey]) -> Sequence[tuple[bytes, int]]:
        keys = [segment[:3] for segment in segments]
        found = {tuple(row[:3]): (row.frames, row.num_frames) for row in self._rows(_FRAMES, segments=json.dumps(keys))}
        return [found[key] for key in keys]

    def chunks(self, segment: SegmentKey, kind: Kind, metric: str, span: Span) -> Sequence[Any]:
        key = {"attempt": segment.attempt, "writer": segment.writer, "number": segment.number}
        return self._rows(_CHUNKS, **key, kind=kind, metric=metric, first=span.first_step, last=span.last_step)

    # -- hot frames

    def hot(self, span: Span, *, by_step: bool) -> Iterator[Sequence[HotFrame]]:
        first_page, next_page = _PAGES[by_step]
        values: dict[str, Any] = {"attempt": span.attempt, "first": span.first_step, "last": span.last_step}
        page = self._frames(first_page, **values)
        while page:
            yield page
            after = {f"after_{name}": getattr(page[-1], name) for name in ("step", "writer", "seq")}
            page = self._frames(next_page, **values, **after)

    def newest_hot(self, visible: Visible) -> HotFrame | None:
        return next(iter(self._frames(_NEWEST, visible=values_of(visible))), None)

    def hot_around(self, visible: Visible, step: int) -> Sequence[At]:
        values = {"visible": values_of(visible), "step": step}
        return [At._make(row) for query in _AROUND for row in self._rows(query, **values)]

    def hot_times(self, visible: Visible) -> Sequence[tuple[int, float]]:
        return [(step, time) for step, time in self._rows(_TIMES, visible=values_of(visible))]

    def _frames(self, query: Select[Any], **values: Any) -> list[HotFrame]:
        return [HotFrame._make(row) for row in self._rows(query, **values)]

    def _rows(self, query: Select[Any], **values: Any) -> Sequence[Any]:
        return self._connection.execute(query, {"run_id": self._run_id, **values}).all()


# Built once: that takes longer than to run them, and there are many to a run.
_RUN, _ATTEMPT, _WRITER, _NUMBER, _KIND, _METRIC, _FIRST, _LAST, _STEP = (
    bindparam(name, type_=of)
    for name, of in (
        ("run_id", String), ("attempt", Integer), ("writer", String), ("number", Integer), ("kind", String),
        ("metric", String), ("first", BigInteger), ("last", BigInteger), ("step", BigInteger),
    )
)  # fmt: skip

_KEYS = (
    select(_layout.kind, _layout.metric).where(_layout.run_id == _RUN).distinct().order_by(_layout.kind, _layout.metric)
)
_KEY = (_segment.attempt, _segment.writer, _segment.number)
_SEGMENTS = (
    select(*_KEY, _segment.first_step, _segment.last_step, _segment.finest, *SPAN.c)
    .join(SPAN, overlaps(tables.segment))
    .where(_segment.run_id == _RUN)
)
_WANTED = table_of("segments", attempt=Integer, writer=String, number=Integer)
_FRAMES = (
    select(*_KEY, _segment.frames, _segment.num_frames)
    .join(_WANTED, and_(*(column == _WANTED.c[column.name] for column in _KEY)))
    .where(_segment.run_id == _RUN)
)
_CHUNKS = (
    select(_chunk.num_samples, _chunk.num_rows, _chunk.num_columns, _chunk.samples)
    .where(_chunk.run_id == _RUN, _chunk.attempt == _ATTEMPT, _chunk.writer == _WRITER, _chunk.number == _NUMBER)
    .where(_chunk.kind == _KIND, _chunk.metric == _METRIC, _chunk.last_step >= _FIRST, _chunk.first_step <= _LAST)
    .order_by(_chunk.part)
)


def _pages(by_step: bool) -> tuple[Select[Any], Select[Any]]:
    key = (_frame.step, _frame.writer, _frame.seq) if by_step else (_frame.writer, _frame.seq)
    first = (
        select(*HOT_FRAME)
        .where(_frame.run_id == _RUN, _frame.attempt == _ATTEMPT, _frame.step.between(_FIRST, _LAST))
        .order_by(*key)
        .limit(_FRAMES_AT_A_TIME)
    )
    after = [bindparam(f"after_{column.name}", type_=column.type) for column in key]
    is_after = [tuple_(*key) > tuple_(*after)]
    if by_step:
        is_after.append(_frame.step >= after[0])  # for the index
    return first, first.where(*is_after)


def _hot_in_span(query: Select[Any]) -> Select[Any]:
    return query.join(SPAN, has_frame(tables.frame)).where(_frame.run_id == _RUN)


_PAGES = {by_step: _pages(by_step) for by_step in (True, False)}
_TIMES = _hot_in_span(select(_frame.step, _frame.time))
_NEWEST = (
    _hot_in_span(select(*HOT_FRAME))
    .order_by(_frame.step.desc(), _frame.attempt.desc(), _frame.seq.desc(), _frame.writer.desc())
    .limit(1)
)
_PLACES = _hot_in_span(select(_frame.step, _frame.attempt)).limit(1)
_AROUND = (
    _PLACES.where(_frame.step <= _STEP).order_by(_frame.step.desc(), _frame.attempt.desc()),
    _PLACES.where(_frame.step > _STEP).order_by(_frame.step, _frame.attempt.desc()),
)
