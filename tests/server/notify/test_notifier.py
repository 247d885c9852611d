"""Who hears of what, how often and when, on both engines and through real receivers."""

import contextlib
import logging
from collections import Counter

import pytest

from tests.server.notify.receivers import SilentServer, await_that, hang
from tsemon.errors import StoreError
from tsemon_server.notify.notifier import MAX_SPLITS, Notifier
from tsemon_server.store import Store
from tsemon_server.store.ledger.notices import KEPT_DELIVERIES, KEPT_S, UNHEARD_S, Notices

HOOK = "{{name: hook, type: webhook, url: '{}/secret-path', allow_private: true, max_per_minute: {}}}"


@pytest.fixture
def hooked(configure, http):
    """A configuration with the one receiver `http`."""

    def hooked(*settings, url=None, per_minute=100):
        lines = [
            "group_wait: 0s",
            "group_interval: 0s",
            "recovery_wait: 0s",
            f"receivers: [{HOOK.format(url or http.url, per_minute)}]",
            *settings,
        ]
        known = {line.partition(":")[0]: line for line in lines}
        return configure("\n".join(known.values()))

    return hooked


def told(http):
    """State and run of each alert of each message."""
    return [[(alert["state"], alert["run"]) for alert in request.json["alerts"]] for request in http.requests]


def log_of(store):
    """Kind, status and attempts of all deliveries, oldest first."""
    return [(found.kind, found.status, found.attempts) for found in reversed(store.notices.log(limit=1000))]


def await_log(store, *expected):
    await_that(
        lambda: sorted(log_of(store)) == sorted(expected),
        lambda: f"{Counter(log_of(store))} in the log, not {Counter(expected)}",
    )


@pytest.fixture
def await_idle(database, clock):
    """Wait until nothing is due any more at the time of the clock."""

    def await_idle():
        def is_idle():
            queued = database.execute("SELECT alert_id FROM notice")
            return not queued and not database.execute("SELECT due_at FROM delivery WHERE due_at <= :t", t=clock.now)

        await_that(is_idle, "nothing is due")

    return await_idle


class TestWhatIsCounted:
    def test_begins_at_zero_and_says_what_came_of_it(self, store, alerts, start, hooked, http, clock):
        counts = Counter()

        def count(receiver, outcome, number):
            counts[receiver, outcome] += number

        http.answers = [503, 200, 400]
        start(hooked(), count=count)
        assert counts.keys() == {("hook", "sent"), ("hook", "failed"), ("hook", "given_up")}
        assert not any(counts.values())
        alerts.fire("gpt")
        await_that(lambda: counts["hook", "failed"] == 1, "it is tried in vain")
        await_log(store, ("firing", "waiting", 1))  # then it is known when it is due again
        clock.now += 10
        await_log(store, ("firing", "sent", 2))
        assert counts == {("hook", "sent"): 1, ("hook", "failed"): 1, ("hook", "given_up"): 0}
        alerts.resolve("gpt")
        await_log(store, ("firing", "sent", 2), ("resolved", "failed", 1))
        assert counts == {("hook", "sent"): 1, ("hook", "failed"): 2, ("hook", "given_up"): 1}


class TestANotification:
    def test_is_sent_when_an_alert_fires_and_when_it_is_over(self, store, alerts, start, hooked, http):
        start(hooked())
        alerts.fire("gpt")
        await_log(store, ("firing", "sent", 1))
        alerts.resolve("gpt")
        await_log(store, ("firing", "sent", 1), ("resolved", "sent", 1))
        assert told(http) == [[("firing", "gpt")], [("resolved", "gpt")]]

    def test_is_not_sent_of_what_is_pending_only(self, store, alerts, start, hooked, http, await_idle):
        start(hooked())
        alerts.fire("gpt", state="pending")
        alerts.fire("other")
        await_log(store, ("firing", "sent", 1))
        assert told(http) == [[("firing", "other")]]

    def test_is_sent_when_a_pending_alert_fires(self, store, alerts, start, hooked):
        start(hooked())
        alerts.fire("gpt", state="pending")
        with store.write() as writer:
            run_id = alerts.run_ids["default", "gpt"]
            writer.alerts.change(run_id, 1, "loss-spike", "pending", state="firing", firing_step=3)
        await_log(store, ("firing", "sent", 1))

    def test_is_sent_when_a_new_attempt_ends_what_fires(self, store, alerts, start, hooked, http, clock):
        start(hooked())
        alerts.fire("gpt")
        await_log(store, ("firing", "sent", 1))
        clock.now += 100
        with store.write() as writer:
            given = {"blocks": [], "config": None, "tags": None, "resume_step": 5, "attempt_key": None}
            writer.runs.register("default", "gpt", **given)
        await_log(store, ("firing", "sent", 1), ("resolved", "sent", 1))

    def test_is_not_sent_of_what_was_not_committed(self, store, alerts, start, hooked, await_idle):
        start(hooked())
        with contextlib.suppress(ZeroDivisionError), store.write() as writer:
            alerts.open(writer, "gpt", state="firing", pending_step=1, firing_step=1)
            raise ZeroDivisionError
        await_idle()
        assert log_of(store) == []

    def test_is_queued_before_anybody_sends_and_sent_then(self, store, alerts, start, hooked):
        alerts.fire("gpt")
        assert log_of(store) == []
        start(hooked())
        await_log(store, ("firing", "sent", 1))

    def test_goes_with_its_run(self, store, alerts, start, hooked, http, await_idle):
        http.answers = [500] * 1000
        start(hooked())
        alerts.fire("gpt")
        await_that(lambda: http.requests, "it was tried")
        with store.write() as writer:
            writer.runs.delete(alerts.run_ids["default", "gpt"])
        await_idle()
        assert log_of(store) == []


class TestFiringAndOverTogether:
    def test_is_one_message_where_both_wait(self, store, alerts, start, hooked, http):
        alerts.fire("gpt")
        alerts.resolve("gpt")
        start(hooked())
        await_log(store, ("firing", "merged", 0), ("resolved", "sent", 1))
        assert told(http) == [[("resolved", "gpt")]]
        assert http.requests[0].json["title"] == "loss-spike fired in default/gpt at step 10, and is over"
        assert http.requests[0].json["level"] == "info"

    @pytest.mark.parametrize("state", ["finished", "failed"])
    def test_is_a_critical_message_where_the_run_ends_before_the_first(
        self, store, alerts, start, hooked, http, clock, state
    ):
        start(hooked("group_wait: 10s"))
        alerts.fire("gpt", severity="critical")
        await_log(store, ("firing", "waiting", 0))
        with store.write() as writer:
            writer.runs.change(alerts.run_ids["default", "gpt"], state=state)
        await_log(store, ("firing", "merged", 0), ("resolved", "waiting", 0))
        clock.now += 11
        await_log(store, ("firing", "merged", 0), ("resolved", "sent", 1))
        (request,) = http.requests
        assert request.json["title"] == "loss-spike fired in default/gpt at step 10, and the run ended"
        assert (request.json["level"], request.json["severity"]) == ("error", "critical")
        assert request.json["text"] == (
            "default/gpt, step 10: loss is 9.5 in gpt. Since step 10. Then the run ended.\n\n"
            "What to try: lower the learning rate"
        )

    def test_is_only_the_end_where_the_beginning_was_told(self, store, alerts, start, hooked, http):
        start(hooked())
        alerts.fire("gpt", severity="critical")
        await_log(store, ("firing", "sent", 1))
        with store.write() as writer:
            writer.runs.change(alerts.run_ids["default", "gpt"], state="failed")
        await_log(store, ("firing", "sent", 1), ("resolved", "sent", 1))
        assert (http.requests[1].json["level"], http.requests[1].json["text"]) == (
            "info",
            "default/gpt, step 10: over (run ended); it was open from step 10 on. "
            "Cause: loss-spike. loss is 9.5 in gpt. Since step 10.",
        )

    def test_is_one_message_where_the_first_did_not_get_through(self, store, alerts, start, hooked, http, clock):
        http.answers = [500]
        start(hooked())
        alerts.fire("gpt")
        await_that(lambda: log_of(store) == [("firing", "waiting", 1)], "it was tried")
        alerts.resolve("gpt")
        await_that(lambda: log_of(store)[0] == ("firing", "merged", 1), "they are one")
        clock.now += 10
        await_log(store, ("firing", "merged", 1), ("resolved", "sent", 1))

    def test_is_not_the_beginning_while_nobody_has_planned_the_end(
        self, store, alerts, start, hooked, http, clock, monkeypatch
    ):
        http.answers = [500]
        start(hooked())
        alerts.fire("gpt")
        await_that(lambda: log_of(store) == [("firing", "waiting", 1)], "it was tried")
        plans, due, find_due = [], [], Notices.due
        with monkeypatch.context() as patch:
            patch.setattr(Notices, "route", lambda *_: plans.append("none"))
            await_that(lambda: plans, "nobody plans")
            alerts.resolve("gpt")
            patch.setattr(Notices, "due", lambda *of: due.append(find_due(*of)) or due[-1])
            clock.now += 10
            await_that(lambda: len([found for found in due if found]) > 2, "the first was due again and again")
            assert len(http.requests) == 1
        await_log(store, ("firing", "merged", 1), ("resolved", "sent", 1))

    def test_is_nothing_where_the_first_was_given_up(self, store, alerts, start, hooked, http, await_idle):
        http.answers = [400]
        start(hooked())
        alerts.fire("gpt")
        await_log(store, ("firing", "failed", 1))
        alerts.resolve("gpt")
        await_idle()
        assert log_of(store) == [("firing", "failed", 1)]


class TestAnAlertThatIsSilencedOrSeenTo:
    def silence(self, store, clock, seconds, rule="loss-spike"):
        anything = {"run": None, "project": None, "family": None}
        with store.write() as writer:
            writer.silences.add(rule=rule, until=clock.now + seconds, created_by="ada", reason="known", **anything)

    def acknowledge(self, store):
        (alert,) = self.open_alerts(store)
        with store.write() as writer:
            writer.alerts.acknowledge(alert.alert_id, "ada", None)

    def open_alerts(self, store):
        with store.read() as reader:
            return [alert for alert in reader.alerts.find() if alert.state != "resolved"]

    def test_is_told_to_nobody(self, store, alerts, start, hooked, http, clock, await_idle):
        self.silence(store, clock, 3600)
        start(hooked())
        alerts.fire("a")
        await_that(lambda: any("held back" in (found.error or "") for found in store.notices.log()), "it is held")
        alerts.resolve("a")
        await_log(store, ("firing", "dropped", 0))
        assert http.requests == []

    def test_is_told_once_the_silence_is_over(self, store, alerts, start, hooked, http, clock):
        self.silence(store, clock, 600)
        start(hooked())
        alerts.fire("a")
        await_that(lambda: any("held back" in (found.error or "") for found in store.notices.log()), "it is held")
        clock.now += 601
        await_log(store, ("firing", "sent", 1))
        assert store.notices.log()[0].error is None

    def test_is_told_to_nobody_where_it_ends_before_its_turn(
        self, store, alerts, start, hooked, http, clock, await_idle
    ):
        self.silence(store, clock, 3600)
        start(hooked("group_wait: 1m"))
        alerts.fire("a")
        alerts.resolve("a")
        alerts.fire("b", rule="other")
        await_idle()  # both are planned
        clock.now += 61
        await_that(lambda: ("firing", "sent", 1) in log_of(store), "the other is told")
        assert told(http) == [[("firing", "b")]]

    def test_is_not_told_again(self, store, alerts, start, hooked, http, clock, await_idle):
        start(hooked("repeat_interval: 1h"))
        alerts.fire("a")
        await_log(store, ("firing", "sent", 1))
        self.acknowledge(store)
        clock.now += 3601
        await_idle()
        assert len(http.requests) == 1

    def test_is_told_to_be_over_to_those_who_heard_of_it(self, store, alerts, start, hooked, http):
        start(hooked())
        alerts.fire("a")
        await_log(store, ("firing", "sent", 1))
        self.acknowledge(store)
        alerts.resolve("a")
        await_log(store, ("firing", "sent", 1), ("resolved", "sent", 1))

    def test_is_kept_up_with_an_alertmanager_that_knows_it(self, store, alerts, start, configure, http, clock):
        where = f"type: alertmanager, url: '{http.url}', allow_private: true"
        start(configure(f"receivers: [{{name: am, {where}}}]"))
        alerts.fire("a")
        await_log(store, ("firing", "sent", 1))
        self.acknowledge(store)
        clock.now += 61
        await_log(store, ("firing", "sent", 2))


class TestAnAlertThatFiresAfterAll:
    """One that was over, and is taken back: its run goes on, or a frame came late."""

    def end(self, store, alerts):
        with store.write() as writer:
            writer.runs.change(alerts.run_ids["default", "a"], state="finished")

    def reopen(self, store, alerts):
        with store.write() as writer:
            writer.runs.change(alerts.run_ids["default", "a"], state="running")

    def test_is_told_again_to_those_who_heard_that_it_was_over(self, store, alerts, start, hooked, http):
        start(hooked())
        alerts.fire("a")
        await_log(store, ("firing", "sent", 1))
        self.end(store, alerts)
        await_log(store, ("firing", "sent", 1), ("resolved", "sent", 1))
        self.reopen(store, alerts)
        await_log(store, *[("firing", "sent", 1)] * 2, ("resolved", "sent", 1))
        alerts.resolve("a")
        await_log(store, *[("firing", "sent", 1), ("resolved", "sent", 1)] * 2)
        assert told(http) == [[("firing", "a")], [("resolved", "a")]] * 2
        assert "(run ended)" in http.requests[1].json["text"]

    def test_is_no_news_to_those_who_did_not_hear(self, store, alerts, start, hooked, http, clock, await_idle):
        start(hooked("group_interval: 1m"))
        alerts.fire("a")
        await_log(store, ("firing", "sent", 1))
        self.end(store, alerts)
        await_log(store, ("firing", "sent", 1), ("resolved", "waiting", 0))
        self.reopen(store, alerts)
        await_log(store, ("firing", "sent", 1))
        clock.now += 61
        await_idle()
        assert len(http.requests) == 1
        alerts.resolve("a")
        await_log(store, ("firing", "sent", 1), ("resolved", "sent", 1))

    def test_is_no_news_where_it_changed_in_one_go(self, store, alerts, start, hooked, http, await_idle):
        start(hooked())
        alerts.fire("a")
        await_log(store, ("firing", "sent", 1))
        with store.write() as writer:
            run_id = alerts.run_ids["default", "a"]
            later = writer.alerts.take_back(run_id, 1, 0, ["loss-spike"])
            (again,) = later["loss-spike"]
            writer.alerts.revise(again.alert_id, state="firing", pending_step=9, firing_step=11)
        await_idle()
        assert log_of(store) == [("firing", "sent", 1)]

    def test_is_over_where_a_late_frame_says_that_it_never_fired(self, store, alerts, start, hooked, http):
        start(hooked())
        alerts.fire("a")
        await_log(store, ("firing", "sent", 1))
        with store.write() as writer:
            later = writer.alerts.take_back(alerts.run_ids["default", "a"], 1, 0, ["loss-spike"])
            assert writer.alerts.drop(later["loss-spike"][0].alert_id)
        await_log(store, ("firing", "sent", 1), ("resolved", "sent", 1))


class TestAFailure:
    def test_is_followed_by_another_attempt(self, store, alerts, start, hooked, http, clock):
        http.answers = [500, 503]
        start(hooked())
        alerts.fire("gpt")
        for attempts in (1, 2):
            await_log(store, ("firing", "waiting", attempts))
            clock.now += 10
        await_log(store, ("firing", "sent", 3))
        assert [found.error for found in store.notices.log()] == [None]

    def test_is_told_in_the_log_of_the_service_once_an_outage(self, store, alerts, start, hooked, http, clock, caplog):
        http.answers = [500, 500]
        start(hooked())
        alerts.fire("gpt")
        for attempts in (1, 2):
            await_log(store, ("firing", "waiting", attempts))
            clock.now += 10
        await_log(store, ("firing", "sent", 3))
        await_that(lambda: "go on" in caplog.text, "it is said")
        said = [record.message for record in caplog.records if record.name.startswith("tsemon_server.notify")]
        assert said == ["notifications to hook wait: answered 500", "notifications to hook go on"]

    def test_is_followed_by_a_pause_as_long_as_the_receiver_asks_for(self, store, alerts, start, hooked, http, clock):
        http.answers = [(429, {"Retry-After": "600"})]
        start(hooked())
        alerts.fire("gpt")
        await_log(store, ("firing", "waiting", 1))
        (waiting,) = store.notices.log()
        assert waiting.due_at.timestamp() == clock.now + 600
        assert (waiting.status, waiting.error) == ("waiting", "answered 429")

    def test_is_the_last_after_a_day(self, store, alerts, start, hooked, http, clock, caplog):
        http.answers = [500] * 100
        start(hooked())
        alerts.fire("gpt")
        await_log(store, ("firing", "waiting", 1))
        clock.now += 86_300
        await_log(store, ("firing", "waiting", 2))
        clock.now += 200
        await_log(store, ("firing", "failed", 3))
        assert "1 notifications to hook are given up: answered 500" in caplog.text

    def test_that_will_not_pass_is_the_last(self, store, alerts, start, hooked, http):
        http.answers = [422]
        start(hooked())
        alerts.fire("gpt")
        await_log(store, ("firing", "failed", 1))
        alerts.fire("other")  # the receiver is well
        await_log(store, ("firing", "failed", 1), ("firing", "sent", 1))

    def test_of_a_message_of_several_loses_only_the_alert_that_will_not_pass(self, store, alerts, start, hooked, http):
        def refuse_b(handler):
            is_refused = any(alert["run"] == "b" for alert in http.requests[-1].json["alerts"])
            handler.send_response(400 if is_refused else 200)
            handler.end_headers()

        http.answers = [refuse_b] * 100
        alerts.fire("a", "b", "c", severity="critical")
        start(hooked())
        await_log(store, ("firing", "sent", 1), ("firing", "failed", 1), ("firing", "sent", 1))
        assert [found.run for found in store.notices.log(status="failed")] == ["b"]

    def test_of_every_message_is_no_storm(self, store, alerts, start, hooked, http):
        http.answers = [400] * 1000
        alerts.fire(*(f"run-{number}" for number in range(300)))
        start(hooked("group_by: rule"))
        await_that(lambda: any(found.error for found in store.notices.log(status="waiting", limit=1000)), "it rests")
        assert len(http.requests) <= 1 + 2 * MAX_SPLITS
        assert {found.status for found in store.notices.log(limit=1000)} == {"waiting", "failed"}

    def test_of_a_message_of_several_is_tried_again_where_one_half_finds_an_outage(
        self, store, alerts, start, hooked, http, clock
    ):
        http.answers = [400, 200, 500]
        alerts.fire("a", "b")
        start(hooked("group_by: rule"))
        await_log(store, ("firing", "sent", 1), ("firing", "waiting", 1))
        clock.now += 10
        await_log(store, ("firing", "sent", 1), ("firing", "sent", 2))

    def test_tells_no_address(self, store, alerts, start, hooked, listen, caplog):
        caplog.set_level(logging.DEBUG)
        nobody = listen(SilentServer)
        nobody.close()
        start(hooked(url=nobody.url))
        alerts.fire("gpt")
        await_that(lambda: store.notices.log() and store.notices.log()[0].error, "it was tried")
        assert store.notices.log()[0].error == "no connection (Connection refused)"
        seen = caplog.text + "".join(found.model_dump_json() for found in store.notices.log())
        assert "secret-path" not in seen
        assert str(nobody.port) not in caplog.text

    def test_to_note_that_it_was_sent_sends_nothing_twice(self, store, alerts, start, hooked, http, caplog):
        failures = [StoreError("the disk is full")] * 2
        note_sent = store.notices.note_sent

        def note_later(*sent):
            if failures:
                raise failures.pop()
            note_sent(*sent)

        store.notices.note_sent = note_later
        start(hooked())
        alerts.fire("gpt")
        await_log(store, ("firing", "sent", 1))
        assert len(http.requests) == 1
        assert caplog.text.count("is still to be noted: the disk is full") == 2


class TestAReceiver:
    def test_that_hangs_delays_no_other(self, store, alerts, start, configure, listen):
        slow, quick = listen(), listen()
        slow.answers = [hang] * 10
        text = "group_wait: 0s\nreceivers:\n"
        text += f"- {{name: slow, type: webhook, url: '{slow.url}', allow_private: true}}\n"
        text += f"- {{name: quick, type: webhook, url: '{quick.url}', allow_private: true}}\n"
        start(configure(text))
        alerts.fire("gpt")
        await_that(lambda: slow.requests, "the slow one has it")
        for number in range(3):
            alerts.fire(f"other-{number}", rule=f"rule-{number}")
            await_that(lambda number=number: len(quick.requests) == number + 2, "the quick one hears of it", 4)
        assert len(slow.requests) == 1
        slow.let_go.set()

    def test_that_is_gone_from_the_configuration_is_told_nothing(self, store, alerts, start, hooked, http, configure):
        http.answers = [500] * 100
        notifier = start(hooked())
        alerts.fire("gpt")
        await_log(store, ("firing", "waiting", 1))
        notifier.stop()
        start(configure(f"receivers: [{HOOK.format(http.url, 5).replace('name: hook', 'name: other')}]"))
        await_log(store, ("firing", "dropped", 1))


class TestAGroup:
    def test_is_one_message(self, store, alerts, start, hooked, http, clock):
        start(hooked("group_wait: 10s", "group_by: rule"))
        alerts.fire("a", "b")
        await_that(lambda: len(log_of(store)) == 2, "both are planned")
        clock.now += 6
        alerts.fire("c")
        await_that(lambda: len(log_of(store)) == 3, "all are planned")
        assert http.requests == []
        clock.now += 5
        await_log(store, *[("firing", "sent", 1)] * 3)
        (request,) = http.requests
        assert request.json["title"] == "loss-spike fires in 3 runs of default"
        assert {alert["run"] for alert in request.json["alerts"]} == {"a", "b", "c"}

    def test_is_a_run_unless_the_file_says_otherwise(self, store, alerts, start, hooked, http):
        alerts.fire("a", "b")
        alerts.fire("a", rule="inform", severity="info")
        alerts.fire("a", project="another")
        start(hooked("routes: [{receivers: hook, severity: info}]"))
        await_log(store, *[("firing", "sent", 1)] * 4)
        assert sorted(told(http)) == [[("firing", "a")], [("firing", "a")] * 2, [("firing", "b")]]

    def test_has_in_common_what_the_file_says(self, store, alerts, start, hooked, http):
        alerts.fire("a", "b")
        alerts.fire("c", rule="other")
        alerts.fire("a", project="another")
        start(hooked("group_by: [project, rule, family]"))
        await_log(store, *[("firing", "sent", 1)] * 4)
        assert sorted(map(sorted, told(http))) == [
            [("firing", "a")],
            [("firing", "a"), ("firing", "b")],
            [("firing", "c")],
        ]

    def test_is_told_again_after_its_interval(self, store, alerts, start, hooked, http, clock, await_idle):
        start(hooked("group_interval: 60s", "group_by: rule"))
        alerts.fire("a")
        await_log(store, ("firing", "sent", 1))
        alerts.fire("b")
        alerts.resolve("a")
        await_that(lambda: len(log_of(store)) == 3, "all are planned")
        clock.now += 59
        await_idle()
        assert len(http.requests) == 1
        clock.now += 2
        await_log(store, *[("firing", "sent", 1)] * 2, ("resolved", "sent", 1))
        assert (
            http.requests[1].json["title"]
            == "loss-spike fires in default/b at step 10 and is over in default/a at step 20"
        )

    def test_is_told_of_again_while_it_fires(self, store, alerts, start, hooked, http, clock, await_idle):
        start(hooked("repeat_interval: 1h"))
        alerts.fire("a")
        await_log(store, ("firing", "sent", 1))
        clock.now += 3601
        await_log(store, ("firing", "sent", 2))
        assert http.requests[1].json["title"] == "loss-spike still fires in default/a at step 10"
        alerts.resolve("a")
        await_log(store, ("firing", "sent", 2), ("resolved", "sent", 1))
        clock.now += 36_000
        await_idle()
        assert len(http.requests) == 3

    def test_is_told_once_where_nothing_else_was_said(self, store, alerts, start, hooked, http, clock, await_idle):
        start(hooked())
        alerts.fire("a")
        await_log(store, ("firing", "sent", 1))
        clock.now += 1e7
        await_idle()
        assert len(http.requests) == 1
        alerts.resolve("a")
        await_log(store, ("firing", "sent", 1), ("resolved", "sent", 1))


class TestAThousandRunsThatFailWithinAMinute:
    NUM_RUNS = 1000

    def test_are_one_message_by_rule_where_they_fail_alike(self, store, alerts, start, hooked, http, clock):
        runs = [f"run-{number}" for number in range(self.NUM_RUNS)]
        alerts.add_runs(*runs)
        alerts.fire(*runs)
        start(hooked("group_wait: 5s", "group_by: [project, rule]"))
        await_that(lambda: len(log_of(store)) == self.NUM_RUNS, "all are planned")
        clock.now += 10
        await_log(store, *[("firing", "sent", 1)] * self.NUM_RUNS)
        (request,) = http.requests
        assert request.json["title"] == "loss-spike fires in 1,000 runs of default"
        assert request.json["text"].count("\n") < 15
        assert request.json["num_alerts"] == self.NUM_RUNS
        assert len(request.body) < 10_000

    def test_are_as_many_messages_as_the_receiver_takes_where_they_differ(
        self, store, alerts, start, hooked, http, clock, await_idle
    ):
        for number in range(50):
            alerts.fire("a", "b", project=f"project-{number}", rule=f"rule-{number}")
        start(hooked("group_wait: 5s", "group_by: [project, rule]", per_minute=6))
        await_that(lambda: len(log_of(store)) == 100, "all are planned")
        clock.now += 10
        await_log(store, *[("firing", "sent", 1)] * 100)
        assert [request.json["num_alerts"] for request in http.requests] == [2, 2, 2, 2, 2, 90]
        assert http.requests[-1].json["title"].startswith("rule-5, rule-6, rule-7 and 42 more rules fire in 90 runs")
        alerts.fire("late", rule="late")
        await_that(lambda: len(log_of(store)) == 101, "it is planned")
        clock.now += 50
        await_that(lambda: len(http.requests) == 7, "the receiver takes more after a minute")


class TestTwoProcesses:
    def test_send_each_notification_once(self, database, store, alerts, start, hooked, http, clock, running):
        other = running.enter_context(contextlib.closing(Store(database.url, clock)))
        start(hooked())
        second = Notifier(other, hooked(), clock, pause_s=0.005)
        second.start()
        running.callback(second.stop)
        for number in range(20):
            alerts.fire(f"run-{number}", rule=f"rule-{number}")
        await_log(store, *[("firing", "sent", 1)] * 20)
        assert sorted(run for ((_, run),) in told(http)) == sorted(f"run-{number}" for number in range(20))

    def test_hand_the_work_over(self, database, store, alerts, start, hooked, http, clock, running):
        first = start(hooked())
        alerts.fire("a")
        await_log(store, ("firing", "sent", 1))
        start(hooked())
        first.stop()
        alerts.resolve("a")
        await_log(store, ("firing", "sent", 1), ("resolved", "sent", 1))


class TestTheLog:
    def test_is_bounded(self, store, alerts, start, hooked, clock):
        start(hooked())
        alerts.fire("gpt")
        await_log(store, ("firing", "sent", 1))
        alerts.resolve("gpt")
        await_log(store, ("firing", "sent", 1), ("resolved", "sent", 1))
        clock.now += KEPT_S - 1
        store.notices.forget_old()
        assert len(log_of(store)) == 2
        clock.now += 2
        store.notices.forget_old()
        assert log_of(store) == []

    def test_keeps_the_newest(self, store, alerts, start, hooked, database):
        start(hooked())
        alerts.fire("a")
        await_log(store, ("firing", "sent", 1))
        alerts.resolve("a")
        alerts.fire("b")
        await_log(store, *[("firing", "sent", 1)] * 2, ("resolved", "sent", 1))
        database.execute(f"UPDATE delivery SET delivery_id = delivery_id + {KEPT_DELIVERIES} WHERE kind = 'resolved'")
        store.notices.forget_old()
        assert log_of(store) == [("firing", "sent", 1), ("resolved", "sent", 1)], (
            "what still fires stays, for its end is to be told"
        )

    def test_is_not_needed_for_what_nobody_hears_of(self, store, alerts, clock, database):
        alerts.fire("gpt")
        store.notices.forget_old()
        assert database.execute("SELECT alert_id FROM notice")
        clock.now += UNHEARD_S + 1
        store.notices.forget_old()
        assert database.execute("SELECT alert_id FROM notice") == []
