"""All experiments, in the order of the index.

Each module has an EXPERIMENT, and `run(quick)`, which returns its result; `run(quick, seed)` if one draw says too little. A
long one has `trials(quick)` instead, parts that do not depend on each other, and `result(quick, found)`, which takes the
numbers of each trial.
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
from tsemon.lab.reproduce.seeds import numbers_of, over_seeds

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


def trials_of(name: str, quick: bool) -> Mapping[str, Trial]:
    """The trials of an experiment; none if it runs as a whole. Seed 0 is no trial: the page has its plots."""
    module = module_of(name)
    if hasattr(module, "trials"):
        found: Mapping[str, Trial] = module.trials(quick)
        return found
    seeds = range(1, 1 if quick else module.EXPERIMENT.num_seeds)
    return {f"seed {seed}": partial(_of_seed, name, quick, seed) for seed in seeds}


def result_of(name: str, quick: bool, found: Mapping[str, Numbers]) -> Result:
    """The result of an experiment, whose trials have found these numbers."""
    module = module_of(name)
    if hasattr(module, "trials"):
        result: Result = module.result(quick, found)
        return result
    first: Result = module.run(quick)
    return over_seeds(first, list(found.values())) if module.EXPERIMENT.num_seeds > 1 else first


def _of_seed(name: str, quick: bool, seed: int) -> Numbers:
    return numbers_of(module_of(name).run(quick, seed))
