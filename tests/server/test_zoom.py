"""A person asks a live run for a zoom, and its process gets the request with the response to what it sends next."""

import pytest

from tsemon.wire import ASKED

from .conftest import Api, loss_frame, problem


def ask(api, run_id):
    return api.http.post(f"/api/v1/runs/{run_id}/zoom")


def asked_ok(api, run_id):
    reply = ask(api, run_id)
    assert reply.status_code == 200, reply.text
    return reply.json()


def pulse(api, run_id, attempt=1):
    body = {"writer": "w", "attempt": attempt, "step": 5}
    return told(api.http.post(f"/api/v1/runs/{run_id}/heartbeat", json=body).json())


def told(reply):
    """The ids of the requests in a response to a training process."""
    return [alert["alert_id"] for alert in reply["alerts"] if alert["rule"] == ASKED]


@pytest.fixture
def api(start, clock):
    return start(clock=clock)


@pytest.fixture
def run_id(api):
    run_id = api.register()
    api.send_ok(run_id, [loss_frame(0)])
    return run_id


class TestARequestForAZoom:
    def test_names_the_attempt_and_the_newest_sample(self, api, run_id):
        assert asked_ok(api, run_id) == {"run_id": run_id, "attempt": 1, "after_step": 0}

    def test_comes_with_the_response_to_the_next_frames_and_not_with_the_one_after(self, api, run_id):
        asked_ok(api, run_id)
        assert len(told(api.send_ok(run_id, [loss_frame(1)]))) == 1
        assert told(api.send_ok(run_id, [loss_frame(2)])) == []

    def test_comes_with_heartbeats_until_there_are_frames(self, api, run_id):
        asked_ok(api, run_id)
        first, second = pulse(api, run_id), pulse(api, run_id)
        assert first == second == told(api.send_ok(run_id, [loss_frame(1)]))
        api.send_ok(run_id, [loss_frame(2)])
        assert pulse(api, run_id) == []

    @pytest.mark.both_engines
    def test_comes_again_if_the_response_was_lost(self, api, run_id):
        asked_ok(api, run_id)
        first = told(api.send_ok(run_id, [loss_frame(1)]))
        assert told(api.send_ok(run_id, [loss_frame(1)])) == first
        assert told(api.send_ok(run_id, [loss_frame(1), loss_frame(2)])) == first
        assert told(api.send_ok(run_id, [loss_frame(3)])) == []

    def test_is_one_if_there_are_two_before_it_comes(self, api, run_id, clock):
        asked_ok(api, run_id)
        first = pulse(api, run_id)
        clock.now += 1
        asked_ok(api, run_id)
        assert told(api.send_ok(run_id, [loss_frame(1)])) == first
        assert told(api.send_ok(run_id, [loss_frame(2)])) == []

    def test_is_another_one_later(self, api, run_id, clock):
        asked_ok(api, run_id)
        first = told(api.send_ok(run_id, [loss_frame(1)]))
        api.send_ok(run_id, [loss_frame(2)])
        clock.now += 1
        asked_ok(api, run_id)
        assert told(api.send_ok(run_id, [loss_frame(3)])) != first

    def test_comes_from_every_server_of_the_database(self, api, run_id, database, clock):
        other = Api(database, clock=clock)
        asked_ok(api, run_id)
        assert len(told(other.send_ok(run_id, [loss_frame(1)]))) == 1
        assert told(api.send_ok(run_id, [loss_frame(2)])) == []
        other.close()

    def test_is_no_alert_of_the_run(self, api, run_id):
        asked_ok(api, run_id)
        pulse(api, run_id)
        assert api.get("/alerts")["alerts"] == []
        assert api.get(f"/runs/{run_id}")["open_alerts"] == 0

    def test_is_for_the_current_attempt(self, api, run_id):
        api.register(resume_step=1)
        assert asked_ok(api, run_id)["attempt"] == 2
        assert pulse(api, run_id) == []
        assert len(pulse(api, run_id, attempt=2)) == 1

    def test_is_refused_if_there_is_no_such_run(self, api):
        assert problem(ask(api, "none"))[:2] == (404, "unknown_run")

    @pytest.mark.parametrize("state", ["finished", "failed"])
    def test_is_refused_if_the_run_has_ended(self, api, run_id, state):
        api.http.patch(f"/api/v1/runs/{run_id}", json={"state": state})
        status, error, detail = problem(ask(api, run_id))
        assert (status, error) == (409, "run_not_live")
        assert f"it is {state}" in detail

    def test_is_refused_if_the_process_is_silent(self, api, run_id, clock):
        clock.now += 96
        status, error, detail = problem(ask(api, run_id))
        assert (status, error) == (409, "run_not_live")
        assert "its process has sent nothing for 95 s" in detail
