"""People are told of incidents, not of alerts: a server, its rules and a webhook."""

import json
from collections import Counter

import pytest

from tests.server.conftest import loss_frame
from tests.server.notify.receivers import SlackReceiver, await_that
from tests.server.rules import traces
from tsemon.wire import Array, Frame
from tsemon_server.notify.notifier import Notifier
from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load

OWN = load("""
rules:
  - {name: high-loss, when: loss > 10 for 2 samples, clear: loss < 5 for 1 sample, severity: warning}
  - {name: very-high-loss, when: loss > 100 for 2 samples, clear: loss < 50 for 1 sample, severity: critical}
  - {name: low-loss, when: loss < -10 for 2 samples, clear: loss > 0 for 1 sample, severity: warning}
  - {name: odd-loss, when: loss > 1000 for 1 sample, clear: loss < 1000 for 1 sample, severity: info}
""")
WITHOUT_A_LOSS = """
rules:
  - {name: high, when: scalar("mine") > 10 for 1 sample, clear: scalar("mine") < 5 for 1 sample, severity: warning}
"""
TWO_CAUSES = load("""
rules:
  - {name: loss-spike, family: loss, when: loss > 10 for 2 samples, severity: warning}
  - {name: dead-units, family: dead, when: loss > 100 for 2 samples, severity: warning}
""")
HIGH, VERY_HIGH = [20.0, 20.0], [200.0, 200.0]


@pytest.fixture
def serve(start_server, clock):
    """A server with these rules."""
    return lambda rules=OWN: start_server(rules=rules, clock=clock)


@pytest.fixture
def api(serve):
    return serve()


class Told:
    """What a webhook hears of a server's incidents."""

    def __init__(self, api, http, clock, database):
        self.api, self.http, self.clock, self.database = api, http, clock, database

    def settle(self, seconds=0.0, *, is_alive=True):
        """Let time pass, until nothing is due any more; state and rule of each message so far.

        With `is_alive`, the processes that train send heartbeats meanwhile.
        """

        def is_idle():
            is_queued = self.database.execute("SELECT alert_id FROM notice")
            return not is_queued and not self.api.parts.store.notices.due("hook")

        for passed in (0.0, seconds):
            if is_alive:
                self.database.execute(f"UPDATE attempt SET heard_at = heard_at + {passed}")
            self.clock.now += passed
            await_that(is_idle, "nothing is due", timeout_s=20)
        return [(request.json["state"], request.json["rule"]) for request in self.http.requests]

    @property
    def texts(self):
        return [request.json["text"] for request in self.http.requests]


@pytest.fixture
def listening(configure, http, clock, database, running):
    """Starts to tell a webhook of the incidents of a server."""

    def listening(api, *settings, kind="webhook", where=f"url: '{http.url}'", group_wait="0s"):
        receiver = f"{{name: hook, type: {kind}, {where}, allow_private: true, max_per_minute: 600}}"
        text = "\n".join(["base_url: http://gpu1:8731", f"group_wait: {group_wait}", "group_interval: 0s", *settings])
        configuration = configure(f"{text}\nreceivers: [{receiver}]")
        notifier = Notifier(api.parts.store, configuration, clock, pause_s=0.005, first_retry_s=0.01)
        notifier.start()
        running.callback(notifier.stop)
        return Told(api, http, clock, database)

    return listening


def send(api, run_id, losses, from_step=0, **where):
    return api.send_ok(run_id, [loss_frame(from_step + i, loss) for i, loss in enumerate(losses)], **where)


def end(api, run_id, state="finished"):
    assert api.http.patch(f"/api/v1/runs/{run_id}", json={"state": state}).status_code == 200


def post(api, path, **body):
    reply = api.http.post(f"/api/v1{path}", json=body)
    assert reply.status_code == 200, reply.text


def acknowledge(api, rule):
    (alert,) = api.get("/alerts", rule=rule, state="firing")["alerts"]
    post(api, f"/alerts/{alert['alert_id']}/ack", by="ada")


def silence(api, **which):
    post(api, "/silences", until="2037-01-01T00:00:00Z", created_by="ada", **which)


RUNS = {trace.name: trace for trace in traces.read_all()}


def register(api, trace, run):
    return api.register(run=run, num_blocks=trace.header["layers"])


def frames_of(trace):
    for seq, view in enumerate(trace.views):
        arrays = {metric: Array.of(values) for metric, values in view.layers.items()}
        yield Frame(seq, view.step, 1e9, dict(view.scalars), arrays)


def train(api, told, name, seconds=10):
    """Send the frames of a recorded run, with so much time after each; its id."""
    run_id = register(api, RUNS[name], "deep")
    for frame in frames_of(RUNS[name]):
        api.send_ok(run_id, [frame])
        told.settle(seconds)
    return run_id


class TestARecordedRunThatFails:
    @pytest.mark.parametrize("name", ["dead_wd-s0", "div_nan-s0", "ent_qk8-s0", "norm_tanh-s0", "rank_ssl-s0"])
    def test_is_two_messages_and_the_last_one_does_not_say_that_it_recovered(self, serve, listening, name):
        api = serve(PACK)
        told = listening(api)
        end(api, train(api, told, name), "failed")
        assert [state for state, _ in told.settle(3600)] == ["firing", "resolved"]
        assert "over (run ended)" in told.texts[1]

    def test_is_two_messages_though_it_recovers_for_a_while(self, serve, listening):
        api = serve(PACK)
        told = listening(api)
        run_id = train(api, told, "tse_post6_warm-s0", seconds=60)
        assert len(told.settle(3600)) == 1
        end(api, run_id)
        cause = "token-similarity-escalation"
        assert told.settle(3600) == [("firing", cause), ("resolved", cause)]
        title = told.http.requests[1].json["title"]
        assert title == f"{cause} had not recovered in default/deep when the run ended"

    def test_is_one_thread_in_slack(self, serve, listening, listen):
        slack, api = listen(SlackReceiver), serve(PACK)
        told = listening(api, kind="slack", where=f"token: xoxb-1, channel: C1, api_url: '{slack.api_url}'")
        end(api, train(api, told, "dead_wd-s0"), "failed")
        told.settle(3600)
        assert slack.threads == [None, next(iter(slack.messages))]

    def test_names_weight_decay(self, serve, listening):
        api = serve(PACK)
        told = listening(api)
        run_id = train(api, told, "dead_wd-s0")
        end(api, run_id, "failed")
        cause = "weight-decay-outweighs-gradient"
        assert told.settle(3600) == [("firing", cause), ("resolved", cause)]
        first, last = (request.json for request in told.http.requests)
        assert first["title"] == f"{cause} fires in default/deep at step 10"
        assert first["text"].startswith("default/deep, step 10: Weight decay is all that is left of the updates: ")
        assert "In blocks 0 to 3, since step 0. Until step 70, another cause may" in first["text"]
        assert "What to try: " in first["text"]
        # These frames lack the metric that tells the blocks, so there is no cell to show.
        assert first["url"] == f"http://gpu1:8731/#/run/{run_id}?step=0&attempt=1"
        assert f"Cause: {cause}. Weight decay is all that is left" in last["text"]
        assert "Also fired: parameter-norm-shrinks, updates-too-large, output-ignores-input" in last["text"]
        assert len(api.get("/alerts", run=run_id, limit=100)["alerts"]) > 10


class TestEveryRecordedRunThatFails:
    @pytest.mark.thorough
    @pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
    def test_is_two_messages_at_most(self, serve, listening):
        """All of them train side by side, so that each wait for messages is one for all."""
        api = serve(PACK)
        told = listening(api)
        failing = [trace for trace in RUNS.values() if trace.header["failing"]]
        left = {register(api, trace, trace.name): frames_of(trace) for trace in failing}
        while left:
            for run_id, frames in list(left.items()):
                if (frame := next(frames, None)) is not None:
                    api.send_ok(run_id, [frame])
                else:
                    end(api, run_id, "failed")
                    del left[run_id]
            told.settle(10)
        told.settle(3600)
        num_messages = Counter(request.json["run"] for request in told.http.requests)
        assert num_messages.keys() == {trace.name for trace in failing}
        assert max(num_messages.values()) == 2, num_messages


class TestAnIncident:
    def test_is_told_once_though_alerts_join_it_and_end(self, api, listening):
        told, run_id = listening(api), api.register()
        send(api, run_id, [1, *HIGH])
        assert told.settle() == [("firing", "high-loss")]
        send(api, run_id, VERY_HIGH, from_step=3)
        told.settle(60)
        send(api, run_id, [20], from_step=5)
        assert told.settle(3600) == [("firing", "high-loss")]

    def test_is_told_by_the_cause_that_it_has_when_the_first_message_goes(self, serve, listening):
        api = serve(TWO_CAUSES)
        told, run_id = listening(api, group_wait="60s"), api.register()
        send(api, run_id, [1, *HIGH])
        told.settle()
        send(api, run_id, VERY_HIGH, from_step=3)
        assert told.settle(61) == [("firing", "dead-units")]
        first = told.http.requests[0].json
        assert first["title"] == "dead-units fires in default/gpt at step 2"
        assert api.get(f"/alerts/{first['alert_id']}")["rule"] == "dead-units"
        end(api, run_id)
        assert told.settle(61)[1:] == [("resolved", "dead-units")]
        assert told.http.requests[1].json["title"].startswith("dead-units ")

    def test_is_told_when_it_has_recovered_with_what_else_fired(self, api, listening):
        told, run_id = listening(api), api.register()
        send(api, run_id, [1, *HIGH])
        told.settle()
        send(api, run_id, [*VERY_HIGH, 1], from_step=3)
        send(api, run_id, [1], from_step=305)
        assert told.settle(301) == [("firing", "high-loss"), ("resolved", "very-high-loss")]
        assert told.http.requests[1].json["title"] == "high-loss is over in default/gpt at step 5"
        assert told.texts[1] == (
            "default/gpt, step 5: recovered; it was open from step 2 on. "
            "Cause: very-high-loss. Very high loss: loss is 200 (above 100). Since step 3. Also fired: high-loss."
        )

    def test_is_told_when_it_ends_with_the_run(self, api, listening):
        told, run_id = listening(api), api.register()
        send(api, run_id, [1, *HIGH])
        told.settle()
        end(api, run_id, "failed")
        assert told.settle() == [("firing", "high-loss"), ("resolved", "high-loss")]
        assert "over (run ended); it was open from step 2 on." in told.texts[1]

    def test_that_flaps_is_told_once(self, api, listening):
        told, run_id = listening(api), api.register()
        for step in range(0, 1000, 100):
            send(api, run_id, HIGH, from_step=step)
            told.settle(3600)
            send(api, run_id, [1, 1], from_step=step + 2)
            told.settle(3600)
        send(api, run_id, [1], from_step=1201)
        assert told.settle(3600) == [("firing", "high-loss")], "it may open again until step 1202"
        send(api, run_id, [1], from_step=1202)
        assert told.settle() == [("firing", "high-loss"), ("resolved", "high-loss")]
        assert len(api.get("/alerts", run=run_id)["alerts"]) == 10

    def test_that_flaps_in_a_run_without_a_loss_is_told_once(self, serve, listening):
        api = serve(load(WITHOUT_A_LOSS))
        told, run_id = listening(api), api.register()
        for step, mine in enumerate([20.0, 1.0, 20.0, 1.0]):
            api.send_ok(run_id, [Frame(step, step, 1e9, {"mine": mine}, {})])
            told.settle(3600)
        end(api, run_id)
        assert told.settle() == [("firing", "high"), ("resolved", "high")]
        assert (
            "over, and the run gives no loss that could show a recovery; it was open from step 0 on." in told.texts[1]
        )

    @pytest.mark.parametrize(
        ("num_after", "says"), [(1, "over, and the run ended too soon to show a recovery; "), (61, "recovered; ")]
    )
    def test_that_has_recovered_is_told_at_once_when_the_run_ends(self, api, listening, num_after, says):
        told, run_id = listening(api), api.register()
        send(api, run_id, HIGH)
        told.settle()
        send(api, run_id, [1] * num_after, from_step=2)
        told.settle(3600)
        end(api, run_id)
        assert told.settle() == [("firing", "high-loss"), ("resolved", "high-loss")]
        assert says in told.texts[1]

    @pytest.mark.parametrize("num_samples", [3, 200])
    def test_that_ends_with_a_stalled_loss_is_told_as_such(self, serve, listening, num_samples):
        """Whether the stall has fired or is still pending."""
        when = f"loss > 3 for {num_samples} samples"
        stall = load(f"rules: [{{name: loss-stall, when: {when}, clear: loss < 3 for 1 sample, severity: info}}]")
        api = serve([*OWN, *stall])
        told, run_id = listening(api), api.register()
        send(api, run_id, HIGH)
        told.settle()
        send(api, run_id, [4] * 100, from_step=2)
        told.settle(3600)
        end(api, run_id)
        assert told.settle() == [("firing", "high-loss"), ("resolved", "high-loss")]
        assert "over (run ended); " in told.texts[1]

    def test_that_has_recovered_is_told_though_the_process_was_killed(self, api, listening):
        told, run_id = listening(api), api.register()
        send(api, run_id, HIGH)
        told.settle()
        send(api, run_id, [1], from_step=2)
        assert told.settle(3600) == [("firing", "high-loss")]
        assert told.settle(100, is_alive=False) == [("firing", "high-loss"), ("resolved", "high-loss")]
        assert "recovered; " in told.texts[1]

    def test_is_not_told_as_over_while_another_one_is_open(self, api, listening):
        told, run_id = listening(api, "group_by: [run, rule]"), api.register()
        send(api, run_id, HIGH)
        told.settle()
        send(api, run_id, [1], from_step=2)
        send(api, run_id, [-20, -20], from_step=200)
        told.settle()
        send(api, run_id, [-20], from_step=600)
        assert told.settle(3600) == [("firing", "high-loss"), ("firing", "low-loss")]
        end(api, run_id, "failed")
        assert told.settle()[2:] == [("resolved", "high-loss"), ("resolved", "low-loss")]

    def test_is_not_told_as_over_while_a_pending_alert_may_open_it_again(self, serve, listening):
        slow = load(
            "rules: [{name: slow, when: loss > 3 for 350 samples, clear: loss < 2 for 1 sample, severity: warning}]"
        )
        api = serve([*OWN, *slow])
        told, run_id = listening(api), api.register()
        send(api, run_id, [1, *HIGH])
        told.settle()
        send(api, run_id, [4] * 330, from_step=3)
        assert told.settle(3600) == [("firing", "high-loss")]
        send(api, run_id, [4] * 30, from_step=333)
        assert told.settle(3600) == [("firing", "high-loss")]
        assert api.get("/incidents")["incidents"][0]["alerts"] == ["high-loss", "slow"]

    def test_that_a_person_resolves_is_no_news_if_it_opens_again_soon(self, api, listening):
        told, run_id = listening(api), api.register()
        send(api, run_id, HIGH)
        told.settle()
        (alert,) = api.get("/alerts", state="firing")["alerts"]
        post(api, f"/alerts/{alert['alert_id']}/resolve", by="ada")
        told.settle(3600)
        send(api, run_id, [1, *HIGH], from_step=100)
        assert told.settle(3600) == [("firing", "high-loss")]

    def test_that_late_frames_open_again_is_told_once_more_and_at_the_end_of_the_run(self, api, listening):
        told, run_id = listening(api), api.register()
        send(api, run_id, HIGH)
        told.settle()
        send(api, run_id, [1], from_step=2)
        send(api, run_id, [7], from_step=310)
        two = [("firing", "high-loss"), ("resolved", "high-loss")]
        assert told.settle(3600) == two
        send(api, run_id, HIGH, from_step=50, writer="late")
        assert told.settle(3600) == [*two, two[0]]
        assert told.http.requests[2].json["title"] == "high-loss fires again in default/gpt at step 1"
        send(api, run_id, [1], from_step=700)
        send(api, run_id, [1], from_step=1100)
        assert told.settle(3600) == [*two, two[0]]
        end(api, run_id)
        assert told.settle() == two * 2
        assert len(api.get("/incidents")["incidents"]) == 1

    def test_that_opens_again_with_its_run_is_no_news(self, api, listening):
        told, run_id = listening(api), api.register()
        send(api, run_id, HIGH)
        told.settle()
        for state in ("failed", "running", "failed"):
            end(api, run_id, state)
            told.settle(3600)
        assert told.settle() == [("firing", "high-loss"), ("resolved", "high-loss")]

    def test_is_told_at_each_change_if_there_is_no_wait(self, api, listening):
        told, run_id = listening(api, "recovery_wait: 0s"), api.register()
        for step in (0, 3):
            send(api, run_id, HIGH, from_step=step)
            told.settle()
            send(api, run_id, [1], from_step=step + 2)
            told.settle()
        assert told.settle() == [("firing", "high-loss"), ("resolved", "high-loss")] * 2
        assert len(api.get("/incidents")["incidents"]) == 1

    def test_goes_with_its_run(self, api, listening, http):
        http.answers = [500] * 1000
        told, run_id = listening(api), api.register()
        send(api, run_id, [1, *HIGH])
        await_that(lambda: http.requests, "it was tried")
        assert api.http.delete(f"/api/v1/runs/{run_id}").status_code == 204
        told.settle(600)
        assert api.get("/notifications")["notifications"] == []

    def test_of_frames_that_come_late_is_told_once(self, api, listening):
        told, run_id = listening(api), api.register()
        send(api, run_id, HIGH, from_step=10)
        told.settle()
        send(api, run_id, [20.0] * 5, from_step=2, writer="late")
        told.settle()
        send(api, run_id, VERY_HIGH, from_step=7, writer="later")
        assert told.settle(60) == [("firing", "high-loss")]

    def test_of_each_attempt_is_told_for_itself(self, api, listening):
        told, run_id = listening(api), api.register()
        send(api, run_id, [1, *HIGH])
        told.settle(100, is_alive=False)  # the first process is silent, and so over
        api.register(resume_step=2)
        told.settle()
        send(api, run_id, HIGH, from_step=2, attempt=2, writer="w2")
        told.settle()
        alerts = [alert for request in told.http.requests for alert in request.json["alerts"]]
        assert sorted(alert["state"] for alert in alerts) == ["firing", "firing", "resolved"]
        first, second = sorted({int(alert["incident_id"]) for alert in alerts})
        assert {alert["incident_id"] for alert in alerts if alert["state"] == "resolved"} == {str(first)}
        assert second > first
        assert "over (new attempt)" in "".join(told.texts)

    def test_is_told_to_those_who_hear_of_critical_ones_as_soon_as_it_is(self, api, listening):
        told, run_id = listening(api, "routes: [{receivers: hook, severity: critical}]"), api.register()
        send(api, run_id, [1, *HIGH])
        assert told.settle() == []
        send(api, run_id, VERY_HIGH, from_step=3)
        assert len(told.settle()) == 1
        assert told.http.requests[0].json["severity"] == "critical"


class TestAnAlertWithoutAnIncident:
    def test_is_told_by_itself_if_it_only_informs(self, api, listening):
        told, run_id = listening(api, "routes: [{receivers: hook, severity: info, rule: odd-loss}]"), api.register()
        send(api, run_id, [1, 2000])
        assert told.settle() == [("firing", "odd-loss")]
        send(api, run_id, [1], from_step=2)
        assert told.settle() == [("firing", "odd-loss"), ("resolved", "odd-loss")]
        assert told.http.requests[0].json["incident_id"] is None

    def test_is_told_by_itself_if_it_fired_before_there_were_incidents(self, api, listening, database):
        run_id = api.register()
        send(api, run_id, [1, *HIGH])
        database.execute("UPDATE alert SET incident_id = NULL")
        told = listening(api)
        assert told.settle() == [("firing", "high-loss")]
        assert told.http.requests[0].json["incident_id"] is None
        send(api, run_id, [20], from_step=3)
        assert told.settle(3600) == [("firing", "high-loss")]


class TestAnIncidentThatIsSilencedOrAcknowledged:
    def test_is_told_to_nobody(self, api, listening):
        silence(api, rule="high-loss")
        told, run_id = listening(api), api.register()
        send(api, run_id, [1, *HIGH])
        assert told.settle(60) == []
        send(api, run_id, [1], from_step=3)
        assert told.settle(301) == []

    def test_is_told_if_one_of_its_alerts_is_not_silenced(self, api, listening):
        silence(api, rule="high-loss")
        told, run_id = listening(api), api.register()
        send(api, run_id, [1, *HIGH])
        assert told.settle(60) == []
        send(api, run_id, VERY_HIGH, from_step=3)
        assert told.settle(60) == [("firing", "very-high-loss")]

    def test_is_told_if_one_of_its_alerts_is_not_acknowledged(self, api, listening):
        run_id = api.register()
        send(api, run_id, [1, *HIGH])
        acknowledge(api, "high-loss")
        told = listening(api)
        assert told.settle(60) == []
        send(api, run_id, VERY_HIGH, from_step=3)
        assert told.settle(60) == [("firing", "very-high-loss")]


class TestAnAlertmanager:
    def test_hears_of_one_alert_whose_labels_stay_the_same(self, api, listening, http):
        told, run_id = listening(api, kind="alertmanager"), api.register()
        send(api, run_id, [1, *HIGH])
        await_that(lambda: http.requests, "it hears of it")
        send(api, run_id, VERY_HIGH, from_step=3)
        told.clock.now += 61
        await_that(lambda: len(http.requests) == 2, "it hears of it again")
        end(api, run_id)
        await_that(lambda: len(http.requests) == 3, "it hears of the end")
        bodies = [json.loads(request.body) for request in http.requests]
        assert [len(body) for body in bodies] == [1, 1, 1]
        incident_id = api.get("/incidents")["incidents"][0]["incident_id"]
        assert [body[0]["labels"] for body in bodies] == [
            {
                "alertname": "high-loss", "family": "custom", "severity": "warning", "incident_id": incident_id,
                "run_id": run_id, "run": "gpt", "project": "default",
            }
        ] * 3  # fmt: skip
        assert bodies[1][0]["annotations"]["worst"] == "critical"
