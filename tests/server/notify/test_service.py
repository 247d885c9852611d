"""Notifications as a part of the service."""

import logging
import re
import threading

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import problem
from tests.server.notify.conftest import Alerts
from tests.server.notify.receivers import await_that, hang_up
from tsemon.errors import InvalidArgument, InvalidDocument
from tsemon_server.main import create_app
from tsemon_server.settings import Settings, settings_from_environment


def threads():
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("tsemon-notify"))


@pytest.fixture
def file(tmp_path, http):
    path = tmp_path / "notify.yaml"
    where = f"type: webhook, url: '{http.url}/secret', allow_private: true"
    path.write_text(f"group_wait: 0s\ngroup_interval: 0s\nrecovery_wait: 0s\nreceivers: [{{name: hook, {where}}}]")
    return path


@pytest.fixture
def client(database, file):
    app = create_app(Settings(database=database.url, notify=str(file)))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def alerts(client):
    return Alerts(client.app.state.parts.store)


def log(client, **params):
    reply = client.get("/api/v1/notifications", params=params)
    return reply.json()["notifications"] if reply.status_code == 200 else problem(reply)


def filled(route, ids):
    return re.sub(r"{(\w+)}", lambda found: ids.get(found[1], "1"), route)


class TestTheService:
    def test_tells_of_alerts_and_shows_what_it_told(self, client, alerts, http):
        alerts.fire("gpt")
        await_that(lambda: [entry["status"] for entry in log(client)] == ["sent"], "it was sent")
        (entry,) = log(client)
        told = ("kind", "receiver", "project", "run", "rule", "attempts", "error", "due_at")
        assert [entry[name] for name in told] == ["firing", "hook", "default", "gpt", "loss-spike", 1, None, None]
        assert entry["sent_at"] >= entry["created_at"]
        assert [alert["run"] for alert in http.requests[0].json["alerts"]] == ["gpt"]
        assert "secret" not in str(entry)

    def test_shows_no_secret_over_any_route_or_in_its_log(self, database, tmp_path, http, caplog):
        caplog.set_level(logging.DEBUG)
        (tmp_path / "key").write_text("hushed-key")
        where = (
            f"url: '{http.url}/hushed-path?token=hushed-token', secret: 'file:key', authorization: Bearer hushed-word"
        )
        path = tmp_path / "notify.yaml"
        path.write_text(f"group_wait: 0s\nreceivers: [{{name: hook, type: webhook, allow_private: true, {where}}}]")
        http.answers = [(302, {"Location": "http://127.0.0.1/hushed-other"}), hang_up]
        with TestClient(
            create_app(Settings(database=database.url, notify=str(path))), base_url="http://127.0.0.1"
        ) as client:
            alerts = Alerts(client.app.state.parts.store)
            alerts.fire("gpt")
            await_that(lambda: log(client, status="sent"), "it was sent, after all", timeout_s=60)
            ids = {"run_id": alerts.run_ids["default", "gpt"], "alert_id": "1", "name": "loss-spike"}
            query = {"run": ids["run_id"], "metric": "loss", "seconds": 0}  # events would go on
            shown = caplog.text + client.get("/openapi.json").text
            for route, methods in client.get("/openapi.json").json()["paths"].items():
                assert "notif" not in route or list(methods) == ["get"], "receivers come from the file alone"
                if "get" in methods:
                    shown += client.get(filled(route, ids), params=query).text
        assert len(http.requests) == 3
        assert "hook" in shown
        assert "hushed" not in shown
        assert "secret words" not in shown  # of the receiver

    def test_shows_its_log_page_by_page(self, client, alerts):
        for number in range(5):
            alerts.fire(f"gpt-{number}", rule=f"rule-{number}")
        await_that(lambda: len(log(client, status="sent")) == 5, "all were sent")
        seen, cursor = [], None
        while True:
            params = {"limit": 2} | ({} if cursor is None else {"cursor": cursor})
            page = client.get("/api/v1/notifications", params=params).json()
            seen += [entry["rule"] for entry in page["notifications"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert seen == [f"rule-{number}" for number in reversed(range(5))]
        assert log(client, receiver="other") == []
        assert log(client, status="waiting") == []
        assert log(client, cursor="x")[:2] == (422, "invalid_argument")

    def test_has_threads_for_it_only_where_it_is_asked_to(self, database, file):
        with TestClient(create_app(Settings(database=database.url, notify=str(file))), base_url="http://127.0.0.1"):
            assert threads() == ["tsemon-notify-hook", "tsemon-notify-plan"]
        assert threads() == []
        with TestClient(create_app(Settings(database=database.url)), base_url="http://127.0.0.1") as other:
            assert threads() == []
            assert log(other) == []


class TestTheSetting:
    def test_comes_from_the_environment(self):
        assert settings_from_environment({"TSEMON_NOTIFY": "notify.yaml"}).notify == "notify.yaml"
        assert settings_from_environment({}).notify is None

    def test_that_names_a_file_with_a_mistake_is_told_before_the_service_starts(self, tmp_path, file):
        file.write_text("receivers:\n  - {name: hook, type: nonsense}\n")
        settings = Settings(database=f"sqlite:///{tmp_path}/tsemon.db", notify=str(file))
        with pytest.raises(InvalidDocument, match=r"notify.yaml line 2: receivers\[0\]"):
            create_app(settings)

    def test_is_not_for_a_service_that_shows_a_folder(self, tmp_path, file):
        with pytest.raises(InvalidArgument, match="a spool folder is shown and nobody is told of it"):
            create_app(Settings(spool=str(tmp_path), notify=str(file)))
