"""One sampled step on its way from the device to a frame."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument
from tsemon.probes import Reading
from tsemon.wire import MAX_SCALARS, METRIC_NAME, Array, Frame


class Sample:
    """One step's numbers on their way to the host: one small tensor on the device, and what each part of it means."""

    def __init__(
        self,
        reading: Reading,
        given: Mapping[str, Tensor | float],
        step: int,
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._step = step
        self._time = time.time()
        self._scalars: dict[str, float] = {}
        self._parts: list[tuple[str, str, tuple[int, ...]]] = []
        tensors: list[Tensor] = []
        if len(given) > MAX_SCALARS // 2:
            on_fault(InvalidArgument(f"{len(given)} scalars were given to monitor.step(), {MAX_SCALARS // 2} are kept"))
            given = dict(list(given.items())[: MAX_SCALARS // 2])
        for group, values in (
            ("layers", reading.layers),
            ("heads", reading.heads),
            ("scalars", reading.scalars | dict(given)),
        ):
            for name, value in values.items():
                try:
                    if not re.fullmatch(METRIC_NAME, name):
                        raise InvalidArgument("a name has letters, digits and _./:- only, and at most 128 of them")
                    if not isinstance(value, Tensor):
                        self._scalars[name] = float(value)
                        continue
                    if group == "scalars" and value.numel() != 1:
                        raise InvalidArgument(f"a tensor of shape {tuple(value.shape)} is not one number")
                    tensors.append(value.detach().reshape(-1).to(torch.float32))
                    self._parts.append((group, name, tuple(value.shape)))
                except Exception as error:
                    on_fault(InvalidArgument(f"{name!r} given to monitor.step() was left out: {error}"))
        self._packed, self._copied = _to_host(tensors)

    @property
    def names(self) -> list[str]:
        return sorted({*self._scalars, *(name for _, name, _ in self._parts)})

    def to_frame(self, seq: int) -> Frame:
        """Wait for the copy and unpack it. Called by the exporter's thread."""
        if self._copied is not None:
            self._copied.synchronize()
        values = self._packed.tolist()
        groups: dict[str, dict[str, Array]] = {"layers": {}, "heads": {}}
        scalars, offset = dict(self._scalars), 0
        for group, name, shape in self._parts:
            size = math.prod(shape)
            if group == "scalars":
                scalars[name] = values[offset]
            else:
                groups[group][name] = Array.of(values[offset : offset + size], shape)
            offset += size
        return Frame(seq, self._step, self._time, scalars, groups["layers"], groups["heads"])


def _to_host(tensors: list[Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
    """All values in one tensor, and what to wait for before it is read. Starts at most one copy and waits for none."""
    if not tensors:
        return torch.empty(0), None
    device = next((t.device for t in tensors if t.device.type != "cpu"), tensors[0].device)
    packed = torch.cat([t.to(device, non_blocking=True) for t in tensors])
    if device.type != "cuda":
        return packed, None
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(device))
    return host, copied
