"""`tsemon acknowledge` and `tsemon silence`, against a real service."""

import json
import re
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tests.clients.command_line import filled_service, in_this_process, open_alert, register
from tsemon.wire import API


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with filled_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def run(service, monkeypatch, capsys):
    return in_this_process(service, monkeypatch, capsys)


@pytest.fixture
def alert_id(service, run):
    """A firing alert of the run brief/brief, which is gone again for the other tests."""
    run_id = register(service.url, "brief", "brief")
    open_alert(service.database, run_id)
    (alert,) = json.loads(run("alerts", "--project", "brief", "--json").out)
    yield alert["alert_id"]
    httpx.delete(f"{service.url}{API}/runs/{run_id}").raise_for_status()


@pytest.fixture(autouse=True)
def no_silences(service):
    yield
    for silence in httpx.get(f"{service.url}{API}/silences").json()["silences"]:
        httpx.delete(f"{service.url}{API}/silences/{silence['silence_id']}").raise_for_status()


class TestAcknowledge:
    def test_says_by_whom_and_is_shown_with_the_note(self, run, alert_id):
        code, shown, _ = run("acknowledge", alert_id, "--note", "on it", "--by", "ann")
        assert (code, shown) == (0, f"alert {alert_id}, loss-spike in brief/brief: acknowledged by ann\n")
        assert "by ann: on it" in run("alerts", alert_id).out
        assert run("alerts", "--firing", "--project", "brief").code == 0
        assert "acknowledged by ann" in run("acknowledge", alert_id, "--by", "bob").out, "the first one stays"

    def test_takes_an_incident_with_all_of_its_firing_alerts(self, run, service, alert_id):
        (incident,) = json.loads(run("incidents", "--project", "brief", "--json").out)
        open_alert(service.database, incident["run_id"], "high-loss")
        shown = json.loads(run("acknowledge", "--incident", incident["incident_id"], "--json").out)
        assert {(one["rule"], one["state"]) for one in shown} == {
            ("loss-spike", "acknowledged"),
            ("high-loss", "acknowledged"),
        }
        assert run("incidents", "--open", "--project", "brief").code == 0

    @pytest.mark.parametrize(
        ("arguments", "what"),
        [
            ((), "expected ids of alerts or --incident, got neither"),
            (("1", "--incident", "1"), "expected ids of alerts or --incident, got both"),
            (("123456",), "no alert has the id '123456'"),
            (("--incident", "123456"), "no incident has the id '123456'"),
        ],
    )
    def test_refuses_what_it_cannot_find(self, run, arguments, what):
        code, shown, told = run("acknowledge", *arguments)
        assert (code, shown) == (2, "")
        assert what in told

    def test_says_what_it_did_before_it_was_refused(self, run, alert_id):
        code, shown, told = run("acknowledge", alert_id, "123456", "--by", "ann")
        assert (code, shown.count("acknowledged by ann")) == (2, 1)
        assert "no alert has the id '123456'" in told

    def test_refuses_an_incident_that_is_over(self, run, service, alert_id):
        httpx.post(f"{service.url}{API}/alerts/{alert_id}/resolve", json={"by": "ann"}).raise_for_status()
        (incident,) = json.loads(run("incidents", "--project", "brief", "--json").out)
        code, _, told = run("acknowledge", "--incident", incident["incident_id"])
        assert code == 2
        assert "expected an incident with firing alerts" in told


class TestSilence:
    def test_stops_messages_about_alerts_of_a_run_until_it_is_ended(self, run, alert_id):
        code, shown, _ = run("silence", "add", "--run", "brief", "--rule", "loss-spike", "--for", "8h", "--by", "ann")
        (silence_id,) = re.fullmatch(
            r"silence (\d+): rule loss-spike, run brief, project brief, until \d{4}-.+ UTC\n", shown
        ).groups()
        assert code == 0
        assert json.loads(run("alerts", alert_id, "--json").out)["silenced"]
        head, line = run("silence", "list").out.splitlines()
        assert head.split() == ["id", "silences", "until", "by", "reason"]
        assert line.split()[0] == silence_id
        assert run("silence", "end", silence_id) == (0, f"silence {silence_id} has ended\n", "")
        assert not json.loads(run("alerts", alert_id, "--json").out)["silenced"]
        assert run("silence", "list") == (0, "", "no silences\n")

    def test_lasts_as_long_as_asked(self, run):
        added = json.loads(run("silence", "add", "--family", "loss", "--for", "2 d", "--reason", "known", "--json").out)
        left = datetime.fromisoformat(added["until"]) - datetime.now(UTC)
        assert timedelta(days=2, minutes=-1) < left <= timedelta(days=2)
        assert (added["family"], added["run"], added["reason"]) == ("loss", None, "known")
        assert json.loads(run("silence", "list", "--json").out) == [added]
        assert json.loads(run("silence", "list", "--project", "brief", "--json").out) == []

    def test_takes_a_pattern_of_names(self, run, alert_id):
        shown = run("silence", "add", "--run", "br*", "--project", "brief", "--for", "30m").out
        assert "run br*, project brief, until " in shown
        assert json.loads(run("alerts", alert_id, "--json").out)["silenced"]

    @pytest.mark.parametrize(
        ("arguments", "what"),
        [
            (("--for", "8h"), "expected at least one of --run, --project, --rule and --family, got none"),
            (("--for", "soon", "--rule", "loss-spike"), "--for: expected a duration such as 30m, 8h or 2d, got 'soon'"),
            (("--for", "0h", "--rule", "loss-spike"), "--for: expected a duration such as 30m, 8h or 2d, got '0h'"),
            (
                ("--for", "999999w", "--rule", "loss-spike"),
                "--for: expected a duration such as 30m, 8h or 2d, got '999999w'",
            ),
            (("--for", "8h", "--rule", "loss-spikes"), "--rule: no rule is named 'loss-spikes'"),
            (("--for", "8h", "--run", "brieff"), "no run has the name or id 'brieff'"),
            (("--for", "8h", "--run", "demo/gpt", "--project", "vision"), "but 'demo/gpt' is a run of 'demo'"),
        ],
    )
    def test_refuses_what_would_silence_nothing_or_everything(self, run, arguments, what):
        code, shown, told = run("silence", "add", *arguments)
        assert (code, shown) == (2, "")
        assert what in told
        assert run("silence", "list").out == ""

    def test_that_does_not_exist_cannot_be_ended(self, run):
        code, _, told = run("silence", "end", "123456")
        assert code == 2
        assert "no silence has the id '123456'" in told
