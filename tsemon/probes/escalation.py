"""Listen to what attention and its residual do to the tokens: the block's input X, and Y = X + SA(X).

Y is no module's output. It is what the next norm gets, before the feed-forward part in pre-norm blocks, after attention
in post-norm blocks: the first tensor that a norm gets once attention has run, and that no module made. Blocks that
normalise what attention returned (Gemma 2, OLMo 2) may hand Y to a linear layer first. Where the norm is inside the
module that attends (ALBERT), attention has run when a linear layer in there gets what no module made: the output layer.

There is no Y where the feed-forward part runs beside attention (GPT-J) or before it, where attention adds the residual
by itself and returns the sum (BLOOM), or where no norm gets the sum. It would be wrong only in blocks that reshape what
attention returned before they normalise it alone (Swin V2).

Axes: B samples, T tokens, D width, N blocks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tsemon.measures import TokenStatistics
from tsemon.measures.escalation import rate_of
from tsemon.measures.sums import Partials, counted
from tsemon.probes.calls import Calls
from tsemon.probes.deferred import Deferred
from tsemon.probes.discovery import Block, hides_from_hooks, innermost_attention, is_linear
from tsemon.probes.hooks import Hooks
from tsemon.probes.naming import words
from tsemon.probes.part import Part, by_reason
from tsemon.probes.states import NO_STATE, HiddenStates, Seen, hidden_state


class EscalationProbe(Part):
    """t_div(X) / t_div(Y) of every block in one forward pass."""

    METRICS = ("escalation_rate",)

    def __init__(self, blocks: list[Block], depth: int, states: HiddenStates, calls: Calls) -> None:
        self._states, self._calls = states, calls
        super().__init__(blocks, depth)

    def forget(self) -> None:
        super().forget()
        self._lengths = Deferred(_rates)
        """By block: |P X| and |X - P X|, and the same for Y."""
        self._hooked = set[nn.Module]()
        self._layer: _Layer | None = None
        self._undecided: dict[int, str] = {}
        """By block: why the layout of its states was not known."""
        self._seen = set[int]()
        """Blocks that ran, whether or not Y was found in them."""

    def listen(self, hooks: Hooks) -> None:
        self.forget()
        # Bound once: a large model has thousands of these hooks.
        leave, meet_inside, meet, remember = self._leave_attention, self._meet_inside, self._meet, self._remember
        for block in self._calls.to_hook:
            if block.attention is None or hides_from_hooks(block) or self._calls.is_compiled(block):
                continue
            self._hooked.add(block.module)
            attention = innermost_attention(block.attention)
            hooks.after(attention, leave)
            inside = set(attention.modules())
            hides = not any(map(_is_norm, inside))  # what is inside need not be watched
            for module in block.module.modules():
                is_leaf = is_linear(module) or not any(module.children())  # a parametrization is a child
                if not is_leaf or (hides and module in inside):
                    continue
                if is_linear(module) and module in inside:
                    hooks.before(module, meet_inside)
                elif is_linear(module) or _is_norm(module):
                    hooks.before(module, meet)
                hooks.after(module, remember)

    def enter(self, block: Block, args: Any, kwargs: Any) -> None:
        self._layer = None
        x = hidden_state((args, kwargs), block.width)
        if x is not None and block.module in self._hooked and block.number not in self._seen:
            self._seen.add(block.number)
            self._layer = _Layer(block, x, self._states)

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        missed = [block for block in self._blocks if block.number not in self._lengths]
        why = by_reason("not measured", missed, len(self._blocks), lambda block: self._why_unseen(block, why_unseen))
        return dict.fromkeys(self.METRICS, why) if why else {}

    def _why_unseen(self, block: Block, why_unseen: str) -> str:
        if block.attention is None:
            return "no softmax self-attention was found there, or several that are summed; attach(attention=[...]) names it"
        if why := self._undecided.get(block.number):
            return why
        if why_unseen or (why_unseen := self._calls.why_not_run(block) or ""):
            return why_unseen
        if block.number not in self._seen:
            return NO_STATE
        return (
            "no norm gets the sum of the block's input and its attention (the feed-forward part runs beside attention or "
            "before it, or attention returns the sum itself)"
        )

    def _leave_attention(self, attention: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._layer is not None:
            self._layer.has_attended = True
            self._layer.remember(hidden_state(output, self._layer.block.width))

    def _remember(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._layer is not None and isinstance(output, Tensor) and not _adds_residual(module, args):
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
            self._states.settle(layer.block)
            x, y = layer.statistics(), self._states.statistics(layer.block, value)
            if x is None or y is None:
                self._undecided[layer.block.number] = self._states.why_undecided(layer.block)
            else:
                self._lengths.put(layer.block.number, (x.shared, x.own, y.shared, y.own))

    def collect(self) -> Partials:
        for block in self._blocks:
            if why := self._states.why_undecided(block):  # it turned out too late for some
                self._undecided[block.number] = why
                self._lengths.drop(block.number)
        return self._lengths.collect(self._depth)


def _rates(lengths_NB: tuple[Tensor, ...], _: object) -> Partials:
    return counted("escalation_rate", rate_of(*lengths_NB))


class _Layer:
    """The block that runs, until its Y is found."""

    def __init__(self, block: Block, x: Tensor, states: HiddenStates) -> None:
        self.block = block
        self._states = states
        self._copy = states.kept(block, x)
        self._x = None if self._copy is not None else states.statistics(block, x)
        self.has_attended = False
        self._shape = x.shape
        self._is_normalised = False
        """Whether what attention returned met a norm before it met the residual."""
        self._input = Seen(x)
        self._made = list[Seen]()
        """What modules returned."""

    def statistics(self) -> TokenStatistics | None:
        """Of X."""
        return self._x if self._copy is None else self._states.statistics(self.block, self._copy)

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


def _adds_residual(module: nn.Module, args: tuple[Any, ...]) -> bool:
    """True for a module that gets two states of one shape (x-transformers' Residual)."""
    shapes = [x.shape for x in args if isinstance(x, Tensor)]
    return len(shapes) > 1 and shapes[0] == shapes[1] and not _is_norm(module)


def _is_norm(module: nn.Module) -> bool:
    """True also for a norm with children, such as one that is parametrized."""
    found = words(type(module).__name__)
    return not is_linear(module) and any(word.endswith("norm") or word == "ln" for word in found)
