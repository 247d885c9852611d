"""One number of every step, such as the loss, as tensors on their device.

Axes: N steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument
from tsemon.probes.states import version_of

MAX_STEPS = 4096
"""Maximum number of steps that are kept; the oldest ones are dropped."""
NUM_PER_STACK = 128
"""Numbers are stacked as soon as there are this many, so that no step has to stack a thousand of them."""
LEFT_OUT = "{name!r} given to monitor.step() was left out: {why}"


class EveryStep:
    """Keeps the numbers of the steps between two samples.

    A tensor is kept as it is, detached: nothing is copied, nothing waits for the device. One that is written into before
    it is read has lost the number that was given: it is left out, and numbers are copied from then on. They are also copied
    once one has the memory of the one before, as the static output of a CUDA graph and a running sum have. Part of a larger
    tensor, such as a history of losses, is always copied.
    """

    def __init__(self, name: str, *, num_first: int = 0) -> None:
        """name: the argument of `Monitor.step`. num_first: number of the first numbers that are kept to the end."""
        self._name = name
        self._num_first = self._num_missing = num_first
        self._first: list[Tensor] = []
        self._pending: list[tuple[Tensor | float, int | None]] = []
        """Numbers, and the versions that the tensors among them had when they were given."""
        self._stacks: deque[Tensor] = deque(maxlen=MAX_STEPS // NUM_PER_STACK)
        self._newest: tuple[int, Tensor] | None = None
        """The last tensor and its address, which no other one can have while this one lives."""
        self._must_copy = False
        self.has_newest = False
        """Whether the number that was given last is kept."""

    def add(self, number: object) -> None:
        """Take the number of one step. Raises InvalidArgument if it is anything but one real number."""
        self.has_newest = False
        if not isinstance(number, Tensor):
            try:
                self._pending.append((float(number), None))  # type: ignore[arg-type]
            except (TypeError, ValueError, OverflowError):
                raise self.left_out(number) from None
        elif number.numel() != 1 or number.is_complex():
            raise self.left_out(number)
        elif type(number) is Tensor:
            own = number.detach()
            address = own.data_ptr()
            self._must_copy |= self._newest is not None and self._newest[0] == address
            self._newest = address, own
            if self._must_copy or own.untyped_storage().nbytes() > own.element_size():
                own = own.clone()
            self._pending.append((own, version_of(own)))
        else:
            return
        self.has_newest = True

    def left_out(self, number: object) -> InvalidArgument:
        return InvalidArgument(LEFT_OUT.format(name=self._name, why=not_one_number(number)))

    def add_floats(self, numbers: Sequence[float]) -> None:
        """Take the numbers of several steps."""
        self.has_newest |= bool(numbers)
        self._pending += [(number, None) for number in numbers]

    def __bool__(self) -> bool:
        """Whether `take` has a number to return."""
        return bool(self._pending or self._stacks)

    @property
    def is_full(self) -> bool:
        """Whether it is time to `stack`."""
        return len(self._pending) >= NUM_PER_STACK

    def stack(self) -> None:
        """Put the pending numbers into one tensor, except those that have changed since."""
        pending, self._pending = self._pending, []
        numbers = [
            number for number, version in pending if not isinstance(number, Tensor) or version_of(number) == version
        ]
        self._must_copy |= len(numbers) < len(pending)
        newest, version = pending[-1]
        self.has_newest &= not isinstance(newest, Tensor) or version_of(newest) == version
        if not numbers:
            return
        tensors = [number for number in numbers if isinstance(number, Tensor)]
        if tensors:
            # A float must not become an integer beside one.
            wide = partial(torch.full, (), dtype=torch.float64, device=tensors[0].device)
            tensors = [number if isinstance(number, Tensor) else wide(fill_value=number) for number in numbers]
            stack = torch.stack(on_one_device([number.reshape(()) if number.ndim else number for number in tensors]))
        else:
            stack = torch.tensor(numbers, dtype=torch.float64)
        self._stacks.append(stack)
        if not self.has_first:
            self._first.append(stack)
            self._num_missing -= len(stack)

    @property
    def has_first(self) -> bool:
        """Whether all of the first numbers that are kept have come."""
        return self._num_missing <= 0

    def first(self) -> Tensor:
        """Return the first numbers that `kept` or `take` has returned, at least one, on their device."""
        self._first = [torch.cat(on_one_device(self._first))]
        return self._first[0][: self._num_first]

    def kept(self) -> Tensor | None:
        """Return the numbers of all steps since the last `take`, (N,) on their device. None if no step had one."""
        if self._pending:
            self.stack()
        if not self._stacks:
            return None
        kept = torch.cat(on_one_device([*self._stacks]))
        self._stacks.clear()
        self._stacks.extend(torch.split(kept, NUM_PER_STACK))  # small pieces would fill the deque
        return kept

    def take(self) -> Tensor | None:
        """Return the same, and forget them."""
        kept = self.kept()
        self._stacks.clear()
        return kept


def not_one_number(value: object) -> str:
    """Return in words why a value of `Monitor.step` is no number."""
    what = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        what = f"a {value.dtype} tensor of shape {tuple(value.shape)}" + (" without a value" if value.is_meta else "")
    return f"expected one real number, or a tensor with one element, got {what}"


def on_one_device(tensors: list[Tensor]) -> list[Tensor]:
    """A loop may give some numbers on the host and others on a GPU. No copy to the host: it would wait for the device."""
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    return [tensor.to(device, non_blocking=tensor.device.type == "cpu") for tensor in tensors]
