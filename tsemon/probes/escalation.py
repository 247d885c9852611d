"""Listen to what attention and its residual do to the tokens: the block's input X, and Y = X + SA(X).

Y is no module's output. It is what the next norm gets, before the feed-forward part in pre-norm blocks, after attention
in post-norm blocks: the first tensor that a norm gets once attention has returned, and that neither attention nor a
module after it made. Blocks that normalise what attention returned (Gemma 2, OLMo 2) may hand Y to a linear layer
first. There is no Y where the feed-forward part runs beside attention (GPT-J) or before it, where attention adds the
residual by itself (BLOOM, XLNet), or where the sum stays in a stream without a norm. It would be wrong only in blocks
that reshape what attention returned before they normalise it alone (Swin V2).

Axes: B samples, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tsemon.measures.linear import ratio
from tsemon.probes.calls import Calls
from tsemon.probes.discovery import Block, hides_from_hooks, innermost_attention, is_compiled, is_linear
from tsemon.probes.hooks import Hooks
from tsemon.probes.part import Part, Partial, Reading, counted, mean, stacked
from tsemon.probes.states import HiddenStates, Seen, hidden_state


class EscalationProbe(Part):
    """t_div(X) / t_div(Y) of every block in one forward pass."""

    METRICS = ("escalation_rate",)

    def __init__(self, blocks: list[Block], depth: int, states: HiddenStates, calls: Calls) -> None:
        self._blocks = blocks
        self._depth = depth
        self._states = states
        self._calls = calls
        self._layer: _Layer | None = None
        self._sums: dict[int, dict[str, Tensor]] = {}

    def forget(self) -> None:
        self._layer, self._sums = None, {}

    def listen(self, hooks: Hooks) -> None:
        self.forget()
        for block in self._calls.to_hook:
            if block.attention is None or hides_from_hooks(block) or is_compiled(block.module):
                continue
            attention = innermost_attention(block.attention)
            hooks.after(attention, self._leave_attention)
            inside = set(attention.modules())
            for module in block.module.modules():
                if module in inside or any(module.children()):
                    continue
                if _is_norm(module) or is_linear(module):
                    hooks.before(module, self._meet)
                hooks.after(module, self._remember)

    def enter(self, block: Block, args: Any, kwargs: Any) -> None:
        x = hidden_state((args, kwargs))
        has_begun = x is None or block.number in self._sums
        self._layer = None if has_begun or x is None else _Layer(block, x, self._states)

    def collect(self) -> dict[str, Partial]:
        names = {name for sums in self._sums.values() for name in sums}
        return {
            name: Partial(stacked(self._sums.get(layer, {}).get(name) for layer in range(self._depth)))
            for name in names
        }

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        return Reading({name: mean(sums, name) for name in self.METRICS if name in sums})

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if (missed := len(self._blocks) - len(self._sums)) == 0:
            return {}
        return {
            "escalation_rate": f"the sum of block input and attention was not seen in {missed} of {len(self._blocks)} "
            f"blocks: {why_unseen}, or no norm gets it after attention (the feed-forward part runs beside attention or "
            "before it, or attention adds its residual by itself)"
        }

    def _leave_attention(self, attention: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._layer is not None:
            self._layer.has_attended = True
            self._layer.remember(hidden_state(output))

    def _remember(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._layer is not None and self._layer.has_attended and isinstance(output, Tensor):
            self._layer.remember(output)

    def _meet(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        value = next(iter((*args, *kwargs.values())), None)
        if self._layer is None or not isinstance(value, Tensor):
            return
        if self._layer.is_feed_forward(module, value):
            self._layer = None
        elif self._layer.is_sum(module, value):
            layer, self._layer = self._layer, None
            diversity_B = self._states.statistics(layer.block, value).diversity
            if layer.has_tokens_first == self._states.has_tokens_first(layer.block):
                self._sums[layer.block.number] = counted("escalation_rate", ratio(layer.diversity_B, diversity_B))


class _Layer:
    """The block that runs, until its Y is found."""

    def __init__(self, block: Block, x: Tensor, states: HiddenStates) -> None:
        self.block = block
        self.diversity_B = states.statistics(block, x).diversity
        self.has_tokens_first = states.has_tokens_first(block)
        self.has_attended = False
        self._shape = x.shape
        self._is_normalised = False
        """Whether what attention returned met a norm before it met the residual."""
        self._no_sums = [Seen(x)]
        """The block's input, and what attention and the modules after it returned."""

    def remember(self, x: Tensor | None) -> None:
        if x is not None and x.shape == self._shape:
            self._no_sums.append(Seen(x))

    def is_feed_forward(self, module: nn.Module, value: Tensor) -> bool:
        """Whether the module brings something wider back to D."""
        return is_linear(module) and value.shape[:-1] == self._shape[:-1] and value.shape[-1] > self._shape[-1]

    def is_sum(self, module: nn.Module, value: Tensor) -> bool:
        if not self.has_attended or value.shape != self._shape:
            return False
        made_by = [seen.is_still(value) for seen in self._no_sums]
        self._is_normalised |= any(made_by[1:]) and _is_norm(module)
        return not any(made_by) and (_is_norm(module) or self._is_normalised)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
