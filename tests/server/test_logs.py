"""What the service writes on stderr: read as those read it who were given it, a line at a time."""

import io
import json
import logging
import os
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
from starlette.testclient import TestClient

from tests import processes
from tests.databases import SqliteFile
from tsemon.errors import InvalidArgument
from tsemon.wire import frames_to_body
from tsemon_server.access.tokens import new_token
from tsemon_server.logs import LogFormat, set_up_logs, without_secrets
from tsemon_server.main import create_app
from tsemon_server.rules.documents import load
from tsemon_server.settings import Settings, settings_from_environment
from tsemon_server.store.ledger.retention import Retention

from .conftest import loss_frame, problem

HIGH_LOSS = load("""
rules:
  - name: high-loss
    family: loss
    severity: warning
    title: The loss is high
    when: {value: [{scalar: loss}], above: 10}
    clear: {value: [{scalar: loss}], below: 5}
    for: {samples: 1}
    advice: lower the learning rate
    source: the tests
    origin: convention
""")
FORGED = 'gpt\n{"level":"error","message":"forged"}\r\u2028\x1b[2J'


@pytest.fixture
def database(tmp_path):
    """What is told here does not depend on the engine."""
    return SqliteFile(tmp_path / "tsemon.db")


@pytest.fixture
def untouched():
    """The logging of this process, as it was before."""
    names = ("", "tsemon", "tsemon_server")
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    handlers = logging.getLogger().handlers[:]
    yield
    logging.getLogger().handlers[:] = handlers
    for logger, level in before:
        logger.setLevel(level)


class Log:
    def __init__(self, format: LogFormat = "json", level="info"):
        self._stream = io.StringIO()
        set_up_logs(format, level, self._stream)

    @property
    def text(self):
        return self._stream.getvalue()

    @property
    def lines(self):
        """One object a line, whatever else stands in them."""
        assert self.text == "" or self.text.endswith("\n")
        return [json.loads(line) for line in self.text.split("\n")[:-1]]

    def of(self, message):
        return [line for line in self.lines if line["message"] == message]

    def clear(self):
        self._stream.seek(0)
        self._stream.truncate()


@pytest.fixture
def log(untouched, api):
    """What the service of `api` writes, from when it has started."""
    return Log()


def say(text, **fields):
    logging.getLogger("tsemon_server.test").warning("%s", text, extra={"fields": fields})


def fail(text):
    try:
        raise RuntimeError(text)
    except RuntimeError:
        logging.getLogger("tsemon_server.test").exception("it failed")


class TestARequest:
    def test_is_one_line(self, api, log):
        api.http.get("/api/v1/runs?limit=3")
        (line,) = log.lines
        assert line.pop("duration_ms") > 0
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
        assert re.fullmatch(r"[0-9a-f]{16}", line.pop("request_id"))
        assert line == {
            "level": "info",
            "message": "request",
            "logger": "tsemon_server.request_log",
            "method": "GET",
            "path": "/api/v1/runs",
            "status": 200,
            "client": "testclient",
        }

    def test_is_told_too_where_it_is_refused_before_anything_else_is_done(self, api, log):
        api.http.get("/api/v1/runs", headers={"Host": "evil.example"})
        api.http.get("/nope")
        assert [(line["path"], line["status"]) for line in log.lines] == [("/api/v1/runs", 400), ("/nope", 404)]

    def test_that_goes_well_again_and_again_is_told_at_the_level_debug_only(self, api, log, monkeypatch):
        monkeypatch.setattr(
            "tsemon_server.request_log.SLOW_S", 60
        )  # what is slow is told, and so is this machine at times
        run_id = api.register()
        log.clear()

        def ask():
            api.send_ok(run_id, [loss_frame(0)])
            api.http.post(f"/api/v1/runs/{run_id}/heartbeat", json={"writer": "w", "attempt": 1, "step": 1})
            for path in ("/healthz", "/readyz", "/metrics"):
                assert api.http.get(path).status_code == 200

        ask()
        assert log.lines == []
        log = Log(level="debug")
        ask()
        assert [line["path"].rpartition("/")[2] for line in log.of("request")] == [
            "frames",
            "heartbeat",
            "healthz",
            "readyz",
            "metrics",
        ]

    def test_of_frames_that_are_refused_is_told(self, api, log):
        run_id = api.register()
        log.clear()
        api.post_raw(run_id, b"{")
        (line,) = log.lines
        assert (line["level"], line["status"], line["path"]) == ("info", 422, f"/api/v1/runs/{run_id}/frames")

    def test_has_its_path_cut(self, api, log):
        api.http.get("/" + 10_000 * "a")
        assert len(log.lines[0]["path"]) == 256


class TestTheIdOfARequest:
    @pytest.mark.parametrize("given", ["a", "0b9f6f1e-7f3f-4a53-9b3c-5f1d6c2f9a10", "trace_1.2-3", 64 * "x"])
    def test_is_the_one_that_was_given(self, api, log, given):
        reply = api.http.get("/api/v1/runs", headers={"X-Request-ID": given})
        assert reply.headers["x-request-id"] == log.lines[0]["request_id"] == given

    @pytest.mark.parametrize(
        "given", ["", 65 * "x", "tsm_0123456789abcdef_" + 43 * "A", "a b", 'a"b', "-a", "a\x85b", "ä"]
    )
    def test_is_a_new_one_where_that_is_no_id(self, api, log, given):
        reply = api.http.get("/api/v1/runs", headers={"X-Request-ID": given.encode("latin-1")})
        assert re.fullmatch(r"[0-9a-f]{16}", reply.headers["x-request-id"])
        assert reply.headers.get_list("x-request-id") == [log.lines[0]["request_id"]]

    def test_is_on_every_answer(self, api):
        run_id = api.register()
        replies = [
            api.http.get("/nope"),
            api.http.get("/api/v1/runs", headers={"Host": "evil.example"}),
            api.http.get("/"),
            api.http.get(f"/api/v1/runs/{run_id}/export"),
            api.send(run_id, [loss_frame(0)]),
        ]
        assert len({reply.headers["x-request-id"] for reply in replies}) == len(replies)

    def test_is_on_what_the_request_did_to_the_run(self, api, log):
        body = {"run": "gpt", "project": "p", "resume_step": 7}
        reply = api.http.post("/api/v1/runs", json=body, headers={"X-Request-ID": "mine"})
        done, request = log.lines
        assert done["message"] == "run registered"
        assert done["request_id"] == request["request_id"] == "mine"
        assert (done["run_id"], done["attempt"]) == (reply.json()["run_id"], 1)
        assert (done["project"], done["run"], done["resume_step"]) == ("p", "gpt", 7)

    def test_is_on_the_alert_that_its_frames_opened_and_on_no_other(self, start, untouched):
        api = start(rules=HIGH_LOSS)
        log = Log()
        run_ids = [api.register(f"run{number}") for number in range(8)]
        together = threading.Barrier(len(run_ids))

        def send(run_id):
            together.wait()  # so that several of them share a transaction
            body = frames_to_body("w", 1, [loss_frame(0, 99.0).to_json()])
            assert api.post_raw(run_id, body, **{"X-Request-ID": f"of-{run_id}"}).status_code == 200

        with ThreadPoolExecutor(len(run_ids)) as pool:
            list(pool.map(send, run_ids))
        opened = log.of("alert firing")
        assert sorted(line["run_id"] for line in opened) == sorted(run_ids)
        assert all(line["request_id"] == f"of-{line['run_id']}" for line in opened)

    def test_is_in_the_answer_and_beside_the_traceback_of_what_nobody_expected(self, api, log):
        @api.app.get("/breaks")
        def breaks():
            raise ZeroDivisionError("the reason")

        reply = api.http.get("/breaks", headers={"X-Request-ID": "mine"})
        assert problem(reply)[:2] == (500, "internal_error")
        assert problem(reply)[2].endswith("its log tells how, at the request mine")
        assert reply.headers["x-request-id"] == "mine"
        assert reply.headers["x-content-type-options"] == "nosniff"
        error, request = log.lines
        assert error["request_id"] == request["request_id"] == "mine"
        assert (error["level"], error["message"]) == ("error", "unexpected ZeroDivisionError")
        assert error["traceback"].startswith("Traceback")
        assert error["traceback"].endswith("ZeroDivisionError: the reason")
        assert (request["level"], request["status"]) == ("warning", 500)


class TestRunsAndAlerts:
    def test_are_told_from_beginning_to_end(self, start, untouched):
        api = start(rules=HIGH_LOSS)
        log = Log()
        run_id = api.register()
        for step, loss in enumerate([99.0, 1.0, 99.0]):
            api.send_ok(run_id, [loss_frame(step, loss)])
        alert_id = api.get("/alerts")["alerts"][0]["alert_id"]
        api.http.post(f"/api/v1/alerts/{alert_id}/ack", json={"by": "on-call"})
        api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "failed"})
        api.http.delete(f"/api/v1/runs/{run_id}")
        told = [line for line in log.lines if line["message"] != "request"]
        assert [line["message"] for line in told] == [
            "run registered",
            "alert firing",
            "alert resolved",
            "alert firing",
            "alert acknowledged",
            "run changed",
            "alert resolved",
            "run deleted",
        ]
        assert {line["run_id"] for line in told} == {run_id}
        first, over, ended = told[1], told[2], told[6]
        assert (first["rule"], first["severity"], first["firing_step"], first["project"], first["run"]) == (
            "high-loss",
            "warning",
            0,
            "default",
            "gpt",
        )
        assert (over["resolved_step"], over["resolved_reason"]) == (1, "clear")
        assert (ended["resolved_reason"], ended["acknowledged_by"]) == ("run ended", "on-call")
        assert told[5]["state"] == "failed"

    def test_are_told_when_their_time_is_over(self, start, untouched):
        now = [1000.0]
        api = start(clock=lambda: now[0])
        run_id, log = api.register(), Log()
        api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "completed"})
        with api.app.state.parts.store.write() as writer:
            writer.retention.keep(Retention("default", runs_s=3600.0))
        now[0] += 3600.0
        api.app.state.parts.store.expire()
        assert log.of("run expired") == []
        now[0] += 1.0
        api.app.state.parts.store.expire()
        (line,) = log.of("run expired")
        assert (line["run_id"], line["project"]) == (run_id, "default")

    def test_are_not_told_of_where_nothing_was_stored(self, api, log):
        run_id = api.register()
        writing = api.app.state.parts.store.write()
        writing.__enter__().runs.delete(run_id)
        with suppress(RuntimeError):
            writing.__exit__(RuntimeError, RuntimeError(), None)
        assert api.get(f"/runs/{run_id}")["run_id"] == run_id
        assert log.of("run deleted") == []


@pytest.mark.parametrize("format", ["json", "text"])
class TestALine:
    def test_ends_where_it_ends_whatever_stands_in_it(self, format, api, untouched):
        log = Log(format)
        say(FORGED, name=FORGED, surrogate="\ud800", nul="\0")
        fail(FORGED)
        api.http.get("/%0A%7B%22level%22:%22error%22%7D%0D%E2%80%A8", headers={"X-Request-ID": "a"})
        begun = [line for line in re.split("[\n\r\x85\u2028\u2029]", log.text) if not line.startswith("    ")]
        assert len(begun) == 4  # with the empty one at the end
        assert begun.pop() == ""
        assert log.text.isascii()
        assert "\x1b" not in log.text
        if format == "json":
            assert [line["level"] for line in log.lines] == ["warning", "error", "info"]
            assert log.lines[0]["name"] == log.lines[0]["message"] == FORGED

    @pytest.mark.parametrize(
        "secret",
        [
            "Authorization: Bearer s3cret-s3cret",
            "authorization': 'Basic s3cret0123=='",
            "tsm_ab12_s3cret",
            "postgresql://tsemon:s3cret@db/tsemon",
            "postgresql://tsemon:s3c@s3cret@db/tsemon?sslmode=require",
            "host=db password=s3cret dbname=tsemon",
            "postgresql://db/tsemon?password=s3cret&x=1",
            "{'password': 's3cret'}",
            "https://hooks.slack.com/services/T0/B0/s3cret",
            "http://user:s3cret@10.0.0.1:80/hook",
            "https://example.org?token=s3cret",
        ],
    )
    def test_holds_no_secret(self, format, untouched, secret):
        log = Log(format)
        say(secret, detail=f"before {secret}")
        fail(secret)
        assert "s3cret" not in log.text
        assert "***" in log.text

    def test_keeps_what_is_none(self, format, untouched):
        text = "the database sqlite:///runs.db cannot be used at http://127.0.0.1:8731, basic facts: a=b, tsm, 3:4"
        assert without_secrets(text) == text


class TestSecretsOfRequests:
    def test_are_in_no_line(self, start, untouched):
        api = start()
        log = Log(level="debug")
        secret = "s3cret-s3cret"
        headers = {"Authorization": f"Bearer tsm_ab_{secret}", "Cookie": f"session={secret}", "X-Request-ID": "a b"}
        for path in (f"/api/v1/runs?token={secret}", "/healthz", f"/nope?{secret}", f"/api/v1/runs/tsm_ab_{secret}"):
            api.http.get(path, headers=headers)
        api.http.post(f"/api/v1/runs?key={secret}", json={"run": 3}, headers=headers)
        assert len(log.of("request")) == 5
        assert "s3cret" not in log.text


class TestAToken:
    def test_is_named_by_its_id(self, untouched, database):
        app = create_app(Settings(database=database.url, tokens=True))
        token = new_token()
        app.state.parts.store.tokens.add(
            token.token_id, name="me", digest=token.digest, scopes=("admin",), project=None, expires_at=None
        )
        with TestClient(app, base_url="http://127.0.0.1") as http:
            log = Log()
            http.get("/api/v1/runs", headers={"Authorization": f"Bearer {token.text}"})
            http.get("/api/v1/runs", headers={"Authorization": f"Bearer {token.text}x"})
        assert [(line["status"], line.get("token_id")) for line in log.lines] == [(200, token.token_id), (401, None)]
        assert token.text.removeprefix(f"tsm_{token.token_id}_") not in log.text


class TestTextForPeople:
    def test_has_time_level_message_and_what_is_known(self, api, untouched):
        log = Log("text")
        api.http.get("/api/v1/runs", headers={"X-Request-ID": "mine"})
        assert re.fullmatch(
            r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d info    request request_id=mine method=GET path=/api/v1/runs status=200 "
            r"duration_ms=[\d.]+ client=testclient\n",
            log.text,
        )

    def test_quotes_what_would_look_like_another_field(self, untouched):
        log = Log("text")
        say("x", run="a status=200", other='"')
        assert log.text.rstrip("\n").endswith(r'warning x run="a status=200" other="\""')

    def test_indents_a_traceback(self, untouched):
        log = Log("text")
        fail("why")
        first, *rest = log.text.splitlines()
        assert first.endswith("error   it failed")
        assert rest[0] == "    Traceback (most recent call last):"
        assert rest[-1] == "    RuntimeError: why"


class TestSettings:
    def test_come_from_the_environment(self):
        found = settings_from_environment({"TSEMON_LOG_FORMAT": "text", "TSEMON_LOG_LEVEL": "debug"})
        assert found == Settings(log_format="text", log_level="debug")

    @pytest.mark.parametrize("name", ["TSEMON_LOG_FORMAT", "TSEMON_LOG_LEVEL"])
    def test_refuse_a_word_that_is_none(self, name):
        with pytest.raises(InvalidArgument, match=rf"{name} must be one of .*, got 'loud'"):
            settings_from_environment({name: "loud"})


class TestTheProcess:
    def start(self, tmp_path, stderr, *options):
        arguments = ["serve", "--port", "0", "--database", f"sqlite:///{tmp_path}/tsemon.db", *options]
        with processes.start_tsemon(*arguments, stdout=subprocess.PIPE, stderr=stderr) as process:
            try:
                url = process.stdout.readline().split()[2]
                asked = httpx.get(f"{url}/api/v1/runs?project=secret", headers={"X-Request-ID": "mine"}, timeout=60)
                asked.raise_for_status()
            finally:
                process.terminate()

    @pytest.mark.parametrize("options", [[], ["--workers", "2"]])
    def test_writes_json_where_nobody_looks(self, tmp_path, options):
        with (tmp_path / "log").open("w") as stderr:
            self.start(tmp_path, stderr, *options)
        (line,) = map(json.loads, (tmp_path / "log").read_text().splitlines())
        assert (line["message"], line["request_id"], line["client"]) == ("request", "mine", "127.0.0.1")

    def test_writes_text_on_a_terminal(self, tmp_path):
        ours, theirs = os.openpty()
        with open(ours) as terminal, open(theirs, "w") as stderr:
            self.start(tmp_path, stderr)
            assert " info    request request_id=mine method=GET " in terminal.readline()

    def test_says_nothing_where_it_is_told_so(self, tmp_path):
        with (tmp_path / "log").open("w") as stderr:
            self.start(tmp_path, stderr, "--log-level", "warning")
        assert (tmp_path / "log").read_text() == ""

    def test_refuses_a_level_that_is_none(self, tmp_path):
        done = processes.run(processes.start_tsemon, "serve", "--log-level", "loud", folder=tmp_path)
        assert done.returncode == 2
        assert "--log-level must be one of debug, info, warning, error, got 'loud'" in done.stderr
