"""Who is told of which alerts, as a file says it."""

import re
from pathlib import Path

import pytest

from tsemon.errors import InvalidDocument
from tsemon_server.notify.configuration import (
    Alertmanager,
    Configuration,
    Discord,
    Email,
    Route,
    Slack,
    Webhook,
    load,
)
from tsemon_server.store.ledger.notices import Plan

TWO = """\
receivers:
  - {name: pager, type: webhook, url: "https://pager.example.org/x"}
  - {name: chat, type: slack, url: "https://hooks.slack.com/services/T0/B0/x"}
"""


def told(configuration, alert):
    return [plan.receiver for plan in configuration.plans(alert)]


class TestRoutes:
    def test_are_not_needed(self, configure, make_alert):
        assert told(configure(TWO), make_alert(severity="warning")) == ["pager", "chat"]

    def test_tell_of_what_is_no_trouble_only_where_they_ask_for_it(self, configure, make_alert):
        routes = "routes:\n  - {receivers: pager}\n  - {receivers: chat, severity: info}\n"
        told_of_info = [told(configure(TWO + text), make_alert(severity="info")) for text in ("", routes)]
        assert told_of_info == [[], ["chat"]]

    @pytest.mark.parametrize(
        ("route", "is_taken"),
        [("project: pretrain", True), ("project: other", False), ("project: [other, pre*]", True),
         ("run: 'gpt-?'", False), ("run: g*t", True), ("run: G*", False), ("family: entropy", True),
         ("family: tse", False), ("rule: attention-*", True), ("rule: '*'", True), ("severity: critical", True),
         ("severity: warning", True), ("project: pretrain\n    family: tse", False)],
    )  # fmt: skip
    def test_take_the_alerts_that_fit_all_they_say(self, configure, make_alert, route, is_taken):
        configuration = configure(f"{TWO}routes:\n  - receivers: pager\n    {route}\n")
        assert told(configuration, make_alert()) == (["pager"] if is_taken else [])

    def test_take_what_is_at_least_so_bad(self, configure, make_alert):
        configuration = configure(TWO + "routes:\n  - {receivers: pager, severity: warning}\n")
        assert [told(configuration, make_alert(severity=name)) for name in ("info", "warning", "critical")] == [
            [], ["pager"], ["pager"]
        ]  # fmt: skip

    def test_are_looked_at_until_one_takes_it(self, configure, make_alert):
        routes = "routes:\n  - {receivers: pager, severity: critical}\n  - {receivers: chat}\n"
        configuration = configure(TWO + routes)
        assert told(configuration, make_alert(severity="critical")) == ["pager"]
        assert told(configuration, make_alert(severity="warning")) == ["chat"]

    def test_that_are_null_are_none_at_all(self, configure, make_alert):
        assert told(configure(TWO + "routes: null\n"), make_alert()) == ["pager", "chat"]

    def test_go_on_where_they_say_so_and_tell_each_receiver_once(self, configure, make_alert):
        routes = "routes:\n  - {receivers: pager, continue: true}\n  - {receivers: [pager, chat]}\n"
        assert told(configure(TWO + routes), make_alert()) == ["pager", "chat"]


class TestAPlan:
    def test_groups_by_run(self, configure, make_alert):
        (plan, _) = configure(TWO).plans(make_alert())
        assert plan == Plan(
            "pager", "project=pretrain run=gpt", wait_s=10.0, interval_s=60.0, repeat_s=None, recovery_wait_s=300.0
        )

    def test_follows_its_route_and_else_the_file(self, configure, make_alert):
        text = TWO + "group_wait: 1m\nrepeat_interval: 4h\nroutes:\n"
        text += "  - {receivers: pager, group_by: run, group_interval: 0s, repeat_interval: 2d, continue: true}\n"
        text += "  - {receivers: chat, group_by: [], group_wait: 5}\n"
        assert configure(text).plans(make_alert()) == [
            Plan("pager", "run=gpt", 60.0, 0.0, 172_800.0, 300.0), Plan("chat", "", 5.0, 60.0, 14_400.0, 300.0)
        ]  # fmt: skip

    def test_for_an_alertmanager_is_at_once_and_again_within_two_minutes(self, configure, make_alert):
        text = "group_wait: 1h\nreceivers:\n  - {name: am, type: alertmanager, url: 'http://am:9093'}\n"
        assert configure(text).plans(make_alert()) == [Plan("am", "", 0.0, 0.0, 60.0)]
        other = configure(text.replace("9093'", "9093', told_every: 2s"))
        assert other.plans(make_alert()) == [Plan("am", "", 0.0, 0.0, 2.0)]


class TestASecret:
    TEXT = "receivers:\n  - {name: pager, type: webhook, url: 'env:PAGER', secret: 'file:key.txt'}\n"

    def test_comes_from_the_environment_or_a_file_beside_the_configuration(self, configure, tmp_path):
        (tmp_path / "key.txt").write_text("very-secret\n")
        (receiver,) = configure(self.TEXT, PAGER="https://pager.example.org/token").receivers
        assert receiver.url.get_secret_value() == "https://pager.example.org/token"
        assert receiver.secret.get_secret_value() == "very-secret"

    def test_is_not_shown(self, configure, tmp_path):
        (tmp_path / "key.txt").write_text("very-secret")
        configuration = configure(self.TEXT, PAGER="https://pager.example.org/token")
        assert "very-secret" not in repr(configuration) + str(configuration.model_dump())
        assert "token" not in repr(configuration) + str(configuration.model_dump())

    @pytest.mark.parametrize(
        ("url", "secret", "problem"),
        [(None, "x", r"line 2: receivers\[0\].url: expected the environment variable PAGER to be set"),
         ("http://x", None, r"line 2: receivers\[0\].secret: expected a text file at .*key.txt: No such file"),
         ("ftp://token@x", "x", r"line 2: receivers\[0\].url: expected a URL that starts with http"),
         ("https://user:token@x", "x", r"receivers\[0\].url: expected a URL .* without user or password"),
         ("https://:token@x", "x", r"receivers\[0\].url: expected a URL .* without user or password"),
         ("https://token@x", "x", r"receivers\[0\].url: expected a URL .* without user or password"),
         ("https://x:token", "x", r"receivers\[0\].url: expected a URL"),
         ("http://x", "token\nmore", r"receivers\[0\].secret: expected ASCII text on one line")],
    )  # fmt: skip
    def test_that_is_wrong_is_told_without_it(self, configure, tmp_path, url, secret, problem):
        if secret is not None:
            (tmp_path / "key.txt").write_text(secret)
        with pytest.raises(InvalidDocument, match=problem) as caught:
            configure(self.TEXT, **({} if url is None else {"PAGER": url}))
        assert "token" not in str(caught.value)
        assert caught.value.__cause__ is None


class TestNotificationsMd:
    text = (Path(__file__).parents[3] / "docs/notifications.md").read_text()

    def test_has_a_configuration_that_loads(self, configure, make_alert):
        (example,) = re.findall(r"```yaml\n(.*?)```", self.text, re.DOTALL)
        known = {"PAGER_URL": "https://pager.example.org/x", "SLACK_TOKEN": "xoxb-1"}
        configuration = configure(example, **known, PAGER_SECRET="x", SMTP_USER="x", SMTP_PASSWORD="x")
        assert told(configuration, make_alert()) == ["alertmanager", "pager", "chat"]
        assert told(configuration, make_alert(severity="warning", family="data")) == ["alertmanager", "team"]
        assert told(configuration, make_alert(severity="info")) == ["alertmanager"]

    @pytest.mark.parametrize("part", [Configuration, Route, Webhook, Slack, Discord, Email, Alertmanager])
    def test_names_each_setting(self, part):
        for name, field in part.model_fields.items():
            assert f"`{field.alias or name}`" in self.text or f"{field.alias}: true`" in self.text, name


class TestAnInvalidConfiguration:
    @pytest.mark.parametrize(
        ("text", "problem"),
        [("receivers: [", "line 1: column 13: expected YAML"),
         ("", "line 1: expected settings such as `receivers:`, got nothing"),
         ("- name: pager", "line 1: expected settings such as `receivers:`, got a list"),
         ("pager", "line 1: expected settings such as `receivers:`, got one word or number"),
         ("receivers: []", "line 1: receivers: expected at least one, there is none"),
         ("receivers: pager", "line 1: receivers: expected a list, got something else"),
         ("receivers: [pager]", r"line 1: receivers\[0\]: expected settings such as `name: value`, got something else"),
         (TWO + "routes: [pager]", r"line 4: routes\[0\]: expected settings such as `name: value`"),
         (TWO + "routes: []", "line 4: routes: expected a route, .* leave `routes` out to tell all receivers, or name one"),
         (TWO.replace("slack", "slap"),
          r"line 3: receivers\[1\]: expected as `type` one of 'webhook', 'slack', .*, got 'slap'"),
         (TWO.replace("type: slack, ", ""),
          r"line 3: receivers\[1\]: expected a `type`, one of 'webhook', 'slack', 'discord', 'email', 'alertmanager'"),
         (TWO.replace("chat", "pager"), r"line 3: receivers\[1\].name: expected a name of its own, 'pager' is taken"),
         (TWO.replace("url:", "uri:"), r"line 2: receivers\[0\].url: expected a value, there is none"),
         (TWO + "  - {name: x, type: slack, url: http://x, colour: red}",
          r"line 4: receivers\[2\].colour: no such setting; docs/notifications.md"),
         (TWO + "routes:\n  - receivers: pager\n    severity: bad\n", r"line 6: routes\[0\].severity: .*'critical'"),
         (TWO + "routes:\n  - receivers: [pager, nobody]\n",
          r"line 5: routes\[0\].receivers: expected one of the receivers chat, pager, got 'nobody'"),
         (TWO + "group_wait: soon\n", "line 4: group_wait: expected a span of time such as"),
         (TWO + "group_wait: -1\n", "line 4: group_wait: Input should be greater than or equal to 0"),
         (TWO + "repeat_interval: 1s\n", "line 4: repeat_interval: Input should be greater than or equal to 60"),
         (TWO + "group_by: [step]\n", r"line 4: group_by\[0\]: Input should be 'project', 'run'"),
         (TWO + "base_url: gpu1\n", "line 4: base_url: expected a URL that starts with http"),
         (TWO + "base_url: http://me:word@gpu1\n", "line 4: base_url: expected a URL .* without user or password"),
         ("receivers:\n  - {name: m, type: email, host: h, from: a, to: b@c}", r"line 2: receivers\[0\].from: expected"),
         ("receivers:\n  - {name: m, type: email, host: h, from: a@b, to: [b@c, 'x, y@z']}",
          r"line 2: receivers\[0\].to\[1\]: expected an address"),
         ("receivers:\n  - {name: m, type: email, host: h, from: a@b, to: b@c, user: x}", "expected a user and a password"),
         ("receivers:\n  - {name: m, type: email, host: h, from: a@b, to: b@c, user: x, password: y, security: none}",
          r"line 2: receivers\[0\].security: expected tls or starttls"),
         ("receivers:\n  - {name: am, type: alertmanager, url: http://am, labels: {bad-label: x}}",
          r"line 2: receivers\[0\].labels.bad-label"),
         (TWO.replace("slack, url:", "slack, token:"),
          r"line 3: receivers\[1\]: expected `url`, or `token` and `channel`, got token; give the URL of an"),
         (TWO.replace("slack, url:", "slack, channel: x, url:"), r"receivers\[1\]: expected .*, got url and channel; give"),
         ("receivers:\n  - {name: chat, type: slack}", r"line 2: receivers\[0\]: expected .*, got none of them; give the"),
         ("receivers:\n  - {name: chat, type: slack, token: x, channel: 'a b'}", r"receivers\[0\].channel: String should"),
         ("receivers:\n  - {name: 'a\\nb', type: slack, url: http://x}", r"line 2: receivers\[0\].name")],
    )  # fmt: skip
    def test_is_told_with_its_line_and_place(self, configure, text, problem):
        with pytest.raises(InvalidDocument, match=problem):
            configure(text)

    def test_is_told_where_there_is_no_file(self, tmp_path):
        with pytest.raises(
            InvalidDocument, match=r"expected a YAML file with receivers, .*none.yaml cannot be read: No"
        ):
            load(tmp_path / "none.yaml")
