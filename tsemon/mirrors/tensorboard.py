"""Writes each frame's numbers into TensorBoard's event files."""

from __future__ import annotations

import errno
import os

from tsemon.errors import InvalidArgument, needing
from tsemon.mirrors.numbers import Layers, checked_layers, numbers_of
from tsemon.wire import Frame


class TensorBoard:
    """Event files in a folder; best one of its own, since TensorBoard follows one file of a folder at a time.

    Raises InvalidArgument where it cannot be written to, and MissingPackage.
    """

    def __init__(self, folder: str | os.PathLike[str], *, layers: Layers = "aggregates") -> None:
        with needing("a mirror in TensorBoard needs tensorboard; pip install tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._layers = checked_layers(layers)
        self._folder = os.fspath(folder)
        try:
            self._writer = SummaryWriter(self._folder)
        except OSError as error:
            raise InvalidArgument(f"TensorBoard({self._folder!r}): {error.strerror or error}") from error

    def write(self, frame: Frame) -> None:
        """Append the frame's numbers, and hand them to the system."""
        if not os.path.isdir(self._folder):  # else the writer's own thread ends, with a traceback in the training's log
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._folder)
        for name, value in numbers_of(frame, self._layers).items():
            self._writer.add_scalar(name, value, frame.step, walltime=frame.time)
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()

    def __str__(self) -> str:
        return f"TensorBoard({self._folder})"
