import math
from dataclasses import dataclass, field

import pytest

from tsemon_server.rules import Hold, Reading
from tsemon_server.store import Writer

from .conftest import loss_frame


@dataclass(frozen=True)
class HighLoss:
    """Met above 10, clear below 5."""

    name: str = "high_loss"
    family: str = "loss"
    severity: str = "warning"
    hold: Hold = field(default_factory=lambda: Hold(samples=3, steps=0))

    @property
    def advice(self):
        return {"text": "lower the learning rate", "source": "the tests"}

    def read(self, view):
        loss = view.scalars.get("loss", math.nan)
        verdict = "unknown" if math.isnan(loss) else "met" if loss > 10 else "clear" if loss < 5 else "between"
        return Reading(verdict, f"loss is {loss}", {"loss": loss, "bad": math.inf})


@dataclass(frozen=True)
class Raises(HighLoss):
    name: str = "raises"

    def read(self, view):
        raise ZeroDivisionError(f"on purpose at step {view.step}")


@pytest.fixture
def api(start):
    return start(rules=[HighLoss()])


@pytest.fixture
def run_id(api):
    return api.register()


def alerts(api, **params):
    return api.get("/alerts", **params)["alerts"]


def states(found):
    return [(a["state"], a["pending_step"], a["firing_step"], a["resolved_step"]) for a in found]


def send(api, run_id, losses, from_step=0, **where):
    return api.send_ok(run_id, [loss_frame(from_step + i, loss) for i, loss in enumerate(losses)], **where)["alerts"]


class TestAnAlert:
    def test_is_pending_then_firing_then_resolved(self, api, run_id):
        assert send(api, run_id, [1, 1]) == []
        assert states(send(api, run_id, [20], 2)) == [("pending", 2, None, None)]
        assert states(send(api, run_id, [20], 3)) == [("pending", 2, None, None)]
        assert states(send(api, run_id, [20], 4)) == [("firing", 2, 4, None)]
        assert states(send(api, run_id, [1, 1], 5)) == [("firing", 2, 4, None)]
        assert states(send(api, run_id, [1], 7)) == [("resolved", 2, 4, 7)]
        assert send(api, run_id, [1], 8) == []
        assert states(alerts(api)) == [("resolved", 2, 4, 7)]

    def test_is_over_rest_what_the_reply_said(self, api, run_id):
        told = send(api, run_id, [20, 20, 20])
        assert alerts(api) == told
        assert told[0] | {"opened_at": 0, "updated_at": 0} == {
            "alert_id": "1",
            "run_id": run_id,
            "project": "default",
            "run": "gpt",
            "attempt": 1,
            "rule": "high_loss",
            "rule_version": None,
            "family": "loss",
            "severity": "warning",
            "state": "firing",
            "pending_step": 0,
            "firing_step": 2,
            "resolved_step": None,
            "resolved_reason": None,
            "acknowledged_at": None,
            "acknowledged_by": None,
            "note": None,
            "silenced": False,
            "summary": "loss is 20.0",
            "evidence": told[0]["evidence"],
            "advice": {"text": "lower the learning rate", "source": "the tests"},
            "opened_at": 0,
            "updated_at": 0,
        }

    def test_is_the_same_whether_frames_come_alone_or_together_and_in_whatever_order(self, api):
        losses = [1, 20, 20, 20, 1, 1, 1, 20]
        alone, together, shuffled = (api.register(name) for name in ("alone", "together", "shuffled"))
        for step, loss in enumerate(losses):
            send(api, alone, [loss], step)
        send(api, together, losses)
        api.send_ok(shuffled, [loss_frame(step, losses[step]) for step in (3, 1, 7, 0, 2, 6, 5, 4)])
        found = [states(alerts(api, run=run)) for run in (alone, together, shuffled)]
        assert found[0] == [("pending", 7, None, None), ("resolved", 1, 3, 6)]
        assert found[1] == found[2] == found[0]

    def test_goes_away_when_it_was_only_pending(self, api, run_id):
        send(api, run_id, [20, 20])
        assert send(api, run_id, [1, 1, 1], 2) == []
        assert alerts(api) == []

    def test_keeps_the_evidence_of_its_firing(self, api, run_id):
        send(api, run_id, [20, 20, 30, 40, 1, 1, 1])
        (alert,) = alerts(api)
        assert (alert["summary"], alert["evidence"]["loss"]) == ("loss is 30.0", 30.0)

    def test_shows_what_is_not_finite_as_null(self, api, run_id):
        assert send(api, run_id, [20])[0]["evidence"]["bad"] is None

    def test_survives_a_restart_in_the_middle_of_pending(self, start):
        api = start(rules=[HighLoss()])
        run_id = api.register()
        send(api, run_id, [20, 20])
        api = start(rules=[HighLoss()])
        assert states(alerts(api)) == [("pending", 0, None, None)]
        assert states(send(api, run_id, [20], 2)) == [("firing", 0, 2, None)]

    def test_opens_again_as_another(self, api, run_id):
        send(api, run_id, [20, 20, 20, 1, 1, 1, 20, 20, 20])
        assert states(alerts(api)) == [("firing", 6, 8, None), ("resolved", 0, 2, 5)]

    def test_counts_as_open_on_its_run(self, api, run_id):
        send(api, run_id, [20])
        assert api.get(f"/runs/{run_id}")["open_alerts"] == 1
        send(api, run_id, [20, 20, 1, 1, 1], 1)
        assert api.get(f"/runs/{run_id}")["open_alerts"] == 0

    def test_rides_back_on_a_heartbeat(self, api, run_id):
        told = send(api, run_id, [20])
        reply = api.http.post(f"/api/v1/runs/{run_id}/heartbeat", json={"writer": "w", "attempt": 1, "step": 3})
        assert reply.json()["alerts"] == told


class TestFramesThatAreNotEvaluated:
    def test_are_those_that_were_evaluated_before(self, api, run_id):
        send(api, run_id, [20, 20])
        assert states(send(api, run_id, [20, 20])) == [("pending", 0, None, None)]

    def test_are_those_that_come_late(self, api, run_id):
        send(api, run_id, [20], 10)
        assert states(send(api, run_id, [20, 20, 20], 3)) == [("pending", 10, None, None)]
        assert list(api.losses(run_id)) == [3, 4, 5, 10]

    def test_are_those_of_an_older_attempt(self, api, run_id):
        api.register(resume_step=100)
        assert send(api, run_id, [20, 20, 20]) == []
        assert list(api.losses(run_id)) == [0, 1, 2]


class TestWhatTheRulesRemember:
    def test_is_committed_with_the_frames_and_the_alerts_or_none_of_them_is(self, api, run_id, monkeypatch):
        def fail(*_):
            raise OSError("on purpose")

        with monkeypatch.context() as patch:
            patch.setattr(Writer, "keep_rule_state", fail)
            assert api.send(run_id, [loss_frame(step, 20.0) for step in range(3)]).status_code == 500
        assert api.losses(run_id) == {}
        assert alerts(api) == []
        assert api.get(f"/runs/{run_id}")["num_frames"] == 0
        receipt = api.send_ok(run_id, [loss_frame(step, 20.0) for step in range(3)])
        assert (receipt["accepted"], receipt["duplicates"]) == (3, 0)
        assert states(receipt["alerts"]) == [("firing", 0, 2, None)]


class TestANewAttempt:
    def test_resolves_what_fires_at_its_start(self, api, run_id):
        send(api, run_id, [20, 20, 20])
        api.register(resume_step=2)
        assert states(alerts(api)) == [("resolved", 0, 2, 2)]

    def test_resolves_no_earlier_than_it_fired(self, api, run_id):
        send(api, run_id, [20] * 10)
        api.register(resume_step=1)
        assert states(alerts(api)) == [("resolved", 0, 2, 2)]

    def test_forgets_what_was_pending(self, api, run_id):
        send(api, run_id, [20, 20])
        api.register(resume_step=2)
        assert alerts(api) == []
        assert states(send(api, run_id, [20], 2, attempt=2)) == [("pending", 2, None, None)]

    def test_may_start_before_the_last_step_that_was_evaluated(self, api, run_id):
        send(api, run_id, [1] * 10)
        api.register(resume_step=3)
        assert states(send(api, run_id, [20, 20, 20], 3, attempt=2)) == [("firing", 3, 5, None)]


class TestARuleThatRaises:
    def test_loses_neither_the_frames_nor_the_other_rules(self, start):
        api = start(rules=[Raises(), HighLoss()])
        run_id = api.register()
        assert states(send(api, run_id, [20, 20, 20])) == [("firing", 0, 2, None)]
        assert list(api.losses(run_id)) == [0, 1, 2]
        assert 'tsemon_rule_errors_total{rule="raises"} 3.0' in api.http.get("/metrics").text


class TestTheListOfAlerts:
    @pytest.fixture
    def ids(self, api):
        return {name: api.register(name) for name in "ab"}

    def test_filters(self, api, ids):
        send(api, ids["a"], [20, 20, 20])
        send(api, ids["b"], [20])
        runs = lambda **params: [alert["run"] for alert in alerts(api, **params)]  # noqa: E731
        assert runs() == ["b", "a"]
        assert runs(state="firing") == ["a"]
        assert runs(run=ids["b"]) == ["b"]
        assert runs(rule="high_loss") == ["b", "a"]
        assert runs(rule="other") == []
        assert runs(severity="critical") == []

    def test_since_a_time_has_those_that_changed_since(self, start):
        now = [1000.0]
        api = start(rules=[HighLoss()], clock=lambda: now[0])
        old, new = api.register("old"), api.register("new")
        send(api, old, [20])
        now[0] = 2000.0
        send(api, new, [20])
        assert [alert["run"] for alert in alerts(api, since="1970-01-01T00:20:00Z")] == ["new"]
        send(api, old, [20, 20], 1)
        assert [alert["run"] for alert in alerts(api, since="1970-01-01T01:20:00+01:00")] == ["new", "old"]

    def test_needs_a_time_zone(self, api):
        assert api.get("/alerts", since="2026-01-01T00:00:00")[:2] == (422, "invalid_argument")

    def test_is_not_shifted_by_alerts_that_come_between_two_pages(self, api):
        for name in "abc":
            send(api, api.register(name), [20])
        page = api.get("/alerts", limit=2)
        send(api, api.register("d"), [20])
        rest = api.get("/alerts", limit=2, cursor=page["next_cursor"])
        assert [alert["run"] for alert in page["alerts"] + rest["alerts"]] == ["c", "b", "a"]
        assert rest["next_cursor"] is None
