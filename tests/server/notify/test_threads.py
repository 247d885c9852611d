"""The messages on an incident are one thread in Slack and one post in a forum of Discord, on both engines."""

import contextlib

import pytest

from tests.server.notify.receivers import ForumReceiver, SlackReceiver, await_that, hang_up, reply
from tests.server.notify.test_notifier import await_log, log_of
from tsemon_server.notify.notifier import Notifier
from tsemon_server.store import Store

FIRST, LAST = ("firing", "sent", 1), ("resolved", "sent", 1)


@pytest.fixture
def slack(listen):
    return listen(SlackReceiver)


@pytest.fixture
def chat(configure, slack):
    """A configuration with the one receiver `slack`."""

    def chat(*settings, channel="C1"):
        known = f"token: 'env:SLACK_TOKEN', channel: '{channel}', api_url: '{slack.api_url}/'"
        receiver = f"{{name: chat, type: slack, {known}, allow_private: true, max_per_minute: 600}}"
        lines = ["group_wait: 0s", "group_interval: 0s", "recovery_wait: 0s", *settings, f"receivers: [{receiver}]"]
        return configure("\n".join(lines), SLACK_TOKEN="xoxb-1")

    return chat


def end(store, alerts, run="gpt", state="failed"):
    with store.write() as writer:
        writer.runs.change(alerts.run_ids["default", run], state=state)


class TestAThreadInSlack:
    def test_has_the_end_of_a_failing_run_as_its_only_reply(self, store, alerts, start, chat, slack):
        start(chat())
        alerts.fire("gpt")
        await_log(store, FIRST)
        end(store, alerts)
        await_log(store, FIRST, LAST)
        (ts, first), (_, last) = slack.messages.items()
        assert (first["channel"], last["channel"]) == ("C1", "C1")
        assert not first.keys() & {"thread_ts", "reply_broadcast"}
        assert (last["thread_ts"], last["reply_broadcast"]) == (ts, True)
        assert "[ended] loss-spike had not recovered in default/gpt" in last["attachments"][0]["fallback"]

    @pytest.mark.both_engines
    def test_lasts_over_a_restart_and_in_another_process(
        self, database, store, alerts, start, chat, slack, clock, running
    ):
        notifier = start(chat())
        alerts.fire("gpt")
        await_log(store, FIRST)
        notifier.stop()
        alerts.resolve("gpt")
        other = running.enter_context(contextlib.closing(Store(database.url, clock)))
        second = Notifier(other, chat(), clock, pause_s=0.005)
        second.start()
        running.callback(second.stop)
        await_log(store, FIRST, LAST)
        assert slack.threads == [None, next(iter(slack.messages))]

    def test_has_all_messages_of_an_incident_that_fires_again(self, store, alerts, start, chat, slack, clock):
        start(chat("repeat_interval: 1h"))
        alerts.fire("gpt")
        await_log(store, FIRST)
        end(store, alerts)
        await_log(store, FIRST, LAST)
        end(store, alerts, state="running")
        await_log(store, FIRST, LAST, FIRST)
        clock.now += 3601
        await_log(store, FIRST, LAST, ("firing", "sent", 2))
        first, *_ = slack.messages
        assert slack.threads == [None, first, first, first]

    def test_is_one_for_each_first_message_though_they_end_together(self, store, alerts, start, chat, slack):
        notifier = start(chat("group_by: []"))
        alerts.fire("a")
        await_log(store, FIRST)
        alerts.fire("b", "c")
        await_log(store, *[FIRST] * 3)
        notifier.stop()
        first, second = slack.messages
        alerts.resolve("a", "b", "c")
        start(chat("group_by: []"))
        await_log(store, *[FIRST] * 3, *[LAST] * 3)
        assert sorted(slack.threads, key=str) == sorted([None, None, first, second], key=str)
        (of_both,) = (body for body in slack.messages.values() if body.get("thread_ts") == second)
        assert "2 runs" in of_both["attachments"][0]["fallback"]

    @pytest.mark.parametrize("loss", ["unknown", "deleted", "other channel"])
    def test_that_is_lost_loses_no_message(self, database, store, alerts, start, chat, slack, loss):
        notifier = start(chat())
        alerts.fire("gpt")
        await_log(store, FIRST)
        if loss == "unknown":  # as in a database of an earlier version
            database.execute("UPDATE delivery SET thread = NULL")
        elif loss == "deleted":
            slack.messages.clear()
        else:
            notifier.stop()
            start(chat(channel="C2"))
        alerts.resolve("gpt")
        await_log(store, FIRST, LAST)
        *_, last = slack.messages.values()
        assert "thread_ts" not in last
        assert len(slack.requests) == (3 if loss == "deleted" else 2)

    def test_begins_with_the_message_that_tells_both(self, store, alerts, start, chat, slack):
        alerts.fire("gpt")
        alerts.resolve("gpt")
        start(chat())
        await_log(store, ("firing", "merged", 0), LAST)
        assert slack.threads == [None]


class TestAFailureOfSlack:
    @pytest.mark.parametrize("status", [200, 429])
    def test_to_take_so_many_is_followed_by_a_pause_and_the_thread(
        self, store, alerts, start, chat, slack, clock, status
    ):
        limited = reply({"ok": False, "error": "ratelimited"}, status, Retry_After="30")
        slack.answers = [limited]
        start(chat())
        alerts.fire("gpt")
        await_log(store, ("firing", "waiting", 1))
        assert store.notices.log()[0].due_at.timestamp() == clock.now + 30
        slack.answers = [limited]
        clock.now += 31
        await_log(store, ("firing", "waiting", 2))
        clock.now += 31
        await_log(store, ("firing", "sent", 3))
        alerts.resolve("gpt")
        await_log(store, ("firing", "sent", 3), LAST)
        assert slack.threads == [None, next(iter(slack.messages))]

    def test_that_is_about_the_message_is_final(self, store, alerts, start, chat, slack):
        slack.answers = [reply({"ok": False, "error": "msg_too_long"})]
        start(chat())
        alerts.fire("gpt")
        await_log(store, ("firing", "failed", 1))
        assert store.notices.log()[0].error == "Slack answered msg_too_long"
        alerts.fire("other")
        await_log(store, ("firing", "failed", 1), FIRST)

    @pytest.mark.parametrize("error", ["invalid_auth", "channel_not_found", "not_in_channel", "internal_error"])
    def test_that_somebody_can_mend_loses_no_message(self, store, alerts, start, chat, slack, clock, error):
        slack.answers = [reply({"ok": False, "error": error})]
        start(chat())
        alerts.fire("gpt")
        await_log(store, ("firing", "waiting", 1))
        assert store.notices.log()[0].error == f"Slack answered {error}"
        clock.now += 10
        await_log(store, ("firing", "sent", 2))

    @pytest.mark.parametrize("answer", [200, reply([]), reply({"ok": False, "error": "<b>Secret"}), reply("x" * 2**21)])
    def test_to_answer_in_its_words_is_tried_again_and_shown_to_nobody(
        self, store, alerts, start, chat, slack, clock, answer
    ):
        slack.answers = [answer]
        start(chat())
        alerts.fire("gpt")
        await_log(store, ("firing", "waiting", 1))
        assert store.notices.log()[0].error == "answered 200, but not that it is ok"
        clock.now += 10
        await_log(store, ("firing", "sent", 2))

    def test_to_say_that_it_has_the_first_message_makes_the_second_try_the_first(
        self, store, alerts, start, chat, slack, clock
    ):
        slack.answers = [hang_up]
        start(chat())
        alerts.fire("gpt")
        await_log(store, ("firing", "waiting", 1))
        clock.now += 10
        await_log(store, ("firing", "sent", 2))
        alerts.resolve("gpt")
        await_log(store, ("firing", "sent", 2), LAST)
        assert slack.threads == [None, next(iter(slack.messages))]

    def test_to_name_the_message_is_no_failure(self, store, alerts, start, chat, slack):
        slack.answers = [reply({"ok": True})]
        start(chat())
        alerts.fire("gpt")
        await_log(store, FIRST)
        alerts.resolve("gpt")
        await_log(store, FIRST, LAST)
        assert slack.threads == [None]


class TestAPostInAForumOfDiscord:
    @pytest.fixture
    def forum(self, listen):
        return listen(ForumReceiver)

    @pytest.fixture
    def told(self, store, alerts, start, configure, forum):
        """A first message."""
        receiver = f"{{name: forum, type: discord, forum: true, url: '{forum.url}/hook', allow_private: true}}"
        start(configure(f"group_wait: 0s\ngroup_interval: 0s\nrecovery_wait: 0s\nreceivers: [{receiver}]"))
        alerts.fire("gpt")
        await_log(store, FIRST)

    def test_has_both_messages_of_an_incident(self, store, alerts, told, forum):
        alerts.resolve("gpt")
        await_log(store, FIRST, LAST)
        ((first, last),) = forum.posts.values()
        assert first["thread_name"] == "loss-spike fires in default/gpt at step 10"
        assert "is over" in last["embeds"][0]["title"]

    def test_that_is_deleted_is_followed_by_another(self, store, alerts, told, forum):
        forum.posts.clear()
        alerts.resolve("gpt")
        await_log(store, FIRST, LAST)
        ((last,),) = forum.posts.values()
        assert "is over" in last["thread_name"]

    @pytest.mark.parametrize("status", [404, 500])
    def test_of_a_webhook_that_is_gone_or_fails_is_tried_again(self, store, alerts, told, forum, clock, status):
        forum.answers = [status] * (2 if status == 404 else 1)
        alerts.resolve("gpt")
        await_that(lambda: ("resolved", "waiting", 1) in log_of(store), "it waits")
        clock.now += 10
        await_log(store, FIRST, ("resolved", "sent", 2))
        ((_, last),) = forum.posts.values()
        assert "thread_name" not in last
