"""Listen to the optimizers: norms of parameters, gradients and updates per block, and the directions that they take.

Of each kind of number there is one sum per group of parameters: the blocks, and the ends that `groups` names. The update
of Adam, AdamW and SGD follows from the optimizer's own state. Other optimizers need a copy of the parameters, for one
step, and get it only where it is small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from tsemon.measures.growth import MIN_POINTS
from tsemon.measures.linear import widened
from tsemon.measures.parameters import cosine_of, dots, joined, norm_of, ratio_of, squares
from tsemon.measures.sums import Partial, Partials, known
from tsemon.measures.updates import Update
from tsemon.probes.clipping import BeforeClipping
from tsemon.probes.coordinates import Coordinates, Products, stride_of
from tsemon.probes.discovery import Block, has_compiled
from tsemon.probes.group_sums import GroupSums, MergedSums
from tsemon.probes.groups import (
    EMBEDDING,
    HEAD,
    group_parameters,
    is_sharded,
    is_tied,
    local,
    output_head,
    share,
    sub_steps,
)
from tsemon.probes.growth import NormGrowth
from tsemon.probes.hooks import Hooks
from tsemon.probes.part import Part
from tsemon.probes.query_key import Slices, Stretches, queries_and_keys, without_values
from tsemon.probes.ranks import Ranks
from tsemon.probes.reading import OnHost, Reading
from tsemon.probes.untrained import Untrained
from tsemon.probes.updates import after_adam, before_sgd, by_setting, follows_from_gradient, follows_from_state
from tsemon.quantity import Where

MAX_COPY_BYTES = 256 * 2**20
"""Largest parameters that are copied for one step to measure an update that does not follow from the optimizer's state."""

COMPARING = ("direction_cosine", "gradient_cosine", "untrained_parameters")
"""Metrics that need an earlier sample."""
WIDE = torch.float32, torch.float64
UNKNOWN_ROWS = (
    "it is not known yet which rows of a packed projection make queries and keys: the values in attention show it, within a "
    "few samples"
)
NO_SUB_STEP = {
    "attention_param_norm": "found no attention with parameters in the blocks",
    "feedforward_param_norm": "found no parameters in the blocks besides attention and norms",
}
MAX_AT_ONCE = 2**22
"""Maximum number of entries of parameters whose updates are rebuilt together, in twice their memory. One may be larger."""


@dataclass(slots=True)
class _Stepper:
    """One optimizer, the parameters that it trains, and what it did in this sample."""

    optimizer: torch.optim.Optimizer
    groups: dict[int, list[nn.Parameter]]
    without_gradient: frozenset[int] = frozenset()
    """Frozen parameters of no optimizer, by their id. If they have a gradient, it is left over and plays no part."""
    is_stepping: bool = False
    num_steps: int = 0
    sums_before: GroupSums | None = None
    """The sums before anything of its step was added."""
    has_closure: bool = False
    places: dict[int, int] = field(default_factory=dict)
    """Place of each parameter in `squares_P`, by its id."""
    squares_P: Tensor | None = None
    """|w|^2 of each parameter before the step."""
    moving: frozenset[int] = frozenset()
    """The parameters that the step changes, by their id."""
    copies: dict[int, list[Tensor]] = field(default_factory=dict)
    learning_rate: Tensor | float | None = None

    def with_gradient(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in _with_gradient(params) if id(p) not in self.without_gradient]


class ParameterProbe(Part):
    """Sums per group at one optimizer step, gathered in the hooks around it."""

    PARAMETERS = ("param_norm", "total_param_norm", "embedding_param_norm", "head_param_norm")
    SUB_STEPS = ("attention_param_norm", "feedforward_param_norm")
    GROWTH = ("norm_growth_exponent", "norm_growth_r2")
    DIRECTION = ("direction_cosine",)
    QUERY_KEY = ("grad_norm_qk",)
    GRADIENT_NORMS = ("grad_norm", "total_grad_norm", "embedding_grad_norm", "head_grad_norm")
    CLIPPED_NORMS = ("clipped_grad_norm", "total_clipped_grad_norm")
    GRADIENT_DIRECTIONS = ("gradient_alignment", "gradient_cosine")
    GRADIENTS = (*GRADIENT_NORMS, *CLIPPED_NORMS, *GRADIENT_DIRECTIONS, *QUERY_KEY, "learning_rate")
    UPDATES = (
        "update_norm",
        "update_ratio",
        "trained_update_ratio",
        "update_alignment",
        "step_size",
        "embedding_update_norm",
        "head_update_norm",
    )
    UNTRAINED = ("untrained_parameters",)
    METRICS = PARAMETERS + SUB_STEPS + GROWTH + DIRECTION + GRADIENTS + UPDATES + UNTRAINED
    GRADIENTS_OF_BLOCKS = ("grad_norm", "clipped_grad_norm", *QUERY_KEY, "gradient_alignment")
    UPDATES_OF_BLOCKS = ("update_norm", "update_ratio", "trained_update_ratio", "update_alignment")

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
        self._untrained = Untrained()
        self._growth = NormGrowth()
        self._sub_steps: dict[str, set[int]] = {}
        """Ids of parameters of attention and of the feed-forward part."""
        self._found_query_key: dict[int, list[Slices] | str] = {}
        """By block. It holds as long as the block has these parameters."""
        self._value_rows: dict[nn.Module, Tensor] = {}
        """Masks of the rows of packed projections that make values, as a pass showed."""
        self._num_samples = 0
        self._saw_change = False
        """True if gradients changed before the optimizer's step and processes may have averaged them."""

    def forget(self) -> None:
        self._groups: dict[int, list[nn.Parameter]] = {}
        self._steppers: list[_Stepper] = []
        self._strangers: dict[int, list[nn.Parameter]] = {}
        self._forgotten: list[nn.Parameter] | None = None
        """They have a gradient, but no optimizer; None before a step. Without embeddings, because many rows of these may
        stand still, and without half precision, which rounds small steps of another optimizer away."""
        self._strides: dict[int, int] = {}
        self._shares: dict[int, float] = {}
        self._query_key: dict[int, list[Slices]] = {}
        """By the parameter's id."""
        self._no_query_key: dict[str, str] = {}
        self._doubted_query_key: dict[int, str] = {}
        """By block: why the rows that are read may not be the ones that make queries and keys."""
        self._sparse = set[int]()
        """Groups but the embeddings with a sparse gradient, whose norm would take a sum over equal indices first."""
        self._sums = GroupSums(self._depth, torch.device("cpu"))

    def arm(self, hooks: Hooks) -> None:
        """Hook the optimizers for their next step."""
        self.forget()
        # Anew each time: parameters may have been replaced, moved, or given another precision.
        self._groups = group_parameters(self._model, self._blocks)
        self._sub_steps = sub_steps(self._blocks) if self.wanted.intersection(self.SUB_STEPS) else {}
        devices = [p.device for p in self._all()]
        device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        self._sums = GroupSums(self._depth, device)
        self._weights.begin()
        self._gradients.begin()
        self._before_clipping = BeforeClipping(self._model, self._query_key)
        num_ranks = 1 if self._ranks is None else self._ranks.stage_size
        self._shares = {id(p): share(p, num_ranks) for p in self._all()}
        self._strides = {group: stride_of([local(p) for p in params]) for group, params in self._groups.items()}
        if self._why_unreadable() is None and all(_is_usable(optimizer) for optimizer in self._optimizers):
            self._find_queries_and_keys()
            if self.wanted & {*self.GRADIENT_NORMS, *self.QUERY_KEY}:
                self._before_clipping.listen(hooks, self._all())
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
                self._compare(self._weights, "direction", self._groups)
            if self._sums.groups("qk"):
                self._sums.make_unknown("qk", self._doubted_query_key)
        partials = self._sums.collect(1 / (self._ranks.size if self._ranks else 1))
        if self._forgotten is not None:
            partials["untrained"] = Partial(self._untrained.count(self._forgotten), "max")
        return partials

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        found = MergedSums(sums)
        layers, scalars = dict[str, Tensor](), dict[str, Tensor | OnHost | float]()
        for kind, metric, total in (
            ("param", "param_norm", "total_param_norm"),
            ("grad", "grad_norm", "total_grad_norm"),
            ("clipped", "clipped_grad_norm", "total_clipped_grad_norm"),
            ("update", "update_norm", "step_size"),
        ):
            if kind in found:
                layers[metric], scalars[total] = norm_of(found.blocks(kind)), norm_of(found.total(kind))
                for group, end in ((EMBEDDING, "embedding"), (HEAD, "head")):
                    if group in self._groups or self._ranks is not None:
                        scalars[f"{end}_{metric}"] = norm_of(found[kind][group])
        for metric in self.SUB_STEPS:
            if metric in found:
                layers[metric] = norm_of(found.blocks(metric))
        if "update" in found:
            layers["update_ratio"] = ratio_of(found.blocks("update"), found.blocks("before"))
            layers["trained_update_ratio"] = ratio_of(found.blocks("update"), found.blocks("trained"))
        for metric, kinds in (
            ("update_alignment", ("update_dot", "update", "before")),
            ("gradient_alignment", ("grad_dot", "clipped", "before")),
            ("direction_cosine", ("direction", "direction_now", "direction_before")),
            ("gradient_cosine", ("turn", "turn_now", "turn_before")),
        ):
            if all(kind in found for kind in kinds):
                layers[metric] = cosine_of(*(found.blocks(kind) for kind in kinds))
                scalars[metric] = cosine_of(*(found.total(kind) for kind in kinds))
        layers.pop("gradient_cosine", None)  # a run's alone
        if "untrained" in sums:
            scalars["untrained_parameters"] = known(sums["untrained"])
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
        if "grad" in found and (self._before_clipping.num_unseen or self._before_clipping.may_be_averaged_later):
            norms = torch.stack([floats["total_grad_norm"], floats["total_clipped_grad_norm"]])
            reading.scalars["total_grad_norm"] = OnHost(norms, self._known_norm)
        return reading

    def _known_norm(self, norms: Tensor) -> Tensor | None:
        """`norms`: before clipping, and after. None where NaN would say that the gradient is not finite, though it is."""
        is_unknown = bool(norms[0].isnan() & norms[1].isfinite())
        self._saw_change = is_unknown and self._before_clipping.may_be_averaged_later
        return None if is_unknown else norms[0]

    def how(self) -> str:
        sources = ("from a copy of the parameters", "from its state")
        trained = {id(p) for p in self._all()}
        steppers = [
            f"{type(s.optimizer).__name__}'s update {sources[self._follows(s)]}"
            for s in self._steppers
            if trained & _ids_of(s.optimizer)
        ]
        rows = (
            f"the usual rows of queries and keys in {num} blocks, unchecked" if (num := self._num_unchecked()) else ""
        )
        return ", ".join(filter(None, [f"{len(self._all())} tensors", *dict.fromkeys(steppers), rows]))

    def _num_unchecked(self) -> int:
        """Number of blocks with a packed projection whose rows are known by its name alone."""
        checked = {None, *self._value_rows}
        return sum(
            number not in self._doubted_query_key
            and not isinstance(found, str)
            and any(slices.projection not in checked for slices in found)
            for number, found in self._found_query_key.items()
        )

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if (why := self._why_unreadable()) is not None:
            return dict.fromkeys(self.METRICS, why)
        missing = self._why_not_of_every_block() | self._why_no_ends()
        missing |= {metric: why for metric, why in NO_SUB_STEP.items() if metric not in self._sub_steps}
        if self._num_samples == 1:
            missing |= dict.fromkeys(COMPARING, "this is the first sample: there is none before to compare with")
        if self._num_samples <= MIN_POINTS:
            missing |= dict.fromkeys(self.GROWTH, f"takes {MIN_POINTS} samples after the first")
        if (why := self._why_no_step()) is not None:
            return missing | dict.fromkeys(self.GRADIENTS + self.UPDATES + self.UNTRAINED, why)
        return missing | self._why_no_gradients() | self._why_no_updates()

    # Why not.

    def why_not_own(self, where: Where, why_unseen: str) -> str:
        if (why := self._why_unreadable()) is not None:
            return why
        missing = self._why_not_of_every_block().get("param_norm", "the block has no parameters")
        if where == "gradients":
            return self._why_no_step() or self._why_no_gradients().get("grad_norm") or missing
        return missing

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
        names = ("param_norm", *self.SUB_STEPS, *self.DIRECTION, *self.GRADIENTS_OF_BLOCKS, *self.UPDATES_OF_BLOCKS)
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
            compiled = ", or a compiled one, which cannot be seen" if has_compiled() else ""
            return f"the optimizer given to attach() made no step since the last call of monitor.step(){compiled}"
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
        if self._sparse:
            reason = f"{len(self._sparse)} groups of parameters have a sparse gradient"
            missing |= dict.fromkeys((*self.GRADIENT_NORMS[:2], *self.GRADIENT_DIRECTIONS), reason)
        if not self._sums.groups("clipped"):
            missing |= dict.fromkeys((*self.GRADIENTS[:-1], "update_alignment"), "no parameter had a gradient")
        elif reason := self._why_no_gradient_of_every_block():
            missing = dict.fromkeys((*self.GRADIENTS_OF_BLOCKS, "update_alignment"), reason) | missing
        if late := sum(stepper.num_steps == 0 for stepper in self._steppers):
            reason = f"without the parameters of {late} of {len(self._steppers)} optimizers, which made no step"
            missing |= dict.fromkeys(self.GRADIENTS[:-1], reason)
        if (why := self._why_not_before_clipping()) is not None:
            missing = dict.fromkeys(self.QUERY_KEY, why) | missing | dict.fromkeys(self.GRADIENT_NORMS, why)
        doubts = "; ".join(dict.fromkeys(self._doubted_query_key.values()))
        return dict.fromkeys(self.QUERY_KEY, doubts) | missing if doubts else missing

    def _why_no_gradient_of_every_block(self) -> str:
        without = {b.number for b in self._blocks if b.number in self._groups} - self._sums.groups("clipped")
        frozen = without & self._frozen()
        reasons = [self._why_frozen(len(frozen))] if frozen else []
        if moving := len(without - frozen):
            reasons.append(
                f"{moving} of {len(self._blocks)} blocks had no gradient when the optimizer stepped, although they are not "
                "frozen: the loss did not depend on them, or their gradients had been cleared"
            )
        return "; ".join(reasons)

    def _why_frozen(self, num_frozen: int) -> str:
        return f"{num_frozen} of {len(self._blocks)} blocks are frozen: none of their parameters requires a gradient"

    def _frozen(self) -> set[int]:
        return {n for n, params in self._groups.items() if n >= 0 and not any(p.requires_grad for p in params)}

    def _why_not_before_clipping(self) -> str | None:
        if num_unseen := self._before_clipping.num_unseen:
            return (
                f"{num_unseen} gradients that the optimizer got were not made by a backward pass since the last call of "
                "monitor.step(), so their norms before clipping are not known; clipped_grad_norm has their norms as the "
                "optimizer got them"
            )
        if self._saw_change:
            return (
                "gradients changed after the backward pass in one of several processes, and whether they were clipped or "
                "averaged over processes is not known: clip with torch.nn.utils.clip_grad_norm_, or give attach() the "
                "DistributedDataParallel module itself"
            )
        return None

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
        frozen = len(self._frozen())
        missing = {"trained_update_ratio": self._why_frozen(frozen)} if frozen else {}
        if not self._strangers:
            return missing
        num_strangers, num_trained = sum(map(len, self._strangers.values())), sum(p.requires_grad for p in self._all())
        if num_strangers < num_trained:
            reason = (
                f"without {num_strangers} of {len(self._all())} parameters, which the optimizer given to attach() does "
            )
            reason += "not train: if another optimizer trains them, give attach() all optimizers as a list"
        else:
            reason = (
                f"the optimizer given to attach() trains 0 of the model's {num_trained} parameters: it was made for "
            )
            reason += "another copy of the model, or trains copies of the parameters"
        layers, scalars = self._lost_to_strangers()
        return missing | dict.fromkeys((*layers, *scalars), reason)

    # What is measured, and by whom.

    def _all(self) -> list[nn.Parameter]:
        return [p for params in self._groups.values() for p in params]

    def _share_out(self) -> list[_Stepper]:
        """Each parameter goes to the optimizer that trains it; those that none of them trains to the first.

        Of these, the ones that want a gradient are strangers: another optimizer may move them at any time.
        """
        owner = {id(p): i for i, o in enumerate(self._optimizers) for g in o.param_groups for p in g["params"]}
        frozen = frozenset(id(p) for p in self._all() if not p.requires_grad and id(p) not in owner)
        steppers = [_Stepper(optimizer, {}, frozen) for optimizer in self._optimizers]
        for group, params in self._groups.items():
            for p in params:
                if steppers:
                    steppers[owner.get(id(p), 0)].groups.setdefault(group, []).append(p)
            if strangers := [p for p in params if p.requires_grad and id(p) not in owner]:
                self._strangers[group] = strangers
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
        if "grad_norm_qk" not in self.wanted:
            return
        for block in self._blocks:
            own = {id(p) for p in self._groups.get(block.number, ())}
            found = self._found_query_key.get(block.number, "")
            if isinstance(found, str) or not all(id(slices.parameter) in own for slices in found):
                found = self._queries_and_keys(block)
            if isinstance(found, str):
                self._no_query_key[block.name] = f"{found} ({block.name})" if block.attention is None else found
            else:
                for slices in found:
                    if id(slices.parameter) in own:
                        self._query_key.setdefault(id(slices.parameter), []).append(slices)

    def _queries_and_keys(self, block: Block) -> list[Slices] | str:
        found = "found no self-attention" if block.attention is None else queries_and_keys(block.attention)
        if not isinstance(found, str):
            found = without_values(found, self._value_rows)
        self._found_query_key[block.number] = found
        return found

    def queries_and_keys(self, block: Block) -> list[Slices] | str:
        """The parameters that make queries and keys, in the rows that a pass has shown, or why they are unknown."""
        found = self._queries_and_keys(block)
        return self._doubted_query_key.get(block.number, found)

    # What `ValueRows` shows.

    def learn_values(self, block: Block, projection: nn.Module, is_value_R: Tensor, *, now: bool) -> None:
        self._value_rows[projection] = is_value_R
        before = self._found_query_key.pop(block.number, "")
        if not now or isinstance(before, str):
            return
        found = self._found_query_key[block.number] = without_values(before, self._value_rows)
        if isinstance(found, str):
            self._doubted_query_key[block.number] = found
        elif self._before_clipping.has_read and _stretches(found) != _stretches(before):
            self._doubted_query_key[block.number] = UNKNOWN_ROWS
        else:
            own = {id(slices.parameter) for slices in before} & self._query_key.keys()
            self._query_key |= {key: [slices for slices in found if id(slices.parameter) == key] for key in own}

    def doubt_values(self, block: Block) -> None:
        if not isinstance(self._found_query_key.get(block.number), str):
            self._doubted_query_key[block.number] = UNKNOWN_ROWS

    def _follows(self, stepper: _Stepper) -> bool:
        """Whether the update follows from the optimizer's state; not in half precision, where much is rounded away."""
        params = [p for own in stepper.groups.values() for p in own]
        if not all(p.dtype in WIDE for p in params):
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
        if stepper.sums_before is not None:  # the step raised, and is called again
            self._sums = stepper.sums_before
        stepper.sums_before = self._sums.copy()
        # Gradients here and not after: many loops clear them before they call monitor.step(). Only a closure makes them
        # anew inside the step.
        stepper.has_closure = any(closure is not None for closure in (*args[1:2], kwargs.get("closure")))
        stepper.squares_P = self._read_parameters(stepper.groups, "before")
        stepper.places = {id(p): place for place, p in enumerate(_in_order(stepper.groups)[1])}
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
        self._before_clipping.forget([p for params in stepper.groups.values() for p in params])
        self._read_parameters(stepper.groups)
        if self._wants_updates and follows_from_state(stepper.optimizer) and self._follows(stepper):
            self._rebuild(stepper)
        else:
            self._subtract(stepper)
        stepper.copies, stepper.sums_before = {}, None

    def _read_what_stood_still(self) -> None:
        """The parameters whose optimizer made no step, all of them where none did."""
        if not self._steppers:
            self._read_parameters(self._groups)
        for stepper in self._steppers:
            if stepper.num_steps == 0:
                self._read_parameters(stepper.groups)
                if self._sums.groups("update"):
                    self._read_parameters(stepper.groups, "before")
                    self._stand_still(stepper)

    def _stand_still(self, stepper: _Stepper) -> None:
        """Set the update to zero in groups where nothing moves."""
        for kind in ("update", "update_dot"):
            self._sums.add_nothing(kind, stepper.groups)

    def _leave_strangers_out(self) -> None:
        """Make the update unknown, on all ranks, in groups where something may move unseen."""
        for kind in ("update", "update_dot") if self._sums.groups("update") else ():
            self._sums.make_unknown(kind, self._strangers)

    def _read_parameters(self, groups: Mapping[int, list[nn.Parameter]], kind: str = "param") -> Tensor | None:
        """Return |w|^2 of each parameter, None without parameters."""
        of_groups, params = _in_order(groups)
        if not params:
            return None
        squares_P = squares([local(p) for p in params])
        self._add(kind, of_groups, params, squares_P)
        parts = {"trained": {id(p) for p in params if p.requires_grad}} if kind == "before" else self._sub_steps
        for part, own in parts.items():
            self._sums.expect(part)
            if chosen := [i for i, p in enumerate(params) if id(p) in own]:
                self._add(part, [of_groups[i] for i in chosen], [params[i] for i in chosen], _at(squares_P, chosen))
        return squares_P

    def _read_gradients(self, stepper: _Stepper) -> None:
        scale = getattr(stepper.optimizer, "grad_scale", None)  # a fused optimizer unscales the gradients itself
        self._sums.expect("grad", "clipped", "grad_dot", "qk", "turn", "turn_now", "turn_before")
        for group, params in stepper.groups.items():
            self._leave_sparse_out(group, [p for p in params if id(p) not in stepper.without_gradient])
        groups = {group: own for group, params in stepper.groups.items() if (own := stepper.with_gradient(params))}
        if self._forgotten is None:
            strangers = (self._strangers[group] for group in self._strangers.keys() - {EMBEDDING})
            self._forgotten = [p for params in strangers for p in _with_gradient(params) if p.dtype in WIDE]
        of_groups, params = _in_order(groups)
        if not params:
            return
        gradients = _gradients(params)
        by = 1.0 if scale is None else scale.to(gradients[0].device).double()
        if self.own.of("gradients"):
            for group, own in groups.items():
                unscaled = _gradients(own) if scale is None else [gradient / by for gradient in _gradients(own)]
                self._see_own("gradients", group, own, unscaled)
        self._add_norms(of_groups, params, by)
        if not stepper.has_closure and "gradient_alignment" in self.wanted:
            self._add("grad_dot", of_groups, params, dots(gradients, [local(p) for p in params]) / by)
        if "gradient_cosine" in self.wanted:
            self._compare(self._gradients, "turn", groups, stepper)

    def _add_norms(self, of_groups: Sequence[int], params: Sequence[nn.Parameter], by: Tensor | float) -> None:
        norms = self._before_clipping.norms_of(params)
        for kind, norms_P in (("grad", norms.before_P), ("clipped", norms.now_P)):
            self._add(kind, of_groups, params, norms_P.square() / by**2)
        if norms.owners:
            of_parts, owners = [of_groups[i] for i in norms.owners], [params[i] for i in norms.owners]
            self._add("qk", of_parts, owners, norms.parts_Q.square() / by**2)

    def _leave_sparse_out(self, group: int, params: Sequence[nn.Parameter]) -> None:
        if group != EMBEDDING and any(p.grad is not None and p.grad.is_sparse for p in params):
            self._sparse.add(group)
            for kind in ("grad", "clipped", "turn"):
                self._sums.make_unknown(kind, [group])

    def _see_own(self, where: Where, group: int, params: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
        """Of a block; each part of it by itself whose values as many processes hold."""
        if group >= 0 and self.own.of(where):
            shares = self._shares_of(params)
            for share in dict.fromkeys(shares):
                part = [widened(t) for t, of in zip(tensors, shares, strict=True) if of == share and t.numel()]
                if part:
                    self.own.see(where, group, part, share=share)

    def _predict(self, stepper: _Stepper) -> None:
        self._stand_still(stepper)
        of_groups, params = _in_order(stepper.groups)
        group_of = {id(p): group for group, p in zip(of_groups, params, strict=True)}
        for setting, of_setting in by_setting(stepper.optimizer, _with_gradient(params)):
            for stepping in _in_parts(of_setting):
                self._add_update(group_of, stepping, before_sgd(stepper.optimizer, setting, stepping))

    def _rebuild(self, stepper: _Stepper) -> None:
        self._stand_still(stepper)
        assert stepper.squares_P is not None
        of_groups, params = _in_order(stepper.groups)
        group_of = {id(p): group for group, p in zip(of_groups, params, strict=True)}
        state = stepper.optimizer.state
        moved = [p for p in params if id(p) in stepper.moving and "exp_avg" in state.get(p, ())]
        for setting, of_setting in by_setting(stepper.optimizer, moved):
            for stepped in _in_parts(of_setting):
                gradients = _gradients(stepped) if stepper.has_closure else None
                w_w_P = _at(stepper.squares_P, [stepper.places[id(p)] for p in stepped])
                self._add_update(group_of, stepped, after_adam(stepper.optimizer, setting, stepped, w_w_P, gradients))

    def _subtract(self, stepper: _Stepper) -> None:
        if stepper.copies:
            self._stand_still(stepper)
        for group, copies in stepper.copies.items():
            params, of_group = stepper.groups[group], [group] * len(copies)
            changes = torch._foreach_sub([local(p) for p in params], copies)
            self._add("update", of_group, params, squares(changes))
            self._add("update_dot", of_group, params, dots(changes, copies))
            if stepper.has_closure and not isinstance(stepper.optimizer, torch.optim.LBFGS):
                before = {id(p): copy for p, copy in zip(params, copies, strict=True)}
                if moved := stepper.with_gradient(params):
                    values_P = dots(_gradients(moved), [before[id(p)] for p in moved])
                    self._add("grad_dot", [group] * len(moved), moved, values_P)

    # Sums.

    def _compare(
        self, coordinates: Coordinates, kind: str, groups: Mapping[int, list[nn.Parameter]], of: _Stepper | None = None
    ) -> None:
        """Compare parameters, or the gradients `of` an optimizer, with the sample before."""
        self._sums.expect(kind, f"{kind}_now", f"{kind}_before")
        found: dict[int, Products] = {}
        for group in groups.keys() - {EMBEDDING}:
            params = groups[group]
            tensors = [local(p) for p in params] if of is None else _gradients(params)
            key = group if of is None else (group, id(of.optimizer))
            products = coordinates.compare(key, tensors, self._shares_of(params), self._strides[group])
            if products is not None:
                found[group] = products
        for name, values in zip(
            (kind, f"{kind}_now", f"{kind}_before"), zip(*found.values(), strict=True), strict=False
        ):
            self._sums.add(name, list(found), joined(values))

    def _add_update(self, group_of: Mapping[int, int], params: Sequence[nn.Parameter], update: Update) -> None:
        of_groups = [group_of[id(p)] for p in params]
        self._add("update", of_groups, params, update.squared_P)
        self._add("update_dot", of_groups, params, update.dot_P)
        if update.gradient_dot_P is not None:
            self._add("grad_dot", of_groups, params, update.gradient_dot_P)

    def _add(self, kind: str, of_groups: Sequence[int], params: Sequence[nn.Parameter], values_P: Tensor) -> None:
        self._sums.add(kind, of_groups, values_P, self._shares_of(params))

    def _shares_of(self, params: Sequence[nn.Parameter]) -> list[float]:
        return [self._shares[id(p)] for p in params]


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


def usable(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that make the steps, unwrapped, without objects that have no parameter groups."""
    return [inner for inner in map(_inner, optimizers) if _is_usable(inner)]


def _in_order(groups: Mapping[int, list[nn.Parameter]]) -> tuple[list[int], list[nn.Parameter]]:
    """All parameters, and the group of each."""
    pairs = [(group, p) for group, params in groups.items() for p in params]
    return [group for group, _ in pairs], [p for _, p in pairs]


def _in_parts(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    part, num = list[nn.Parameter](), 0
    for p in params:
        if part and num + p.numel() > MAX_AT_ONCE:
            yield part
            part, num = [], 0
        part.append(p)
        num += p.numel()
    if part:
        yield part


def _at(values_P: Tensor, places: Sequence[int]) -> Tensor:
    """Some of the values, in this order."""
    if list(places) == list(range(len(values_P))):
        return values_P
    return values_P.index_select(0, torch.tensor(places).to(values_P.device, non_blocking=True))


def _moving(stepper: _Stepper) -> frozenset[int]:
    return frozenset(id(p) for params in stepper.groups.values() for p in stepper.with_gradient(params))


def _with_gradient(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in params if p.grad is not None and not p.grad.is_sparse]


def _gradients(params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [local(p.grad) for p in params if p.grad is not None]


def _of(end: str) -> list[str]:
    return [name for name in ParameterProbe.METRICS if name.startswith(f"{end}_")]


def _stretches(found: Sequence[Slices]) -> list[Stretches]:
    return [slices.stretches for slices in found]


def _ids_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """Of the parameters that it trains."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A wrapper, such as Accelerate's, steps through the optimizer inside it."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _is_usable(optimizer: object) -> TypeGuard[torch.optim.Optimizer]:
    return isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "param_groups")
