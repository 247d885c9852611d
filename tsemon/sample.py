"""One sampled step on its way from the device to a frame."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tsemon.catalogue import TIERS
from tsemon.errors import InvalidArgument
from tsemon.probes import OnHost, Reading, Span, Undefined
from tsemon.probes.every_step import LEFT_OUT, not_one_number
from tsemon.stacks import Stacks
from tsemon.wire import MAX_SCALARS, METRIC_NAME, Array, Frame

UNDEFINED = (
    "undefined in {where} in the last sample: values are not finite, or sequences are single tokens, padding or zeros"
)


class Sample:
    """One step's numbers on their way to the host: one small tensor on the device, and what each part of it means."""

    def __init__(
        self,
        reading: Reading,
        given: Mapping[str, Tensor | float],
        step: int,
        on_fault: Callable[[Exception], None],
        spans: Sequence[Span] = (),
        stacks: Stacks | None = None,
    ) -> None:
        self._step = step
        self._on_fault = on_fault
        self._spans = spans
        self._time = time.time()
        self._scalars: dict[str, float] = {}
        self._parts: list[_Part] = []
        self.not_measured: Mapping[str, str] | None = None
        """Reasons for metrics that are not measured, to be sent with the frame."""
        self._stacks = stacks
        self.undefined: Mapping[str, str] = {}
        """Reasons for metrics that the host found undefined, such as NaN in every layer. Known with the frame."""
        self.device_s = 0.0
        """Seconds of the device's time that the hooks of this step took; known once the frame was made."""
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
                    if name not in TIERS and not re.fullmatch(METRIC_NAME, name):
                        raise InvalidArgument("a name has letters, digits and _./:- only, and at most 128 of them")
                    if isinstance(value, float | int):
                        self._scalars[name] = float(value)
                        continue
                    raw, finish = (value.raw, value.finish) if isinstance(value, OnHost) else (value, None)
                    if not isinstance(raw, Tensor):
                        try:
                            self._scalars[name] = float(raw)
                        except (TypeError, ValueError, OverflowError):
                            raise InvalidArgument(not_one_number(raw)) from None
                        continue
                    if group == "scalars" and finish is None and (raw.numel() != 1 or raw.is_complex() or raw.is_meta):
                        raise InvalidArgument(not_one_number(raw))
                    tensors.append(self._packed_part(group, name, raw, finish))
                except Exception as error:
                    on_fault(InvalidArgument(LEFT_OUT.format(name=name, why=error)))
        for note in reading.notes:
            tensors.append(self._packed_part("notes", "", note.raw, note.finish))
        for decision in reading.later:
            tensors.append(self._packed_part("later", "", decision.raw, decision.finish))
        if reading.agreed is not None:
            tensors.append(reading.agreed.float())
        self._num_agreed = 0 if reading.agreed is None else reading.agreed.numel()
        self._packed, self._copied = to_host(tensors)

    def _packed_part(
        self, group: str, name: str, raw: Tensor, finish: Callable[[Tensor], Tensor | None] | None
    ) -> Tensor:
        """Add a part. If the host needs float64, its bits travel as two float32 numbers."""
        dtype = raw.dtype if finish and raw.dtype == torch.float64 else torch.float32
        self._parts.append(_Part(group, name, tuple(raw.shape), dtype, finish))
        flat = raw.detach().to(dtype).reshape(-1)
        return flat if dtype == torch.float32 else flat.view(torch.float32)

    def decide(self, *, is_silent: bool) -> None:
        """Called by the training thread a sample later. In a process that makes no frames, it takes the notes, too."""
        if groups := {"later", "notes"} & {part.group for part in self._parts} - (set() if is_silent else {"notes"}):
            self._unpack(groups, lambda part, values: None)

    def _unpack(self, groups: Collection[str], take: Callable[[_Part, Tensor], None]) -> dict[str, str]:
        """Return the reasons for metrics that are undefined."""
        self._wait()
        undefined: dict[str, str] = {}
        offset = 0
        for part in self._parts:
            size = math.prod(part.shape) * part.dtype.itemsize // 4
            values = self._packed[offset : offset + size]
            offset += size
            if part.group in groups:
                try:
                    values = values.clone().view(part.dtype).view(part.shape)
                    finished = values if part.finish is None else part.finish(values)
                    if finished is not None:
                        take(part, finished)
                except Undefined as reason:
                    undefined[part.name] = str(reason)
                except Exception as error:
                    self._on_fault(error)
                    if part.name:
                        undefined[part.name] = str(error)
        return undefined

    @property
    def names(self) -> list[str]:
        return sorted({*self._scalars, *(part.name for part in self._parts if part.name)})

    def to_frame(self, seq: int) -> Frame:
        """Wait for the copy and unpack it. Called by the exporter's thread."""
        self._unpack(("notes",), lambda part, values: None)
        if self._spans:
            self.device_s = sum(start.elapsed_time(end) for start, end in self._spans) / 1e3
        groups: dict[str, dict[str, Array]] = {"layers": {}, "heads": {}}
        scalars = dict(self._scalars)

        def take(part: _Part, values: Tensor) -> None:
            if part.group == "scalars":
                scalars[part.name] = values.item()
            else:
                groups[part.group][part.name] = Array.of(values.flatten().tolist(), tuple(values.shape))

        undefined = self._unpack(("layers", "heads", "scalars"), take)
        layers = groups["layers"]
        where = (
            (name, self._where_undefined(array.tolist())) for name, array in layers.items() if len(array.shape) == 1
        )
        undefined |= {name: UNDEFINED.format(where=words) for name, words in where if words}
        self.undefined = undefined  # in one step, because the training thread may be reading it
        return Frame(seq, self._step, self._time, scalars, groups["layers"], groups["heads"], self.not_measured)

    def _where_undefined(self, values: Sequence[float]) -> str:
        """Empty if some value of each stack is defined."""
        if all(map(math.isnan, values)):
            return "every layer"
        if self._stacks is None or len(values) not in (self._stacks.num_blocks, self._stacks.num_states):
            return ""
        spans = zip(self._stacks.each, self._stacks.spans(len(values)), strict=True)
        names = [stack.name for stack, span in spans if all(math.isnan(values[entry]) for entry in span)]
        return f"every layer of {' and '.join(names)}" if names else ""

    @property
    def has_agreed(self) -> bool:
        return self._num_agreed > 0

    def agreed(self) -> tuple[float, ...]:
        """What the ranks agreed on in this sample. Read a sample later, when the copy is long done."""
        self._wait()
        return tuple(self._packed[self._packed.numel() - self._num_agreed :].tolist())

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


class _Part(NamedTuple):
    """One metric in the packed tensor."""

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    finish: Callable[[Tensor], Tensor | None] | None


def to_host(tensors: list[Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
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
