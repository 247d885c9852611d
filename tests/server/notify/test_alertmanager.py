"""Alertmanager itself, with a receiver behind it: what fires gets there, and what is over."""

import contextlib
import json
import shutil
import subprocess
import urllib.request
from datetime import UTC, datetime, timedelta

import pytest

from tests.ports import free_port
from tests.server.notify.conftest import Alerts
from tests.server.notify.receivers import await_that
from tsemon_server.notify.channels import send
from tsemon_server.notify.messages import Message, Notice
from tsemon_server.notify.notifier import Notifier
from tsemon_server.store import Store

PROGRAM = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
CONFIGURATION = """
route: {receiver: hook, group_by: [alertname], group_wait: 10ms, group_interval: 100ms, repeat_interval: 1h}
receivers: [{name: hook, webhook_configs: [{url: "%s", send_resolved: true}]}]
"""


@pytest.fixture
def alertmanager(tmp_path, http):
    """The URL of one that tells `http`."""
    (tmp_path / "alertmanager.yml").write_text(CONFIGURATION % http.url)
    port = free_port()
    where = [f"--config.file={tmp_path}/alertmanager.yml", f"--storage.path={tmp_path}/data"]
    where += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, *where], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        await_that(lambda: process.poll() is not None or active(url) is not None, "it answers", 60)
        assert process.poll() is None, (tmp_path / "log").read_text()
        yield url
    finally:
        process.kill()
        process.wait()


def active(url):
    """The alerts it has, or None where it does not answer."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/api/v2/alerts", timeout=10) as reply:
        return json.load(reply)


def told(http):
    return [(alert["status"], alert["labels"]["run"]) for request in http.requests for alert in request.json["alerts"]]


def configured(configure, url, told_every="1m"):
    where = f"type: alertmanager, url: '{url}', allow_private: true, labels: {{team: ml}}, told_every: {told_every}"
    return configure(f"base_url: http://gpu1:8731\nreceivers: [{{name: am, {where}}}]")


@pytest.mark.skipif(
    PROGRAM is None, reason="Alertmanager is not installed; scripts/system_parts.py does it where it can"
)
class TestAnAlertmanager:
    def test_is_told_what_fires_and_what_is_over(self, alertmanager, configure, http, database, running):
        store = running.enter_context(contextlib.closing(Store(database.url)))
        notifier = Notifier(store, configured(configure, alertmanager, told_every="1s"), pause_s=0.01)
        notifier.start()
        running.callback(notifier.stop)
        alerts = Alerts(store)
        alerts.fire("größe", "b", rule="attention-entropy-collapse")
        await_that(lambda: {*told(http)} >= {("firing", "größe"), ("firing", "b")}, "both fire behind it")
        (alert,) = (alert for alert in active(alertmanager) if alert["labels"]["run"] == "größe")
        assert alert["labels"]["alertname"] == "attention-entropy-collapse"
        assert (alert["labels"]["team"], alert["annotations"]["step"]) == ("ml", "10")
        assert alert["generatorURL"].startswith("http://gpu1:8731/#/run/")
        alerts.resolve("größe", rule="attention-entropy-collapse")
        await_that(lambda: ("resolved", "größe") in told(http), "one is over behind it")
        assert [alert["labels"]["run"] for alert in active(alertmanager)] == ["b"]
        assert ("resolved", "b") not in told(http)

    def test_is_told_again_while_it_fires(self, alertmanager, configure, http, database, running):
        store = running.enter_context(contextlib.closing(Store(database.url)))
        notifier = Notifier(store, configured(configure, alertmanager, told_every="1s"), pause_s=0.01)
        notifier.start()
        running.callback(notifier.stop)
        alerts = Alerts(store)
        alerts.fire("a")
        ends = set()

        def hears():
            ends.update(alert["endsAt"] for alert in active(alertmanager))
            return len(ends) >= 3

        await_that(hears, "it lasts longer twice")
        alerts.resolve("a")
        await_that(lambda: told(http) == [("firing", "a"), ("resolved", "a")], "people hear of it once, and of its end")
        assert active(alertmanager) == []

    def test_takes_every_name_and_every_time(self, alertmanager, configure, make_alert):
        now = datetime.now(UTC)
        names = ['"}\n\\', "nul\0", "half \ud800 a letter", "größe 🙂 ‮", "x" * 5000]
        notices = [
            Notice("firing", make_alert(run=name, alert_id=str(place), run_id=f"r{place}", opened_at=now))
            for place, name in enumerate(names)
        ]
        tomorrow = now + timedelta(days=1)  # as it looks to whoever has set the clock back since
        notices.append(Notice("firing", make_alert(run="early", alert_id="98", run_id="r98", opened_at=tomorrow)))
        over = make_alert(run="late", alert_id="99", run_id="r99", opened_at=tomorrow, updated_at=now)
        notices.append(Notice("resolved", over))
        message = Message(notices, "http://gpu1:8731", now)
        send(message, configured(configure, alertmanager).receiver("am"))
        found = {alert["labels"]["run_id"]: alert["labels"]["run"] for alert in active(alertmanager)}
        assert found["r2"] == "half ? a letter"
        assert {found[f"r{place}"] for place in (0, 1, 3, 4)} == {names[0], names[1], names[3], names[4]}


class TestWhatFires:
    def test_is_told_again_before_it_is_forgotten(self, store, alerts, start, configure, http, clock):
        start(configured(configure, http.url))
        alerts.fire("a", "b")
        for number in (1, 2, 3):
            sent = [("sent", number)] * 2
            await_that(
                lambda sent=sent: [(n.status, n.attempts) for n in store.notices.log()] == sent, f"told {number} times"
            )
            clock.now += 61 if number < 3 else 0
        labels = [[alert["labels"] for alert in request.json] for request in http.requests]
        assert labels == [labels[0]] * 3
        ends = [request.json[0]["endsAt"] for request in http.requests]
        assert ends == sorted(set(ends)), "each time it lasts longer"
