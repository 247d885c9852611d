"""Listen to what attention and its residual do to the tokens: the block's input X, and Y = X + SA(X).

Y is no module's output. It is what the next norm gets, before the feed-forward part in pre-norm blocks, after attention
in post-norm blocks: the first tensor that a norm gets once attention has run, and that no module made. Blocks that
normalise what attention returned (Gemma 2, OLMo 2) may hand Y to a linear layer first. Where the norm is inside the
module that attends (ALBERT), attention has run when a linear layer in there gets what no module made: the output layer.

There is no Y where the feed-forward part runs beside attention (GPT-J) or before it, where attention adds the residual
by itself and returns the sum (BLOOM), or where no norm gets the sum. It would be wrong only in blocks that reshape what
attention returned before they normalise it alone (Swin V2).

Axes: B samples, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tsemon.measures.escalation import rate_of
from tsemon.measures.sums import counted
from tsemon.probes.calls import Calls
from tsemon.probes.discovery import Block, hides_from_hooks, innermost_attention, is_compiled, is_linear
from tsemon.probes.hooks import Hooks
from tsemon.probes.part import Part
from tsemon.probes.states import HiddenStates, Seen, hidden_state


class EscalationProbe(Part):
    """t_div(X) / t_div(Y) of every block in one forward pass."""

    METRICS = ("escalation_rate",)

    def __init__(self, blocks: list[Block], depth: int, states: HiddenStates, calls: Calls) -> None:
        self._states, self._calls = states, calls
        super().__init__(blocks, depth)

    def forget(self) -> None:
        super().forget()
        self._hooked = set[nn.Module]()
        self._layer: _Layer | None = None
        self._seen = set[int]()
        """Blocks that ran, whether or not Y was found in them."""

    def listen(self, hooks: Hooks) -> None:
        self.forget()
        for block in self._calls.to_hook:
            if block.attention is None or hides_from_hooks(block) or is_compiled(block.module):
                continue
            self._hooked.add(block.module)
            attention = innermost_attention(block.attention)
            hooks.after(attention, self._leave_attention)
            inside = set(attention.modules())
            hides = not any(map(_is_norm, inside))  # what is inside need not be watched
            for module in block.module.modules():
                is_leaf = is_linear(module) or not any(module.children())  # a parametrization is a child
                if not is_leaf or (hides and module in inside):
                    continue
                if is_linear(module) and module in inside:
                    hooks.before(module, self._meet_inside)
                elif is_linear(module) or _is_norm(module):
                    hooks.before(module, self._meet)
                hooks.after(module, self._remember)

    def enter(self, block: Block, args: Any, kwargs: Any) -> None:
        self._layer = None
        x = hidden_state((args, kwargs))
        if x is not None and block.module in self._hooked and block.number not in self._seen:
            self._seen.add(block.number)
            self._layer = _Layer(block, x, self._states)

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if missed := len(self._blocks) - len(self._seen):
            reason = f"{missed} of {len(self._blocks)} blocks were not seen: {why_unseen}"
        elif missed := len(self._blocks) - len(self._of_layers):
            reason = (
                f"in {missed} of {len(self._blocks)} blocks no norm gets the sum of the block's input and its attention "
                "(the feed-forward part runs beside attention or before it, or attention returns the sum itself)"
            )
        else:
            return {}
        return dict.fromkeys(self.METRICS, reason)

    def _leave_attention(self, attention: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._layer is not None:
            self._layer.has_attended = True
            self._layer.remember(hidden_state(output))

    def _remember(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._layer is not None and isinstance(output, Tensor):
            self._layer.remember(output)

    def _meet_inside(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        value = next(iter((*args, *kwargs.values())), None)
        if self._layer is not None and isinstance(value, Tensor):
            self._layer.has_attended |= self._layer.is_new(value)

    def _meet(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        value = next(iter((*args, *kwargs.values())), None)
        if self._layer is None or not isinstance(value, Tensor):
            return
        if self._layer.is_feed_forward(module, value):
            self._layer = None
        elif self._layer.is_sum(module, value):
            layer, self._layer = self._layer, None
            y = self._states.statistics(layer.block, value)
            if layer.has_tokens_first == self._states.has_tokens_first(layer.block):
                self._of_layers[layer.block.number] = counted("escalation_rate", rate_of(layer.x, y))


class _Layer:
    """The block that runs, until its Y is found."""

    def __init__(self, block: Block, x: Tensor, states: HiddenStates) -> None:
        self.block = block
        self.x = states.statistics(block, x)
        self.has_tokens_first = states.has_tokens_first(block)
        self.has_attended = False
        self._shape = x.shape
        self._is_normalised = False
        """Whether what attention returned met a norm before it met the residual."""
        self._input = Seen(x)
        self._made = list[Seen]()
        """What modules returned."""

    def remember(self, x: Tensor | None) -> None:
        if x is not None and x.shape == self._shape:
            self._made.append(Seen(x))

    def is_feed_forward(self, module: nn.Module, value: Tensor) -> bool:
        """Whether the module brings something wider back to D."""
        return is_linear(module) and value.shape[:-1] == self._shape[:-1] and value.shape[-1] > self._shape[-1]

    def is_new(self, value: Tensor) -> bool:
        """Whether a hidden state was computed in this block, outside of its modules."""
        return value.shape == self._shape and not any(seen.is_still(value) for seen in (self._input, *self._made))

    def is_sum(self, module: nn.Module, value: Tensor) -> bool:
        """Whether the module, a norm or a linear layer, gets Y."""
        if not self.has_attended:
            return False
        if self.is_new(value):
            return _is_norm(module) or self._is_normalised
        self._is_normalised |= _is_norm(module) and not self._input.is_still(value)
        return False


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
