"""Listen to the optimizers: norms of parameters, gradients and updates per block, and the directions that they take.

Of each kind of number there is one sum per group of parameters: the blocks, and the ends that `groups` names. The update
of Adam, AdamW and SGD follows from the optimizer's own state. Other optimizers need a copy of the parameters, for one
step, and get it only where it is small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from tsemon.measures.growth import MIN_POINTS
from tsemon.measures.linear import widened
from tsemon.measures.parameters import cosine_of, dots, norm_of, ratio_of, squares
from tsemon.measures.sums import COUNT, Partial, Partials
from tsemon.measures.updates import Update
from tsemon.probes.coordinates import Coordinates, stride_of
from tsemon.probes.discovery import Block
from tsemon.probes.groups import (
    EMBEDDING,
    HEAD,
    NUM_ENDS,
    OTHER,
    group_parameters,
    is_sharded,
    is_tied,
    local,
    output_head,
    share,
)
from tsemon.probes.growth import NormGrowth
from tsemon.probes.hooks import Hooks
from tsemon.probes.part import Part
from tsemon.probes.query_key import Slices, queries_and_keys
from tsemon.probes.ranks import Ranks
from tsemon.probes.reading import OnHost, Reading, stacked
from tsemon.probes.updates import after_adam, before_sgd, by_setting, follows_from_gradient, follows_from_state
from tsemon.quantity import Where

MAX_COPY_BYTES = 256 * 2**20
"""Largest parameters that are copied for one step to measure an update that does not follow from the optimizer's state."""

COMPARING = ("direction_cosine", "gradient_cosine")
"""What a sample has only if there was one before."""

ALL_HERE = "/here"
"""Ends the name of the share of processes that gave the sum of the name before it: what one lacks is not the whole."""


@dataclass(slots=True)
class _Stepper:
    """One optimizer, the parameters that it trains, and what it did in this sample."""

    optimizer: torch.optim.Optimizer
    groups: dict[int, list[nn.Parameter]]
    is_stepping: bool = False
    num_steps: int = 0
    has_closure: bool = False
    squares: dict[int, Tensor] = field(default_factory=dict)
    """|w|^2 of each parameter before the step, by its id."""
    moving: frozenset[int] = frozenset()
    """The parameters that the step changes, by their id."""
    copies: dict[int, list[Tensor]] = field(default_factory=dict)
    learning_rate: Tensor | float | None = None


class ParameterProbe(Part):
    """Sums per group at one optimizer step, gathered in the hooks around it."""

    PARAMETERS = ("param_norm", "total_param_norm", "embedding_param_norm", "head_param_norm")
    GROWTH = ("norm_growth_exponent", "norm_growth_r2")
    DIRECTION = ("direction_cosine",)
    QUERY_KEY = ("grad_norm_qk",)
    GRADIENT_NORMS = ("grad_norm", "total_grad_norm", "embedding_grad_norm", "head_grad_norm")
    GRADIENT_DIRECTIONS = ("gradient_alignment", "gradient_cosine")
    GRADIENTS = (*GRADIENT_NORMS, *GRADIENT_DIRECTIONS, *QUERY_KEY, "learning_rate")
    UPDATES = (
        "update_norm",
        "update_ratio",
        "update_alignment",
        "step_size",
        "embedding_update_norm",
        "head_update_norm",
    )
    METRICS = PARAMETERS + GROWTH + DIRECTION + GRADIENTS + UPDATES
    GRADIENTS_OF_BLOCKS = ("grad_norm", *QUERY_KEY, "gradient_alignment")
    UPDATES_OF_BLOCKS = ("update_norm", "update_ratio", "update_alignment")

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        depth: int,
        optimizers: Sequence[torch.optim.Optimizer],
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(blocks, depth)
        self._model = model
        self._ranks = ranks
        self._optimizers = [_inner(optimizer) for optimizer in optimizers]
        self._weights, self._gradients = Coordinates(), Coordinates()
        self._growth = NormGrowth()
        self._num_samples = 0

    def forget(self) -> None:
        self._groups: dict[int, list[nn.Parameter]] = {}
        self._steppers: list[_Stepper] = []
        self._strangers: dict[int, int] = {}
        self._strides: dict[int, int] = {}
        self._shares: dict[int, float] = {}
        self._query_key: dict[int, list[Slices]] = {}
        self._no_query_key: dict[str, str] = {}
        self._sums: dict[str, dict[int, Tensor]] = {}

    def arm(self, hooks: Hooks) -> None:
        """Hook the optimizers for their next step."""
        self.forget()
        # Anew each time: parameters may have been replaced, moved, or given another precision.
        self._groups = group_parameters(self._model, self._blocks)
        num_ranks = 1 if self._ranks is None else self._ranks.stage_size
        self._shares = {id(p): share(p, num_ranks) for p in self._all()}
        self._strides = {group: stride_of([local(p) for p in params]) for group, params in self._groups.items()}
        if self._why_unreadable() is None and all(_is_usable(optimizer) for optimizer in self._optimizers):
            self._find_queries_and_keys()
            self._steppers = self._share_out()
            for stepper in self._steppers:
                before, after = partial(self._before_step, stepper), partial(self._after_step, stepper)
                hooks.around_step(stepper.optimizer, before, after)

    def collect(self) -> Partials:
        self._num_samples += 1
        if self._why_unreadable() is None:
            self._read_what_stood_still()
            self._leave_strangers_out()
            for group, params in self._groups.items():
                self._see_own("parameters", group, params, [local(p) for p in params])
            if "direction_cosine" in self.wanted:
                self._expect("direction")
                for group, params in self._groups.items():
                    self._compare(self._weights, "direction", group, group, params)
        groups = [*range(self._depth), OTHER, EMBEDDING, HEAD]
        found: dict[str, Partial] = {}
        for kind, by_group in self._sums.items():
            if by_group:
                values = stacked(by_group.get(group) for group in groups).double()
            else:
                values = torch.zeros(len(groups), dtype=torch.float64)
            found[kind] = Partial(values)
            found[kind + COUNT] = Partial(torch.tensor([group in by_group for group in groups], dtype=torch.float64))
            found[kind + ALL_HERE] = Partial(torch.tensor(1 / (self._ranks.size if self._ranks else 1)).double())
        return found

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        found = _Sums(sums)
        layers, scalars = dict[str, Tensor](), dict[str, Tensor | OnHost | float]()
        for kind, metric, total in (
            ("param", "param_norm", "total_param_norm"),
            ("grad", "grad_norm", "total_grad_norm"),
            ("update", "update_norm", "step_size"),
        ):
            if kind in found:
                layers[metric], scalars[total] = norm_of(found.blocks(kind)), norm_of(found.total(kind))
                for group, end in ((EMBEDDING, "embedding"), (HEAD, "head")):
                    if group in self._groups or self._ranks is not None:
                        scalars[f"{end}_{metric}"] = norm_of(found[kind][group])
        if "update" in found:
            layers["update_ratio"] = ratio_of(found.blocks("update"), found.blocks("before"))
        for metric, kinds in (
            ("update_alignment", ("update_dot", "update", "before")),
            ("gradient_alignment", ("grad_dot", "grad", "before")),
            ("direction_cosine", ("direction", "direction_now", "direction_before")),
            ("gradient_cosine", ("turn", "turn_now", "turn_before")),
        ):
            if all(kind in found for kind in kinds):
                layers[metric] = cosine_of(*(found.blocks(kind) for kind in kinds))
                scalars[metric] = cosine_of(*(found.total(kind) for kind in kinds))
        layers.pop("gradient_cosine", None)  # a run's alone
        lost_layers, lost_scalars = self._lost_to_strangers()
        for metric in lost_layers if self._has_no_known_update() else ():
            layers.pop(metric, None)
        for metric in lost_scalars:
            scalars.pop(metric, None)
        for metric in COMPARING if self._num_samples == 1 else ():
            layers.pop(metric, None)
            scalars.pop(metric, None)
        if "qk" in found:
            layers["grad_norm_qk"] = norm_of(found.blocks("qk"))
        floats = {name: value.float() for name, value in scalars.items() if isinstance(value, Tensor)}
        reading = Reading({name: value.float() for name, value in layers.items()}, scalars=dict(floats))
        if "param" in found:
            norm, growth, step = norm_of(found.total("param")), self._growth, self.step
            reading.scalars["norm_growth_exponent"] = OnHost(norm, partial(growth.exponent, step))
            reading.scalars["norm_growth_r2"] = OnHost(norm, partial(growth.r2, step))
        rates = (stepper.learning_rate for stepper in self._steppers if stepper.learning_rate is not None)
        if (rate := next(rates, None)) is not None:
            reading.scalars["learning_rate"] = rate
        return reading

    def how(self) -> str:
        sources = ("from a copy of the parameters", "from its state")
        trained = {id(p) for p in self._all()}
        steppers = [
            f"{type(s.optimizer).__name__}'s update {sources[self._follows(s)]}"
            for s in self._steppers
            if trained & _ids_of(s.optimizer)
        ]
        return ", ".join([f"{len(self._all())} tensors", *dict.fromkeys(steppers)])

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if (why := self._why_unreadable()) is not None:
            return dict.fromkeys(self.METRICS, why)
        missing = self._why_not_of_every_block() | self._why_no_ends()
        if self._num_samples == 1:
            missing |= dict.fromkeys(COMPARING, "this is the first sample: there is none before to compare with")
        if self._num_samples <= MIN_POINTS:
            missing |= dict.fromkeys(self.GROWTH, f"takes {MIN_POINTS} samples after the first")
        if (why := self._why_no_step()) is not None:
            return missing | dict.fromkeys(self.GRADIENTS + self.UPDATES, why)
        return missing | self._why_no_gradients() | self._why_no_updates()

    # Why not.

    def why_not_own(self, where: Where, why_unseen: str) -> str:
        without = "the block has no parameters of its own, or its parameters had no gradient"
        return self._why_unreadable() or (self._why_no_step() if where == "gradients" else None) or without

    def _why_unreadable(self) -> str | None:
        if self._ranks is None and any(is_sharded(p) for p in self._all()):
            # Their norms would take a collective, and one that only some ranks join hangs them all.
            return "the parameters are sharded over processes (DTensor): attach(process_group=...) on all of them"
        if any(part > 1 for part in self._shares.values()):
            return "the processes of attach(process_group=...) hold only some of the shards of the parameters"
        return None

    def _why_not_of_every_block(self) -> dict[str, str]:
        without = sum(block.number not in self._groups for block in self._blocks)
        reason = (
            f"{without} of {len(self._blocks)} blocks have no parameters of their own: what several share is counted in the "
            "first of them"
        )
        names = ("param_norm", *self.DIRECTION, *self.GRADIENTS_OF_BLOCKS, *self.UPDATES_OF_BLOCKS)
        return dict.fromkeys(names if without else (), reason)

    def _why_no_ends(self) -> dict[str, str]:
        head = output_head(self._model, self._blocks)
        if HEAD not in self._groups and head is not None and is_tied(self._model, head):
            return dict.fromkeys(_of("head"), "the output head is tied to the embedding, and counts as embedding")
        if self._ranks is not None:  # another stage of the pipeline may have what is not here
            return {}
        absent = [end for group, end in ((EMBEDDING, "embedding"), (HEAD, "head")) if group not in self._groups]
        return {name: f"found no {end} outside the blocks" for end in absent for name in _of(end)}

    def _why_no_step(self) -> str | None:
        if not self._optimizers:
            return "no optimizer was given to attach()"
        for optimizer in self._optimizers:
            if not _is_usable(optimizer):
                return f"{type(optimizer).__name__} is not a torch.optim.Optimizer with parameter groups"
        if not any(stepper.num_steps for stepper in self._steppers):
            return (
                "the optimizer given to attach() made no step since the last call of monitor.step(), or none that could be "
                "seen (is its step compiled?)"
            )
        return None

    def _why_no_gradients(self) -> dict[str, str]:
        missing = dict.fromkeys(self.QUERY_KEY, "; ".join(dict.fromkeys(self._no_query_key.values())))
        missing = {name: why for name, why in missing.items() if why}
        if any(s.has_closure and not self._follows(s) for s in self._steppers) and self._copy_bytes() > MAX_COPY_BYTES:
            missing["gradient_alignment"] = (
                "after a closure it takes a copy of the parameters, which are over the limit"
            )
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self._optimizers):
            missing["gradient_alignment"] = "the last gradient of LBFGS is one of parameters on the way"
        if any(p.grad is not None and p.grad.is_sparse for p in self._groups.get(EMBEDDING, ())):
            missing["embedding_grad_norm"] = "the gradient of the embedding is sparse"
        if not self._sums.get("grad"):
            names = (*self.GRADIENT_NORMS, *self.GRADIENT_DIRECTIONS, *self.QUERY_KEY, "update_alignment")
            missing |= dict.fromkeys(names, "no parameter had a gradient")
        elif without := sum(
            block.number in self._groups and block.number not in self._sums["grad"] for block in self._blocks
        ):
            reason = f"{without} of {len(self._blocks)} blocks had no gradient (are they frozen?)"
            missing = dict.fromkeys((*self.GRADIENTS_OF_BLOCKS, "update_alignment"), reason) | missing
        if late := sum(stepper.num_steps == 0 for stepper in self._steppers):
            reason = f"without the parameters of {late} of {len(self._steppers)} optimizers, which made no step"
            missing |= dict.fromkeys((*self.GRADIENT_NORMS, *self.GRADIENT_DIRECTIONS, *self.QUERY_KEY), reason)
        return missing

    def _why_no_updates(self) -> dict[str, str]:
        copied = [s for s in self._steppers if not self._follows(s)]
        if copied and self._copy_bytes() > MAX_COPY_BYTES:
            reason = (
                f"the update of {type(copied[0].optimizer).__name__} can be measured only with a copy of the parameters, "
                f"and {self._copy_bytes() / 2**20:.0f} MiB is over the limit of {MAX_COPY_BYTES / 2**20:.0f} MiB"
            )
            return dict.fromkeys(self.UPDATES, reason)
        if (num_steps := max(stepper.num_steps for stepper in self._steppers)) > 1:
            reason = f"the first of {num_steps} optimizer steps since the last call of monitor.step()"
            return dict.fromkeys(self.UPDATES, reason)
        num_strangers, num_trained = sum(self._strangers.values()), sum(p.requires_grad for p in self._all())
        if num_strangers < num_trained:
            reason = f"without {num_strangers} of {len(self._all())} parameters, which another optimizer must train: "
            reason += "give attach() all of them as a list"
        else:
            reason = (
                f"the optimizer given to attach() trains 0 of the model's {num_trained} parameters: it was made for "
            )
            reason += "another copy of the model, or trains copies of the parameters"
        layers, scalars = self._lost_to_strangers()
        return dict.fromkeys((*layers, *scalars), reason)

    # What is measured, and by whom.

    def _all(self) -> list[nn.Parameter]:
        return [p for params in self._groups.values() for p in params]

    def _share_out(self) -> list[_Stepper]:
        """Each parameter goes to the optimizer that trains it; those that none of them trains to the first.

        Of these, the ones that want a gradient are strangers: another optimizer may move them at any time.
        """
        owner = {id(p): i for i, o in enumerate(self._optimizers) for g in o.param_groups for p in g["params"]}
        steppers = [_Stepper(optimizer, {}) for optimizer in self._optimizers]
        for group, params in self._groups.items():
            for p in params:
                if steppers:
                    steppers[owner.get(id(p), 0)].groups.setdefault(group, []).append(p)
            if num_strangers := sum(p.requires_grad and id(p) not in owner for p in params):
                self._strangers[group] = num_strangers
        return steppers

    def _lost_to_strangers(self) -> tuple[list[str], list[str]]:
        """The metrics of blocks, of which some or all are unknown, and those of the run that are."""
        layers = list(self.UPDATES_OF_BLOCKS) if any(group >= 0 for group in self._strangers) else []
        scalars = ["step_size", "update_alignment"] if self._strangers.keys() - {EMBEDDING} else []
        ends = ((EMBEDDING, "embedding_update_norm"), (HEAD, "head_update_norm"))
        return layers, scalars + [metric for group, metric in ends if group in self._strangers]

    def _has_no_known_update(self) -> bool:
        """Whether each block has a stranger, or no parameters of its own."""
        without = {block.number for block in self._blocks if block.number not in self._groups}
        return {*range(self._depth)} <= self._strangers.keys() | without

    def _find_queries_and_keys(self) -> None:
        for block in self._blocks if "grad_norm_qk" in self.wanted else ():
            found = "found no self-attention" if block.attention is None else queries_and_keys(block.attention)
            if isinstance(found, str):
                self._no_query_key[block.name] = f"{found} ({block.name})" if block.attention is None else found
            else:
                self._query_key[block.number] = found

    def _follows(self, stepper: _Stepper) -> bool:
        """Whether the update follows from the optimizer's state; not in half precision, where much is rounded away."""
        params = [p for own in stepper.groups.values() for p in own]
        if not all(p.dtype in (torch.float32, torch.float64) for p in params):
            return False
        if follows_from_gradient(stepper.optimizer):
            return not stepper.has_closure and not any(p.grad is not None and p.grad.is_sparse for p in params)
        return follows_from_state(stepper.optimizer)

    @property
    def _wants_updates(self) -> bool:
        """After a closure, what gradients align with comes from the update."""
        return bool(self.wanted & {*self.UPDATES, "gradient_alignment"})

    def _copy_bytes(self) -> int:
        copied = [p for s in self._steppers if not self._follows(s) for own in s.groups.values() for p in own]
        return sum(local(p).numel() * p.element_size() for p in copied)

    # The hooks.

    def _before_step(self, stepper: _Stepper, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stepper.is_stepping = True
        if stepper.num_steps:
            return
        # Gradients here and not after: many loops clear them before they call monitor.step(). Only a closure makes them
        # anew inside the step.
        stepper.has_closure = any(closure is not None for closure in (*args[1:2], kwargs.get("closure")))
        stepper.squares = self._read_parameters(stepper.groups, "before")
        if not stepper.has_closure:
            self._read_gradients(stepper)
            stepper.moving = _moving(stepper)  # here, too: a hook on the step may clear the gradients
        if not self._wants_updates:
            pass
        elif self._follows(stepper):
            if follows_from_gradient(stepper.optimizer):
                self._predict(stepper)
        elif self._copy_bytes() <= MAX_COPY_BYTES:
            stepper.copies = {group: [local(p).clone() for p in params] for group, params in stepper.groups.items()}
        # A schedule may have changed it by the time that monitor.step() is called.
        lr = stepper.optimizer.param_groups[0].get("lr")
        stepper.learning_rate = lr.detach().clone() if isinstance(lr, Tensor) else lr

    def _after_step(self, stepper: _Stepper, *_: Any) -> None:
        # Where an optimizer's step calls that of the class it extends, torch calls the hooks of both.
        if not stepper.is_stepping:
            return
        stepper.is_stepping = False
        stepper.num_steps += 1
        if stepper.num_steps > 1:
            return
        if stepper.has_closure:
            self._read_gradients(stepper)
            stepper.moving = _moving(stepper)
        self._read_parameters(stepper.groups)
        if self._wants_updates and follows_from_state(stepper.optimizer) and self._follows(stepper):
            self._rebuild(stepper)
        else:
            self._subtract(stepper)
        stepper.copies = {}

    def _read_what_stood_still(self) -> None:
        """The parameters whose optimizer made no step, all of them where none did."""
        if not self._steppers:
            self._read_parameters(self._groups)
        for stepper in self._steppers:
            if stepper.num_steps == 0:
                self._read_parameters(stepper.groups)
                if "update" in self._sums:
                    self._read_parameters(stepper.groups, "before")
                    self._stand_still(stepper)

    def _stand_still(self, stepper: _Stepper) -> None:
        """A group of which nothing moves has an update of zero; to others it adds nothing."""
        for kind in ("update", "update_dot"):
            for group, params in stepper.groups.items():
                self._sum(kind, group, torch.zeros((), dtype=torch.float64, device=params[0].device))

    def _leave_strangers_out(self) -> None:
        """A group of which something may move unseen has no known update, and so has the whole: not in any rank."""
        for kind in ("update", "update_dot") if "update" in self._sums else ():
            for group in self._strangers:
                device = self._groups[group][0].device
                self._sum(kind, group, torch.full((), torch.nan, dtype=torch.float64, device=device))

    def _read_parameters(self, groups: Mapping[int, list[nn.Parameter]], kind: str = "param") -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for group, params in groups.items():
            squares_P = squares([local(p) for p in params])
            self._add(kind, group, params, squares_P)
            found |= {id(p): square for p, square in zip(params, squares_P.unbind(), strict=True)}
        return found

    def _read_gradients(self, stepper: _Stepper) -> None:
        scale = getattr(stepper.optimizer, "grad_scale", None)  # a fused optimizer unscales the gradients itself
        self._expect("grad", "grad_dot", "qk", "turn", "turn_now", "turn_before")
        for group, params in stepper.groups.items():
            params = _with_gradient(params)
            if params:
                gradients = _gradients(params)
                by = 1.0 if scale is None else scale.to(gradients[0].device).double()
                unscaled = gradients if scale is None else [gradient / by for gradient in gradients]
                self._see_own("gradients", group, params, unscaled)
                self._add("grad", group, params, squares(gradients) / by**2)
                if not stepper.has_closure and "gradient_alignment" in self.wanted:
                    self._add("grad_dot", group, params, dots(gradients, [local(p) for p in params]) / by)
                if "gradient_cosine" in self.wanted:
                    self._compare(self._gradients, "turn", group, (group, id(stepper.optimizer)), params, gradients)
            self._read_queries_and_keys(group, params, scale)

    def _see_own(self, where: Where, group: int, params: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
        """Of a block; each part of it by itself whose values as many processes hold."""
        if group >= 0 and self.own.of(where):
            shares = self._shares_of(params)
            for share in dict.fromkeys(shares):
                part = [widened(t) for t, of in zip(tensors, shares, strict=True) if of == share and t.numel()]
                if part:
                    self.own.see(where, group, part, share=share)

    def _read_queries_and_keys(self, group: int, params: list[nn.Parameter], scale: Tensor | None) -> None:
        own = {id(p) for p in params}
        for slices in self._query_key.get(group, ()):
            gradient = slices.parameter.grad
            if id(slices.parameter) in own and gradient is not None and (parts := list(slices.of(gradient))):
                squared = squares(parts).sum().unsqueeze(0)
                by = 1.0 if scale is None else scale.to(squared.device).double()
                self._add("qk", group, [slices.parameter], squared / by**2)

    def _predict(self, stepper: _Stepper) -> None:
        self._stand_still(stepper)
        for group, params in stepper.groups.items():
            for setting, stepping in by_setting(stepper.optimizer, _with_gradient(params)):
                self._add_update(group, before_sgd(stepper.optimizer, setting, stepping, self._shares_of(stepping)))

    def _rebuild(self, stepper: _Stepper) -> None:
        self._stand_still(stepper)
        for group, params in stepper.groups.items():
            state = stepper.optimizer.state
            moved = [p for p in params if id(p) in stepper.moving and "exp_avg" in state.get(p, ())]
            for setting, stepped in by_setting(stepper.optimizer, moved):
                gradients = _gradients(stepped) if stepper.has_closure else None
                w_w_P = torch.stack([stepper.squares[id(p)] for p in stepped])
                shares = self._shares_of(stepped)
                self._add_update(group, after_adam(stepper.optimizer, setting, stepped, shares, w_w_P, gradients))

    def _subtract(self, stepper: _Stepper) -> None:
        if stepper.copies:
            self._stand_still(stepper)
        for group, copies in stepper.copies.items():
            params = stepper.groups[group]
            for p, before in zip(params, copies, strict=True):
                change = local(p) - before
                self._add("update", group, [p], squares([change]))
                self._add("update_dot", group, [p], dots([change], [before]))
                is_here = p.grad is not None and not p.grad.is_sparse
                if stepper.has_closure and is_here and not isinstance(stepper.optimizer, torch.optim.LBFGS):
                    self._add("grad_dot", group, [p], dots(_gradients([p]), [before]))

    # Sums.

    def _compare(
        self,
        coordinates: Coordinates,
        kind: str,
        group: int,
        key: object,
        params: list[nn.Parameter],
        tensors: list[Tensor] | None = None,
    ) -> None:
        if group == EMBEDDING:
            return
        self._expect(kind, f"{kind}_now", f"{kind}_before")
        tensors = [local(p) for p in params] if tensors is None else tensors
        products = coordinates.compare(key, tensors, self._shares_of(params), self._strides[group])
        if products is not None:
            for name, value in zip((kind, f"{kind}_now", f"{kind}_before"), products, strict=True):
                self._sum(name, group, value)

    def _add_update(self, group: int, update: Update) -> None:
        self._sum("update", group, update.squared)
        self._sum("update_dot", group, update.dot)
        if update.gradient_dot is not None:
            self._sum("grad_dot", group, update.gradient_dot)

    def _add(self, kind: str, group: int, params: Sequence[nn.Parameter], values_P: Tensor) -> None:
        shares = self._shares_of(params)
        if len(set(shares)) == 1:
            self._sum(kind, group, values_P.sum() * shares[0])
        else:
            self._sum(kind, group, torch.stack([v * part for v, part in zip(values_P, shares, strict=True)]).sum())

    def _sum(self, kind: str, group: int, value: Tensor) -> None:
        found = self._sums.setdefault(kind, {})
        found[group] = found[group] + value.to(found[group].device) if group in found else value

    def _expect(self, *kinds: str) -> None:
        """What is looked for and not found is nothing, which is for ranks to know."""
        for kind in kinds:
            self._sums.setdefault(kind, {})

    def _shares_of(self, params: Sequence[nn.Parameter]) -> list[float]:
        return [self._shares[id(p)] for p in params]


class _Sums:
    """Sums of all processes by kind and group; NaN where nothing was measured, or some process gave none."""

    def __init__(self, sums: Mapping[str, Tensor]) -> None:
        self._sums = sums

    def __contains__(self, kind: str) -> bool:
        return kind in self._sums

    def __getitem__(self, kind: str) -> Tensor:
        return torch.where(self._is_known(kind), self._sums[kind], torch.nan)

    def blocks(self, kind: str) -> Tensor:
        return self[kind][:-NUM_ENDS]

    def total(self, kind: str) -> Tensor:
        """Over all groups but the embeddings."""
        is_known = self._is_known(kind)
        total = self._sums[kind][:-NUM_ENDS].sum() + self._sums[kind][OTHER] + self._sums[kind][HEAD]
        return torch.where(is_known.any(), total, torch.nan)

    def _is_known(self, kind: str) -> Tensor:
        device = self._sums[kind].device
        is_whole = self._sums[kind + ALL_HERE].to(device, non_blocking=True) > 1 - 1e-6
        return is_whole & (self._sums[kind + COUNT].to(device, non_blocking=True) > 0)


def why_trains_nothing(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """What is wrong where the optimizers have no parameter of the model, nor what could be a copy of its parameters.

    Such copies are wider, beside parameters in half precision, or flat, of many parameters at once (ZeRO, Megatron).
    """
    inner = [_inner(optimizer) for optimizer in optimizers]
    params = [p for p in model.parameters() if p.requires_grad]
    if not params or not inner or not all(_is_usable(optimizer) for optimizer in inner):
        return None
    theirs = {id(p): p for optimizer in inner for group in optimizer.param_groups for p in group["params"]}
    may_be_copies = all(p.ndim <= 1 for p in theirs.values()) or any(p.dtype.itemsize < 4 for p in params)
    if may_be_copies or any(id(p) in theirs for p in model.parameters()):
        return None
    subject = "the optimizer trains" if len(inner) == 1 else "the optimizers train"
    return (
        f"{subject} 0 of the model's {len(params)} parameters, so no updates are measured; was it made for another copy of "
        "the model? Give attach() the optimizer of this one, several as a list"
    )


def _moving(stepper: _Stepper) -> frozenset[int]:
    return frozenset(id(p) for params in stepper.groups.values() for p in _with_gradient(params))


def _with_gradient(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in params if p.grad is not None and not p.grad.is_sparse]


def _gradients(params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [local(p.grad) for p in params if p.grad is not None]


def _of(end: str) -> list[str]:
    return [name for name in ParameterProbe.METRICS if name.startswith(f"{end}_")]


def _ids_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """Of the parameters that it trains."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A wrapper, such as Accelerate's, steps through the optimizer inside it."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _is_usable(optimizer: object) -> TypeGuard[torch.optim.Optimizer]:
    return isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "param_groups")
