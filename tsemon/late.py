"""Numbers of every step on the host, without a wait for the device."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

MAX_ON_THE_WAY = 16
"""Maximum number of copies in flight. Until one arrives, further numbers are skipped."""


def on_host(value: Tensor | float) -> Tensor | float:
    """The number in a tensor on the CPU, for which nothing waits; anything else as it is."""
    if type(value) is not Tensor or not value.is_cpu:
        return value
    try:
        number = value.item()
    except RuntimeError:  # it is not one number, or a transform of torch.func hides it
        return value
    return value if isinstance(number, complex) else number


class LateNumbers:
    """Reads one number per step: a number on the host immediately, a number on a GPU as soon as its copy has arrived."""

    def __init__(self) -> None:
        self._copies: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self.num_skipped = 0
        """Number of numbers that were skipped because too many copies were in flight."""

    def put(self, value: object) -> list[float]:
        """Take the number of a step if there is one. Return the numbers that have arrived since the last call, in order.

        Ignores values other than one number, and tensors of other kinds and devices.
        """
        arrived = self._arrived()
        if value is None:
            return arrived
        if not isinstance(value, Tensor):
            try:
                return [*arrived, float(value)]  # type: ignore[arg-type]
            except (TypeError, ValueError, OverflowError):
                return arrived
        if type(value) is not Tensor or value.numel() != 1 or value.is_complex():
            return arrived
        if value.device.type == "cpu":
            return [*arrived, float(value.item())]
        if value.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return arrived
        if len(self._copies) == MAX_ON_THE_WAY:
            self.num_skipped += 1
            return arrived
        host = torch.empty(1, dtype=torch.float64, device="cpu", pin_memory=True)
        host.copy_(value.detach().reshape(1), non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(value.device))
        self._copies.append((host, done))
        return arrived

    def __bool__(self) -> bool:
        """Whether some have not arrived yet."""
        return bool(self._copies)

    def _arrived(self) -> list[float]:
        arrived: list[float] = []
        if not self._copies or torch.cuda.is_current_stream_capturing():
            return arrived
        while self._copies and self._copies[0][1].query():  # type: ignore[no-untyped-call]
            arrived.append(self._copies.popleft()[0].item())
        return arrived
