"""The rules read every frame of every writer, in the order of steps."""

import math
import random
from contextlib import closing

import pytest

from tests.server.conftest import Api, loss_frame
from tests.server.replay.runs import live, read_runs, replayed
from tests.server.test_alerts import HIGH_LOSS, alerts, send, states
from tsemon_server.alerts import watch as watching
from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.store.ledger import progress


@pytest.fixture
def api(start, clock):
    return start(rules=HIGH_LOSS, clock=clock)


@pytest.fixture
def run_id(api):
    return api.register()


def look(api, clock, after_s=0.0):
    """A round of the clock."""
    clock.now += after_s
    parts = api.app.state.parts
    parts.watch.look(parts.store, clock.now)


def read_to(api, run_id):
    return api.get(f"/runs/{run_id}/rules")["step"]


def skipped(api, run_id):
    return api.get(f"/runs/{run_id}")["unevaluated_frames"]


class TestAStep:
    @pytest.fixture(autouse=True)
    def has_two_writers(self, api, run_id):
        for writer in "ab":
            send(api, run_id, [1], 0, writer=writer)

    def test_waits_until_all_writers_have_passed_it(self, api, run_id):
        assert send(api, run_id, [20] * 5, 1, writer="a") == []
        assert (read_to(api, run_id), alerts(api)) == (0, [])
        assert states(send(api, run_id, [1, 1, 20], 1, writer="b")) == [("firing", 1, 3, None)]
        assert read_to(api, run_id) == 3

    def test_waits_a_short_time(self, api, run_id, clock):
        send(api, run_id, [20] * 5, 1, writer="a")
        look(api, clock, after_s=5)
        assert read_to(api, run_id) == 0
        look(api, clock, after_s=5)
        assert (read_to(api, run_id), states(alerts(api))) == (5, [("firing", 1, 3, None)])

    def test_does_not_wait_for_a_writer_that_is_silent(self, api, run_id, clock):
        clock.now += 11
        assert states(send(api, run_id, [20] * 3, 1, writer="a")) == [("firing", 1, 3, None)]

    def test_does_not_wait_beyond_the_end_of_the_run(self, api, run_id):
        send(api, run_id, [20] * 5, 1, writer="a")
        api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "finished"})
        assert [(found["resolved_reason"], *states([found])[0]) for found in alerts(api)] == [
            ("run ended", "resolved", 1, 3, 5)
        ]

    def test_that_waits_is_read_by_a_server_that_starts_meanwhile(self, api, run_id, clock, start):
        send(api, run_id, [20] * 5, 1, writer="a")
        api = start(rules=HIGH_LOSS, clock=clock)
        look(api, clock, after_s=10)
        assert states(alerts(api)) == [("firing", 1, 3, None)]


class TestAStepThatWasRead:
    def test_does_not_wait_again_after_a_restart(self, api, run_id, clock, start):
        send(api, run_id, [1] * 77, 0, writer="a")
        send(api, run_id, [20] * 3, 77, writer="a")
        send(api, run_id, [1], 0, writer="b")
        api = start(rules=HIGH_LOSS, clock=clock)
        look(api, clock, after_s=1)
        assert (read_to(api, run_id), states(alerts(api))) == (79, [("firing", 77, 79, None)])


class TestAFrameThatComesLate:
    def test_is_read_at_once_if_few_others_are_to_be_read_again(self, api, run_id):
        send(api, run_id, [1] * 40, 10)
        send(api, run_id, [20] * 3, 3)
        assert states(alerts(api)) == [("resolved", 3, 5, 12)]

    def test_is_read_in_the_next_round_of_the_clock_otherwise(self, api, run_id, clock):
        for step in range(10, 400):
            send(api, run_id, [1], step)
        assert send(api, run_id, [math.nan, 20, 20, 20], 3, writer="late") == []
        look(api, clock, after_s=10)
        assert states(alerts(api)) == [("resolved", 4, 6, 12)]
        assert (read_to(api, run_id), skipped(api, run_id)) == (399, 0)

    def test_among_those_of_several_bodies_is_read_too(self, api, run_id, clock):
        for step in range(10, 400):
            send(api, run_id, [1], step)
        for step in (5, 3, 4):
            send(api, run_id, [20], step, writer="late")
        look(api, clock, after_s=10)
        assert states(alerts(api)) == [("resolved", 3, 5, 12)]

    def test_is_read_after_the_run_has_ended(self, api, run_id, clock):
        for step in range(10, 400):
            send(api, run_id, [1], step)
        send(api, run_id, [20, 20, 20], 3, writer="late")
        api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "failed"})
        look(api, clock, after_s=10)
        assert states(alerts(api)) == [("resolved", 3, 5, 12)]

    def test_is_counted_if_it_is_too_late(self, api, run_id, monkeypatch, clock):
        for module in (watching, progress):
            monkeypatch.setattr(module, "MOST_REREAD", 160)
        for step in (step for step in range(200) if step not in (3, 190, 191, 192)):
            send(api, run_id, [1], step)
        api.send_ok(run_id, [loss_frame(step, 20) for step in (3, 190, 191, 192)])
        assert states(alerts(api)) == [("resolved", 190, 192, 195)]
        assert skipped(api, run_id) == 1
        assert f'tsemon_run_unevaluated_frames{{run_id="{run_id}"}} 1\n' in api.http.get("/metrics").text

    def test_does_not_wait_until_no_others_come(self, api, run_id, clock):
        for step in range(10, 400):
            send(api, run_id, [1], step)
        for step in range(10):
            clock.now += 2
            send(api, run_id, [20], step, writer="late")
        look(api, clock)
        assert ("resolved", 0, 2, 12) in states(alerts(api)) or states(alerts(api))[0][:2] == ("firing", 0)

    def test_is_read_while_bodies_of_other_runs_are_stored(self, api, run_id, clock, monkeypatch):
        other, past_of = api.register("other"), watching.past_of

        def store_meanwhile(*arguments):
            assert send(api, other, [20, 20, 20])[0]["state"] == "firing"
            send(api, run_id, [20], 400)
            send(api, run_id, [20], 7, writer="late")
            return past_of(*arguments)

        for step in range(10, 400):
            send(api, run_id, [1], step)
        send(api, run_id, [20, 20, 20], 3, writer="late")
        with monkeypatch.context() as patch:
            patch.setattr(watching, "past_of", store_meanwhile)
            look(api, clock, after_s=10)
        look(api, clock, after_s=70)
        assert states(alerts(api, run=run_id)) == [("resolved", 3, 5, 12), ("pending", 400, None, None)]

    def test_is_read_once_more_if_the_process_that_read_it_has_died(self, api, run_id, clock, monkeypatch):
        def die(*_):
            raise OSError("on purpose")

        for step in range(10, 400):
            send(api, run_id, [1], step)
        send(api, run_id, [20, 20, 20], 3, writer="late")
        with monkeypatch.context() as patch:
            patch.setattr(watching, "past_of", die)
            look(api, clock, after_s=10)
        assert alerts(api) == []
        look(api, clock, after_s=60)
        assert states(alerts(api)) == [("resolved", 3, 5, 12)]

    def test_is_read_although_another_server_read_without_it_meanwhile(self, api, run_id, clock, database, monkeypatch):
        past_of = watching.past_of

        def die(*_):
            raise OSError("on purpose")

        def be_slow(*arguments):
            past = past_of(*arguments)
            send(api, run_id, [20, 20, 20], 5, writer="late")
            with monkeypatch.context() as patch, closing(Api(database, rules=HIGH_LOSS, clock=clock)) as other:
                patch.setattr(watching, "past_of", die)
                look(other, clock, after_s=1)
            return past

        for step in range(10, 400):
            send(api, run_id, [1], step)
        send(api, run_id, [1], 3, writer="late")
        with monkeypatch.context() as patch:
            patch.setattr(watching, "past_of", be_slow)
            look(api, clock, after_s=10)
        look(api, clock, after_s=60)
        assert (states(alerts(api)), skipped(api, run_id)) == ([("resolved", 5, 7, 12)], 0)

    def test_behind_a_state_that_cannot_be_read_is_read_with_all_others(self, api, run_id, clock):
        for first in (10, 30):
            send(api, run_id, [1] * 20, first)
        api.database.execute("UPDATE rule_checkpoint SET state = substr(state, 1, 1)")
        send(api, run_id, [20] * 3, 6, writer="late")
        look(api, clock, after_s=60)
        assert states(alerts(api)) == [("resolved", 6, 8, 12)]
        assert (skipped(api, run_id), read_to(api, run_id)) == (0, 49)


class TestAClockThatWasSetBack:
    def test_keeps_no_step_waiting(self, api, run_id, clock):
        for writer in "ab":
            send(api, run_id, [1], 0, writer=writer)
        send(api, run_id, [20] * 5, 1, writer="a")
        clock.now -= 3600
        look(api, clock)
        assert (read_to(api, run_id), states(alerts(api))) == (5, [("firing", 1, 3, None)])


class TestAnAttemptWithMoreWritersThanAreRemembered:
    def test_forgets_none_whose_frames_wait(self, api, run_id, clock, monkeypatch):
        monkeypatch.setattr(watching, "MOST_WRITERS", 2)
        for writer in "abc":
            send(api, run_id, [1], 0, writer=writer)
            clock.now += 0.1
        send(api, run_id, [20] * 5, 1, writer="a")
        for writer in "bc":
            clock.now += 0.1
            send(api, run_id, [1], 1, writer=writer)
        look(api, clock, after_s=11)
        assert (read_to(api, run_id), states(alerts(api))) == (5, [("firing", 1, 3, None)])


class TestAFrameOnWhichTheRulesFail:
    def test_is_counted(self, api, run_id, monkeypatch):
        def fail(*_):
            raise ZeroDivisionError("on purpose")

        with monkeypatch.context() as patch:
            patch.setattr(Evaluator, "read", fail)
            send(api, run_id, [20, 20])
        send(api, run_id, [20, 20, 20], 2)
        assert skipped(api, run_id) == 2
        assert states(alerts(api)) == [("firing", 2, 4, None)]


class TestWhatIsRememberedBetweenCheckpoints:
    def test_is_read_again_after_a_restart(self, api, run_id, start):
        send(api, run_id, [20, 20])
        assert states(send(start(rules=HIGH_LOSS), run_id, [20], 2)) == [("firing", 0, 2, None)]

    def test_is_that_of_the_last_reading_where_two_servers_take_turns(self, api, run_id, database):
        with closing(Api(database, rules=HIGH_LOSS)) as other:
            for step in range(40):
                send((api, other)[step % 2], run_id, [20 if step in (20, 21, 22) else 1], step)
        assert states(alerts(api)) == [("resolved", 20, 22, 25)]

    def test_is_not_that_of_a_body_that_was_not_stored(self, api, run_id, monkeypatch):
        send(api, run_id, [20])

        def fail(*_):
            raise OSError("on purpose")

        with monkeypatch.context() as patch:
            patch.setattr("tsemon_server.services.ingest.service.Receipt", fail)
            assert api.send(run_id, [loss_frame(1, 20)]).status_code == 500
        send(api, run_id, [1, 20, 20], 1)
        assert states(alerts(api)) == [("pending", 0, None, None)]


WRITERS = 4


def spread(frames, chance):
    """Bodies of several writers, each of which is in order; one is hundreds of steps late."""
    of_writers = [frames[number::WRITERS] for number in range(WRITERS)]
    lags = [chance.uniform(0, 5) for _ in range(WRITERS - 1)] + [chance.choice([0, 50, len(frames)])]
    bodies = []
    for number, own in enumerate(of_writers):
        place = 0
        while place < len(own):
            size = chance.randint(1, 8)
            body = own[place : place + size]
            bodies.append((WRITERS * place + lags[number], f"writer-{number}", body))
            place += size
    return [(writer, body) for _, writer, body in sorted(bodies, key=lambda body: body[0])]


class TestAlertsOfSeveralWriters:
    @pytest.mark.parametrize("seed", range(3))
    def test_are_those_of_a_replay_whenever_they_come_and_whatever_befalls_the_server(self, start, clock, seed):
        chance = random.Random(seed)
        api = start(rules=PACK, clock=clock)
        for run in read_runs():
            if not run.name.startswith(("tse_lm16", "ent_qk20", "div_lr-", "h_frozenlow")):
                continue
            run_id = api.register(**run.registration())
            for writer, body in spread(run.frames, chance):
                clock.now += chance.choice([0.1, 0.1, 1, 12])
                api.send_ok(run_id, body, writer=writer)
                if chance.random() < 0.2:
                    api.send_ok(run_id, body, writer=writer)
                if chance.random() < 0.1:
                    look(api, clock)
                if chance.random() < 0.02:
                    api = start(rules=PACK, clock=clock)
            for _ in range(3):
                look(api, clock, after_s=20)
            assert live(api, run_id) == replayed(run), run.name
            assert skipped(api, run_id) == 0
            assert read_to(api, run_id) == run.frames[-1].step
