"""Listen to the optimizer: norms of parameters, gradients and updates per block, and how updates align with weights.

The update of Adam and AdamW is rebuilt from the optimizer's own state, one block at a time, so that no second copy of
the parameters is held. Other optimizers need such a copy, for one step, and get it only where it is small.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from tsemon.probes.discovery import Block
from tsemon.probes.hooks import Hooks
from tsemon.probes.part import COUNT, Part, Partial, Reading, stacked
from tsemon.probes.ranks import Ranks

MAX_COPY_BYTES = 256 * 2**20
"""Largest model whose parameters are copied for one step to measure an update that cannot be rebuilt."""

OTHER = -1
"""The group of parameters that belong to no block but count in the total: final norms, heads, projections."""


class ParameterProbe(Part):
    """Squared sums per block at one optimizer step, gathered in the hooks around it."""

    PARAMETERS = ("param_norm", "total_param_norm")
    GRADIENTS = ("grad_norm", "total_grad_norm", "learning_rate")
    UPDATES = ("update_norm", "update_ratio", "update_alignment", "step_size")
    METRICS = PARAMETERS + GRADIENTS + UPDATES

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        depth: int,
        optimizers: Sequence[torch.optim.Optimizer],
        ranks: Ranks | None = None,
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._depth = depth
        self._ranks = ranks
        optimizer = optimizers[0] if optimizers else None
        # A wrapper, such as Accelerate's, steps through the optimizer inside it.
        inner = getattr(optimizer, "optimizer", None)
        self._optimizer = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
        self._groups: dict[int, list[nn.Parameter]] = {}
        self._before: dict[int, list[Tensor]] = {}
        self._stepping: dict[int, list[nn.Parameter]] = {}
        self._sums: dict[str, dict[int, Tensor]] = {}
        self._learning_rate: Tensor | float | None = None
        self._num_steps = 0
        self._is_stepping = False

    def arm(self, hooks: Hooks) -> None:
        """Hook the optimizer for its next step."""
        self.forget()
        # Anew each time: parameters may have been replaced, moved, or given another precision.
        self._groups = _group_parameters(self._model, self._blocks)
        if _is_usable(self._optimizer) and not any(_is_sharded(p) for p in self._all()):
            hooks.around_step(self._optimizer, self._read_before, self._read_after)

    def forget(self) -> None:
        self._groups, self._before, self._stepping, self._sums = {}, {}, {}, {}
        self._learning_rate, self._num_steps, self._is_stepping = None, 0, False

    def collect(self) -> dict[str, Partial]:
        if "param" not in self._sums and not any(_is_sharded(p) for p in self._all()):
            self._sums["param"] = {group: _squared_norm(params) for group, params in self._groups.items()}
        groups = [*range(self._depth), OTHER]
        found: dict[str, Partial] = {}
        for kind, by_group in self._sums.items():
            found[kind] = Partial(stacked(by_group.get(group) for group in groups).double())
            found[kind + COUNT] = Partial(torch.tensor([group in by_group for group in groups], dtype=torch.float64))
        return found

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        layers, scalars = dict[str, Tensor](), dict[str, Tensor]()
        for kind, per_block, in_all in (
            ("param", "param_norm", "total_param_norm"),
            ("grad", "grad_norm", "total_grad_norm"),
            ("update", "update_norm", "step_size"),
        ):
            if kind in sums:
                layers[per_block] = _per_block(sums, kind).sqrt()
                scalars[in_all] = sums[kind].sum().sqrt()
        if "update" in sums:
            update, before, dot = (_per_block(sums, kind) for kind in ("update", "before", "dot"))
            layers["update_ratio"] = (update / before).sqrt()
            layers["update_alignment"] = dot / (update * before).sqrt()
            scalars["update_alignment"] = sums["dot"].sum() / (sums["update"].sum() * sums["before"].sum()).sqrt()
        reading = Reading(
            {name: value.float() for name, value in layers.items()},
            scalars={name: value.float() for name, value in scalars.items()},
        )
        if self._learning_rate is not None:
            reading.scalars["learning_rate"] = self._learning_rate
        return reading

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        parameters = self._all()
        if any(_is_sharded(p) for p in parameters):
            # Their norms would take a collective, and one that only some ranks join hangs them all.
            return dict.fromkeys(self.METRICS, "the parameters are sharded over processes (DTensor)")
        if self._optimizer is None:
            return dict.fromkeys(self.GRADIENTS + self.UPDATES, "no optimizer was given to attach()")
        if not _is_usable(self._optimizer):
            reason = f"{type(self._optimizer).__name__} is not a torch.optim.Optimizer with parameter groups"
            return dict.fromkeys(self.GRADIENTS + self.UPDATES, reason)
        if self._num_steps == 0:
            reason = (
                "the optimizer given to attach() made no step since the last call of monitor.step(), or none that could "
                "be seen (is its step compiled?)"
            )
            return dict.fromkeys(self.GRADIENTS + self.UPDATES, reason)
        missing: dict[str, str] = {}
        if "grad" not in self._sums:
            missing |= dict.fromkeys(("grad_norm", "total_grad_norm"), "no parameter had a gradient")
        elif without := sum(block not in self._sums["grad"] for block in range(len(self._blocks))):
            missing["grad_norm"] = f"{without} of {len(self._blocks)} blocks had no gradient (are they frozen?)"
        if not self._rebuilds() and self._num_bytes() > MAX_COPY_BYTES:
            reason = (
                f"the update of {type(self._optimizer).__name__} can be measured only with a copy of the parameters, and "
                f"{self._num_bytes() / 2**20:.0f} MiB is over the limit of {MAX_COPY_BYTES / 2**20:.0f} MiB"
            )
            return missing | dict.fromkeys(self.UPDATES, reason)
        if self._num_steps > 1:
            reason = f"the first of {self._num_steps} optimizer steps since the last call of monitor.step()"
            return missing | dict.fromkeys(self.UPDATES, reason)
        owned = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        strangers = sum(p.requires_grad and id(p) not in owned for p in parameters)
        if strangers:
            reason = f"without {strangers} of {len(parameters)} parameters, which another optimizer must train"
            missing |= dict.fromkeys(self.UPDATES, reason)
        return missing

    def _all(self) -> list[nn.Parameter]:
        return [p for params in self._groups.values() for p in params]

    def _num_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._all())

    def _rebuilds(self) -> bool:
        """Whether the update follows from the optimizer's state; not in half precision, where much of it is rounded away."""
        is_wide = all(p.dtype in (torch.float32, torch.float64) for p in self._all())
        return type(self._optimizer) in (torch.optim.Adam, torch.optim.AdamW) and is_wide

    def _read_before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_stepping = True
        if self._num_steps:
            return
        # Here and not after: many loops clear the gradients before they call monitor.step(). Only a closure makes them
        # anew inside the step.
        has_closure = any(closure is not None for closure in (*args[1:2], kwargs.get("closure")))
        if not has_closure:
            self._read_gradients(optimizer)
        self._stepping = {
            group: [p for p in params if has_closure or p.grad is not None] for group, params in self._groups.items()
        }
        if not self._rebuilds() and self._num_bytes() <= MAX_COPY_BYTES:
            self._before = {group: [p.detach().clone() for p in params] for group, params in self._groups.items()}
        # A schedule may have changed it by the time that monitor.step() is called.
        lr = optimizer.param_groups[0].get("lr")
        self._learning_rate = lr.detach().clone() if isinstance(lr, Tensor) else lr

    def _read_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales the gradients itself
        for group, params in self._groups.items():
            gradients = [p.grad for p in params if p.grad is not None and not p.grad.is_sparse]
            if gradients:
                squared = _squared_norm(gradients)
                squared = squared if scale is None else squared / scale.to(squared.device).square()
                self._sums.setdefault("grad", {})[group] = squared

    def _read_after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Where an optimizer's step calls that of the class it extends, torch calls the hooks of both.
        if not self._is_stepping:
            return
        self._is_stepping = False
        self._num_steps += 1
        if self._num_steps > 1:
            return
        if "grad" not in self._sums:
            self._read_gradients(optimizer)
        self._sums["param"] = {group: _squared_norm(params) for group, params in self._groups.items()}
        if self._rebuilds():
            self._rebuild(optimizer)
        else:
            for group, before in self._before.items():
                deltas = [p.detach() - b for p, b in zip(self._groups[group], before, strict=True)]
                self._add(group, before, deltas)
        self._before, self._stepping = {}, {}

    def _rebuild(self, optimizer: torch.optim.Optimizer) -> None:
        settings = {id(p): g for g in optimizer.param_groups for p in g["params"]}
        for group, params in self._groups.items():
            by_setting: dict[int, list[nn.Parameter]] = defaultdict(list)
            for p in self._stepping.get(group, ()):
                if id(p) in settings and "exp_avg" in optimizer.state.get(p, ()):
                    by_setting[id(settings[id(p)])].append(p)
            for stepped in by_setting.values():
                before, deltas = _adam_update(optimizer, settings[id(stepped[0])], stepped)
                self._add(group, before, deltas)
            moved = {id(p) for stepped in by_setting.values() for p in stepped}
            if still := [p for p in params if id(p) not in moved]:
                squared = _squared_norm(still)
                self._sum(group, torch.zeros_like(squared), squared, torch.zeros_like(squared))

    def _add(self, group: int, before: list[Tensor], deltas: list[Tensor]) -> None:
        dots = [torch.dot(b.reshape(-1).float(), d.reshape(-1).float()) for b, d in zip(before, deltas, strict=True)]
        dot = torch.stack([dot.to(dots[0].device, non_blocking=True) for dot in dots]).sum()
        self._sum(group, _squared_norm(deltas), _squared_norm(before), dot)

    def _sum(self, group: int, update: Tensor, before: Tensor, dot: Tensor) -> None:
        for kind, value in (("update", update), ("before", before), ("dot", dot)):
            found = self._sums.setdefault(kind, {})
            found[group] = found[group] + value.to(found[group].device) if group in found else value


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
    if (found_inf := getattr(optimizer, "found_inf", None)) is not None:
        # A fused optimizer decides on the device whether a scaled step is skipped.
        keep = (found_inf == 0).to(deltas[0].dtype)
        deltas, decay = [delta.mul_(keep.to(delta.device)) for delta in deltas], decay * keep
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


def _per_block(sums: Mapping[str, Tensor], kind: str) -> Tensor:
    """One entry per block; NaN where there was nothing to measure."""
    is_measured = sums[kind + COUNT].to(sums[kind].device) > 0
    return torch.where(is_measured, sums[kind], torch.nan)[:-1]


def _is_usable(optimizer: object) -> TypeGuard[torch.optim.Optimizer]:
    return isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "param_groups")


def _is_sharded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "to_local")


def _group_parameters(model: nn.Module, blocks: list[Block]) -> dict[int, list[nn.Parameter]]:
    """Parameters by block, each counted once, without embeddings and scalars (as arXiv 2010.09697, Appendix A)."""
    left_out = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    groups: dict[int, list[nn.Parameter]] = {}
    for group, module in [*((block.number, block.module) for block in blocks), (OTHER, model)]:
        for parameter in module.parameters():
            if id(parameter) in left_out or isinstance(parameter, UninitializedParameter):
                continue
            if parameter.numel() > 1 and parameter.is_floating_point():
                left_out.add(id(parameter))
                groups.setdefault(group, []).append(parameter)
    return groups
