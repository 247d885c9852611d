"""What does a chart cost over a run of a thousand, and of a million steps?

Each answer comes over HTTP from `tsemon serve` in a process of its own, on a run that was stored and settled before. CPU
is that of the service and of the database engine's processes, wall time is the client's. Then one run is read by tsemon
and by other tools.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from cost import Cost, cost
from databases import Engine, Service
from growth import Panel, draw
from long_runs import BLOCKS, NARROW, PROJECT, body, conditions, engines, filled, frames_of, options, sizes
from side_by_side import read
from values import LAYERS, METRICS, Size

from tsemon.wire import Frame
from tsemon_server.store import Store

SERIES, HEATMAP = "series of 1,000 points", "heat map of 200 columns"
TARGET_MS = 25
RETRIED_FRAMES = 100
RUNS_PER_COMMIT = 500


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=10_000, help="in the list of runs")
    parser.add_argument("--round-s", type=float, default=0.5, help="seconds of one of the rounds of requests")
    arguments = parser.parse_args()
    with engines(arguments) as (folder, those):
        print(conditions(those), "Cells are CPU ms, and wall ms in brackets.\n")
        costs = {}
        for engine in those:
            costs[engine.name] = {size: _charts(engine, size, folder, arguments.round_s) for size in sizes(arguments)}
            print("\n".join(_table(engine, costs[engine.name])), flush=True)
            print(
                f"\n{engine.name}, 50 of {arguments.runs:,} runs: {_run_list(engine, arguments.runs, arguments.round_s)}\n",
                flush=True,
            )
        if arguments.svg:
            draw(arguments.svg, [_panel(name, costs) for name in (SERIES, HEATMAP)])
        size = Size(arguments.peer_steps, len(METRICS))
        print(f"Every one of {size.steps:,} steps, a metric of {len(METRICS)}:\n")
        print("\n".join(read(arguments.peers, size, those, folder, arguments.round_s)))


def _charts(engine: Engine, size: Size, folder: Path, round_s: float) -> dict[str, Cost]:
    """What a page asks about one run, and a body of frames that comes once more."""
    run_id = filled(engine, size, folder).run_id
    with closing(Service(engine, size.name)) as service:
        questions = _questions(service, f"/runs/{run_id}", size)
        return {name: cost(ask, service.cpu_s, round_s) for name, ask in questions.items()}


def _questions(service: Service, run: str, size: Size) -> dict[str, Callable[[], Any]]:
    series = {"metric": METRICS[0], "layer": LAYERS // 2, "points": 1000}
    heatmap = {"metric": METRICS[0], "columns": 200}
    part = {"from_step": size.steps // 2, "to_step": size.steps // 2 + size.steps // 100 - 1}
    retried = body(list(islice(frames_of(size), RETRIED_FRAMES)))

    def retry() -> None:
        receipt = service.post(f"{run}/frames", retried)
        assert receipt["accepted"] == 0, receipt

    return {
        SERIES: lambda: service.get(f"{run}/series", **series),
        "series, 1 % of the steps": lambda: service.get(f"{run}/series", **series, **part),
        HEATMAP: lambda: service.get(f"{run}/heatmap", **heatmap),
        "heat map, 1 % of the steps": lambda: service.get(f"{run}/heatmap", **heatmap, **part),
        "run detail": lambda: service.get(run),
        f"retry of the first {RETRIED_FRAMES} frames": retry,
    }


def _run_list(engine: Engine, num_runs: int, round_s: float) -> Cost:
    """The newest of many runs, each with a frame."""
    database = f"runs_{num_runs}"
    with closing(Store(engine.url(database))) as store:
        for first in range(0, num_runs, RUNS_PER_COMMIT):
            with store.write() as writer:
                for number in range(first, min(first + RUNS_PER_COMMIT, num_runs)):
                    found = writer.runs.register(
                        PROJECT, f"run-{number}", blocks=BLOCKS, config={}, tags=[], resume_step=None, attempt_key="1"
                    )
                    writer.frames.add(found.run_id, 1, "w", [Frame(0, 0, 0.0, {"loss": 2.5})])
    engine.tidy(database)
    with closing(Service(engine, database)) as service:
        return cost(lambda: service.get("/runs"), service.cpu_s, round_s)


def _table(engine: Engine, costs: dict[Size, dict[str, Cost]]) -> list[str]:
    lines = [f"| {engine.name} | {' | '.join(map(str, costs))} |", "|---" * (len(costs) + 1) + "|"]
    for name in next(iter(costs.values())):
        lines.append(f"| {name} | {' | '.join(str(asked[name]) for asked in costs.values())} |")
    return lines


def _panel(name: str, costs: dict[str, dict[Size, dict[str, Cost]]]) -> Panel:
    curves = {
        engine: {size.steps: asked[name].cpu_ms for size, asked in sized.items() if size.metrics == NARROW}
        for engine, sized in costs.items()
    }
    return Panel(name[0].upper() + name[1:], "CPU ms", curves, TARGET_MS)


if __name__ == "__main__":
    main()
