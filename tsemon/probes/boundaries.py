"""Listen at the boundaries of a block, also of one that is a container whose parts are called one by one.

Between such blocks no module returns the hidden state: it is the input of the first part of the next block, and behind the
last block the input of the next norm. The input of another layer, or the output of the module around the stack, may have
been changed in between (by a norm that is a function), so it counts only if autograd shows that it is a sum, or if a part of
the block returned it.

Blocks that pass a residual beside their branch (mamba-ssm, flash-attn) have the sum of the two as hidden state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tsemon.probes.discovery import Block
from tsemon.probes.hooks import Hooks
from tsemon.probes.naming import is_norm
from tsemon.probes.stacks import Parts
from tsemon.probes.states import Seen, hidden_state

Hook = Callable[..., None]


def before_block(hooks: Hooks, block: Block, hook: Hook) -> None:
    """Call hook(module, args, kwargs) with the input of the block."""
    if block.parts is not None:
        _before_first(hooks, block.parts.called, hook)
    elif _passes_residual(block.module):
        hooks.before(block.module, lambda module, args, kwargs: hook(module, (_summed((*args, *kwargs.values())),), {}))
    else:
        hooks.before(block.module, hook)


def after_block(hooks: Hooks, block: Block, hook: Hook) -> None:
    """Call hook(module, args, kwargs, output) with the output of the block."""
    if block.parts is not None and block.parts.followers:
        _before_first(hooks, block.parts.followers, lambda module, *given: hook(module, *given, given))
    elif block.parts is not None:
        _Last(block.parts, block.width, hook).listen(hooks)
    elif _passes_residual(block.module):
        hooks.after(block.module, lambda module, *given: hook(module, *given[:-1], _summed(given[-1])))
    else:
        hooks.after(block.module, hook)


def why_no_end(blocks: Sequence[Block], seen: Container[int]) -> str | None:
    """Why the output of a stack's last block is missing although its input was seen; None if it is not missing."""
    for block in blocks:
        is_end = block.parts is not None and not block.parts.followers
        if is_end and block.entry - 1 in seen and block.entry not in seen:
            return (
                f"the output of the last block is unknown: {block.name} is a container that is never called, and behind it "
                "no norm gets the hidden state, nor does autograd show that it was only added up"
            )
    return None


def _before_first(hooks: Hooks, parts: Sequence[nn.Module], hook: Hook) -> None:
    """Call the hook once, before the part that is called first."""
    has_begun = False

    def begin(module: nn.Module, *given: Any) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            hook(module, *given)

    for part in parts:
        if any(True for _ in part.parameters()):  # not dropout and the like
            hooks.before(part, begin)


class _Last:
    """The end of the last block, known only when something else is called or returns."""

    def __init__(self, parts: Parts, width: int | None, hook: Hook) -> None:
        self._parts, self._width, self._hook = parts, width, hook
        self._shape: torch.Size | None = None
        self._to_run = {part for part in parts.called if any(p.ndim > 1 for p in part.parameters())}
        self._returned: Seen | None = None
        self._is_done = False

    def listen(self, hooks: Hooks) -> None:
        _before_first(hooks, self._parts.called, self._begin)
        for part in self._parts.called:
            hooks.after(part, self._leave)
        for layer in self._parts.outside:
            if is_norm(layer) or any(p.ndim > 1 for p in layer.parameters()):
                hooks.before(layer, self._meet)
        # The owner may be the gate, whose own hook ends the pass.
        hooks.after(self._parts.owner, self._return, first=True)

    def _begin(self, module: nn.Module, *given: Any) -> None:
        x = hidden_state(given, self._width)
        self._shape = None if x is None else x.shape

    def _leave(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._to_run.discard(part)
        if (x := hidden_state(output, self._width)) is not None:
            self._returned = Seen(x)

    def _meet(self, layer: nn.Module, *given: Any) -> None:
        self._end(layer, given, given, is_certain=is_norm(layer))

    def _return(self, owner: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._end(owner, (args, kwargs), output, is_certain=False)

    def _end(self, module: nn.Module, given: Any, value: Any, *, is_certain: bool) -> None:
        if self._to_run or self._is_done:
            return
        self._is_done = True  # what comes later is something else
        x = hidden_state(value, self._width)
        if x is not None and x.shape == self._shape and (is_certain or self._is_state(x)):
            self._hook(module, *given, value)

    def _is_state(self, x: Tensor) -> bool:
        is_sum = x.grad_fn is not None and x.grad_fn.name().startswith("AddBackward")
        return is_sum or (self._returned is not None and self._returned.is_still(x))


def _passes_residual(module: nn.Module) -> bool:
    while len(children := list(module.children())) == 1:  # a wrapper, for checkpointing for one
        module = children[0]
    try:
        return "residual" in inspect.signature(type(module).forward).parameters
    except (TypeError, ValueError):  # a forward that is not written in Python
        return False


def _summed(value: Any) -> Any:
    """The sum of the first two states, or the value itself if there are not two."""
    states = [x for x in value if isinstance(x, Tensor)] if isinstance(value, tuple | list) else []
    is_pair = len(states) > 1 and states[0].shape == states[1].shape and hidden_state(states[0], None) is not None
    return states[0].detach() + states[1].detach() if is_pair else value
