"""All experiments, in the order of the index.

Each module has an EXPERIMENT, and `run(quick)`, which returns its result. A long one has `trials(quick)` instead, parts that
do not depend on each other, and `result(quick, found)`, which takes the numbers of each trial.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from tsemon.lab.reproduce.result import Experiment, Trial

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
    """The trials of an experiment; none if it runs as a whole."""
    module = module_of(name)
    found: Mapping[str, Trial] = module.trials(quick) if hasattr(module, "trials") else {}
    return found
