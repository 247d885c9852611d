"""Reads what comes into a folder of spools into a store, for as long as the service runs."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tsemon.errors import InvalidArgument
from tsemon.transport import SpoolReader
from tsemon.wire import RunState, frames_to_body, is_rows
from tsemon_answers.runs import ShownSpool, ShownSpools
from tsemon_server.alerts import Watch
from tsemon_server.bodies import read_body
from tsemon_server.services.ingest import schemas, service
from tsemon_server.store import Store

log = logging.getLogger(__name__)

POLL_S = 0.2
"""How long after one look at the folder the next one comes, at least."""
MAX_SHARE = 0.2
"""The share of the time that looking may take where nothing is new: a folder of very many spools is asked less often."""
PULSE_S = 30.0
"""How often a run whose writer lives is noted as heard of, without a frame."""


@dataclass(slots=True)
class _Spool:
    """A spool, and what was made of it."""

    reader: SpoolReader
    seen_at: float
    """When its writer was last heard of."""
    run_id: str = ""
    attempt: int = 0
    """0 before it is registered."""
    state: RunState = "running"
    num_frames: int = 0
    num_refused: int = 0
    damaged: tuple[Path, ...] = ()


class _Told(NamedTuple):
    """What the store was last told of a run, and when."""

    state: RunState
    at: float


class Follower:
    """Keeps the store at `database` up to what the folder holds."""

    def __init__(self, root: Path, database: str) -> None:
        self._root = root
        self._now = 0.0
        # A run was heard of when its frames were made, not when they are read.
        self._store = Store(database, lambda: self._now)
        self._spools: dict[Path, _Spool] = {}
        self._told: dict[str, _Told] = {}
        self._written: dict[str, float] = {}
        """When each run was last written to the store, by the clock that nobody sets."""
        self._said: set[str] = set()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, watch: Watch) -> None:
        """Begin; `watch` lets the rules read the new frames in the transaction that stores them."""
        self._rules = watch
        self._thread = threading.Thread(target=self._follow, name="tsemon-spools", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, at the next batch of frames at the latest."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._store.close()

    def spools_of(self, run_id: str) -> ShownSpools:
        """What was read of each spool of the run."""
        of_run = [spool for spool in list(self._spools.values()) if spool.run_id == run_id]
        return ShownSpools(spools=[self._shown(spool) for spool in of_run])

    def written_in(self, seconds: float) -> set[str]:
        """Ids of the runs that were written to the store in the last seconds, so many."""
        since = time.monotonic() - seconds
        return {run_id for run_id, at in list(self._written.items()) if at >= since}

    def _shown(self, spool: _Spool) -> ShownSpool:
        return ShownSpool(
            folder=str(spool.reader.folder.relative_to(self._root)),
            attempt=spool.attempt,
            writer=spool.reader.writer,
            num_frames=spool.num_frames,
            num_refused=spool.num_refused,
            damaged=[path.name for path in spool.damaged],
        )

    # -- the follower's thread

    def _follow(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self._look()
            self._stopping.wait(max(POLL_S, (time.monotonic() - began) * (1 / MAX_SHARE - 1)))

    def _look(self) -> None:
        """Read what is new in each spool, the oldest first: the rules read an attempt to its end before the next."""
        try:
            for spool in self._find():
                self._spools[spool.reader.folder] = spool
            for spool in self._spools.values():
                try:
                    self._read(spool)
                except Exception as error:
                    self._say(f"{spool.reader.folder} cannot be shown, it is tried again: {error}")
            self._tell_states()
        except Exception as error:
            self._say(f"{self._root} cannot be followed, it is tried again: {error}")

    def _find(self) -> list[_Spool]:
        """The spools that are new, oldest first."""
        found: list[SpoolReader] = []
        for path in self._root.glob("*/*/*/run.json"):
            if path.parent not in self._spools:
                try:
                    found.append(SpoolReader(path.parent))
                except FileNotFoundError:
                    pass  # delivered just now
                except Exception as error:
                    self._say(f"{path.parent} is not shown: {error}")
        found.sort(key=lambda reader: (reader.created_at, reader.folder))
        return [_Spool(reader, seen_at=_sane_time(reader.created_at)) for reader in found]

    def _read(self, spool: _Spool) -> None:
        is_living = spool.reader.is_living()
        if not spool.attempt:
            if self._would_hide(spool):
                return
            self._register(spool)
        for frames in spool.reader.new_texts():
            if self._stopping.is_set():
                return
            self._take(spool, frames)
        spool.damaged = tuple(spool.reader.damaged())
        for path in spool.damaged:
            self._say(f"{path} is damaged; what stands behind the damage cannot be shown, the rest is")
        self._note_state(spool, is_living)

    def _note_state(self, spool: _Spool, is_living: bool) -> None:
        if is_living:
            spool.seen_at = time.time()
        state = spool.reader.end_state() or ("running" if is_living else "failed")
        if spool.reader.is_there():
            spool.state = state
        elif spool.state == "running":
            # Only what was delivered to its end is deleted, and how it ended went with it.
            spool.state = "finished"

    def _would_hide(self, spool: _Spool) -> bool:
        """Would it hide earlier attempts, though it may be that its training goes on from a checkpoint?"""
        reader = spool.reader
        if reader.has_frames() or reader.registration.get("resume_step") is not None:
            return False
        return any(other.attempt and _name_of(other) == _name_of(spool) for other in self._spools.values())

    def _register(self, spool: _Spool) -> None:
        self._now = spool.seen_at
        body = read_body(schemas.Registration, json.dumps(spool.reader.registration).encode())
        with self._store.write() as writer:
            registered = service.register(writer, body)
        spool.run_id, spool.attempt = registered.run_id, registered.attempt
        self._told.pop(spool.run_id, None)
        self._written[spool.run_id] = time.monotonic()

    def _take(self, spool: _Spool, frames: Sequence[str]) -> None:
        """Store the frames; where some are wrong, all others."""
        self._now = spool.seen_at = max(spool.seen_at, _time_of(frames[-1]))
        body = frames_to_body(spool.reader.writer, spool.attempt, frames)
        try:
            spool.num_frames += service.accept(self._store, spool.run_id, body, self._rules).accepted
            self._written[spool.run_id] = time.monotonic()
        except InvalidArgument as error:
            if middle := len(frames) // 2:
                self._take(spool, frames[:middle])
                self._take(spool, frames[middle:])
                return
            spool.num_refused += 1
            if spool.num_refused == 1:
                self._say(f"{spool.reader.folder}: frames are left out, the first because {error}")

    def _tell_states(self) -> None:
        of_run: dict[str, list[_Spool]] = defaultdict(list)
        for spool in self._spools.values():
            if spool.attempt:
                of_run[spool.run_id].append(spool)
        for run_id, spools in of_run.items():
            newest = max(spool.attempt for spool in spools)
            self._tell_state(run_id, [spool for spool in spools if spool.attempt == newest])

    def _tell_state(self, run_id: str, writers: Sequence[_Spool]) -> None:
        """A run is running while a writer of its newest attempt lives, and else failed if one of them did."""
        states = {writer.state for writer in writers}
        state: RunState = "running" if "running" in states else "failed" if "failed" in states else "finished"
        told, now = self._told.get(run_id), time.time()
        if told is None or told.state != state or (state == "running" and now - told.at > PULSE_S):
            self._now = max(writer.seen_at for writer in writers)
            with self._store.write() as store:
                store.runs.change(run_id, state=state)
            self._told[run_id] = _Told(state, now)
            self._written[run_id] = time.monotonic()

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning(text)


def _name_of(spool: _Spool) -> tuple[object, object]:
    return spool.reader.registration.get("project"), spool.reader.registration.get("run")


def _time_of(text: str) -> float:
    """When the frame, or the last of the rows, was made; 0 for what is neither."""
    try:
        body = json.loads(text)
        return _sane_time(float(body["history"]["time"][-1] if is_rows(text) else body["time"]))
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        return 0.0


def _sane_time(time_s: float) -> float:
    """The time, or the nearest that can be: a file may say anything."""
    return max(0.0, min(time.time(), time_s))
