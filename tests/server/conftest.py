from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.asking import Asker
from tsemon.wire import Array, Frame, frames_to_body
from tsemon_server.limits.values import Limits
from tsemon_server.main import Application
from tsemon_server.parts import make_parts
from tsemon_server.settings import MetricsSettings, Settings


class Clock:
    """A clock that tests set."""

    def __init__(self):
        self.now = 1e9

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


class Api:
    """A server on a real database, and the requests that tests make of it.

    The routes are those of every server of this process. Its parts are its own. It does no work by itself unless a test
    asks for housekeeping, so that tests see what they have done.
    """

    def __init__(self, database, rules=(), clock=None, housekeeping_pause_s=None, limits=None, **metrics):
        self.database = database
        metrics = MetricsSettings(**{"cache_s": 0.0} | metrics)
        settings = Settings(database=database.url, metrics=metrics, limits=limits or Limits())
        options = {"clock": clock, "housekeeping_pause_s": housekeeping_pause_s}
        parts = make_parts(
            settings, rules=rules, **{name: value for name, value in options.items() if value is not None}
        )
        self.parts = parts if housekeeping_pause_s is not None else replace(parts, at_work=())
        self.app = Application(self.parts, settings)
        self.http = Asker(self.app)
        self.parts.start()

    def close(self):
        self.parts.stop()

    def get(self, path, **params):
        reply = self.http.get(
            f"/api/v1{path}", params={key: value for key, value in params.items() if value is not None}
        )
        return reply.json() if reply.status_code == 200 else problem(reply)

    def register(self, run="gpt", num_blocks=2, **fields):
        body = {"project": "default", "run": run, "blocks": [f"h.{i}" for i in range(num_blocks)]} | fields
        reply = self.http.post("/api/v1/runs", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["run_id"]

    def send(self, run_id, frames, writer="w", attempt=1):
        return self.post_raw(run_id, frames_to_body(writer, attempt, [frame.to_json() for frame in frames]))

    def send_ok(self, run_id, frames, **where):
        reply = self.send(run_id, frames, **where)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def post_raw(self, run_id, body, **headers):
        return self.http.post(f"/api/v1/runs/{run_id}/frames", content=body, headers=headers)

    def open_alert(self, run_id, rule="high-loss", **values):
        """Let an alert fire, without a rule that finds a reason; its id."""
        seen = {"family": "loss", "severity": "warning", "summary": "loss is 20", "evidence": {}, "advice": {}}
        steps = {"state": "firing", "pending_step": 2, "firing_step": 4}
        with self.parts.store.write() as writer:
            writer.alerts.open(run_id, 1, rule, **seen | steps | values)
            return writer.alerts.find(limit=1)[0].alert_id

    def fall_silent(self, run_id):
        """Nothing was heard of its processes for a long time."""
        self.database.execute(f"UPDATE attempt SET heard_at = 0 WHERE run_id = '{run_id}'")

    def losses(self, run_id, **params):
        series = self.get(f"/runs/{run_id}/series", metric="loss", **params)
        return dict(zip(series["step"], series["mean"], strict=True))


def problem(reply):
    """(status, code, detail); fails unless the body is exactly that, and a 429 or 503 says when to come again."""
    body = json.loads(reply.content)
    assert set(body) == {"error", "detail"}, body
    if reply.status_code in (429, 503):
        assert int(reply.headers["Retry-After"]) >= 1
    return reply.status_code, body["error"], body["detail"]


def loss_frame(step, loss=1.0, seq=None):
    return Frame(step if seq is None else seq, step, 1000.0 + step, {"loss": loss})


def layer_frame(step, values, metric="token_similarity"):
    return Frame(step, step, 1000.0 + step, {}, {metric: Array.of(values)})


@pytest.fixture
def start(database):
    """Start a service; the same database again is a restart."""
    running = []

    def start(**options):
        while running:
            running.pop().close()
        running.append(Api(database, **options))
        return running[-1]

    yield start
    while running:
        running.pop().close()


@pytest.fixture
def api(start):
    return start()
