"""Cost of the scalars of every step in a server, and of opening a run with a million steps.

    python benchmarks/history.py [--steps N] [--scalars N] [--database URL]

The rows go into the store as bodies of a training do, and settle as they would within a minute. The scalars imitate a noisy
training: a trend and noise of a tenth, in float32 as a loss is, or with --double in float64, whose bits are all noise.
Times are CPU times of this process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from tsemon.wire import Frame, Rows
from tsemon_answers.series import SeriesQuery
from tsemon_server.services.queries import service
from tsemon_server.store import Store

ROWS = 256
"""Rows of one body."""
GAP = 2000
"""Steps from one frame to the next."""
SETTLE_EVERY = 2**16
"""Steps after which frames and rows settle."""
OPENED = 8
"""Charts of a page."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--scalars", type=int, default=20)
    parser.add_argument("--double", action="store_true", help="scalars of float64")
    parser.add_argument("--database", help="an empty database; SQLite by default")
    options = parser.parse_args()
    names = ["loss", *(f"own/{number}" for number in range(1, options.scalars))]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "history.db")
        with closing(Store(options.database or f"sqlite:///{file}")) as store:
            run_id = registered(store)
            began = time.process_time()
            for number, (frames, rows) in enumerate(
                bodies(options.steps, names, np.float64 if options.double else np.float32)
            ):
                with store.write() as writer:
                    writer.frames.add_rows(run_id, 1, "w", [rows])
                    writer.frames.add(run_id, 1, "w", frames)
                if (number + 1) * ROWS % SETTLE_EVERY == 0:
                    store.settle()
            spent_s = time.process_time() - began
            with store.write() as writer:
                writer.runs.change(run_id, state="finished")
            store.settle()
            num_values = options.steps * options.scalars
            print(
                f"{options.steps:,} steps of {options.scalars} scalars: {1e6 * spent_s / options.steps:.1f} us a step"
            )
            shown = names[:OPENED]
            opened = lasted(lambda: [asked(store, run_id, name) for name in shown])
            one = lasted(lambda: asked(store, run_id, "loss"))
            print(f"{len(shown)} charts of 1,000 points: {opened:.0f} ms; one: {one:.1f} ms")
            if not options.database:
                store.vacuum()
                print(f"{file.stat().st_size / num_values:.2f} bytes a value at rest")


def registered(store: Store) -> str:
    with store.write() as writer:
        run = writer.runs.register("p", "r", blocks=["h.0"], config=None, tags=None, resume_step=None, attempt_key=None)
        return run.run_id


def bodies(num_steps: int, names: list[str], dtype: type) -> Iterator[tuple[list[Frame], Rows]]:
    """Frames of some steps, and rows of the others."""
    random = np.random.default_rng(0)
    num_rows = 0
    for first in range(0, num_steps, ROWS):
        steps = np.arange(first, min(first + ROWS, num_steps))
        values = 3.0 / (1 + steps / 1e4)[:, None] + random.normal(0, 0.1, (len(steps), len(names)))
        values = values.astype(dtype).astype(np.float64)
        is_frame = steps % GAP == 0
        frames = [
            Frame(int(step) // GAP, int(step), 1e9 + step, dict(zip(names, row.tolist(), strict=True)))
            for step, row in zip(steps[is_frame], values[is_frame], strict=True)
        ]
        columns = dict(zip(names, values[~is_frame].T.tolist(), strict=True))
        rows = Rows(num_rows, steps[~is_frame].tolist(), (1e9 + steps[~is_frame]).tolist(), columns)
        num_rows += len(rows.steps)
        yield frames, rows


def asked(store: Store, run_id: str, name: str) -> int:
    found = service.series(store, run_id, SeriesQuery(metric=name, points=1000))
    return len(found.step)


def lasted(ask: Callable[[], object]) -> float:
    """The median CPU time of seven rounds, in ms."""
    spent = []
    for _ in range(7):
        began = time.process_time()
        ask()
        spent.append(1e3 * (time.process_time() - began))
    return statistics.median(spent)


if __name__ == "__main__":
    main()
