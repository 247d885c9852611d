"""Many recordings, in several processes where that pays."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tsemon.errors import TsemonError
from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load_file
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.services.replay.replaying import Replayed, replay
from tsemon_server.services.replay.sources import Source, find_sources
from tsemon_server.services.replay.stored import StoredRun, find_run
from tsemon_server.store import Store

SHARE = 100
"""Recordings that a process takes at a time: it needs a second to start, in which another reads twenty of them."""


def replay_files(paths: Sequence[Path], rules: Path | None, jobs: int, share: int = SHARE) -> Iterator[Replayed | str]:
    """What came of each recording in these files and folders; a sentence where one cannot be read.

    Raises InvalidRecording where something that was named is not there, and InvalidRules.
    """
    sources = find_sources(paths)
    shares = [sources[start : start + share] for start in range(0, len(sources), share)]
    evaluator_of(rules)  # wrong rules are told once
    work = partial(_replay_share, rules)
    if min(jobs, len(shares)) <= 1:
        yield from (result for part in shares for result in work(part))
        return
    # Not forked: the threads of NumPy would not survive it.
    with ProcessPoolExecutor(min(jobs, len(shares)), multiprocessing.get_context("spawn")) as pool:
        yield from (result for results in pool.map(work, shares) for result in results)


def evaluator_of(rules: Path | None) -> Evaluator:
    """Of the rules in a file, else of those that come with tsemon; without those that the clock reads."""
    chosen = PACK if rules is None else load_file(rules)
    return Evaluator([rule for rule in chosen if rule.on == "frame"])


def _replay_share(rules: Path | None, sources: Sequence[Source]) -> list[Replayed | str]:
    evaluator = evaluator_of(rules)
    return [_replay_one(source, evaluator) for source in sources]


def _replay_one(source: Source, evaluator: Evaluator) -> Replayed | str:
    try:
        return replay(source.open(), evaluator)
    except TsemonError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or source.paths[0]}: cannot be read: {error.strerror or error}"


def replay_stored(database: str, runs: Sequence[str], rules: Path | None) -> Iterator[Replayed]:
    """What comes of runs that a database holds, by id or name. Raises UnknownRun and StoreError."""
    evaluator, store = evaluator_of(rules), Store(database, migrate=False)
    try:
        with store.read() as reader:
            yield from (replay(StoredRun(reader, find_run(reader, run)), evaluator) for run in runs)
    finally:
        store.close()
