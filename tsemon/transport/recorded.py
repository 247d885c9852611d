"""Writes a run that is known already, from checkpoints or another tool's files. Writing it twice is writing it once."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from tsemon.errors import InvalidArgument, ServerUnreachable, SpoolError, TsemonError
from tsemon.transport.courier import Courier
from tsemon.transport.folders import quoted
from tsemon.transport.http import HttpDelivery
from tsemon.transport.memory import MemorySpool
from tsemon.transport.reading import SpoolReader
from tsemon.transport.spool import Spool
from tsemon.wire import Frame, RunState

BATCH = 256
"""Frames of a writer that wait to be sent together, at the most."""
ROOM_BYTES = 2**40
"""Of a spool: nothing may be dropped."""
TIMEOUT_S = 60.0
FAREWELL_S = 5.0
"""For so long whoever gives up waits for the service to hear of it."""
LONGEST_PAUSE_S = 10.0

T = TypeVar("T")

Registration = Mapping[str, Any]
Check = Callable[[Mapping[str, Any]], None]
"""Is given `tags` and `config` of a run of that name which is there already, and raises InvalidArgument where frames that
come now would hide what is somebody else's."""


def attempt_key(*what: object) -> str:
    """The same words for the same things, given as what JSON can hold: the same attempt at the service."""
    text = json.dumps(what, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def run_writer(
    registration: Registration,
    *,
    server: str | None = None,
    spool: Path | str | None = None,
    check: Check,
    on_warning: Callable[[str], None] = lambda _text: None,
    patience_s: float = 0.0,
    followers: int = 0,
    edition: int = 0,
) -> RunWriter:
    """A writer to a service or into a spool folder, one of both.

    `registration` is the body of `POST /runs`; its `attempt_key`, the names of the writers and the frames' seq should
    follow from what is written, so that the same comes to the same place. A service that is away is asked again for
    `patience_s`. `on_warning` hears of frames that are refused.

    The newest attempt hides those before it. Where the one of this key is followed by more attempts than the `followers`
    that the caller itself writes after it, another is begun: its `edition` is the first from the given one that is not so.
    """
    if (server is None) == (spool is None):
        raise InvalidArgument(f"expected a server or a spool folder, got server {server!r} and spool {spool!r}")
    if server is not None:
        return _ServedRun(registration, server, check, on_warning, patience_s, followers, edition)
    assert spool is not None
    return _SpooledRun(registration, Path(spool), check, followers, edition)


def patiently(ask: Callable[[], T], patience_s: float) -> T:
    """Ask again and again where the service does not answer or asks to wait. Nobody listening is told at once: a wrong
    address is the likely reason."""
    deadline, pause_s = time.monotonic() + patience_s, 0.25
    while True:
        try:
            return ask()
        except ServerUnreachable as error:
            pause_s = max(pause_s, error.retry_after_s or 0.0)
            if isinstance(error.__cause__, ConnectionRefusedError) or time.monotonic() + pause_s > deadline:
                raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _in_edition(registration: Registration, edition: int) -> Registration:
    return {**registration, "attempt_key": f"{registration['attempt_key']}.{edition}"} if edition else registration


class RunWriter(ABC):
    """Takes the frames of one attempt at a run.

    Any method raises ServerUnreachable, ServerRefused or SpoolError; do the same again later and nothing is lost.
    """

    run_id: str | None = None
    """The id at the service; None in a spool folder."""
    attempt: int | None = None
    """Its number at the service; None in a spool folder."""
    edition = 0
    num_new = 0
    """Frames that were not there before."""
    num_known = 0
    """Frames that were."""
    num_refused = 0
    """Frames that the service did not take."""

    @abstractmethod
    def put(self, writer: str, frame: Frame) -> None:
        """Keep a frame; what is kept goes out in batches."""

    @abstractmethod
    def flush(self) -> None:
        """Bring everything to where it goes."""

    @abstractmethod
    def finish(self, state: RunState = "finished") -> None:
        """Bring everything to where it goes and say how the run ended. More may be put: then it goes on."""

    @abstractmethod
    def give_up(self, state: RunState = "failed") -> None:
        """Say how the run ended, unless it had: nobody goes on with it, and it would be called silent."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                with contextlib.suppress(TsemonError):  # the first error is the one to tell
                    self.give_up()
        finally:
            self.close()


class _ServedRun(RunWriter):
    def __init__(
        self,
        registration: Registration,
        server: str,
        check: Check,
        on_warning: Callable[[str], None],
        patience_s: float,
        followers: int,
        edition: int,
    ) -> None:
        self._registration, self._on_warning, self._patience_s = registration, on_warning, patience_s
        self._server = server
        self._delivery = HttpDelivery(server, timeout_s=TIMEOUT_S)
        self._writers: dict[str, tuple[MemorySpool, Courier]] = {}
        self._has_news = False
        """Whether the service has taken a new frame since the run ended."""
        try:
            patiently(lambda: self._find(check), self._patience_s)
            self._run = self._register(registration, followers, edition)
        except BaseException:
            self._delivery.close()
            raise

    def _find(self, check: Check) -> None:
        found = self._delivery.find(self._registration["project"], self._registration["run"])
        if found is not None and found.get("num_frames"):
            check(self._delivery.run(found["run_id"]))

    def _register(self, registration: Registration, followers: int, first: int) -> Courier:
        for self.edition in itertools.count(first):
            self._registration = _in_edition(registration, self.edition)
            run = self._courier("run")
            self.run_id, self.attempt = run_id, attempt = patiently(run.register, self._patience_s)
            found = patiently(functools.partial(self._delivery.run, run_id), self._patience_s)
            if found["attempt"] - attempt <= followers:
                self._has_ended = found.get("state") != "running"
                break
        return run

    def put(self, writer: str, frame: Frame) -> None:
        if writer not in self._writers:
            held = MemorySpool(self._registration, writer, max_bytes=ROOM_BYTES)
            self._writers[writer] = held, self._courier(writer)
        held, courier = self._writers[writer]
        held.append(frame.to_json())
        if held.num_unsent >= BATCH:
            self._send(held, courier)

    def flush(self) -> None:
        for held, courier in self._writers.values():
            self._send(held, courier)

    def finish(self, state: RunState = "finished") -> None:
        self.flush()
        patiently(lambda: self._run.finish(state), self._patience_s)
        self._has_ended, self._has_news = True, False

    def give_up(self, state: RunState = "failed") -> None:
        if self._has_ended or self.run_id is None:
            return
        # Not over the old connection, which may be in the middle of a request.
        with contextlib.closing(HttpDelivery(self._server, timeout_s=FAREWELL_S)) as delivery:
            if delivery.run(self.run_id).get("attempt") == self.attempt:
                delivery.finish(self.run_id, state)

    def close(self) -> None:
        self._delivery.close()

    def _send(self, held: MemorySpool, courier: Courier) -> None:
        while patiently(lambda: self._send_next(held, courier), self._patience_s):
            pass
        self.num_refused = sum(courier.num_refused for _, courier in self._writers.values())

    def _send_next(self, held: MemorySpool, courier: Courier) -> bool:
        is_sent = courier.send_next(held)
        if self._has_ended and self._has_news:
            # Not before something is new: with a run that goes on, what fired at its end fires again.
            self._run.finish("running")
            self._has_ended = False
        return is_sent

    def _courier(self, writer: str) -> Courier:
        return Courier(self._delivery, self._registration, writer, on_reply=self._count, on_warning=self._on_warning)

    def _count(self, reply: Mapping[str, Any]) -> None:
        num_new = int(reply.get("accepted", 0))
        self.num_new += num_new
        self._has_news = self._has_news or num_new > 0
        self.num_known += int(reply.get("duplicates", 0))


class _SpooledRun(RunWriter):
    """Appends what the spools of the attempt do not hold yet, for `tsemon sync` to send or `tsemon serve` to show."""

    def __init__(self, registration: Registration, root: Path, check: Check, followers: int, edition: int) -> None:
        self._root = root
        self._folder = root / quoted(registration["project"]) / quoted(registration["run"])
        self._spools: dict[str, tuple[Spool, set[int]]] = {}
        self._has_ended = False
        began: dict[str, float] = {}
        for path in self._folder.glob("*/run.json"):
            other = SpoolReader(path.parent)
            check(other.registration)
            key = other.registration["attempt_key"]
            began[key] = min(other.created_at, began.get(key, math.inf))
        for self.edition in itertools.count(edition):
            self._registration = _in_edition(registration, self.edition)
            own = began.get(self._registration["attempt_key"], math.inf)
            if sum(time_s > own for time_s in began.values()) <= followers:
                break

    def put(self, writer: str, frame: Frame) -> None:
        if writer not in self._spools:
            self._spools[writer] = self._open(writer)
        spool, known = self._spools[writer]
        if frame.seq in known:
            self.num_known += 1
            return
        self._has_ended = False
        spool.append(frame.to_json())
        known.add(frame.seq)
        self.num_new += 1

    def flush(self) -> None:
        """Each frame is in its file already."""

    def finish(self, state: RunState = "finished") -> None:
        for spool, _ in self._spools.values():
            spool.finish(state)
        self._has_ended = True

    def give_up(self, state: RunState = "failed") -> None:
        if not self._has_ended:
            self.finish(state)

    def close(self) -> None:
        for spool, _ in self._spools.values():
            spool.close()

    def _open(self, writer: str) -> tuple[Spool, set[int]]:
        """The spool of this attempt and writer, made now or left by an earlier call, and the seqs of the frames in it."""
        own = self._folder / f"{quoted(self._registration['attempt_key'])}~{quoted(writer)}"
        if not (own / "run.json").exists():
            return Spool.create(self._root, self._registration, writer, max_bytes=ROOM_BYTES), set()
        spool = Spool.open(own, max_bytes=ROOM_BYTES)
        try:
            frames = [text for batch in SpoolReader(own).new_frames() for text in batch]
            with contextlib.suppress(OSError):
                (own / "end.json").unlink()  # it goes on
            return spool, {int(json.loads(text)["seq"]) for text in frames}
        except (ValueError, KeyError, TypeError) as error:
            spool.close()
            raise SpoolError(f"{own} holds what is no frame ({error}); delete it and begin again") from error
