"""What a piece of work costs, in time on the wall and of processors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from figures import Spent

ROUNDS = 5


def stopwatch(*other_cpu_s: Callable[[], float]) -> Callable[[], Spent]:
    """Starts; called, it tells what was spent since, by this process and those whose CPU seconds `other_cpu_s` tell."""

    def cpu_s() -> float:
        return time.process_time() + sum(other() for other in other_cpu_s)

    start = Spent(time.perf_counter(), cpu_s())
    return lambda: Spent(time.perf_counter() - start.wall_s, cpu_s() - start.cpu_s)


@dataclass(frozen=True)
class Cost:
    """Of one request, milliseconds."""

    cpu_ms: float
    wall_ms: float

    @staticmethod
    def median(spent: Sequence[Spent]) -> Cost:
        return Cost(
            *(1e3 * statistics.median(times) for times in ([s.cpu_s for s in spent], [s.wall_s for s in spent]))
        )

    def __str__(self) -> str:
        return f"{self.cpu_ms:.1f} ({self.wall_ms:.1f})"


def cost(ask: Callable[[], Any], cpu_s: Callable[[], float], round_s: float) -> Cost:
    """The median over rounds of what `cpu_s` counts per request, and over requests of their time on the wall.

    A round is as many requests as `round_s` holds, because the system counts another process's CPU in steps of 10 ms.
    """
    ask()  # what is done once is not counted
    cpus_s, walls_s = list[float](), list[float]()
    for _ in range(ROUNDS):
        start_s, num_before, deadline = cpu_s(), len(walls_s), time.perf_counter() + round_s
        while len(walls_s) == num_before or time.perf_counter() < deadline:
            spent = stopwatch()
            ask()
            walls_s.append(spent().wall_s)
        cpus_s.append((cpu_s() - start_s) / (len(walls_s) - num_before))
    return Cost(1e3 * statistics.median(cpus_s), 1e3 * statistics.median(walls_s))
