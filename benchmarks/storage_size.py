"""What does a value take on the disk, and does that grow with the run?

Each run is stored in a database of its own, settled and vacuumed meanwhile as it would be within a minute. Its size is
that of the file after a checkpoint (SQLite), or of all tables with their indexes after a VACUUM (PostgreSQL). Then
tsemon, over HTTP, and other tools keep one run each, and the disk alone keeps its frames.
"""

from __future__ import annotations

from floors import floors
from growth import Panel, draw
from long_runs import NARROW, conditions, engines, filled, options, sizes
from side_by_side import kept, written
from values import LAYERS, METRICS, Size

TARGET_BYTES = 4.5


def main() -> None:
    arguments = options(__doc__).parse_args()
    with engines(arguments) as (folder, those):
        print(conditions(those), "\n")
        print("| steps x metrics | engine | bytes a value | values per CPU-second | values per second |")
        print("|---|---|---|---|---|")
        curves: dict[str, dict[int, float]] = {engine.name: {} for engine in those}
        for size in sizes(arguments):
            for engine in those:
                run = filled(engine, size, folder)
                bytes_per_value = run.size_bytes / size.num_values
                rates = f"{size.num_values / run.spent.cpu_s:,.0f} | {size.num_values / run.spent.wall_s:,.0f}"
                print(f"| {size} | {engine.name} | {bytes_per_value:.2f} | {rates} |", flush=True)
                if size.metrics == NARROW:
                    curves[engine.name][size.steps] = bytes_per_value
        if arguments.svg:
            draw(arguments.svg, [Panel("At rest", "bytes a value", curves, TARGET_BYTES)])
        size = Size(arguments.peer_steps, len(METRICS))
        print(f"\n{size.steps:,} steps of {len(METRICS)} metrics x {LAYERS} layers:\n")
        print("\n".join(written(arguments.peers, size, those, folder)), flush=True)
        for floor in floors(folder, 4 * len(METRICS) * LAYERS, size.steps):
            print(kept("floor of the machine", floor.name, size.num_values, floor.spent, floor.size_bytes))


if __name__ == "__main__":
    main()
