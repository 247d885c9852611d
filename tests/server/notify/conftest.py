import contextlib
from datetime import UTC, datetime

import pytest

from tests.server.conftest import Api
from tests.server.notify.receivers import HttpReceiver, MailReceiver, make_certificate
from tsemon_answers.alerts import Alert
from tsemon_server.notify.configuration import load
from tsemon_server.notify.notifier import Notifier
from tsemon_server.store import Store


@pytest.fixture
def running():
    """Whatever is entered here ends with the test."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def listen(running):
    """Starts a receiver, an HTTP server unless another kind is given."""

    def listen(kind=HttpReceiver, **options):
        return running.enter_context(contextlib.closing(kind(**options)))

    return listen


@pytest.fixture
def http(listen):
    return listen()


@pytest.fixture
def mailbox(listen):
    return listen(MailReceiver)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """The file of a certificate for 127.0.0.1, and the server's side of TLS with it."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def configure(tmp_path):
    """The configuration in a text, with these environment variables."""

    def configure(text, **environment):
        path = tmp_path / "notify.yaml"
        path.write_text(text)
        return load(path, environment)

    return configure


@pytest.fixture
def make_alert():
    def make(**fields):
        at = datetime(2026, 1, 31, 12, tzinfo=UTC)
        known = {"alert_id": "7", "run_id": "aa11", "project": "pretrain", "run": "gpt", "attempt": 1}
        known |= {"rule": "attention-entropy-collapse", "family": "entropy", "severity": "critical", "state": "firing"}
        known |= {"pending_step": 100, "firing_step": 120, "resolved_step": None, "summary": "a head sees one token"}
        known |= {"rule_version": 1, "resolved_reason": None, "acknowledged_at": None, "acknowledged_by": None}
        known |= {"note": None, "silenced": False}
        known |= {"evidence": {"layers": [3, 4]}, "advice": {"text": "normalise queries", "source": "QK-norm"}}
        return Alert.model_validate(known | {"opened_at": at, "updated_at": at} | fields)

    return make


class Alerts:
    """Alerts as the rules open and end them, in a database."""

    def __init__(self, store):
        self.store = store
        self.run_ids = {}

    def add_runs(self, *runs):
        """Many, quickly: all that registering does besides takes a while."""
        with self.store.write() as writer:
            self.run_ids |= {("default", run): writer.runs._run_named("default", run) for run in runs}

    def fire(self, *runs, state="firing", step=10, **fields):
        with self.store.write() as writer:
            for run in runs:
                fired = step if state == "firing" else None
                self.open(writer, run, state=state, pending_step=step, firing_step=fired, **fields)

    def open(self, writer, run, *, project="default", rule="loss-spike", **fields):
        known = {"family": "loss", "severity": "warning", "summary": f"loss is 9.5 in {run}", "evidence": {}}
        known |= {"advice": {"text": "lower the learning rate"}}
        writer.alerts.open(self._run_id(writer, project, run), 1, rule, **known | fields)

    def resolve(self, *runs, rule="loss-spike", step=20, project="default"):
        with self.store.write() as writer:
            for run in runs:
                run_id = self.run_ids[project, run]
                assert writer.alerts.change(run_id, 1, rule, "firing", state="resolved", resolved_step=step) is not None

    def _run_id(self, writer, project, run):
        if (project, run) not in self.run_ids:
            given = {"blocks": [], "config": None, "tags": None, "resume_step": None, "attempt_key": None}
            self.run_ids[project, run] = writer.runs.register(project, run, **given).run_id
        return self.run_ids[project, run]


class Clock:
    now = 1_800_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(database, clock, running):
    return running.enter_context(contextlib.closing(Store(database.url, clock)))


@pytest.fixture
def alerts(store):
    return Alerts(store)


@pytest.fixture
def start(store, clock, running):
    """Starts a notifier that looks without a pause."""

    def start(configuration, **options):
        notifier = Notifier(store, configuration, clock, **{"pause_s": 0.005, "first_retry_s": 0.01} | options)
        notifier.start()
        running.callback(notifier.stop)
        return notifier

    return start


@pytest.fixture
def start_server(database):
    """Starts a server whose work in the background the test does itself."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(contextlib.closing(Api(database, **options)))
