"""All probes of one model: armed for a sampled step, disarmed after it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument
from tsemon.measures.rows import MAX_ROWS, Rows
from tsemon.measures.sums import Partial, Partials
from tsemon.probes.activations import ActivationProbe
from tsemon.probes.attention import AttentionProbe
from tsemon.probes.boundaries import before_block
from tsemon.probes.calls import Calls
from tsemon.probes.clip_norm import ClipNorm
from tsemon.probes.depth import stacks_of
from tsemon.probes.discovery import (
    Block,
    compiled_around,
    has_compiled,
    hides_from_hooks,
    path_to_gate,
    runs_compiled,
)
from tsemon.probes.escalation import EscalationProbe
from tsemon.probes.every_step import EveryStep
from tsemon.probes.experiment import Experiment, with_other_token
from tsemon.probes.extra_pass import ExtraPass
from tsemon.probes.feedforward import FeedForwardProbe
from tsemon.probes.grad_norms import GradNormProbe
from tsemon.probes.held import HeldBatch, ProbeBatch
from tsemon.probes.hooks import Guard, Hooks, Span
from tsemon.probes.inputs import InputProbe
from tsemon.probes.layout import Layout, Layouts
from tsemon.probes.layout_probe import LayoutProbe
from tsemon.probes.losses import LossProbe, PastLosses
from tsemon.probes.mixing import MixingProbe
from tsemon.probes.output_loss import OutputLoss
from tsemon.probes.outputs import OutputProbe
from tsemon.probes.packing import OfInputs, Packing, Verdict
from tsemon.probes.parameters import ParameterProbe, usable
from tsemon.probes.part import Part
from tsemon.probes.quantities import Quantities
from tsemon.probes.ranks import Ranks, given_means, given_partials
from tsemon.probes.reading import OnHost, Reading
from tsemon.probes.saturation import SaturationProbe
from tsemon.probes.sequences import SEQUENCE_METRICS, Given
from tsemon.probes.states import HiddenStates
from tsemon.probes.usage import Usage
from tsemon.probes.value_output import ValueOutputProbe
from tsemon.probes.value_rows import ValueRows
from tsemon.probes.values import ValueProbe
from tsemon.probes.witness import NonfiniteParameters, Witness, choose_witness, nonfinite_parameters
from tsemon.quantity import Quantity, Where
from tsemon.stacks import Stacks

AGREED = "agreed"
EXTRA = "extra pass"
ORIGIN = "not finite"
NONFINITE_PARAMETERS = "nonfinite_parameters"
"""The scalar of frames that show where NaN begins: how many parameters were not finite before the optimizer's step."""
PLACES: Mapping[str, tuple[Where, ...]] = {
    "activations": ("output", "input"),
    "attention": ("attention", "queries", "keys"),
    "values": ("values",),
    "parameters": ("gradients", "parameters"),
}
"""Which part sees the tensors of a user's own quantity."""
OF_SEQUENCES = ("activations", "escalation", "attention", "values", "mixing", "feedforward", "outputs", "saturation")
"""Parts that need to know which tokens form a sequence."""
OUTGROWN = "the mask hides keys by a number such as -1e9, which the scores of the scaled model outgrow"
MAX_SEARCHES = 3
"""Samples after which nothing that was compiled later is looked for any more."""
NOT_GIVEN = Given()
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
        stacks: Stacks | None = None,
        ranks: Ranks | None = None,
        attention_rows: Rows = MAX_ROWS,
        probe_batch: ProbeBatch | None = None,
        quantities: Sequence[Quantity] = (),
        layout: Layout | None = None,
        padding: OfInputs | None = None,
        documents: OfInputs | None = None,
    ) -> None:
        stacks = stacks_of(blocks) if stacks is None else stacks
        self._stacks = stacks
        depth = stacks.num_blocks
        self._model, self._optimizers = model, optimizers
        self._usage: Usage | None = None
        self._witness: Witness | None = None
        self._output_loss: OutputLoss | None = None
        self._clip_norm: ClipNorm | None = None
        self._why_unwatched = "with every=N, no gradient is read between samples"
        self._origin: NonfiniteParameters | None = None
        """Known at a step at which `look_for_origin` was called."""
        self._is_late = False
        """Whether the step was armed after its pass."""
        self._warn: Callable[[str], None] | None = None
        self._told = set[str]()
        """Warnings that were given."""
        self._blocks = blocks
        self._path = path_to_gate(model, blocks)
        self._gate = self._path[-1]
        self._is_gate_called = True
        self._ranks = ranks
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._guard = Guard(on_fault, self.device)
        self._outer, self._inner, self._extra = (Hooks(self._guard) for _ in range(3))
        self._packing = Packing(blocks, padding, documents)
        self._calls = Calls(blocks)
        self._layouts = Layouts(blocks, layout)
        states = HiddenStates(self._packing, self._layouts)
        self._held = HeldBatch(model, probe_batch, can_cut=not any(block.tokens_first for block in blocks))
        self._plain_pass, self._scaled_pass = ExtraPass(self._held), ExtraPass(self._held)
        self._saturation = SaturationProbe(model, blocks, stacks, self._packing, self._layouts)
        self._losses, self._grad_norms = LossProbe(), GradNormProbe()
        outputs = OutputProbe(self._path, blocks, depth, self._packing)
        self._inputs = InputProbe(outputs.logits_of)
        self._layout_probe = LayoutProbe(blocks, depth, self._packing, self._calls, self._layouts)
        parameters = ParameterProbe(model, blocks, depth, optimizers, ranks)
        self._parts: dict[str, Part] = {
            "layout": self._layout_probe,
            "activations": ActivationProbe(blocks, stacks, states, self._calls),
            "escalation": EscalationProbe(blocks, depth, states, self._calls),
            "attention": AttentionProbe(blocks, depth, self._packing, self._calls, attention_rows),
            "values": ValueProbe(blocks, depth, self._packing, self._calls),
            "mixing": MixingProbe(blocks, depth, self._packing, self._calls),
            "feedforward": FeedForwardProbe(blocks, depth, self._packing, self._calls, self._layouts),
            "outputs": outputs,
            "value rows": ValueRows(blocks, depth, self._packing, self._calls, parameters),
            "parameters": parameters,
            "value output": ValueOutputProbe(blocks, depth, parameters),
            "saturation": self._saturation,
            "losses": self._losses,
            "grad norms": self._grad_norms,
            "inputs": self._inputs,
        }
        for name, where in PLACES.items():
            of_part = [quantity for quantity in quantities if quantity.of in where]
            self._parts[name].own = Quantities(of_part, blocks, stacks, on_fault)
        self._experiment = Experiment(blocks, self._layouts)
        self._saw_train_mode: bool | None = None
        self._is_open = self._is_hidden = self._is_in_extra_pass = False
        self._has_asked_for_layout = False
        self._verdict = self._extra_verdict = Verdict({}, {})
        self._num_searches = 0
        self._saw_evaluation = self._found_wrapper = False
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

    def watch_usage(self, warn: Callable[[str], None]) -> None:
        """From now on, say what is wrong with how and when the training loop calls `monitor.step()`."""
        self._warn = warn
        gate = None if self._runs_compiled() else self._gate
        optimizers = usable(self._optimizers)
        has_group = self._ranks is not None
        hooks = Hooks(self._guard)
        self._usage = Usage(hooks, self._model, gate, self._blocks, optimizers, has_group=has_group, warn=warn)

    def watch_gradient(self, on_nonfinite: Callable[[], None]) -> None:
        """Call a function before the first step with a gradient that is not finite, where reading one is cheap."""
        optimizers = usable(self._optimizers)
        parameter = choose_witness(self._blocks, optimizers)
        if self._ranks is not None:
            self._why_unwatched = "with process_group= no gradient is read at every step"
        elif self.device.type != "cpu":
            self._why_unwatched = "reading a gradient at every step would wait for the device"
        elif parameter is None:
            self._why_unwatched = "attach() was given no optimizer that trains vectors in a block"
        else:
            self._witness = Witness(parameter, optimizers, self._guard, on_nonfinite, self._clip_norm)

    def watch_clipping(self) -> ClipNorm:
        """From now on until `close`, keep the gradient norm of every step that torch clips."""
        if self._clip_norm is None:
            self._clip_norm = ClipNorm(self._model, self._guard)
        return self._clip_norm

    def watch_output_loss(self) -> OutputLoss:
        """From now on until `close`, keep the loss in the model's outputs."""
        if self._output_loss is None:
            self._output_loss = OutputLoss(Hooks(self._guard), self._model)
        return self._output_loss

    @property
    def why_no_origin(self) -> str:
        """Why it is not known where NaN began."""
        return self._why_unwatched if self._witness is None else self._witness.why_not

    def look_for_origin(self, *, is_armed: bool) -> None:
        """Look for the block in which NaN begins, now: a step of the optimizer spreads it to all parameters.

        is_armed: The step is a sampled one, so its pass was seen. Otherwise there is a pass over the held batch.
        """
        self._guard.run(self._drop_failed_pass)
        self._is_late = not is_armed
        if self._is_late:
            of_step = (
                *LossProbe.METRICS,
                *GradNormProbe.METRICS,
                *(SEQUENCE_METRICS if self._inputs.has_given else ()),
            )
            self.arm({"nonfinite", *self.wanted.intersection(of_step)})
        self._pass_again()
        self._origin = nonfinite_parameters(self._model)

    @property
    def _is_gradient_watched(self) -> bool:
        return self._witness is not None and not self._witness.is_done

    def _tell_origin(self, parameters: NonfiniteParameters, step: int, reading: Reading) -> None:
        """Put into words in which block NaN begins. If the held batch does not show it, the reason replaces the number."""
        nonfinite, not_known = reading.layers.get("nonfinite"), "It is not known where NaN began, because"
        found = nonfinite.nonzero().flatten().tolist() if isinstance(nonfinite, Tensor) else []
        if nonfinite is None:
            text = f"{not_known} the pass was not seen: {self.not_measured.get('nonfinite', self._why_unseen())}"
        elif parameters.are_most:
            text = f"{not_known} most parameters were not finite before this step of the optimizer"
        elif found:
            text = f"NaN or infinity begins in {self._place(found[0])}"
        else:
            by = (
                f"of a separate pass over {self._held}, in eval mode and full precision," if self._is_hidden else "seen"
            )
            text = (
                f"{not_known} all hidden states {by} are finite. Look at the batch of step {step}, the loss function, "
            )
            text += "the layers behind the blocks, the backward pass, and half precision"
            if self._is_late:
                del reading.layers["nonfinite"]
                self.not_measured["nonfinite"] = text
        is_skipped = self._witness is not None and not self._witness.has_spread
        if is_skipped:
            text += ". The optimizer skipped this step"
        elif nonfinite is not None and not parameters.are_most:
            reading.scalars[NONFINITE_PARAMETERS] = float(len(parameters.names))
        self.how[ORIGIN] = f"the gradient of step {step}. {text}. Before this step, {parameters}"

    def _place(self, entry: int) -> str:
        outputs = {block.entry: f"the output of {block.name}" for block in self._blocks}
        inputs = {block.entry - 1: f"the input of {block.name}" for block in self._blocks}
        return (inputs | outputs)[entry]

    def called(self) -> None:
        """`monitor.step()` was called, at a sampled step or not."""
        if self._usage is not None and self._usage.is_watching:
            self._guard.run(self._usage.called)

    def arm(self, wanted: Collection[str]) -> None:
        """Watch the next step for these metrics."""
        if self._usage is not None:
            self._guard.run(self._usage.arm, self._outer)
        self._saw_train_mode, self._is_open = None, False
        self._saw_evaluation = self._found_wrapper = False
        self._guard.has_met_transform = False
        self.wanted = frozenset(wanted)
        for part in self._parts.values():
            part.want(wanted)
        self._layout_probe.is_needed = any(self._parts[name].is_wanted for name in OF_SEQUENCES)
        for part in self._parts.values():
            if part.is_wanted and part not in self._listening():
                part.arm(self._outer)
        is_hidden = self._runs_compiled()
        if not is_hidden and not self._is_late:
            self._watch_passes(self._outer)
        may_ask = self._layout_probe.is_needed and self._layouts.may_ask and not self._has_asked_for_layout
        needs_pass = self._saturation.needs_passes or may_ask or is_hidden or self._is_gradient_watched
        must_hold = needs_pass and not self._held.is_final
        takers = [self._held.take] * must_hold + [self._inputs.take] * bool(self._inputs.wanted)
        if takers:
            self._watch_inputs(takers)

    def take_loss(self, loss: object) -> None:
        """Remember the loss of a step, sampled or not, for the next sample."""
        if self._losses.wanted:
            self._take(self._losses.given, loss)

    def take_grad_norm(self, norm: object) -> None:
        """The same of the norm of its gradient."""
        if self._grad_norms.wanted:
            self._take(self._grad_norms.given, norm)

    def take_numbers(self, losses: Sequence[float], norms: Sequence[float]) -> None:
        """The same of several steps."""
        for part, numbers in ((self._losses, losses), (self._grad_norms, norms)):
            if part.wanted:
                part.given.add_floats(numbers)
                if part.given.is_full:
                    self._guard.run(part.given.stack)

    def past_losses(self) -> PastLosses:
        """Return the first and the last losses so far. Waits for the device."""
        return self._losses.past()

    def continue_from(self, past: PastLosses) -> None:
        """Count the losses before a checkpoint, too. Before the first step."""
        self._losses.continue_from(past)

    def coming(self, *, has_loss: bool, has_grad_norm: bool) -> Collection[str]:
        """Metrics of the loss and of the gradient norm, if any was given since the last sample.

        has_loss, has_grad_norm: whether `take_numbers` will get any.
        """
        parts = (self._losses, has_loss), (self._grad_norms, has_grad_norm)
        return [name for part, is_coming in parts if is_coming or part.given for name in part.METRICS]

    def _take(self, numbers: EveryStep, number: object) -> None:
        try:
            if isinstance(number, Tensor) and number.is_meta:
                numbers.has_newest = False
                raise numbers.left_out(number)
            numbers.add(number)
        except InvalidArgument as error:  # no fault yet: a sample counts what it leaves out
            if self._warn is not None:
                self._warn(str(error))
        if numbers.is_full:
            self._guard.run(numbers.stack)

    @property
    def is_busy(self) -> bool:
        """Whether `called` has something to do."""
        return self._usage is not None and self._usage.is_watching

    def contain(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function out of sight of the user's modes, and contain its faults."""
        self._guard.contain(function, *args)

    def _watch_passes(self, hooks: Hooks) -> None:
        """Be there when a pass comes through the gate."""
        listening = [part for part in self._listening() if part.is_wanted]
        if not listening:
            return
        for module in self._path:
            hooks.before(module, self._read_inputs)
        for part in listening:
            part.arm(hooks)
        if self._is_gate_called:
            hooks.before(self._gate, self._open)
            hooks.after(self._gate, self._close)
        else:
            before_block(hooks, self._blocks[0], self._open_at_first_block)

    def disarm(self) -> None:
        """Remove all hooks and forget the step."""
        try:
            self._inner.remove()
            self._extra.remove()
        finally:
            self._outer.remove()
        self._forget()
        self._forget_inputs()
        self._origin = None
        self._is_late = False
        if self._witness is not None:
            self._guard.run(self._witness.renew)

    def close(self) -> None:
        """Take out every hook for good."""
        try:
            self.disarm()
        finally:
            if self._witness is not None:
                self._witness.close()
            if self._usage is not None:
                self._usage.close()
            if self._output_loss is not None:
                self._output_loss.close()
            if self._clip_norm is not None:
                self._clip_norm.close()

    def collect(
        self,
        *,
        step: int = 0,
        given: Mapping[str, Tensor | float] | None = None,
        sequences: Given = NOT_GIVEN,
        to_agree: Sequence[float] = (),
    ) -> Reading:
        """What the armed step gave. The tensors are on the model's device and nothing has waited for them.

        Where there are ranks, the reading has the means over ranks of the scalars that are `given`, and `agreed`: the
        largest of each of the numbers `to_agree`, and how many quantities some rank could not merge for want of a place.
        """
        reading = Reading()
        self.not_measured = {}
        if self._origin is None:
            self._guard.run(self._drop_failed_pass)
            self._pass_again()
        if self._inputs.wanted:
            self._guard.run(self._inputs.take_given, sequences, (given or {}).get("loss"))
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
        self._guard.run(self._find_compiled)
        for name, part in self._parts.items():
            if part.is_wanted:
                self._guard.run(self._finish, name, part, sums, reading)
        if self._origin is not None:
            self._guard.run(self._tell_origin, self._origin, step, reading)
        self._guard.run(self._take_notes, reading)
        self._guard.run(self._check_gate)
        if self._usage is not None:
            self._guard.run(self._usage.end_sample)
        return reading

    def collect_last(self, wanted: Collection[str], *, has_loss: bool) -> Reading:
        """Return the loss of the last step if it has one, and the metrics of the losses and norms since the last sample.

        The parameters may have changed since the last step: loops load the best checkpoint, or averages, at the end.
        """
        reading = Reading()
        self._guard.run(self._measure_alone, "losses", wanted, reading)
        if has_loss and reading.scalars and self._losses.newest is not None:
            reading.scalars["loss"] = self._losses.newest
        self._guard.run(self._measure_alone, "grad norms", wanted, reading)
        return reading

    def _measure_alone(self, name: str, wanted: Collection[str], reading: Reading) -> None:
        part, partials = self._parts[name], dict[str, Partial]()
        part.want(wanted)
        self._gather(name, part, partials)
        self._finish(name, part, {key: partial.value for key, partial in partials.items()}, reading)

    def _take_notes(self, reading: Reading) -> None:
        reading.notes += self._experiment.take_notes()
        for text, is_so in self._layout_probe.disagreements.items():
            if text not in self._told:
                reading.notes.append(OnHost(is_so, functools.partial(self._tell, text)))

    def _tell(self, text: str, is_so: Tensor) -> Tensor:
        """On the host: warn of it once."""
        if is_so.any() and text not in self._told:
            self._told.add(text)
            self._packing.confirm(text)
            if self._warn is not None:
                self._warn(text)
        return is_so

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
        sums |= ranks.merge(partials, self.device, self._guard.on_fault)

    def _finish(self, name: str, part: Part, sums: Mapping[str, Tensor], reading: Reading) -> None:
        own = {key.removeprefix(f"{name}."): value for key, value in sums.items() if key.startswith(f"{name}.")}
        found, of_user, why_unseen = part.finish(own), part.own.finish(own), self._why_unseen()
        why, why_own = part.why_missing(why_unseen), {}
        if name in OF_SEQUENCES:
            verdict = self._scaled_verdict() if part is self._saturation else self._verdict
            undefined = {metric: verdict.undefined[metric] for metric in part.METRICS if metric in verdict.undefined}
            why, why_own = undefined | self._blank(found, verdict) | why, self._blank(of_user, verdict)
        reading.layers |= _wanted(found.layers, part.wanted) | of_user.layers
        reading.heads |= _wanted(found.heads, part.wanted)
        reading.scalars |= _wanted(found.scalars, part.wanted) | of_user.scalars
        reading.later += found.later
        self.how[name] = part.how()
        if self._ranks is not None and self._ranks.stage_size < self._ranks.size:
            why |= {
                metric: "of the blocks of this process's stage alone: its last step is done on the host"
                for metric, value in found.layers.items()
                if isinstance(value, OnHost)
            }
        self.not_measured |= {metric: reason for metric, reason in why.items() if metric in part.wanted}
        self.not_measured |= part.own.why_missing(lambda where: part.why_not_own(where, why_unseen)) | why_own

    def _scaled_verdict(self) -> Verdict:
        """Problems of the pass with scaled parameters."""
        why_not, doubts = dict(self._extra_verdict.why_not), dict(self._extra_verdict.doubts)
        for stack, is_outgrown in self._packing.outgrown.items():
            if is_outgrown.device.type != "cpu":
                doubts[stack] = doubts.get(stack, is_outgrown) | is_outgrown
            elif is_outgrown.item():
                why_not.setdefault(stack, OUTGROWN)
        return Verdict(why_not, doubts)

    def _blank(self, found: Reading, verdict: Verdict) -> dict[str, str]:
        """Remove values whose sequences are unknown. Return the reason by metric."""
        reasons: dict[str, str] = {}
        for stack in {*verdict.why_not, *verdict.doubts}:
            blocks = [block for block in self._blocks if block.stack == stack]
            is_wrong = None if stack in verdict.why_not else verdict.doubts[stack]
            for arrays in (found.layers, found.heads):
                for metric, value in arrays.items():
                    change = functools.partial(_without, blocks=blocks, stacks=self._stacks, is_wrong=is_wrong)
                    arrays[metric] = _changed(value, change)
            for metric, scalar in found.scalars.items():
                is_of_stack = metric != "output_variation" or self._blocks[-1] in blocks
                if is_of_stack and not isinstance(scalar, float):
                    found.scalars[metric] = _changed(scalar, functools.partial(_nothing, is_wrong))
            if is_wrong is None:
                of = f"in {len(blocks)} of {len(self._blocks)} blocks: " if len(blocks) < len(self._blocks) else ""
                reasons |= dict.fromkeys((*found.layers, *found.scalars), f"{of}{verdict.why_not[stack]}")
        return reasons

    def _watch_inputs(self, takers: Collection[Callable[..., None]]) -> None:
        """Show them the inputs of the outermost modules through which a training pass comes."""

        def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._guard.is_grad_enabled:
                for taker in takers:
                    taker(module, args, kwargs)

        def leave(module: nn.Module, *given_and_output: Any) -> None:
            if self._guard.is_grad_enabled:
                self._inputs.leave(module, *given_and_output)

        for module in self._path:
            if getattr(module, "_compiled_call_impl", None) is None:
                self._outer.before(module, take)
            else:
                self._outer.before_compiled(module, take)
            if runs_compiled(module):
                return  # what is inside is traced
            if self._inputs.reads_labels:
                self._outer.after(module, leave)

    def _pass_again(self) -> None:
        """Run the model on the held batch where that is the only way to what is wanted."""
        if self._saw_train_mode is not None:
            self._guard.run(self._layout_probe.keep)
        self._verdict = self._extra_verdict = self._packing.verdict()
        is_unseen = self._held.is_given and self._saw_train_mode is None
        self._is_hidden = self._is_late or self._runs_compiled() or is_unseen
        is_worth_it = self._is_hidden and any(part.is_wanted for part in self._listening())
        asks_for_layout = self._layouts.is_undecided and not self._has_asked_for_layout
        if not (is_worth_it or self._saturation.needs_passes or asks_for_layout):
            return
        plain, scaled = self._plain_pass, self._scaled_pass
        self._extra.thread = threading.get_ident()
        try:
            self._is_in_extra_pass = self._is_hidden
            self._guard.run_model(plain.run, self._begin_plain)
            self._is_in_extra_pass = False
            if self._is_hidden:
                self._guard.run(self._layout_probe.keep)
            self._has_asked_for_layout |= asks_for_layout and plain.why_not is None
            if asks_for_layout and plain.why_not is None and self._layouts.is_undecided:
                for change in (lambda: Tensor.clone, with_other_token):
                    self._guard.run_model(plain.run, self._begin_experiment, 1.0, change)
                self._guard.run(self._take_experiment)
            if self._saturation.needs_passes and plain.why_not is None:
                self._guard.run_model(scaled.run, self._begin_scaled, self._saturation.scale)
        finally:
            self._is_in_extra_pass = False
            self._extra.thread = None
            self._extra_verdict = self._packing.verdict()
            if self._is_hidden:
                self._verdict = self._extra_verdict
            else:
                self._packing.restore(self._verdict)
            for hooks in (self._extra, self._inner):
                hooks.remove()
                hooks.stand_ins = None
            self._forget_inputs()
        self._saturation.why_not = plain.why_not or scaled.why_not
        self.how[EXTRA] = ""
        if is_worth_it and plain.why_not is None and not self._is_late:
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
        else:
            self._layout_probe.listen_again(self._extra)

    def _begin_experiment(self, stand_ins: Mapping[nn.Module, nn.Module]) -> None:
        self._begin_extra(stand_ins)
        self._experiment.listen(self._extra)

    def _take_experiment(self) -> None:
        for stack, is_wrong in self._experiment.finish().items():
            self._verdict.doubts[stack] = self._verdict.doubts.get(stack, is_wrong) | is_wrong

    def _begin_scaled(self, stand_ins: Mapping[nn.Module, nn.Module]) -> None:
        self._begin_extra(stand_ins)
        self._saturation.listen_to_scaled(self._extra)

    def _begin_extra(self, stand_ins: Mapping[nn.Module, nn.Module]) -> None:
        for hooks in (self._extra, self._inner):
            hooks.remove()
            hooks.stand_ins = stand_ins
        for module in self._path:
            self._extra.before(module, self._read_inputs)

    def _runs_compiled(self) -> bool:
        return any(map(runs_compiled, self._path)) or self._calls.find_compiled()

    def _find_compiled(self) -> None:
        """A model that was compiled after it was attached is called by a module that nobody has told us of."""
        looks_inside = self._saturation.wanted or any(part.is_wanted for part in self._listening())
        is_lost = looks_inside and self._saw_train_mode is None and self._held.inputs is None
        if is_lost and self._num_searches < MAX_SEARCHES:  # it looks at every object there is
            self._num_searches += 1
            wrappers = compiled_around(self._path)
            self._path, self._found_wrapper = [*wrappers, *self._path], bool(wrappers)

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
        self._packing.begin()
        for part in self._parts.values():
            part.forget()
            part.own.forget()

    @property
    def _is_elsewhere(self) -> bool:
        """Whether this thread runs the model while a pass on another is measured."""
        return not self._extra.are_concerned or (self._is_open and not self._inner.are_concerned)

    def _read_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_elsewhere:
            self._packing.read(module, args, kwargs)
            self._layouts.meet_inputs(module, args, kwargs)

    def _forget_inputs(self) -> None:
        self._packing.forget_inputs()
        self._layouts.forget_inputs()

    def _open(self, gate: nn.Module, *_: Any) -> None:
        if self._is_elsewhere:
            return
        self._drop_failed_pass()
        if self._is_in_extra_pass:
            self._listen()
            return
        # Without gradients it is an evaluation. With them, one in eval mode may be, too: the first pass in train mode
        # takes its place. (Who trains in eval mode, to be rid of dropout, makes no other.)
        self._saw_evaluation |= not self._guard.is_grad_enabled
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
        for each in (self._calls, self._layouts, self._packing):
            each.begin()
        for block in self._calls.to_hook:
            if not hides_from_hooks(block):
                before_block(self._inner, block, functools.partial(self._enter, block))
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
        if block.parts is not None and self._calls.has_entered(block):
            return  # its next part runs
        self._calls.enter(block.module)
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
        self._forget_inputs()

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
        """Why no pass through the blocks was seen; empty if one was."""
        if self._is_hidden:
            return self._plain_pass.why_not or ""
        if self._guard.has_met_transform:
            return "the model runs under transforms of torch.func (vmap, grad), where hooks see no plain tensors"
        if self._saw_train_mode is not None:
            return ""
        gate, since = type(self._gate).__name__, "since the last call of monitor.step()"
        if self._saw_evaluation:
            return f"every pass through {gate} {since} ran without gradients, as an evaluation does"
        if self._found_wrapper:
            return (
                "the model is called through what torch.compile made of it, which attach() was not given; from the next "
                "sample on it is measured in an extra pass"
            )
        unseen = f"no training pass came through {gate}, which holds the blocks, {since}"
        if has_compiled():
            return (
                f"{unseen}. If a function that torch.compile made calls the model, give attach(..., probe_batch=...); if it "
                "is called by another method than forward, call forward"
            )
        if self._is_gate_called:
            return f"{unseen}: it was not called, or by another method than forward; the next sample watches the first block"
        return f"neither {gate} nor its first block was called {since}, or by another method than forward"


def _changed(value: Tensor | OnHost, change: Callable[[Tensor], Tensor]) -> Tensor | OnHost:
    return value._replace(raw=change(value.raw)) if isinstance(value, OnHost) else change(value)


def _nothing(is_wrong: Tensor | None, value: Tensor) -> Tensor:
    """NaN, if this is so."""
    nothing = torch.full_like(value, torch.nan)
    return nothing if is_wrong is None else torch.where(is_wrong, nothing, value)


def _without(value: Tensor, blocks: Sequence[Block], stacks: Stacks, is_wrong: Tensor | None) -> Tensor:
    """The same with NaN for these blocks, if this is so. The input of a stack is its first block's."""
    entries = [block.number for block in blocks]
    if len(value) == stacks.num_states:
        entries = sorted({entry for block in blocks for entry in (block.entry - 1, block.entry)})
    without = value.clone().index_fill_(0, torch.tensor(entries).to(value.device, non_blocking=True), torch.nan)
    return without if is_wrong is None else torch.where(is_wrong, without, value)


def _wanted(found: Mapping[str, V], wanted: Collection[str]) -> dict[str, V]:
    return {name: value for name, value in found.items() if name in wanted}
