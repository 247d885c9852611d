"""Takes samples off the training thread's hands, and sees to it that they arrive.

    training thread -- put --> queue -- exporter thread --> spool -- sender thread --> service

Two threads, because a service that hangs must not keep samples from reaching the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

from tsemon.errors import ServerRefused, ServerUnreachable, TsemonError, UnknownAttempt, UnknownRun
from tsemon.transport.courier import Courier
from tsemon.transport.folders import find_siblings
from tsemon.transport.http import HttpDelivery
from tsemon.transport.memory import MemorySpool
from tsemon.transport.spool import Spool
from tsemon.transport.sync import deliver_leftovers
from tsemon.wire import Alert, Frame, Incident, Rows, RunState

T = TypeVar("T", Alert, Incident)
MakeFrame = Callable[[int], Frame]
"""Gets the frame's seq, waits for the device if it must, and returns the frame. Called on the exporter thread."""
MakeRows = Callable[[int], Iterable[Rows]]
"""Gets the seq of the first row, and does the same for the scalars of steps without a sample."""

_MIN_DRAIN_S = 2.0
_FAILURES_TO_KNOCK = 5
"""Failures in a row after which one small request goes ahead of a batch, which may be 4 MiB."""
_ASK_AGAIN_S = 10.0
"""Seconds between two questions for the rules, which take a server a tenth of a second each."""
_ROWS_EVERY_S = 5.0
"""Seconds from one look for rows on disk to the next, if no frame comes. A frame takes earlier rows with it."""
_LAST_TRIES = 3
"""Tries at close before it is believed that nobody listens; with the pauses between them, about a second."""


class FrameTaker(Protocol):
    """Somebody else who gets each frame, on the exporter's thread. None of this waits or raises."""

    def put(self, frame: Frame) -> None: ...

    def end(self) -> None:
        """No frame comes any more."""

    def join(self, timeout_s: float) -> None:
        """Wait, for so long, until all frames are where they were to go."""


@dataclass(frozen=True, kw_only=True)
class OutboxStats:
    """What became of the samples so far: `Status.delivery`."""

    num_sent: int = 0
    """Frames that the service has confirmed."""
    num_pending: int = 0
    """Samples and frames that wait: in the queue, on disk, in memory."""
    num_dropped: int = 0
    """Samples and frames that were given up, unsent, because what holds them was full or was deleted."""
    num_refused: int = 0
    """Frames that the service will not take; they are in the spool folder's `refused.jsonl`."""
    num_failed_samples: int = 0
    """Samples that could not be made into a frame."""
    last_error: str | None = None
    connected: bool = False
    """Is the run registered, and did the service answer when last asked?"""
    num_failures: int = 0
    """Tries in a row that failed. From 5 on, a small request is tried first, and frames only where it is answered."""
    spool_folder: Path | None = None
    """None while frames are kept in memory alone."""
    mirrors: Sequence[str] = ()
    """What became of the frames that go elsewhere as well."""


class _Work(NamedTuple):
    """Work for the exporter thread: one of these."""

    make_frame: MakeFrame | None = None
    make_rows: MakeRows | None = None
    done: threading.Event | None = None
    """Set when all earlier work is on disk."""


class WaitingRules(NamedTuple):
    """The rules that cannot fire yet."""

    step: int | None
    """Last step that the server had evaluated; None if it had evaluated none."""
    waits: Mapping[str, str]
    """By rule, the samples and steps that must come before it can fire."""
    lacks: Mapping[str, Sequence[str]]
    """By rule that was never evaluated, the metrics that it reads and that the run has not had."""
    problem: str = ""
    """Why the server did not say."""


class Outbox:
    """The way out of a training process.

    `put`, `alerts`, `incidents`, `take_events`, `stats` and `close` are for the training process; none of them raises.
    Trouble is counted, and said once through `on_warning`, on whichever thread meets it. In a forked child all of them do
    nothing.

    The run is registered with the first sample, or `heartbeat_s` after the start where that hides nothing: until then
    `resume_at` may come.
    """

    def __init__(
        self,
        spool: Spool | MemorySpool,
        delivery: HttpDelivery | None,
        *,
        on_warning: Callable[[str], None],
        mirrors: Sequence[FrameTaker] = (),
        max_waiting: int = 1024,
        first_retry_s: float = 0.5,
        max_retry_s: float = 30.0,
        heartbeat_s: float = 30.0,
    ) -> None:
        self.step = spool.registration.get("resume_step") or 0
        """Optimizer steps done: where the training is. Its thread sets it, heartbeats tell it."""
        self._first_step = self.step
        self._spool = spool
        self._overflow = MemorySpool(spool.registration, spool.writer)
        self._delivery = delivery
        self._on_warning = on_warning
        self._mirrors = mirrors
        self._max_waiting = max_waiting
        self._first_retry_s = first_retry_s
        self._max_retry_s = max_retry_s
        self._heartbeat_s = heartbeat_s
        self._random = random.Random()  # its own: the training run's random state is not ours to advance
        self._pid = os.getpid()

        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._num_queue_dropped = 0
        self._num_failed_samples = 0
        self._next_seq = self._next_row = 0
        self._write_again_at = 0.0
        """0 while the folder can be written, else when to try it again."""

        self._courier: Courier | None = None
        self._last_error: str | None = None
        self._num_failures = 0
        self._beat_at = time.monotonic() + heartbeat_s
        self._has_adopted = False
        self._is_delivered = False
        self._said: set[str] = set()
        self._alerts: tuple[Alert, ...] = ()
        self._incidents: tuple[Incident, ...] = ()
        self._told_alerts: dict[str, Alert] = {}
        """Those of which there was an event when they began, and none yet of their end."""
        self._told_incidents: dict[str, Incident] = {}
        self._over_alerts, self._over_incidents = set[str](), set[str]()
        """Alerts and incidents that had an event when they ended and none since, by id."""
        self._events: SimpleQueue[Alert | Incident] = SimpleQueue()
        self.has_news = False
        """Whether a reply has come since `take_events`."""
        self.waiting_rules: WaitingRules | None = None
        """By the last answer to `ask_for_rules`."""
        self._asks_for_rules = False
        self._ask_again_at = 0.0

        self._cpu_s = {"exporter": 0.0, "sender": 0.0}
        self._is_closed = False
        self._end_state: RunState = "finished"
        self._has_work = threading.Event()
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._exporter = threading.Thread(target=self._export, name="tsemon-exporter", daemon=True)
        self._exporter.start()
        self._sender: threading.Thread | None = None
        if delivery is not None:
            self._courier = Courier(
                delivery,
                spool.registration,
                spool.writer,
                on_reply=self._read_reply,
                on_warning=self._warn_of_frame,
                on_others=functools.partial(self._warn, "others"),
            )
            self._has_work.set()  # what an earlier attempt has left is delivered at once
            self._sender = threading.Thread(target=self._send, args=(self._courier,), name="tsemon-sender", daemon=True)
            self._sender.start()

    # -- the training thread

    def resume_at(self, step: int) -> None:
        """Say, before the first sample, that the training goes on from `step`."""
        if self._is_closed or os.getpid() != self._pid or self._spool.registration["resume_step"] == step:
            return  # the attempt may be registered already
        self.step = self._first_step = step
        with self._contained("spool"):
            self._spool.resume_at(step)
        self._has_work.set()

    def put(self, make_frame: MakeFrame) -> bool:
        """Hand over a sample; it never waits. The oldest waiting sample goes when there are too many.

        False when the sample was not taken: after `close`, and in a forked child.
        """
        return self._put(_Work(make_frame=make_frame))

    def put_rows(self, make_rows: MakeRows) -> bool:
        """Hand over scalars of steps without a sample, in the same way."""
        return self._put(_Work(make_rows=make_rows))

    def flush(self, timeout_s: float) -> None:
        """Wait until all samples and rows so far are on disk, or `timeout_s`."""
        done = threading.Event()
        if self._put(_Work(done=done)):
            done.wait(timeout_s)

    def _put(self, work: _Work) -> bool:
        if self._is_closed or os.getpid() != self._pid:
            return False
        self._queue.put(work)
        if self._queue.qsize() > self._max_waiting:
            with contextlib.suppress(Empty):
                self._queue.get_nowait()
                self._num_queue_dropped += 1
        return True

    def alerts(self) -> tuple[Alert, ...]:
        """What the service said last: the alerts of the run that are pending or active, and those just resolved.

        The same object until the next response.
        """
        return self._alerts

    def incidents(self) -> list[Incident]:
        """The open incidents of the run in the server's last response."""
        return [incident for incident in self._incidents if incident.is_active]

    def ask_for_rules(self) -> None:
        """Ask the server which rules cannot fire yet, but not again within 10 seconds. The answer will be in
        `waiting_rules`."""
        if self._delivery is None or os.getpid() != self._pid:
            return
        if self._is_closed:
            self.waiting_rules = self.waiting_rules or WaitingRules(
                None, {}, {}, "the server was not asked for them in time"
            )
        elif time.monotonic() >= self._ask_again_at:
            self._ask_again_at = time.monotonic() + _ASK_AGAIN_S
            self._asks_for_rules = True
            self._has_work.set()

    def take_events(self) -> list[Alert | Incident]:
        """Each alert and incident once when it begins and once when it is over, in the order of the replies.

        An incident also comes when its verdict names another rule, or when it has become worse.
        """
        self.has_news = False
        if self._events.empty():  # at almost every step
            return []
        events = []
        with contextlib.suppress(Empty):
            while os.getpid() == self._pid:
                events.append(self._events.get_nowait())
        return events

    @property
    def cpu_s(self) -> float:
        """CPU time of its own threads so far, in seconds."""
        return sum(self._cpu_s.values())

    @property
    def num_dropped(self) -> int:
        """Samples and frames that were given up so far."""
        return self._num_queue_dropped + self._spool.num_dropped + self._overflow.num_dropped

    def stats(self) -> OutboxStats:
        courier, spool, overflow = self._courier, self._spool, self._overflow
        return OutboxStats(
            num_sent=courier.num_sent if courier else 0,
            num_pending=self._queue.qsize() + spool.num_unsent + overflow.num_unsent,
            num_dropped=self.num_dropped,
            num_refused=courier.num_refused if courier else 0,
            num_failed_samples=self._num_failed_samples,
            last_error=self._last_error,
            connected=courier is not None and courier.is_registered and not self._num_failures,
            num_failures=self._num_failures,
            spool_folder=None if self._write_again_at else spool.folder,
            mirrors=tuple(map(str, self._mirrors)),
        )

    def close(self, timeout_s: float = 5.0, state: RunState = "finished") -> None:
        """Spool what waits, deliver what can be delivered within `timeout_s`, and say how the run ended.

        Samples get 2 seconds to reach the spool even where `timeout_s` is less: no network is needed for that.
        What is not delivered stays in the spool for the next attach or `sync`. Where nobody listens (connections are
        refused) and all is on disk, that is left to them after about a second.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        deadline = time.monotonic() + timeout_s
        self._queue.put(None)
        self._exporter.join(max(timeout_s, _MIN_DRAIN_S))
        if self._exporter.is_alive():
            self._warn("close", f"{self._queue.qsize()} samples were not ready in time and are lost")
        for mirror in self._mirrors:
            mirror.end()
        self._end_state = state
        with self._contained("end"):
            self._spool.finish(state)
        self._closing.set()
        self._has_work.set()
        if self._sender is not None:
            self._sender.join(max(0.0, deadline - time.monotonic()))
            self._abandoned.set()
            if self._sender.is_alive() and self._delivery is not None:
                self._delivery.abort()
                self._sender.join(1.0)
        with self._contained("end"):
            if self._is_delivered and self._spool.is_drained:
                self._spool.discard()
            else:
                self._spool.close()
        for mirror in self._mirrors:
            mirror.join(deadline - time.monotonic())
        folder = self._spool.folder
        if self._delivery is not None and not self._is_delivered and folder is not None:
            num = self._spool.num_unsent
            left = (
                f"{num} frames and the end of the run were not delivered and wait"
                if num
                else "the end of the run was not delivered and waits"
            )
            command = f"tsemon sync {shlex.quote(str(folder.parents[2]))} --server URL"
            self._warn("left", f"{left} in {folder}; `{command}` sends {'them' if num else 'it'}")
        in_memory = self._overflow.num_unsent + (0 if self._spool.folder else self._spool.num_unsent)
        if in_memory:
            self._warn("lost", f"{in_memory} frames were in memory alone, could not be delivered, and are lost")

    # -- the exporter thread

    def _export(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                frame, payloads = self._made(work)
            except Exception as error:
                self._num_failed_samples += 1
                self._last_error = f"a sample failed: {type(error).__name__}: {error}"
                self._warn("sample", self._last_error)
                self._cpu_s["exporter"] = time.thread_time()
                continue
            finally:
                del work  # and with it the buffers it holds, before the wait for the next one
            for payload in payloads:
                self._overflow.append(payload)
            if time.monotonic() >= self._write_again_at:
                self._write_through()
            if frame is not None:
                self._has_work.set()
                for mirror in self._mirrors:
                    mirror.put(frame)
            self._cpu_s["exporter"] = time.thread_time()
        self._write_through()

    def _made(self, work: _Work) -> tuple[Frame | None, list[str]]:
        """The frame, if it is one, and the texts for the spool."""
        if work.make_frame is not None:
            frame = work.make_frame(self._next_seq)
            text = frame.to_json()
            self._next_seq += 1
            return frame, [text]
        if work.done is not None:
            work.done.set()
        made = [] if work.make_rows is None else [*work.make_rows(self._next_row)]
        texts = [rows.to_json() for rows in made]
        self._next_row += sum(len(rows.steps) for rows in made)
        return None, texts

    def _write_through(self) -> None:
        """Move what is in memory to the spool: the newest frame, and all since the folder failed, if it did."""
        try:
            while (batch := self._overflow.next_batch(max_frames=1)) is not None:
                self._spool.append(batch.frames[0])
                self._overflow.acknowledge(batch.ends[-1])
            self._write_again_at = 0.0
            self._said.discard("spool")
        except Exception as error:
            self._write_again_at = time.monotonic() + self._max_retry_s
            self._last_error = str(error)
            self._warn("spool", f"{error}; until then frames wait in memory, and a killed process loses them")
        if self._spool.num_dropped:
            self._warn("dropped", f"{self._spool.folder} was full or was deleted: unsent frames are lost (num_dropped)")

    # -- the sender thread

    def _send(self, courier: Courier) -> None:
        num_tries, is_last = 0, False
        try:
            while not self._abandoned.is_set():
                self._cpu_s["sender"] = time.thread_time()
                self._has_work.wait(min(max(0.0, self._beat_at - time.monotonic()), _ROWS_EVERY_S))
                self._has_work.clear()
                if self._closing.is_set() and not is_last:
                    # Asked before sending: what is appended before the end is then sent, too.
                    num_tries, is_last = 0, True
                try:
                    self._deliver(courier)
                    if is_last and not self._abandoned.is_set():
                        if courier.is_registered:
                            courier.finish(self._end_state)
                            self._end_incidents()
                        self._is_delivered = True
                        return
                    num_tries = 0
                    self._note_success()
                except Exception as error:
                    self._note_failure(error)
                    num_tries += 1
                    if is_last and num_tries >= _LAST_TRIES and self._may_leave(error):
                        return
                    self._pause(error, num_tries - 1, self._abandoned if is_last else self._closing)
                    self._has_work.set()
        finally:
            if self._delivery is not None:
                self._delivery.close()

    def _deliver(self, courier: Courier) -> None:
        if self._num_failures >= _FAILURES_TO_KNOCK:
            courier.knock(self.step)
        self._adopt()
        if not self._may_register(courier):
            return
        courier.register()
        for spool in (self._spool, self._overflow):
            # In good times the overflow holds a frame only on its way to the disk.
            if spool is self._overflow and not self._write_again_at:
                continue
            while not self._abandoned.is_set() and courier.send_next(spool):
                self._note_success()
        if self._asks_for_rules and not self._closing.is_set():
            self._asks_for_rules = False
            self._read_rules(courier)
        if self._is_beat_due and not self._closing.is_set():
            courier.beat(self.step)
            self._put_off_beat()

    def _read_rules(self, courier: Courier) -> None:
        """Delivery continues if a server of an earlier version, or a busy one, refuses to answer."""
        try:
            reply = courier.rules()
            rules = [
                (rule["rule"], rule.get("waits_for"), rule["state"], rule["not_measured"]) for rule in reply["rules"]
            ]
            waits = {name: text for name, text, *_ in rules if text}
            lacks = {name: names for name, _, state, names in rules if names and state == "unknown"}
            self.waiting_rules = WaitingRules(reply["step"], waits, lacks)
        except ServerUnreachable:
            pass
        except (ServerRefused, KeyError, TypeError, AttributeError) as error:
            self.waiting_rules = WaitingRules(None, {}, {}, f"the server does not say: {error!s}")

    def _may_register(self, courier: Courier) -> bool:
        has_begun = self._next_seq > 0 or self.step != self._first_step
        if courier.is_registered or has_begun or self._spool.registration.get("resume_step") is not None:
            return True
        if not self._is_beat_due and not self._closing.is_set():
            return False
        if courier.may_register(has_begun):
            return True
        self._put_off_beat()
        return False

    @property
    def _is_beat_due(self) -> bool:
        return time.monotonic() >= self._beat_at

    def _put_off_beat(self) -> None:
        # Jittered, so that a fleet that was started as one does not beat as one.
        self._beat_at = time.monotonic() + self._heartbeat_s * self._random.uniform(0.8, 1.0)

    def _adopt(self) -> None:
        """Deliver what dead processes left of this run, before its new attempt gets its number."""
        if self._has_adopted or self._spool.folder is None or self._delivery is None:
            return
        for synced in deliver_leftovers(find_siblings(self._spool.folder), self._delivery, self._warn_of_frame):
            if (
                synced.num_damaged
            ):  # told first: once what is behind the damage has arrived, nobody knows of it any more
                self._warn(
                    f"damaged {synced.folder}",
                    f"{synced.folder} had {synced.num_damaged} damaged segments: what stood behind the damage is lost, "
                    "the rest is delivered",
                )
            if isinstance(synced.error, ServerUnreachable):
                raise synced.error
            if synced.error is not None:
                self._warn(f"adopt {synced.folder}", f"{synced.folder} is left for `tsemon sync`: {synced.error}")
        self._has_adopted = True

    def _note_success(self) -> None:
        self._num_failures = 0
        self._said.discard("server")

    def _note_failure(self, error: Exception) -> None:
        self._num_failures += 1
        is_ours = isinstance(error, TsemonError)
        self._last_error = str(error) if is_ours else f"delivery failed: {type(error).__name__}: {error}"
        if isinstance(error, (UnknownRun, UnknownAttempt)):
            # Its alerts went with it.
            self._alerts, self._incidents, self._told_alerts, self._told_incidents = (), (), {}, {}
            self._over_alerts, self._over_incidents = set(), set()
            self._warn(
                "server",
                f"{error}; the run is registered again, but its earlier frames are gone: it was deleted, or the database "
                "was replaced",
            )
        else:
            self._warn("server", f"{self._last_error}; frames are kept and sent again until they arrive")

    def _may_leave(self, error: Exception) -> bool:
        """Nobody listens, and every frame is on disk for the next attach or `sync`."""
        is_refused = isinstance(error.__cause__, ConnectionRefusedError)
        return is_refused and self._spool.folder is not None and not self._overflow.num_unsent

    def _pause(self, error: Exception, num_failures: int, until: threading.Event) -> None:
        delay_s = min(self._max_retry_s, self._first_retry_s * 2.0 ** min(num_failures, 30))
        delay_s *= self._random.uniform(0.5, 1.0)  # so that a fleet does not come back as one
        if isinstance(error, ServerUnreachable) and error.retry_after_s is not None:
            delay_s = max(delay_s, min(error.retry_after_s, 10 * self._max_retry_s))
        until.wait(delay_s)

    def _read_reply(self, reply: Mapping[str, Any]) -> None:
        self._put_off_beat()
        with self._readable("incidents"):  # servers of earlier versions send none
            self._incidents = tuple(Incident.from_json(incident) for incident in reply.get("incidents", ()))
        with self._readable("alerts"):
            self._alerts = tuple(Alert.from_json(alert) for alert in reply["alerts"])
        try:
            for alert in _changes(self._told_alerts, self._over_alerts, self._alerts, "alert_id", "resolved"):
                self._events.put(alert)
            self._tell_incidents()
        finally:
            self.has_news = True

    def _tell_incidents(self) -> None:
        for incident in _changes(self._told_incidents, self._over_incidents, self._incidents, "incident_id", "ended"):
            self._events.put(incident)

    def _end_incidents(self) -> None:
        """The server ends open incidents with the attempt."""
        self._incidents = ()
        self._tell_incidents()
        self.has_news = True

    @contextlib.contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, AttributeError) as error:
            self._warn(what, f"the server's {what} cannot be read ({error!r}); frames are still delivered")

    # -- any thread

    def _warn_of_frame(self, text: str) -> None:
        self._last_error = text
        self._warn("frame", text)

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            with contextlib.suppress(Exception):
                self._on_warning(text)

    @contextlib.contextmanager
    def _contained(self, kind: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._last_error = str(error)
            self._warn(kind, str(error))


def _changes(told: dict[str, T], over: set[str], now: Sequence[T], id_name: str, end: str) -> Iterator[T]:
    """Yield each alert or incident that begins or is over, and each incident with another verdict.

    `told` has the begun ones by id, `over` the ids of the others.

    A begun one that is missing from `now` gets the state `end`: its last reply was lost or went to another writer.
    """
    present = set[str]()
    for one in now:
        present.add(key := getattr(one, id_name))
        if one.is_active and (key not in told or _verdict(told[key]) != _verdict(one)):
            told[key] = one
            over.discard(key)
            yield one
        elif one.is_over and key not in over:
            told.pop(key, None)
            over.add(key)
            yield one
    for key in [key for key in told if key not in present]:
        one = told.pop(key)
        over.add(key)
        ended: Any = {"state": end, "is_settled": True} if isinstance(one, Incident) else {"state": end}
        yield dataclasses.replace(one, **ended)


def _verdict(one: Alert | Incident) -> tuple[str, str] | None:
    return (one.rule, one.severity) if isinstance(one, Incident) else None
