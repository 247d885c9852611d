"""What people and runs do to alerts that the rules have opened."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from tests.server.conftest import loss_frame, problem
from tsemon.errors import WrongAlertState
from tsemon_server.store import Store


@pytest.fixture
def run_id(api):
    return api.register()


@pytest.fixture
def alert_id(api, run_id):
    return api.open_alert(run_id)


@pytest.fixture
def stores(api):
    """As of several processes."""
    with ExitStack() as held:
        yield [held.enter_context(closing(Store(api.database.url))) for _ in range(4)]


def post(api, path, **body):
    reply = api.http.post(f"/api/v1{path}", json=body)
    return reply.json() if reply.status_code == 200 else problem(reply)


def delete(api, path):
    reply = api.http.delete(f"/api/v1{path}")
    return reply.json() if reply.status_code == 200 else problem(reply)


def set_state(api, run_id, state):
    assert api.http.patch(f"/api/v1/runs/{run_id}", json={"state": state}).status_code == 200


def ended(api, alert_id):
    alert = api.get(f"/alerts/{alert_id}")
    return alert["state"], alert["resolved_step"], alert["resolved_reason"]


class TestAnAlertThatSomebodyHasSeenTo:
    def test_is_acknowledged_and_says_by_whom(self, start):
        api = start(clock=lambda: 1000.0)
        alert_id = api.open_alert(api.register())
        alert = post(api, f"/alerts/{alert_id}/ack", by="on-call", note="rate too high")
        assert (alert["state"], alert["acknowledged_by"], alert["note"]) == ("acknowledged", "on-call", "rate too high")
        assert alert["acknowledged_at"] == "1970-01-01T00:16:40Z"
        assert api.get(f"/alerts/{alert_id}") == api.get("/alerts")["alerts"][0] == alert

    def test_still_fires(self, api, run_id, alert_id):
        post(api, f"/alerts/{alert_id}/ack", by="on-call")
        assert api.get(f"/runs/{run_id}")["open_alerts"] == 1
        told = api.send_ok(run_id, [loss_frame(0)])["alerts"]
        assert [(alert["alert_id"], alert["state"]) for alert in told] == [(alert_id, "acknowledged")]
        assert "tsemon_alert_firing{" in api.http.get("/metrics").text

    def test_is_seen_to_by_whoever_said_so_first(self, api, alert_id):
        first = post(api, f"/alerts/{alert_id}/ack", by="on-call", note="mine")
        assert post(api, f"/alerts/{alert_id}/ack", by="another") == first

    def test_is_seen_to_by_one_where_several_processes_say_so_at_once(self, alert_id, stores):
        def acknowledge(store):
            with store.write() as writer:
                return writer.alerts.acknowledge(alert_id, f"person {stores.index(store)}", None).acknowledged_by

        with ThreadPoolExecutor(len(stores)) as threads:
            assert len({*threads.map(acknowledge, stores)}) == 1

    def test_may_be_only_pending_and_then_fires_acknowledged(self, api, run_id):
        alert_id = api.open_alert(run_id, state="pending", firing_step=None)
        assert post(api, f"/alerts/{alert_id}/ack", by="on-call")["state"] == "pending"
        with api.app.state.parts.store.write() as writer:
            writer.alerts.change(run_id, 1, "high-loss", "pending", state="firing", firing_step=4)
        assert api.get(f"/alerts/{alert_id}")["state"] == "acknowledged"

    def test_fires_as_before_when_that_is_taken_back(self, api, alert_id):
        before = api.get(f"/alerts/{alert_id}")
        post(api, f"/alerts/{alert_id}/ack", by="on-call", note="mine")
        after = delete(api, f"/alerts/{alert_id}/ack")
        assert after | {"updated_at": 0} == before | {"updated_at": 0}
        assert delete(api, f"/alerts/{alert_id}/ack") == after

    def test_says_so_after_it_is_over(self, api, run_id, alert_id):
        post(api, f"/alerts/{alert_id}/ack", by="on-call")
        with api.app.state.parts.store.write() as writer:
            writer.alerts.change(run_id, 1, "high-loss", "firing", state="resolved", resolved_step=9)
        assert ended(api, alert_id) == ("resolved", 9, "clear")
        assert api.get(f"/alerts/{alert_id}")["acknowledged_by"] == "on-call"

    @pytest.mark.parametrize("method", ["POST", "DELETE"])
    def test_must_not_be_over(self, api, run_id, alert_id, method):
        post(api, f"/alerts/{alert_id}/resolve", by="on-call")
        status, code, detail = problem(
            api.http.request(method, f"/api/v1/alerts/{alert_id}/ack", json={"by": "another"})
        )
        assert (status, code) == (409, WrongAlertState.code)
        assert f"the alert {alert_id} is over" in detail
        assert api.get(f"/alerts/{alert_id}")["acknowledged_by"] == "on-call"

    @pytest.mark.parametrize(
        "body", [{}, {"by": ""}, {"by": "two\nlines"}, {"by": "on-call", "note": 3}, {"by": "a", "x": 1}]
    )
    def test_needs_a_name(self, api, alert_id, body):
        assert post(api, f"/alerts/{alert_id}/ack", **body)[:2] == (422, "invalid_argument")
        assert api.get(f"/alerts/{alert_id}")["state"] == "firing"


@pytest.mark.parametrize("alert_id", ["77", "x", "99999999999999999999", "-1", "²"])
class TestAnAlertThatIsNotThere:
    def test_is_told_as_such(self, api, alert_id):
        found = [
            api.get(f"/alerts/{alert_id}"),
            post(api, f"/alerts/{alert_id}/ack", by="on-call"),
            delete(api, f"/alerts/{alert_id}/ack"),
            post(api, f"/alerts/{alert_id}/resolve", by="on-call"),
        ]
        assert [answer[:2] for answer in found] == [(404, "unknown_alert")] * 4


class TestAnAlertThatSomebodyCallsOver:
    def test_is_over_at_the_newest_step(self, api, run_id, alert_id):
        api.send_ok(run_id, [loss_frame(30)])
        alert = post(api, f"/alerts/{alert_id}/resolve", by="on-call", note="known")
        assert ended(api, alert_id) == ("resolved", 30, "by hand")
        assert (alert["acknowledged_by"], alert["note"]) == ("on-call", "known")

    def test_is_over_no_earlier_than_it_fired(self, api, alert_id):
        post(api, f"/alerts/{alert_id}/resolve", by="on-call")
        assert ended(api, alert_id) == ("resolved", 4, "by hand")

    def test_fires(self, api, run_id, alert_id):
        pending = api.open_alert(run_id, state="pending", firing_step=None)
        assert post(api, f"/alerts/{pending}/resolve", by="on-call")[:2] == (409, "wrong_alert_state")
        post(api, f"/alerts/{alert_id}/resolve", by="on-call")
        assert post(api, f"/alerts/{alert_id}/resolve", by="another")[:2] == (409, "wrong_alert_state")
        assert api.get(f"/alerts/{alert_id}")["acknowledged_by"] == "on-call"


@pytest.mark.parametrize("state", ["finished", "failed"])
class TestTheEndOfARun:
    @pytest.mark.both_engines
    def test_is_at_the_newest_step_of_this_run_whatever_others_have(self, start, state):
        api = start()
        run_ids = [api.register(name) for name in ("short", "long", "ended")]
        alert_ids = [api.open_alert(run_id) for run_id in run_ids]
        for run_id, step in zip(run_ids, (50, 900, 70), strict=True):
            api.send_ok(run_id, [loss_frame(step)])
        set_state(api, run_ids[2], state)
        assert ended(api, alert_ids[2]) == ("resolved", 70, "run ended")

    def test_ends_what_fires_and_says_that_it_still_did(self, api, run_id, alert_id, state):
        api.send_ok(run_id, [loss_frame(30)])
        set_state(api, run_id, state)
        assert ended(api, alert_id) == ("resolved", 30, "run ended")
        assert api.get(f"/runs/{run_id}")["open_alerts"] == 0
        assert "tsemon_alert_firing{" not in api.http.get("/metrics").text

    def test_counts_what_fired_until_then_unless_that_was_for_information(self, api, run_id, alert_id, state):
        api.open_alert(run_id, "other", severity="info")
        assert api.get(f"/runs/{run_id}")["alerts_at_end"] == 0
        assert api.get("/alerts", at_end=True)["alerts"] == []
        set_state(api, run_id, state)
        assert api.get(f"/runs/{run_id}")["alerts_at_end"] == 1
        assert [alert["alert_id"] for alert in api.get("/alerts", at_end=True)["alerts"]] == [alert_id]
        assert [alert["rule"] for alert in api.get("/alerts", at_end=False)["alerts"]] == ["other"]

    def test_forgets_what_was_pending(self, api, run_id, state):
        api.open_alert(run_id, state="pending", firing_step=None)
        set_state(api, run_id, state)
        assert api.get("/alerts")["alerts"] == []

    def test_leaves_alone_what_was_over_and_what_is_of_others(self, api, run_id, alert_id, state):
        post(api, f"/alerts/{alert_id}/resolve", by="on-call")
        of_other = api.open_alert(api.register("other"))
        set_state(api, run_id, state)
        assert ended(api, alert_id) == ("resolved", 4, "by hand")
        assert ended(api, of_other) == ("firing", None, None)

    def test_is_taken_back_when_the_run_goes_on(self, api, run_id, alert_id, state):
        over = api.open_alert(run_id, "other")
        post(api, f"/alerts/{alert_id}/ack", by="on-call")
        post(api, f"/alerts/{over}/resolve", by="on-call")
        set_state(api, run_id, state)
        set_state(api, run_id, "running")
        assert ended(api, alert_id) == ("acknowledged", None, None)
        assert ended(api, over) == ("resolved", 4, "by hand")

    def test_stays_where_a_new_attempt_goes_on(self, api, run_id, alert_id, state):
        set_state(api, run_id, state)
        api.register(resume_step=2)
        set_state(api, run_id, "running")
        assert ended(api, alert_id) == ("resolved", 4, "run ended")


class TestANewAttempt:
    def test_ends_what_fires_for_that_reason(self, api, run_id, alert_id):
        api.fall_silent(run_id)
        api.register(resume_step=20)
        assert ended(api, alert_id) == ("resolved", 20, "new attempt")


class TestThatAnAlertIsOver:
    def notices(self, api):
        return {str(alert_id) for (alert_id,) in api.database.execute("SELECT alert_id FROM notice")}

    @pytest.mark.parametrize("how", ["run ended", "new attempt", "by hand"])
    def test_is_for_whoever_was_told_of_it(self, api, run_id, alert_id, how):
        api.database.execute("DELETE FROM notice")
        api.fall_silent(run_id)
        {
            "run ended": lambda: set_state(api, run_id, "failed"),
            "new attempt": lambda: api.register(resume_step=9),
            "by hand": lambda: post(api, f"/alerts/{alert_id}/resolve", by="on-call"),
        }[how]()
        assert ended(api, alert_id)[2] == how
        assert self.notices(api) == {alert_id}

    def test_is_not_so_after_all_where_the_run_goes_on(self, api, run_id, alert_id):
        set_state(api, run_id, "failed")
        api.database.execute("DELETE FROM notice")
        set_state(api, run_id, "running")
        assert self.notices(api) == {alert_id}


class TestTheListOfAlerts:
    @pytest.fixture
    def ids(self, api):
        """Alerts by name: one of each kind."""
        runs = {project: api.register(project=project) for project in ("a", "b")}
        found = {
            "firing": api.open_alert(runs["a"]),
            "seen": api.open_alert(runs["a"], "stall"),
            "pending": api.open_alert(runs["b"], state="pending", firing_step=None, family="norm"),
            "over": api.open_alert(runs["b"], "stall"),
        }
        post(api, f"/alerts/{found['seen']}/ack", by="on-call")
        post(api, f"/alerts/{found['over']}/resolve", by="on-call")
        api.http.post(
            "/api/v1/silences", json={"project": "b", "until": "2999-01-01T00:00:00Z", "created_by": "on-call"}
        )
        return found

    @pytest.mark.parametrize(
        ("wanted", "expected"),
        [
            ({"project": "a"}, "firing seen"),
            ({"family": "norm"}, "pending"),
            ({"acknowledged": True}, "seen over"),
            ({"acknowledged": False}, "firing pending"),
            ({"silenced": True}, "pending over"),
            ({"silenced": False}, "firing seen"),
            ({"state": "firing"}, "firing"),
            ({"state": "acknowledged"}, "seen"),
            ({"state": "pending"}, "pending"),
            ({"state": "resolved"}, "over"),
            ({"state": ["firing", "acknowledged", "pending"]}, "firing pending seen"),
            ({"project": "b", "acknowledged": True, "rule": "stall", "silenced": True}, "over"),
        ],
    )
    def test_filters(self, api, ids, wanted, expected):
        found = {alert["alert_id"] for alert in api.get("/alerts", **wanted)["alerts"]}
        assert sorted(name for name, alert_id in ids.items() if alert_id in found) == sorted(expected.split())
