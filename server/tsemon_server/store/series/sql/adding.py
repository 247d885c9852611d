"""Storing frames: on the path of every body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, null, select, text, union, union_all

from tsemon.errors import InvalidFrame, LimitReached
from tsemon.wire import MAX_METRICS, MAX_WRITERS, Frame
from tsemon_server.store.engine import Unit, insert_missing
from tsemon_server.store.prepared import Prepared
from tsemon_server.store.series import Added
from tsemon_server.store.series.packing import Layout, layout_id, pack
from tsemon_server.store.series.settling import PAGE_SEQS, seqs_of_page
from tsemon_server.store.series.sql import tables
from tsemon_server.store.streams import Stream

MOST_KNOWN = 100_000
"""Of each kind; then all is asked again."""

MAX_SLOTS = 200_000
"""Entries in all layouts of a run: one for each metric of each different set of metrics that its frames have."""

_PAGES_PER_QUERY = 16
"""A body that leaves out more seqs than these pages hold is looked up in pieces."""

_frame, _settled = tables.frame.c, tables.settled.c
# In one statement, because a frame may be on its way from the one table to the other.
_STORED_SEQS = Prepared(
    union_all(
        select(_frame.seq.label("number"), null().label("seqs")).where(
            _frame.run_id == bindparam("run_id"),
            _frame.attempt == bindparam("attempt"),
            _frame.writer == bindparam("writer"),
            _frame.seq.between(bindparam("first"), bindparam("last")),
        ),
        select(_settled.page, _settled.seqs).where(
            _settled.run_id == bindparam("run_id"),
            _settled.attempt == bindparam("attempt"),
            _settled.writer == bindparam("writer"),
            _settled.page.between(bindparam("first_page"), bindparam("last_page")),
        ),
    )
)
_INSERT_FRAMES = Prepared(insert(tables.frame))
_COUNT = Prepared(
    text(
        "INSERT INTO tally (run_id, num_frames) VALUES (:run_id, :num_added) ON CONFLICT (run_id) "
        "DO UPDATE SET num_frames = tally.num_frames + excluded.num_frames RETURNING num_frames"
    )
)


class Stored:
    """What is stored, never changes, and need not be asked of the database again."""

    def __init__(self) -> None:
        self.layouts: set[tuple[str, int]] = set()
        """Run and id."""
        self.streams: set[Stream] = set()

    def add(self, layouts: Iterable[tuple[str, int]], stream: Stream) -> None:
        """They are committed."""
        for known in (self.layouts, self.streams):
            if len(known) >= MOST_KNOWN:
                known.clear()
        self.layouts.update(layouts)
        self.streams.add(stream)


def add(unit: Unit, stored: Stored, stream: Stream, frames: Sequence[Frame]) -> Added:
    """Store the frames that are not stored yet."""
    connection = unit.connection
    if not frames:
        c = tables.tally.c
        of_run = select(c.num_frames).where(c.run_id == stream.run_id)
        return Added([], connection.execute(of_run).scalar_one_or_none() or 0)
    # First, and as if all were new: who comes from here on waits until this is committed.
    num_stored = _counted(connection, stream.run_id, len(frames))
    known = _stored_seqs(connection, stream, [frame.seq for frame in frames])
    new = {frame.seq: frame for frame in reversed(frames) if frame.seq not in known}
    added = sorted(new.values(), key=lambda frame: frame.seq)
    if len(added) < len(frames):
        num_stored = _counted(connection, stream.run_id, len(added) - len(frames))
    if added:
        layouts = _insert_frames(connection, stream, added)
        unknown = {number: of for number, of in layouts.items() if (stream.run_id, number) not in stored.layouts}
        is_new = stream not in stored.streams
        _insert_layouts(connection, stream.run_id, unknown)
        if is_new:
            _check_number_of_writers(connection, stream)
        if is_new or unknown:
            unit.after_commit.append(lambda: stored.add(((stream.run_id, number) for number in unknown), stream))
    return Added(added, num_stored)


def _counted(connection: Connection, run_id: str, num_added: int) -> int:
    ((num_frames,),) = _COUNT.run(connection, {"run_id": run_id, "num_added": num_added}).fetchall()
    return int(num_frames)


def _stored_seqs(connection: Connection, stream: Stream, seqs: Sequence[int]) -> set[int]:
    """The given seqs that are stored, and maybe others between them."""
    found = set[int]()
    for first, last in _spans(seqs, _PAGES_PER_QUERY * PAGE_SEQS):
        span = {"first": first, "last": last, "first_page": first // PAGE_SEQS, "last_page": last // PAGE_SEQS}
        for number, settled in _STORED_SEQS.run(connection, stream._asdict() | span):
            found.update((number,) if settled is None else seqs_of_page(number, settled))
    return found


def _insert_frames(connection: Connection, stream: Stream, frames: Sequence[Frame]) -> dict[int, Layout]:
    """Add the rows of frames; the layouts that they have."""
    rows: list[dict[str, Any]] = []
    layouts: dict[int, Layout] = {}
    for frame in frames:
        layout, blob, crcs = pack(frame)
        number = layout_id(layout.slots)
        layouts[number] = layout
        place = {"seq": frame.seq, "step": frame.step, "time": frame.time}
        rows.append(stream._asdict() | place | {"layout_id": number, "blob": blob, "crcs": crcs})
    _INSERT_FRAMES.run_many(connection, rows)
    return layouts


def _insert_layouts(connection: Connection, run_id: str, layouts: Mapping[int, Layout]) -> None:
    """Add the missing ones. Raises InvalidFrame if the run then has too many."""
    entries = [
        {"run_id": run_id, "layout_id": number, **slot._asdict()}
        for number in layouts
        for slot in layouts[number].slots
    ]
    if entries:
        insert_missing(connection, tables.layout, entries)
        _check_number_of_metrics(connection, run_id)


def _check_number_of_metrics(connection: Connection, run_id: str) -> None:
    """Of what is stored with these: a name that is known, or came with another frame meanwhile, is no new one."""
    c = tables.layout.c
    of_run = select(func.count(), func.count(c.metric.distinct())).where(c.run_id == run_id)
    num_slots, num_metrics = connection.execute(of_run).one()
    if num_metrics > MAX_METRICS:
        raise InvalidFrame(
            f"expected metrics of at most {MAX_METRICS} different names in a run, got {num_metrics}; "
            "a name is no place for a number. Nothing of this body is stored"
        )
    if num_slots > MAX_SLOTS:
        raise InvalidFrame(
            "expected frames that mostly hold the same metrics in the same shapes, got another set once more; "
            f"together they have {num_slots} entries, at most {MAX_SLOTS} are kept. Nothing of this body is stored"
        )


def _check_number_of_writers(connection: Connection, stream: Stream) -> None:
    """Raise LimitReached where the attempt has too many, the one of these frames included."""
    writers = [
        select(table.c.writer).where(table.c.run_id == stream.run_id, table.c.attempt == stream.attempt)
        for table in (tables.frame, tables.settled)
    ]
    num_writers = connection.execute(select(func.count()).select_from(union(*writers).subquery())).scalar_one()
    if num_writers > MAX_WRITERS:
        raise LimitReached(f"the attempt has {MAX_WRITERS} writers, no more are taken; let one process send for others")


def _spans(seqs: Sequence[int], most: int) -> list[tuple[int, int]]:
    """The first and the last of pieces that hold all of these and leave few out, most often one."""
    spans: list[tuple[int, int]] = []
    for seq in sorted(seqs):
        if spans and seq - spans[-1][0] < most:
            spans[-1] = spans[-1][0], seq
        else:
            spans.append((seq, seq))
    return spans
