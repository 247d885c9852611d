import math

import pytest

from tsemon_server.rules.documents import load
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.store.ledger.progress import RuleProgressChanges

from .conftest import layer_frame, loss_frame

HIGH_LOSS = load("""
rules:
  - name: high-loss
    family: loss
    severity: warning
    title: The loss is high
    when: {value: [{scalar: loss}], above: 10}
    clear: {value: [{scalar: loss}], below: 5}
    for: {samples: 3}
    evidence: {unbounded: [{scalar: loss}, {times: 1e300}, {times: 1e300}]}
    advice: lower the learning rate
    source: the tests
    origin: convention
""")


@pytest.fixture
def api(start):
    return start(rules=HIGH_LOSS)


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
            "rule": "high-loss",
            "rule_version": 1,
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
            "superseded": False,
            "incident_id": "1",
            "summary": "The loss is high: loss is 20 (above 10).",
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
        assert alert["summary"] == "The loss is high: loss is 30 (above 10)."
        assert alert["evidence"]["conditions"][0]["seen"] == 30

    def test_shows_what_is_not_finite_as_null(self, api, run_id):
        assert send(api, run_id, [20])[0]["evidence"]["numbers"] == {"unbounded": None}

    def test_survives_a_restart_in_the_middle_of_pending(self, start):
        api = start(rules=HIGH_LOSS)
        run_id = api.register()
        send(api, run_id, [20, 20])
        api = start(rules=HIGH_LOSS)
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


class TestWhatTheRulesRemember:
    def test_is_committed_with_the_frames_and_the_alerts_or_none_of_them_is(self, api, run_id, monkeypatch):
        def fail(*_):
            raise OSError("on purpose")

        with monkeypatch.context() as patch:
            patch.setattr(RuleProgressChanges, "keep", fail)
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
        api.fall_silent(run_id)
        api.register(resume_step=2)
        assert states(alerts(api)) == [("resolved", 0, 2, 2)]

    def test_resolves_what_fired_in_frames_that_it_hides_at_the_last_of_them(self, api, run_id):
        send(api, run_id, [20] * 10)
        api.fall_silent(run_id)
        api.register(resume_step=1)
        assert states(alerts(api)) == [("resolved", 0, 2, 9)]

    def test_forgets_what_was_pending(self, api, run_id):
        send(api, run_id, [20, 20])
        api.fall_silent(run_id)
        api.register(resume_step=2)
        assert alerts(api) == []
        assert states(send(api, run_id, [20], 2, attempt=2)) == [("pending", 2, None, None)]

    def test_may_start_before_the_last_step_that_was_evaluated(self, api, run_id):
        send(api, run_id, [1] * 10)
        api.fall_silent(run_id)
        api.register(resume_step=3)
        assert states(send(api, run_id, [20, 20, 20], 3, attempt=2)) == [("firing", 3, 5, None)]


class TestAFrameThatComesLate:
    def test_is_read_where_it_belongs(self, api, run_id):
        send(api, run_id, [20], 10)
        assert states(send(api, run_id, [20, 20, 20], 3)) == [("firing", 3, 5, None)]

    def test_leaves_the_alert_that_was_there_with_its_id(self, api, run_id):
        (fired,) = send(api, run_id, [20, 20, 20], 10)
        assert states([fired]) == [("firing", 10, 12, None)]
        (moved,) = send(api, run_id, [20], 9)
        assert (moved["alert_id"], states([moved])) == (fired["alert_id"], [("firing", 9, 11, None)])

    def test_may_show_that_an_alert_was_none(self, api, run_id):
        send(api, run_id, [20], 0)
        send(api, run_id, [1], 5)
        assert states(alerts(api)) == [("pending", 0, None, None)]
        assert send(api, run_id, [1, 1], 2) == []

    def test_does_not_erase_what_people_were_told(self, api, run_id):
        send(api, run_id, [20, 20], 0)
        (fired,) = send(api, run_id, [20], 9)
        send(api, run_id, [1, 1, 1, 1, 1, 1], 2)
        send(api, run_id, [1, 1, 1], 10)
        (kept,) = alerts(api)
        assert (kept["alert_id"], states([kept])) == (fired["alert_id"], [("resolved", 0, 9, 9)])

    def test_may_reopen_what_was_resolved(self, api, run_id):
        send(api, run_id, [20, 20, 20, 1, 1], 0)
        assert states(send(api, run_id, [1], 10)) == [("resolved", 0, 2, 10)]
        assert states(send(api, run_id, [20], 7)) == [("firing", 0, 2, None)]

    def test_may_be_late_by_sixteen_frames_at_any_time(self, api, run_id):
        steps = [step for step in range(80) if step not in (30, 31, 32)]
        for step in steps[:46]:
            send(api, run_id, [1], step)
        send(api, run_id, [20, 20, 20], 30)
        assert states(alerts(api)) == [("resolved", 30, 32, 35)]

    @pytest.mark.parametrize(
        ("from_step", "losses", "others"),
        [(9, [20], []), (5, [20, 20, 20, 20], []), (11, [1, 1, 1, 20, 20, 20], []),
         (1, [20, 20, 20, 1, 1, 1], [("resolved", 1, 3, 6)])],
    )  # fmt: skip
    def test_leaves_what_was_called_over_by_hand_and_opens_it_not_again(self, api, run_id, from_step, losses, others):
        send(api, run_id, [1])
        (fired,) = api.send_ok(run_id, [loss_frame(step, 20) for step in (10, 20, 30)])["alerts"]
        said = self.say(api, fired, "resolve")
        send(api, run_id, losses, from_step)
        assert api.get(f"/alerts/{fired['alert_id']}") == said
        assert states(alerts(api)) == [*others, ("resolved", 10, 30, 30)]

    def test_opens_what_fires_after_another_was_called_over_by_hand(self, api, run_id):
        (fired,) = send(api, run_id, [20, 20, 20])
        self.say(api, fired, "resolve")
        send(api, run_id, [1, 1, 1, 20, 20], 3)
        send(api, run_id, [20], 20)
        send(api, run_id, [20], 10)
        assert states(alerts(api)) == [("firing", 6, 10, None), ("resolved", 0, 2, 2)]

    def test_leaves_acknowledged_what_fires(self, api, run_id):
        (fired,) = send(api, run_id, [20, 20, 20], 10)
        self.say(api, fired, "ack")
        (moved,) = send(api, run_id, [20], 9)
        assert (moved["alert_id"], states([moved])) == (fired["alert_id"], [("acknowledged", 9, 11, None)])
        assert (moved["acknowledged_by"], moved["note"]) == ("on-call", "known")

    def test_leaves_acknowledged_what_is_pending_after_another_was_over(self, api, run_id):
        send(api, run_id, [20, 20, 20, 1, 1, 1])
        (pending,) = send(api, run_id, [20], 20)
        self.say(api, pending, "ack")
        send(api, run_id, [1], 10)
        send(api, run_id, [20, 20], 21)
        (fires, _) = alerts(api)
        assert (fires["alert_id"], states([fires])) == (pending["alert_id"], [("acknowledged", 20, 22, None)])
        assert (fires["acknowledged_by"], fires["note"]) == ("on-call", "known")

    def say(self, api, alert, what):
        reply = api.http.post(f"/api/v1/alerts/{alert['alert_id']}/{what}", json={"by": "on-call", "note": "known"})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def test_fills_what_another_writer_left_out_of_its_step(self, start):
        spread = load("""
rules:
  - name: both
    family: norm
    severity: info
    title: Both stages are large
    when: {value: [{layers: hidden_rms}], above: 1, in: {layers: 3}}
    for: {samples: 1}
    advice: a
    source: s
    origin: o
""")
        api = start(rules=spread)
        run_id = api.register()
        nan = math.nan
        assert api.send_ok(run_id, [layer_frame(0, [2, 2, nan], "hidden_rms")], writer="a")["alerts"] == []
        assert states(api.send_ok(run_id, [layer_frame(0, [nan, nan, 2], "hidden_rms")], writer="b")["alerts"]) == [
            ("firing", 0, 0, None)
        ]


@pytest.mark.parametrize("state", ["finished", "failed"])
class TestAFrameThatComesAfterTheEnd:
    def test_leaves_nothing_open(self, api, run_id, state):
        send(api, run_id, [20, 20, 20, 1, 1, 1])
        self.end(api, run_id, state)
        assert send(api, run_id, [20, 20, 20], 6) == []
        assert self.ended(api) == [("run ended", "resolved", 6, 8, 8), ("clear", "resolved", 0, 2, 5)]
        send(api, run_id, [1, 1, 1, 20], 9)
        assert len(alerts(api)) == 2

    def test_leaves_nothing_open_that_it_reopens(self, api, run_id, state):
        send(api, run_id, [20, 20, 20, 1, 1])
        send(api, run_id, [1], 10)
        self.end(api, run_id, state)
        assert send(api, run_id, [20], 7) == []
        assert self.ended(api) == [("run ended", "resolved", 0, 2, 10)]

    def test_opens_nothing_again_that_the_end_called_over(self, api, run_id, state):
        send(api, run_id, [20, 20, 20], 10)
        self.end(api, run_id, state)
        assert send(api, run_id, [20], 9) == []
        assert self.ended(api) == [("run ended", "resolved", 10, 12, 12)]

    def end(self, api, run_id, state):
        assert api.http.patch(f"/api/v1/runs/{run_id}", json={"state": state}).status_code == 200

    def ended(self, api):
        return [(found["resolved_reason"], *states([found])[0]) for found in alerts(api)]


class TestRulesThatFail:
    def test_lose_no_frame(self, api, run_id, monkeypatch):
        def fail(*_):
            raise ZeroDivisionError("on purpose")

        with monkeypatch.context() as patch:
            patch.setattr(Evaluator, "read", fail)
            assert send(api, run_id, [20, 20, 20]) == []
        assert list(api.losses(run_id)) == [0, 1, 2]
        assert "tsemon_rule_errors_total 3.0" in api.http.get("/metrics").text
        assert states(send(api, run_id, [20, 20, 20], 3)) == [("firing", 3, 5, None)]


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
        assert runs(rule="high-loss") == ["b", "a"]
        assert runs(rule="other") == []
        assert runs(severity="critical") == []

    def test_since_a_time_has_those_that_changed_since(self, start):
        now = [1000.0]
        api = start(rules=HIGH_LOSS, clock=lambda: now[0])
        old, new = api.register("old"), api.register("new")
        send(api, old, [20])
        now[0] = 2000.0
        send(api, new, [20])
        assert [alert["run"] for alert in alerts(api, since="1970-01-01T00:20:00Z")] == ["new"]
        send(api, old, [20, 20], 1)
        assert [alert["run"] for alert in alerts(api, since="1970-01-01T01:20:00+01:00")] == ["new", "old"]

    def test_needs_a_time_zone(self, api):
        for wrong in ("2026-01-01T00:00:00", "1767225600", "1767225600000", "-1", "now"):
            assert api.get("/alerts", since=wrong)[:2] == (422, "invalid_argument")

    def test_is_not_shifted_by_alerts_that_come_between_two_pages(self, api):
        for name in "abc":
            send(api, api.register(name), [20])
        page = api.get("/alerts", limit=2)
        send(api, api.register("d"), [20])
        rest = api.get("/alerts", limit=2, cursor=page["next_cursor"])
        assert [alert["run"] for alert in page["alerts"] + rest["alerts"]] == ["c", "b", "a"]
        assert rest["next_cursor"] is None
