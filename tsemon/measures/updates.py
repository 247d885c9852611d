"""The update that an optimizer makes, from its own state: no second copy of the parameters is held.

Axes: P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tsemon.measures.parameters import dots, squares


class Update(NamedTuple):
    """The change d of each parameter w, in float64."""

    squared_P: Tensor
    """|d|^2"""
    dot_P: Tensor
    """d . w, with w before the step"""
    gradient_dot_P: Tensor | None = None
    """g . w, where gradients were given"""


def adam_update(
    now: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    step_P: Tensor,
    w_w_P: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float | Tensor,
    gradients: Sequence[Tensor] | None = None,
) -> Update:
    """Return what an Adam step has just changed.

    w' = (1 - decay) w + u  with  u = -lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)    (Adam, arXiv 1412.6980;
    AdamW, arXiv 1711.05101; decay is lr times the weight decay if that is decoupled, else 0: it is in m then)

    |d|^2 and d . w follow from |u|^2, u . w' and |w|^2 (`w_w_P`, from before the step): neither w nor d is ever made.

    Args:
        now: The parameters after the step, and for each its moments `first` m and `second` v.
        step_P: t of each.
        gradients: For g . w of the gradients with the parameters before the step.
    """
    correction_P = (1 - betas[1] ** step_P).sqrt()
    divisors = torch._foreach_sqrt(list(second))
    torch._foreach_add_(divisors, list((eps * correction_P).unbind()))
    # u but for a factor, which the results get instead.
    directions = torch._foreach_div(list(first), divisors)
    factor_P = -lr * correction_P / (1 - betas[0] ** step_P)

    u_u_P = factor_P.square() * squares(directions)
    u_now_P = factor_P * dots(directions, now)
    u_w_P = (u_now_P - u_u_P) / (1 - decay)
    squared_P = (u_u_P - 2 * decay * u_w_P + decay**2 * w_w_P).clamp_min(0)  # rounding could leave it below
    gradient_dot_P = None
    if gradients is not None:
        gradient_dot_P = (dots(gradients, now) - factor_P * dots(gradients, directions)) / (1 - decay)
    return Update(squared_P, u_w_P - decay * w_w_P, gradient_dot_P)


def sgd_step(
    gradient: Tensor,
    now: Tensor,
    buffer: Tensor | None,
    *,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
) -> Tensor:
    """Return b of the step w' = w - lr b that SGD is about to make. Uses `gradient` up, and leaves the rest as it is.

    b = mu b + (1 - dampening) (g + wd w), or g + wd w at first, where there is no `buffer`; Nesterov adds mu b to g + wd w.
    """
    step = gradient.add_(now, alpha=weight_decay)
    if not momentum:
        return step
    buffer = step if buffer is None else (buffer * momentum).add_(step, alpha=1 - dampening)
    return step + momentum * buffer if nesterov else buffer
