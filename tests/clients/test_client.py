import http.server
import threading

import httpx
import pyarrow.parquet as pq
import pytest

from tests.service import ServiceProcess
from tsemon.errors import (
    InvalidArgument,
    InvalidRange,
    ServerUnreachable,
    UnknownAttempt,
    UnknownLayer,
    UnknownMetric,
    UnknownRun,
)
from tsemon.wire import API, Array, Frame, frames_to_body
from tsemon_client import Client


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceProcess(tmp_path_factory.mktemp("service") / "tsemon.db") as service:
        yield service


@pytest.fixture
def client(service):
    with Client(service.url) as client:
        yield client


@pytest.fixture(scope="module")
def run_id(service):
    body = {"project": "p", "run": "r", "blocks": ["h.0", "h.1"]}
    registered = httpx.post(f"{service.url}{API}/runs", json=body).json()
    similarity = Array.of([0.1, 0.2, 0.3])
    frames = [Frame(i, 10 * i, 1.0, {"loss": 5.0 - i}, {"token_similarity": similarity}).to_json() for i in range(4)]
    sent = httpx.post(f"{service.url}{API}/runs/{registered['run_id']}/frames", content=frames_to_body("w", 1, frames))
    assert sent.json()["accepted"] == 4
    return registered["run_id"]


class TestClient:
    def test_finds_a_run_by_name(self, client, run_id):
        assert client.find_run("r", project="p")["run_id"] == run_id

    def test_reads_series_and_heat_maps(self, client, run_id):
        assert client.series(run_id, "loss", from_step=10, to_step=20)["mean"] == [4.0, 3.0]
        assert client.series(run_id, "token_similarity", layer=-1)["layer"] == 2
        assert client.heatmap(run_id, "token_similarity")["step"] == [0, 10, 20, 30]

    def test_compares_runs(self, client, run_id):
        (run,) = client.compare([run_id], "loss", points=3)["runs"]
        assert (run["run_id"], run["mean"]) == (run_id, [4.5, 2.5])

    def test_lists_more_runs_than_a_page_holds(self, client, service):
        for i in range(60):
            httpx.post(f"{service.url}{API}/runs", json={"project": "many", "run": f"{i:02}"}).raise_for_status()
        names = [run["run"] for run in client.runs(project="many", order="name")]
        assert names == [f"{i:02}" for i in range(60)]

    def test_raises_what_the_service_says(self, client, run_id):
        for error, text, ask in (
            (UnknownRun, "no run has the id 'x'", lambda: client.run("x")),
            (UnknownRun, "no run 'x' in project 'default'", lambda: client.find_run("x")),
            (UnknownMetric, "did you mean 'loss'", lambda: client.series(run_id, "los")),
            (UnknownMetric, "no layered metric 'loss'", lambda: client.series(run_id, "loss", layer=-1)),
            (UnknownLayer, "layers 0 to 2, got 3", lambda: client.series(run_id, "token_similarity", layer=3)),
            (UnknownAttempt, "no attempt 2", lambda: client.heatmap(run_id, "token_similarity", attempt=2)),
            (InvalidRange, "swap them", lambda: client.heatmap(run_id, "token_similarity", from_step=2, to_step=1)),
            (InvalidArgument, "points", lambda: client.series(run_id, "loss", points=0)),
        ):
            with pytest.raises(error, match=text):
                ask()

    def test_tells_that_nobody_answers(self):
        with (
            Client("http://127.0.0.1:9") as client,
            pytest.raises(ServerUnreachable, match="is `tsemon serve` running"),
        ):
            client.run("x")

    def test_tells_that_the_server_is_something_else(self):
        server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        with Client(url) as client, pytest.raises(ServerUnreachable, match="is it a tsemon service"):
            client.run("x")
        thread.join()
        server.server_close()

    @pytest.mark.parametrize("url", ["127.0.0.1:8731", "localhost", "ftp://localhost", ""])
    def test_refuses_what_is_no_address(self, url):
        with pytest.raises(InvalidArgument, match="looks like http://"):
            Client(url)


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
