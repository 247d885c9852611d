"""`tsemon reproduce`: the papers' experiments, measured by tsemon's own probes, and written down beside what they say."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from tsemon.catalogue import nearest
from tsemon.errors import InvalidArgument
from tsemon.reproduce.report import Experiment, write, write_index
from tsemon.reproduce.result import Result

CLASSIC = "Classic Transformers (arXiv 2312.06182)"
EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(name="bert", title="Token similarity at depth 100", source=f"{CLASSIC}, Figure 1"),
        Experiment(name="escalation", title="Which step of a block escalates", source=f"{CLASSIC}, Figure 2"),
        Experiment(name="estimates", title="The rate, and two estimates of it", source=f"{CLASSIC}, Figure 3"),
        Experiment(name="pre-norm", title="Why pre-norm models escape", source=f"{CLASSIC}, Figure 4"),
        Experiment(name="de-escalation", title="How much must be given up", source=f"{CLASSIC}, Figure 5"),
        Experiment(name="deep-vit", title="A vision transformer of 80 blocks", source=f"{CLASSIC}, Figure 6"),
        Experiment(name="deep-transformer-xl", title="A deep Transformer-XL", source=f"{CLASSIC}, Figure 7"),
        Experiment(name="concentration", title="How eta concentrates", source=f"{CLASSIC}, Figure 8"),
        Experiment(
            name="norm-growth",
            title="How parameter norms grow",
            source="Parameter Norm Growth (arXiv 2010.09697), Figures 1 to 5",
        ),
        Experiment(
            name="oversmoothing",
            title="Models that sharpen and models that smooth",
            source="Transformer Oversmoothing (arXiv 2401.04301), Tables 1 to 4 and Figure 4",
        ),
        Experiment(
            name="value-residual",
            title="Whose values attention mixes",
            source="Value Residual Learning (arXiv 2410.17897), Figures 1, 2, 7 and 12",
        ),
    )
}
Run = Callable[[bool], Result]


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
    failed: BaseException | None = None
    with ProcessPoolExecutor(max_workers=jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run, name, folder, quick=quick): name for name in names}
        for done in as_completed(running):
            if (error := done.exception()) is None:
                tell(f"{running[done]}: {done.result()}")
            else:
                tell(f"{running[done]}: failed: {error}")
                failed = failed or error
    index = write_index(folder)
    if failed is not None:
        raise failed
    return index


def run(name: str, folder: Path, *, quick: bool) -> Path:
    """One experiment, here. Returns the path of its page."""
    os.environ.pop(
        "TSEMON_SERVER", None
    )  # what is recorded is read back from its spool, and belongs to nobody's server
    torch.set_num_threads(1)  # small matrices: a second thread costs more than it brings
    torch.manual_seed(0)
    module = importlib.import_module(f"tsemon.reproduce.{name.replace('-', '_')}")
    start = time.perf_counter()
    result: Result = module.run(quick)
    return write(result, EXPERIMENTS[name], folder, quick=quick, seconds=time.perf_counter() - start)
