"""The rules for Prometheus, by promtool: they are well-formed, their tests pass, and each of these tests can fail."""

import copy
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

CLIENTS = Path(__file__).parents[3] / "clients/prometheus"
RULES = {path.name: yaml.safe_load(path.read_text()) for path in sorted((CLIENTS / "rules").glob("*.yml"))}
ALERTS = [rule for group in RULES["alerts.yml"]["groups"] for rule in group["rules"]]
RECORDED = [rule for group in RULES["recording.yml"]["groups"] for rule in group["rules"]]
TESTS = sorted((CLIENTS / "tests").glob("*.test.yml"))

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Prometheus is not installed; scripts/system_parts.py does it where it can"
)
needs_amtool = pytest.mark.skipif(
    shutil.which("amtool") is None, reason="Alertmanager is not installed; scripts/system_parts.py does it where it can"
)


def check(*command):
    """What it prints, where it finds no fault."""
    done = subprocess.run(command, cwd=CLIENTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
class TestTheFiles:
    def test_are_rules_that_promtool_takes(self):
        check("promtool", "check", "rules", "--lint=all", "--lint-fatal", *(f"rules/{name}" for name in RULES))

    def test_are_a_configuration_that_promtool_takes(self, tmp_path):
        shutil.copytree(CLIENTS / "rules", tmp_path / "rules")
        (tmp_path / "token").write_text("tsm_1_secret")
        text = (CLIENTS / "prometheus.yml").read_text()
        assert "/run/secrets/tsemon_metrics_token" in text
        (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/tsemon_metrics_token", "token"))
        printed = check("promtool", "check", "config", tmp_path / "prometheus.yml")
        assert f"SUCCESS: {len(ALERTS)} rules found" in printed
        assert f"SUCCESS: {len(RECORDED)} rules found" in printed

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
            (["alertname=TsemonAlertFiring", "severity=info"], "nobody"),
            (["alertname=TsemonAlertFiring", "severity=warning"], "people"),
            (["alertname=TsemonDown", "severity=critical"], "people"),
        ],
    )
    def test_tell_people_of_all_but_information(self, labels, receiver):
        printed = check("amtool", "config", "routes", "test", "--config.file=alertmanager.yml", *labels)
        assert printed.strip() == receiver


class TestEachAlert:
    @pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
    def test_tells_people_what_and_where(self, alert):
        assert {*alert["annotations"]} == {"summary", "description", "url"}
        if "run_id" in alert["expr"]:
            assert "$labels.run " in alert["annotations"]["summary"].replace("}", " ")
            assert "/#/run/{{ $labels.run_id }}" in alert["annotations"]["url"]
        is_relay = "tsemon_alert_firing" in alert["expr"]
        assert is_relay or {*alert["labels"]} == {"severity", "family"}


def changes():
    """(what, rules that differ in one thing), for all that an alert says."""
    for place, alert in enumerate(ALERTS):
        yield f"{alert['alert']} never", changed(place, expr=f"({alert['expr']}) < -Inf")
        if "for" in alert:
            yield f"{alert['alert']} at once", changed(place, **{"for": "0s"})
            yield f"{alert['alert']} later", changed(place, **{"for": "1h"})
        for found in re.finditer(r"([<>]=?) (\d[\d.e-]*)", alert["expr"]):
            for factor in (0.8, 1.25):
                value = float(found[2]) * factor or (-1.0 if factor < 1 else 1.0)
                bound = f"{found[1]} {value:.6g}"
                expr = alert["expr"][: found.start()] + bound + alert["expr"][found.end() :]
                yield f"{alert['alert']} {found[0]} as {bound}", changed(place, expr=expr)
        for label in alert.get("labels", {}):
            yield f"{alert['alert']} without {label}", changed(place, labels={**alert["labels"], label: "other"})


def changed(place, **values):
    rules = copy.deepcopy(RULES["alerts.yml"])
    assert len(rules["groups"]) == 1
    rules["groups"][0]["rules"][place] |= values
    return {**RULES, "alerts.yml": rules}


@needs_promtool
class TestTheTestsOfRules:
    def test_pass(self):
        check("promtool", "test", "rules", *TESTS)

    def test_are_about_every_alert(self):
        text = "".join(path.read_text() for path in TESTS)
        for alert in ALERTS:
            about = rf"alertname: {alert['alert']}\b"
            assert re.search(about + r", exp_alerts: \[\]", text), f"{alert['alert']} is never over"
            assert re.search(about + r"\n\s+exp_alerts:(?! \[\])", text), f"{alert['alert']} never fires"

    @pytest.mark.parametrize(("what", "rules"), [*changes()], ids=lambda value: value if isinstance(value, str) else "")
    def test_fail_where_an_alert_is_another(self, what, rules, tmp_path):
        shutil.copytree(CLIENTS / "tests", tmp_path / "tests")
        (tmp_path / "rules").mkdir()
        for name, content in rules.items():
            (tmp_path / "rules" / name).write_text(yaml.safe_dump(content))
        alert = what.partition(" ")[0]
        tests = [tmp_path / "tests" / path.name for path in TESTS if alert in path.read_text()]
        command = ["promtool", "test", "rules", *tests]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode != 0, f"nothing notices that {what}"
        assert "alertname" in done.stdout + done.stderr, "it fails for what it found, not for what it could not read"
