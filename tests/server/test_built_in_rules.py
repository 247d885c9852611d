"""The rules that come with tsemon, live in the service, on a recorded training."""

import gzip
import json
import math
from pathlib import Path

from tsemon.wire import Array, Frame
from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.views import views_of

from .test_alerts import alerts

TRACE = Path(__file__).parents[1] / "data/traces/tse_lm16-s0.jsonl.gz"


def recorded():
    with gzip.open(TRACE, "rt") as lines:
        entries = [json.loads(line) for line in lines]
    for seq, entry in enumerate(entry for entry in entries if entry["t"] == "frame"):
        layers = {
            name: Array.of(math.nan if value is None else value for value in values)
            for name, values in entry["layers"].items()
        }
        yield Frame(seq, entry["step"], 0.0, {}, layers)


def replayed(frames):
    """(rule, pending step, firing step) of everything that fires when the rules read the frames alone."""
    evaluator = Evaluator(PACK)
    state = evaluator.start()
    for view in views_of(frames, frozenset()):
        for event in evaluator.advance(state, view):
            if event.kind == "firing":
                yield event.rule.name, event.pending_step, event.firing_step


class TestTheBuiltInRules:
    def test_fire_in_the_service_where_they_fire_in_a_replay(self, start):
        frames = list(recorded())
        num_blocks = len(frames[0].layers["token_diversity"].data) // 4 - 1
        api = start(rules=None)
        run_id = api.register(num_blocks=num_blocks)
        told = [alert for frame in frames for alert in api.send_ok(run_id, [frame])["alerts"]]
        live = {(a["rule"], a["pending_step"], a["firing_step"]) for a in alerts(api) if a["firing_step"] is not None}
        assert live == set(replayed(frames)) != set()
        assert {alert["rule"] for alert in told} >= {rule for rule, *_ in live}
