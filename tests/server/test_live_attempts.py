"""Several live processes of one name: each is watched, and each is told of the others."""

import math

import pytest

from tests.server.conftest import loss_frame, problem
from tsemon_server.alerts.liveness import Liveness
from tsemon_server.rules.documents import load
from tsemon_server.store.ledger.attempts import HEARD_S, LEASE_S

HIGH = """
rules:
  - name: high-loss
    family: loss
    severity: warning
    title: The loss is high
    when: {value: [{scalar: loss}], above: 10}
    for: {samples: 3, steps: 2}
    advice: Stop.
    source: this test
    origin: this test
"""


@pytest.fixture
def api(start, clock):
    return start(rules=load(HIGH), clock=clock)


@pytest.fixture
def run_id(api):
    return api.register()


def registered(api, run="gpt", **fields):
    reply = api.http.post("/api/v1/runs", json={"run": run, "blocks": ["h.0", "h.1"], **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def send(api, run_id, losses, first=0, attempt=1):
    return api.send_ok(run_id, [loss_frame(first + i, float(loss)) for i, loss in enumerate(losses)], attempt=attempt)


def alerts(api, **which):
    return [
        (alert["attempt"], alert["state"], alert["resolved_reason"]) for alert in api.get("/alerts", **which)["alerts"]
    ]


def end(api, run_id, attempt, state="finished"):
    api.http.patch(f"/api/v1/runs/{run_id}", json={"state": state, "attempt": attempt}).raise_for_status()


def look(api, clock):
    """What the service does by its clock."""
    Liveness(api.parts.store, api.parts.active, listen_s=0.0, clock=clock, monotonic=clock).look()


class TestTwoLiveAttempts:
    def test_are_both_evaluated(self, api, run_id):
        send(api, run_id, [1.0])
        registered(api)
        assert [a["state"] for a in send(api, run_id, [20] * 3, 1, attempt=1)["alerts"]] == ["firing"]
        assert [a["state"] for a in send(api, run_id, [20] * 3, 0, attempt=2)["alerts"]] == ["firing"]
        assert sorted(alerts(api)) == [(1, "firing", None), (2, "firing", None)]
        send(api, run_id, [1] * 3, 4, attempt=1)
        assert sorted(alerts(api)) == [(1, "resolved", "clear"), (2, "firing", None)]

    def test_are_judged_each_by_its_own_frames(self, api, run_id):
        registered(api)
        for step in range(4):
            send(api, run_id, [20], step, attempt=1)
            assert send(api, run_id, [1], step, attempt=2)["alerts"] == []
        assert alerts(api) == [(1, "firing", None)]

    def test_keep_what_fired_before_the_second_began(self, api, run_id):
        send(api, run_id, [20] * 3)
        registered(api)
        assert alerts(api) == [(1, "firing", None)]

    def test_hear_of_each_other(self, api, run_id):
        assert send(api, run_id, [1])["live_attempts"] == []
        assert registered(api)["live_attempts"] == [1]
        assert send(api, run_id, [1], 1)["live_attempts"] == [2]
        assert send(api, run_id, [1], attempt=2)["live_attempts"] == [1]
        for attempt, other in ((1, 2), (2, 1)):
            pulse = {"writer": "w", "attempt": attempt, "step": 5}
            assert api.http.post(f"/api/v1/runs/{run_id}/heartbeat", json=pulse).json()["live_attempts"] == [other]
        assert [(a["attempt"], a["state"], a["is_live"]) for a in api.get(f"/runs/{run_id}")["attempts"]] == [
            *((1, "running", True), (2, "running", True))
        ]

    @pytest.mark.parametrize("first", [1, 2])
    def test_are_a_run_that_runs_until_both_have_ended(self, api, run_id, first):
        registered(api)
        for attempt in (1, 2):
            send(api, run_id, [20] * 3, attempt=attempt)
        end(api, run_id, first)
        assert api.get(f"/runs/{run_id}")["state"] == "running"
        assert sorted(alerts(api)) == sorted([(first, "resolved", "run ended"), (3 - first, "firing", None)])
        end(api, run_id, 3 - first, "failed")
        assert api.get(f"/runs/{run_id}")["state"] == ("failed" if first == 1 else "finished")

    def test_count_each_what_fired_when_it_ended(self, api, run_id):
        registered(api)
        for attempt in (1, 2):
            send(api, run_id, [20] * 3, attempt=attempt)
            end(api, run_id, attempt)
        assert sorted(alerts(api, at_end=True)) == [(1, "resolved", "run ended"), (2, "resolved", "run ended")]
        assert api.get(f"/runs/{run_id}")["alerts_at_end"] == 2

    def test_survive_a_restart_of_the_service(self, start, api, run_id, clock):
        registered(api)
        for attempt in (1, 2):
            send(api, run_id, [20] * 2, attempt=attempt)
        again = start(rules=load(HIGH), clock=clock)
        for attempt in (1, 2):
            assert [a["firing_step"] for a in send(again, run_id, [20], 2, attempt=attempt)["alerts"]] == [2]


class TestAnAttemptThatALaterOneContinued:
    def test_does_not_count_at_the_end(self, api, run_id, clock):
        send(api, run_id, [20] * 3)
        end(api, run_id, 1, "failed")
        clock.now += 1
        registered(api, resume_step=3)
        send(api, run_id, [1] * 3, 3, attempt=2)
        end(api, run_id, 2)
        assert alerts(api) == [(1, "resolved", "run ended")]
        assert alerts(api, at_end=True) == []


class TestAnAttemptThatFellSilent:
    def test_is_replaced_by_the_next(self, api, run_id, clock):
        send(api, run_id, [20] * 3)
        clock.now += LEASE_S + HEARD_S + 1
        assert registered(api, resume_step=3)["live_attempts"] == []
        assert alerts(api) == [(1, "resolved", "new attempt")]
        assert [a["state"] for a in api.get(f"/runs/{run_id}")["attempts"]] == ["replaced", "running"]

    def test_is_replaced_in_time_if_it_fell_silent_later(self, api, run_id, clock):
        send(api, run_id, [20] * 3)
        registered(api, resume_step=3)
        clock.now += 60
        send(api, run_id, [1], 3, attempt=2)
        look(api, clock)
        assert alerts(api) == [(1, "firing", None)]
        clock.now += LEASE_S + HEARD_S - 59
        send(api, run_id, [1], 4, attempt=2)
        look(api, clock)
        assert alerts(api) == [(1, "resolved", "new attempt")]

    def test_has_alerts_that_lasted_as_long_as_it_did(self, api, run_id, clock):
        registered(api)  # hides all of the first attempt, which goes on for a while
        send(api, run_id, [20] * 9)
        clock.now += LEASE_S + HEARD_S + 1
        send(api, run_id, [1], attempt=2)
        look(api, clock)
        (alert,) = api.get("/alerts")["alerts"]
        assert (alert["resolved_reason"], alert["firing_step"] < 8, alert["resolved_step"]) == ("new attempt", True, 8)

    def test_does_not_keep_a_run_running_that_has_ended(self, api, run_id, clock):
        registered(api)
        end(api, run_id, 2)
        assert api.get(f"/runs/{run_id}")["state"] == "running"
        clock.now += LEASE_S + HEARD_S + 1
        look(api, clock)
        assert api.get(f"/runs/{run_id}")["state"] == "finished"

    def test_goes_on_if_it_is_heard_of_again(self, api, run_id, clock):
        send(api, run_id, [20] * 3)
        clock.now += LEASE_S + HEARD_S + 1
        registered(api, resume_step=3)
        assert [a["state"] for a in send(api, run_id, [20], 3)["alerts"]] == ["firing"]
        assert alerts(api) == [(1, "firing", None)]
        assert api.get(f"/runs/{run_id}")["attempts"][0]["is_live"]

    def test_has_what_it_left_behind_evaluated(self, api, run_id, clock):
        send(api, run_id, [20])
        clock.now += LEASE_S + HEARD_S + 1
        registered(api, resume_step=1)
        send(api, run_id, [20, math.nan, 20], 1)
        assert alerts(api)[0][0] == 1


class TestANameInUse:
    def test_makes_another_run_if_so_asked(self, api, run_id):
        for name in ("gpt (2)", "gpt (3)"):
            found = registered(api, on_conflict="new")
            assert (found["run"], found["attempt"], found["live_attempts"]) == (name, 1, [])
            assert found["run_id"] != run_id
        assert registered(api, "gpt (2)", on_conflict="new")["run"] == "gpt (2) (2)"

    def test_is_asked_for_again_with_the_same_key(self, api, run_id):
        first, again = (registered(api, on_conflict="new", attempt_key="k") for _ in range(2))
        assert first == again
        assert first["run"] == "gpt (2)"
        assert registered(api, "other", on_conflict="new", attempt_key="k")["run"] == "other"

    def test_is_refused_if_so_asked(self, api, run_id):
        reply = api.http.post("/api/v1/runs", json={"run": "gpt", "on_conflict": "refuse"})
        status, error, text = problem(reply)
        assert (status, error) == (409, "name_in_use")
        assert "a live process sends to the run 'gpt'" in text
        assert len(api.get(f"/runs/{run_id}")["attempts"]) == 1

    @pytest.mark.parametrize("on_conflict", ["new", "refuse"])
    def test_is_free_when_its_process_has_ended_or_fell_silent(self, api, run_id, clock, on_conflict):
        end(api, run_id, 1)
        assert registered(api, on_conflict=on_conflict)["attempt"] == 2
        clock.now += LEASE_S + HEARD_S + 1
        assert registered(api, on_conflict=on_conflict)["attempt"] == 3

    def test_that_is_long_leaves_room_for_a_number(self, api):
        name = "x" * 128
        registered(api, name)
        found = registered(api, name, on_conflict="new")["run"]
        assert len(found) <= 128
        assert found.endswith("x (2)")
