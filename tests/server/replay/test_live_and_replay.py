"""The alerts of a run are the same live and replayed, however its frames come."""

import functools
import random
from contextlib import ExitStack, closing

import pytest

from tests.databases import SqliteFile
from tests.server.conftest import Api
from tests.server.replay.runs import live, read_runs, replayed
from tsemon_server.rules import PACK

LATE_FRAMES = 8
"""How far a frame may be behind its place."""
FEW = ("tse_post6", "tse_lm16", "rank_attn", "ent_qk20", "div_lr-", "h_frozenlow", "dead_relu_lr")


@pytest.fixture(scope="module")
def runs():
    return read_runs()


@pytest.fixture(scope="module")
def few(runs):
    return [run for run in runs if run.name.startswith(FEW)]


@functools.cache
def expected_of(run):
    """What a replay says of the run."""
    return replayed(run)


def singly(frames, chance):
    return [[frame] for frame in frames]


def in_batches(frames, chance):
    frames, batches = list(frames), []
    while frames:
        size = chance.randint(1, 12)
        batches.append(frames[:size])
        frames = frames[size:]
    return batches


def twice(frames, chance):
    """Each body once more, at once or after others: a reply was lost."""
    batches = in_batches(frames, chance)
    return [again for place, batch in enumerate(batches) for again in (batch, chance.choice(batches[: place + 1]))]


def late(frames, chance):
    """Frames overtake each other, the last ones too."""
    places = [place + chance.uniform(0, LATE_FRAMES) for place in range(len(frames))]
    shuffled = [frame for _, frame in sorted(zip(places, frames, strict=True), key=lambda pair: pair[0])]
    return in_batches(shuffled, chance)


def late_and_singly(frames, chance):
    return singly([frame for batch in late(frames, chance) for frame in batch], chance)


class Deliveries:
    """Runs that are on their way, side by side."""

    def __init__(self, api, runs, deliver, seed=0):
        self.run_ids = {run.name: api.register(**run.registration()) for run in runs}
        self.bodies = {run.name: deliver(run.frames, random.Random(f"{seed} {run.name}")) for run in runs}

    def send(self, *apis, share=1.0):
        """The next bodies, in turn to each of `apis`; up to a share of all."""
        for name, bodies in self.bodies.items():
            end = round(share * len(bodies))
            for place, body in enumerate(bodies[:end]):
                apis[place % len(apis)].send_ok(self.run_ids[name], body)
            self.bodies[name] = bodies[end:]

    def told(self, api):
        return {name: live(api, run_id) for name, run_id in self.run_ids.items()}


def differences(told, runs):
    pairs = {run.name: (told[run.name], expected_of(run)) for run in runs}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class TestLiveAlerts:
    @pytest.mark.thorough
    @pytest.mark.parametrize("deliver", [late, twice])
    def test_are_those_of_a_replay_on_every_run(self, deliver, runs, tmp_path):
        with closing(Api(SqliteFile(tmp_path / "tsemon.db"), rules=PACK)) as api:
            deliveries = Deliveries(api, runs, deliver)
            deliveries.send(api)
            assert differences(deliveries.told(api), runs) == {}

    def test_are_those_of_a_replay_on_each_engine(self, few, start):
        api = start(rules=PACK)
        deliveries = Deliveries(api, few, late_and_singly)
        deliveries.send(api)
        assert differences(deliveries.told(api), few) == {}

    def test_are_those_of_a_replay_where_the_service_was_restarted_under_way(self, few, start):
        api = start(rules=PACK)
        deliveries = Deliveries(api, few, late)
        for share in (0.2, 0.25, 0.33, 0.5, 1.0):
            deliveries.send(api, share=share)
            api = start(rules=PACK)
        assert differences(deliveries.told(api), few) == {}

    def test_are_those_of_a_replay_where_two_services_take_turns(self, few, database):
        with ExitStack() as both:
            first, second = (both.enter_context(closing(Api(database, rules=PACK))) for _ in range(2))
            deliveries = Deliveries(first, few, late)
            deliveries.send(first, second)
            assert differences(deliveries.told(second), few) == {}


class TestAPendingAlert:
    def test_is_remembered_across_a_restart(self, few, start):
        """Each run stops between the step at which an alert opens and the one at which it fires."""
        api = start(rules=PACK)
        deliveries = Deliveries(api, few, singly)
        pending = 0
        for run in few:
            held = [(alert[4], alert[0]) for alert in expected_of(run) if alert[4] < alert[0]]
            if not held:
                continue
            opened, _ = held[0]
            before = [[frame] for frame in run.frames if frame.step <= opened]
            for body in before:
                api.send_ok(deliveries.run_ids[run.name], body)
            deliveries.bodies[run.name] = deliveries.bodies[run.name][len(before) :]
            pending += bool(api.get("/alerts", run=deliveries.run_ids[run.name], state="pending")["alerts"])
        assert pending >= 5
        api = start(rules=PACK)
        deliveries.send(api)
        assert differences(deliveries.told(api), few) == {}
