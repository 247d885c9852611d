"""From the checkpoints of a folder, one after the other, to what a run keeps of each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tsemon.errors import InvalidArgument
from tsemon.probes.depth import stacks_of
from tsemon.probes.growth import NormGrowth
from tsemon.probes.saturation import SCALE
from tsemon.tools.scanning.comparing import Comparison, Sums, compare
from tsemon.tools.scanning.finding import Candidate, find_candidates
from tsemon.tools.scanning.grouping import Groups, group_names
from tsemon.tools.scanning.inputs import Source
from tsemon.tools.scanning.opening import NotACheckpoint, Weights, open_weights, read_json, step_in
from tsemon.tools.scanning.running import MEASURED, Limit, Runner, build_runner, why_not
from tsemon.wire import MAX_STEP, Array, Frame

BLOCKS_MEASURED = ("param_norm", "direction_cosine", "checkpoint_distance", "checkpoint_alignment", "nonfinite_entries")
OF_ATTENTION = ("positions_attended", "saturated_positions_attended")
OF_THE_MODEL = ("saturation", *OF_ATTENTION, *MEASURED)
BESIDE_ANOTHER = ("direction_cosine", "checkpoint_distance", "checkpoint_alignment", "checkpoint_gap_steps")
"""What a first checkpoint does not have."""


@dataclass(frozen=True, slots=True)
class Record:
    """What was measured of one checkpoint. NaN is what is not defined, as anything beside a first one."""

    step: int
    name: str
    time: float
    """When it was saved, in seconds since 1970."""
    gap_steps: int | None
    """Steps since the checkpoint that it is compared with."""
    scalars: Mapping[str, float]
    layers: Mapping[str, Sequence[float]]
    heads: Mapping[str, Sequence[Sequence[float]]]

    def frame(self, not_measured: Mapping[str, str] | None) -> Frame:
        """Its step is its place in the stream, too: whatever is deleted or added later, the same has the same."""
        layers = {name: Array.of(values) for name, values in self.layers.items()}
        heads = {
            name: Array.of((value for row in rows for value in row), (len(rows), len(rows[0])))
            for name, rows in self.heads.items()
        }
        return Frame(self.step, self.step, self.time, self.scalars, layers, heads, not_measured)


class Scanner:
    """Looks into a folder, once or again and again; each checkpoint is read once, in the order of steps.

    Two are open at a time, tensor by tensor, and where saturation is measured the model besides.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pattern: re.Pattern[str] | None = None,
        blocks: Sequence[str] = (),
        source: Source | None = None,
        on_begin: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self.folder = folder
        self.groups: Groups | None = None
        """Of the first checkpoint; the others have the same."""
        self.left_out: dict[str, str] = {}
        """Files that were not read, each with the reason."""
        self.not_measured: dict[str, str] = {}
        self.saturation_on: str | None = None
        """What the model was run on, in words; None where it was not."""
        self.saturation_inputs: str | None = None
        """A digest of the same: another text may have the same name."""
        self._pattern = pattern
        self._stacks = blocks
        self._source = source
        self._on_begin = on_begin
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._seen: dict[Candidate, object] = {}
        self._before: tuple[int, Weights] | None = None
        self._growth = NormGrowth()
        self._runner: Runner | None = None

    def look(self) -> Iterator[Record]:
        """The checkpoints that are new, or whole now."""
        for step, candidate in self._new():
            self._seen[candidate] = candidate.stamp  # before it is read, and whoever asked may not come back
            try:
                record = self._read(step, candidate)
            except NotACheckpoint as error:
                self._leave_out(candidate, str(error))
            else:
                self.left_out.pop(candidate.name, None)
                yield record

    def close(self) -> None:
        if self._before is not None:
            self._before[1].close()
            self._before = None

    def _new(self) -> list[tuple[int, Candidate]]:
        """Not seen before, or changed since, by step."""
        found: list[tuple[int, Candidate]] = []
        for candidate in find_candidates(self.folder, self._pattern):
            if self._seen.get(candidate) == candidate.stamp:
                continue
            try:
                found.append((self._step_of(candidate), candidate))
            except NotACheckpoint as error:
                self._leave_out(candidate, str(error))
                self._seen[candidate] = candidate.stamp
        # Of one step the first is read: the shortest name is the one without `ema`, `best` or another folder in it.
        return sorted(found, key=lambda pair: (pair[0], len(pair[1].name), pair[1].name))

    def _step_of(self, candidate: Candidate) -> int:
        if candidate.problem is not None:
            raise NotACheckpoint(candidate.problem)
        if candidate.step is not None:
            return candidate.step
        if self._pattern is not None:
            raise NotACheckpoint(
                f"--step-pattern {self._pattern.pattern!r} finds no step from 0 to 2^53 - 1 in its name"
            )
        step = step_in(read_json(candidate.folder / "trainer_state.json"))
        if step is None:
            weights = open_weights([*candidate.paths])
            step = step_in(weights.extra)
            weights.close()
        if step is None or step > MAX_STEP:
            raise NotACheckpoint(
                "neither its name nor the file tells a step from 0 to 2^53 - 1; --step-pattern says where the name has it"
            )
        return step

    def _leave_out(self, candidate: Candidate, why: str) -> None:
        self.left_out[candidate.name] = why

    def _read(self, step: int, candidate: Candidate) -> Record:
        if self._before is not None and step <= self._before[0]:
            if step == self._before[0]:
                raise NotACheckpoint(f"another checkpoint of step {step} was read already")
            raise NotACheckpoint(f"its step {step} is before {self._before[0]}, which was read already")
        self._on_begin(candidate.name)
        weights = open_weights([*candidate.paths])
        try:
            groups = self._check(weights)
            comparison = self._compared(groups, weights)
            limit = self._limit(groups, weights, candidate)
            if weights.is_overwritten:
                raise NotACheckpoint("it was overwritten while it was read")
        except BaseException:
            weights.close()
            raise
        gap = None if self._before is None else step - self._before[0]
        record = self._record(step, candidate, gap, comparison, limit)
        self.close()
        self._before = step, weights
        return record

    def _check(self, weights: Weights) -> Groups:
        """The groups of the first checkpoint; the others must have the same parameters."""
        shapes = {name: entry.shape for name, entry in weights.entries.items()}
        if self.groups is None:
            groups = group_names(weights.entries, self._stacks)
            if not groups.members:
                raise NotACheckpoint("it holds no parameters: no tensor of floats with more than one entry")
            self.groups = groups
            self._shapes = {name: shapes[name] for name in groups.names}
            if not groups.blocks:
                reason = "no stack of blocks was found among the names of the parameters; --blocks names one"
                self.not_measured |= dict.fromkeys(BLOCKS_MEASURED, reason)
            return groups
        for name, shape in self._shapes.items():
            if shapes.get(name) != shape:
                had = f"has {shapes[name]}" if name in shapes else "is not there"
                raise NotACheckpoint(f"it is of another model than the first: {name} had the shape {shape} and {had}")
        return self.groups

    def _compared(self, groups: Groups, weights: Weights) -> Comparison:
        if self._before is not None and self._before[1].is_overwritten:
            self.close()  # it would be compared with itself
        try:
            comparison = compare(groups, weights, None if self._before is None else self._before[1])
        except (OSError, RuntimeError, ValueError) as error:
            raise NotACheckpoint(f"its tensors cannot be read, is it half-written? {error}") from error
        if self._before is not None and self._before[1].is_overwritten:  # meanwhile
            return self._compared(groups, weights)
        return comparison

    def _limit(self, groups: Groups, weights: Weights, candidate: Candidate) -> Limit | None:
        if self._source is None:
            self.not_measured |= dict.fromkeys(OF_THE_MODEL, "it was not asked for (--no-saturation)")
            return None
        if "saturation" in self.not_measured:
            return None
        try:
            if self._runner is None:
                folders = [candidate.folder, candidate.folder.parent, self.folder]
                self._runner = build_runner(
                    [f for f in folders if f.is_relative_to(self.folder)], weights, self._source
                )
                if len(self._runner.blocks) != len(groups.blocks):
                    raise InvalidArgument(
                        f"the model has {len(self._runner.blocks)} blocks, the checkpoint's names {len(groups.blocks)}"
                    )
                if (own := stacks_of(self._runner.blocks)).sizes != groups.stacks.sizes:
                    raise InvalidArgument(
                        f"the model's stacks have {own.sizes} blocks, the checkpoint's stacks {groups.stacks.sizes}"
                    )
            limit = self._runner.near_the_limit(weights)
            self.saturation_on, self.saturation_inputs = self._runner.on, self._runner.inputs_digest
            if not limit.positions:
                self.not_measured |= dict.fromkeys(OF_ATTENTION, "the model does not give the weights of its attention")
            self.not_measured |= limit.not_measured
            return limit
        except Exception as error:  # whatever somebody's model raises
            self.not_measured |= dict.fromkeys(OF_THE_MODEL, why_not(error))
            self._runner = None
            return None

    def _record(
        self, step: int, candidate: Candidate, gap: int | None, comparison: Comparison, limit: Limit | None
    ) -> Record:
        total = comparison.total
        norm = torch.tensor(total.norm, dtype=torch.float64)
        scalars = {
            "total_param_norm": total.norm,
            "direction_cosine": total.direction_cosine,
            "checkpoint_distance": total.distance,
            "checkpoint_alignment": total.alignment,
            "checkpoint_gap_steps": math.nan if gap is None else float(gap),
            "nonfinite_entries": float(total.num_nonfinite),
            "norm_growth_exponent": self._growth.exponent(step, norm).item(),
            "norm_growth_r2": self._growth.r2(step, norm).item(),
        }
        for end, sums in (("embedding", comparison.embedding), ("head", comparison.head)):
            if sums is not None:
                scalars[f"{end}_param_norm"] = sums.norm
                scalars["nonfinite_entries"] += sums.num_nonfinite if end == "embedding" else 0
        layers: dict[str, Sequence[float]] = {}
        if comparison.blocks:
            layers = dict(zip(BLOCKS_MEASURED, zip(*map(_of_block, comparison.blocks), strict=True), strict=True))
        heads: dict[str, Sequence[Sequence[float]]] = {}
        if limit is not None:
            layers |= {name: values.tolist() for name, values in limit.frame.layers.items()}
            layers["saturation"] = limit.saturation
            scalars["saturation_scale"] = SCALE
            if limit.positions:
                heads = dict(zip(OF_ATTENTION, (limit.positions, limit.saturated_positions), strict=True))
                layers |= {name: [sum(row) / len(row) for row in rows] for name, rows in heads.items()}
                if len({len(row) for row in limit.positions}) > 1:  # an encoder may have other heads than its decoder
                    heads = {}
            heads |= {name: _rows(values) for name, values in limit.frame.heads.items()}
        if gap is None:
            scalars = {name: value for name, value in scalars.items() if name not in BESIDE_ANOTHER}
            layers = {name: values for name, values in layers.items() if name not in BESIDE_ANOTHER}
        time = max((modified for modified, _ in candidate.stamp), default=0) / 1e9
        return Record(step, candidate.name, time, gap, scalars, layers, heads)


def _rows(values: Array) -> list[list[float]]:
    flat, (num_rows, size) = values.tolist(), values.shape
    return [flat[row * size : (row + 1) * size] for row in range(num_rows)]


def _of_block(sums: Sums | None) -> tuple[float, ...]:
    if sums is None:  # it shares the parameters of an earlier one
        return (math.nan,) * len(BLOCKS_MEASURED)
    return sums.norm, sums.direction_cosine, sums.distance, sums.alignment, float(sums.num_nonfinite)
