"""Alerts of a run with several attempts, and of rules with few keys."""

import json

import httpx
import pytest

from tests.clients.command_line import frame, in_this_process, register
from tests.serving import served_from
from tsemon.wire import API, frames_to_body


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A server with a minimal rule, and a run whose two processes ended while it fired in both."""
    with served_from(tmp_path_factory.mktemp("service") / "tsemon.db") as service:
        rules = 'rules: [{name: high, when: "loss > 5 for 2 samples"}]'
        httpx.put(f"{service.url}{API}/rules", content=rules).raise_for_status()
        run_id = register(service.url, "gpt")
        send(service, run_id, 1, range(0, 100, 10))
        register(service.url, "gpt", resume_step=100, on_conflict="take_over")
        send(service, run_id, 2, range(100, 130, 10))
        send(service, run_id, 1, range(100, 260, 10))
        for attempt in (1, 2):
            change = {"state": "finished", "attempt": attempt}
            httpx.patch(f"{service.url}{API}/runs/{run_id}", json=change).raise_for_status()
        yield service


def send(service, run_id, attempt, steps):
    body = frames_to_body(f"w{attempt}", attempt, [frame(step, loss=9.0).to_json() for step in steps])
    httpx.post(f"{service.url}{API}/runs/{run_id}/frames", content=body).raise_for_status()


@pytest.fixture
def run(service, monkeypatch, capsys):
    return in_this_process(service, monkeypatch, capsys)


class TestAlertsOfTwoAttempts:
    def test_say_of_which_attempt_they_are(self, run):
        code, shown, _ = run("alerts", "--rule", "high")
        head, *lines = shown.splitlines()
        assert code == 0
        assert head.split()[4:7] == ["run", "attempt", "step"]
        assert sorted(line[head.index("attempt") :].split()[0] for line in lines) == ["1", "2"]
        assert "demo/gpt  attempt 2  step" in run("alerts", "--rule", "high", columns=100)[1]

    def test_are_all_listed_if_they_fired_when_their_attempt_ended(self, run):
        code, shown, _ = run("alerts", "--at-end", "--rule", "high", "--json")
        assert (code, sorted(alert["attempt"] for alert in json.loads(shown))) == (3, [1, 2])

    def test_end_at_the_last_step_of_their_own_attempt(self, run):
        alerts = json.loads(run("alerts", "--rule", "high", "--json")[1])
        assert {alert["attempt"]: alert["resolved_step"] for alert in alerts} == {1: 250, 2: 120}


class TestARuleWithoutAFamily:
    def test_can_be_named(self, run):
        assert run("alerts", "--family", "custom", "--csv")[1].count(",custom,") == 2

    def test_leaves_unknown_names_a_hint(self, run):
        assert "no rule is named 'hihg'; did you mean 'high'?" in run("alerts", "--rule", "hihg")[2]
        assert "no family is named 'custm'; did you mean 'custom'?" in run("alerts", "--family", "custm")[2]
