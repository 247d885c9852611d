"""Which optimizers tell their update, and where in their state it is.

Axes: P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tsemon.measures.parameters import dots, squares
from tsemon.measures.updates import Update, adam_update, sgd_step
from tsemon.probes.groups import local


def follows_from_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state after a step tells what the step was."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


def follows_from_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradient and state before a step tell what it will be."""
    return type(optimizer) is torch.optim.SGD


def by_setting(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]
) -> Iterator[tuple[dict[str, Any], list[nn.Parameter]]]:
    """The optimizer's parameter groups, each with those of `params` that are in it, one device at a time."""
    ids = {id(p) for p in params}
    for setting in optimizer.param_groups:
        members = [p for p in setting["params"] if id(p) in ids]
        for device in dict.fromkeys(p.device for p in members):
            yield setting, [p for p in members if p.device == device]


def after_adam(
    optimizer: torch.optim.Optimizer,
    setting: dict[str, Any],
    params: Sequence[nn.Parameter],
    w_w_P: Tensor,
    gradients: Sequence[Tensor] | None = None,
) -> Update:
    """Of an Adam step that has just been made. `w_w_P`: |w|^2 of each parameter before it."""
    states, now = [optimizer.state[p] for p in params], [local(p) for p in params]
    device = now[0].device
    second = "max_exp_avg_sq" if setting.get("amsgrad") else "exp_avg_sq"
    step_P = torch.stack([state["step"] for state in states]).double().to(device, non_blocking=True)
    update = adam_update(
        now,
        [local(state["exp_avg"]) for state in states],
        [local(state[second]) for state in states],
        step_P,
        w_w_P.to(device, non_blocking=device.type != "cpu"),
        lr=setting["lr"],
        betas=setting["betas"],
        eps=setting["eps"],
        decay=setting["lr"] * setting["weight_decay"] if _is_decoupled(optimizer, setting) else 0.0,
        gradients=gradients,
    )
    return _unless_skipped(optimizer, update)


def before_sgd(optimizer: torch.optim.Optimizer, setting: dict[str, Any], params: Sequence[nn.Parameter]) -> Update:
    """Return the update of the next step of SGD, which has no closure."""
    scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales the gradients itself
    factor, sign = -setting["lr"], -1.0 if setting["maximize"] else 1.0
    all_now, steps = list[Tensor](), list[Tensor]()
    for p in params:
        assert p.grad is not None
        now, gradient = local(p), local(p.grad) * sign
        gradient = gradient if scale is None else gradient.div_(scale.to(gradient.device))
        kept = optimizer.state[p].get("momentum_buffer")
        step = sgd_step(
            gradient,
            now,
            None if kept is None else local(kept),
            momentum=setting["momentum"],
            dampening=setting["dampening"],
            weight_decay=setting["weight_decay"],
            nesterov=setting["nesterov"],
        )
        all_now.append(now)
        steps.append(step)
    return _unless_skipped(optimizer, Update(squares(steps) * factor**2, dots(steps, all_now) * factor))


def _unless_skipped(optimizer: torch.optim.Optimizer, update: Update) -> Update:
    """A fused optimizer decides on the device whether a scaled step is skipped; then nothing moves."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return update
    is_made = found_inf.to(update.squared_P.device, non_blocking=True).squeeze() == 0
    squared_P, dot_P = (torch.where(is_made, value_P, 0.0) for value_P in update[:2])
    return update._replace(squared_P=squared_P, dot_P=dot_P)


def _is_decoupled(optimizer: torch.optim.Optimizer, setting: dict[str, Any]) -> bool:
    return isinstance(optimizer, torch.optim.AdamW) or bool(setting.get("decoupled_weight_decay", False))
