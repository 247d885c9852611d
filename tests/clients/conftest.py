import asyncio
import inspect

import httpx
import pytest

from tests.serving import served_from
from tsemon.wire import API, Array, Frame, frames_to_body
from tsemon_client import AsyncClient, Client


class Awaited:
    """An AsyncClient whose every answer is awaited, so that one test is told to both clients."""

    def __init__(self, *args, **options):
        self._runner = asyncio.Runner()
        self._client = AsyncClient(*args, **options)

    def __getattr__(self, name):
        value = getattr(self._client, name)
        return lambda *args, **options: self._wait(value(*args, **options))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._wait(self._client.close())
        self._runner.close()

    def _wait(self, value):
        if inspect.iscoroutine(value):
            return self._runner.run(value)
        return AwaitedRecords(self._runner, value)


class AwaitedRecords:
    """What `async for` reads."""

    def __init__(self, runner, records):
        self._runner, self._records = runner, records

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return self._runner.run(self._next())
        except StopAsyncIteration:
            raise StopIteration from None

    def all(self):
        return self._runner.run(self._records.all())

    def total(self):
        return self._runner.run(self._records.total())

    def close(self):
        self._runner.run(self._records.aclose())

    async def _next(self):
        return await anext(self._records)


@pytest.fixture(scope="session", params=[Client, Awaited], ids=["sync", "async"])
def connect(request):
    """Makes a client of each kind in turn."""
    return request.param


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served_from(tmp_path_factory.mktemp("service") / "tsemon.db") as service:
        yield service


@pytest.fixture
def client(service, connect):
    with connect(service.url) as client:
        yield client


class Writer:
    """Registers runs and sends frames, as a training does."""

    def __init__(self, service):
        self._api = service.url + API

    def register(self, run, project="p", **fields):
        body = {"project": project, "run": run, "blocks": ["h.0", "h.1"]} | fields
        return self._post("/runs", json=body)["run_id"]

    def send(self, run_id, *frames):
        body = frames_to_body("w", 1, [frame.to_json() for frame in frames])
        assert self._post(f"/runs/{run_id}/frames", content=body)["accepted"] == len(frames)

    def put_rules(self, text, **params):
        self._ask("PUT", "/rules", content=text, params=params)

    def delete(self, run_id):
        self._ask("DELETE", f"/runs/{run_id}")

    def _post(self, path, **body):
        return self._ask("POST", path, **body).json()

    def _ask(self, method, path, **body):
        reply = httpx.request(method, self._api + path, timeout=60, **body)
        assert reply.is_success, reply.text
        return reply


@pytest.fixture(scope="module")
def writer(service):
    return Writer(service)


@pytest.fixture(scope="module")
def run_id(writer):
    """A run of four frames."""
    run_id = writer.register("r", tags=["a", "b/c"], config={"lr": 0.1})
    similarity = Array.of([0.1, 0.2, 0.3])
    writer.send(
        run_id,
        *(Frame(i, 10 * i, 1.0 + i, {"loss": 5.0 - i}, {"token_similarity": similarity}) for i in range(4)),
    )
    return run_id
