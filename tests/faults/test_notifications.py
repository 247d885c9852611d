"""Services that are killed, and several of them, while there is something to tell."""

import contextlib

import pytest

from tests.server.notify.conftest import Alerts
from tests.server.notify.receivers import HttpReceiver, await_that, hang
from tsemon_server.store import Store

NUM_KILLS = 2


@pytest.fixture
def receiver():
    with contextlib.closing(HttpReceiver()) as receiver:
        yield receiver


@pytest.fixture
def notify(tmp_path, receiver):
    """The file that tells `receiver` of everything at once."""
    path = tmp_path / "notify.yaml"
    where = f"{{name: hook, type: webhook, url: '{receiver.url}', allow_private: true, max_per_minute: 600}}"
    path.write_text(f"group_wait: 0s\ngroup_interval: 0s\nreceivers: [{where}]\n")
    return str(path)


@pytest.fixture
def alerts(database):
    with contextlib.closing(Store(database.url)) as store:
        yield Alerts(store)


def told(receiver):
    return [alert["run"] for request in receiver.requests for alert in request.json["alerts"]]


class TestAServiceThatIsKilledBetweenFiringAndDelivery:
    def test_delivers_after_its_restart(self, serve, database, receiver, notify, alerts):
        service = serve(notify=notify)
        for number in range(NUM_KILLS):
            receiver.answers = [hang]
            before = len(receiver.requests)
            alerts.fire(f"run-{number}", rule=f"rule-{number}")
            await_that(lambda before=before: len(receiver.requests) > before, "it is on its way")
            service.kill()
            database.execute("DELETE FROM lease")  # which would run out by itself
            service.start()
            sent = [("sent", f"run-{number}")]
            await_that(
                lambda sent=sent: [(n.status, n.run) for n in alerts.store.notices.log(limit=1)] == sent, "it was sent"
            )
        assert told(receiver) == [f"run-{number}" for number in range(NUM_KILLS) for _ in range(2)]

    def test_tells_what_fired_while_nobody_served(self, serve, database, receiver, notify, alerts):
        service = serve(notify=notify)
        service.kill()
        database.execute("DELETE FROM lease")
        alerts.fire("a")
        service.start()
        await_that(lambda: told(receiver) == ["a"], "it was told")


class TestTwoServices:
    def test_tell_each_alert_once(self, serve, receiver, notify, alerts):
        serve(notify=notify)
        serve(notify=notify)
        for number in range(30):
            alerts.fire(f"run-{number:02}", rule=f"rule-{number}")
        log = alerts.store.notices.log
        await_that(lambda: len([n for n in log(limit=100) if n.status == "sent"]) == 30, "all were sent")
        assert sorted(told(receiver)) == [f"run-{number:02}" for number in range(30)]
