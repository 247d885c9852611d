"""Incidents as the server keeps them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tsemon.wire import Array, Frame
from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.program import View
from tsemon_server.services.replay.recording import Attempt
from tsemon_server.services.replay.replaying import replay
from tsemon_server.services.replay.traces import Trace

from .conftest import loss_frame
from .rules import traces

OWN = load("""
rules:
  - {name: high-loss, when: loss > 10 for 2 samples, clear: loss < 5 for 1 sample, severity: warning}
  - {name: very-high-loss, when: loss > 100 for 2 samples, clear: loss < 50 for 1 sample, severity: warning}
""")
WITH_A_STALL = load("""
rules:
  - {name: high-loss, when: loss > 10 for 2 samples, clear: loss < 5 for 1 sample, severity: warning}
  - {name: loss-stall, when: loss > 3 for 4 samples, clear: loss < 3 for 1 sample, severity: info}
""")
SLOW_STALL = load("""
rules:
  - name: loss-stall
    when: loss > 3 and loss < 10 for 40 samples
    clear: loss < 3 for 1 sample
    severity: info
    evidence: {stalled_steps: "steps_since_lowest(loss, by=0.01)"}
""")
WITHOUT_A_LOSS = """
rules:
  - {name: high, when: scalar("mine") > 10 for 1 sample, clear: scalar("mine") < 5 for 1 sample, severity: warning}
"""
VERDICT = (
    "family",
    "severity",
    "rule",
    "step",
    "left_step",
    "settles_step",
    "blocks",
    "where",
    "stack",
    "head",
    "state",
)
VERDICT += ("ended_step", "alerts")


@pytest.fixture
def api(start):
    return start(rules=OWN)


@pytest.fixture
def run_id(api):
    return api.register()


def send(api, run_id, losses, from_step=0, **where):
    return api.send_ok(run_id, [loss_frame(from_step + i, loss) for i, loss in enumerate(losses)], **where)


def post(api, path, **body):
    reply = api.http.post(f"/api/v1{path}", json=body)
    assert reply.status_code == 200, reply.text


def change(api, run_id, state):
    assert api.http.patch(f"/api/v1/runs/{run_id}", json={"state": state}).status_code == 200


def incidents(api, run_id):
    return api.get(f"/runs/{run_id}/incidents")["incidents"]


def only(api, run_id):
    (incident,) = incidents(api, run_id)
    return incident


class TestAnIncident:
    def test_opens_with_the_first_alert_that_fires(self, api, run_id):
        send(api, run_id, [1, 20])
        assert incidents(api, run_id) == []
        send(api, run_id, [20], from_step=2)
        incident = only(api, run_id)
        assert (incident["rule"], incident["state"], incident["step"], incident["left_step"]) == (
            "high-loss",
            "open",
            2,
            1,
        )
        assert incident["summary"] == "High loss: loss is 20 (above 10)."
        assert incident["consequences"] == []
        assert not incident["is_settled"]

    def test_takes_in_alerts_that_fire_while_it_is_open(self, api, run_id):
        send(api, run_id, [1, 20, 20, 200, 200])
        incident = only(api, run_id)
        assert incident["alerts"] == ["high-loss", "very-high-loss"]
        assert incident["severity"] == "warning"
        (consequence,) = incident["consequences"]
        assert (consequence["rule"], consequence["state"], consequence["firing_step"]) == (
            "very-high-loss",
            "firing",
            4,
        )
        ids = {alert["incident_id"] for alert in api.get("/alerts")["alerts"]}
        assert ids == {incident["incident_id"]}

    @pytest.mark.both_engines
    def test_supersedes_a_consequence_that_is_over_before_it(self, api, run_id):
        send(api, run_id, [1, 20, 20, 200, 200, 20])
        (consequence,) = only(api, run_id)["consequences"]
        assert (consequence["state"], consequence["resolved_step"]) == ("superseded", 5)
        assert self.superseded(api) == {"high-loss": False, "very-high-loss": True}
        send(api, run_id, [1], from_step=6)
        incident = only(api, run_id)
        assert (incident["state"], incident["ended_step"]) == ("recovered", 6)
        assert incident["consequences"][0]["state"] == "resolved"
        assert self.superseded(api) == {"high-loss": False, "very-high-loss": False}

    def test_supersedes_a_consequence_of_a_failure_that_lasts_until_the_end(self, api, run_id):
        send(api, run_id, [1, 20, 20, 200, 200, 20])
        change(api, run_id, "failed")
        assert only(api, run_id)["consequences"][0]["state"] == "superseded"
        assert self.superseded(api) == {"high-loss": False, "very-high-loss": True}

    def superseded(self, api):
        return {alert["rule"]: alert["superseded"] for alert in api.get("/alerts")["alerts"]}

    @pytest.mark.parametrize(("also", "state"), [({}, "ended"), ({"loss": 1.0}, "recovered")])
    def test_has_not_recovered_if_no_loss_shows_it(self, start, also, state):
        rules = load(WITHOUT_A_LOSS)
        api = start(rules=rules)
        run_id = api.register()
        frames = [Frame(step, step, 1e9, {"mine": mine, **also}, {}) for step, mine in enumerate([1, 20, 20, 1, 1])]
        api.send_ok(run_id, frames)
        incident = only(api, run_id)
        assert (incident["rule"], incident["state"], incident["ended_step"]) == ("high", state, 3)
        views = [View(frame.step, dict(frame.scalars)) for frame in frames]
        recording = SimpleNamespace(name="mine", problems=[], attempts=lambda own: [Attempt(0, iter(views))])
        (verdict,) = replay(recording, Evaluator(rules)).incidents
        assert verdict.state == state

    @pytest.mark.parametrize(("num_after", "state"), [(40, "ended"), (80, "recovered")])
    def test_has_not_recovered_if_the_run_ends_before_a_stall_could_show(self, api, run_id, num_after, state):
        send(api, run_id, [1, 20, 20, *[1] * num_after])
        assert only(api, run_id)["state"] == "recovered"
        change(api, run_id, "failed")
        assert only(api, run_id)["state"] == state
        change(api, run_id, "running")
        assert only(api, run_id)["state"] == "recovered"

    @pytest.mark.both_engines
    def test_has_not_recovered_if_the_run_ends_while_a_stall_is_pending(self, start):
        slow = load("rules: [{name: loss-stall, when: loss > 3 and loss < 10 for 200 samples, severity: info}]")
        api = start(rules=[*OWN, *slow])
        run_id = api.register()
        send(api, run_id, [1, 20, 20, *[4] * 100])
        for _ in range(2):
            change(api, run_id, "running")
            assert (only(api, run_id)["state"], only(api, run_id)["ended_step"]) == ("open", None)
            (pending,) = api.get("/alerts", state="pending")["alerts"]
            change(api, run_id, "finished")
            assert (only(api, run_id)["state"], only(api, run_id)["ended_step"]) == ("ended", 102)
            assert [alert["rule"] for alert in api.get("/alerts")["alerts"]] == ["high-loss"]
            assert api.get(f"/alerts/{pending['alert_id']}")[0] == 404
        send(api, run_id, [1] * 200, from_step=103)
        assert only(api, run_id)["state"] == "recovered"

    @pytest.mark.both_engines
    @pytest.mark.parametrize("late", [[[33]], [[33], [23]], [[23, 33]], [[23], [33]]])
    def test_remembers_a_stall_that_fires_in_late_frames(self, start, late):
        """Step 23 is missing when the run ends, at step 32. Steps 33 to 69 come after it, too."""
        api = start(rules=[*OWN, *SLOW_STALL])
        run_id = api.register()
        frames = [loss_frame(step, 1 if step == 0 else 20 if step < 3 else 4) for step in range(70)]
        parts = {23: [frames[23]], 33: frames[33:]}
        api.send_ok(run_id, frames[:23] + frames[24:33])
        change(api, run_id, "finished")
        for body in late:
            api.send_ok(run_id, [frame for part in body for frame in parts[part]])
        assert only(api, run_id)["state"] == "ended"
        change(api, run_id, "running")
        assert only(api, run_id)["state"] == "open"
        assert [a["state"] for a in api.get("/alerts", rule="loss-stall")["alerts"]].count("pending") <= 1
        send(api, run_id, [1] * 100, from_step=70)
        assert only(api, run_id)["state"] == "recovered"

    def test_forgets_a_stall_that_late_frames_take_back(self, start):
        api = start(rules=[*OWN, *SLOW_STALL])
        run_id = api.register()
        losses = [1, 20, 20, 1, *[4] * 5]
        frames = [loss_frame(step, loss) for step, loss in enumerate(losses)]
        frames += [loss_frame(step, 1) for step in range(len(losses), 100)]
        api.send_ok(run_id, frames[:9])
        change(api, run_id, "finished")
        assert only(api, run_id)["state"] == "ended"
        api.send_ok(run_id, frames[9:])
        change(api, run_id, "running")
        assert only(api, run_id)["state"] == "recovered"

    def test_is_over_with_the_rule_of_its_stall(self, start):
        api = start(rules=WITH_A_STALL)
        run_id = api.register()
        send(api, run_id, [1, 20, 20, 4, 4])
        change(api, run_id, "finished")
        assert api.http.delete("/api/v1/rules/loss-stall").status_code == 200
        change(api, run_id, "running")
        send(api, run_id, [1] * 100, from_step=5)
        assert only(api, run_id)["state"] != "open"

    def test_has_not_recovered_if_another_attempt_begins_while_a_stall_is_pending(self):
        rules = load("rules: [{name: loss-stall, when: loss > 3 and loss < 10 for 200 samples, severity: info}]")
        views = [View(step, {"loss": loss}) for step, loss in enumerate([1, 20, 20, *[4] * 100])]
        attempts = [Attempt(0, iter(views)), Attempt(103, iter(()))]
        recording = SimpleNamespace(name="mine", problems=[], attempts=lambda own: attempts)
        (verdict,) = replay(recording, Evaluator([*OWN, *rules])).incidents
        assert (verdict.state, verdict.ended_step) == ("ended", 103)

    def test_may_recover_in_late_frames_though_it_ended_too_soon(self, api, run_id):
        send(api, run_id, [1, 20, 20, *[1] * 20])
        change(api, run_id, "finished")
        assert only(api, run_id)["state"] == "ended"
        send(api, run_id, [*[1] * 100, 20], from_step=23)
        assert only(api, run_id)["state"] == "recovered"

    def test_has_recovered_if_late_frames_of_a_run_that_ended_show_it(self, api, run_id):
        send(api, run_id, [1])
        change(api, run_id, "finished")
        send(api, run_id, [20, 20, *[1] * 100], from_step=1)
        assert only(api, run_id)["state"] == "recovered"

    @pytest.mark.both_engines
    def test_names_the_head(self, start):
        large = load("rules: [{name: large, when: any(max_attention_logit > 80) for 1 sample, severity: warning}]")
        api = start(rules=large)
        run_id = api.register(num_blocks=2)
        layers = {"max_attention_logit": Array.of([2.0, 90.0])}
        heads = {"max_attention_logit": Array.of([1.0, 2.0, 1.0, 3.0, 90.0, 4.0], (2, 3))}
        api.send_ok(run_id, [Frame(0, 0, 1e9, {"loss": 1.0}, layers, heads)])
        incident = only(api, run_id)
        assert (incident["where"], incident["stack"], incident["head"]) == ("block 1", None, 1)

    def test_names_the_block_of_a_users_own_metric(self, start):
        api = start(
            rules=load('rules: [{name: wide, when: any(layers("mine") > 0.9) for 1 sample, severity: warning}]')
        )
        run_id = api.register(num_blocks=4)
        api.send_ok(run_id, [Frame(0, 0, 1e9, {}, {"mine": Array.of([0.1, 0.2, 0.3, 0.4, 0.95])})])
        assert only(api, run_id)["where"] == "block 3"

    def test_names_it_in_a_model_of_several_stacks(self, start):
        wide = '{name: wide, when: loss > 1 for 1 sample, where: layers("mine") > 0.9, severity: warning}'
        api = start(rules=load(f"rules: [{wide}]"))
        run_id = api.register(num_blocks=4, stacks=[{"name": "encoder", "blocks": 2}, {"name": "decoder", "blocks": 2}])
        api.send_ok(run_id, [Frame(0, 0, 1e9, {"loss": 2.0}, {"mine": Array.of([0.1, 0.2, 0.3, 0.1, 0.2, 0.95])})])
        (alert,) = api.get("/alerts")["alerts"]
        assert alert["evidence"]["layers"]["mine"]["highest"]["block"] == 3
        assert only(api, run_id)["where"] == "block 1 of the decoder"

    def test_has_recovered_if_a_stall_is_over(self, start):
        api = start(rules=WITH_A_STALL)
        run_id = api.register()
        send(api, run_id, [1, 20, 20, *[4] * 70, 1, 1])
        change(api, run_id, "finished")
        assert only(api, run_id)["state"] == "recovered"

    @pytest.mark.both_engines
    def test_stays_recovered_if_a_later_loss_is_not_finite(self, start):
        api = start(rules=[*OWN, *(one for one in PACK if one.name == "loss-not-finite")])
        run_id = api.register()
        send(api, run_id, [1, 20, 20, 1, 1, 1])
        send(api, run_id, [math.nan] * 2, from_step=400)
        assert [(one["rule"], one["state"]) for one in incidents(api, run_id)] == [
            ("loss-not-finite", "open"),
            ("high-loss", "recovered"),
        ]

    def test_is_the_same_while_its_alert_flaps(self, api, run_id):
        for step in range(0, 40, 4):
            send(api, run_id, [20, 20, 1, 1], from_step=step)
        assert only(api, run_id)["alerts"] == ["high-loss"]
        assert len(api.get("/alerts")["alerts"]) == 10

    def test_lists_a_consequence_that_flaps_once(self, api, run_id):
        send(api, run_id, [1, 20, 20, *[200, 200, 20, 20] * 3, 200, 200])
        (consequence,) = only(api, run_id)["consequences"]
        assert (consequence["rule"], consequence["state"], consequence["firing_step"]) == (
            "very-high-loss",
            "firing",
            16,
        )

    def test_settles(self, api, run_id):
        send(api, run_id, [1, *[20] * 70])
        assert only(api, run_id)["is_settled"]

    def test_ends_with_the_run(self, api, run_id):
        send(api, run_id, [1, 200, 200])
        change(api, run_id, "failed")
        incident = only(api, run_id)
        assert (incident["state"], incident["ended_step"]) == ("ended", 2)
        assert incident["consequences"][0]["state"] == "ended"

    def test_is_open_again_if_the_run_is(self, api, run_id):
        send(api, run_id, [1, 20, 20])
        change(api, run_id, "failed")
        change(api, run_id, "running")
        assert only(api, run_id)["state"] == "open"

    def test_is_over_if_a_person_resolves_its_alert_but_has_not_recovered(self, api, run_id):
        send(api, run_id, [1, 20, 20])
        (alert,) = api.get("/alerts")["alerts"]
        post(api, f"/alerts/{alert['alert_id']}/resolve", by="eve")
        assert only(api, run_id)["state"] == "ended"

    def test_is_acknowledged_if_its_alerts_are(self, api, run_id):
        send(api, run_id, [1, 20, 20])
        (alert,) = api.get("/alerts")["alerts"]
        assert not only(api, run_id)["acknowledged"]
        post(api, f"/alerts/{alert['alert_id']}/ack", by="eve")
        assert only(api, run_id)["acknowledged"]

    def test_is_silenced_if_its_alerts_are(self, api, run_id):
        send(api, run_id, [1, 20, 20])
        assert not only(api, run_id)["silenced"]
        post(api, "/silences", rule="high-loss", until="2037-01-01T00:00:00Z", created_by="eve")
        assert only(api, run_id)["silenced"]

    def test_is_silenced_if_its_alerts_are_silenced_or_acknowledged(self, api, run_id):
        send(api, run_id, [1, 20, 20, 200, 200])
        alert = next(alert for alert in api.get("/alerts")["alerts"] if alert["rule"] == "very-high-loss")
        post(api, f"/alerts/{alert['alert_id']}/ack", by="eve")
        assert not only(api, run_id)["silenced"]
        post(api, "/silences", rule="high-loss", until="2037-01-01T00:00:00Z", created_by="eve")
        incident = only(api, run_id)
        assert (incident["acknowledged"], incident["silenced"]) == (False, True)

    @pytest.mark.parametrize("how", ["acknowledged", "silenced"])
    def test_stays_muted_while_only_a_stalled_loss_keeps_it_open(self, start, how):
        api = start(rules=WITH_A_STALL)
        run_id = api.register()
        send(api, run_id, [1, 20, 20])
        (alert,) = api.get("/alerts", rule="high-loss")["alerts"]
        if how == "acknowledged":
            post(api, f"/alerts/{alert['alert_id']}/ack", by="eve")
        else:
            post(api, "/silences", rule="high-loss", until="2037-01-01T00:00:00Z", created_by="eve")
        send(api, run_id, [4], from_step=3)
        incident = only(api, run_id)
        assert incident["state"] == "open"
        assert [other["state"] for other in api.get("/alerts", rule="high-loss")["alerts"]] == ["resolved"]
        assert {name for name in ("acknowledged", "silenced") if incident[name]} == {how}

    def test_is_gone_with_its_run(self, api, run_id):
        send(api, run_id, [1, 20, 20])
        incident = only(api, run_id)
        assert api.http.delete(f"/api/v1/runs/{run_id}").status_code == 204
        assert api.get("/incidents")["incidents"] == []
        assert api.get(f"/incidents/{incident['incident_id']}")[:2] == (404, "unknown_incident")

    def test_is_of_one_attempt(self, api, run_id):
        send(api, run_id, [1, 20, 20])
        api.register(resume_step=2)
        send(api, run_id, [20, 20], from_step=2, attempt=2, writer="w2")
        found = incidents(api, run_id)
        assert [incident["attempt"] for incident in found] == [2, 1]

    def test_follows_frames_that_come_late(self, api, run_id):
        send(api, run_id, [1, 1, 1], from_step=10)
        send(api, run_id, [20, 20, 20], from_step=0, writer="late")
        incident = only(api, run_id)
        assert (incident["step"], incident["left_step"], incident["state"]) == (1, 0, "recovered")

    def test_has_an_earlier_cause_if_its_frames_come_late(self, api, run_id):
        send(api, run_id, [200, 200], from_step=10)
        assert only(api, run_id)["step"] == 11
        send(api, run_id, [20, 20], from_step=5, writer="late")
        incident = only(api, run_id)
        assert (incident["rule"], incident["left_step"], incident["step"]) == ("high-loss", 5, 6)
        assert incident["alerts"] == ["high-loss", "very-high-loss"]

    def test_settles_by_the_steps_of_its_attempt(self, api, run_id):
        send(api, run_id, [1, *[20] * 20], from_step=10_000)
        api.register(resume_step=0)
        send(api, run_id, [1], from_step=0, attempt=2, writer="w2")
        assert not only(api, run_id)["is_settled"]
        send(api, run_id, [20] * 100, from_step=10_021)
        assert only(api, run_id)["is_settled"]

    def test_is_of_one_attempt_though_two_train_at_once(self, api, run_id):
        send(api, run_id, [1, 20, 20])
        api.register(resume_step=2)
        send(api, run_id, [20, 20, 1], from_step=2, attempt=2, writer="w2")
        send(api, run_id, [200, 200], from_step=3)
        found = [(one["attempt"], one["state"], one["alerts"]) for one in incidents(api, run_id)]
        assert found == [(2, "recovered", ["high-loss"]), (1, "open", ["high-loss", "very-high-loss"])]

    def test_may_be_of_a_rule_that_names_no_family(self, api, run_id):
        send(api, run_id, [1, 20, 20])
        assert only(api, run_id)["family"] == "custom"
        assert [one["rule"] for one in api.get("/incidents", family="custom")["incidents"]] == ["high-loss"]


class TestTheReplyToTheTraining:
    def test_has_the_open_incidents(self, api, run_id):
        assert send(api, run_id, [1, 20])["incidents"] == []
        reply = send(api, run_id, [20], from_step=2)
        (incident,) = reply["incidents"]
        assert incident == {
            "incident_id": reply["alerts"][0]["incident_id"],
            "family": "custom",
            "severity": "warning",
            "rule": "high-loss",
            "step": 2,
            "left_step": 1,
            "settles_step": 62,
            "blocks": None,
            "where": None,
            "stack": None,
            "head": None,
            "state": "open",
            "ended_step": None,
            "is_settled": False,
            "summary": "High loss: loss is 20 (above 10).",
            "advice": reply["alerts"][0]["advice"],
        }
        assert send(api, run_id, [20], from_step=3)["incidents"] == [incident]
        pulse = api.http.post(f"/api/v1/runs/{run_id}/heartbeat", json={"writer": "w", "attempt": 1, "step": 4}).json()
        assert pulse["incidents"] == [incident]

    def test_says_again_that_the_last_incident_is_over(self, api, run_id):
        send(api, run_id, [1, 20, 20])
        told = [send(api, run_id, [1], from_step=3)["incidents"] for _ in range(2)]
        assert [[incident["state"] for incident in incidents] for incidents in told] == [["recovered"]] * 2
        (ended,) = told[0]
        opened = send(api, run_id, [20, 20], from_step=400)["incidents"]
        assert [incident["state"] for incident in opened] == ["open", "recovered"]
        assert opened[1] == ended
        told = [send(api, run_id, [1], from_step=402)["incidents"] for _ in range(2)]
        assert told[0] == told[1] != [ended]
        assert len(told[1]) == 1, "only the last one"

    def test_says_that_an_incident_is_over_whose_loss_falls_again(self, start):
        stall = load(
            "rules: [{name: loss-stall, when: loss > 3 for 4 samples, clear: loss < 3 for 1 sample, severity: info}]"
        )
        api = start(rules=[*OWN, *stall])
        run_id = api.register()
        send(api, run_id, [1, 20, 20])
        told = [send(api, run_id, [loss], from_step=3 + i)["incidents"] for i, loss in enumerate([4, 1, 1, 1, 1, 1])]
        assert [one["state"] for incidents in told for one in incidents] == [*["open"] * 4, *["recovered"] * 2]

    def test_says_that_the_verdict_has_settled(self, api, run_id):
        send(api, run_id, [1, 20, 20])
        assert [one["is_settled"] for one in send(api, run_id, [20] * 70, from_step=3)["incidents"]] == [True]

    def test_has_those_of_its_attempt_alone(self, api, run_id):
        send(api, run_id, [1, 20, 20])
        api.register(resume_step=2)
        assert send(api, run_id, [1], from_step=2, attempt=2, writer="w2")["incidents"] == []


class TestTheList:
    def test_has_filters_and_pages(self, api):
        ids = [api.register(run=f"run-{number}") for number in range(3)]
        for run_id in ids:
            send(api, run_id, [1, 20, 20])
        send(api, ids[0], [1], from_step=3)
        assert [one["run_id"] for one in api.get("/incidents")["incidents"]] == ids[::-1]
        assert [one["run_id"] for one in api.get("/incidents", state="recovered")["incidents"]] == ids[:1]
        assert [one["run_id"] for one in api.get("/incidents", run=ids[1])["incidents"]] == ids[1:2]
        assert api.get("/incidents", family="tse")["incidents"] == []
        change(api, ids[1], "failed")
        assert [one["run_id"] for one in api.get("/incidents", at_end=True)["incidents"]] == ids[1:2]
        assert [one["run_id"] for one in api.get("/incidents", at_end=False)["incidents"]] == [ids[2], ids[0]]
        page = api.get("/incidents", limit=2)
        rest = api.get("/incidents", limit=2, cursor=page["next_cursor"])
        assert [one["run_id"] for one in page["incidents"] + rest["incidents"]] == ids[::-1]
        assert rest["next_cursor"] is None

    def test_names_the_nearest_parameter(self, api):
        assert "family" in api.get("/incidents", familly="tse")[2]

    def test_says_that_there_is_no_such_run_or_incident(self, api):
        assert api.get("/runs/nothing/incidents")[:2] == (404, "unknown_run")
        assert api.get("/incidents/12")[:2] == (404, "unknown_incident")


RUNS = {trace.name: trace for trace in traces.read_all()}


class TestARecordedRun:
    @pytest.mark.parametrize("name", ["dead_wd-s0", "tse_vit24-s0", "tse_post6_warm-s0", "ent_qk20-s0", "h_cosine-s0"])
    def test_has_the_incidents_of_its_replay(self, start, name):
        (replayed,) = [replay(Trace(traces.FOLDER / f"{name}.jsonl.gz"), Evaluator(PACK)).incidents]
        views = RUNS[name].views
        api = start(rules=PACK)
        run_id = api.register(num_blocks=len(views[0].layers["param_norm"]))
        frames = [
            Frame(seq, view.step, 1e9, dict(view.scalars), {name: Array.of(v) for name, v in view.layers.items()})
            for seq, view in enumerate(views)
        ]
        for begin in range(0, len(frames), 7):
            api.send_ok(run_id, frames[begin : begin + 7])
        change(api, run_id, "finished")
        live = [{key: incident[key] for key in VERDICT} for incident in reversed(incidents(api, run_id))]
        assert live == [verdict.model_dump(mode="json") for verdict in replayed]


GAINS = {"attention_gain": 0.3, "residual_gain": 1.044, "feedforward_gain": 1.04, "norm_gain": 1.0}


def gains_frame(step, loss, **changed):
    layers = {name: [usual] * 6 for name, usual in GAINS.items()}
    for name, (block, value) in changed.items():
        layers[name][block] = value
    return Frame(step, step, 1e9, {"loss": loss}, {name: Array.of(values) for name, values in layers.items()})


class TestTheSubStep:
    def test_is_named_from_the_samples_before_and_since_the_incident(self, api):
        run_id = api.register(num_blocks=6)
        healthy = [gains_frame(step, 1.0) for step in range(5)]
        api.send_ok(run_id, healthy + [gains_frame(step, 20.0, feedforward_gain=(4, 20.0)) for step in range(5, 8)])
        within = api.get(f"/incidents/{only(api, run_id)['incident_id']}")["within"]
        assert (within["block"], within["sub_step"], within["metric"]) == (4, "feed-forward", "feedforward_gain")
        assert within["text"].startswith("In block 4, ")
        assert (within["step"], within["healthy_step"]) == (5, 4)

    @pytest.mark.parametrize(
        ("rule", "family", "healthy_step"),
        [("loss-spike", "loss", 0), ("high-loss", "custom", 2)],
    )
    def test_is_not_compared_with_the_samples_of_an_earlier_incident_of_the_network(
        self, start, rule, family, healthy_step
    ):
        api = start(rules=[replace(one, name=rule, family=family) for one in OWN[:1]])
        run_id = api.register(num_blocks=6)
        ill = [gains_frame(step, 20.0, attention_gain=(4, 0.03)) for step in (1, 2)]
        well = [gains_frame(step, 1.0) for step in range(3, 500)]
        for frame in well:
            frame.layers.clear()
        ill_again = [gains_frame(step, 20.0, feedforward_gain=(2, 20.0)) for step in range(500, 503)]
        api.send_ok(run_id, [gains_frame(0, 1.0), *ill, *well, *ill_again])
        within = api.get(f"/incidents/{incidents(api, run_id)[0]['incident_id']}")["within"]
        assert (within["block"], within["sub_step"], within["healthy_step"]) == (2, "feed-forward", healthy_step)

    def test_is_compared_with_samples_of_an_earlier_incident_of_the_process(self, start):
        bounds = {"of-process": 4, "of-states": 9}
        rules = [
            f"{{name: {name}, when: loss > {bound} for 1 sample, severity: warning}}" for name, bound in bounds.items()
        ]
        of_process, of_states = load(f"{{rules: [{', '.join(rules)}]}}")
        api = start(rules=[replace(of_process, family="liveness"), replace(of_states, family="tse")])
        run_id = api.register(num_blocks=6)
        losses = [1.0, 5.0, 5.0, 10.0, 10.0]
        ill = {"feedforward_gain": (2, 20.0)}
        api.send_ok(run_id, [gains_frame(s, loss, **(ill if loss > 9 else {})) for s, loss in enumerate(losses)])
        ids = {one["rule"]: one["incident_id"] for one in incidents(api, run_id)}
        within = api.get(f"/incidents/{ids['of-states']}")["within"]
        assert (within["block"], within["healthy_step"]) == (2, 2)
        of_process = api.get(f"/incidents/{ids['of-process']}")["within"]
        assert (of_process["block"], of_process["text"][:24]) == (None, "The cause is not a sub-s")

    def test_is_not_compared_with_a_sample_since_a_consequence_of_the_cause(self, start):
        cause = replace(OWN[0], name="token-similarity-escalation", family="tse")
        losses = [1.0] * 5 + [4.5, 4.5, 20.0, 20.0, 20.0]
        rule = load("{rules: [{name: states-collapse, when: loss > 4 for 2 samples, family: tse, severity: warning}]}")
        api = start(rules=[cause, *rule])
        run_id = api.register(num_blocks=6)
        ill = {"feedforward_gain": (4, 20.0)}
        api.send_ok(run_id, [gains_frame(s, loss, **(ill if loss > 1 else {})) for s, loss in enumerate(losses)])
        incident = api.get(f"/incidents/{only(api, run_id)['incident_id']}")
        assert (incident["rule"], incident["left_step"]) == ("token-similarity-escalation", 7)
        assert (incident["within"]["block"], incident["within"]["healthy_step"]) == (4, 4)

    def test_of_nan_is_unknown_after_an_optimizer_step(self, start):
        api = start(rules=PACK)
        run_id = api.register(num_blocks=2)
        shares = [0.0] * 3, [0.0, 1.0, 1.0]
        losses = 1.0, math.nan
        api.send_ok(
            run_id, [Frame(n, n, 1e9, {"loss": losses[n]}, {"nonfinite": Array.of(shares[n])}) for n in range(2)]
        )
        incident = api.get(f"/incidents/{only(api, run_id)['incident_id']}")
        assert (incident["rule"], incident["blocks"]) == ("loss-not-finite", [0, 1])
        assert (incident["within"]["block"], incident["within"]["sub_step"]) == (0, None)
        assert "they may have begun anywhere" in incident["within"]["text"]

    def test_is_that_of_the_first_sample_that_decides(self, api):
        """Later, the model has adapted."""
        run_id = api.register(num_blocks=6)
        gains = [1.04] * 5 + [20.0, 5.0, 1.04, 1.04]
        api.send_ok(
            run_id,
            [
                gains_frame(step, 1.0 if step < 5 else 20.0, feedforward_gain=(4, gain))
                for step, gain in enumerate(gains)
            ],
        )
        within = api.get(f"/incidents/{only(api, run_id)['incident_id']}")["within"]
        assert (within["block"], within["sub_step"]) == (4, "feed-forward")
        assert "adds about 20 times its input" in within["text"]

    def test_can_be_asked_for_at_any_step(self, api):
        run_id = api.register(num_blocks=6)
        gains = [1.04, 1.04, 20.0, 1.04]
        api.send_ok(run_id, [gains_frame(5 * i, 1.0, feedforward_gain=(4, gain)) for i, gain in enumerate(gains)])

        def found(**asked):
            within = api.get(f"/runs/{run_id}/sub-step", **asked)
            assert ("the healthy sample" in within["text"]) == (within["healthy_step"] is not None)
            return within["block"], within["sub_step"], within["step"], within["healthy_step"]

        assert api.get("/incidents")["incidents"] == []
        assert found(step=10) == (4, "feed-forward", 10, None)
        assert found(step=11, healthy_step=6) == (4, "feed-forward", 10, 5)
        assert found() == (None, None, 15, None)
        assert found(healthy_step=10) == (None, None, 15, 10)

    def test_is_told_with_numbers_of_one_sample(self, api):
        """The slow tier of step 5 decides; at step 6 attention has changed."""
        run_id = api.register(num_blocks=6)
        rates = [{"escalation_rate": Array.of([1.0, 1.0, 1.0, 1.0, rate, 1.0])} for rate in (1.5, 3.0)]
        slow = gains_frame(5, 1.0, attention_gain=(4, 20.0)).layers
        frames = [
            Frame(step, step, 1e9, {"loss": 1.0}, layers) for step, layers in ((5, slow | rates[0]), (6, rates[1]))
        ]
        api.send_ok(run_id, [gains_frame(0, 1.0), *frames])
        within = api.get(f"/runs/{run_id}/sub-step", step=6)
        assert (within["block"], within["metric"], within["step"]) == (4, "attention_gain", 5)
        assert "the escalation rate is 1.5" in within["text"]

    def test_is_refused_at_steps_that_do_not_fit(self, api):
        run_id = api.register(num_blocks=6)
        path = f"/runs/{run_id}/sub-step"
        assert api.get(path)[:2] == (404, "unknown_frame")
        api.send_ok(run_id, [gains_frame(5, 1.0)])
        status, code, message = api.get(path, healthy_step=5)
        assert (status, code) == (422, "invalid_range")
        assert "expected a healthy step before step 5, got 5" in message
        assert api.get(path, attempt=2)[:2] == (404, "unknown_attempt")
        assert api.get("/runs/nothing/sub-step")[:2] == (404, "unknown_run")

    def test_is_unknown_without_its_metrics(self, api, run_id):
        send(api, run_id, [1, 20, 20])
        within = api.get(f"/incidents/{only(api, run_id)['incident_id']}")["within"]
        assert (within["block"], within["sub_step"]) == (None, None)
        assert "unknown" in within["text"]


class TestTheSequences:
    NAN = math.nan

    @pytest.fixture
    def api(self, start):
        return start(rules=self.rules("loss"))

    def rules(self, family):
        when = "loss > 10 or loss_nonfinite > 0 for 1 sample"
        return load(f"rules: [{{name: high-loss, family: {family}, severity: warning, when: {when}}}]")

    def described(self, api, run_id, *samples):
        """Samples from step 0 on: the mean loss, and of each sequence its loss, id and the step at which it was seen."""
        frames = []
        for step, (loss, *sequences) in enumerate(samples):
            scalars = {"loss": loss, "loss_nonfinite": float(math.isnan(loss)), "sequence_loss_mean": loss}
            for place, values in enumerate(sequences, 1):
                scalars |= {
                    f"sequence_{kind}_{place}": x for kind, x in zip(("loss", "id", "seen"), values, strict=False)
                }
            frames.append(Frame(step, step, 1e9, scalars))
        api.send_ok(run_id, frames)
        return api.get(f"/incidents/{only(api, run_id)['incident_id']}")["sequences"]

    def test_are_in_one_sample_if_its_batch_holds_them_several_times(self, api, run_id):
        found = self.described(
            api, run_id, (1.0, (1.0, 1, self.NAN)), (20.0, *[(82.0, 7341, 0)] * 4), (20.0, (30.0, 8, 0))
        )
        assert (found[0]["id"], found[0]["step"]) == (7341, 1)
        assert "among the four largest" not in found[0]["text"]

    def test_are_the_largest_losses_of_the_steps_that_the_rules_on_the_loss_look_at(self, api, run_id):
        found = self.described(
            api,
            run_id,
            (1.0, (90.0, 1, self.NAN)),
            *[(1.0, (1.5, 2, 0))] * 4,
            (20.0, (82.0, 7341, 0), (12.0, 2, 0)),
            (30.0, (70.0, 7341, 5), (60.0, 9, self.NAN), (31.0, 4, self.NAN), (30.0, 5, self.NAN)),
        )
        assert [(one["step"], one["id"], one["loss"], one["seen_step"]) for one in found] == [
            (5, 7341, 82.0, 0),
            (6, 9, 60.0, None),
            (1, 2, 1.5, 0),
            (6, 4, 31.0, None),
        ]
        assert [one["times_mean"] for one in found] == [82 / 20, 2.0, 1.5, 31 / 30]
        assert [one["stands_out"] for one in found] == [True, True, False, False]
        assert found[0]["text"] == (
            "At step 5, sequence 7341 had a loss of 82, 4.1 times the mean of the batch. "
            "It was also in the batch of step 0. Its loss is among the four largest in 1 other sample of the incident, too."
        )
        assert found[3]["text"] == (
            "At step 6, sequence 4 had a loss of 31, 1.0 times the mean of the batch. No single sequence stands out. "
            "It is not in the earlier sampled batches that tsemon keeps."
        )

    def test_begin_with_the_one_whose_loss_is_not_finite(self, api, run_id):
        found = self.described(
            api,
            run_id,
            (1.0,),
            (self.NAN, (self.NAN, 5, 0), (9.0, 6, 0)),
            (self.NAN, *[(self.NAN, known, 0) for known in (6, 7, 8, 9)]),
        )
        assert [(one["step"], one["id"], one["loss"]) for one in found[:3]] == [(1, 5, None), (1, 6, 9.0), (2, 7, None)]
        assert [one["stands_out"] for one in found] == [True, False, False, False]
        assert found[0]["text"].startswith("At step 1, sequence 5 had a loss that is not finite. It was also")
        assert "No single sequence stands out." in found[2]["text"]

    def test_begin_with_the_step_that_began_it_though_later_losses_are_larger(self, api, run_id):
        found = self.described(
            api,
            run_id,
            (1.0,),
            (12.0, (48.0, 7341, 0), (13.0, 5, 0)),
            (50.0, *[(80.0 - place, 10 + place, 0) for place in range(4)]),
            (90.0, (200.0, 20, 0), (89.0, 21, 0)),
        )
        assert [(one["step"], one["id"], one["stands_out"]) for one in found] == [
            (1, 7341, True),
            (3, 20, True),
            (2, 10, False),
            (2, 11, False),
        ]

    def test_end_with_batches_in_which_all_are_lost(self, api, run_id):
        lost = (self.NAN, *[(self.NAN, known, 0) for known in (6, 7, 8, 9)])
        found = self.described(api, run_id, (1.0,), (20.0, (80.0, 5, 0), (21.0, 4, 0)), lost)
        assert [(one["step"], one["id"]) for one in found] == [(1, 5), (1, 4), (2, 6), (2, 7)]

    def test_are_relative_to_their_own_mean_if_the_loss_is_divided_for_accumulation_or_of_all_ranks(self, api, run_id):
        scalars = {"loss": 20.0, "sequence_loss_mean": 80.0, "sequence_loss_1": 120.0}
        api.send_ok(run_id, [Frame(0, 0, 1e9, {"loss": 1.0}), Frame(1, 1, 1e9, scalars)])
        (found,) = api.get(f"/incidents/{only(api, run_id)['incident_id']}")["sequences"]
        assert (found["times_mean"], found["stands_out"]) == (1.5, False)

    def test_may_lack_ids(self, api, run_id):
        (found,) = self.described(api, run_id, (1.0,), (20.0, (50.0,)))
        assert (found["id"], found["seen_step"]) == (None, None)
        assert found["text"] == "At step 1, a sequence had a loss of 50, 2.5 times the mean of the batch."

    def test_are_none_without_their_metrics(self, api, run_id):
        assert self.described(api, run_id, (1.0,), (20.0,)) == []

    def test_may_have_any_numbers(self, api, run_id):
        (found,) = self.described(api, run_id, (1.0,), (1e-308 + 20, (1e308, 1e300, -5.0)))
        assert (found["id"], found["seen_step"]) == (None, None)

    def test_are_none_of_an_incident_of_another_family(self, start):
        api = start(rules=self.rules("tse"))
        assert self.described(api, api.register(), (1.0,), (20.0, (50.0, 1, 2))) == []
