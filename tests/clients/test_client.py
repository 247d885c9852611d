import asyncio
import http.server
import inspect
import re
import threading
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import httpx
import numpy
import pandas
import pyarrow.parquet as pq
import pytest

from tests.faults.proxy import Cut, Proxy
from tests.server.notify.receivers import make_certificate
from tests.serving import serving
from tsemon.errors import (
    Busy,
    Forbidden,
    InvalidArgument,
    InvalidRange,
    InvalidRules,
    ServerUnreachable,
    Unauthorized,
    UnknownAlert,
    UnknownAttempt,
    UnknownLayer,
    UnknownMetric,
    UnknownRule,
    UnknownRun,
    WrongAlertState,
)
from tsemon.wire import Array, Frame
from tsemon_client import AlertChanged, AsyncClient, Client, Connected, Record, RunChanged, RunDeleted
from tsemon_client.answers import Patience
from tsemon_client.asking import Request
from tsemon_server.access.tokens import new_token
from tsemon_server.limits.values import Limits
from tsemon_server.main import create_app
from tsemon_server.settings import Settings
from tsemon_server.store import Store

LOSS_RULE = """
rules:
  - name: very-high-loss
    family: loss
    severity: critical
    title: The loss is very high
    when: {value: [{scalar: loss}], above: 100}
    for: {samples: 2, steps: 0}
    advice: lower the learning rate
    source: the tests
    origin: convention
"""


@contextmanager
def listening(answers, tls=None):
    """The address of something else than a service, which answers so."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def high_losses(num_frames):
    return [Frame(i, i, 1.0 + i, {"loss": 300.0}) for i in range(num_frames)]


class TestClient:
    def test_finds_a_run_by_name(self, client, run_id):
        run = client.find_run("r", project="p")
        assert (run.run_id, run.num_frames, run.last_step, run.tags) == (run_id, 4, 30, ["a", "b/c"])
        assert (run.config, run.metrics.layers, run.latest.scalars) == (
            {"lr": 0.1},
            {"token_similarity": 3},
            {"loss": 2.0},
        )
        assert run == client.run(run_id)

    def test_reads_series_and_heat_maps(self, client, run_id):
        assert client.series(run_id, "loss", from_step=10, to_step=20).mean == [4.0, 3.0]
        assert client.series(run_id, "token_similarity", layer=-1).layer == 2
        heatmap = client.heatmap(run_id, "token_similarity")
        assert (heatmap.step, heatmap.layers, len(heatmap.values)) == ([0, 10, 20, 30], 3, 4)

    def test_compares_runs(self, client, run_id):
        (run,) = client.compare([run_id], "loss", points=3).runs
        assert (run.run_id, run.mean) == (run_id, [4.5, 2.5])

    def test_lists_more_runs_than_a_page_holds(self, client, writer, monkeypatch):
        monkeypatch.setattr("tsemon_client.asking.PAGE", 3)
        for i in range(7):
            writer.register(f"{i}", project="many")
        assert [run.run for run in client.runs(project="many", order="name")] == list("0123456")
        assert [run.run for run in client.runs(project="many", order="-name", limit=4)] == list("6543")
        assert [run.run for run in client.runs(project="many", order="name", limit=3).all()] == list("012")
        assert [*client.runs(project="nobody's")] == []
        found = client.runs(project="many", order="name")
        assert (found.total(), [run.run for run in found], found.total()) == (7, list("0123456"), 7)
        assert client.runs(project="nobody's").total() == 0
        assert client.alerts(project="many").total() is None

    def test_compares_runs_along_time(self, client, run_id):
        (run,) = client.compare([run_id], "loss", along="time").runs
        assert (run.step, run.x) == ([0, 10, 20, 30], [0.0, 1.0, 2.0, 3.0])

    def test_reads_the_frame_nearest_to_a_step(self, client, run_id):
        frame = client.frame(run_id, 11)
        assert (frame.attempt, frame.step, frame.scalars) == (1, 10, {"loss": 4.0})
        assert frame.layers["token_similarity"] == pytest.approx([0.1, 0.2, 0.3], rel=1e-6)
        assert client.frame(run_id).step == 30

    def test_finds_runs_by_their_words(self, client, run_id):
        for words in ({"q": "B/C"}, {"tags": ["a", "b/c"]}, {"tags": ["a"], "condition": "running"}):
            assert [run.run_id for run in client.runs(**words)] == [run_id]
        for words in ({"q": "b/d"}, {"tags": ["a", "c"]}, {"tags": ["a"], "condition": "stuck"}):
            assert client.runs(**words).all() == []
        assert {(tag.tag, tag.runs) for tag in client.tags(project="p")} == {("a", 1), ("b/c", 1)}

    def test_glances_at_runs(self, client, run_id, writer):
        other_id = writer.register("glanced-at")
        writer.send(other_id, Frame(0, 0, 1.0, {}, {"token_diversity": Array.of([0.5, 0.4, 0.3])}))
        glance, other = client.glances([run_id, other_id], points=10)
        writer.delete(other_id)
        assert (glance.run_id, glance.loss.mean, glance.worst) == (run_id, [5.0, 4.0, 3.0, 2.0], None)
        assert (other.worst.metric, other.worst.layer) == ("token_diversity", 2)
        assert client.glances([]) == []

    def test_reads_rules_and_how_they_stand(self, client, run_id):
        (first, *_) = client.rules()
        (newest, *_) = client.rule(first.name)
        assert newest == first
        standing = client.standing(run_id)
        assert standing.step == 30
        assert {rule.rule for rule in standing.rules} <= {rule.name for rule in client.rules()}

    def test_reads_the_rules_of_a_project(self, client, writer):
        writer.put_rules(LOSS_RULE.replace("very-high-loss", "of-a-project"), project="of-rules")
        own = [rule for rule in client.rules("of-rules") if rule.project == "of-rules"]
        assert [rule.name for rule in own] == ["of-a-project"]
        assert client.rule("of-a-project", project="of-rules")[0] == own[0]
        assert "of-a-project" not in {rule.name for rule in client.rules()}

    def test_checks_a_rule(self, client):
        (mistake,) = client.check_rule({"name": "mine", "when": "lss > 3"}).mistakes
        assert (mistake.field, mistake.column, mistake.length, mistake.nearest) == ("when", 1, 3, "loss")
        assert client.check_rule({"name": "mine", "when": "loss > 3"}).explained.watches == ["loss"]

    def test_tries_rules(self, client, run_id):
        tried = client.test_rules(run_id, LOSS_RULE.replace("100", "2.5"))
        assert ([alert.firing_step for alert in tried.alerts], tried.num_frames) == ([10], 4)
        assert client.test_rules(run_id).alerts == []

    def test_raises_what_the_service_says(self, client, run_id):
        for error, text, ask in (
            (UnknownRun, "no run has the id 'x'", lambda: client.run("x")),
            (UnknownRun, r"no run has the id 'x\?y#z'", lambda: client.run("x?y#z")),
            (UnknownRun, "no run 'x' in project 'default'", lambda: client.find_run("x")),
            (UnknownMetric, "did you mean 'loss'", lambda: client.series(run_id, "los")),
            (UnknownLayer, "'loss' is one number per step", lambda: client.series(run_id, "loss", layer=-1)),
            (UnknownLayer, "layers 0 to 2, got 3", lambda: client.series(run_id, "token_similarity", layer=3)),
            (UnknownLayer, "has 3 layers, -1 is the last", lambda: client.series(run_id, "token_similarity", layer=-4)),
            (UnknownAttempt, "no attempt 2", lambda: client.heatmap(run_id, "token_similarity", attempt=2)),
            (InvalidRange, "swap them", lambda: client.heatmap(run_id, "token_similarity", from_step=2, to_step=1)),
            (InvalidArgument, "points", lambda: client.series(run_id, "loss", points=0)),
            (InvalidArgument, "got ''", lambda: client.run("")),
            (InvalidArgument, "without a slash", lambda: client.run(f"{run_id}/rules")),
            (InvalidArgument, "got '..'", lambda: client.rule("..")),
            (InvalidArgument, "URL too long", lambda: client.run("x" * 70_000)),
            (InvalidArgument, "greater than or equal to 1, got 0", lambda: client.runs(limit=0)),
            (InvalidArgument, "time zone", lambda: next(client.alerts(since=datetime(2026, 1, 31)))),
            (InvalidRules, "rules", lambda: client.test_rules(run_id, "rules: 1")),
            (UnknownRule, "'x'", lambda: client.rule("x")),
            (UnknownAlert, "'x'", lambda: client.alert("x")),
        ):
            with pytest.raises(error, match=text):
                ask()

    def test_asks_nothing_where_an_argument_cannot_be_meant(self, client, run_id):
        run = client.run(run_id)
        for text, ask in (
            ("name: expected a valid string, got None", lambda: client.find_run(None)),
            ("run_id: expected a valid string, got RunDetail.*; pass its run_id", lambda: client.series(run, "loss")),
            ("run_id: expected Unicode text", lambda: client.run("\ud800")),
            ("alert_id: expected a valid string, got 1", lambda: client.alert(1)),
            ("run_ids: expected a list of texts, got", lambda: client.compare(run_id, "loss")),
            ("run_ids: expected a list of texts, got", lambda: client.glances(run_id)),
            ("run_ids: expected a list of texts, got None", lambda: client.compare(None, "loss")),
            ("run_ids: expected at least 1 item, got an empty list", lambda: client.compare([], "loss")),
            ("run_ids: expected at most 20 items, got 21", lambda: client.compare([run_id] * 21, "loss")),
            ("run_ids: expected at most 100 items, got 101", lambda: client.glances([run_id] * 101)),
            ("run_ids: expected a valid string, got RunDetail", lambda: client.events(run)),
            ("tags: expected a list of texts, got 'a'", lambda: client.runs(tags="a")),
            ("layer: expected a valid integer, got 'x'", lambda: client.series(run_id, "token_similarity", layer="x")),
            ("layer: expected a valid integer, got True", lambda: client.series(run_id, "loss", layer=True)),
            ("limit: expected a valid integer, got '5'", lambda: client.runs(limit="5")),
            ("order: expected 'live', .* got 'frog'", lambda: client.runs(order="frog")),
            ("query' too long", lambda: next(client.runs(run="x" * 100_000))),
        ):
            with pytest.raises(InvalidArgument, match=text):
                ask()
        with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
            client.runs(foo=1)

    def test_takes_numbers_and_lists_of_numpy_and_pandas(self, client, run_id):
        ids = pandas.Series([run_id])
        assert client.compare(ids, "loss", from_step=numpy.int64(10)).runs[0].step == [10, 20, 30]
        assert client.series(run_id, "token_similarity", layer=numpy.int64(1)).layer == 1
        assert client.series(numpy.array(run_id), "token_similarity", layer=numpy.array(1)).layer == 1

    def test_finds_alerts_of_several_states(self, client, run_id):
        assert client.alerts(run_id=run_id, state=["firing", "pending"]).all() == []

    def test_tells_that_it_is_closed(self, connect, service):
        with connect(service.url) as client:
            found = client.runs()
            client.close()
            for ask in (lambda: client.run("x"), lambda: next(client.events()), lambda: next(found)):
                with pytest.raises(InvalidArgument, match="the client is closed"):
                    ask()

    def test_tells_that_it_belongs_to_another_event_loop(self, service, run_id):
        client = AsyncClient(service.url)
        with asyncio.Runner() as own:
            assert own.run(client.run(run_id)).run_id == run_id
            with asyncio.Runner() as other, pytest.raises(InvalidArgument, match=r"inside of each asyncio\.run"):
                other.run(client.run(run_id))
            own.run(client.close())

    def test_tells_that_nobody_answers(self, connect):
        with (
            connect("http://127.0.0.1:9", retries=0) as client,
            pytest.raises(ServerUnreachable, match=r"no answer from http://127.0.0.1:9: .* is `tsemon serve` running"),
        ):
            client.run("x")

    @pytest.mark.parametrize(("status", "ask"), [(200, "run"), (200, "events"), (301, "run"), (404, "run")])
    def test_tells_that_the_server_is_something_else(self, connect, status, ask):
        class Other(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.send_header("Location", "https://elsewhere/")
                self.end_headers()
                self.wfile.write(b"<p>hello</p>")

        text = rf"answered {status} and points to https://elsewhere/.* is it a tsemon service"
        with listening(Other) as url, connect(url) as client, pytest.raises(ServerUnreachable, match=text):
            next(client.events()) if ask == "events" else client.run("x")

    def test_tells_that_an_answer_cannot_be_read(self, connect):
        class Garbled(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Encoding", "gzip")
                self.end_headers()
                self.wfile.write(b"hello")

        with listening(Garbled) as url, connect(url, retries=1) as client:
            for ask in (lambda: client.run("x"), lambda: client.export("x", "never.csv")):
                with pytest.raises(ServerUnreachable, match="incorrect header check"):
                    ask()

    @pytest.mark.parametrize(
        "url",
        [
            "127.0.0.1:8731",
            "localhost",
            "ftp://localhost",
            "",
            "http://[::1",
            "http://a:b",
            "http://a:70000",
            "http://a\x00b",
            "http://xn--a",
        ],
    )
    def test_refuses_what_is_no_address(self, connect, url):
        with pytest.raises(InvalidArgument, match="looks like http://"):
            connect(url)

    @pytest.mark.parametrize("url", ["http://ann:pw@127.0.0.1:9", "ann:pw@gpu1:8731", "ftp://ann:pw@gpu1"])
    def test_takes_no_password_in_its_address_and_does_not_show_it(self, connect, url):
        with pytest.raises(InvalidArgument, match="without a name or a password") as refused:
            connect(url)
        assert "pw" not in str(refused.value).replace("password", "")

    @pytest.mark.parametrize(
        "options",
        [{"timeout_s": wrong} for wrong in (-1, 0, float("nan"), float("inf"), "x", None)]
        + [{"retries": wrong} for wrong in (-1, 1.5, "3", None)]
        + [{"token": 5}, {"url": 5}],
        ids=str,
    )
    def test_refuses_what_it_cannot_be_made_of(self, connect, options):
        with pytest.raises(InvalidArgument):
            connect(**{"url": "http://127.0.0.1:9"} | options)

    def test_has_each_call_in_both_kinds_and_on_its_page(self):
        """With the same arguments, and a docstring that says what is raised where something is."""
        page = (Path(__file__).parents[2] / "docs/client.md").read_text()
        calls = {name for name in dir(Client) if not name.startswith("_")} - {"close"}
        assert calls == {name for name in dir(AsyncClient) if not name.startswith("_")} - {"close"}
        for name in calls:
            method = getattr(Client, name)
            assert f"`{name}(" in page
            assert method.__doc__
            arguments = list(inspect.signature(method).parameters)
            assert arguments == list(inspect.signature(getattr(AsyncClient, name)).parameters)
            (line,) = re.findall(rf"`{name}\((.*?)\)`", page)[:1]
            assert re.findall(r"\w+(?==|,|$)", re.sub(r'=("[^"]*"|\w+)', "=", line)) == arguments[1:], name

    def test_does_not_show_its_token(self):
        with Client("http://127.0.0.1:9", "tsm_secret") as client:
            assert repr(client) == "Client('http://127.0.0.1:9')"


class TestAnAlert:
    @pytest.fixture
    def alert(self, client, writer, request):
        """One that fires, of a run of its own."""
        writer.put_rules(LOSS_RULE)
        run_id = writer.register(request.node.name)
        writer.send(run_id, *high_losses(3))
        (alert,) = client.alerts(run_id=run_id, rule="very-high-loss")
        return alert

    def test_is_found_by_all_that_it_is(self, client, alert):
        assert (alert.state, alert.firing_step, alert.project) == ("firing", 1, "p")
        assert client.alert(alert.alert_id) == alert
        asked = {"run_id": alert.run_id, "state": "firing", "project": "p", "family": "loss"}
        for further, is_found in (
            ({}, True),
            ({"severity": "critical", "acknowledged": False, "silenced": False}, True),
            ({"severity": "info"}, False),
            ({"acknowledged": True}, False),
            ({"state": ["acknowledged", "firing"]}, True),
            ({"state": ["acknowledged", "resolved"]}, False),
            ({"since": alert.updated_at}, True),
            ({"since": alert.updated_at.isoformat()}, True),
            ({"since": alert.updated_at + timedelta(days=1)}, False),
        ):
            assert client.alerts(**asked | further).all() == [alert] * is_found, further

    def test_is_acknowledged_by_whoever_says_so_first(self, client, writer, alert):
        seen = client.acknowledge(alert.alert_id, note="on it", by="ann")
        assert (seen.state, seen.acknowledged_by, seen.note) == ("acknowledged", "ann", "on it")
        assert client.acknowledge(alert.alert_id).acknowledged_by == "ann"
        writer.send(alert.run_id, *(Frame(i, i, 1.0 + i, {"loss": 1.0}) for i in range(3, 20)))
        assert client.alert(alert.alert_id).state == "resolved"
        with pytest.raises(WrongAlertState):
            client.acknowledge(alert.alert_id)


@pytest.fixture
def proxy(service):
    proxy = Proxy(service.port)
    yield proxy
    proxy.close()


class TestAQuestionWithoutAnAnswer:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch):
        monkeypatch.setattr("tsemon_client.answers.FIRST_PAUSE_S", 0.01)

    def test_is_asked_again(self, connect, proxy, run_id):
        proxy.cuts += [Cut("request", 0), Cut("reply", 0, is_reset=True), Cut("reply", 20)]
        with connect(proxy.url) as client:
            assert client.run(run_id).run_id == run_id
        assert proxy.num_cut == 3

    def test_is_asked_so_often_and_no_more(self, connect, proxy, run_id):
        proxy.cuts += [Cut("reply", 0)] * 5
        with connect(proxy.url, retries=2) as client, pytest.raises(ServerUnreachable):
            client.run(run_id)
        assert proxy.num_cut == 3

    def test_is_asked_once_where_it_is_refused(self, connect, proxy):
        with connect(proxy.url) as client:
            with pytest.raises(UnknownRun):
                client.run("x")
            proxy.end_all()  # the next one is another connection
            proxy.cuts += [Cut("reply", 0)]
            with pytest.raises(UnknownRun):
                client.run("x")
        assert proxy.num_cut == 1

    def test_may_be_asked_again_by_who_reads_a_list(self, connect, proxy, run_id):
        proxy.cuts += [Cut("reply", 0)]
        with connect(proxy.url, retries=0) as client:
            found = client.runs(project="p")
            with pytest.raises(ServerUnreachable):
                found.total()
            assert run_id in {run.run_id for run in found}  # beside runs of other tests

    def test_is_not_asked_again_where_it_takes_minutes(self, connect, proxy, run_id):
        proxy.cuts += [Cut("reply", 0)] * 2
        with connect(proxy.url) as client, pytest.raises(ServerUnreachable):
            client.test_rules(run_id, LOSS_RULE)
        assert proxy.num_cut == 1


class TestPatience:
    """How long is waited before the same is asked again; None is not at all."""

    ASK = Request("/runs", Record)
    WRITE = Request("/runs", Record, method="POST", is_idempotent=False)

    def pauses(self, *outcomes, request=ASK, retries=10):
        patience = Patience(retries)
        return [patience.pause_s(request, outcome) for outcome in outcomes]

    def test_grows_from_pause_to_pause(self):
        pauses = self.pauses(*[httpx.ConnectError("refused")] * 6)
        assert all(0.1 * 2**i <= pause <= 0.2 * 2**i for i, pause in enumerate(pauses))
        assert len(set(pauses)) == len(pauses), "many clients do not come back at once"

    @pytest.mark.parametrize("status", [429, 503])
    def test_respects_what_a_busy_service_says(self, status):
        (pause,) = self.pauses(httpx.Response(status, headers={"Retry-After": "7"}))
        assert 7.1 <= pause <= 7.2
        assert self.pauses(httpx.Response(status, headers={"Retry-After": "31"})) == [None], "longer than anyone waits"

    @pytest.mark.parametrize("status", [429, 502, 503, 504])
    def test_has_a_pause_of_its_own_where_it_does_not_say(self, status):
        for headers in ({}, {"Retry-After": "Sat, 31 Jan 2026 12:00:00 GMT"}):
            (pause,) = self.pauses(httpx.Response(status, headers=headers))
            assert 0.1 <= pause <= 0.2

    @pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 409, 422, 500, 501])
    def test_has_none_for_an_answer_or_a_refusal(self, status):
        assert self.pauses(httpx.Response(status)) == [None]

    def test_ends(self):
        assert self.pauses(*[httpx.Response(503)] * 3, retries=2)[-1] is None
        assert self.pauses(httpx.Response(503), retries=0) == [None]

    def test_has_none_for_what_must_not_be_done_twice(self):
        assert self.pauses(httpx.ReadError("cut"), request=self.WRITE) == [None]


class TestTheWayToTheService:
    """As that of the training: what delivers, can be looked at."""

    def test_reads_no_proxy_from_the_environment(self, connect, service, run_id, monkeypatch):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy", raising=False)
        with connect(service.url, retries=0) as client:
            assert client.run(run_id).run_id == run_id

    def test_trusts_the_certificate_that_the_environment_names(self, connect, tmp_path, monkeypatch):
        path, tls = make_certificate(tmp_path)

        class Empty(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'{"runs": [], "next_cursor": null}')

        with listening(Empty, tls) as url:
            with connect(url, retries=0) as client, pytest.raises(ServerUnreachable, match="certificate"):
                next(client.runs())
            monkeypatch.setenv("SSL_CERT_FILE", str(path))
            with connect(url, retries=0) as client:
                assert client.runs().all() == []


class TestAFileOfARun:
    @pytest.mark.parametrize("name", ["run.csv", "run.parquet"])
    def test_is_written_whole(self, client, run_id, tmp_path, name):
        path = client.export(run_id, tmp_path / name, metrics=["loss"])
        assert [path.name for path in tmp_path.iterdir()] == [name]
        if name == "run.csv":
            assert len(path.read_text().splitlines()) == 1 + 4
        else:
            assert pq.read_table(path)["value"].to_pylist() == [5.0, 4.0, 3.0, 2.0]

    def test_is_not_there_where_the_service_refuses(self, client, run_id, tmp_path):
        for error, path, ask in (
            (UnknownRun, "run.csv", {"run_id": "x"}),
            (UnknownMetric, "run.csv", {"run_id": run_id, "metrics": ["los"]}),
            (InvalidArgument, "run.xls", {"run_id": run_id}),
        ):
            with pytest.raises(error):
                client.export(path=tmp_path / path, **ask)
        assert list(tmp_path.iterdir()) == []

    def test_needs_a_folder(self, client, run_id, tmp_path):
        path = tmp_path / "nodir" / "run.csv"
        with pytest.raises(InvalidArgument, match=f"got {path}; make the folder {path.parent} before"):
            client.export(run_id, path)

    def test_is_left_as_it_was_where_its_end_does_not_come(self, connect, proxy, run_id, tmp_path):
        path = tmp_path / "run.csv"
        path.write_text("before")
        proxy.cuts += [Cut("reply", 400)]
        with connect(proxy.url, retries=0) as client, pytest.raises(ServerUnreachable):
            client.export(run_id, path)
        assert (proxy.num_cut, [path.name for path in tmp_path.iterdir()]) == (1, ["run.csv"])
        assert path.read_text() == "before"


class TestEvents:
    def test_tell_of_a_run_its_alerts_and_its_end(self, client, writer):
        writer.put_rules(LOSS_RULE)
        run_id = writer.register(f"told by {type(client).__name__}")
        other = writer.register(f"not told by {type(client).__name__}")
        events = client.events(run_id)
        assert next(events) == Connected()
        for told in (other, run_id):
            writer.send(told, *high_losses(3))
        heard = []
        while not {RunChanged, AlertChanged} <= {type(event) for event in heard}:
            heard.append(next(events))
        assert {event.run.run_id for event in heard if isinstance(event, RunChanged)} == {run_id}
        assert [event.alert.rule for event in heard if isinstance(event, AlertChanged)] == ["very-high-loss"]
        writer.delete(run_id)
        while not isinstance(event := next(events), RunDeleted):
            pass
        assert event.run_id == run_id
        events.close()

    def test_may_be_of_alerts_alone(self, client, writer):
        writer.put_rules(LOSS_RULE)
        run_id = writer.register(f"alone for {type(client).__name__}")
        events = client.events(run_id, kinds=["alert"])
        assert next(events) == Connected()
        writer.send(run_id, *high_losses(3))
        assert isinstance(next(events), AlertChanged)
        events.close()

    def test_go_on_after_the_connection_was_lost(self, connect, proxy, writer, monkeypatch):
        monkeypatch.setattr("tsemon_client.live.LONGEST_PAUSE_S", 0.02)
        run_id = writer.register(f"lost by {connect.__name__}")
        with connect(proxy.url) as client:
            events = client.events(run_id)
            assert next(events) == Connected()
            proxy.end_all()
            proxy.cuts += [Cut("request", 0), Cut("reply", 30)]
            assert Connected() in events  # after what may have come over the first connection
            writer.send(run_id, Frame(0, 0, 1.0, {"loss": 1.0}))
            assert next(events).run.run_id == run_id
            events.close()
        assert proxy.num_cut == 2

    def test_are_not_waited_for_where_there_is_no_service(self, connect):
        with connect("http://127.0.0.1:9", retries=0) as client, pytest.raises(ServerUnreachable, match="tsemon serve"):
            next(client.events())

    def test_of_a_run_that_is_not_there_are_refused(self, client):
        with pytest.raises(UnknownRun):
            next(client.events("x"))


class TestAServiceThatAsksForATokenOrHasNoRoom:
    @pytest.fixture
    def database(self, tmp_path):
        return f"sqlite:///{tmp_path / 'tsemon.db'}"

    @pytest.fixture
    def token(self, database):
        made = new_token()
        with closing(Store(database)) as store:
            about = {"name": "t", "digest": made.digest, "project": None, "expires_at": None}
            store.tokens.add(made.token_id, scopes=("read",), **about)
        return made.text

    @pytest.fixture
    def url(self, database):
        limits = Limits(listeners=1)
        with serving(create_app(Settings(database=database, tokens=True, limits=limits)), limits) as url:
            yield url

    def test_is_read_with_a_token(self, connect, url, token):
        with connect(url, token) as client:
            assert client.runs().all() == []
            with pytest.raises(Forbidden, match="admin"):
                client.acknowledge("1")
        with connect(url) as client, pytest.raises(Unauthorized, match="expected a token"):
            client.runs().all()

    def test_says_when_it_is_to_be_asked_again(self, connect, url, token):
        with connect(url, token, retries=0) as client, connect(url, token, retries=0) as other:
            events = client.events()
            next(events)
            with pytest.raises(Busy) as busy:
                next(other.events())
            assert busy.value.retry_after_s > 0
            events.close()
