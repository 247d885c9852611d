"""Listen to what the model answers: how much its predictions depend on the input."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from tsemon.measures.outputs import output_variation
from tsemon.measures.sums import Partials, counted, mean
from tsemon.probes.discovery import Block, is_linear, widths
from tsemon.probes.held import PARALLEL, Inputs
from tsemon.probes.hooks import Hooks
from tsemon.probes.packing import Packing
from tsemon.probes.part import NO_TOKENS, NOT_CALLED, Part
from tsemon.probes.reading import Reading

HEAD_NAMES = ("lm_head", "head", "classifier")


TOO_FEW = "fewer than two predictions are finite and of tokens"


class Running(NamedTuple):
    """A module that has not returned yet, and the thread on which it runs."""

    module: nn.Module
    thread: int


class OutputProbe(Part):
    """Token diversity of the predicted probabilities of one forward pass.

    The logits are in the output of the outermost module that the pass came through: called so, or as wide as the
    model's output head.
    """

    METRICS = ("output_variation",)

    def __init__(self, path: Sequence[nn.Module], blocks: list[Block], depth: int, packing: Packing) -> None:
        self._path = path
        self._packing = packing
        self._running = set[Running]()
        super().__init__(blocks, depth)

    def arm(self, hooks: Hooks) -> None:
        self._running.clear()
        for module in self._path:
            hooks.before(module, self._enter)
            hooks.after(module, self._leave)

    def listen(self, hooks: Hooks) -> None:
        self.forget()
        # The outermost modules return when the pass is over for everybody else; DataParallel does on a thread of its own.
        here = threading.get_ident()
        self._measured = {
            running for running in self._running if running.thread == here or type(running.module).__name__ in PARALLEL
        }

    def forget(self) -> None:
        self._measured = set[Running]()
        """Modules through which the pass that is measured came, and that have not returned yet."""
        self._variation: Tensor | None = None
        self._why_missing: str | None = None

    def collect(self) -> Partials:
        if self._variation is None or self._measured:
            return {}
        return counted("output_variation", self._variation[None])

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        return Reading(scalars={name: mean(sums, name) for name in self.METRICS if name in sums})

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if self._measured:  # a hook that is called in any case is one that dynamo compiles anew for
            measured = {running.module for running in self._measured}
            outermost = next(module for module in self._path if module in measured)
            return {"output_variation": f"{type(outermost).__name__} did not return"}
        is_last_stage = self._blocks[-1].number + 1 == self._depth
        if self._variation is not None or not is_last_stage:
            is_undefined = (
                self._variation is not None and self._variation.device.type == "cpu" and self._variation.isnan()
            )
            return {"output_variation": TOO_FEW} if is_undefined else {}
        return {"output_variation": self._why_missing or f"the model's output was not seen: {why_unseen or NOT_CALLED}"}

    @functools.cached_property
    def _width(self) -> int | None:
        # Not before it is needed: what asks the user's model has to be contained.
        return _head_width(self._path[0], self._blocks)

    def logits_of(self, output: Any) -> Tensor | None:
        """The logits in the output of a module of the path."""
        return _logits(output, self._width)

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._running.add(Running(module, threading.get_ident()))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        running = Running(module, threading.get_ident())
        self._running.discard(running)
        if running not in self._measured:
            return
        self._measured.discard(running)
        logits = self.logits_of(output)
        if logits is not None:
            stack, (first, *others) = self._blocks[-1].stack, logits.shape[:-1]
            if len(others) == 1 and first != others[0] and self._packing.has_decided(stack, others[0], first):
                logits = logits.transpose(0, 1)  # tokens first
            sequences = None if logits.ndim != 3 else self._packing.of_others(stack, *logits.shape[:2])
            self._variation = output_variation(logits, None if sequences is None else sequences.valid_BT)
        elif self._variation is None:
            self._why_missing = self._why_no_logits(module, output)

    def _why_no_logits(self, module: nn.Module, output: Any) -> str:
        if any(x.is_floating_point() and not x.numel() for x in Inputs((output,), {}).tensors):
            return NO_TOKENS
        name = type(module).__name__
        head = (
            "no module of the model is an output head or a token embedding"
            if self._width is None
            else f"the output head or token embedding has {self._width} entries"
        )
        return (
            f"the output of {name} holds no tensor named logits, nor one that is known to be logits by the size of its last "
            f"axis: {head}"
        )


def _logits(output: Any, width: int | None) -> Tensor | None:
    """What is called logits, or else the first floating tensor of two axes or more if its last axis is `width`."""
    values = dict(output) if isinstance(output, Mapping) else {}
    named = values.get("logits", getattr(output, "logits", None))
    if _may_be_logits(named):
        return named
    items = values.values() if values else output if isinstance(output, tuple | list) else (output,)
    first = next((item for item in items if _may_be_logits(item)), None)
    return first if first is not None and first.shape[-1] == width else None


def _may_be_logits(value: Any) -> TypeGuard[Tensor]:
    is_whole = isinstance(value, Tensor) and not hasattr(value, "to_local")
    return is_whole and value.ndim >= 2 and value.is_floating_point() and value.numel() > 0


def _head_width(model: nn.Module, blocks: Sequence[Block]) -> int | None:
    """How many classes the model's output head has. A layer that gives hidden states, such as a pooler, is no head.

    A model without a head may multiply by its token embedding: the largest one as wide as the blocks.
    """
    inside = {module for block in blocks for module in block.module.modules()}
    outside = {name: module for name, module in model.named_modules() if module not in inside}
    heads = [module for name, module in outside.items() if name.rpartition(".")[2] in HEAD_NAMES]
    given = getattr(model, "get_output_embeddings", lambda: None)()
    for head in (given, *heads, model):
        layers = [] if head is None else [m for m in head.modules() if is_linear(m) and m in set(outside.values())]
        if layers and (classes := widths(layers[-1])[1]) != blocks[0].width:
            return classes
    embeddings = [module for module in outside.values() if isinstance(module, nn.Embedding)]
    vocab = max((of.num_embeddings for of in embeddings if of.embedding_dim == blocks[0].width), default=None)
    return None if vocab == blocks[0].width else vocab
