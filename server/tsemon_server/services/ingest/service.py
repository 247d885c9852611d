"""Taking what writers send. No HTTP here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tsemon.stacks import Stacks
from tsemon.wire import ASKED, HISTORY, PACKED, Frame, Rows
from tsemon_answers.alerts import Alert
from tsemon_answers.replies import Pulse, Receipt
from tsemon_answers.runs import Registered, Run
from tsemon_server.alerts import Watch
from tsemon_server.services.ingest import schemas
from tsemon_server.services.ingest.packed import is_packed, read_packed
from tsemon_server.services.ingest.usual import read_json
from tsemon_server.store import Store
from tsemon_server.store.group_commit import Rest
from tsemon_server.store.times import utc
from tsemon_server.store.writing import Writer


def key_of(store: Store, body: schemas.Registration) -> str:
    """Return the key under which `Store.write_soon` takes a registration: the run's id, if the run exists.

    A shared transaction locks its runs in the order of their keys. The key of a new run sorts after every id, so that no
    two transactions wait for each other.
    """
    with store.read() as reader:
        return reader.runs.id_of(body.project, body.run) or f"~{body.project}/{body.run}"


def register(writer: Writer, body: schemas.Registration) -> Registered:
    """Open a new attempt of a run, and the run where there is none of its name."""
    found = writer.runs.register(
        body.project,
        body.run,
        blocks=body.blocks,
        stacks=[stack.model_dump() for stack in body.stacks or ()],
        frozen_blocks=body.frozen_blocks,
        config=body.config,
        tags=body.tags,
        quantities=None if body.quantities is None else {q.name: q.model_dump() for q in body.quantities},
        resume_step=body.resume_step,
        attempt_key=body.attempt_key,
        on_conflict=body.on_conflict,
    )
    return Registered(**found._asdict(), accepts=["application/json", PACKED, HISTORY])


class Batch(NamedTuple):
    """A body of frames that is fit to be stored."""

    run_id: str
    attempt: int
    writer: str
    frames: list[Frame]
    rows: Sequence[Rows] = ()


class Sent(Protocol):
    """A body of frames whose form is right."""

    @property
    def writer(self) -> str: ...

    @property
    def attempt(self) -> int: ...

    def to_frames(self, stacks: Stacks) -> list[Frame]:
        """Hold the frames against the stacks of the model. Raises InvalidFrame."""

    def to_rows(self) -> list[Rows]:
        """The scalars of steps without a frame."""


Reader = Callable[[bytes | bytearray], Sent]
"""Makes a body of frames of raw bytes, or raises InvalidFrame or BodyTooLarge."""


def reader_of(content_type: str) -> Reader:
    """The function that reads bodies of this content type: JSON unless it is the type of packed bodies."""
    return read_packed if is_packed(content_type) else read_json


def batch_of(run_id: str, body: Sent, stacks: Stacks) -> Batch:
    """The frames of a body, held against the stacks of the model."""
    return Batch(run_id, body.attempt, body.writer, body.to_frames(stacks), body.to_rows())


def read(store: Store, run_id: str, raw: bytes | bytearray, reader: Reader = read_json) -> Batch:
    """The frames of a raw body. May wait for the database."""
    body = reader(raw)
    return batch_of(run_id, body, store.stacks(run_id, body.attempt))


class Kept(Rest):
    """A batch whose frames are stored, and which the rules have not read."""

    def __init__(self, writer: Writer, batch: Batch, watch: Watch) -> None:
        self._writer, self._batch, self._watch = writer, batch, watch
        self._which = batch.run_id, batch.attempt
        if batch.rows:  # before the frames, because the rules read them with the next frame
            known = writer.frames.add_rows(*batch[:3], batch.rows)
            if known.state == "replaced":
                writer.runs.goes_on(*self._which)
        self._added = writer.frames.add(*batch[:4])
        if self._added.was_replaced:
            writer.runs.goes_on(*self._which)
        unread = self._added.unread
        self._reading = watch.begin(writer, *self._which, batch.writer, unread) if unread else None

    @classmethod
    def finish(cls, rests: Sequence[Kept]) -> list[Receipt]:
        """Let the rules read the new frames of all batches together."""
        readings = [kept._reading for kept in rests if kept._reading is not None]
        resolved = iter(rests[0]._watch.finish(readings))
        rests[0]._writer.finish()
        return [kept._receipt([] if kept._reading is None else next(resolved)) for kept in rests]

    def _receipt(self, resolved: Sequence[int]) -> Receipt:
        frames = self._batch.frames
        alerts = self._writer.alerts.to_tell(*self._which, resolved)
        return Receipt(
            accepted=len(self._added.frames),
            duplicates=len(frames) - len(self._added.frames),
            last_seq=max((frame.seq for frame in frames), default=None),
            alerts=alerts + _asked(self._writer, *self._which, self._added.zoom_asked_at),
            incidents=self._writer.incidents.to_tell(*self._which, alerts),
            live_attempts=self._writer.runs.live_besides(*self._which) if self._added.has_others else [],
        )


def accept(store: Store, run_id: str, raw: bytes | bytearray, watch: Watch) -> Receipt:
    """Read and store a body in a transaction of its own."""
    batch = read(store, run_id, raw)
    with store.write() as writer:
        return Kept.finish([Kept(writer, batch, watch)])[0]


def change(writer: Writer, run_id: str, body: schemas.RunChange, watch: Watch) -> Run:
    """Change a run. The frames of an attempt that ends wait for no others any more."""
    if body.state is not None and writer.runs.hold(run_id):
        attempt = body.attempt or writer.runs.get(run_id).attempt
        watch.end(writer, run_id, attempt)
    writer.runs.change(run_id, state=body.state, attempt=body.attempt, tags=body.tags, config=body.config)
    return writer.runs.get(run_id)


def heard_of(writer: Writer, run_id: str, body: schemas.Heartbeat) -> Pulse:
    """Note that the run was heard of now, and where its process is."""
    writer.runs.stacks(run_id, body.attempt)  # an attempt that nobody knows is told as such
    known = writer.runs.hear_of(run_id, body.attempt, body.step)
    alerts = writer.alerts.to_tell(run_id, body.attempt)
    return Pulse(
        alerts=alerts + _asked(writer, run_id, body.attempt, known.zoom_asked_at),
        incidents=writer.incidents.to_tell(run_id, body.attempt, alerts),
        live_attempts=writer.runs.live_besides(run_id, body.attempt) if known.has_others else [],
    )


def _asked(writer: Writer, run_id: str, attempt: int, asked_at: float | None) -> list[Alert]:
    """A person's request for a zoom as a pending alert, at which every version of the client zooms in. It is not stored."""
    if asked_at is None:
        return []
    run, asked = writer.runs.get(run_id), utc(asked_at)
    return [
        Alert(
            alert_id=f"zoom-{asked_at}",
            run_id=run_id,
            project=run.project,
            run=run.run,
            attempt=attempt,
            rule=ASKED,
            family="zoom",
            severity="warning",
            state="pending",
            pending_step=run.process_step or 0,
            firing_step=None,
            resolved_step=None,
            summary="A person asked for more samples.",
            evidence={},
            advice={},
            opened_at=asked,
            updated_at=asked,
        )
    ]
