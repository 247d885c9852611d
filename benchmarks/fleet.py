"""What does it cost to look at a whole fleet: to list, to search, and to see many long runs at a glance?

Each answer comes over HTTP from `tsemon serve` in a process of its own. CPU is that of the service and of the database
engine's processes, wall time is the client's.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from cost import cost
from databases import ENGINES, Engine, Service
from sqlalchemy import Connection, Table, create_engine, insert, literal, select

from tsemon.wire import Array, Frame
from tsemon_server.store import Store
from tsemon_server.store.ledger import tables as ledger
from tsemon_server.store.series.sql import tables as series

PAGE = 50
PER_INSERT = 500
SETTLED_STEPS = 4096
LAYERS = 12
CONFIG = {f"setting_{number}": "a value of some words" for number in range(50)}
"""About 2 kB, as trainers have."""
ALERT: dict[str, Any] = {
    "attempt": 1, "family": "liveness", "severity": "warning", "state": "firing", "pending_step": 0, "firing_step": 0,
    "summary": "s" * 80, "evidence": {"values": [0.5] * 100}, "advice": {"text": "a" * 200}, "opened_at": 1.7e9,
    "updated_at": 1.7e9,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="in the list")
    parser.add_argument("--glanced", type=int, default=50, help="long runs that are seen at a glance")
    parser.add_argument("--steps", type=int, default=100_000, help="of each of these")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--round-s", type=float, default=0.5, help="seconds of one of the rounds of requests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tsemon-") as folder:
        for name in arguments.engines:
            with closing(ENGINES[name](Path(folder).resolve())) as engine:
                print(conditions(engine, arguments), flush=True)
                run_ids = _fill(engine, arguments)
                with closing(Service(engine, "fleet")) as service:
                    for question, ask in _questions(service, run_ids).items():
                        print(f"| {question} | {cost(ask, service.cpu_s, arguments.round_s)} |", flush=True)
                print()


def conditions(engine: Engine, arguments: argparse.Namespace) -> str:
    """Where and on what, and the head of the table."""
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {psutil.cpu_count()} cores of {platform.machine()}, Python "
        f"{platform.python_version()}, {engine.name} {engine.version}. {arguments.runs:,} runs with a config of "
        f"{len(json.dumps(CONFIG)):,} bytes, 3 tags and a frame, every 20th with an alert; {arguments.glanced} of them have "
        f"{arguments.steps:,} steps of the loss and of 2 metrics of {LAYERS} layers. Pages of {PAGE} runs.\n\n"
        f"| {engine.name} | CPU ms (wall) |\n|---|---|"
    )


def _questions(service: Service, glanced: list[str]) -> dict[str, Callable[[], Any]]:
    lists: dict[str, dict[str, Any]] = {
        **{
            f"order={order}": {"order": order}
            for order in ("live", "-updated", "-created", "name", "-step", "loss", "-alerts")
        },
        "the next page by -step": {"order": "-step", "cursor": _cursor(service, "-step")},
        "the next page by -alerts": {"order": "-alerts", "cursor": _cursor(service, "-alerts")},
        "project=": {"project": "project-7"},
        "state=finished": {"state": "finished"},
        "condition=running": {"condition": "running"},
        "condition=silent": {"condition": "silent"},
        "q= a word that one run in 20 has": {"q": "PROJECT-7"},
        "q= a word that none has": {"q": "nowhere"},
        "tag=": {"tag": "tag-7"},
        "tag=, q=, order=loss": {"tag": "tag-7", "q": "run-1", "order": "loss"},
    }
    points = cycle(range(30, 60))
    asked = {f"GET /runs, {what}": _list(service, query) for what, query in lists.items()}
    return asked | {
        "GET /tags": lambda: service.get("/tags"),
        # With another number of points each time, nothing is remembered of the time before.
        f"GET /glances of {len(glanced)} runs": lambda: service.get("/glances", run=glanced, points=next(points)),
        f"GET /glances of {len(glanced)} runs, again": lambda: service.get("/glances", run=glanced),
        "GET /runs/{id}/frame in the middle": lambda: service.get(f"/runs/{glanced[0]}/frame", step=50_000),
        f"GET /compare of {len(glanced[:20])} runs, along=step": _compare(service, glanced[:20], "step"),
        f"GET /compare of {len(glanced[:20])} runs, along=time": _compare(service, glanced[:20], "time"),
    }


def _list(service: Service, query: dict[str, Any]) -> Callable[[], Any]:
    return lambda: service.get("/runs", limit=PAGE, **query)


def _compare(service: Service, run_ids: list[str], along: str) -> Callable[[], Any]:
    return lambda: service.get("/compare", run=run_ids, metric="loss", along=along)


def _cursor(service: Service, order: str) -> str | None:
    cursor: str | None = service.get("/runs", limit=PAGE, order=order)["next_cursor"]
    return cursor


def _fill(engine: Engine, arguments: argparse.Namespace) -> list[str]:
    """The database `fleet`; the ids of its long runs. One is stored as usual, the others are copies: that takes minutes
    where sending them would take hours."""
    with closing(Store(engine.url("fleet"))) as store:
        with store.write() as writer:
            run_id = writer.runs.register(
                "project-0", "run-0", blocks=[f"h.{layer}" for layer in range(LAYERS)], config=CONFIG, tags=_tags(0),
                resume_step=None, attempt_key=None,
            ).run_id  # fmt: skip
        for first in range(0, arguments.steps, SETTLED_STEPS):
            steps = range(first, min(first + SETTLED_STEPS, arguments.steps))
            with store.write() as writer:
                writer.frames.add(run_id, 1, "w", [_frame(step) for step in steps])
            store.settle()
    copier = create_engine(engine.url("fleet"))
    with copier.begin() as connection:
        run_ids = [run_id, *_add_runs(connection, run_id, arguments.runs)]
        for other in run_ids[1 : arguments.glanced]:
            _copy_frames(connection, run_id, other)
    copier.dispose()
    engine.tidy("fleet")
    return run_ids[: arguments.glanced]


def _tags(number: int) -> list[str]:
    return [f"tag-{number % 100}", f"owner-{number % 7}", "baseline"]


def _frame(step: int) -> Frame:
    noise = np.random.default_rng(step).standard_normal(2 * LAYERS).astype(np.float32)
    layers = {"token_similarity": Array.of(noise[:LAYERS]), "grad_norm": Array.of(noise[LAYERS:])}
    return Frame(step, step, 1.7e9 + step, {"loss": 2 + 1 / (1 + step / 1000) + float(noise[0]) / 10}, layers)


def _add_runs(connection: Connection, source: str, num_runs: int) -> list[str]:
    """Runs like this one, with its newest frame each; their ids."""
    draw = random.Random(1)
    tables = (ledger.run, ledger.attempt, series.layout, series.tally)
    like = {table: _rows(connection, table, source) for table in tables}
    newest = _rows(connection, series.frame, source)[-1:]
    (run,) = like[ledger.run]
    found = [f"{draw.getrandbits(64):016x}" for _ in range(1, num_runs)]
    runs, alerts = [], []
    for number, run_id in enumerate(found, start=1):
        of_run = {
            "run_id": run_id, "project": f"project-{number % 20}", "run": f"run-{number}", "tags": _tags(number),
            "state": "finished" if number % 10 else "running", "created_at": run["created_at"] - number,
            "updated_at": run["updated_at"] - draw.random() * 1e6, "loss": draw.expovariate(1),
        }  # fmt: skip
        runs.append(run | of_run)
        if number % 20 == 0:
            alerts.append(ALERT | {"run_id": run_id, "rule": "process-silent" if number % 40 == 0 else "loss-spike"})
    for start in range(0, len(found), PER_INSERT):
        part = found[start : start + PER_INSERT]
        connection.execute(insert(ledger.run), runs[start : start + PER_INSERT])
        for table, rows in (
            (ledger.attempt, like[ledger.attempt]),
            (series.layout, like[series.layout]),
            (series.tally, like[series.tally]),
            (series.frame, newest),
        ):
            connection.execute(insert(table), [row | {"run_id": run_id} for run_id in part for row in rows])
    if alerts:
        connection.execute(insert(ledger.alert), alerts)
    return found


def _rows(connection: Connection, table: Table, run_id: str) -> list[dict[str, Any]]:
    rows = connection.execute(select(table).where(table.c.run_id == run_id).order_by(*table.primary_key))
    return [dict(row._mapping) for row in rows]


def _copy_frames(connection: Connection, source: str, run_id: str) -> None:
    connection.execute(series.frame.delete().where(series.frame.c.run_id == run_id))
    for table in (series.frame, series.segment, series.chunk, series.block, series.settled):
        others = [column for column in table.c if column.name != "run_id"]
        rows = select(literal(run_id), *others).where(table.c.run_id == source)
        connection.execute(insert(table).from_select(["run_id", *(column.name for column in others)], rows))


if __name__ == "__main__":
    main()
