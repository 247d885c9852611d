"""The real service on a database of its own, and a real browser to look at its page."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tsemon.wire import API, Array, Frame, frames_to_body
from tsemon_server.main import create_app
from tsemon_server.settings import Settings

TRACES = Path(__file__).parents[2] / "data/traces"
TOKENS = "token_similarity", "token_diversity", "centred_token_similarity"
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


START_S = 1_700_000_000.0
GROWING = (0.1, 0.2, 0.3, 0.4, 0.5)


class Service:
    """A running service, and what a training process says to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=30)

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._http.request(method, path, **options)

    def register(self, run: str, num_blocks: int = 4, **fields: Any) -> str:
        body = {"run": run, "blocks": [f"h.{i}" for i in range(num_blocks)], **fields}
        answer = self.request("POST", f"{API}/runs", json=body).raise_for_status()
        return str(answer.json()["run_id"])

    def send(self, run_id: str, *frames: Frame) -> None:
        body = frames_to_body("writer", 1, [frame.to_json() for frame in frames])
        self.request("POST", f"{API}/runs/{run_id}/frames", content=body).raise_for_status()

    def send_steps(
        self, run_id: str, steps: Iterable[int], similarity: Sequence[float] = GROWING, **scalars: float
    ) -> None:
        """One frame for each of `steps`, all of the same values; the blocks are one fewer than the entries."""
        layers = {"token_similarity": Array.of(similarity)}
        self.send(run_id, *(Frame(step, step, START_S + step, scalars, layers) for step in steps))

    def replay(self, trace: str, **fields: Any) -> str:
        """A recorded training as a run, of which only the similarity of tokens was measured: few rules have a say."""
        with gzip.open(TRACES / f"{trace}.jsonl.gz", "rt") as lines:
            header, *entries = (json.loads(line) for line in lines)
        run_id = self.register(trace, header["layers"], **fields)
        for seq, entry in enumerate(entry for entry in entries if entry["t"] == "frame"):
            scalars = {"loss": _float(entry["scalars"]["loss"])}
            layers = {name: Array.of(map(_float, entry["layers"][name])) for name in TOKENS}
            self.send(run_id, Frame(seq, entry["step"], START_S + entry["step"], scalars, layers))
        return run_id


def _float(value: float | None) -> float:
    return math.nan if value is None else value


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    app = create_app(Settings(database=f"sqlite:///{tmp_path}/tsemon.db"))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    # The socket listens before the server runs, so early requests wait in its queue instead of being refused.
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    service = Service(f"http://127.0.0.1:{listener.getsockname()[1]}")
    yield service
    service.close()
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium")
    if executable is None:
        if os.environ.get("CI"):
            pytest.fail("Chromium is not installed; scripts/system_parts.py installs it")
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, service: Service) -> Iterator[Page]:
    """A page on the service. Whatever it complains of in the console fails the test."""
    context = browser.new_context(base_url=service.url, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    complaints: list[str] = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    expect.set_options(timeout=10_000)
    yield page
    context.close()
    assert not complaints
