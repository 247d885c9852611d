"""`tsemon reproduce`: the papers' experiments, measured by tsemon's own probes, and written down beside what they say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import torch

from tsemon.catalogue import nearest
from tsemon.errors import InvalidArgument
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
from tsemon.lab.reproduce.report import write, write_index
from tsemon.lab.reproduce.result import Experiment, Result

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
"""Each has an EXPERIMENT, and `run(quick)`, which gives its result."""
EXPERIMENTS: Mapping[str, Experiment] = {module.EXPERIMENT.name: module.EXPERIMENT for module in MODULES}


def available() -> list[str]:
    """The experiments that this machine can run."""
    has_gpu = torch.cuda.is_available()
    return [name for name, experiment in EXPERIMENTS.items() if has_gpu or not experiment.needs_gpu]


def reproduce(
    names: Collection[str], folder: Path, *, quick: bool, jobs: int, tell: Callable[[str], None] = print
) -> Path:
    """Run these experiments, each in a process of its own with one thread, and write them down in `folder`.

    Returns the path of the index. Raises InvalidArgument for a name that there is not; an error in an experiment is
    raised once the others are written down.
    """
    for name in names:
        if name not in EXPERIMENTS:
            raise InvalidArgument(f"no experiment named {name!r}; {nearest(name, list(EXPERIMENTS))}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise InvalidArgument(f"expected a folder to write pages to, got {folder}: {refused.strerror}") from refused
    tell(f"{len(names)} to run, {min(jobs, len(names))} at a time")
    failed: BaseException | None = None
    with ProcessPoolExecutor(max_workers=jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run, name, folder, quick=quick): name for name in names}
        for done in as_completed(running):
            if (error := done.exception()) is None:
                tell(f"{running[done]}: {done.result()}")
            else:
                tell(f"{running[done]}: failed: {error}")
                failed = failed or error
    index = write_index(folder, list(EXPERIMENTS))
    if failed is not None:
        raise failed
    return index


def run(name: str, folder: Path, *, quick: bool) -> Path:
    """One experiment, here. Returns the path of its page."""
    # What is recorded is read back from its spool, and belongs on nobody's server.
    os.environ.pop("TSEMON_SERVER", None)
    torch.set_num_threads(1)  # small matrices: a second thread costs more than it brings
    torch.manual_seed(0)
    module = next(module for module in MODULES if name == module.EXPERIMENT.name)
    start = time.perf_counter()
    result: Result = module.run(quick)
    return write(result, module.EXPERIMENT, folder, quick=quick, seconds=time.perf_counter() - start)
