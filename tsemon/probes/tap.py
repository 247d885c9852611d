"""See attention where it happens, whoever calls it, and report its scores and values.

Most models compute attention in three ways: `scaled_dot_product_attention` called by the module, the same called by
`nn.MultiheadAttention` from inside `torch.nn.functional`, and a softmax over materialised scores. A torch function mode,
active only while one attention module runs, sees the first and the third; inside a mode's handler no mode is active, so
for the second the names in `torch.nn.functional` are replaced while that one call lasts. No mode is told of FlexAttention
and of flash attention: there, too, the names by which the module finds them are replaced while it runs.

Axes: B samples, H heads, T queries, S keys, K width of a head.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tsemon.measures.scores import DotProducts, Materialised, Rows, Scores, with_heads
from tsemon.measures.sequences import MAX_BIASES, ROWS, Sequences, seen_by_attention
from tsemon.probes.calls import FUSED, Calls
from tsemon.probes.discovery import NO_ATTENTION, Block, may_take_fast_path, walk
from tsemon.probes.heads import MERGING, Merges
from tsemon.probes.hooks import Hooks
from tsemon.probes.kernels import Kernel, flex_scores, interface_scores, known_kernels
from tsemon.probes.packing import Packing
from tsemon.probes.part import Part, by_reason


class Seen(NamedTuple):
    """Attention as one call shows it, computed on request: inside the guard, where faults are contained."""

    scores: Callable[[], Scores] | None = None
    values: Callable[[], Tensor | None] | None = None
    """Return the factor of the weights, (B, H, S, K), or None."""
    call: int = 0
    """Index of the scores among all that one run of the module computes."""


UNKNOWN_HEADS = "samples and heads are merged into one axis, and nothing shows which of them comes first"


class AttentionPart(Part, ABC):
    """A part that looks at the first attention of each block's self-attention module."""

    SUBJECT: ClassVar[str] = "attention was not seen"
    """Used by `why_missing` for blocks without anything to measure."""
    TAKES_ROWS: ClassVar[bool] = False
    """True if it does not need the order of samples and heads."""

    def __init__(self, blocks: list[Block], depth: int, packing: Packing, calls: Calls) -> None:
        self._packing, self._calls = packing, calls
        super().__init__(blocks, depth)

    def forget(self) -> None:
        super().forget()
        self._seen = set[int]()
        self._run = set[int]()
        """Blocks whose attention module was called."""
        self._reported = set[int]()
        """Blocks in which it called a function that computes attention."""
        self._fused = set[int]()
        self._odd: dict[int, str] = {}
        """By block: why its attention is not measured."""

    def listen(self, hooks: Hooks) -> None:
        """Tap the blocks' attention for the pass that begins."""
        self.forget()
        seen = set[int]()
        places = _places(block.attention for block in self._blocks if block.attention is not None)
        for block in self._calls.to_hook:
            # Of one attention that several blocks share, only the first layer's pass could be told from the others.
            if block.attention is None or id(block.attention) in seen or self._calls.is_compiled(block):
                continue
            seen.add(id(block.attention))
            has_fast_path = any(isinstance(part, nn.MultiheadAttention) for part in walk(block.attention))
            if has_fast_path and may_take_fast_path(block.attention):
                self._fused.add(block.number)
            else:
                hooks.within(block.attention, functools.partial(self.tap, hooks, block, places))

    @abstractmethod
    def look(self, block: Block, seen: Seen) -> bool:
        """Measure what was seen of the block; whether there was something to measure. Runs inside its forward."""

    def sequences(self, block: Block, scores: Scores) -> Sequences:
        """Sequences of the queries. If they have other axes than the hidden states, as in windows, the mask shows them."""
        batch, _, queries, _ = scores.size
        return self._packing.of_others(block.stack, batch, queries) or seen_by_attention(scores) or ROWS

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        missed = [block for block in self._blocks if block.number not in self._seen]
        why = by_reason(self.SUBJECT, missed, len(self._blocks), lambda block: self._why_unseen(block, why_unseen))
        return dict.fromkeys(self.METRICS, why) if why else {}

    def _why_unseen(self, block: Block, why_unseen: str) -> str:
        if block.attention is None:
            return NO_ATTENTION
        if why_unseen:
            return why_unseen
        if block.number not in self._run and (why_not_run := self._calls.why_not_run(block)) is not None:
            return why_not_run
        kind = type(block.attention).__name__
        if block.number in self._fused:
            return FUSED
        if any(block.attention is other.attention for other in self._blocks[: self._blocks.index(block)]):
            return f"several blocks share one {kind}, whose first call is that of the first block"
        if block.number not in self._run:
            return f"the pass did not call {kind} (or ran it by another method than forward)"
        return self._odd.get(block.number) or self.why_not_in(block)

    def why_not_in(self, block: Block) -> str:
        """Why the call of the block's attention module had nothing to measure."""
        return (
            f"{type(block.attention).__name__} called no function that tsemon knows as attention: "
            "scaled_dot_product_attention, flex_attention, flash-attn's functions, varlen_attn, a softmax over the last of "
            "three axes or more, or Hugging Face's attention interface. It may call another kernel, FlexAttention or "
            "flash-attn from a function in another file, or use no softmax"
        )

    def tap(self, hooks: Hooks, block: Block, places: Iterable[Place]) -> AbstractContextManager[None]:
        """What the block's attention runs within."""
        layer = self._calls.current(block)
        if not hooks.are_concerned or layer is None:
            return nullcontext()
        self._run.add(layer.number)
        merges = Merges(self._packing.num_tokens(block), getattr(block.attention, "num_heads", None))
        return tapped(block.attention, functools.partial(self._report, hooks, block), merges, places)

    def _report(self, hooks: Hooks, block: Block, seen: Seen) -> None:
        layer = self._calls.current(block)
        if layer is None or not hooks.are_concerned:
            return
        if seen.scores is not None and seen.call:
            hooks.guard.run(self._look_again, layer)
        elif layer.number not in self._seen and layer.number not in self._odd:
            hooks.guard.run(self._look, layer, seen)

    def _look(self, block: Block, seen: Seen) -> None:
        self._reported.add(block.number)
        if seen.scores is not None:
            scores = seen.scores()
            if 0 in scores.size:
                self._odd[block.number] = "its sequences have no tokens"
                return
            self._packing.meet_attention(block, seen.scores)
            why = self._packing.why_odd(block, scores)
            if why or not (scores.are_heads_known or self.TAKES_ROWS):
                self._odd[block.number] = why or UNKNOWN_HEADS
                return
        if self.look(block, seen):
            self._seen.add(block.number)

    def _look_again(self, block: Block) -> None:
        """One of several calls, such as over parts of the tokens, is not the attention of the block."""
        self._packing.meet_again(block)
        self._odd[block.number] = f"{type(block.attention).__name__} computes attention in several calls"
        self.drop(block)

    def drop(self, block: Block) -> None:
        """Forget the values of the block."""
        self._seen.discard(block.number)
        self._of_layers.pop(block.number, None)
        self.own.drop(block)


class AttentionTap(TorchFunctionMode):
    """Passes every torch call in one attention module through unchanged, and reports attention to all who listen."""

    def __init__(self, attention: nn.Module | None, merges: Merges) -> None:
        super().__init__()
        self.attention = attention
        self.listeners: list[Callable[[Seen], None]] = []
        self._merges = merges
        self._merged: Rows | None = None
        """How samples and heads are merged in the newest scores that were read."""
        self._num_scores = 0
        self.is_inside = False
        """Whether a reported function is running. Its inner calls are the same attention."""
        self._weights: torch.Size | None = None
        """Shape of the weights that the last softmax made."""
        self._products: set[tuple[int, int]] = set()
        """Number and length of the rows in each product of two tensors."""

    def __exit__(self, *error: Any) -> None:
        # An interrupt may hit torch in the middle of a change of modes. That it was one is what the user must see.
        with suppress(RuntimeError):
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            self._merges.are_of_multihead = True
            with _listen(self, INSIDE_MULTIHEAD_ATTENTION):
                return func(*args, **kwargs)
        self.see(func, args, kwargs)
        result = func(*args, **kwargs)
        if func in MERGING:
            self._merges.see(args[0] if args else next(iter(kwargs.values()), None), result)
        elif func in PRODUCTS and isinstance(result, Tensor) and result.ndim > 1:
            self._products.add((result.numel() // max(result.shape[-1], 1), result.shape[-1]))
        return result

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report the call if it is attention."""
        if self.is_inside:
            return
        if func is _attention:
            self._report_call(functools.partial(_dot_products, self._merges), args, kwargs)
        elif func is FLEX:
            self._report_call(flex_scores, args, kwargs)
        elif isinstance(func, Kernel) and func.is_read(*args, **kwargs):
            scores, values = (
                functools.partial(func.scores, *args, **kwargs),
                functools.partial(func.values, *args, **kwargs),
            )
            self._report(Seen(scores, values))
        elif func is HUGGING_FACE:
            self._report_call(interface_scores, args[1:], {"module": args[0], **kwargs} if args else kwargs)
        elif func in SOFTMAX:
            self._see_softmax(*args, **kwargs)
        elif self._weights is not None and func in PRODUCTS:
            self._report(Seen(values=functools.partial(self._factor, func, args, kwargs)))

    def _report(self, seen: Seen) -> None:
        for tell in self.listeners:
            tell(seen._replace(call=self._num_scores))
        self._num_scores += seen.scores is not None

    def _report_call(self, scores: Callable[..., Scores], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = functools.partial(_values_of_call, self._merges, *args, **kwargs)
        self._report(Seen(functools.partial(scores, *args, **kwargs), values))

    def _see_softmax(self, input: Any = None, dim: Any = None, *_: Any, **__: Any) -> None:
        is_over_last = isinstance(input, Tensor) and input.ndim >= 3 and dim in (-1, input.ndim - 1)
        if is_over_last and self._is_over_keys(input.shape):
            self._weights = input.shape
            self._report(Seen(functools.partial(self._materialised, input)))

    def _is_over_keys(self, shape: torch.Size) -> bool:
        """True if a softmax over the last axis is attention. Linear attention and gates have one over features or experts.

        There are as many keys as queries, perhaps with biases; for other numbers, a product must have made the scores.
        """
        keys, rows = shape[-1], shape.numel() // max(shape[-1], 1)
        if self._merges.are_of_multihead or 0 <= keys - shape[-2] <= MAX_BIASES:
            return True
        return any((rows, keys - biases) in self._products for biases in range(MAX_BIASES + 1))

    def _materialised(self, scores: Tensor) -> Scores:
        self._merged = self._merges.of(scores)
        return Materialised(scores, self._merged)

    def _factor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """What the product multiplies with weights such as the softmax made; None where it is another product."""
        left, right = (_factors_of_einsum if func is torch.einsum else _factors)(*args, **kwargs)
        if left is None or right is None or left.shape != self._weights:
            return None
        if right.ndim != left.ndim or (right.shape[0], right.shape[-2]) != (left.shape[0], left.shape[-1]):
            return None
        if any(size not in (1, heads) for size, heads in zip(right.shape[1:-2], left.shape[1:-2], strict=True)):
            return None
        return with_heads(right.detach(), self._merged)


_attention, _softmax, _bmm = F.scaled_dot_product_attention, F.softmax, torch.bmm
SOFTMAX = {torch.softmax, _softmax, Tensor.softmax}
PRODUCTS = {
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    _bmm,
    Tensor.bmm,
    torch.einsum,
    torch.baddbmm,
    Tensor.baddbmm,
}
"""What multiplies the weights with the values. Dropout between the two makes a new tensor of the same shape."""


def _dot_products(
    merges: Merges,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Scores:
    return DotProducts(query, key, attn_mask, is_causal, scale, merges.of(query))


def _values_of_call(merges: Merges, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return with_heads(value.detach(), merges.of(query))


def _factors(left: Any = None, right: Any = None, **kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
    left, right = kwargs.get("input", left), kwargs.get("mat2", kwargs.get("other", right))
    return (left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else (None, None)


def _factors_of_einsum(equation: Any = None, *operands: Any, **_: Any) -> tuple[Tensor | None, Tensor | None]:
    """Of "bhts,bshk->bthk" for one: the right factor with its axes in the order of the left's, its width last.

    Axes that it lacks have length 1.
    """
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation:
        return None, None
    left, right = (equation.replace(" ", "").partition("->")[0] + ",").split(",")[:2]
    shared = left[:-2] + left[-1:]
    width = [axis for axis in right if axis not in shared]
    if len(width) != 1 or left[-1] not in right or len({*right}) < len(right):
        return None, None
    axes = (*shared, *width)
    factor = operands[1].permute([right.index(axis) for axis in axes if axis in right])
    return operands[0], factor[tuple(slice(None) if axis in right else None for axis in axes)]


HUGGING_FACE, FLEX = "attention interface", "flex_attention"
"""As what the tap knows functions that no mode is told of."""
SEEN_ANYWAY = (None, "eager", "sdpa")
"""Functions of the attention interface that call PyTorch's own."""


class Place(NamedTuple):
    """A name that is looked up while attention runs."""

    namespace: dict[str, Any]
    name: str
    told: Callable[[Any], Any]
    """What stands there meanwhile, and tells the taps of a call, given what stood there before."""


def _told(known_as: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        taps = [] if torch.compiler.is_compiling() else [*dict.fromkeys(getattr(_listening, "taps", ()))]
        for tap in taps:
            tap.see(known_as, args, kwargs)
        outermost = [tap for tap in taps if not tap.is_inside]
        for tap in outermost:
            tap.is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            for tap in outermost:
                tap.is_inside = False

    return told


@functools.lru_cache(maxsize=64)  # compiled code that looks it up must find the same function each time
def _told_of(known_as: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    return _told(known_as, function)


def _told_interface(interface: Any) -> Callable[..., Any]:
    def told(name: Any, *args: Any, **kwargs: Any) -> Any:
        found = type(interface).get_interface(interface, name, *args, **kwargs)
        return found if name in SEEN_ANYWAY else _told(HUGGING_FACE, found)

    return told


INSIDE_MULTIHEAD_ATTENTION = [
    Place(vars(F), "scaled_dot_product_attention", functools.partial(_told, _attention)),
    Place(vars(F), "softmax", functools.partial(_told, _softmax)),
    Place(vars(torch), "bmm", functools.partial(_told, _bmm)),
]


def _places(attentions: Iterable[nn.Module]) -> list[Place]:
    """Where these may look up a kernel that no mode is told of. What has not been imported is not looked up."""
    places = []
    hugging_face = sys.modules.get("transformers.modeling_utils")
    if hasattr(interface := getattr(hugging_face, "ALL_ATTENTION_FUNCTIONS", None), "get_interface"):
        places.append(Place(vars(interface), "get_interface", lambda _: _told_interface(interface)))
    known: dict[int, Any] = {id(kernel.function): kernel for kernel in known_kernels()}
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None:
        known[id(flex.flex_attention)] = FLEX
    if not known:
        return places
    kinds = {type(part) for module in attentions for part in walk(module)}
    forwards = (inspect.unwrap(kind.forward) for kind in kinds)
    namespaces = [
        *([] if flex is None else [vars(flex)]),
        *(getattr(forward, "__globals__", {}) for forward in forwards),
    ]
    for namespace in {id(names): names for names in namespaces}.values():
        for name, value in list(namespace.items()):
            known_as = known.get(id(value), known.get(id(getattr(value, "_torchdynamo_orig_callable", None))))
            if known_as is not None:
                places.append(Place(namespace, name, functools.partial(_told_of, known_as)))
    return places


_listening = threading.local()
_replacing = threading.Lock()
_originals: dict[tuple[int, str], list[Any]] = {}
"""Of each place what stood there, once for every tap that listens there now."""


@contextmanager
def _listen(tap: AttentionTap, places: Iterable[Place]) -> Iterator[None]:
    """Let `tap` see what is called by these names on this thread.

    All threads share the names, so they are replaced by the first that listens and put back by the last.
    """
    taps = _listening.__dict__.setdefault("taps", [])
    with _replacing:
        for namespace, name, told in places:
            originals = _originals.setdefault((id(namespace), name), [])
            if not originals:
                namespace[name], original = told(namespace.get(name)), namespace.get(name, ABSENT)
            originals.append(originals[0] if originals else original)
    taps.append(tap)
    try:
        yield
    finally:
        taps.remove(tap)
        with _replacing:
            for namespace, name, _ in places:
                _put_back(namespace, name)


def _put_back(namespace: dict[str, Any], name: str) -> None:
    original = _originals[id(namespace), name].pop()
    if not _originals[id(namespace), name]:
        del _originals[id(namespace), name]
        if original is ABSENT:
            del namespace[name]
        else:
            namespace[name] = original


ABSENT = object()


@contextmanager
def tapped(
    attention: nn.Module | None, report: Callable[[Seen], None], merges: Merges, places: Iterable[Place]
) -> Iterator[None]:
    """Report the attention that is computed within, while this module runs.

    All listeners of one module share one mode: each mode sees every torch call, and code that is compiled inside the module
    would be compiled again for another number of modes.
    """
    taps = _listening.__dict__.setdefault("taps", [])
    if taps and taps[-1].attention is attention:
        listeners = taps[-1].listeners
        listeners.append(report)
        try:
            yield
        finally:
            listeners.remove(report)
        return
    tap = AttentionTap(attention, merges)
    tap.listeners.append(report)
    with _listen(tap, places), tap:
        yield
