"""Sends what is to be sent, on threads of its own and in one process of all that serve a database.

One thread has the work and plans who is told of what; one more for each receiver sends, so that one that hangs keeps
nobody else waiting. What was sent is noted after it was sent: a process that dies in between sends it once more.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Literal, get_args

from tsemon.errors import StoreError
from tsemon_server.notify.channels import send
from tsemon_server.notify.configuration import Alertmanager, Configuration, Receiver
from tsemon_server.notify.messages import Message, Notice
from tsemon_server.notify.sending import TIMEOUT_S, NotDelivered
from tsemon_server.store import Store
from tsemon_server.store.ledger.notices import Due, is_firing, is_muted

log = logging.getLogger(__name__)

Outcome = Literal["sent", "failed", "given_up"]
"""Messages that were sent, and tries that failed; alerts that a receiver will not be told of."""
Count = Callable[[str, Outcome, int], None]

PAUSE_S = 1.0
"""Between two looks."""
LEASE_S = 20.0
"""How long the others wait for a process that has the work and is not heard of."""
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 300.0
"""After a failure; each is followed by a pause that is twice as long, up to this."""
FULL_S = 3.0
"""How long a receiver rests that has been sent all it takes in a minute."""
MAX_SPLITS = 16
"""So many messages in a row are sent again in halves, none of them taken: enough to find one alert among thousands."""
REFUSED_S = 60.0
"""How long a receiver rests at least that took none of them."""
ALERTMANAGER_BATCH = 500
"""So many alerts in one request to it."""
HELD_S = 15.0
"""How soon it is looked again whether an alert is still silenced."""


class Notifier:
    """Threads that send from `start` to `stop`."""

    def __init__(
        self,
        store: Store,
        configuration: Configuration,
        clock: Callable[[], float] = time.time,
        pause_s: float = PAUSE_S,
        lease_s: float = LEASE_S,
        first_retry_s: float = FIRST_RETRY_S,
        count: Count = lambda *_: None,
    ) -> None:
        """`count` is told what comes of messages, and at first which receivers there are."""
        self._store, self._configuration = store, configuration
        self._lease_s = lease_s
        self._holder = f"{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(4)}"
        self._held_until = 0.0
        self._stopped = threading.Event()
        senders = [
            _Sender(self, store, configuration, receiver, clock, first_retry_s, count)
            for receiver in configuration.receivers
        ]
        self._threads = [
            threading.Thread(target=work, args=(pause_s,), name=f"tsemon-notify-{name}", daemon=True)
            for name, work in [("plan", self._run), *((sender.name, sender.run) for sender in senders)]
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Return once nothing is on its way any more."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)
        with suppress(StoreError):  # it runs out
            self._store.drop_lease("notify", self._holder)

    def wait(self, seconds: float) -> bool:
        """Whether to end, asked between two looks."""
        return self._stopped.wait(seconds)

    @property
    def may_send(self) -> bool:
        """Whether this process has the work for longer than it takes to send something."""
        return not self._stopped.is_set() and time.monotonic() + 2 * TIMEOUT_S < self._held_until

    def _run(self, pause_s: float) -> None:
        while not self.wait(pause_s):
            with _trouble("notifications wait"):
                self._renew()
                while self.may_send and self._store.notices.route(self._configuration.plans):
                    pass

    def _renew(self) -> None:
        begun, had_it = time.monotonic(), time.monotonic() < self._held_until
        if begun + self._lease_s * 0.75 > self._held_until:
            has_it = self._store.hold_lease("notify", self._holder, self._lease_s)
            self._held_until = begun + self._lease_s if has_it else 0.0
            if has_it and not had_it:
                self._store.notices.drop_others([receiver.name for receiver in self._configuration.receivers])


class _Sender:
    """Sends to one receiver."""

    def __init__(
        self,
        notifier: Notifier,
        store: Store,
        configuration: Configuration,
        receiver: Receiver,
        clock: Callable[[], float],
        first_retry_s: float,
        count: Count,
    ) -> None:
        self._notifier, self._notices, self._clock = notifier, store.notices, clock
        self._count = partial(count, receiver.name)
        self._configuration, self._receiver = configuration, receiver
        self._first_retry_s = first_retry_s
        self._num_failures = 0
        self._num_splits = 0
        self._resting_until = 0.0
        self.name = receiver.name
        for outcome in get_args(Outcome):  # a rate over a counter that was not there misses its first step
            self._count(outcome, 0)

    def run(self, pause_s: float) -> None:
        while not self._notifier.wait(pause_s):
            if self._notifier.may_send and time.monotonic() >= self._resting_until:
                with _trouble(f"notifications to {self.name} wait"):
                    self._send_due()

    def _send_due(self) -> None:
        due = self._wanted(self._notices.due(self.name))
        if not due:
            return
        num_free = self._receiver.max_per_minute - self._notices.num_messages(self.name, 60.0)
        if num_free <= 0:
            self._rest(FULL_S)
        self._num_splits = MAX_SPLITS
        for batch in self._batches(due, num_free):
            if not (self._notifier.may_send and self._send(batch)):
                return

    def _wanted(self, due: Sequence[Due]) -> list[Due]:
        """Those that are to be told now. Who was told that something fires is told that it is over, muted or not."""
        muted = [item for item in due if item.kind == "firing" and self._is_muted(item)]
        if muted:
            self._notices.hold([item.delivery_id for item in muted], HELD_S)
        # What has changed since it was planned waits for another plan.
        return [item for item in due if item not in muted and (item.kind == "firing") == is_firing(item.alert)]

    def _is_muted(self, item: Due) -> bool:
        # An Alertmanager that hears no more of what fires would say that it is over.
        is_kept_up = isinstance(self._receiver, Alertmanager) and item.status == "sent"
        return is_muted(item.alert) and not is_kept_up

    def _batches(self, due: Sequence[Due], num_free: int) -> list[list[Due]]:
        """One message per topic, and one per thread of earlier messages, so that each incident stays in its thread.

        If the receiver takes fewer in a minute, the last one has the rest.
        """
        if isinstance(self._receiver, Alertmanager):
            found = [list(due[start : start + ALERTMANAGER_BATCH]) for start in range(0, len(due), ALERTMANAGER_BATCH)]
            return found[: max(num_free, 0)]
        topics: dict[str, list[Due]] = {}
        for item in due:
            topics.setdefault(item.thread or item.topic, []).append(item)
        found = list(topics.values())
        if num_free <= 0 or len(found) <= num_free:
            return found[: max(num_free, 0)]
        return [*found[: num_free - 1], [item for batch in found[num_free - 1 :] for item in batch]]

    def _send(self, batch: Sequence[Due]) -> bool:
        """Whether the receiver can be sent more."""
        notices = [Notice(i.kind, i.alert, i.status == "sent", i.was_told, i.was_over) for i in batch]
        time, threads = datetime.fromtimestamp(self._clock(), UTC), {item.thread for item in batch}
        thread = threads.pop() if len(threads) == 1 else None
        message = Message(notices, self._configuration.base_url, time, thread)
        ids = [item.delivery_id for item in batch]
        try:
            sent = send(message, self._receiver)
        except NotDelivered as error:
            return self._apart_or_failed(batch, error)
        except Exception as error:  # a slip of ours: the same message would meet it again
            log.error("%s", _place_of(error))
            slip = NotDelivered("it could not be written; the log tells where", is_final=True)
            return self._apart_or_failed(batch, slip)
        self._count("sent", 1)
        self._note(lambda: self._notices.note_sent(ids, sent.thread))
        self._num_splits = MAX_SPLITS
        if self._num_failures:
            log.warning("notifications to %s go on", self.name)
        self._num_failures = 0
        return True

    def _apart_or_failed(self, batch: Sequence[Due], error: NotDelivered) -> bool:
        """A message that will not do is sent in halves, so that one alert is not in the way of others.

        A receiver that takes none of them is left alone for a while, with what is left.
        """
        if not error.is_final or len(batch) == 1:
            return self._note_failure(batch, error)
        if self._num_splits == 0:
            return self._note_failure(
                batch, NotDelivered(str(error), retry_after_s=max(error.retry_after_s, REFUSED_S))
            )
        self._num_splits -= 1
        middle = len(batch) // 2
        return all(self._notifier.may_send and self._send(half) for half in (batch[:middle], batch[middle:]))

    def _note_failure(self, batch: Sequence[Due], error: NotDelivered) -> bool:
        since = self._clock() - self._configuration.give_up_after
        lost = [i.delivery_id for i in batch if error.is_final or (i.tried_at is not None and i.tried_at < since)]
        kept = [item.delivery_id for item in batch if item.delivery_id not in set(lost)]
        self._count("failed", 1)
        if lost:
            self._count("given_up", len(lost))
            log.error("%d notifications to %s are given up: %s", len(lost), self.name, error)
            self._note(lambda: self._notices.note_failed(lost, str(error)))
        if error.is_final:
            return True
        if not self._num_failures:  # said once an outage
            log.warning("notifications to %s wait: %s", self.name, error)
        pause_s = max(
            error.retry_after_s, min(self._first_retry_s * 2**self._num_failures, MAX_RETRY_S) * random.uniform(0.5, 1)
        )
        self._num_failures = min(self._num_failures + 1, 16)
        self._rest(pause_s)
        self._note(lambda: self._notices.note_tried(kept, str(error), pause_s))
        return False

    def _rest(self, seconds: float) -> None:
        self._resting_until = time.monotonic() + seconds

    def _note(self, write: Callable[[], None]) -> None:
        """Until it is written: nothing is sent twice because a database does not answer for a while."""
        while True:
            try:
                return write()
            except StoreError as error:
                log.warning("what was sent to %s is still to be noted: %s", self.name, error)
                if self._notifier.wait(1.0):
                    return None


@contextmanager
def _trouble(what: str) -> Iterator[None]:
    """Says what went wrong, and lets the thread go on."""
    try:
        yield
    except StoreError as error:
        log.warning("%s: %s", what, error)
    except Exception as error:
        log.error("%s, and go on after a failure that nobody expected: %s", what, _place_of(error))


def _place_of(error: Exception) -> str:
    """Where it was raised. Not its text, which may hold what is secret."""
    return type(error).__name__ + "\n" + "".join(traceback.format_tb(error.__traceback__))
