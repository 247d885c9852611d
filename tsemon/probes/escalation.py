"""Listen to the sub-steps of a block: attention, its residual, the feed-forward part and the norms.

From the block's input X, attention makes A, and the residual adds it: Y = X + A. The feed-forward part with its residual
makes Z. Y is no module's output. The next norm gets it, before the feed-forward part in pre-norm blocks, after attention in
post-norm blocks: it is the first tensor that a norm gets once attention has run, and that no module made. Blocks that
normalize the output of attention (Gemma 2, OLMo 2) may hand Y to a linear layer first. If the norm is inside the
module that attends (ALBERT), attention has run when a linear layer in there, the output layer, gets a tensor that no
module made.

A is the last state that a module made before Y: behind the output projection, its dropout, and a norm on it. In a post-norm
block, Z is the second sum that a norm gets, and the state before it is the input of the feed-forward part's first linear
layer. In other blocks, Z is the block's output, and the state before it is the last sum that a norm got.

There is no Y if the feed-forward part runs beside attention (GPT-J) or before it, if attention adds the residual by itself
and returns the sum (BLOOM), or if no norm gets the sum. It would be wrong only in blocks that reshape the output of
attention before they normalize it alone (Swin V2).

Axes: B samples, T tokens, D width, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tsemon.measures import TokenStatistics
from tsemon.measures.changes import cosine_change_of, hfc_lfc_ratio_of
from tsemon.measures.escalation import Lengths, gain_of, rate_of, rms_of
from tsemon.measures.spectra import effective_ranks
from tsemon.measures.sums import Partials, counted
from tsemon.probes.boundaries import after_block
from tsemon.probes.calls import Calls
from tsemon.probes.deferred import Deferred
from tsemon.probes.discovery import NO_ATTENTION, Block, hides_from_hooks, innermost_attention, is_linear
from tsemon.probes.hooks import Hooks
from tsemon.probes.naming import words
from tsemon.probes.part import Part, by_reason
from tsemon.probes.reading import OnHost, Reading, stacked
from tsemon.probes.states import NO_STATE, HiddenStates, Seen, hidden_state


class Read(NamedTuple):
    """The numbers that were read from a state."""

    statistics: TokenStatistics
    gram_KK: Tensor | None
    """Gram matrix of its tokens, if ranks are wanted."""


Held = Read | Tensor | None
"""A state, or a copy of it if only attention can tell how to read it; None if nothing can."""
SUB_STEPS = {
    "residual": ("escalation_rate", "residual_gain"),
    "attention": ("attention_escalation_rate", "attention_gain"),
    "feedforward": ("feedforward_escalation_rate", "feedforward_gain"),
    "norm": ("norm_escalation_rate", "norm_gain"),
}
"""Rate and gain of each; of "norm" over all norms of a block."""
NORMS = ("norm1", "norm2")
"""The norms of attention and of the feed-forward part."""
CHANGES = {
    step: (f"{step}_hfc_lfc_ratio", f"{step}_cosine_change", f"{step}_rank_ratio")
    for step in ("residual", "feedforward", *NORMS)
}
"""Changes of the three measures of oversmoothing by each."""
STEPS = tuple(dict.fromkeys((*SUB_STEPS, *CHANGES)))
RANK_RATIOS = {step: rank for step, (*_, rank) in CHANGES.items()}
NO_SUM = (
    "no norm gets the sum of the block's input and its attention (the feed-forward part runs beside attention or "
    "before it, or attention returns the sum itself)"
)
WHY_NOT = {
    "residual": NO_SUM,
    "attention": "what attention returned was overwritten: the residual is added to it in place",
    "feedforward": "no feed-forward part with a residual of its own was found behind attention",
    "norm": "no norm of the block returns a hidden state",
    "norm1": "no norm before attention, or on its sum with the residual, returns a hidden state",
    "norm2": "no norm before the feed-forward part, or on its sum with the residual, returns a hidden state",
}


class EscalationProbe(Part):
    """Changes of token diversity and of the hidden state's size by each sub-step of every block, in one forward pass."""

    METRICS = tuple(name for steps in (SUB_STEPS, CHANGES) for names in steps.values() for name in names)

    def __init__(self, blocks: list[Block], depth: int, states: HiddenStates, calls: Calls) -> None:
        self._states, self._calls = states, calls
        super().__init__(blocks, depth)

    def forget(self) -> None:
        super().forget()
        self._found = {
            step: Deferred(self._of_norms if step == "norm" else partial(self._of_step, step=step)) for step in STEPS
        }
        """By sub-step and block: the statistics of the states before and after it."""
        self._grams: dict[str, dict[int, list[Tensor]]] = {step: {} for step in RANK_RATIOS}
        """By sub-step and block: the same states' Gram matrices."""
        self._hooked = set[nn.Module]()
        self._within_attention = set[nn.Module]()
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
            self._within_attention |= inside
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
            if self._follows:
                after_block(hooks, block, self._leave)

    @property
    def _follows(self) -> bool:
        """Whether anything but X and Y is wanted."""
        return bool(self.wanted.difference(SUB_STEPS["residual"], CHANGES["residual"]))

    def _read(self, block: Block, x: Tensor, step: str = "") -> Read | None:
        """`step`: the only one that needs the state, if there is only one."""
        statistics = self._states.statistics(block, x)
        if statistics is None:
            return None
        steps = NORMS if step == "norm" else (step,) if step else CHANGES
        ranks = {RANK_RATIOS.get(one) for one in steps}
        return Read(statistics, None if self.wanted.isdisjoint(ranks) else self._states.gram(block, x, statistics))

    def enter(self, block: Block, args: Any, kwargs: Any) -> None:
        self._layer = None
        x = hidden_state((args, kwargs), block.width)
        if x is not None and block.module in self._hooked and block.number not in self._seen:
            self._seen.add(block.number)
            self._layer = _Layer(block, x, self._states, partial(self._read, block), follows=self._follows)

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        reasons: dict[str, str] = {}
        for step in STEPS:
            missed = [block for block in self._blocks if block.number not in self._found[step]]
            why_not = partial(self._why_unseen, why_unseen=why_unseen, step=step)
            if why := by_reason("not measured", missed, len(self._blocks), why_not):
                reasons |= dict.fromkeys((*SUB_STEPS.get(step, ()), *CHANGES.get(step, ())), why)
        return reasons

    def _why_unseen(self, block: Block, why_unseen: str, step: str) -> str:
        if block.attention is None:
            return NO_ATTENTION
        if why := self._undecided.get(block.number):
            return why
        if why_unseen or (why_unseen := self._calls.why_not_run(block) or ""):
            return why_unseen
        if block.number not in self._seen:
            return NO_STATE
        return WHY_NOT[step] if block.number in self._found["residual"] else NO_SUM

    def _leave_attention(self, attention: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._layer is not None:
            self._layer.has_attended = True
            self._layer.remember(hidden_state(output, self._layer.block.width))

    def _remember(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._layer is not None and isinstance(output, Tensor) and not _adds_residual(module, args):
            self._layer.remember(output)
            self._layer.leave_norm(module, output)

    def _meet_inside(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        value = next(iter((*args, *kwargs.values())), None)
        if self._layer is not None and isinstance(value, Tensor):
            self._layer.has_attended |= self._layer.is_new(value)

    def _meet(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        layer, value = self._layer, next(iter((*args, *kwargs.values())), None)
        if layer is None or not isinstance(value, Tensor):
            return
        is_sum = False
        if layer.has_sum:
            layer.follow(module, value)
        elif layer.is_feed_forward(module, value):
            self._layer = None
        elif is_sum := layer.is_sum(module, value):
            self._states.settle(layer.block)
            layer.take_sum(value)
            self._take(layer, "residual", "attention")
            self._layer = layer if layer.follows else None
        if _is_norm(module) and (is_sum or module not in self._within_attention):
            layer.enter_norm(module, value)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A block is done."""
        if (layer := self._layer) is not None and layer.has_sum:
            self._layer = None
            layer.end(hidden_state(output, layer.block.width))
            self._take(
                layer, "feedforward", "norm", *(norm for norm in NORMS if not self.wanted.isdisjoint(CHANGES[norm]))
            )

    def _take(self, layer: _Layer, *steps: str) -> None:
        for step in steps:
            states = [self._read(layer.block, x, step) if isinstance(x, Tensor) else x for x in layer.steps[step]]
            known = [x for x in states if x is not None]
            if states and len(known) == len(states):
                values = [length for x in known for length in Lengths.of(x.statistics)]
                self._found[step].put(layer.block.number, values, layer.width, key=layer.width)
                grams_KK = [x.gram_KK for x in known if x.gram_KK is not None]
                if RANK_RATIOS.get(step) in self.wanted and len(grams_KK) == len(known):
                    self._grams[step][layer.block.number] = grams_KK
            elif states:
                self._undecided[layer.block.number] = self._states.why_undecided(layer.block)

    def collect(self) -> Partials:
        for block in self._blocks:
            if why := self._states.why_undecided(block):  # it turned out too late for some
                self._undecided[block.number] = why
                for found in self._found.values():
                    found.drop(block.number)
                for grams in self._grams.values():
                    grams.pop(block.number, None)
        partials: Partials = {}
        for found in self._found.values():
            partials |= found.collect(self._depth)
        return partials

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        reading = super().finish(sums)
        for hfc_lfc, *_ in CHANGES.values():
            if isinstance(logarithm := reading.layers.get(hfc_lfc), Tensor):
                reading.layers[hfc_lfc] = logarithm.exp()
        # Sub-steps share states. The first metric brings all of them to the host, and the others use its ranks.
        grams_KK = {id(gram_KK): gram_KK for of in self._grams.values() for own in of.values() for gram_KK in own}
        places = {key: place for place, key in enumerate(grams_KK)}
        ranks = _Ranks(self._depth)
        for step, of_blocks in self._grams.items():
            if of_blocks:
                raw = stacked(grams_KK.values()) if ranks.is_empty else ranks.nothing
                own = {block: [places[id(gram_KK)] for gram_KK in of] for block, of in of_blocks.items()}
                reading.layers[RANK_RATIOS[step]] = OnHost(raw, partial(ranks.ratios, own))
                ranks.nothing, ranks.is_empty = raw.new_zeros(0), False
        return reading

    def _of_step(self, fields_NB: tuple[Tensor, ...], _: object, *, step: str) -> Partials:
        pairs, found = _pairs(fields_NB), Partials()
        if step in SUB_STEPS:
            (rate, gain), [(before, after)] = SUB_STEPS[step], pairs
            found = {**counted(rate, rate_of(before, after)), **counted(gain, gain_of(before, after))}
        if self.wanted.isdisjoint(CHANGES.get(step, ())):
            return found
        hfc_lfc, cosine, _ = CHANGES[step]
        ratio_NB = reduce(torch.mul, (hfc_lfc_ratio_of(before, after) for before, after in pairs))
        change_NB = reduce(torch.add, (cosine_change_of(before, after) for before, after in pairs))
        # Logarithms: a change and its reverse have the mean 0.
        return {**found, **counted(hfc_lfc, ratio_NB.log()), **counted(cosine, change_NB)}

    def _of_norms(self, fields_NB: tuple[Tensor, ...], width: int) -> Partials:
        """Products over the norms of a block."""
        norms = _pairs(fields_NB)
        rate, gain = SUB_STEPS["norm"]
        rate_NB = reduce(torch.mul, (rate_of(before, after) for before, after in norms))
        gain_NB = reduce(torch.mul, (rms_of(after, width) for _, after in norms))
        return {**counted(rate, rate_NB), **counted(gain, gain_NB)}


class _Ranks:
    """The effective ranks of all states, decomposed once on the host."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._ranks_S = torch.zeros(0)
        self.is_empty, self.nothing = True, self._ranks_S

    def ratios(self, states: Mapping[int, Sequence[int]], grams_SKK: Tensor) -> Tensor:
        """Products over the pairs of states, before and after, of each layer."""
        if grams_SKK.numel():
            self._ranks_S = effective_ranks(grams_SKK)
        ratios_L = torch.full((self._depth,), torch.nan)
        for layer, places in states.items():
            ratios_L[layer] = (self._ranks_S[list(places[1::2])] / self._ranks_S[list(places[0::2])]).prod()
        return ratios_L


def _pairs(fields: Sequence[Tensor]) -> list[tuple[Lengths, Lengths]]:
    """The states before and after a sub-step, or before and after each norm."""
    size = len(Lengths._fields)
    states = [Lengths(*fields[first : first + size]) for first in range(0, len(fields), size)]
    return list(zip(states[::2], states[1::2], strict=True))


class _Layer:
    """The block that runs, until all that is wanted of it is found."""

    def __init__(
        self,
        block: Block,
        x: Tensor,
        states: HiddenStates,
        read: Callable[[Tensor, str], Read | None],
        *,
        follows: bool,
    ) -> None:
        self.block = block
        self.follows = follows
        """Whether anything but X and Y is wanted of it."""
        self.has_attended = self.has_sum = False
        self.steps: dict[str, list[Held]] = {step: [] for step in STEPS}
        """By sub-step: the states before and after it, or before and after each norm."""
        self.width = x.shape[-1]
        self._shape, self._states, self._read = x.shape, states, read
        self._is_normalised = False
        """Whether what attention returned met a norm before it met the residual."""
        self._begins_with_norm = self._has_fed = self._is_mixed_again = False
        self._input = Seen(x)
        self._made = list[Seen]()
        """What modules returned."""
        self._newest: Tensor | None = None
        self._norm: tuple[nn.Module, Held] | None = None
        """The norm that runs, and its input."""
        self._num_of_attention = 0
        """How many of the states before and after norms belong to attention."""
        self._x = self._held(x)
        self._sum: Held = None
        """The newest sum that a norm got."""
        self._fed: Held = None
        """The input of the feed-forward part's first layer."""

    def _held(self, x: Tensor, step: str = "") -> Held:
        """The numbers read from it, or a copy if only the block's attention can tell how to read it."""
        copy = self._states.kept(self.block, x)
        return self._read(x, step) if copy is None else copy

    def remember(self, x: Tensor | None) -> None:
        if x is not None and x.shape == self._shape:
            self._made.append(Seen(x))
            self._newest = x if self.follows and not self.has_sum else None

    def enter_norm(self, norm: nn.Module, value: Tensor) -> None:
        is_input = self._input.is_still(value)
        self._begins_with_norm |= is_input and not self.has_attended
        if self.follows and value.shape == self._shape:
            self._norm = norm, self._x if is_input else self._held(value, "norm")

    def leave_norm(self, norm: nn.Module, output: Tensor) -> None:
        if self._norm is not None and self._norm[0] is norm:
            if output.shape == self._shape:
                self.steps["norm"] += self._norm[1], self._held(output, "norm")
            self._norm = None

    def take_sum(self, y: Tensor) -> None:
        """Attention is done, and Y is found."""
        self.has_sum = True
        if self._newest is not None and self._made[-1].is_still(self._newest):
            self.steps["attention"] = [self._x, self._held(self._newest, "attention")]
        self._newest = None
        self._sum = self._held(y)
        self.steps["residual"] = [self._x, self._sum]
        self._num_of_attention = len(self.steps["norm"])

    def follow(self, module: nn.Module, value: Tensor) -> None:
        """A norm or a linear layer behind Y gets this."""
        if self.is_feed_forward(module, value):
            self._has_fed = True
            self._num_of_attention = self._num_of_attention or len(self.steps["norm"])  # post-norm
        elif value.shape != self._shape or self.steps["feedforward"]:
            return
        elif is_linear(module):
            self._fed = self._fed if self._has_fed else self._held(value)
        elif not self.is_new(value):
            return
        elif self._has_fed:  # post-norm
            self.steps["feedforward"] = [self._fed, self._held(value)]
        else:  # another attention came first, or experts in front of a norm
            self._sum, self._is_mixed_again = self._held(value), True
            self._num_of_attention = self._num_of_attention and len(self.steps["norm"])  # pre-norm

    def end(self, output: Tensor | None) -> None:
        """The block returns its output, which is Z if no norm got that."""
        has_norms_on_branches = self._begins_with_norm or self._is_normalised
        is_certain = has_norms_on_branches and not (self._is_normalised and self._is_mixed_again)
        if is_certain and output is not None and not self.steps["feedforward"] and self.is_new(output):
            self.steps["feedforward"] = [self._sum, self._held(output)]
        norms, size = self.steps["norm"], self._num_of_attention
        self.steps["norm1"], self.steps["norm2"] = norms[:size], norms[size:]

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
