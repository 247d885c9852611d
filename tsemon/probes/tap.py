"""See attention where it happens, whoever calls it, and report its scores and values.

Models compute attention in three ways: `scaled_dot_product_attention` called by the module, the same called by
`nn.MultiheadAttention` from inside `torch.nn.functional`, and a softmax over materialised scores. A torch function mode,
active only while one attention module runs, sees the first and the third; inside a mode's handler no mode is active, so
for the second the names in `torch.nn.functional` are replaced while that one call lasts.

Axes: B samples, H heads, T queries, S keys, K width of a head.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tsemon.probes.discovery import Block, is_compiled, may_take_fast_path
from tsemon.probes.hooks import Hooks
from tsemon.probes.padding import Padding
from tsemon.probes.part import Part
from tsemon.probes.scores import DotProducts, Materialised, Scores, with_heads


class Seen(NamedTuple):
    """What one call shows of attention, made only when asked for: inside the guard, where faults are contained."""

    scores: Callable[[], Scores] | None = None
    values: Callable[[], Tensor] | None = None
    """What the weights are multiplied with, (B, H, S, K)."""


class AttentionPart(Part):
    """A part that looks at the first attention of each block's self-attention module."""

    def __init__(self, blocks: list[Block], depth: int, padding: Padding) -> None:
        self._blocks = blocks
        self._depth = depth
        self._padding = padding
        self._seen: set[int] = set()

    def forget(self) -> None:
        self._seen = set()

    def listen(self, hooks: Hooks) -> None:
        """Tap the blocks' attention for the pass that begins."""
        self.forget()
        tapped = set[int]()
        for block in self._blocks:
            # Of one attention that several blocks share, only the first layer's pass could be told from the others.
            if block.attention is None or id(block.attention) in tapped or is_compiled(block.module):
                continue
            tapped.add(id(block.attention))
            has_fast_path = any(isinstance(part, nn.MultiheadAttention) for part in block.attention.modules())
            if not (has_fast_path and may_take_fast_path(block.attention)):
                report = functools.partial(self._report, hooks, block)
                num_heads = getattr(block.attention, "num_heads", None)
                hooks.within(block.attention, functools.partial(AttentionTap, report, num_heads))

    def look(self, block: Block, seen: Seen) -> bool:
        """Measure what was seen of the block; whether there was something to measure. Runs inside its forward."""
        raise NotImplementedError

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if without := [block.name for block in self._blocks if block.attention is None]:
            return dict.fromkeys(self.METRICS, f"found no self-attention in {', '.join(without)}")
        if missed := len(self._blocks) - len(self._seen):
            return dict.fromkeys(
                self.METRICS,
                f"attention was not seen in {missed} of {len(self._blocks)} blocks: {why_unseen}, or the block computed it "
                "without scaled_dot_product_attention or softmax",
            )
        return {}

    def _report(self, hooks: Hooks, block: Block, seen: Seen) -> None:
        if block.number not in self._seen:
            hooks.guard.run(self._look, block, seen)

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
            with _tapped_names(self):
                return func(*args, **kwargs)
        self.see(func, args, kwargs)
        return func(*args, **kwargs)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report the call if it is attention."""
        if func is _attention:
            self._report(
                Seen(
                    functools.partial(_dot_products, *args, **kwargs),
                    functools.partial(_values_of_call, *args, **kwargs),
                )
            )
        elif func in SOFTMAX:
            scores = kwargs["input"] if "input" in kwargs else args[0] if args else None
            dim = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
            if isinstance(scores, Tensor) and scores.ndim >= 3 and dim in (-1, scores.ndim - 1):
                self._weights = scores.shape
                self._report(Seen(functools.partial(Materialised, scores, self._num_heads)))
        elif self._weights is not None and func in PRODUCTS:
            values = _values_of_einsum(*args) if func is torch.einsum else _values_of_product(*args, **kwargs)
            if values is not None and _fit(self._weights, values):
                self._weights = None
                self._report(Seen(values=functools.partial(with_heads, values[1], self._num_heads)))


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


Pair = tuple[torch.Size, Tensor]
"""The shape of what is on the left of a product, and the right side with axes as `matmul` has them."""


def _values_of_product(left: Any = None, right: Any = None, **kwargs: Any) -> Pair | None:
    left = kwargs.get("input", left)
    right = kwargs.get("mat2", kwargs.get("other", right))
    return (left.shape, right.detach()) if isinstance(left, Tensor) and isinstance(right, Tensor) else None


def _values_of_einsum(equation: Any, *operands: Any) -> Pair | None:
    """Of "bhts,bshk->bthk" for one: the right side with its axes put in the order of the left, the width last."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not (isinstance(equation, str) and len(operands) == 2 and all(isinstance(x, Tensor) for x in operands)):
        return None
    left, comma, right = equation.replace(" ", "").partition("->")[0].partition(",")
    weights, values = operands
    shared = left[:-2] + left[-1:]
    width = [axis for axis in right if axis not in shared]
    if not comma or "." in equation or len(width) != 1 or set(shared) - set(right) or len(set(right)) != len(right):
        return None
    return weights.shape, values.detach().permute([right.index(axis) for axis in (*shared, *width)])


def _fit(weights: torch.Size, pair: Pair) -> bool:
    left, values = pair
    return left == weights and values.ndim == len(left) and values.shape[:-1] == (*left[:-2], left[-1])


_listening = threading.local()
_replacing = threading.Lock()
_originals: list[tuple[Any, ...]] = []
"""What stood under the names, one entry per call of `multi_head_attention_forward` that is under way."""
NAMES = ((F, "scaled_dot_product_attention", _attention), (F, "softmax", _softmax), (torch, "bmm", _bmm))
"""What `multi_head_attention_forward` looks up, and as what the tap knows it."""


@contextmanager
def _tapped_names(tap: AttentionTap) -> Iterator[None]:
    """Let `tap` see what `multi_head_attention_forward` calls on this thread.

    All threads share the names, so they are replaced by the first that listens and put back by the last.
    """
    taps = _listening.__dict__.setdefault("taps", [])
    with _replacing:
        _originals.append(tuple(getattr(owner, name) for owner, name, _ in NAMES))
        if len(_originals) == 1:
            for (owner, name, known_as), original in zip(NAMES, _originals[0], strict=True):
                setattr(owner, name, _told(original, known_as))
    taps.append(tap)
    try:
        yield
    finally:
        taps.remove(tap)
        with _replacing:
            if len(_originals) == 1:
                for (owner, name, _), original in zip(NAMES, _originals[0], strict=True):
                    setattr(owner, name, original)
            _originals.pop()


def _told(function: Callable[..., Any], known_as: Any) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        for tap in getattr(_listening, "taps", ()):
            tap.see(known_as, args, kwargs)
        return function(*args, **kwargs)

    return told
