"""Run experiments in processes of their own. An interrupted run continues with the trials that it has not finished."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import cache, partial
from multiprocessing import active_children, get_context
from pathlib import Path

import torch

import tsemon
from tsemon.catalogue import nearest
from tsemon.errors import InvalidArgument
from tsemon.lab.reproduce.experiments import EXPERIMENTS, result_of, trials_of
from tsemon.lab.reproduce.report import write, write_index

Progress = Callable[[int, int], None]
"""Takes the number of trials and pages that are done, and the number of all."""


def reproduce(
    names: Collection[str],
    folder: Path,
    *,
    quick: bool,
    jobs: int,
    seed: int = 0,
    tell: Callable[[str], None] = print,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Run these experiments, `jobs` parts of them at a time, each in a process with one thread, and write their pages.

    The numbers of each trial are kept in `folder/.trials` until its page is written: an interrupted run of the same code
    can continue. Each `seed` stands for seeds of its own.
    Returns the path of the index. Raises InvalidArgument for an unknown name and for a folder that cannot be made; an
    error in an experiment is raised when all others are done.
    """
    for name in names:
        if name not in EXPERIMENTS:
            raise InvalidArgument(f"no experiment named {name!r}; {nearest(name, list(EXPERIMENTS))}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise InvalidArgument(f"expected a folder to write pages to, got {folder}: {refused.strerror}") from refused
    names = list(dict.fromkeys(names))
    work = _Work(names, folder, quick, seed)
    others = active_children()
    tell(f"{work.describe()}, {jobs} at a time")
    with ProcessPoolExecutor(max_workers=jobs, mp_context=get_context("spawn")) as pool:
        try:
            failed = _run_all(
                pool,
                names,
                work,
                partial(run_trial, folder=folder, quick=quick, seed=seed),
                partial(run, folder=folder, quick=quick, seed=seed),
                tell,
                progress,
            )
        except BaseException:  # Ctrl-C, for one: the pool would first run everything that waits
            for worker in active_children():
                if worker not in others:
                    worker.terminate()
            raise
    index = write_index(folder, list(EXPERIMENTS))
    if failed is not None:
        raise failed
    return index


def _run_all(
    pool: ProcessPoolExecutor,
    names: Collection[str],
    work: _Work,
    run_trial: Callable[[str, str], None],
    run: Callable[[str], Path],
    tell: Callable[[str], None],
    progress: Progress,
) -> BaseException | None:
    """Returns the first error."""
    failed: BaseException | None = None
    running = {pool.submit(run_trial, name, key): (name, key) for name, key in work.missing()}
    pages = {pool.submit(run, name): name for name in names if work.is_ready(name)}
    progress(*work.progress)
    for trial in as_completed(running):
        name, key = running[trial]
        if (error := trial.exception()) is not None:
            tell(f"{name}, {key}: failed: {error}")
            failed = failed or error
            continue
        work.finish(name, key)
        progress(*work.progress)
        if work.is_ready(name):
            pages[pool.submit(run, name)] = name
    for page in as_completed(pages):
        if (error := page.exception()) is None:
            tell(f"{pages[page]}: {page.result()}")
        else:
            tell(f"{pages[page]}: failed: {error}")
            failed = failed or error
        work.num_pages += 1
        progress(*work.progress)
    return failed


class _Work:
    """The trials of some experiments, and which of them are done."""

    def __init__(self, names: Collection[str], folder: Path, quick: bool, seed: int) -> None:
        every = {name: list(trials_of(name, quick, seed)) for name in names}
        self._missing = {
            name: [key for key in keys if not _kept(folder, name, key, quick, seed).exists()]
            for name, keys in every.items()
        }
        self._num_trials = sum(map(len, every.values()))
        self.num_pages = 0

    def missing(self) -> list[tuple[str, str]]:
        return [(name, key) for name, keys in self._missing.items() for key in keys]

    def is_ready(self, name: str) -> bool:
        """Whether only the page is left to do."""
        return not self._missing[name]

    def finish(self, name: str, key: str) -> None:
        self._missing[name].remove(key)

    @property
    def progress(self) -> tuple[int, int]:
        num_known = self._num_trials - len(self.missing())
        return num_known + self.num_pages, self._num_trials + len(self._missing)

    def describe(self) -> str:
        num_known, total = self.progress
        return f"{total} parts to run" + (f", {num_known} of them known from an earlier run" if num_known else "")


def run_trial(name: str, key: str, folder: Path, *, quick: bool, seed: int = 0) -> None:
    """One trial, here. Its numbers are kept for the page."""
    _prepare()
    start = time.perf_counter()
    numbers = trials_of(name, quick, seed)[key]()
    path = _kept(folder, name, key, quick, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is whole: an interrupted run must not leave half of it.
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"seconds": time.perf_counter() - start, "numbers": numbers}))
    part.replace(path)


def run(name: str, folder: Path, *, quick: bool, seed: int = 0) -> Path:
    """One experiment, here, with the trials that are not known yet. Returns the path of its page."""
    _prepare()
    kept = {key: _kept(folder, name, key, quick, seed) for key in trials_of(name, quick, seed)}
    for key, path in kept.items():
        if not path.exists():
            run_trial(name, key, folder, quick=quick, seed=seed)
    start = time.perf_counter()
    found = {key: json.loads(path.read_text()) for key, path in kept.items()}
    result = result_of(name, quick, seed, {key: body["numbers"] for key, body in found.items()})
    seconds = time.perf_counter() - start + sum(body["seconds"] for body in found.values())
    page = write(result, EXPERIMENTS[name], folder, quick=quick, seed=seed, seconds=seconds)
    if kept:
        shutil.rmtree(next(iter(kept.values())).parent)
        with suppress(OSError):  # trials of another experiment are in it
            (folder / ".trials").rmdir()
    return page


def _prepare() -> None:
    # What is recorded is read back from its spool, and belongs on nobody's server.
    os.environ.pop("TSEMON_SERVER", None)
    torch.set_num_threads(1)  # small matrices: a second thread costs more than it brings
    torch.manual_seed(0)


def _kept(folder: Path, name: str, key: str, quick: bool, seed: int) -> Path:
    size = ("-quick" if quick else "") + (f"-{seed}" if seed else "")
    return folder / ".trials" / f"{name}{size}-{_code()}" / f"{key}.json"


@cache
def _code() -> str:
    """A digest of this package: other code may find other numbers."""
    root = Path(tsemon.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
