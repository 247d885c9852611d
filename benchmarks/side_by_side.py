"""The same values kept and read back by tsemon and by other tools."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from cost import Cost, cost, stopwatch
from databases import Engine, Service
from figures import Spent
from long_runs import BLOCKS, PROJECT, body, filled, frames_of, settle
from peers import PEERS, SHOWN
from values import LAYERS, Size

BODY_FRAMES = (1, 100)
READS = 3
"""So often everything is read, each time by a process that has not read it before."""


def written(python: str | None, size: Size, engines: Sequence[Engine], folder: Path) -> list[str]:
    """A table of what it takes to keep the values."""
    rows = [_posted(engine, size, num_frames) for engine in engines for num_frames in BODY_FRAMES]
    for tool, peer in PEERS.items():
        found = _ask(python, "write", tool, size, folder)
        if "absent" in found:
            rows.append(f"| {peer.name} | not measured: {found['absent']} | | | |")
            continue
        name = f"{peer.name} {found['version']}"
        rows.append(kept(name, peer.write_api, size.num_values, Spent(**found["spent"]), found["size_bytes"]))
    return [
        "| tool | how | values per CPU-second | values per second | bytes a value |",
        "|---|---|---|---|---|",
        *rows,
    ]


def read(python: str | None, size: Size, engines: Sequence[Engine], folder: Path, round_s: float) -> list[str]:
    """A table of what it takes to read one layer, and all of them. What `written` kept in the folder is used."""
    rows = [_answered(engine, size, folder, round_s) for engine in engines]
    for tool, peer in PEERS.items():
        note = folder / tool / "written.json"
        found = json.loads(note.read_text()) if note.exists() else _ask(python, "write", tool, size, folder)
        if "absent" in found:
            rows.append(f"| {peer.name} | not measured: {found['absent']} | | |")
            continue
        readings = [_ask(python, "read", tool, size, folder) for _ in range(READS)]
        one, all_layers = (Cost.median([Spent(**r[what]) for r in readings]) for what in ("series", "heatmap"))
        rows.append(f"| {peer.name} {found['version']} | {peer.read_api} | {one} | {all_layers} |")
    head = f"| tool | how | one layer, CPU ms (wall) | {LAYERS} layers, CPU ms (wall) |"
    return [head, "|---|---|---|---|", *rows]


def kept(name: str, how: str, num_values: int, spent: Spent, size_bytes: int) -> str:
    """A row of the table of what was kept."""
    rates = f"{num_values / spent.cpu_s:,.0f} | {num_values / spent.wall_s:,.0f}"
    return f"| {name} | {how} | {rates} | {size_bytes / num_values:.2f} |"


def _posted(engine: Engine, size: Size, num_frames: int) -> str:
    """Over HTTP, from making the bodies to settled frames, all processes together."""
    database = f"posted_{num_frames}_{size.name}"
    engine.drop(database)
    frames = frames_of(size)
    with closing(Service(engine, database)) as service:
        run_id = service.post("/runs", project=PROJECT, run=size.name, blocks=BLOCKS)["run_id"]
        spent = stopwatch(service.cpu_s)
        while batch := list(islice(frames, num_frames)):
            service.post(f"/runs/{run_id}/frames", body(batch))
        posting = spent()
    spent = stopwatch(engine.cpu_s)
    settle(engine.url(database))
    settling = spent()
    engine.tidy(database)
    both = Spent(posting.wall_s + settling.wall_s, posting.cpu_s + settling.cpu_s)
    how = f"POST, {num_frames} step{'s' if num_frames > 1 else ''} a body, then settled"
    return kept(f"tsemon, {engine.name}", how, size.num_values, both, engine.size_bytes(database))


def _answered(engine: Engine, size: Size, folder: Path, round_s: float) -> str:
    """Over HTTP, every step alone, all processes together."""
    run_id = filled(engine, size, folder).run_id
    with closing(Service(engine, size.name)) as service:

        def cpu_s() -> float:
            return time.process_time() + service.cpu_s()

        route = f"/runs/{run_id}"
        series = {"metric": SHOWN, "layer": LAYERS // 2, "points": size.steps}
        one = cost(lambda: service.get(f"{route}/series", **series), cpu_s, round_s)
        all_layers = cost(lambda: service.get(f"{route}/heatmap", metric=SHOWN, columns=size.steps), cpu_s, round_s)
    return f"| tsemon, {engine.name} | GET series, GET heatmap | {one} | {all_layers} |"


def _ask(python: str | None, task: str, tool: str, size: Size, folder: Path) -> dict[str, Any]:
    """What peers.py tells, run by a Python that has the tools."""
    if python is None:
        return {"absent": "give --peers a Python that has it"}
    script = Path(__file__).parent / "peers.py"
    command = [python, str(script), task, tool, str(folder / tool), str(size.steps), str(size.metrics)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool}: {task} failed:\n{done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told
