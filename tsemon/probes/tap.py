"""See attention where it happens, whoever calls it, and report its scores and values.

Most models compute attention in three ways: `scaled_dot_product_attention` called by the module, the same called by
`nn.MultiheadAttention` from inside `torch.nn.functional`, and a softmax over materialised scores. A torch function mode,
active only while one attention module runs, sees the first and the third; inside a mode's handler no mode is active, so
for the second the names in `torch.nn.functional` are replaced while that one call lasts. No mode is told of FlexAttention
and of Hugging Face's flash attention: there, too, the names by which the module finds them are replaced while it runs.

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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tsemon.measures.scores import DotProducts, Materialised, Scores, with_heads
from tsemon.probes.calls import Calls
from tsemon.probes.discovery import Block, is_compiled, may_take_fast_path
from tsemon.probes.hooks import Hooks
from tsemon.probes.kernels import flex_scores, interface_scores
from tsemon.probes.padding import Padding
from tsemon.probes.part import Part


class Seen(NamedTuple):
    """What one call shows of attention, made only when asked for: inside the guard, where faults are contained."""

    scores: Callable[[], Scores] | None = None
    values: Callable[[], Tensor | None] | None = None
    """What the weights are multiplied with, (B, H, S, K); it may turn out to be none."""


class AttentionPart(Part, ABC):
    """A part that looks at the first attention of each block's self-attention module."""

    def __init__(self, blocks: list[Block], depth: int, padding: Padding, calls: Calls) -> None:
        self._padding, self._calls = padding, calls
        super().__init__(blocks, depth)

    def forget(self) -> None:
        super().forget()
        self._seen = set[int]()

    def listen(self, hooks: Hooks) -> None:
        """Tap the blocks' attention for the pass that begins."""
        self.forget()
        seen = set[int]()
        places = _places(block.attention for block in self._blocks if block.attention is not None)
        for block in self._calls.to_hook:
            # Of one attention that several blocks share, only the first layer's pass could be told from the others.
            if block.attention is None or id(block.attention) in seen or is_compiled(block.module):
                continue
            seen.add(id(block.attention))
            has_fast_path = any(isinstance(part, nn.MultiheadAttention) for part in block.attention.modules())
            if not (has_fast_path and may_take_fast_path(block.attention)):
                report = functools.partial(self._report, hooks, block)
                num_heads = getattr(block.attention, "num_heads", None)
                hooks.within(block.attention, functools.partial(_tapped_by, hooks, report, num_heads, places))

    @abstractmethod
    def look(self, block: Block, seen: Seen) -> bool:
        """Measure what was seen of the block; whether there was something to measure. Runs inside its forward."""

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if without := [block.name for block in self._blocks if block.attention is None]:
            return dict.fromkeys(self.METRICS, f"found no self-attention in {', '.join(without)}")
        if missed := len(self._blocks) - len(self._seen):
            return dict.fromkeys(
                self.METRICS,
                f"attention was not seen in {missed} of {len(self._blocks)} blocks: {why_unseen}, or the block computed it "
                "with a kernel that PyTorch is not told of (flash-attn's own functions, a FlexAttention or another kernel "
                "compiled elsewhere) and not with scaled_dot_product_attention, softmax or flex_attention",
            )
        return {}

    def _report(self, hooks: Hooks, block: Block, seen: Seen) -> None:
        layer = self._calls.current(block)
        if layer is not None and layer.number not in self._seen and hooks.are_concerned:
            hooks.guard.run(self._look, layer, seen)

    def _look(self, block: Block, seen: Seen) -> None:
        if self.look(block, seen):
            self._seen.add(block.number)


class AttentionTap(TorchFunctionMode):
    """Passes every torch call through unchanged, and reports those that are attention."""

    def __init__(self, report: Callable[[Seen], None], num_heads: int | None) -> None:
        super().__init__()
        self._report = report
        self._num_heads = num_heads
        self._weights: torch.Size | None = None
        """Shape of the weights that the last softmax made."""

    def __exit__(self, *error: Any) -> None:
        # An interrupt may hit torch in the middle of a change of modes. That it was one is what the user must see.
        with suppress(RuntimeError):
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with _listen(self, INSIDE_MULTIHEAD_ATTENTION):
                return func(*args, **kwargs)
        self.see(func, args, kwargs)
        return func(*args, **kwargs)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report the call if it is attention."""
        if func is _attention:
            self._report_call(_dot_products, args, kwargs)
        elif func is FLEX:
            self._report_call(flex_scores, args, kwargs)
        elif func is HUGGING_FACE:
            self._report_call(interface_scores, args[1:], {"module": args[0], **kwargs} if args else kwargs)
        elif func in SOFTMAX:
            self._see_softmax(*args, **kwargs)
        elif self._weights is not None and func in PRODUCTS:
            self._report(Seen(values=functools.partial(self._factor, func, args, kwargs)))

    def _report_call(self, scores: Callable[..., Scores], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = functools.partial(_values_of_call, *args, **kwargs)
        self._report(Seen(functools.partial(scores, *args, **kwargs), values))

    def _see_softmax(self, input: Any = None, dim: Any = None, *_: Any, **__: Any) -> None:
        if isinstance(input, Tensor) and input.ndim >= 3 and dim in (-1, input.ndim - 1):
            self._weights = input.shape
            self._report(Seen(functools.partial(Materialised, input, self._num_heads)))

    def _factor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """What the product multiplies with weights such as the softmax made; None where it is another product."""
        left, right = (_factors_of_einsum if func is torch.einsum else _factors)(*args, **kwargs)
        if left is None or right is None or left.shape != self._weights:
            return None
        if right.ndim != left.ndim or right.shape[:-1] != (*left.shape[:-2], left.shape[-1]):
            return None
        return with_heads(right.detach(), self._num_heads)


_attention, _softmax, _bmm = F.scaled_dot_product_attention, F.softmax, torch.bmm
SOFTMAX = {torch.softmax, _softmax, Tensor.softmax}
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, _bmm, Tensor.bmm, torch.einsum}
"""What multiplies the weights with the values. Dropout between the two makes a new tensor of the same shape."""


def _dot_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Scores:
    return DotProducts(query, key, attn_mask, is_causal, scale)


def _values_of_call(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return value.detach() if value.ndim > 3 else value.detach().unsqueeze(1)


def _factors(left: Any = None, right: Any = None, **kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
    left, right = kwargs.get("input", left), kwargs.get("mat2", kwargs.get("other", right))
    return (left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else (None, None)


def _factors_of_einsum(equation: Any = None, *operands: Any, **_: Any) -> tuple[Tensor | None, Tensor | None]:
    """Of "bhts,bshk->bthk" for one: the right factor with its axes in the order of the left's, its width last."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation:
        return None, None
    left, right = (equation.replace(" ", "").partition("->")[0] + ",").split(",")[:2]
    shared = left[:-2] + left[-1:]
    width = [axis for axis in right if axis not in shared]
    if len(width) != 1 or sorted(right) != sorted([*shared, *width]):
        return None, None
    return operands[0], operands[1].permute([right.index(axis) for axis in (*shared, *width)])


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
        if not torch.compiler.is_compiling():
            for tap in dict.fromkeys(getattr(_listening, "taps", ())):
                tap.see(known_as, args, kwargs)
        return function(*args, **kwargs)

    return told


@functools.lru_cache(maxsize=64)  # compiled code that looks it up must find the same function each time
def _told_flex(function: Callable[..., Any]) -> Callable[..., Any]:
    return _told(FLEX, function)


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
    if (flex := sys.modules.get("torch.nn.attention.flex_attention")) is not None:
        forwards = (inspect.unwrap(type(part).forward) for module in attentions for part in module.modules())
        namespaces = [vars(flex), *(getattr(forward, "__globals__", {}) for forward in forwards)]
        for namespace in {id(names): names for names in namespaces}.values():
            for name, value in list(namespace.items()):
                if any(
                    each is flex.flex_attention for each in (value, getattr(value, "_torchdynamo_orig_callable", None))
                ):
                    places.append(Place(namespace, name, _told_flex))
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


def _tapped_by(
    hooks: Hooks, report: Callable[[Seen], None], num_heads: int | None, places: Iterable[Place]
) -> AbstractContextManager[None]:
    return tapped(report, num_heads, places) if hooks.are_concerned else nullcontext()


@contextmanager
def tapped(report: Callable[[Seen], None], num_heads: int | None, places: Iterable[Place]) -> Iterator[None]:
    """Report the attention that is computed within."""
    tap = AttentionTap(report, num_heads)
    with _listen(tap, places), tap:
        yield
