"""Listen to what the model is given: whether the loader brings anything new, and which sequences. Axes: B sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument
from tsemon.measures.inputs import BITS, MAX_SEQUENCES, sequence_ids
from tsemon.probes.held import Inputs
from tsemon.probes.part import NOT_CALLED, Part
from tsemon.probes.reading import Reading
from tsemon.probes.sequences import OF_INPUTS, PASS, SEQUENCE_METRICS, Given, LabelledPass, OfSample, Register


class InputProbe(Part):
    """Which sequences of the batch were in the batch of a sample before, and which ones have the largest losses.

    A sequence is an entry along the first axis of the inputs, of all tensors together that have this axis. It is known
    again by a hash of 53 bits, taken on the device; hashes are compared on the exporter's thread.
    """

    METRICS = (*OF_INPUTS, *SEQUENCE_METRICS)

    def __init__(self, logits_of: Callable[[Any], Tensor | None]) -> None:
        self._register = Register()
        self._labelled = LabelledPass(logits_of)
        self.has_given = False
        """Whether `monitor.step` was given losses at the last sample."""
        super().__init__()

    def forget(self) -> None:
        super().forget()
        self._hashes_B: Tensor | None = None
        self._num_rows = 0
        self._outermost: nn.Module | None = None
        """The module of the pass that counts."""
        self._num_passes = 0
        self._is_of_training = False
        self._why_missing: str | None = None
        self._labelled.forget()
        self._loss: object = None
        self._given: dict[str, Tensor] = {}
        self._why_not_given = ""
        self._has_losses = False

    @property
    def reads_labels(self) -> bool:
        """True if it needs the output of the model."""
        return not self.has_given and not self.wanted.isdisjoint(SEQUENCE_METRICS)

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the inputs of a forward pass. The first in train mode counts, or else the first."""
        if not self._is_of_training and (self._hashes_B is None or module.training):
            self._is_of_training = module.training
            self._outermost, self._num_passes = module, 1
            tensors = list(_by_sequence(Inputs(args, kwargs)))
            self._num_rows = len(tensors[0]) if tensors else 0
            self._hashes_B = sequence_ids([tensor[:MAX_SEQUENCES] for tensor in tensors]) if tensors else None
            self._why_missing = f"{type(module).__name__} was given no tensor with an axis of sequences"
            self._labelled.forget()
            if self.reads_labels:
                self._labelled.begin(module, args, kwargs)
            return
        if module is self._outermost and module.training == self._is_of_training:
            self._num_passes += torch._C._current_graph_task_id() == -1  # a backward pass may compute it again
        if self.reads_labels:
            self._labelled.enter(module, args, kwargs)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Read the output of a module of the path."""
        self._labelled.leave(module, output)

    def take_given(self, given: Given, loss: object) -> None:
        """Take the arguments of `monitor.step` at this step. Raises InvalidArgument."""
        self._loss, self.has_given = loss, given.losses is not None
        try:
            self._given = given.checked()
        except InvalidArgument as error:
            self._why_not_given = str(error)
            raise

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        raw = self._given if "losses" in self._given else self._given | self._labelled.raw(self._loss)
        self._has_losses = "losses" in raw or "sums" in raw
        if self._hashes_B is not None:
            raw = raw | {"hashes": self._hashes_B}
        of_inputs = OF_INPUTS if self._hashes_B is not None else ()
        of_losses = SEQUENCE_METRICS if self._has_losses else ()
        names = tuple(name for name in (*of_inputs, *of_losses) if name in self.wanted)
        if not names:
            return Reading()
        why_not = self._why_not_given or self._labelled.why_not
        sample = OfSample(self._register, raw, self.step, self._num_rows, self._num_passes, why_not)
        return Reading(scalars={name: sample.metric(name) for name in names})

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        unseen = f"the model's inputs were not seen: {why_unseen or NOT_CALLED}"
        why = {} if self._hashes_B is not None else dict.fromkeys(OF_INPUTS, self._why_missing or unseen)
        if self._has_losses:
            return why
        no_labels = self._labelled.why_not if self._why_missing is not None else f"{unseen}; {PASS}"
        return why | dict.fromkeys(SEQUENCE_METRICS, self._why_not_given or no_labels)


def _by_sequence(inputs: Inputs) -> list[Tensor]:
    """The tensors that have an entry for each sequence: their first axis is that of the first tensor of several axes.

    A list after other tensors is a memory or a cache, which the model has made, so it differs though the sequences do not.
    A list that comes first is read.
    """
    readable = list[Tensor]()
    for each in (*inputs.args, *inputs.kwargs.values()):
        if not readable or not isinstance(each, list | tuple):
            readable += filter(_is_readable, Inputs((each,), {}).tensors)
    size = next((tensor.shape[0] for tensor in readable if tensor.ndim > 1), None)
    return [tensor for tensor in readable if tensor.ndim and tensor.shape[0] == size and tensor.numel()]


def _is_readable(tensor: Tensor) -> bool:
    is_whole = not hasattr(tensor, "to_local") and not tensor.is_nested
    return is_whole and tensor.layout == torch.strided and tensor.dtype.itemsize in BITS
