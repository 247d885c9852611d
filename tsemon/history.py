"""The scalars of steps without a sample, until they are sent."""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument
from tsemon.late import on_host
from tsemon.probes.every_step import LEFT_OUT, not_one_number
from tsemon.sample import to_host
from tsemon.wire import METRIC_NAME, Rows

MAX_ROWS = 256
"""Rows that are handed over together."""
SEND_AFTER_S = 0.25
"""Seconds after which rows go to the disk although there are fewer: a killed process loses the rows in memory."""
MAX_NAMES = 5000
"""Number of names of scalars. A server takes twice as many metrics of one run."""


class _Row(NamedTuple):
    step: int
    time: float
    scalars: Mapping[str, Tensor | float]


class History:
    """Keeps the scalars of steps without a sample. Nothing waits for the device.

    A number on a GPU is copied there, because the training may overwrite it. It comes to the host with the others that are
    sent with it. Any thread may add rows.
    """

    def __init__(self, put: Callable[[Pending], object], on_fault: Callable[[Exception], None]) -> None:
        """put: takes rows to send. on_fault: hears once of each name that is left out."""
        self._put, self._on_fault = put, on_fault
        self._rows: deque[_Row] = deque()
        self._send_at = 0.0
        self._names: dict[str, bool] = {}
        """By name, whether it is kept."""
        self._told: set[str] = set()
        """Names with a value that was left out."""

    def add_loss(self, step: int, loss: float) -> None:
        """Add the loss of a step on the host."""
        self._add(_Row(step, time.time(), {"loss": loss}))

    def add(self, step: int, scalars: Mapping[str, object]) -> None:
        """Add a row. Values other than one real number are left out."""
        kept: dict[str, Tensor | float] = {}
        for name, value in scalars.items():
            is_kept = self._names.get(name)
            if is_kept is None:
                is_kept = self._names[name] = self._is_fit(name)
            if is_kept and (number := self._number(name, value)) is not None:
                kept[name] = number
        if kept:
            self._add(_Row(step, time.time(), kept))

    def send(self) -> None:
        """Hand over all rows."""
        rows = []
        while self._rows:
            rows.append(self._rows.popleft())
        if rows:
            self._put(Pending(rows))

    def _add(self, row: _Row) -> None:
        self._rows.append(row)
        if len(self._rows) >= MAX_ROWS or row.time >= self._send_at:
            self._send_at = row.time + SEND_AFTER_S
            self.send()

    def _is_fit(self, name: object) -> bool:
        why = ""
        if not isinstance(name, str) or not re.fullmatch(METRIC_NAME, name):
            why = "a name has letters, digits and _./:- only, and at most 128 of them"
        elif len(self._names) >= MAX_NAMES:
            why = f"a run has at most {MAX_NAMES} different scalars"
        if why:
            self._on_fault(InvalidArgument(LEFT_OUT.format(name=name, why=why)))
        return not why

    def _number(self, name: str, value: object) -> Tensor | float | None:
        if type(value) is float:
            return value
        if isinstance(value, Tensor):
            own = on_host(value)
            if not isinstance(own, Tensor):
                return own
            own = own.detach()
            if type(own) is Tensor and own.is_cpu and own.numel() == 1 and not own.is_complex():
                return own.item()
            if type(own) is Tensor and own.numel() == 1 and not own.is_complex() and not own.is_meta:
                return _copied(own)
        else:
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                return float(value)  # type: ignore[arg-type]
        if name != "loss" and name not in self._told:  # of a loss it was said already
            self._told.add(name)
            self._on_fault(InvalidArgument(LEFT_OUT.format(name=name, why=not_one_number(value))))
        return None


def _copied(number: Tensor) -> Tensor | None:
    """A copy on the device. None while a CUDA graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        return None
    dtype = torch.float32 if number.device.type == "mps" else torch.float64  # which that device does not have
    return number.reshape(1).to(dtype, copy=True)


class Pending:
    """Rows on their way to the host."""

    def __init__(self, rows: Sequence[_Row]) -> None:
        """Called on the training thread: starts at most one copy, and waits for none."""
        self._rows = rows
        self._copy = to_host([value for row in rows for value in row.scalars.values() if isinstance(value, Tensor)])

    def to_rows(self, seq: int) -> Iterator[Rows]:
        """Wait for the copy. The rows, those with the same names together. Called by the exporter's thread."""
        packed, copied = self._copy
        if copied is not None:
            copied.synchronize()
        late = iter(packed.tolist())
        alike: dict[tuple[str, ...], list[_Row]] = {}
        for row in self._rows:
            scalars = {name: next(late) if isinstance(value, Tensor) else value for name, value in row.scalars.items()}
            alike.setdefault(tuple(scalars), []).append(row._replace(scalars=scalars))
        for names, rows in alike.items():
            columns = {name: [float(row.scalars[name]) for row in rows] for name in names}
            yield Rows(seq, [row.step for row in rows], [round(row.time, 3) for row in rows], columns)
            seq += len(rows)
