"""All experiments, in the order of the index.

Each module has an EXPERIMENT, and `run(quick, seed)`, which returns its result. A long one has `trials(quick, seed)`
instead, parts that do not depend on each other, and `result(quick, seed, found)`, which takes the numbers of each trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import ModuleType

import torch

from tsemon.lab.reproduce import (
    bert,
    concentration,
    de_escalation,
    deep_transformer_xl,
    deep_vit,
    escalation,
    estimates,
    norm_growth,
    oversmoothing,
    pre_norm,
    value_residual,
    value_residual_82m,
)
from tsemon.lab.reproduce.result import Experiment, Numbers, Result, Trial
from tsemon.lab.reproduce.seeds import numbers_of, over_seeds, seeds_of

MODULES: tuple[ModuleType, ...] = (
    bert,
    escalation,
    estimates,
    pre_norm,
    de_escalation,
    deep_vit,
    deep_transformer_xl,
    concentration,
    norm_growth,
    oversmoothing,
    value_residual,
    value_residual_82m,
)
EXPERIMENTS: Mapping[str, Experiment] = {module.EXPERIMENT.name: module.EXPERIMENT for module in MODULES}


def available() -> list[str]:
    """The experiments that this machine can run."""
    has_gpu = torch.cuda.is_available()
    return [name for name, experiment in EXPERIMENTS.items() if has_gpu or not experiment.needs_gpu]


def module_of(name: str) -> ModuleType:
    return next(module for module in MODULES if name == module.EXPERIMENT.name)


def trials_of(name: str, quick: bool, seed: int) -> Mapping[str, Trial]:
    """The trials of an experiment; none if it runs as a whole. The first seed is no trial: the page has its plots."""
    module = module_of(name)
    if hasattr(module, "trials"):
        found: Mapping[str, Trial] = module.trials(quick, seed)
        return found
    return {f"seed {one}": partial(_of_seed, name, quick, one) for one in _seeds(module, quick, seed)[1:]}


def result_of(name: str, quick: bool, seed: int, found: Mapping[str, Numbers]) -> Result:
    """The result of an experiment, whose trials have found these numbers."""
    module = module_of(name)
    if hasattr(module, "trials"):
        result: Result = module.result(quick, seed, found)
        return result
    start = _seeds(module, quick, seed)[0]
    first: Result = module.run(quick, start)
    return over_seeds(first, list(found.values()), start) if module.EXPERIMENT.num_seeds > 1 else first


def _seeds(module: ModuleType, quick: bool, seed: int) -> range:
    return seeds_of(seed, 1 if quick else module.EXPERIMENT.num_seeds)


def _of_seed(name: str, quick: bool, seed: int) -> Numbers:
    return numbers_of(module_of(name).run(quick, seed))
