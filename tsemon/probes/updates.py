"""The update that an optimizer makes, from its own state: no second copy of the parameters is held.

Axes: P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tsemon.probes.groups import local


class Update(NamedTuple):
    """Sums over parameters, each weighed by its share, in float64."""

    squared: Tensor
    """|d|^2"""
    dot: Tensor
    """d . w, with w before the step"""
    gradient_dot: Tensor | None = None
    """g . w, where gradients were given"""


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
    shares: Sequence[float],
    w_w_P: Tensor,
    gradients: Sequence[Tensor] | None = None,
) -> Update:
    """Of an Adam step that has just been made.

    w' = (1 - lr wd) w + u  with  u = -lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)    (Adam, arXiv 1412.6980;
    AdamW, arXiv 1711.05101; without decoupled decay wd counts as 0 here, being in m already)

    |d|^2 and d . w follow from |u|^2, u . w' and |w|^2 (`w_w_P`, from before the step): neither w nor d is ever made.
    """
    states, now = [optimizer.state[p] for p in params], [local(p) for p in params]
    device = now[0].device
    beta1, beta2 = setting["betas"]
    step_P = torch.stack([state["step"] for state in states]).double().to(device, non_blocking=True)
    lr = setting["lr"]
    correction_P = (1 - beta2**step_P).sqrt()
    second = "max_exp_avg_sq" if setting.get("amsgrad") else "exp_avg_sq"

    divisors = torch._foreach_sqrt([local(state[second]) for state in states])
    for divisor, epsilon in zip(divisors, (setting["eps"] * correction_P).unbind(), strict=True):
        divisor.add_(epsilon)
    # u but for a factor, which the sums get instead.
    directions = torch._foreach_div([local(state["exp_avg"]) for state in states], divisors)
    factor_P = -lr * correction_P / (1 - beta1**step_P)
    share_P = _vector(shares, factor_P)
    decay = lr * setting["weight_decay"] if _is_decoupled(optimizer, setting) else 0.0

    u_u = (factor_P.square() * squares(directions) * share_P).sum()
    u_now = (factor_P * dots(directions, now) * share_P).sum()
    w_w = (w_w_P.to(device, non_blocking=True) * share_P).sum()
    u_w = (u_now - u_u) / (1 - decay)
    squared = (u_u - 2 * decay * u_w + decay**2 * w_w).clamp_min(0)  # rounding could leave it below
    gradient_dot = None
    if gradients is not None:
        g_now, g_u = dots(gradients, now), factor_P * dots(gradients, directions)
        gradient_dot = ((g_now - g_u) * share_P).sum() / (1 - decay)
    return _unless_skipped(optimizer, Update(squared, u_w - decay * w_w, gradient_dot))


def before_sgd(
    optimizer: torch.optim.Optimizer, setting: dict[str, Any], params: Sequence[nn.Parameter], shares: Sequence[float]
) -> Update:
    """Of a step of SGD that is about to be made, without a closure.

    w' = w - lr b  with  b = mu b + (1 - dampening) (g + wd w), or g + wd w at first; Nesterov adds mu b to g + wd w.
    """
    scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales the gradients itself
    factor = -setting["lr"]
    sign, momentum = -1.0 if setting["maximize"] else 1.0, setting["momentum"]
    squared, dot = list[Tensor](), list[Tensor]()
    for p in params:
        assert p.grad is not None
        now, gradient = local(p), local(p.grad) * sign
        gradient = gradient if scale is None else gradient.div_(scale.to(gradient.device))
        step = gradient.add_(now, alpha=setting["weight_decay"])
        if momentum:
            kept = optimizer.state[p].get("momentum_buffer")
            buffer = step if kept is None else (local(kept) * momentum).add_(step, alpha=1 - setting["dampening"])
            step = step + momentum * buffer if setting["nesterov"] else buffer
        squared.append(squares([step]).squeeze(0))
        dot.append(dots([step], [now]).squeeze(0))
    share_P = _vector(shares, squared[0])
    update = Update((torch.stack(squared) * share_P).sum() * factor**2, (torch.stack(dot) * share_P).sum() * factor)
    return _unless_skipped(optimizer, update)


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """|x|^2 of each (P,), in float64 from norms in float32 or wider, on the device of the first."""
    is_narrow = any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors)
    norms = torch._foreach_norm(list(tensors), 2, torch.float32 if is_narrow else None)
    return _stack(list(norms)).square()


def dots(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """x . y of each pair (P,), in float64 from products in float32 or wider, on the device of the first."""
    return _stack([torch.dot(_flat(x), _flat(y)) for x, y in zip(xs, ys, strict=True)])


def _stack(values: list[Tensor]) -> Tensor:
    return torch.stack([value.to(values[0].device, non_blocking=True) for value in values]).double()


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1).to(torch.promote_types(x.dtype, torch.float32))


def _vector(values: Sequence[float], like: Tensor) -> Tensor | float:
    """Of equal values the one: no copy to the device."""
    if len(set(values)) == 1:
        return values[0]
    return torch.stack([like.new_full((), value) for value in values])


def _unless_skipped(optimizer: torch.optim.Optimizer, update: Update) -> Update:
    """A fused optimizer decides on the device whether a scaled step is skipped; then nothing moves."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return update
    is_made = found_inf.to(update.squared.device, non_blocking=True).squeeze() == 0
    return update._replace(squared=torch.where(is_made, update.squared, 0.0), dot=torch.where(is_made, update.dot, 0.0))


def _is_decoupled(optimizer: torch.optim.Optimizer, setting: dict[str, Any]) -> bool:
    return isinstance(optimizer, torch.optim.AdamW) or bool(setting.get("decoupled_weight_decay", False))
