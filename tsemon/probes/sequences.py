"""The sequences of the batch with the largest losses, and whether they came before. Axes: B sequences."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tsemon.catalogue import PLACES
from tsemon.errors import InvalidArgument
from tsemon.measures.inputs import MAX_SEQUENCES, overlap
from tsemon.measures.sequence_losses import sequence_loss_sums, sequence_losses
from tsemon.probes.reading import OnHost, Undefined

OF_INPUTS = ("input_overlap", "distinct_inputs")
MEAN = "sequence_loss_mean"
SEQUENCE_METRICS = (*(f"sequence_{kind}_{i + 1}" for kind in ("loss", "id", "seen") for i in range(len(PLACES))), MEAN)
LABELS = ("labels", "targets")
MAX_REMEMBERED = 65_536
MAX_GIVEN = 65_536
"""Maximum number of losses of a step: they travel to the host with the sample."""
MAX_ID = 2**53 - 1
"""Largest integer up to which a float64, such as a scalar of a frame, has all integers."""

PASS = "pass sequence_losses= to monitor.step()"
PASS_IDS = "pass sequence_ids= to monitor.step()"
NOT_GIVEN = f"the model's forward has no tensor named labels or targets; {PASS}"
NO_SUM = f"the losses of the sequences do not add up to the loss of the step; {PASS}"


class Given(NamedTuple):
    """The unchecked arguments of `monitor.step` about sequences."""

    losses: Any = None
    ids: Any = None

    def checked(self) -> dict[str, Tensor]:
        """Losses as float32 and ids as int64, on any device. Nothing waits for it, so values are checked on the host."""
        found = {}
        if self.losses is not None:
            losses = _vector("sequence_losses", self.losses, "one loss per sequence")
            if losses.dtype == torch.bool or losses.is_complex():
                raise InvalidArgument(
                    f"sequence_losses must be real numbers, got {losses.dtype}; pass loss.mean(dim=1)"
                )
            found["losses"] = losses.float()
        if self.ids is not None:
            ids = _vector("sequence_ids", self.ids, "one integer per sequence")
            if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
                raise InvalidArgument(f"sequence_ids must be integers, got {ids.dtype}; pass indices of the data set")
            found["ids"] = ids.long()
        if len(found) == 2 and len(found["losses"]) != len(found["ids"]):
            raise InvalidArgument(
                f"sequence_losses and sequence_ids must be of equal length, got {len(found['losses'])} and "
                f"{len(found['ids'])}; pass both for the same sequences"
            )
        return found


def _vector(name: str, given: Any, expected: str) -> Tensor:
    kind = type(given).__name__
    are_tensors = {isinstance(each, Tensor) for each in given} if isinstance(given, list | tuple) else set()
    if len(are_tensors) > 1:  # to read its tensors would wait for the device
        raise InvalidArgument(f"{name} must be a list of tensors or of numbers, got a {kind} of both; make all tensors")
    try:
        is_list = are_tensors == {True}
        vector = torch.stack(list(given)) if is_list else torch.as_tensor(given)  # neither waits for a device
    except Exception as error:
        raise InvalidArgument(
            f"{name} must be a tensor or a list with {expected}, got a {kind}: {error}; convert it to numbers"
        ) from error
    vector = vector.detach()
    if hasattr(vector, "to_local") or vector.ndim != 1 or not 0 < len(vector) <= MAX_GIVEN:
        raise InvalidArgument(
            f"{name} must be a tensor or a list with {expected}, 1 to {MAX_GIVEN} in one dimension, got a {kind} of shape "
            f"{tuple(vector.shape)}; pass one batch"
        )
    return vector


class LabelledPass:
    """The losses of the sequences of one forward pass, from the labels that a module gets and the logits that it returns."""

    def __init__(self, logits_of: Callable[[Any], Tensor | None]) -> None:
        self._logits_of = logits_of
        self.forget()

    def forget(self) -> None:
        self._outermost: nn.Module | None = None
        """The module whose call is the pass, until it returns."""
        self._asked: tuple[nn.Module, Tensor, Any] | None = None
        """The module with labels, until it returns; its labels; and `num_items_in_batch`."""
        self._sums: Tensor | None = None
        self._loss, self._num_items = number(None), number(None)
        self.why_not = NOT_GIVEN

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The outermost module of the pass is about to run."""
        self.forget()
        self._look(module, args, kwargs)
        self._outermost = module

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module is about to run, maybe one inside the pass."""
        if module is self._outermost:  # the pass has failed, and this is another
            self._outermost = self._asked = None
        elif self._outermost is not None and self._asked is None and self._sums is None:
            self._look(module, args, kwargs)

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        labels, name = _labels(module, args, kwargs), type(module).__name__
        if labels is None:
            return
        if labels.ndim not in (1, 2) or labels.is_floating_point() or not labels.numel():
            self.why_not = f"the labels of {name} are not class numbers of shape (B,) or (B, T); {PASS}"
        elif len(labels) > MAX_SEQUENCES:
            self.why_not = f"the batch has {len(labels)} sequences, more than {MAX_SEQUENCES}; {PASS}"
        else:
            self._asked = module, labels, kwargs.get("num_items_in_batch")
            self.why_not = f"the output of {name} was not seen: it runs compiled, or did not return; {PASS}"

    def leave(self, module: nn.Module, output: Any) -> None:
        """The module returned."""
        if module is self._outermost:
            self._outermost = None
        if self._asked is None or module is not self._asked[0]:
            return
        (_, labels, num_items), self._asked = self._asked, None
        logits = self._logits_of(output)
        if logits is None:
            self.why_not = f"the output of {type(module).__name__} holds no logits that are known as such; {PASS}"
        elif logits.shape[:-1] != labels.shape:
            self.why_not = (
                f"logits of shape {tuple(logits.shape)} and labels {tuple(labels.shape)} do not match; {PASS}"
            )
        else:
            self._sums = sequence_loss_sums(logits, labels.to(logits.device, non_blocking=True))
            self._loss, self._num_items = number(_loss_in(output)).clone(), number(num_items).clone()

    def raw(self, loss: object) -> dict[str, Tensor]:
        """Numbers from which the host finds the losses. `loss` is the loss of the step."""
        if self._sums is None:
            return {}
        numbers = [x.to(self._sums.device, non_blocking=True) for x in (self._loss, number(loss), self._num_items)]
        return {"sums": self._sums, "numbers": torch.cat(numbers)}


def _labels(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    names = _names(getattr(type(module), "forward", None))
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    found = (named.get(name) for name in LABELS)
    return next((x for x in found if isinstance(x, Tensor) and not hasattr(x, "to_local")), None)


@lru_cache(maxsize=64)
def _names(forward: Any) -> tuple[str, ...]:
    """The parameters of a forward method, without self; none of one that is not Python's."""
    try:
        return tuple(inspect.signature(forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


def _loss_in(output: Any) -> Tensor | None:
    """The item named loss, or else the first tensor without axes in a tuple."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    items = output if isinstance(output, tuple | list) else ()
    return next((x for x in (named, *items) if isinstance(x, Tensor) and not x.ndim and x.is_floating_point()), None)


def number(value: Any) -> Tensor:
    """The value as float32 (1,), on its device; NaN if it is not a number."""
    if isinstance(value, Tensor) and not hasattr(value, "to_local") and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(1).float()
    try:
        return torch.tensor([math.nan if value is None or isinstance(value, Tensor) else float(value)])
    except (TypeError, ValueError):
        return torch.tensor([math.nan])


class Register:
    """The sequences of recent samples, and how labels are read. Only the exporter's thread uses it."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        """Id to the newest sampled step with this sequence, the oldest first."""
        self._before: set[int] | None = None
        """Hashes of the sample before."""
        self._way = 0

    def overlap(self, hashes: Sequence[int]) -> float:
        """Called in the order of samples. NaN in the first, which has none before it."""
        before, self._before = self._before, set(hashes)
        return math.nan if before is None else overlap(hashes, before)

    def losses(self, sums: Tensor, references: Sequence[float], num_items: float) -> list[float | None]:
        """The loss of each sequence, None without labels. Raises Undefined if they do not add up to the step's loss."""
        sums_R2B = sums.view(2, 2, -1)
        found = sequence_losses(sums_R2B, references, num_items, self._way)
        if found is None:
            raise Undefined(NO_SUM)
        self._way, losses_B = found
        return [loss if num else None for loss, num in zip(losses_B.tolist(), sums_R2B[self._way, 1], strict=True)]

    def rank(self, losses: Sequence[float | None], ids: Sequence[int]) -> dict[str, float]:
        """The metrics of the sequences with the largest losses, NaN first. `ids` is empty if they are not known."""
        known = [(loss, index) for index, loss in enumerate(losses) if loss is not None]
        known.sort(key=lambda one: (0.0, 0.0) if math.isnan(one[0]) else (1.0, -one[0]))
        finite = [loss for loss, _ in known if math.isfinite(loss)]
        values = {MEAN: math.fsum(finite) / len(finite) if finite else math.nan}
        for place, (loss, index) in enumerate(known[: len(PLACES)], 1):
            values[f"sequence_loss_{place}"] = loss
            if index < len(ids):
                values[f"sequence_id_{place}"] = ids[index]
                values[f"sequence_seen_{place}"] = self._steps.get(ids[index], math.nan)
        return values

    def remember(self, ids: Sequence[int], step: int) -> None:
        for known in ids:
            self._steps.pop(known, None)
            self._steps[known] = step
        while len(self._steps) > MAX_REMEMBERED:
            del self._steps[next(iter(self._steps))]


class OfSample:
    """One sample's metrics of sequences. The first that the host finishes reads all of them."""

    def __init__(
        self, register: Register, raw: Mapping[str, Tensor], step: int, num_rows: int, num_passes: int, why_not: str
    ) -> None:
        """raw: `hashes` or `ids` as int64, and `losses` or `sums` and `numbers` as float32, as far as they are known.

        num_rows: Number of sequences of the batch with these hashes. num_passes: Number of training passes of the step;
        the hashes are of the first. why_not: Why there are no losses.
        """
        self._register, self._step, self._num_rows, self._num_passes = register, step, num_rows, num_passes
        self._why_not, self._why_no_ids = why_not, ""
        self._fault: InvalidArgument | None = None
        self._values: dict[str, float] = {}
        # The bits of an integer travel as two float32 numbers.
        flat = {name: tensor.reshape(-1).contiguous().view(torch.float32) for name, tensor in raw.items()}
        self._types = {name: (tensor.dtype, flat[name].numel()) for name, tensor in raw.items()}
        device = next((x.device for x in flat.values() if x.device.type != "cpu"), torch.device("cpu"))
        self._raw = torch.cat([x.to(device, non_blocking=True) for x in flat.values()])

    def metric(self, name: str) -> OnHost:
        raw, self._raw = self._raw, torch.empty(0)
        return OnHost(raw, partial(self._finish, name))

    def _finish(self, name: str, raw: Tensor) -> Tensor:
        if raw.numel():
            try:
                self._read(raw)
            except Undefined as error:
                self._why_not = str(error)
            except InvalidArgument as error:
                self._fault, self._why_not = error, str(error)
        if name not in self._values:
            if name == "distinct_inputs" and "input_overlap" in self._values:
                raise Undefined("the batch has a single sequence")
            fault, self._fault = self._fault, None  # one fault for all metrics
            raise fault or Undefined((not name.startswith("sequence_loss") and self._why_no_ids) or self._why_not)
        return torch.tensor(self._values[name], dtype=torch.float64)

    def _read(self, raw: Tensor) -> None:
        sizes = [size for _, size in self._types.values()]
        named = zip(self._types.items(), torch.split(raw, sizes), strict=True)
        found = {name: part.clone().view(dtype) for (name, (dtype, _)), part in named}
        hashes: list[int] = found["hashes"].tolist() if "hashes" in found else []
        if hashes:
            self._values["input_overlap"] = self._register.overlap(hashes)
        if len(hashes) > 1:
            self._values["distinct_inputs"] = len(set(hashes))
        ids: list[int] = found["ids"].tolist() if "ids" in found else hashes
        wrong = next((known for known in ids if not 0 <= known <= MAX_ID), None)
        if wrong is not None:
            raise InvalidArgument(f"sequence_ids must be from 0 to 2^53 - 1, got {wrong}; pass indices of the data set")
        try:
            self._values |= self._ranked(found, ids)
        finally:
            self._register.remember(ids, self._step)

    def _ranked(self, found: Mapping[str, Tensor], ids: Sequence[int]) -> dict[str, float]:
        losses: list[float | None]
        if "losses" in found:
            losses = found["losses"].tolist()
        elif "sums" in found:
            *references, num_items = found["numbers"].tolist()
            losses = self._register.losses(found["sums"], references, num_items)
        else:
            raise Undefined(self._why_not)
        self._why_not = f"fewer than {len(PLACES)} sequences have a loss"
        num_ids = len(ids) if "ids" in found else self._num_rows
        if num_ids != len(losses):
            why = f"there are {len(losses)} losses, and the first forward pass of the step had {num_ids} sequences"
            self._why_no_ids = f"{why}; {PASS_IDS}"
        elif "losses" in found and "ids" not in found and self._num_passes > 1:
            why = f"the step had {self._num_passes} forward passes, and the losses may be of another than the first"
            self._why_no_ids = f"{why}; {PASS_IDS}"
        return self._register.rank(losses, () if self._why_no_ids else ids)
