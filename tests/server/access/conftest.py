import pytest

from tests.asking import Asker
from tsemon.wire import Array, Frame, frames_to_body
from tsemon_answers.alerts import AlertsQuery
from tsemon_server.access.tokens import new_token
from tsemon_server.main import Application
from tsemon_server.parts import make_parts
from tsemon_server.settings import Settings


class Guarded:
    """A service that asks for tokens, and tokens for it."""

    def __init__(self, url, clock):
        settings = Settings(database=url, tokens=True)
        self.parts = make_parts(settings, rules=(), clock=clock)
        self.tokens = self.parts.store.tokens
        self.http = Asker(Application(self.parts, settings))

    def token(self, *scopes, project=None, expires_at=None):
        made = new_token()
        self.tokens.add(
            made.token_id, name="t", digest=made.digest, scopes=scopes, project=project, expires_at=expires_at
        )
        return made.text

    def ask(self, method, path, token=None, **options):
        headers = options.pop("headers", {}) | ({"Authorization": f"Bearer {token}"} if token else {})
        path = path if path.startswith(("/metrics", "/docs", "/healthz")) else f"/api/v1{path}"
        self.http.cookies.clear()
        return self.http.request(method, path, headers=headers, **options)

    def run(self, project, run="gpt"):
        """The id of a run that has one frame."""
        admin = self.token("admin")
        body = {"project": project, "run": run, "blocks": ["h.0"]}
        run_id = self.ask("POST", "/runs", admin, json=body).json()["run_id"]
        frame = Frame(0, 0, 1.0, {"loss": 1.0}, {"token_similarity": Array.of([0.1, 0.2])})
        sent = frames_to_body("w", 1, [frame.to_json()])
        assert self.ask("POST", f"/runs/{run_id}/frames", admin, content=sent).status_code == 200
        return run_id

    def alert(self, run_id):
        """The id of an alert of it that fires."""
        seen = {"family": "loss", "severity": "warning", "summary": "loss", "evidence": {}, "advice": {}}
        steps = {"state": "firing", "pending_step": 0, "firing_step": 0}
        with self.parts.store.write() as writer:
            writer.alerts.open(run_id, 1, "high-loss", **seen | steps)
            return writer.alerts.find(AlertsQuery(run_id=run_id), limit=1)[0].alert_id


class Clock:
    """The time that the service believes it is."""

    now = 1_700_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def guarded(database, clock):
    found = Guarded(database.url, clock)
    yield found
    found.parts.store.close()
