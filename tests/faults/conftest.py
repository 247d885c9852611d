import contextlib

import httpx
import pytest

from tests.databases import SqliteFile
from tests.faults.processes import REGISTRATION, Service, Trainer, known_frame
from tsemon.wire import frames_to_body


@pytest.fixture
def sqlite_file(tmp_path):
    return SqliteFile(tmp_path / "tsemon.db")


@pytest.fixture
def serve(database, tmp_path):
    """Starts a service on the database, or on `url`. Nothing that happens to it is a surprise to it."""
    with contextlib.ExitStack() as running:

        def serve(url=database.url, **options):
            return running.enter_context(Service(url, tmp_path / "service.log", **options))

        yield serve
    assert "Traceback" not in (tmp_path / "service.log").read_text()


@pytest.fixture
def service(serve):
    return serve()


@pytest.fixture
def train(tmp_path):
    """Starts a trainer that sends to `url`."""
    started = []

    def train(url, *arguments, spool_dir=tmp_path / "spool", **options):
        started.append(Trainer(spool_dir, url, *arguments, **options))
        return started[-1]

    yield train
    for trainer in started:
        trainer.kill()


class Http:
    """A writer that sends its bodies by itself."""

    def __init__(self, service):
        self.http = httpx.Client(base_url=f"{service.url}/api/v1", timeout=60)
        self.run_id = self.http.post("/runs", json=REGISTRATION).json()["run_id"]

    def close(self):
        self.http.close()

    def send(self, seqs, writer="rank0"):
        body = frames_to_body(writer, 1, [known_frame(writer, seq).to_json() for seq in seqs])
        reply = self.http.post(f"/runs/{self.run_id}/frames", content=body).raise_for_status().json()
        return reply["accepted"], reply["duplicates"]


@pytest.fixture
def http(service):
    http = Http(service)
    yield http
    http.close()
