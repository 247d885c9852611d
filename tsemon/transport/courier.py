"""Takes frames from a spool to the service, batch by batch. Knows no thread and no clock: its callers retry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tsemon.errors import ServerRefused, ServerUnreachable, SpoolError, UnknownAttempt, UnknownRun
from tsemon.transport.http import HttpDelivery, Registered
from tsemon.transport.memory import MemorySpool
from tsemon.transport.packing import pack_frames
from tsemon.transport.spool import Batch, Spool
from tsemon.wire import HISTORY, PACKED, RunState, frames_to_body, is_rows

_BODY_REFUSED = {400, 413, 422}
"""Statuses that find fault with the body. Others (no right to write, say) would befall any."""
_PACKED_REFUSED = {400, 415, 422}
"""Statuses of a server that does not read packed bodies, though it or another one said so."""


class Courier:
    """Delivers for one writer.

    Raises ServerUnreachable, ServerRefused, UnknownRun or UnknownAttempt; nothing is lost then, and calling again goes
    on where it stopped. `on_others` hears once that another live process has the same name.
    """

    def __init__(
        self,
        delivery: HttpDelivery,
        registration: Mapping[str, Any],
        writer: str,
        *,
        on_reply: Callable[[Mapping[str, Any]], None] = lambda _reply: None,
        on_warning: Callable[[str], None] = lambda _text: None,
        on_others: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.num_sent = 0
        self.num_refused = 0
        self._delivery = delivery
        self._registration = registration
        self._run: Registered | None = None
        self._run_key: str | None = None
        """The attempt key under which that was registered; `Spool.resume_at` gives another one."""
        self._writer = writer
        self._on_reply = on_reply
        self._on_warning, self._on_others = on_warning, on_others
        self._max_batch_bytes = 4 * 2**20
        self._has_told_of_others = self._has_told_of_rows = False
        self._is_packing = False
        """Whether the server reads packed bodies."""
        self._takes_history = False
        """Whether the server takes the scalars of steps without a sample."""

    @property
    def is_registered(self) -> bool:
        return self._run is not None and self._run_key == self._registration["attempt_key"]

    def may_register(self, has_frames: bool) -> bool:
        """Not where an attempt without frames would hide those of earlier ones.

        Before the first frame nobody knows yet whether the training goes on from a checkpoint; unless told of one, an
        attempt starts at 0, and hides all.
        """
        registration = self._registration
        if has_frames or self.is_registered or registration.get("resume_step") is not None:
            return True
        return not self._delivery.has_frames(registration["project"], registration["run"])

    def register(self) -> tuple[str, int]:
        """Make the run known, once, and give its id and attempt."""
        if self._run is None or not self.is_registered:
            if self._run is not None and self._run.live_attempts is not None:  # of this very process, without frames
                self._delivery.finish(self._run.run_id, "finished", self._run.attempt)
            body = dict(self._registration)
            self._run, self._run_key = self._registered(body), body["attempt_key"]
            self._is_packing = PACKED in self._delivery.accepts
            self._takes_history = HISTORY in self._delivery.accepts
            if self._run.run != body["run"]:
                self._on_warning(
                    f"a live process already sends to the run {body['run']!r}, so this one is the run {self._run.run!r}; "
                    "attach(on_conflict=...) chooses what to do"
                )
            self._tell_of_others(self._run.live_attempts)
        return self._run[:2]

    def _registered(self, body: dict[str, Any]) -> Registered:
        try:
            return self._delivery.register(body)
        except ServerRefused as refusal:
            if refusal.status != 422 or "on_conflict" not in str(refusal):
                raise
        return self._delivery.register({name: value for name, value in body.items() if name != "on_conflict"})

    def _tell_of_others(self, live_attempts: Sequence[int] | None) -> None:
        """Warn once that another live process has the same name."""
        if live_attempts and not self._has_told_of_others:
            self._has_told_of_others = True
            self._on_others(
                f"another live process sends to the run {self._registration['run']!r}, as attempt {live_attempts[-1]}. Both "
                "are evaluated, but charts show the attempt that began last. Give each training a name of its own. If they "
                "are ranks of one training, give attach(process_group=...) on all of them"
            )

    def beat(self, step: int) -> None:
        """Say that the writer lives, and at which step."""
        run_id, attempt = self.register()
        try:
            with self._noticing_loss():
                reply = self._delivery.beat(run_id, writer=self._writer, attempt=attempt, step=step)
        except ServerRefused as refusal:
            if refusal.status not in _BODY_REFUSED:
                raise
            self._on_warning(f"a heartbeat was refused, frames are sent all the same: {refusal}")
        else:
            self._tell_of_others(reply.get("live_attempts"))
            self._on_reply(reply)

    def knock(self, step: int) -> None:
        """One small request, to learn whether a large one has a chance. Registers nothing."""
        if self.is_registered:
            self.beat(step)
        else:
            self._delivery.has_frames(self._registration["project"], self._registration["run"])

    def send_next(self, spool: Spool | MemorySpool) -> bool:
        """Deliver and acknowledge one batch; False when there is none."""
        batch = spool.next_batch(max_bytes=self._max_batch_bytes)
        if batch is not None:
            self._send(spool, batch)
        return batch is not None

    def rules(self) -> dict[str, Any]:
        """Ask how each rule stands on the run."""
        with self._noticing_loss():
            return self._delivery.rules(self.register()[0])

    def finish(self, state: RunState) -> None:
        """Tell the service how this attempt ended."""
        run_id, attempt = self.register()
        assert self._run is not None
        with self._noticing_loss():
            if self._run.live_attempts is not None:
                self._delivery.finish(run_id, state, attempt)
            elif (
                self._delivery.run(run_id).get("attempt") == attempt
            ):  # an older service has one state for all attempts
                self._delivery.finish(run_id, state)

    def _send(self, spool: Spool | MemorySpool, batch: Batch, *, is_again: bool = False) -> None:
        run_id, attempt = self.register()
        frames = batch.frames if self._takes_history else self._without_rows(batch.frames)
        try:
            with self._noticing_loss():
                reply = self._post(run_id, attempt, frames) if frames else {}
        except ServerRefused as refusal:
            if refusal.status not in _BODY_REFUSED:
                raise
            if len(batch.frames) > 1:
                if refusal.status == 413:
                    # Some proxy's limit is below the service's own: stay under it from now on.
                    self._max_batch_bytes = sum(map(len, batch.frames)) // 2
                for half in batch.halves():
                    self._send(spool, half)
                return
            if not is_again:  # it may have been altered on its way
                self._send(spool, batch, is_again=True)
                return
            self._set_aside(spool, batch.frames[0], str(refusal))
        else:
            if frames:
                self._read_reply(reply, sum(not is_rows(text) for text in frames))
        try:
            spool.acknowledge(batch.ends[-1])
        except SpoolError as error:
            self._on_warning(f"{error} (frames already delivered may be sent once more)")

    def _read_reply(self, reply: Mapping[str, Any], num_frames: int) -> None:
        if (confirmed := _num_confirmed(reply)) != num_frames:
            raise ServerUnreachable(
                f"the service confirmed {confirmed} of {num_frames} frames; they are kept and sent again"
            )
        self.num_sent += confirmed
        self._tell_of_others(reply.get("live_attempts"))
        self._on_reply(reply)

    def _without_rows(self, texts: Sequence[str]) -> Sequence[str]:
        frames = [text for text in texts if not is_rows(text)]
        if len(frames) < len(texts) and not self._has_told_of_rows:
            self._has_told_of_rows = True
            self._on_warning("the server is of an earlier version: it gets scalars of sampled steps only")
        return frames

    def _post(self, run_id: str, attempt: int, frames: Sequence[str]) -> dict[str, Any]:
        """Send the frames packed if the server reads that. A packed body that is refused is sent as JSON, too."""
        packed = self._packed(attempt, frames)
        if packed is not None:
            try:
                return self._delivery.send(run_id, packed, PACKED)
            except ServerRefused as refusal:
                if refusal.status not in _PACKED_REFUSED:
                    raise
        reply = self._delivery.send(run_id, frames_to_body(self._writer, attempt, frames))
        if packed is not None:
            # The fault was not the frames': an older server has taken the place of the one that registered the run, say.
            self._is_packing = False
        return reply

    def _packed(self, attempt: int, frames: Sequence[str]) -> bytes | None:
        try:
            return pack_frames(self._writer, attempt, frames) if self._is_packing else None
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            return None  # frames of another client, which JSON carries as they are

    @contextlib.contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """A service that lost its database is told of the run again."""
        try:
            yield
        except (UnknownRun, UnknownAttempt):
            self._run = None
            raise

    def _set_aside(self, spool: Spool | MemorySpool, frame: str, reason: str) -> None:
        self.num_refused += 1
        try:
            spool.set_aside(frame, reason)
            self._on_warning(f"a frame was refused and is kept in {spool.folder}/refused.jsonl: {reason}")
        except SpoolError as error:
            self._on_warning(f"a frame was refused and is lost: {reason}; {error}")


def _num_confirmed(reply: Mapping[str, Any]) -> int:
    """Frames that are in the database now, whether they came with this body or an earlier one."""
    try:
        return int(reply["accepted"]) + int(reply["duplicates"])
    except (KeyError, TypeError, ValueError):
        return 0
