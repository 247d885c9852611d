"""The rules for Prometheus, by promtool: they are well-formed, their tests pass, and each of these tests can fail."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

CLIENTS = Path(__file__).parents[3] / "clients/prometheus"
RULES = CLIENTS / "rules/alerts.yml"
TESTS = CLIENTS / "tests/alerts.test.yml"
(GROUP,) = yaml.safe_load(RULES.read_text())["groups"]
ALERTS = {alert["alert"]: alert for alert in GROUP["rules"]}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Prometheus is not installed; scripts/system_parts.py does it where it can"
)
needs_amtool = pytest.mark.skipif(
    shutil.which("amtool") is None, reason="Alertmanager is not installed; scripts/system_parts.py does it where it can"
)


def example():
    """The rules with the commented example in use."""
    text = RULES.read_text()
    before, first, rest = text.partition("      # - alert: ")
    return before + re.sub(r"^      # ", "      ", first + rest, flags=re.MULTILINE)


def check(*command):
    """What it prints, where it finds no fault."""
    done = subprocess.run(command, cwd=CLIENTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
class TestTheFiles:
    def test_are_rules_that_promtool_takes_as_is_the_example(self, tmp_path):
        (tmp_path / "example.yml").write_text(example())
        printed = check("promtool", "check", "rules", "--lint=all", "--lint-fatal", RULES, tmp_path / "example.yml")
        assert re.findall(r"SUCCESS: (\d+) rules found", printed) == [str(len(ALERTS)), str(len(ALERTS) + 1)]

    def test_are_a_configuration_that_promtool_takes(self, tmp_path):
        shutil.copytree(CLIENTS / "rules", tmp_path / "rules")
        (tmp_path / "token").write_text("tsm_1_secret")
        text = (CLIENTS / "prometheus.yml").read_text()
        assert "/run/secrets/tsemon_metrics_token" in text
        (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/tsemon_metrics_token", "token"))
        printed = check("promtool", "check", "config", tmp_path / "prometheus.yml")
        assert f"SUCCESS: {len(ALERTS)} rules found" in printed

    def test_have_the_same_job_in_the_fragment(self):
        whole = yaml.safe_load((CLIENTS / "prometheus.yml").read_text())
        assert yaml.safe_load((CLIENTS / "tsemon.scrape.yml").read_text()) == {
            "scrape_configs": whole["scrape_configs"]
        }

    @needs_amtool
    def test_are_a_configuration_that_alertmanager_takes(self):
        check("amtool", "check-config", "alertmanager.yml")

    @needs_amtool
    @pytest.mark.parametrize(
        ("labels", "receiver"),
        [
            (["alertname=TsemonIncident", "family=tse", "severity=info"], "nobody"),
            (["alertname=TsemonIncident", "family=tse", "severity=critical"], "people"),
            (["alertname=TsemonDown", "severity=critical"], "people"),
        ],
    )
    def test_tell_people_of_all_but_information(self, labels, receiver):
        printed = check("amtool", "config", "routes", "test", "--config.file=alertmanager.yml", *labels)
        assert printed.strip() == receiver

    @needs_amtool
    @pytest.mark.parametrize(
        ("labels", "receiver"),
        [
            (["family=tse", "severity=critical"], "research"),
            (["family=tse", "severity=warning"], "people"),
            (["family=loss", "severity=critical"], "people"),
        ],
    )
    def test_route_by_family_with_the_additions_of_the_document(self, labels, receiver, tmp_path):
        document = (CLIENTS.parents[1] / "docs/prometheus.md").read_text()
        (block,) = re.findall(r"```yaml\n(route:.*?)```", document, re.DOTALL)
        more, whole = yaml.safe_load(block), yaml.safe_load((CLIENTS / "alertmanager.yml").read_text())
        whole["route"]["routes"] += more["route"]["routes"]
        own = [one for one in whole["receivers"] if one["name"] not in {two["name"] for two in more["receivers"]}]
        whole["receivers"] = own + more["receivers"]
        (tmp_path / "alertmanager.yml").write_text(yaml.safe_dump(whole))
        routes = ["amtool", "config", "routes", "test", f"--config.file={tmp_path}/alertmanager.yml"]
        assert check(*routes, *labels).strip() == receiver


class TestTheAlerts:
    @pytest.mark.parametrize("name", ["prometheus", "grafana"])
    def test_are_those_of_the_document(self, name):
        document = (CLIENTS.parents[1] / f"docs/{name}.md").read_text()
        assert re.findall(r"^\| `(Tsemon\w+)` \|", document, re.MULTILINE) == [*ALERTS]

    def test_read_nothing_that_a_run_measures(self):
        """What a model measures is judged by the server's rules alone."""
        read = {name for alert in ALERTS.values() for name in re.findall(r"\btsemon_\w+", alert["expr"])}
        assert read == {
            "tsemon_alert_firing",
            "tsemon_incident",
            "tsemon_run_info",
            "tsemon_run_last_seen_timestamp_seconds",
            "tsemon_exposition_left_out",
            "tsemon_notifications_total",
        }

    @pytest.mark.parametrize("alert", ALERTS.values(), ids=ALERTS)
    def test_tell_people_what_and_where(self, alert):
        assert {*alert["annotations"]} == {"summary", "description", "url"}
        if "run_id" in alert["expr"]:
            assert "$labels.run " in alert["annotations"]["summary"].replace("}", " ")
            assert "/#/run/{{ $labels.run_id }}" in alert["annotations"]["url"]
        is_relay = "tsemon_incident)" in alert["expr"]
        assert is_relay or {*alert["labels"]} == {"severity", "family"}


def changes():
    """{what: the alert, different in one thing}, for all that an alert says."""
    found = {}
    for name, alert in ALERTS.items():
        expr = alert["expr"]
        found[f"{name} never"] = alert | {"expr": f"({expr}) < -Inf"}
        if "for" in alert:
            found[f"{name} at once"] = alert | {"for": "0s"}
            found[f"{name} later"] = alert | {"for": "1h"}
        for bound in re.finditer(r"([<>]=?) (\d[\d.e-]*)", expr):
            for factor in (0.8, 1.25):
                value = float(bound[2]) * factor or (-1.0 if factor < 1 else 1.0)
                other = f"{bound[1]} {value:.6g}"
                found[f"{name} {bound[0]} at {bound.start()} as {other}"] = alert | {"expr": put(expr, bound, other)}
        # The job, outcomes and rules that it asks for.
        for text in re.finditer(r'(?<=["|])[a-z-]+(?=["|])', expr):
            found[f"{name} with other than {text[0]} at {text.start()}"] = alert | {"expr": put(expr, text, "other")}
        # The labels that it keeps, without which nobody can route it.
        for names in re.finditer(r"(?<=\()\w+(, \w+)+(?=\))", expr):
            labels = names[0].split(", ")
            for label in {*labels} - {"run_id"}:
                rest = ", ".join(kept for kept in labels if kept != label)
                found[f"{name} without {label} at {names.start()}"] = alert | {"expr": put(expr, names, rest)}
        for label in alert.get("labels", {}):
            found[f"{name} without {label}"] = alert | {"labels": {**alert["labels"], label: "other"}}
    return found


def put(expr, match, other):
    return expr[: match.start()] + other + expr[match.end() :]


OF_EXAMPLE = """
rule_files: [../rules/alerts.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    external_labels: {tsemon_url: "http://gpu1:8731"}
    input_series:
      - {series: 'tsemon_run_info{run_id="a1", project="vision", run="deep"}', values: '1+0x20'}
      - {series: 'tsemon_layers_token_diversity_last{run_id="a1"}', values: '0.1 0.0005+0x14 0.1'}
      - {series: 'tsemon_run_info{run_id="b2", project="vision", run="healthy"}', values: '1+0x20'}
      - {series: 'tsemon_layers_token_diversity_last{run_id="b2"}', values: '0.002+0x20'}
    alert_rule_test:
      - {eval_time: 10m, alertname: MyTokenDiversity, exp_alerts: []}
      - eval_time: 11m
        alertname: MyTokenDiversity
        exp_alerts:
          - exp_labels: {severity: warning, family: tse, run_id: a1, project: vision, run: deep}
            exp_annotations:
              summary: Token diversity is 0.0005 in vision/deep
              description: The threshold is ours, not a rule of the server.
              url: http://gpu1:8731/#/run/a1
      - {eval_time: 16m, alertname: MyTokenDiversity, exp_alerts: []}
"""


def among_each_other(alerts):
    """Rules and tests of all these alerts, each under a name of its own: to promtool a test costs far more than a rule."""
    names = {what: f"alert_{number}" for number, what in enumerate(alerts)}
    rules = [alert | {"alert": names[what]} for what, alert in alerts.items()]
    tests = yaml.safe_load(TESTS.read_text())
    for test in tests["tests"]:
        test["alert_rule_test"] = [
            asked | {"alertname": names[what]}
            for asked in test["alert_rule_test"]
            for what, alert in alerts.items()
            if alert["alert"] == asked["alertname"]
        ]
    return names, {"groups": [GROUP | {"rules": rules}]}, tests


@needs_promtool
class TestTheTestsOfRules:
    def test_pass_for_the_example_too(self, tmp_path):
        write(tmp_path, example(), OF_EXAMPLE)
        printed = check("promtool", "test", "rules", TESTS, tmp_path / "tests/alerts.test.yml")
        assert printed.count("SUCCESS") == 2

    @pytest.mark.parametrize("name", ALERTS)
    def test_are_about_every_alert(self, name):
        text = TESTS.read_text()
        about = rf"alertname: {name}\b"
        assert re.search(about + r", exp_alerts: \[\]", text), f"{name} is never over"
        assert re.search(about + r"\n\s+exp_alerts:(?! \[\])", text), f"{name} never fires"

    def test_fail_where_an_alert_is_another(self, tmp_path):
        names, rules, tests = among_each_other(ALERTS | changes())
        write(tmp_path, yaml.safe_dump(rules), yaml.safe_dump(tests))
        command = ["promtool", "test", "rules", tmp_path / "tests/alerts.test.yml"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        failed = {*re.findall(r"alertname: (\w+), time", done.stdout + done.stderr)}
        assert [what for what, name in names.items() if name not in failed] == [*ALERTS], "nothing notices the others"


def write(folder, rules, tests):
    for path, text in ((folder / "rules/alerts.yml", rules), (folder / "tests/alerts.test.yml", tests)):
        path.parent.mkdir()
        path.write_text(text)
