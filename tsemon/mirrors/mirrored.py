"""Frames on their way to a mirror, on a thread of its own: what hangs or fails there holds up nothing else."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Protocol, runtime_checkable

from tsemon.errors import InvalidArgument
from tsemon.mirrors.tensorboard import TensorBoard
from tsemon.mirrors.wandb import WandB
from tsemon.terminal import printable
from tsemon.wire import Frame

MAX_WAITING = 256
MIN_JOIN_S = 2.0


@runtime_checkable
class Mirror(Protocol):
    """Anything that takes frames. `write` and `close` are called on one thread, which is not the training's."""

    def write(self, frame: Frame) -> None:
        """Take a frame. May raise; it is counted and told."""

    def close(self) -> None:
        """No frame comes any more."""


@contextlib.contextmanager
def as_mirrors(also: object) -> Iterator[list[Mirror]]:
    """What `attach(also=)` names. Those made of a text are closed where the block raises. Raises InvalidArgument."""
    if also is None:
        also = ()
    if isinstance(also, str) or not isinstance(also, Iterable):
        also = [also]
    with contextlib.ExitStack() as made:
        yield [_as_mirror(each, made) for each in also]
        made.pop_all()


def _as_mirror(each: object, made: contextlib.ExitStack) -> Mirror:
    if isinstance(each, str):
        kind, _, rest = each.partition(":")
        if kind == "tensorboard" and rest:
            return made.enter_context(contextlib.closing(TensorBoard(rest)))
        if each == "wandb":
            return made.enter_context(contextlib.closing(WandB()))
    elif isinstance(each, Mirror) and not isinstance(each, type):
        return each
    raise InvalidArgument(
        "also= takes tsemon.mirrors.TensorBoard(folder), tsemon.mirrors.WandB(run), 'tensorboard:FOLDER', 'wandb', or "
        f"what has write(frame) and close(), got {each!r}"
    )


class Mirrored:
    """A mirror and the thread that writes to it. The oldest waiting frame goes when there are too many."""

    def __init__(self, mirror: Mirror, on_warning: Callable[[str], None], *, max_waiting: int = MAX_WAITING) -> None:
        self._mirror = mirror
        self._name = printable(str(mirror))
        self._on_warning = on_warning
        self._max_waiting = max_waiting
        self._queue: SimpleQueue[Frame | None] = SimpleQueue()
        self._pid = os.getpid()
        self._num_written = self._num_dropped = self._num_failed = 0
        self._last_error: str | None = None
        self._is_ending = False
        self._thread = threading.Thread(target=self._write, name="tsemon-mirror", daemon=True)
        self._thread.start()

    def put(self, frame: Frame) -> None:
        """Hand over a frame; it never waits."""
        if os.getpid() != self._pid:
            return
        self._queue.put(frame)
        if self._queue.qsize() > self._max_waiting:
            with contextlib.suppress(Empty):
                self._queue.get_nowait()
                self._num_dropped += 1

    def end(self) -> None:
        """Say that no frame comes any more. `join` waits."""
        if os.getpid() == self._pid:
            self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until what waits is written, for so long or two seconds."""
        if os.getpid() != self._pid:
            return
        self._thread.join(max(timeout_s, MIN_JOIN_S))
        if self._thread.is_alive() and self._is_ending:
            self._warn("was given all frames, and is still being closed")
        elif self._thread.is_alive():
            self._warn(f"did not take all frames in time: {self._queue.qsize()} are not in it, tsemon itself has them")

    def __str__(self) -> str:
        # A mirror may say that a later frame took the place of some that it was given.
        num_skipped = getattr(self._mirror, "num_skipped", 0)
        parts = [f"{self._num_written - num_skipped} frames"]
        if num_skipped:
            parts.append(f"{num_skipped} skipped for newer ones")
        if self._num_dropped:
            parts.append(f"{self._num_dropped} dropped")
        if self._num_failed:
            parts.append(f"{self._num_failed} failed: {self._last_error}")
        return f"{self._name}: {', '.join(parts)}"

    def _write(self) -> None:
        while (frame := self._queue.get()) is not None:
            if self._contained(self._mirror.write, frame):
                self._num_written += 1
        self._is_ending = True
        self._contained(self._mirror.close)

    def _contained(self, act: Callable[..., object], *arguments: object) -> bool:
        try:
            act(*arguments)
        except Exception as error:
            self._num_failed += 1
            is_new = self._last_error is None
            self._last_error = printable(f"{type(error).__name__}: {error}")
            if is_new:
                self._warn(f"failed, training and tsemon's own frames are not affected: {self._last_error}")
            return False
        return True

    def _warn(self, text: str) -> None:
        with contextlib.suppress(Exception):
            self._on_warning(f"the mirror {self._name} {text}")
