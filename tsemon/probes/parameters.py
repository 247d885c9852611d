"""Listen to the optimizer: norms of parameters, gradients and updates per block, and how updates align with weights.

The update of Adam and AdamW is rebuilt from the optimizer's own state, one block at a time, so that no second copy of
the parameters is held. Other optimizers need such a copy, for one step, and get it only where it is small.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tsemon.probes.discovery import Block
from tsemon.probes.hooks import Hooks

MAX_COPY_BYTES = 256 * 2**20
"""Largest model whose parameters are copied for one step to measure an update that cannot be rebuilt."""

OTHER = -1
"""The group of parameters that belong to no block but count in the total: final norms, heads, projections."""


class ParameterProbe:
    """Squared sums per block at one sampled step, gathered in the hooks around the optimizer's step."""

    def __init__(self, model: nn.Module, blocks: list[Block], optimizer: torch.optim.Optimizer | None) -> None:
        self._groups = _group_parameters(model, blocks)
        self._num_blocks = len(blocks)
        self._optimizer = optimizer
        self._rebuilds = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and _is_wide(self._all())
        self._before: dict[int, list[Tensor]] = {}
        self._sums: dict[str, dict[int, Tensor]] = {}
        self._learning_rate: Tensor | float | None = None

    def why_no_update(self) -> str | None:
        """Why updates are not measured, or None where they are."""
        if self._optimizer is None:
            return "no optimizer was given to attach()"
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            return f"{type(self._optimizer).__name__} is not a torch.optim.Optimizer"
        num_bytes = sum(p.numel() * p.element_size() for p in self._all())
        if not self._rebuilds and num_bytes > MAX_COPY_BYTES:
            return (
                f"the update of {type(self._optimizer).__name__} can be measured only with a copy of the parameters, and "
                f"{num_bytes / 2**20:.0f} MiB is over the limit of {MAX_COPY_BYTES / 2**20:.0f} MiB"
            )
        return None

    def arm(self, hooks: Hooks) -> None:
        self._before, self._sums, self._learning_rate = {}, {}, None
        if isinstance(self._optimizer, torch.optim.Optimizer):
            hooks.around_step(self._optimizer, self._read_gradients, self._read_update)

    def collect(self) -> tuple[dict[str, Tensor], dict[str, Tensor | float]]:
        """Metrics per block, and of the run."""
        if "param" not in self._sums:
            self._sums["param"] = {group: _squared_norm(params) for group, params in self._groups.items()}
        sums = {kind: self._spread(found) for kind, found in self._sums.items()}
        layers, scalars = {}, dict[str, Tensor | float]()
        for kind, per_block, in_all in (
            ("param", "param_norm", "total_param_norm"),
            ("grad", "grad_norm", "total_grad_norm"),
            ("update", "update_norm", "step_size"),
        ):
            if kind in sums:
                layers[per_block] = sums[kind][:-1].sqrt()
                scalars[in_all] = sums[kind].nansum().sqrt()
        if "update" in sums:
            update, before, dot = sums["update"], sums["before"], sums["dot"]
            layers["update_ratio"] = (update / before)[:-1].sqrt()
            layers["update_alignment"] = (dot / (update * before).sqrt())[:-1]
            scalars["update_alignment"] = dot.nansum() / (update.nansum() * before.nansum()).sqrt()
        if self._learning_rate is not None:
            scalars["learning_rate"] = self._learning_rate
        self._before, self._sums = {}, {}
        return layers, scalars

    def _all(self) -> list[nn.Parameter]:
        return [p for params in self._groups.values() for p in params]

    def _spread(self, found: dict[int, Tensor]) -> Tensor:
        """One entry per block and one for the others; NaN where there was nothing to measure."""
        device = next(iter(found.values())).device
        absent = torch.full((), torch.nan, device=device)
        return torch.stack(
            [found.get(g, absent).to(device, non_blocking=True) for g in (*range(self._num_blocks), OTHER)]
        )

    def _read_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Here and not later: many loops clear the gradients before they call monitor.step().
        for group, params in self._groups.items():
            gradients = [p.grad for p in params if p.grad is not None and not p.grad.is_sparse]
            if gradients:
                self._sums.setdefault("grad", {})[group] = _squared_norm(gradients)
        if not self._rebuilds and self.why_no_update() is None:
            self._before = {group: [p.detach().clone() for p in params] for group, params in self._groups.items()}
        # Before the step, because a schedule may have changed it by the time that monitor.step() is called.
        self._learning_rate = optimizer.param_groups[0].get("lr")

    def _read_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._sums["param"] = {group: _squared_norm(params) for group, params in self._groups.items()}
        if self._rebuilds:
            self._rebuild(optimizer)
        else:
            for group, before in self._before.items():
                deltas = [p.detach() - b for p, b in zip(self._groups[group], before, strict=True)]
                self._add(group, before, deltas)
        self._before = {}

    def _rebuild(self, optimizer: torch.optim.Optimizer) -> None:
        settings = {id(p): g for g in optimizer.param_groups for p in g["params"]}
        for group, params in self._groups.items():
            by_setting: dict[int, list[nn.Parameter]] = defaultdict(list)
            for p in params:
                if p.grad is not None and id(p) in settings and "exp_avg" in optimizer.state[p]:
                    by_setting[id(settings[id(p)])].append(p)
            for stepped in by_setting.values():
                before, deltas = _adam_update(optimizer, settings[id(stepped[0])], stepped)
                self._add(group, before, deltas)

    def _add(self, group: int, before: list[Tensor], deltas: list[Tensor]) -> None:
        dots = [torch.dot(b.reshape(-1).float(), d.reshape(-1).float()) for b, d in zip(before, deltas, strict=True)]
        for kind, value in (
            ("update", _squared_norm(deltas)),
            ("before", _squared_norm(before)),
            ("dot", torch.stack(dots).sum()),
        ):
            found = self._sums.setdefault(kind, {})
            found[group] = found[group] + value if group in found else value


def _adam_update(
    optimizer: torch.optim.Optimizer, setting: dict[str, Any], params: list[nn.Parameter]
) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters before an Adam step that has just been made, and their change.

    w' = (1 - lr wd) w + u  with  u = -lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)    (Adam, arXiv 1412.6980;
    AdamW, arXiv 1711.05101; without decoupled decay wd counts as 0 here, being in m already)
    """
    states = [optimizer.state[p] for p in params]
    beta1, beta2 = setting["betas"]
    lr, steps = setting["lr"], [s["step"] for s in states]
    decoupled = isinstance(optimizer, torch.optim.AdamW) or setting.get("decoupled_weight_decay", False)
    decay = lr * setting["weight_decay"] if decoupled else 0.0
    second = "max_exp_avg_sq" if setting.get("amsgrad") else "exp_avg_sq"

    denominators = torch._foreach_sqrt([s[second] for s in states])
    for m, step in zip(denominators, steps, strict=True):
        m.div_(_sqrt(1 - beta2**step)).add_(setting["eps"])
    deltas = list(torch._foreach_div([s["exp_avg"] for s in states], denominators))
    for delta, step in zip(deltas, steps, strict=True):
        delta.mul_(-lr / (1 - beta1**step))
    before = [(p.detach() - delta).div_(1 - decay) for p, delta in zip(params, deltas, strict=True)]
    for delta, b in zip(deltas, before, strict=True):
        delta.sub_(b * decay)
    return before, deltas


def _sqrt(value: Tensor | float) -> Tensor | float:
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def _squared_norm(tensors: Iterable[Tensor]) -> Tensor:
    """|x|^2 over all tensors, in float32 or wider, as a scalar on the device of the first."""
    tensors = [t.detach() for t in tensors]
    norms = torch._foreach_norm(tensors, 2, torch.float32 if _is_narrow(tensors) else None)
    return torch.stack([n.to(norms[0].device, non_blocking=True) for n in norms]).square().sum()


def _is_narrow(tensors: Iterable[Tensor]) -> bool:
    return any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors)


def _is_wide(tensors: Iterable[Tensor]) -> bool:
    return all(t.dtype in (torch.float32, torch.float64) for t in tensors)


def _group_parameters(model: nn.Module, blocks: list[Block]) -> dict[int, list[nn.Parameter]]:
    """Parameters by block, each counted once, without embeddings and scalars (as arXiv 2010.09697, Appendix A)."""
    left_out = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    groups: dict[int, list[nn.Parameter]] = {}
    for group, module in [*enumerate(block.module for block in blocks), (OTHER, model)]:
        for parameter in module.parameters():
            if id(parameter) not in left_out and parameter.numel() > 1 and parameter.is_floating_point():
                left_out.add(id(parameter))
                groups.setdefault(group, []).append(parameter)
    return groups
