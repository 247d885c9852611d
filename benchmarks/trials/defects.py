"""What goes wrong in a training. Each defect changes the lab once, before the step at which it is due."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trials.subjects import Subject
from tsemon.lab.train.batches import Batch
from tsemon.models.attention import SelfAttention
from tsemon.probes import discover


@dataclass
class Lab:
    """A training under way, as a defect may change it."""

    subject: Subject
    optimizer: torch.optim.Optimizer
    rate: Callable[[int], float]
    """The learning rate of a step."""
    clip_norm: float
    step: int = 0
    before_update: list[Callable[[], None]] = field(default_factory=list)
    """Called each step between the gradients and the optimizer."""
    zeroes_gradients: bool = True

    @property
    def model(self) -> nn.Module:
        return self.subject.model

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks in depth order."""
        found, _, _ = discover(self.model, self.subject.blocks, None)
        return [block.module for block in found]


Defect = Callable[[Lab], None]


def both(*defects: Defect) -> Defect:
    def apply(lab: Lab) -> None:
        for defect in defects:
            defect(lab)

    return apply


# Learning rate and optimizer


def rate_times(factor: float, *, for_steps: float = math.inf) -> Defect:
    def apply(lab: Lab) -> None:
        first, rate = lab.step, lab.rate
        lab.rate = lambda step: rate(step) * (factor if step < first + for_steps else 1.0)

    return apply


def no_clipping(lab: Lab) -> None:
    lab.clip_norm = math.inf


def weight_decay(value: float) -> Defect:
    def apply(lab: Lab) -> None:
        for group in lab.optimizer.param_groups:
            group["weight_decay"] = value

    return apply


def forgotten(*numbers: int) -> Defect:
    """The blocks' parameters are not given to the optimizer."""

    def apply(lab: Lab) -> None:
        left_out = {id(p) for number in numbers for p in lab.blocks[number].parameters()}
        for group in lab.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in left_out]

    return apply


def no_zero_grad(lab: Lab) -> None:
    lab.zeroes_gradients = False


def reset_optimizer(lab: Lab) -> None:
    lab.optimizer.state.clear()


# Gradients


def gradients_times(factor: float, number: int) -> Defect:
    """Those of one block, each step."""

    def change() -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= factor

    parameters: list[nn.Parameter] = []

    def apply(lab: Lab) -> None:
        parameters.extend(lab.blocks[number].parameters())
        lab.before_update.append(change)

    return apply


def cut_graph(number: int) -> Defect:
    """Someone detaches what the block gives to the next one."""

    def apply(lab: Lab) -> None:
        lab.blocks[number].register_forward_hook(lambda _module, _args, output: output.detach())

    return apply


def loss_times(factor: float) -> Defect:
    def apply(lab: Lab) -> None:
        loss = lab.subject.loss

        def wrong(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            right = loss(model, inputs, targets)
            return right.detach() + factor * (right - right.detach())  # what is logged stays the loss

        lab.subject.loss = wrong

    return apply


def loss_is(loss: Callable[[Any, Tensor, Tensor], Tensor]) -> Defect:
    def apply(lab: Lab) -> None:
        lab.subject.loss = loss

    return apply


# Weights


def queries_and_keys_times(factor: float, *numbers: int) -> Defect:
    """Of some blocks, or of all."""

    @torch.no_grad()
    def apply(lab: Lab) -> None:
        chosen = [lab.blocks[number] for number in numbers] if numbers else lab.blocks
        for attention in (m for block in chosen for m in block.modules() if isinstance(m, SelfAttention)):
            attention.to_query_key_value.weight[: 2 * attention.to_output.in_features] *= factor

    return apply


@torch.no_grad()
def nan_weight(lab: Lab) -> None:
    next(lab.blocks[1].parameters()).view(-1)[0] = torch.nan


def block_times(number: int, factor: float) -> Defect:
    """The weights of a block are multiplied once."""

    def apply(lab: Lab) -> None:
        _scale([p for p in lab.blocks[number].parameters() if p.ndim > 1], factor)

    return apply


def inflated(number: int, factor: float) -> Defect:
    """The weights of a block grow by a factor each step, as by a decay of the wrong sign."""

    def apply(lab: Lab) -> None:
        parameters = [p for p in lab.blocks[number].parameters() if p.ndim > 1]
        lab.before_update.append(lambda: _scale(parameters, factor))

    return apply


@torch.no_grad()
def _scale(parameters: list[nn.Parameter], factor: float) -> None:
    for parameter in parameters:
        parameter.mul_(factor)


@torch.no_grad()
def dead_biases(lab: Lab) -> None:
    """Biases so negative that no ReLU lets anything through."""
    for linear in (m for block in lab.blocks for m in block.modules() if isinstance(m, nn.Linear)):
        if linear.bias is not None:
            linear.bias.sub_(8.0)


def new_block(number: int) -> Defect:
    """One block's weights are drawn again."""

    def apply(lab: Lab) -> None:
        for module in lab.blocks[number].modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()

    return apply


def zeroed(name: str) -> Defect:
    """A module's weights become zero and stay so, unnoticed by the optimizer."""

    @torch.no_grad()
    def apply(lab: Lab) -> None:
        parameters = list(lab.model.get_submodule(name).parameters())
        lab.before_update.append(lambda: _scale(parameters, 0.0))
        _scale(parameters, 0.0)
        for group in lab.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if all(p is not zero for zero in parameters)]

    return apply


def sees_the_future(lab: Lab) -> None:
    """The causal mask is gone: each token sees the one that it has to predict."""
    for attention in (m for m in lab.model.modules() if isinstance(m, SelfAttention)):
        attention.causal = False


def half_precision(lab: Lab) -> None:
    """Weights, gradients and Adam's moments in float16, in which its 1e-8 is zero."""
    lab.model.half()
    lab.optimizer.state.clear()


# Data


def batches_through(change: Callable[[Tensor, Tensor], Batch]) -> Defect:
    def apply(lab: Lab) -> None:
        lab.subject.batches = itertools.starmap(change, lab.subject.batches)

    return apply


def new_batches(make: Callable[[int], Iterable[Batch]], seed: int = 1) -> Defect:
    """Other data from here on, or another batch size. This may be healthy."""

    def apply(lab: Lab) -> None:
        lab.subject.batches = iter(make(seed))

    return apply


def same_batch(lab: Lab) -> None:
    """The loader is stuck."""
    lab.subject.batches = itertools.repeat(next(lab.subject.batches))


def few_batches(number: int) -> Defect:
    """The loader begins anew after a few batches."""

    def apply(lab: Lab) -> None:
        lab.subject.batches = itertools.cycle(list(itertools.islice(lab.subject.batches, number)))

    return apply


def shuffled_targets(inputs: Tensor, targets: Tensor) -> Batch:
    """Each input has the targets of another."""
    return inputs, targets.flatten()[torch.randperm(targets.numel())].view_as(targets)


def random_inputs(inputs: Tensor, targets: Tensor) -> Batch:
    if inputs.is_floating_point():
        return torch.randn_like(inputs), targets
    return torch.randint_like(inputs, 256), targets


def constant_inputs(inputs: Tensor, targets: Tensor) -> Batch:
    """The first input stands for all, with everyone's own targets."""
    return inputs[:1].expand_as(inputs).clone(), targets


def only_padding(inputs: Tensor, targets: Tensor) -> Batch:
    return torch.zeros_like(inputs), torch.zeros_like(targets)


def one_class(inputs: Tensor, targets: Tensor) -> Batch:
    return inputs, torch.full_like(targets, 3)


def own_targets(inputs: Tensor, _: Tensor) -> Batch:
    """The targets are the inputs, off by one from what they should be."""
    return inputs, inputs
