"""The rules on a service that watches a training: they read what it shows, and NaN gets through."""

import contextlib
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request

import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families

import tsemon
from scripts.stack_check import free_port, prometheus_configuration
from tests import zoo
from tests.server.notify.receivers import HttpReceiver, await_that
from tests.service import ServiceProcess

from .test_rules import ALERTS, CLIENTS, RECORDED, TESTS, needs_promtool


@pytest.fixture
def service(tmp_path):
    """A service of a training that goes on, and whose last loss was no number; somebody was told."""
    receiver = HttpReceiver()
    people = {"name": "people", "type": "webhook", "url": receiver.url, "allow_private": True}
    notify = {"receivers": [people], "routes": [{"receivers": "people", "group_wait": "0s"}]}
    (tmp_path / "notify.json").write_text(json.dumps(notify))
    torch.manual_seed(0)
    model, forward = zoo.gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"run": "gpt", "every": 1, "spool_dir": tmp_path / "spool"}
    with (
        contextlib.closing(receiver),
        ServiceProcess(tmp_path / "tsemon.db", "--notify", str(tmp_path / "notify.json")) as service,
        tsemon.attach(model, optimizer, server=service.url, **options) as monitor,
    ):
        for factor in (1.0, 1.0, float("nan")):
            loss = forward().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=loss * factor)
        shown = {"tsemon_alert_firing", "tsemon_notifications_total"}
        await_that(lambda: shown <= samples_of(service).keys(), "the service sees it, and tells somebody")
        yield service


def samples_of(service):
    """{name: the names of its labels}"""
    with urllib.request.urlopen(f"{service.url}/metrics") as reply:
        text = reply.read().decode()
    return {
        sample.name: {*sample.labels} for family in text_string_to_metric_families(text) for sample in family.samples
    }


class TestWhatTheRulesRead:
    def test_is_in_metrics(self, service):
        found = samples_of(service)
        written = " ".join(rule["expr"] for rule in RECORDED + ALERTS)
        read = {*re.findall(r"\btsemon_\w+", written)}
        assert len(read) > 10
        assert read <= found.keys()
        recorded = {rule["record"] for rule in RECORDED}
        assert {*re.findall(r"\btsemon:[a-z0-9_:]+", written)} <= recorded
        for name, labels in re.findall(r"'(tsemon_\w+)\{(.*?)\}'", "".join(path.read_text() for path in TESTS)):
            assert {*re.findall(r"(\w+)=", labels)} - {"instance"} <= found[name], name


@needs_promtool
class TestAPrometheus:
    @pytest.fixture
    def alerts(self, service, tmp_path):
        """What one that scrapes the service calls: {(alert, state)}"""
        ports = {"service": service.port, "prometheus": free_port(), "alertmanager": free_port()}
        (tmp_path / "token").write_text("there is none, and none is asked for")
        configuration = prometheus_configuration(ports, tmp_path / "token")
        configuration["rule_files"] = [f"{CLIENTS}/rules/*.yml"]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        where = ["--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        where += [f"--web.listen-address=127.0.0.1:{ports['prometheus']}"]
        with (tmp_path / "prometheus.log").open("wb") as log:
            process = subprocess.Popen([shutil.which("prometheus"), *where], cwd=tmp_path, stdout=log, stderr=log)

        def alerts():
            query = urllib.parse.urlencode({"query": "ALERTS"})
            url = f"http://127.0.0.1:{ports['prometheus']}/api/v1/query?{query}"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as reply:
                found = [sample["metric"] for sample in json.load(reply)["data"]["result"]]
                return {(alert["alertname"], alert["alertstate"], alert.get("run", "")) for alert in found}
            return set()

        yield alerts
        process.terminate()
        process.wait()

    def test_sees_a_loss_that_is_no_number_and_a_service_that_ends(self, service, alerts):
        both = {("TsemonNonFinite", "firing", "gpt"), ("TsemonAlertFiring", "firing", "gpt")}
        await_that(lambda: alerts() == both, "these two fire, and no other")
        service.kill()
        await_that(lambda: alerts() == {("TsemonDown", "pending", "")}, "it is down, and nothing is known of the run")
