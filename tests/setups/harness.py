"""How a way to train is written down, and what is seen when it runs with tsemon, without it, and under plain hooks.

Axes: B samples, T tokens, D width, H heads.
"""

import copy
import functools
import pickle
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad
from torch.optim.optimizer import _global_optimizer_post_hooks

import tsemon
from tests.frames import frames_in, values_of
from tests.setups.matrix import (
    ATTENTION,
    FEED_FORWARD,
    GRADIENTS,
    HIDDEN_STATES,
    OUTPUTS,
    PARAMETERS,
    SATURATION,
    UPDATES,
    Row,
    family_cell,
)
from tests.setups.models import DEPTH, GPT
from tsemon.catalogue import TIERS
from tsemon.probes import find_blocks
from tsemon.probes.activations import ActivationProbe
from tsemon.probes.attention import AttentionProbe
from tsemon.probes.clipping import BY_CLIPPING
from tsemon.probes.depth import firsts_of
from tsemon.probes.escalation import EscalationProbe
from tsemon.probes.feedforward import FeedForwardProbe
from tsemon.probes.outputs import OutputProbe
from tsemon.probes.parameters import ParameterProbe
from tsemon.probes.saturation import SaturationProbe
from tsemon.probes.values import ValueProbe

NUM_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Training:
    """A set-up, built."""

    model: nn.Module
    """What attach is given."""
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    step: Callable[[], torch.Tensor]
    """Makes one optimizer step and returns the loss."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of attach."""
    graphs: Sequence[object] = ()
    """What the compiler has compiled so far."""

    @property
    def optimizers(self):
        return [*self.optimizer] if isinstance(self.optimizer, Sequence) else [self.optimizer] * bool(self.optimizer)


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup(Row):
    """A way to train. `build` makes it anew, from the seed that is set when it is called."""

    build: Callable[[], Training]
    num_blocks: int = DEPTH
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Family to what monitor.status says (a regular expression) where it cannot be measured, or not wholly."""
    partial: Sequence[str] = ()
    """Families of which tsemon measures less than plain hooks do, and says so."""
    clips: bool = False
    """Whether the loop clips gradients, which plain hooks see only after that."""
    twin: Callable[[], Training] | None = None
    """The same training for plain hooks to watch, where they cannot watch this."""
    held_batch: int | None = None
    """Where hidden states and attention are those of an extra pass after the step, in eval mode: over which batch."""
    more_graphs: str = ""
    """Why the compiler makes one more graph when it meets hooks in some steps and none in others, where it does."""
    needs_program: str = ""
    """Skipped where it is not installed."""
    attention_twin: Callable[[], Training] | None = None
    """The same training with attention weights in plain sight, where there are none in this."""
    shows_weights: bool = False
    """Whether plain hooks must see attention's weights; of other models it is no matter."""

    def __str__(self):
        return self.name


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that a run left."""

    losses: torch.Tensor
    state: Mapping[str, torch.Tensor]
    random_state: tuple[Any, ...]
    num_graphs: int
    warnings: frozenset[str] = frozenset()
    frames: Sequence[Mapping[str, Any]] = ()
    status: tsemon.Status | None = None

    def differs_from(self, other):
        """Names of what is not bit-equal."""
        tensors = {
            "losses": (self.losses, other.losses),
            "random state of torch": (self.random_state[0], other.random_state[0]),
            **{name: (value, other.state[name]) for name, value in self.state.items()},
        }
        different = [name for name, (a, b) in tensors.items() if not torch.equal(a, b)]
        return different + ["random state of Python"] * (self.random_state[1] != other.random_state[1])

    def warns_beyond(self, other):
        """Of what it warns and the other does not."""
        return self.warnings - other.warnings


def seeded(build):
    torch._dynamo.reset()
    random.seed(0)
    torch.manual_seed(0)
    training = build()
    torch.manual_seed(1)
    return training


def attach(training, folder, every=1, **options):
    return tsemon.attach(
        training.model, training.optimizer, run="r", every=every, spool_dir=folder, **{**training.options, **options}
    )


def outcome_of(training, losses, **more):
    return Outcome(
        losses=torch.stack(losses).detach(),
        state={name: _here(value).detach().clone() for name, value in training.model.state_dict().items()},
        random_state=(torch.get_rng_state(), random.getstate()),
        num_graphs=len(training.graphs),
        **more,
    )


@contextmanager
def all_warnings():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def train(setup):
    with all_warnings() as caught:
        training = seeded(setup.build)
        losses = [training.step() for _ in range(NUM_STEPS)]
    return outcome_of(training, losses, warnings=_texts(caught))


def _texts(caught):
    return frozenset(f"{warning.category.__name__}: {warning.message}" for warning in caught)


unwatched = functools.cache(train)


@functools.cache
def watched(setup, every):
    with tempfile.TemporaryDirectory() as folder:
        with all_warnings() as caught:
            training, losses = seeded(setup.build), []
            with attach(training, folder, every) as monitor:
                for _ in range(NUM_STEPS):
                    losses.append(training.step())
                    monitor.step(loss=losses[-1])
        frames = frames_in(folder)
        return outcome_of(training, losses, warnings=_texts(caught), frames=frames, status=monitor.status)


def attached_twice(setup, *, watch=True):
    """Traces that a guest left in a training process, and what it measured, from two visits in a row."""
    training = seeded(setup.build)
    training.step()
    before, traces, names = Footprint(training), [], []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder, attach(training, folder) if watch else nullcontext() as monitor:
            for _ in range(2):
                loss = training.step()
                if watch:
                    monitor.step(loss=loss)
            if watch:
                monitor.close()
                names.append({name for frame in frames_in(folder) for name in frame["layers"]})
        traces.append(Footprint(training).differs_from(before))
    return traces, names


def copied(setup, watch):
    """The outcome of training while the model is copied and pickled between steps, and what became of the copies."""
    training, losses, copies = seeded(setup.build), [], []
    with tempfile.TemporaryDirectory() as folder:
        monitor = attach(training, folder) if watch else None
        for _ in range(NUM_STEPS):
            copies += [_state_of(make, training.model) for make in (copy.deepcopy, _pickled)]
            losses.append(training.step())
            if monitor is not None:
                monitor.step(loss=losses[-1])
        if monitor is not None:
            monitor.close()
        return outcome_of(training, losses), copies


def _pickled(model):
    return pickle.loads(pickle.dumps(model))


def _state_of(make_copy, model):
    try:
        return dict(make_copy(model).state_dict())
    except Exception as error:  # what cannot be copied or pickled without tsemon either
        return {type(error).__name__: torch.zeros(())}


class Footprint:
    """Everything in a model, its optimizer and torch where a guest could have left something."""

    def __init__(self, training):
        places = {"torch": (F.scaled_dot_product_attention, F.softmax, len(nn.modules.module._global_forward_hooks))}
        places["clipping"] = (
            vars(clip_grad)[BY_CLIPPING],
            vars(torch.amp.GradScaler)["_unscale_grads_"],
            len(_global_optimizer_post_hooks),
        )
        for name, module in training.model.named_modules():
            hooks = [len(getattr(module, kind)) for kind in _MODULE_HOOKS]
            places[f"module {name}"] = (sorted(vars(module)), hooks)
        for name, parameter in training.model.named_parameters():
            places[f"parameter {name}"] = (
                len(parameter._backward_hooks or ()),
                len(parameter._post_accumulate_grad_hooks or ()),
            )
        for number, optimizer in enumerate(training.optimizers):
            places[f"optimizer {number}"] = [len(getattr(optimizer, kind, ())) for kind in _OPTIMIZER_HOOKS]
        self.places = places

    def differs_from(self, before):
        """The places where something else stands than before."""
        return [place for place, found in self.places.items() if found != before.places[place]]


_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class PlainHooks:
    """The plainest of observers: the same quantities from their definitions, in float64, at every step."""

    def __init__(self, training, held_batch=None):
        self.model = model = getattr(training.model, "_orig_mod", training.model)
        self.held_batch, self.inputs, self.output = held_batch, [], None
        self.given_batch = training.options.get("probe_batch")
        model.register_forward_pre_hook(lambda _, args: self.inputs.append(args))
        model.register_forward_hook(lambda _, args, output: self.keep_output(output))
        options = {name: training.options.get(name) for name in ("blocks", "attention")}
        self.blocks = find_blocks(model, **options)
        self.states, self.weights, self.squares = [], [], {}
        self.firsts = firsts_of(self.blocks)
        self.met = set()
        for first in self.firsts:
            first.module.register_forward_pre_hook(self.keep_first, with_kwargs=True)
        for module in {id(block.module): block.module for block in self.blocks}.values():
            module.register_forward_hook(lambda _, args, output: self.keep(output))
        for module in {
            part for block in self.blocks if block.attention is not None for part in block.attention.modules()
        }:
            module.register_forward_hook(lambda _, args, output: self.keep_weights(output))
        counted, self.groups = set(), []
        for block in self.blocks:  # what is shared belongs to the first that has it
            self.groups.append([p for p in block.module.parameters() if id(p) not in counted])
            counted |= {id(p) for p in self.groups[-1]}
        for optimizer in training.optimizers:
            read = functools.partial(self.read_gradients, optimizer)
            optimizer.register_step_pre_hook(lambda *_, read=read: read())
            optimizer.register_step_post_hook(lambda *_, read=read: read())

    def look_again(self):
        self.states, self.weights, self.output, self.met = [], [], None, set()
        batch = self.inputs[min(self.held_batch, len(self.inputs) - 1)]
        self.model.eval()
        with torch.no_grad():
            self.model(*(batch if self.given_batch is None else (self.given_batch,)))
        self.inputs.pop()
        self.model.train()

    def keep_output(self, output):
        """Of the first pass, but for an evaluation."""
        if self.output is None:
            self.output = output

    def keep_first(self, module, args, kwargs):
        """The input of each stack."""
        if module not in self.met:
            self.met.add(module)
            self.keep((*args, *kwargs.values()))

    def keep(self, value):
        value = value[0] if isinstance(value, tuple) else value
        self.states.append((value.transpose(0, 1) if self.blocks[0].tokens_first else value).detach().double())

    def keep_weights(self, output):
        """Of an attention that returns them, or that passes them through a module."""
        for value in output if isinstance(output, tuple) else (output,):
            if _is_attention(value) and not any(value is weights for weights in self.weights):
                self.weights.append(value)

    def read_gradients(self, optimizer):
        """Before the step, or after it where a closure has made them only there; all that are there at the first sight."""
        scale = getattr(optimizer, "grad_scale", None) or 1
        for p in (p for group in self.groups for p in group):
            if p.grad is not None and id(p) not in self.squares:
                self.squares[id(p)] = _square(p.grad) / scale**2

    def step(self, training):
        """Metric to values per entry."""
        before = [[p.detach().double().clone() for p in group] for group in self.groups]
        self.states, self.weights, self.output, self.squares, self.met = [], [], None, {}, set()
        training.step()
        if self.held_batch is not None:
            self.look_again()
        deltas = [
            [p.detach().double() - b for p, b in zip(*group, strict=True)]
            for group in zip(self.groups, before, strict=True)
        ]
        num_states = len(self.blocks) + len(self.firsts)
        states = self.states[:num_states]  # a later pass is a micro-batch of its own, or recomputation
        found = {
            "token_similarity": [_token_similarity(x_BTD) for x_BTD in states],
            "hidden_rms": [x_BTD.square().mean().sqrt() for x_BTD in states],
            "update_norm": [_norm(delta) for delta in deltas],
            "update_ratio": [_norm(d) / _norm(b) for d, b in zip(deltas, before, strict=True)],
        }
        if self.squares:
            norms = [_root([self.squares.get(id(p)) for p in group]) for group in self.groups]
            found |= {"grad_norm": norms, "clipped_grad_norm": norms}
        if (logits := getattr(self.output, "logits", self.output)) is not None:
            found["output_variation"] = [_variation(logits)]
        if self.weights:
            found["attention_entropy"] = [_row_entropy(w_BHTT) for w_BHTT in self.weights[: len(self.blocks)]]
        return {name: torch.stack(values).double() for name, values in found.items()}


@functools.cache
def seen_plainly(setup):
    """Metric to values, for each step."""
    found = _seen_in(setup.twin or setup.build, setup.held_batch)
    for step in found if setup.clips else ():
        del step["grad_norm"]
    if setup.attention_twin is not None:
        for step, in_twin in zip(found, _seen_in(setup.attention_twin), strict=True):
            step |= {"attention_entropy": in_twin["attention_entropy"]}
    return found


def _seen_in(build, held_batch=None):
    training = seeded(build)
    hooks = PlainHooks(training, held_batch)
    return [hooks.step(training) for _ in range(NUM_STEPS)]


def _norm(tensors):
    return _root([_square(t) for t in tensors])


def _square(tensor):
    return _whole(tensor.detach().double().square().sum())


def _root(squares):
    squares = [square for square in squares if square is not None]
    return torch.stack(squares).sum().sqrt() if squares else torch.tensor(torch.nan, dtype=torch.float64)


def _whole(value):
    """Of a tensor that is sharded over processes, the whole; all processes must ask for it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _here(value):
    """Of a tensor that is sharded over processes, the part that is here."""
    return value.to_local() if isinstance(value, DTensor) else value


def _token_similarity(x_BTD):
    shared_B = x_BTD.mean(dim=1).square().sum(dim=1) * x_BTD.shape[1]
    return (shared_B / x_BTD.square().sum(dim=(1, 2))).mean()


def _variation(logits):
    p_NV = logits.detach().double().flatten(0, -2).softmax(dim=-1)
    return (p_NV - p_NV.mean(dim=0)).square().sum() / p_NV.square().sum()


def _is_attention(value):
    """Rows that sum to one, one for each token."""
    if not isinstance(value, torch.Tensor) or value.ndim != 4 or value.shape[-1] != value.shape[-2]:
        return False
    return bool(((value.detach().float().sum(dim=-1) - 1).abs() < 1e-2).all())


def _row_entropy(weights_BHTT):
    """Over the largest that a row can have; these small models give every key that may be seen some weight."""
    entropy_BHT = torch.special.entr(weights_BHTT.detach().double()).sum(dim=-1)
    visible_BHT = (weights_BHTT > 0).sum(dim=-1).double()
    return (entropy_BHT / visible_BHT.log())[visible_BHT > 1].mean()


def values(frame, metric):
    """Values of a metric in a frame, or None where the frame lacks it."""
    if metric in frame["layers"]:
        return torch.tensor(values_of(frame, metric), dtype=torch.float64)
    value = frame["scalars"].get(metric)
    return None if value is None else torch.tensor([value], dtype=torch.float64)


MEASURED = {
    # De-escalation is a step that these models do not have.
    HIDDEN_STATES: sorted(
        {name for name in (*ActivationProbe.METRICS, *EscalationProbe.METRICS) if TIERS[name] != "demand"}
        - {ActivationProbe.DEESCALATED}
    ),
    ATTENTION: AttentionProbe.METRICS + ValueProbe.METRICS,
    FEED_FORWARD: FeedForwardProbe.METRICS,
    OUTPUTS: OutputProbe.METRICS,
    # Not of the ends, which not every model has, nor the growth, which so few steps do not tell.
    PARAMETERS: ("param_norm", "total_param_norm", *ParameterProbe.DIRECTION),
    GRADIENTS: (
        *("grad_norm", "total_grad_norm", "learning_rate", *ParameterProbe.CLIPPED_NORMS),
        *(*ParameterProbe.GRADIENT_DIRECTIONS, *ParameterProbe.QUERY_KEY),
    ),
    UPDATES: ("update_norm", "update_ratio", "trained_update_ratio", "update_alignment", "step_size"),
    SATURATION: SaturationProbe.METRICS,
}
"""All that a family consists of."""
METRICS = {
    HIDDEN_STATES: ("token_similarity", "hidden_rms"),
    ATTENTION: ("attention_entropy",),
    OUTPUTS: ("output_variation",),
    GRADIENTS: ("grad_norm", "clipped_grad_norm"),
    UPDATES: ("update_norm", "update_ratio"),
}
"""What plain hooks measure, too."""
TOLERANCE = {HIDDEN_STATES: 1e-5, ATTENTION: 1e-4, OUTPUTS: 1e-4, GRADIENTS: 1e-5, UPDATES: 2e-3}
"""Relative. Sums are in float32; the fused kernel and the softmax in plain sight round differently; an update is told
from weights a thousand times larger, themselves rounded to float32."""


def missing(status):
    """What status says of the families' metrics."""
    known = {metric for metrics in METRICS.values() for metric in metrics}
    return {metric: why for metric, why in status.not_measured.items() if metric in known}


def answer(setup, family, outcome):
    """The table's cell, from the last frame: what must be learned about a model is learned by the first, and what needs
    a sample before has one. What not every sample has, only the first does."""
    first, *_, last = outcome.frames
    found = [values(first if TIERS[metric] == "slow" else last, metric) for metric in MEASURED[family]]
    cell = family_cell(found, MEASURED[family], outcome.status.not_measured)
    assert re.search(setup.lacks.get(family, "^$"), cell.words), f"{family} of {setup}: {cell}"
    return cell


def assert_measured_as(plain, frames, family, may_lack=False):
    """Whatever plain hooks saw. A step may lack it, where it was skipped for one, but not all of them."""
    seen, measured = set(), set()
    for expected, frame in zip(plain, frames, strict=True):
        for metric in expected.keys() & METRICS[family]:
            seen.add(metric)
            if (got := values(frame, metric)) is not None:
                measured.add(metric)
                torch.testing.assert_close(
                    got,
                    expected[metric],
                    rtol=TOLERANCE[family],
                    atol=1e-7,
                    equal_nan=True,
                    msg=lambda text, metric=metric: f"{metric}: {text}",
                )
    assert may_lack or measured == seen


def batches(batch=4, tokens=12):
    generator = torch.Generator().manual_seed(7)
    while True:
        yield torch.randint(3, 100, (batch, tokens), generator=generator)


def next_token_loss(model, ids_BT):
    logits_BTV = model(ids_BT)
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten())


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=1e-3, **options)


def plain_loop(make_model=GPT, make_optimizer=adamw, loss_of=next_token_loss, data=None, **more):
    """The loop that every other one is a variation of."""
    model = make_model()
    optimizer, data = make_optimizer(model.parameters()), data or batches()

    def step():
        loss = loss_of(model, next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model=model, optimizer=optimizer, step=step, **more)
