"""All probes of one model: armed for a sampled step, disarmed after it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tsemon.measures.rows import MAX_ROWS, Rows
from tsemon.measures.sums import Partial, Partials
from tsemon.probes.activations import ActivationProbe
from tsemon.probes.attention import AttentionProbe
from tsemon.probes.calls import Calls
from tsemon.probes.discovery import Block, compiled_around, hides_from_hooks, is_compiled, path_to_gate, runs_compiled
from tsemon.probes.escalation import EscalationProbe
from tsemon.probes.extra_pass import ExtraPass
from tsemon.probes.feedforward import FeedForwardProbe
from tsemon.probes.held import HeldBatch, ProbeBatch
from tsemon.probes.hooks import Guard, Hooks, Span
from tsemon.probes.inputs import InputProbe
from tsemon.probes.losses import LossProbe
from tsemon.probes.mixing import MixingProbe
from tsemon.probes.outputs import OutputProbe
from tsemon.probes.padding import Padding
from tsemon.probes.parameters import ParameterProbe
from tsemon.probes.part import Part
from tsemon.probes.quantities import Quantities
from tsemon.probes.ranks import Ranks, given_means, given_partials
from tsemon.probes.reading import OnHost, Reading
from tsemon.probes.saturation import SaturationProbe
from tsemon.probes.states import HiddenStates
from tsemon.probes.values import ValueProbe
from tsemon.quantity import Quantity, Where

AGREED = "agreed"
EXTRA = "extra pass"
PLACES: Mapping[str, tuple[Where, ...]] = {
    "activations": ("output", "input"),
    "attention": ("attention", "queries", "keys"),
    "values": ("values",),
    "parameters": ("gradients", "parameters"),
}
"""Which part sees the tensors of a user's own quantity."""
MAX_SEARCHES = 3
"""Samples after which nothing that was compiled later is looked for any more."""
V = TypeVar("V")


class Probe:
    """Measures one model at one step. Faults are reported to `on_fault` and never raised.

    Two sets of hooks. The outer ones, from `arm` to `disarm`, watch the optimizer and the gate: the module that holds all
    blocks. When a training pass comes through the gate, the inner ones go into the blocks, for that pass alone. So an
    evaluation between two steps meets no hook inside the blocks, and of several micro-batches only the first is measured.

    Where blocks run compiled the inner hooks would not fire, so they go in for an extra pass over a held batch instead.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        blocks: list[Block],
        on_fault: Callable[[Exception], None],
        *,
        depth: int | None = None,
        ranks: Ranks | None = None,
        attention_rows: Rows = MAX_ROWS,
        probe_batch: ProbeBatch | None = None,
        quantities: Sequence[Quantity] = (),
    ) -> None:
        depth = len(blocks) if depth is None else depth
        self._blocks = blocks
        self._path = path_to_gate(model, blocks)
        self._gate = self._path[-1]
        self._is_gate_called = True
        self._ranks = ranks
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._guard = Guard(on_fault, self._device)
        self._outer, self._inner, self._extra = (Hooks(self._guard) for _ in range(3))
        self._padding = Padding(num_stacks=1 + max(block.stack for block in blocks))
        self._calls = Calls(blocks)
        states = HiddenStates(blocks, self._padding)
        self._held = HeldBatch(model, probe_batch, can_cut=not any(block.tokens_first for block in blocks))
        self._plain_pass, self._scaled_pass = ExtraPass(self._held), ExtraPass(self._held)
        self._saturation = SaturationProbe(model, blocks, depth, self._padding)
        self._losses = LossProbe()
        self._inputs = InputProbe()
        self._parts: dict[str, Part] = {
            "activations": ActivationProbe(blocks, depth, states, self._calls),
            "escalation": EscalationProbe(blocks, depth, states, self._calls),
            "attention": AttentionProbe(blocks, depth, self._padding, self._calls, attention_rows),
            "values": ValueProbe(blocks, depth, self._padding, self._calls),
            "mixing": MixingProbe(blocks, depth, self._padding, self._calls),
            "feedforward": FeedForwardProbe(blocks, depth, self._padding, self._calls),
            "outputs": OutputProbe(self._path, blocks, depth, self._padding),
            "parameters": ParameterProbe(model, blocks, depth, optimizers, ranks),
            "saturation": self._saturation,
            "losses": self._losses,
            "inputs": self._inputs,
        }
        for name, where in PLACES.items():
            of_part = [quantity for quantity in quantities if quantity.of in where]
            self._parts[name].own = Quantities(of_part, blocks, depth, on_fault)
        self._saw_train_mode: bool | None = None
        self._is_open = self._is_hidden = self._is_in_extra_pass = False
        self._num_searches = 0
        self.wanted: frozenset[str] = frozenset()
        """Which metrics the step that is, or was, armed should give."""
        self.not_measured: dict[str, str] = {}
        """Metric to the reason why the last sampled step lacks it, in whole or in part."""
        self.how: dict[str, str] = {}
        """In words, what the numbers of each part were made from in the last sampled step."""

    @property
    def cost_s(self) -> float:
        """Seconds spent in hooks so far, on the thread that trains."""
        return self._guard.cost_s

    def take_spans(self) -> list[Span]:
        """Where on the device's clock the hooks of this step ran."""
        return self._guard.take_spans()

    def arm(self, wanted: Collection[str]) -> None:
        """Watch the next step for these metrics."""
        self._saw_train_mode, self._is_open = None, False
        self._guard.has_met_transform = False
        self.wanted = frozenset(wanted)
        for part in self._parts.values():
            part.want(wanted)
        for part in self._parts.values():
            if part.is_wanted and part not in self._listening():
                part.arm(self._outer)
        if not self._runs_compiled():
            self._watch_passes(self._outer)
        must_hold = not self._held.is_final and (self._saturation.needs_passes or self._runs_compiled())
        takers = [self._held.take] * must_hold + [self._inputs.take] * bool(self._inputs.wanted)
        if takers:
            self._watch_inputs(takers)

    def take_loss(self, loss: object) -> None:
        """Remember the loss of a step, sampled or not, for the next sample. A microsecond: it is called at every step."""
        if self._losses.wanted:
            self._losses.add(loss)
            if self._losses.is_full:
                self._guard.run(self._losses.stack)

    def _watch_passes(self, hooks: Hooks) -> None:
        """Be there when a pass comes through the gate."""
        listening = [part for part in self._listening() if part.is_wanted]
        if not listening:
            return
        for module in self._path:
            hooks.before(module, self._read_padding)
        for part in listening:
            part.arm(hooks)
        if self._is_gate_called:
            hooks.before(self._gate, self._open)
            hooks.after(self._gate, self._close)
        else:
            hooks.before(self._blocks[0].module, self._open_at_first_block)

    def disarm(self) -> None:
        """Take every hook out again, and let go of what was seen."""
        try:
            self._inner.remove()
            self._extra.remove()
        finally:
            self._outer.remove()
        self._forget()
        self._padding.forget()

    def collect(
        self, *, step: int = 0, given: Mapping[str, Tensor | float] | None = None, to_agree: Sequence[float] = ()
    ) -> Reading:
        """What the armed step gave. The tensors are on the model's device and nothing has waited for them.

        Where there are ranks, the reading has the means over ranks of the scalars that are `given`, and `agreed`: the
        largest of each of the numbers `to_agree`, and how many quantities some rank could not merge for want of a place.
        """
        reading = Reading()
        self.not_measured = {}
        self._guard.run(self._drop_failed_pass)
        self._pass_again()
        partials: Partials = {}
        for name, part in self._parts.items():  # each by itself: a fault in one leaves the others
            part.step = step
            if part.is_wanted:
                self._guard.run(self._gather, name, part, partials)
        sums = {name: partial.value for name, partial in partials.items()}
        if self._ranks is not None:
            self._guard.contain(self._merge, self._ranks, partials, sums, given or {}, to_agree)
            reading.agreed = sums.get(AGREED)
            reading.scalars |= given_means(sums)
        for name, part in self._parts.items():
            if part.is_wanted:
                self._guard.run(self._finish, name, part, sums, reading)
        self._guard.run(self._check_gate)
        self._guard.run(self._find_compiled)
        return reading

    def _gather(self, name: str, part: Part, partials: Partials) -> None:
        found = part.collect() | part.own.collect()
        partials |= {f"{name}.{key}": partial for key, partial in found.items()}

    def _merge(
        self,
        ranks: Ranks,
        partials: Partials,
        sums: dict[str, Tensor],
        given: Mapping[str, Tensor | float],
        to_agree: Sequence[float],
    ) -> None:
        partials |= given_partials(given)
        numbers = [*to_agree, ranks.num_new(partials)]
        partials[AGREED] = Partial(torch.tensor(numbers, dtype=torch.float64), "max")
        sums |= ranks.merge(partials, self._device, self._guard.on_fault)

    def _finish(self, name: str, part: Part, sums: Mapping[str, Tensor], reading: Reading) -> None:
        own = {key.removeprefix(f"{name}."): value for key, value in sums.items() if key.startswith(f"{name}.")}
        found, of_user, why_unseen = part.finish(own), part.own.finish(own), self._why_unseen()
        reading.layers |= _wanted(found.layers, part.wanted) | of_user.layers
        reading.heads |= _wanted(found.heads, part.wanted)
        reading.scalars |= _wanted(found.scalars, part.wanted) | of_user.scalars
        why = part.why_missing(why_unseen)
        self.how[name] = part.how()
        if self._ranks is not None and self._ranks.stage_size < self._ranks.size:
            why |= {
                metric: "of the blocks of this process's stage alone: its last step is done on the host"
                for metric, value in found.layers.items()
                if isinstance(value, OnHost)
            }
        self.not_measured |= {metric: reason for metric, reason in why.items() if metric in part.wanted}
        self.not_measured |= part.own.why_missing(lambda where: part.why_not_own(where, why_unseen))

    def _watch_inputs(self, takers: Collection[Callable[..., None]]) -> None:
        """Show them the inputs of the outermost modules through which a training pass comes."""

        def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._guard.is_grad_enabled:
                for taker in takers:
                    taker(module, args, kwargs)

        for module in self._path:
            if getattr(module, "_compiled_call_impl", None) is None:
                self._outer.before(module, take)
            else:
                self._outer.before_compiled(module, take)
            if runs_compiled(module):
                return  # what is inside is traced

    def _pass_again(self) -> None:
        """Run the model on the held batch where that is the only way to what is wanted."""
        self._is_hidden = self._runs_compiled() or (self._held.is_given and self._saw_train_mode is None)
        is_worth_it = self._is_hidden and any(part.is_wanted for part in self._listening())
        if not (is_worth_it or self._saturation.needs_passes):
            return
        plain, scaled = self._plain_pass, self._scaled_pass
        self._extra.thread = threading.get_ident()
        try:
            self._is_in_extra_pass = self._is_hidden
            self._guard.run_model(plain.run, self._begin_plain)
            self._is_in_extra_pass = False
            if self._saturation.needs_passes and plain.why_not is None:
                self._guard.run_model(scaled.run, self._begin_scaled, self._saturation.scale)
        finally:
            self._is_in_extra_pass = False
            self._extra.thread = None
            for hooks in (self._extra, self._inner):
                hooks.remove()
                hooks.stand_ins = None
            self._padding.forget()
        self._saturation.why_not = plain.why_not or scaled.why_not
        self.how[EXTRA] = ""
        if is_worth_it and plain.why_not is None:
            self.how[EXTRA] = (
                f"activations and attention are of an extra pass, eager and in eval mode, over {self._held}, not of the "
                "current batch: the model runs compiled"
            )

    def _begin_plain(self, stand_ins: Mapping[nn.Module, nn.Module]) -> None:
        self._begin_extra(stand_ins)
        if self._saturation.needs_passes:
            self._saturation.listen_to_plain(self._extra)
        if self._is_hidden:
            self._watch_passes(self._extra)

    def _begin_scaled(self, stand_ins: Mapping[nn.Module, nn.Module]) -> None:
        self._begin_extra(stand_ins)
        self._saturation.listen_to_scaled(self._extra)

    def _begin_extra(self, stand_ins: Mapping[nn.Module, nn.Module]) -> None:
        for hooks in (self._extra, self._inner):
            hooks.remove()
            hooks.stand_ins = stand_ins
        for module in self._path:
            self._extra.before(module, self._padding.read)

    def _runs_compiled(self) -> bool:
        return any(map(runs_compiled, self._path)) or any(is_compiled(block.module) for block in self._blocks)

    def _find_compiled(self) -> None:
        """A model that was compiled after it was attached is called by a module that nobody has told us of."""
        looks_inside = self._saturation.wanted or any(part.is_wanted for part in self._listening())
        is_lost = looks_inside and self._saw_train_mode is None and self._held.inputs is None
        if is_lost and self._num_searches < MAX_SEARCHES:  # it looks at every object there is
            self._num_searches += 1
            self._path = [*compiled_around(self._path), *self._path]

    def _check_gate(self) -> None:
        # Some call the blocks without their owner's forward, from a training_step for one. Then the first block is the
        # gate from now on, unless hooks there between passes would disable its fast path, or be compiled.
        first = self._blocks[0].module
        if (
            self._saw_train_mode is None
            and not self._is_hidden
            and not self._guard.has_met_transform
            and not isinstance(first, nn.TransformerEncoderLayer)
            and not runs_compiled(first)
        ):
            self._is_gate_called = False

    def _listening(self) -> list[Part]:
        """The parts that look into a forward pass."""
        return [part for part in self._parts.values() if type(part).listen is not Part.listen]

    def _forget(self) -> None:
        for part in self._parts.values():
            part.forget()
            part.own.forget()

    @property
    def _is_elsewhere(self) -> bool:
        """Whether this thread runs the model while a pass on another is measured."""
        return not self._extra.are_concerned or (self._is_open and not self._inner.are_concerned)

    def _read_padding(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_elsewhere:
            self._padding.read(module, args, kwargs)

    def _open(self, gate: nn.Module, *_: Any) -> None:
        if self._is_elsewhere:
            return
        self._drop_failed_pass()
        if self._is_in_extra_pass:
            self._listen()
            return
        # Without gradients it is an evaluation. With them, one in eval mode may be, too: the first pass in train mode
        # takes its place. (Who trains in eval mode, to be rid of dropout, makes no other.)
        is_first = self._saw_train_mode is None
        is_better = self._saw_train_mode is False and gate.training
        if not self._guard.is_grad_enabled or not (is_first or is_better) or self._runs_compiled():
            return
        self._saw_train_mode = gate.training
        self._is_open = self._is_gate_called
        self._listen()

    def _listen(self) -> None:
        self._inner.remove()
        self._inner.thread = threading.get_ident()
        self._calls.begin()
        for block in self._calls.to_hook:
            if not hides_from_hooks(block):
                self._inner.before(block.module, functools.partial(self._enter, block))
        for part in self._listening():
            part.forget()
            part.own.forget()
            if part.is_wanted:
                part.listen(self._inner)

    def _open_at_first_block(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        was = self._saw_train_mode
        self._open(module)
        if self._saw_train_mode is not was or self._is_in_extra_pass:
            self._enter(self._blocks[0], module, args, kwargs)  # too late for a hook of its own

    def _enter(self, block: Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls.enter(module)
        layer = self._calls.current(block)
        for part in self._listening():
            if layer is not None and part.is_wanted and type(part).enter is not Part.enter:
                self._guard.run(part.enter, layer, args, kwargs)

    def _close(self, gate: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._is_elsewhere:
            self._end_pass()

    def _end_pass(self) -> None:
        self._is_open = False
        self._inner.remove()
        self._padding.forget()

    def _drop_failed_pass(self) -> None:
        """Forget a pass that came to no end; it may be tried again.

        Known only afterwards: a hook that is called in any case is one that dynamo compiles anew for.
        """
        if self._is_open:
            self._end_pass()
            self._saw_train_mode = None
            for part in self._listening():
                part.forget()
                part.own.forget()

    def _why_unseen(self) -> str:
        if self._is_hidden and self._plain_pass.why_not is not None:
            return self._plain_pass.why_not
        if self._guard.has_met_transform:
            return "the model runs under transforms of torch.func (vmap, grad), where hooks see no plain tensors"
        if self._saw_train_mode is None:
            return (
                f"no training pass came through {type(self._gate).__name__}, which holds the blocks, since the last call of "
                "monitor.step() (is the model compiled? Attach what torch.compile returned, or give attach(..., "
                "probe_batch=...). Or is it called by another name than forward?)"
            )
        return "hooks in the blocks did not fire (are they compiled, or frozen in eval mode?)"


def _wanted(found: Mapping[str, V], wanted: Collection[str]) -> dict[str, V]:
    return {name: value for name, value in found.items() if name in wanted}
