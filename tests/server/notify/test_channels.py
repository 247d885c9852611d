"""A message in the words of each kind of receiver."""

import hashlib
import hmac
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from tsemon_server.notify.channels import as_alerts, as_discord, as_mail, as_slack, as_webhook, send
from tsemon_server.notify.configuration import Alertmanager, Discord, Email, Slack, Webhook
from tsemon_server.notify.messages import MAX_EVIDENCE_BYTES, MAX_SHOWN, Message, Notice
from tsemon_server.store.ledger.incidents import NoticedIncident

NOW = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
BASE_URL = "http://gpu1:8731"
SEEN = {"first": {"layer": 0, "value": 0.5}}


def about(*alerts, kind="firing", base_url=BASE_URL):
    return Message([Notice(kind, alert) for alert in alerts], base_url, NOW)


def receiver(kind, url="https://example.org/x", **fields):
    return kind.model_validate({"name": "r", "type": kind.__name__.lower(), "url": url} | fields)


@pytest.fixture
def many(make_alert):
    """More alerts of one rule than a message names."""
    names = [f"run-{number:02}" for number in range(MAX_SHOWN + 3)]
    return [make_alert(alert_id=str(number), run=name, run_id=name) for number, name in enumerate(names)]


@pytest.fixture
def make_incident(make_alert):
    def make(**fields):
        known = {"incident_id": "4", "blocks": (3, 5), "where": "blocks 3 to 5", "left_step": 100}
        known |= {"settles_step": None, "also_fired": [], "cause_id": "9"}
        known["labels"] = {"rule": "attention-entropy-collapse", "family": "entropy", "severity": "critical"}
        return NoticedIncident.model_validate(make_alert().model_dump() | known | fields)

    return make


class TestAMessage:
    def test_of_one_alert_tells_all_about_it(self, make_alert):
        message = about(make_alert())
        assert message.title == "attention-entropy-collapse fires in pretrain/gpt at step 120"
        assert message.text == (
            "pretrain/gpt, step 120: a head sees one token\n\nWhat to try: normalise queries (QK-norm)"
        )
        assert message.url == f"{BASE_URL}/#/run/aa11?step=120&attempt=1"

    def test_links_to_the_metric_layer_step_and_attempt(self, make_alert):
        evidence = {
            "layers": {"attention_entropy": SEEN, "attention_entropy_min": SEEN},
            "conditions": [{"value": "loss"}, {"value": "attention_entropy_min", "layer": 3}],
        }
        link = about(make_alert(evidence=evidence)).url
        assert link == f"{BASE_URL}/#/run/aa11?metric=attention_entropy_min&layer=3&step=120&attempt=1"

    def test_links_to_the_first_metric_with_layers_if_its_condition_names_no_layer(self, make_alert):
        evidence = {
            "layers": {"centred_token_similarity": SEEN, "token_diversity": SEEN},
            "conditions": [
                {"value": "fall over depth of log10 odds of token_diversity"},
                {"value": "centred_token_similarity", "layer": 3},
            ],
        }
        link = about(make_alert(evidence=evidence)).url
        assert link == f"{BASE_URL}/#/run/aa11?metric=token_diversity&step=120&attempt=1"

    def test_of_its_end_tells_since_when_it_fired(self, make_alert):
        message = about(make_alert(state="resolved", resolved_step=150), kind="resolved")
        assert message.title == "attention-entropy-collapse is over in pretrain/gpt at step 150"
        assert message.text == "pretrain/gpt, step 150: over; it fired from step 120 on"

    def test_of_many_names_some_and_counts_the_others(self, many):
        message = about(*many)
        assert message.title == "attention-entropy-collapse fires in 13 runs of pretrain"
        assert message.lines[0] == "pretrain/run-00, step 120: a head sees one token"
        assert message.lines[-1] == "and 3 more"
        assert len(message.lines) == MAX_SHOWN + 1
        assert message.url == f"{BASE_URL}/#/"

    def test_of_several_rules_names_them(self, make_alert):
        alerts = [make_alert(alert_id=str(n), rule=f"rule-{n}", run=f"run-{n}", run_id=f"r{n}") for n in range(2)]
        message = about(*alerts)
        assert message.title == "rule-0 and rule-1 fire in 2 runs of pretrain"
        assert message.lines[1] == "rule-1 in pretrain/run-1, step 120: a head sees one token"

    def test_of_very_many_rules_names_some(self, make_alert):
        alerts = [make_alert(alert_id=str(n), rule=f"rule-{n}") for n in range(5)]
        assert about(*alerts).title == "rule-0, rule-1, rule-2 and 2 more rules fire in pretrain/gpt at step 120"
        assert about(*alerts[:4]).title == "rule-0, rule-1, rule-2 and rule-3 fire in pretrain/gpt at step 120"

    def test_tells_which_rule_fires_and_which_is_over(self, make_alert):
        over = Notice("resolved", make_alert(rule="loss-spike", state="resolved", resolved_step=150))
        message = Message([over, Notice("firing", make_alert(rule="stall"))], BASE_URL, NOW)
        assert (
            message.title
            == "stall fires in pretrain/gpt at step 120 and loss-spike is over in pretrain/gpt at step 150"
        )
        assert message.lines == [
            "stall in pretrain/gpt, step 120: a head sees one token",
            "loss-spike in pretrain/gpt, step 150: over; it fired from step 120 on",
        ]

    def test_names_the_worst_first(self, make_alert):
        alerts = [make_alert(alert_id=str(n), run=s, severity=s) for n, s in enumerate(("info", "critical", "warning"))]
        message = about(*alerts)
        assert [notice.alert.run for notice in message.shown] == ["critical", "warning", "info"]
        assert message.severity == "critical"

    def test_has_no_link_where_nobody_knows_the_address(self, make_alert):
        assert about(make_alert(), base_url=None).url is None


class TestAMessageOfTheEndOfAnIncident:
    @pytest.fixture
    def over(self, make_incident):
        return lambda reason: about(
            make_incident(state="resolved", resolved_step=150, resolved_reason=reason), kind="resolved"
        )

    @pytest.mark.parametrize(
        ("reason", "label", "colour", "what"),
        [
            ("clear", "[resolved]", 0x16A34A, "is over in pretrain/gpt at step 150"),
            ("by hand", "[resolved]", 0x16A34A, "is over in pretrain/gpt at step 150"),
            ("run ended", "[ended]", 0x6B7280, "had not recovered in pretrain/gpt when the run ended"),
            ("new attempt", "[ended]", 0x6B7280, "had not recovered in pretrain/gpt when a new attempt began"),
        ],
    )
    def test_is_green_only_if_the_incident_was_over_before_its_attempt(self, over, reason, label, colour, what):
        message = over(reason)
        title = f"{label} attention-entropy-collapse {what}"
        (attachment,) = json.loads(as_slack(message, receiver(Slack)).body)["attachments"]
        (embed,) = json.loads(as_discord(message, receiver(Discord)).body)["embeds"]
        assert (attachment["color"], attachment["fallback"]) == (f"#{colour:06x}", title)
        assert (embed["color"], embed["title"]) == (colour, title)
        assert as_mail(message, TestMail.whom)["Subject"] == title

    def test_has_the_advice_of_a_cause_that_turned_out_to_be_more_likely(self, make_incident):
        over = make_incident(rule="token-similarity-escalation", state="resolved", resolved_step=150)
        assert about(over, kind="resolved").advice == "normalise queries (QK-norm)"
        assert about(make_incident(state="resolved", resolved_step=150), kind="resolved").advice is None

    @pytest.mark.parametrize(("reason", "ends"), [("clear", NOW + timedelta(minutes=5)), ("run ended", NOW)])
    def test_takes_effect_later_in_an_alertmanager_if_it_is_a_recovery(self, make_incident, reason, ends):
        over = make_incident(state="resolved", resolved_step=150, resolved_reason=reason, updated_at=NOW)
        (alert,) = json.loads(as_alerts(about(over, kind="resolved"), receiver(Alertmanager)).body)
        assert alert["endsAt"] == ends.isoformat()


class TestALink:
    def test_opens_the_metric_block_and_step_at_which_a_rule_found_an_incident_on_every_channel(self, make_incident):
        message = about(make_incident(evidence={"layers": {"attention_entropy": SEEN}, "step": 115}))
        link = f"{BASE_URL}/#/run/aa11?metric=attention_entropy&block=3&step=115&attempt=1"
        (attachment,) = json.loads(as_slack(message, receiver(Slack)).body)["attachments"]
        (alert,) = json.loads(as_alerts(message, receiver(Alertmanager)).body)
        assert attachment["blocks"][2]["text"]["text"] == f"<{link}|Open the page>"
        assert alert["generatorURL"] == link
        assert json.loads(as_discord(message, receiver(Discord)).body)["embeds"][0]["url"] == link
        assert json.loads(as_webhook(message, receiver(Webhook)).body)["url"] == link
        assert f"\n{link}\n" in as_mail(message, TestMail.whom).get_content()

    def test_is_there_for_each_incident_of_a_message_on_every_channel(self, make_incident):
        incidents = [make_incident(alert_id=str(n), run=f"<{n}>", run_id=f"r{n}") for n in range(MAX_SHOWN + 1)]
        message = about(*incidents)
        first, last = f"{BASE_URL}/#/run/r0?step=100&attempt=1", f"{BASE_URL}/#/"
        assert len(message.links) == MAX_SHOWN + 1
        (attachment,) = json.loads(as_slack(message, receiver(Slack)).body)["attachments"]
        links = attachment["blocks"][2]["text"]["text"].split("\n")
        rule = "attention-entropy-collapse"
        assert (links[0], links[-1]) == (f"<{first}|{rule} in pretrain/&lt;0&gt;>", f"<{last}|all runs>")
        (embed,) = json.loads(as_discord(message, receiver(Discord)).body)["embeds"]
        assert f"\n[{rule} in pretrain/\\<0\\>]({first})\n" in embed["description"]
        assert embed["description"].endswith(f"\n[all runs]({last})")
        mail = as_mail(message, TestMail.whom).get_content()
        assert f"\n{rule} in pretrain/<0>: {first}\n" in mail
        assert about(*incidents, base_url=None).links == []

    def test_is_left_out_of_slack_if_it_does_not_fit(self, make_incident):
        incidents = [make_incident(alert_id=str(n), run=f"run-{n}", run_id=f"r{n}") for n in range(MAX_SHOWN)]
        message = about(*incidents, base_url=f"{BASE_URL}/{'x' * 300}")
        (attachment,) = json.loads(as_slack(message, receiver(Slack)).body)["attachments"]
        *_, last = attachment["blocks"][2]["text"]["text"].split("\n")
        assert last.endswith("in pretrain/run-6>")


class TestAMessageOfAnEndWhoseBeginningWasNotTold:
    """The first, and the only one, about this alert."""

    @pytest.fixture
    def untold(self, make_alert):
        def untold(*changes, seconds=5):
            known = {"state": "resolved", "resolved_step": 150, "resolved_reason": "run ended"}
            known["updated_at"] = make_alert().opened_at + timedelta(seconds=seconds)
            alerts = [make_alert(**known | change) for change in changes or ({},)]
            return Message([Notice("resolved", alert, was_told=False) for alert in alerts], BASE_URL, NOW)

        return untold

    def test_tells_both_and_what_to_try(self, untold):
        message = untold()
        assert message.title == "attention-entropy-collapse fired in pretrain/gpt at step 120, and the run ended"
        assert message.text == (
            "pretrain/gpt, step 120: a head sees one token. Then the run ended.\n\n"
            "What to try: normalise queries (QK-norm)"
        )

    def test_is_as_bad_as_the_alert_in_the_words_of_all(self, untold):
        message = untold()
        found = json.loads(as_webhook(message, receiver(Webhook)).body)
        assert (found["state"], found["level"], found["severity"]) == ("resolved", "error", "critical")
        assert (found["step"], found["evidence"]) == (120, {"layers": [3, 4]})
        (attachment,) = json.loads(as_slack(message, receiver(Slack)).body)["attachments"]
        assert attachment["color"] == "#dc2626"
        assert attachment["blocks"][0]["text"]["text"].startswith("[critical] attention-entropy-collapse fired")
        (embed,) = json.loads(as_discord(message, receiver(Discord)).body)["embeds"]
        assert embed["color"] == 0xDC2626
        assert as_mail(message, TestMail.whom)["Subject"].startswith("[critical] attention-entropy-collapse fired")

    def test_fires_in_an_alertmanager_for_a_while(self, untold):
        (alert,) = json.loads(as_alerts(untold(), receiver(Alertmanager)).body)
        assert alert["endsAt"] == (NOW + timedelta(minutes=5)).isoformat()

    def test_is_calm_where_it_was_brief_and_passed_by_itself(self, untold):
        message = untold({"resolved_reason": "clear", "severity": "warning"})
        assert message.title == "attention-entropy-collapse fired in pretrain/gpt at step 120, and is over"
        assert message.lines == ["pretrain/gpt, step 120: a head sees one token. It was over at step 150."]
        found = json.loads(as_webhook(message, receiver(Webhook)).body)
        assert (found["level"], found["severity"]) == ("info", "warning")
        assert as_mail(message, TestMail.whom)["Subject"].startswith("[resolved]")

    def test_is_not_calm_where_it_lasted_or_is_critical(self, untold):
        assert untold({"resolved_reason": "clear", "severity": "warning"}, seconds=3600).is_alarming
        assert untold({"resolved_reason": "clear", "severity": "critical"}).is_alarming

    @pytest.mark.parametrize(
        ("reason", "end"),
        [("new attempt", "a new attempt began"), ("rule disabled", "its rule was disabled"),
         ("by hand", "a person resolved it")],
    )  # fmt: skip
    def test_tells_how_it_ended(self, untold, reason, end):
        message = untold({"resolved_reason": reason})
        assert message.title.endswith(f"at step 120, and {end}")
        assert message.is_alarming

    def test_names_rules_and_counts_runs(self, untold):
        message = untold({"rule": "a"}, {"rule": "b", "run": "x", "run_id": "x", "alert_id": "8"})
        assert message.title == "a and b fired in 2 runs of pretrain, and the runs ended"

    def test_comes_before_what_is_calm_and_beside_what_fires(self, untold, make_alert):
        (first,) = untold({"severity": "warning"}).notices
        fires = Notice("firing", make_alert(alert_id="9", severity="info", run="x"))
        told = Notice("resolved", make_alert(alert_id="3", run="y", state="resolved", resolved_step=1))
        message = Message([told, fires, first], BASE_URL, NOW)
        assert message.shown == [first, fires, told]
        assert message.severity == "warning"
        assert message.title == (
            "attention-entropy-collapse fires in pretrain/x at step 120; "
            "fired in pretrain/gpt at step 120, and the run ended; is over in pretrain/y at step 1"
        )


class TestAWebhook:
    def test_gets_what_other_tools_send_and_the_evidence(self, make_alert):
        request = as_webhook(about(make_alert()), receiver(Webhook))
        alert = {
            "incident_id": None, "blocks": None, "where": None, "left_step": None, "settles_step": None, "also_fired": None,
            "alert_id": "7", "state": "firing", "rule": "attention-entropy-collapse", "family": "entropy",
            "severity": "critical", "project": "pretrain", "run": "gpt", "run_id": "aa11", "step": 120,
            "summary": "a head sees one token", "evidence": {"layers": [3, 4]},
            "advice": {"text": "normalise queries", "source": "QK-norm"}, "url": f"{BASE_URL}/#/run/aa11?step=120&attempt=1",
        }  # fmt: skip
        assert json.loads(request.body) == alert | {
            "level": "error",
            "title": "attention-entropy-collapse fires in pretrain/gpt at step 120",
            "text": "pretrain/gpt, step 120: a head sees one token\n\nWhat to try: normalise queries (QK-norm)",
            "timestamp": "2026-01-31T12:30:00+00:00",
            "num_alerts": 1,
            "alerts": [alert],
        }
        assert request.headers == {"Content-Type": "application/json"}

    def test_gets_null_where_alerts_differ(self, many):
        found = json.loads(as_webhook(about(*many), receiver(Webhook)).body)
        assert (found["run"], found["step"], found["alert_id"], found["evidence"]) == (None, None, None, None)
        assert (found["rule"], found["project"], found["num_alerts"]) == ("attention-entropy-collapse", "pretrain", 13)
        assert len(found["alerts"]) == MAX_SHOWN

    def test_can_tell_by_the_signature_who_sent_it_and_when(self, make_alert):
        request = as_webhook(about(make_alert()), receiver(Webhook, secret="key", authorization="Bearer x"))
        time = str(int(NOW.timestamp()))
        expected = hmac.new(b"key", time.encode() + b"." + request.body, hashlib.sha256).hexdigest()
        assert request.headers["X-Tsemon-Timestamp"] == time
        assert request.headers["X-Tsemon-Signature"] == f"sha256={expected}"
        assert request.headers["Authorization"] == "Bearer x"

    def test_knows_what_is_old_or_altered_as_notifications_md_shows(self, make_alert, http):
        send(about(make_alert()), receiver(Webhook, url=http.url, secret="key", allow_private=True))
        ((_, headers, body),) = http.requests
        text = (Path(__file__).parents[3] / "docs/notifications.md").read_text()
        (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

        def is_ours(body=body, secret=b"key", at=NOW.timestamp(), **changed):
            got = headers | changed
            known = {"hmac": hmac, "hashlib": hashlib, "time": SimpleNamespace(time=lambda: at)}
            known |= {"secret": secret, "timestamp": got["X-Tsemon-Timestamp"].encode(), "body": body}
            exec(snippet, known | {"signature": got["X-Tsemon-Signature"]}, seen := {})
            return seen["is_ours"]

        seen = is_ours()
        assert seen
        later = NOW.timestamp() + 600
        assert not is_ours(at=later), "sent once more, ten minutes later"
        assert not is_ours(at=later, **{"X-Tsemon-Timestamp": str(int(later))}), "as if it were of then"
        assert not is_ours(body=body.replace(b"critical", b"warning!"))
        assert not is_ours(secret=b"other")

    def test_gets_no_evidence_that_is_too_large(self, make_alert):
        request = as_webhook(about(make_alert(evidence={"window": [0.5] * MAX_EVIDENCE_BYTES})), receiver(Webhook))
        assert json.loads(request.body)["evidence"] is None
        assert len(request.body) < 5000


class TestSlack:
    def test_gets_blocks(self, make_alert):
        (attachment,) = json.loads(as_slack(about(make_alert()), receiver(Slack)).body)["attachments"]
        header, section, link = attachment["blocks"]
        title = "[critical] attention-entropy-collapse fires in pretrain/gpt at step 120"
        assert header == {"type": "header", "text": {"type": "plain_text", "text": title}}
        assert section["text"]["text"].startswith("pretrain/gpt, step 120: a head sees one token")
        assert link["text"]["text"] == f"<{BASE_URL}/#/run/aa11?step=120&attempt=1|Open the page>"
        assert attachment["color"] == "#dc2626"

    def test_rings_for_nobody_because_of_a_name(self, make_alert):
        body = as_slack(about(make_alert(summary="<!channel> & <https://evil|here>")), receiver(Slack)).body.decode()
        assert "<!" not in body
        assert "&lt;!channel&gt; &amp; &lt;https" in body

    def test_gets_no_more_than_it_takes(self, make_alert):
        message = about(make_alert(run="r" * 128, rule="x" * 128, summary="s" * 10_000))
        (attachment,) = json.loads(as_slack(message, receiver(Slack)).body)["attachments"]
        assert [len(block["text"]["text"]) for block in attachment["blocks"][:2]] == [150, 3000]


class TestDiscord:
    def test_gets_an_embed(self, make_alert):
        body = json.loads(as_discord(about(make_alert()), receiver(Discord)).body)
        (embed,) = body["embeds"]
        assert embed["title"] == "[critical] attention-entropy-collapse fires in pretrain/gpt at step 120"
        assert embed["url"] == f"{BASE_URL}/#/run/aa11?step=120&attempt=1"
        assert body["allowed_mentions"] == {"parse": []}

    def test_reads_no_markup_in_what_others_wrote(self, make_alert):
        message = about(make_alert(summary="**bold** [x](http://evil) @everyone"))
        (embed,) = json.loads(as_discord(message, receiver(Discord)).body)["embeds"]
        assert r"\*\*bold\*\* \[x\](http://evil) \@everyone" in embed["description"]

    def test_gets_no_more_than_it_takes(self, make_alert):
        message = about(make_alert(run="r" * 128, rule="x" * 128, summary="s" * 10_000))
        (embed,) = json.loads(as_discord(message, receiver(Discord)).body)["embeds"]
        assert (len(embed["title"]), len(embed["description"])) == (256, 4096)


class TestMail:
    whom = Email.model_validate(
        {
            "name": "m",
            "type": "email",
            "host": "h",
            "from": "tsemon@example.org",
            "to": ["a@example.org", "b@example.org"],
        }
    )

    def test_is_plain_text(self, make_alert):
        mail = as_mail(about(make_alert()), self.whom)
        assert mail["Subject"] == "[critical] attention-entropy-collapse fires in pretrain/gpt at step 120"
        assert (mail["From"], mail["To"]) == ("tsemon@example.org", "a@example.org, b@example.org")
        assert mail.get_content() == (
            "attention-entropy-collapse fires in pretrain/gpt at step 120\n\n"
            "pretrain/gpt, step 120: a head sees one token\n\nWhat to try: normalise queries (QK-norm)\n\n"
            f"{BASE_URL}/#/run/aa11?step=120&attempt=1\n\nEvidence:\n  layers: [3, 4]\n"
        )

    def test_has_no_header_that_others_wrote(self, make_alert):
        mail = as_mail(about(make_alert(run="x\r\nBcc: evil@example.org\r\n\r\nhello")), self.whom)
        assert mail["Bcc"] is None
        assert "x Bcc: evil@example.org hello" in mail["Subject"]

    def test_is_one_thread_for_an_incident(self, make_alert):
        fires = about(make_alert(incident_id="4"))
        ends = about(make_alert(incident_id="4", rule="final-cause", state="resolved"), kind="resolved")
        other = about(make_alert(incident_id="5"))
        mails = [as_mail(message, self.whom) for message in (fires, ends, other)]
        threads = [(mail["In-Reply-To"], mail["References"]) for mail in mails]
        assert threads[0] == threads[1] != threads[2]
        assert len({mail["Message-ID"] for mail in mails}) == 3

    def test_of_several_incidents_of_a_run_is_in_the_thread_of_each(self, make_alert):
        both = about(make_alert(incident_id="10"), make_alert(incident_id="4", rule="other"))
        ids = [as_mail(about(make_alert(incident_id=name)), self.whom)["References"] for name in ("4", "10")]
        assert as_mail(both, self.whom)["References"].split() == ids

    def test_is_one_thread_for_a_rule_of_a_project(self, make_alert):
        fires, ends = about(make_alert()), about(make_alert(run="b", state="resolved"), kind="resolved")
        other = about(make_alert(rule="other"))
        threads = [as_mail(message, self.whom)["References"] for message in (fires, ends, other)]
        assert threads[0] == threads[1] != threads[2]


class TestAlertmanager:
    def alerts(self, message, **fields):
        request = as_alerts(message, receiver(Alertmanager, **fields))
        return request.url, json.loads(request.body)

    def test_gets_labels_that_stay_the_same_while_it_fires(self, make_alert):
        url, (alert,) = self.alerts(about(make_alert()), labels={"team": "ml"})
        assert url == "https://example.org/x/api/v2/alerts"
        assert alert["labels"] == {
            "alertname": "attention-entropy-collapse", "run_id": "aa11", "project": "pretrain", "run": "gpt",
            "family": "entropy", "severity": "critical", "team": "ml",
        }  # fmt: skip
        assert alert["annotations"] == {
            "summary": "a head sees one token", "step": "120", "evidence": '{"layers": [3, 4]}',
            "advice": "normalise queries", "source": "QK-norm",
        }  # fmt: skip
        assert alert["startsAt"] == "2026-01-31T12:00:00+00:00"
        assert alert["endsAt"] == (NOW + timedelta(minutes=5)).isoformat()
        assert alert["generatorURL"] == f"{BASE_URL}/#/run/aa11?step=120&attempt=1"

    def test_hears_when_it_was_over(self, make_alert):
        at = datetime(2026, 1, 31, 12, 20, tzinfo=UTC)
        _, (alert,) = self.alerts(about(make_alert(state="resolved", updated_at=at), kind="resolved"))
        assert (alert["startsAt"], alert["endsAt"]) == ("2026-01-31T12:00:00+00:00", at.isoformat())

    def test_gets_all_alerts(self, many):
        assert len(self.alerts(about(*many))[1]) == len(many)

    def test_takes_the_address_of_its_api_too(self, make_alert):
        url, _ = self.alerts(about(make_alert()), url="http://am:9093/api/v2/alerts/")
        assert url == "http://am:9093/api/v2/alerts"


class TestSend:
    def test_sends_to_each_kind(self, make_alert, http, mailbox):
        message = about(make_alert())
        for kind in (Webhook, Slack, Discord, Alertmanager):
            assert send(message, receiver(kind, url=http.url, allow_private=True)).told == "answered 200"
        assert len(http.requests) == 4
        where = {"host": "127.0.0.1", "port": mailbox.port, "security": "none", "allow_private": True}
        whom = {"name": "m", "type": "email", "from": "a@example.org", "to": "b@example.org"}
        assert send(message, Email.model_validate(whom | where)).told == "took the mail"
        assert mailbox.mails[0][2]["Subject"].startswith("[critical]")
