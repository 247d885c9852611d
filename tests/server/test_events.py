"""What those hear who listen."""

import asyncio
import json
import shutil
import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial

import httpx
import pytest

from tests.server.conftest import loss_frame
from tests.serving import serving
from tsemon.errors import StoreError
from tsemon.transport import Spool
from tsemon.wire import frames_to_body
from tsemon_server.access.tokens import new_token
from tsemon_server.events import Feed
from tsemon_server.limits.values import Limits
from tsemon_server.main import create_app
from tsemon_server.rules.documents import load
from tsemon_server.settings import Settings
from tsemon_server.store import Store

HIGH_LOSS = """
rules:
  - name: high-loss
    family: loss
    severity: warning
    title: The loss is high
    when: {value: [{scalar: loss}], above: 10}
    for: {samples: 1, steps: 0}
    advice: lower the learning rate
    source: the tests
    origin: convention
"""


class Service(httpx.Client):
    """What tests ask of a service, besides listening."""

    def register(self, run="gpt", **fields):
        reply = self.post("/runs", json={"run": run, "blocks": ["h.0"], **fields}).raise_for_status()
        return reply.json()["run_id"]

    def store(self, run_id, *frames):
        body = frames_to_body("w", 1, [frame.to_json() for frame in frames])
        self.post(f"/runs/{run_id}/frames", content=body).raise_for_status()


@contextmanager
def started(tmp_path, **settings):
    app = create_app(Settings(database=f"sqlite:///{tmp_path / 't.db'}", **settings), rules=load(HIGH_LOSS), beat_s=0.2)
    limits = settings.get("limits", Limits())
    with serving(app, limits) as url, Service(base_url=f"{url}/api/v1", timeout=20) as service:
        service.app = app
        yield service


@pytest.fixture
def service(tmp_path):
    with started(tmp_path) as service:
        yield service


class Listener:
    """Reads a stream of events on a thread."""

    def __init__(self, service, **query):
        self._heard, self._num_beats, self._news = [], 0, threading.Condition()
        self.is_over = threading.Event()
        self._stack = ExitStack()
        self._http = self._stack.enter_context(httpx.Client(base_url=service.base_url, timeout=20))
        self._http.headers.update(service.headers)
        self.response = self._stack.enter_context(self._http.stream("GET", "/events", params=query))
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        kind = None
        try:
            for line in self.response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    with self._news:
                        self._heard.append((kind, json.loads(value)))
                        self._news.notify_all()
                elif line == ": alive":
                    with self._news:
                        self._num_beats += 1
                        self._news.notify_all()
        except httpx.HTTPError:  # the service has ended, or we have
            pass
        self.is_over.set()

    def hear(self, kind, *is_it):
        """The next event of this kind that all of `is_it` hold for; what came before it is forgotten."""
        deadline = time.monotonic() + 15
        with self._news:
            while True:
                while self._heard:
                    found, data = self._heard.pop(0)
                    if found == kind and all(check(data) for check in is_it):
                        return data
                assert self._news.wait(deadline - time.monotonic()), f"no {kind} was heard"

    def hear_beats(self, number):
        """Wait for so many signs of life, counted from the beginning."""
        with self._news:
            assert self._news.wait_for(lambda: self._num_beats >= number, 15), f"{self._num_beats} beats were heard"

    def has_heard(self):
        with self._news:
            return list(self._heard)

    def close(self):
        self.response.close()
        self._thread.join()
        self._stack.close()


@pytest.fixture
def listen():
    """Listen, and wait until the service knows that one does."""
    with ExitStack() as stack:

        def listen(service, **query):
            listener = Listener(service, **query)
            stack.callback(listener.close)
            listener.hear("ready")
            return listener

        yield listen


class TestWhoListens:
    def test_hears_of_runs_and_frames_as_they_come(self, service, listen):
        listener = listen(service)
        run_id = service.register()
        assert listener.hear("run")["last_step"] is None
        service.store(run_id, loss_frame(7, 2.5))
        heard = listener.hear("run", lambda run: run["last_step"] == 7)
        assert heard == service.get("/runs").json()["runs"][0]

    def test_hears_of_alerts_and_what_is_done_about_them(self, service, listen):
        listener, run_id = listen(service), service.register()
        service.store(run_id, loss_frame(1, 20.0))
        assert listener.hear("run", lambda run: run["open_alerts"] == 1)["run_id"] == run_id
        alert = listener.hear("alert")
        assert (alert["rule"], alert["state"], alert["run_id"]) == ("high-loss", "firing", run_id)
        service.post(f"/alerts/{alert['alert_id']}/ack", json={"by": "on-call"}).raise_for_status()
        assert listener.hear("alert")["acknowledged_by"] == "on-call"

    def test_hears_of_no_other_run_than_those_it_asks_for(self, service, listen):
        wanted, other = service.register("a"), service.register("b")
        listener, of_all = listen(service, run=wanted), listen(service)
        service.store(other, loss_frame(1, 20.0))
        of_all.hear("alert")
        service.store(wanted, loss_frame(2))
        listener.hear("run", lambda run: run["last_step"] == 2)
        assert {data["run_id"] for _, data in listener.has_heard()} <= {wanted}

    def test_hears_that_a_run_it_asks_for_is_deleted_and_is_let_go(self, service, listen):
        run_id = service.register()
        listener = listen(service, run=run_id)
        service.delete(f"/runs/{run_id}").raise_for_status()
        assert listener.hear("deleted") == {"run_id": run_id}
        assert listener.is_over.wait(10)

    def test_hears_what_another_process_writes(self, service, listen, tmp_path):
        listener = listen(service)
        other = create_app(Settings(database=f"sqlite:///{tmp_path / 't.db'}"))
        with serving(other) as url, Service(base_url=f"{url}/api/v1") as beside:
            run_id = beside.register("from elsewhere")
        assert listener.hear("run")["run_id"] == run_id

    def test_hears_nothing_twice(self, service, listen):
        listener, run_id = listen(service), service.register()
        service.store(run_id, loss_frame(1))
        listener.hear("run", lambda run: run["last_step"] == 1)
        service.store(run_id, loss_frame(2))
        listener.hear("run", lambda run: run["last_step"] == 2)
        for name in ("second", "third"):  # each is found by a later look, which sees the first run's change once more
            other = service.register(name)
            assert listener.hear("run")["run_id"] == other

    def test_hears_a_sign_of_life_again_and_again_while_nothing_changes(self, service, listen):
        listen(service).hear_beats(3)

    def test_hears_of_the_kinds_it_asks_for(self, service, listen):
        of_alerts, of_all = listen(service, kind="alert"), listen(service, kind=["run", "alert"])
        run_id = service.register()
        service.store(run_id, loss_frame(1, 20.0))
        of_all.hear("run", lambda run: run["open_alerts"] == 1)
        of_all.hear("alert")
        of_alerts.hear("alert")
        service.store(run_id, loss_frame(2, 20.0))
        of_all.hear("run", lambda run: run["last_step"] == 2)
        assert "run" not in {kind for kind, _ in of_alerts.has_heard()}
        assert service.get("/events", params={"kind": "frame"}).status_code == 422

    def test_hears_of_a_spool_that_is_copied_here_long_after_it_was_written(self, tmp_path, listen):
        spool = Spool.create(
            tmp_path / "there", {"project": "p", "run": "gpt", "attempt_key": "k", "blocks": ["h.0"]}, "w"
        )
        spool.append(loss_frame(1).to_json())
        about = spool.folder / "run.json"
        about.write_text(json.dumps(json.loads(about.read_text()) | {"created_at": 1000.0}))
        copy_all = partial(shutil.copytree, tmp_path / "there", tmp_path / "here", dirs_exist_ok=True)
        copy_all()
        app = create_app(Settings(spool=str(tmp_path / "here")), rules=load(HIGH_LOSS), beat_s=0.2)
        with serving(app) as url, Service(base_url=f"{url}/api/v1", timeout=20) as service:
            listener = listen(service)
            assert listener.hear("run", lambda run: run["last_step"] == 1)["updated_at"].startswith("1970")
            spool.append(loss_frame(2, 20.0).to_json())
            copy_all()
            assert listener.hear("run", lambda run: run["last_step"] == 2)["updated_at"].startswith("1970")
            assert listener.hear("alert")["rule"] == "high-loss"
        spool.close()

    def test_asks_for_a_run_that_there_is(self, service):
        answer = service.get("/events", params={"run": "nobody"})
        assert (answer.status_code, answer.json()["error"]) == (404, "unknown_run")

    def test_is_let_go_after_as_long_as_it_wants(self, service):
        began = time.monotonic()
        answer = service.get("/events", params={"seconds": 1})
        assert 1 <= time.monotonic() - began < 10
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        assert answer.text.startswith("retry: 2000\nevent: ready\ndata: {}\n\n")

    def test_does_not_keep_the_service_from_stopping(self, tmp_path, listen):
        with started(tmp_path) as service:
            listener = listen(service)
            began = time.monotonic()
        assert time.monotonic() - began < 5  # it would wait ten seconds for an answer under way
        assert listener.is_over.wait(10)

    def test_is_refused_where_there_is_no_more_room(self, tmp_path, listen):
        with started(tmp_path, limits=Limits(listeners=1)) as service:
            first = listen(service)
            refused = service.get("/events")
            assert (refused.status_code, refused.json()["error"]) == (503, "busy")
            assert refused.headers["retry-after"]
            first.close()
            assert service.get("/events", params={"seconds": 0}).status_code == 200


class Outage:
    """A store that cannot be read while it `is_down`."""

    def __init__(self, store):
        self._store, self.is_down, self._num_reads = store, False, 0

    def read(self):
        self._num_reads += 1
        if self.is_down:
            raise StoreError("the database is locked")
        return self._store.read()

    async def is_read(self):
        """Once more, from the beginning."""
        num_reads = self._num_reads
        while self._num_reads < num_reads + 2:
            await asyncio.sleep(0.01)


class TestLooksThatFail:
    """Another process writes meanwhile, five seconds into an outage of so many."""

    @pytest.fixture
    def heard(self, tmp_path):
        async def heard(outage_s):
            now = 1000.0
            store = Store(f"sqlite:///{tmp_path / 't.db'}", lambda: now)
            seen = Outage(store)
            with Feed(seen, 10, lambda: now, look_every_s=0.01).listening(frozenset(), None) as listener:
                await seen.is_read()
                seen.is_down, now = True, 1005.0
                of_run = {"blocks": ["h.0"], "config": None, "tags": None, "resume_step": None, "attempt_key": None}
                with store.write() as writer:
                    writer.runs.register("p", "gpt", **of_run)
                now = 1000.0 + outage_s
                await seen.is_read()
                seen.is_down = False
                events = await listener.take(10)
            store.close()
            return [event.kind for event in events], listener.is_over

        return lambda outage_s: asyncio.run(heard(outage_s))

    def test_are_made_up_for(self, heard):
        assert heard(60) == (["run"], False)

    def test_for_long_let_all_come_again(self, heard):
        assert heard(600) == ([], True)


class TestWhoListensWithAToken:
    @pytest.fixture
    def service(self, tmp_path):
        with started(tmp_path, tokens=True) as service:
            yield service

    @pytest.fixture
    def token(self, service):
        """Use another token from now on; its id."""

        def token(*scopes, project=None):
            made = new_token()
            known = {"name": "t", "digest": made.digest, "scopes": scopes, "project": project, "expires_at": None}
            service.app.state.parts.store.tokens.add(made.token_id, **known)
            service.headers["Authorization"] = f"Bearer {made.text}"
            return made.token_id

        return token

    def test_of_one_project_hears_of_nothing_else(self, service, listen, token):
        token("read", project="ours")
        listener = listen(service)
        token("admin")
        of_all = listen(service)
        service.store(service.register("a", project="theirs"), loss_frame(1, 20.0))
        of_all.hear("alert")
        ours = service.register("b", project="ours")
        assert listener.hear("run")["run_id"] == ours

    def test_of_one_project_asks_for_no_run_of_another(self, service, token):
        token("admin")
        run_id = service.register(project="theirs")
        token("read", project="ours")
        assert service.get("/events", params={"run": run_id}).status_code == 404

    def test_needs_one_that_may_read(self, service, token):
        assert service.get("/events").status_code == 401
        token("ingest")
        assert service.get("/events").status_code == 403

    def test_is_sent_away_once_it_is_revoked(self, service, listen, token):
        token_id = token("read")
        listener = listen(service)
        service.app.state.parts.store.tokens.revoke(token_id)
        assert listener.is_over.wait(15)  # a token is believed for five seconds
