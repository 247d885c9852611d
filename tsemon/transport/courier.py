"""Takes frames from a spool to the service, batch by batch. Knows no thread and no clock: its callers retry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tsemon.errors import ServerRefused, ServerUnreachable, SpoolError, UnknownAttempt, UnknownRun
from tsemon.transport.http import HttpDelivery
from tsemon.transport.memory import MemorySpool
from tsemon.transport.spool import Batch, Spool
from tsemon.wire import RunState, frames_to_body

_BODY_REFUSED = {400, 413, 422}
"""Statuses that find fault with the frames. Others (no right to write, say) would befall any frame."""


class Courier:
    """Delivers for one writer.

    Raises ServerUnreachable, ServerRefused, UnknownRun or UnknownAttempt; nothing is lost then, and calling again goes
    on where it stopped.
    """

    def __init__(
        self,
        delivery: HttpDelivery,
        registration: Mapping[str, Any],
        writer: str,
        *,
        on_reply: Callable[[Mapping[str, Any]], None] = lambda _reply: None,
        on_warning: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.num_sent = 0
        self.num_refused = 0
        self.run: tuple[str, int] | None = None
        """Id and attempt, once registered."""
        self._delivery = delivery
        self._registration = registration
        self._writer = writer
        self._on_reply = on_reply
        self._on_warning = on_warning
        self._max_batch_bytes = 4 * 2**20

    def register(self) -> tuple[str, int]:
        """Make the run known, once, and give its id and attempt."""
        if self.run is None:
            self.run = self._delivery.register(self._registration)
        return self.run

    def send_next(self, spool: Spool | MemorySpool) -> bool:
        """Deliver and acknowledge one batch; False when there is none."""
        batch = spool.next_batch(max_bytes=self._max_batch_bytes)
        if batch is not None:
            self._send(spool, batch)
        return batch is not None

    def finish(self, state: RunState) -> None:
        """Tell the service how the run ended, unless a newer attempt has taken it over: then it is not ours to say."""
        run_id, attempt = self.register()
        if self._delivery.run(run_id).get("attempt") == attempt:
            self._delivery.finish(run_id, state)

    def _send(self, spool: Spool | MemorySpool, batch: Batch) -> None:
        run_id, attempt = self.register()
        try:
            reply = self._delivery.send(run_id, frames_to_body(self._writer, attempt, batch.frames))
        except (UnknownRun, UnknownAttempt):
            self.run = None
            raise
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
            self._set_aside(spool, batch.frames[0], str(refusal))
        else:
            if (confirmed := _num_confirmed(reply)) != len(batch.frames):
                raise ServerUnreachable(
                    f"the service confirmed {confirmed} of {len(batch.frames)} frames; they are kept and sent again"
                )
            self.num_sent += confirmed
            self._on_reply(reply)
        try:
            spool.acknowledge(batch.ends[-1])
        except SpoolError as error:
            self._on_warning(f"{error} (frames already delivered may be sent once more)")

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
