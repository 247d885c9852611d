"""Recorded runs as their training would have sent them, and what came of them live."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tsemon.wire import Array, Frame
from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.services.replay.replaying import replay
from tsemon_server.services.replay.traces import Trace

FOLDER = Path(__file__).parents[2] / "data/traces"


class RecordedRun:
    """A trace with its frames as they are on the wire."""

    def __init__(self, path):
        self.path = path
        self.name = Trace(path).name
        with gzip.open(path, "rt") as lines:
            header = json.loads(next(lines))
        self.num_blocks = header["layers"]
        self.frozen_blocks = [block for block in header["frozen_blocks"] if block >= 0]
        (attempt,) = Trace(path).attempts()
        self.frames = [wire_frame(seq, view) for seq, view in enumerate(attempt.views)]

    def registration(self):
        return {"run": self.name, "num_blocks": self.num_blocks, "frozen_blocks": self.frozen_blocks}

    def __repr__(self):
        return self.name


def wire_frame(seq, view):
    layers = {name: Array.of(values.tolist()) for name, values in view.layers.items()}
    heads = {name: Array.of(values.ravel().tolist(), values.shape) for name, values in view.heads.items()}
    return Frame(seq, view.step, 1.8e9 + view.step, view.scalars, layers, heads)


def read_runs(pattern="*"):
    return [RecordedRun(path) for path in sorted(FOLDER.glob(f"{pattern}.jsonl.gz"))]


def replayed(run, rules=PACK):
    """What a replay says of a run: for each alert that fired, all that people see of it."""
    return sorted(tell(alert.__dict__) for alert in replay(Trace(run.path), Evaluator(rules)).alerts)


def live(api, run_id):
    """The same as the service tells it.

    What fired only because a frame was late had been told to people: it stays, over where it fired. No replay has it.
    """
    alerts = api.get("/alerts", run=run_id, limit=1000)["alerts"]
    fired = [alert for alert in alerts if alert["firing_step"] not in (None, alert["resolved_step"])]
    return sorted(map(tell, fired))


TOLD = ("firing_step", "rule", "family", "severity", "pending_step", "resolved_step", "summary")


def tell(alert):
    return tuple(alert[name] for name in TOLD)
