"""The real service on a database of its own, and a real browser to look at its page."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Download, Locator, Page, expect, sync_playwright

from tests.databases import SqliteFile
from tests.serving import serving
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


@contextmanager
def served(settings: Settings, port: int = 0) -> Iterator[Service]:
    file = SqliteFile(settings.database.removeprefix("sqlite:///"))
    if not file.path.exists():
        file.migrate()
    with serving(create_app(settings), settings.limits, port) as url, closing(Service(url)) as service:
        yield service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with served(Settings(database=f"sqlite:///{tmp_path}/tsemon.db")) as service:
        yield service


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For one file: while it is there an event loop runs, so that tests of other files can run none."""
    executable = shutil.which("chromium-headless-shell") or shutil.which("chromium")
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
    with opened(browser, service) as page:
        yield page


@contextmanager
def opened(browser: Browser, service: Service, but: str | None = None) -> Iterator[Page]:
    """A page on the service. Whatever it complains of in the console is a failure, `but` what has that in it."""
    context = browser.new_context(base_url=service.url, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    complaints: list[str] = []

    def complain(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(f"{message.text} {message.location['url']}")

    page.on("console", complain)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    expect.set_options(timeout=25_000)  # less than a view waits that hears of all changes
    yield page
    context.close()
    assert [complaint for complaint in complaints if but is None or but not in complaint] == []


def num_coloured(picture: Download) -> int:
    """How many pixels of a picture are neither grey nor nearly so, as its text, its axes and its background are."""
    with Image.open(picture.path()) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    return int((np.ptp(pixels, axis=2) > 60).sum())


def option_of(chart: Locator, part: str, name: str) -> list[Any]:
    """What the parts of a kind of a chart say under a name, as in the names of its axes."""
    values: list[Any] = chart.evaluate(
        """async (element, [part, name]) => {
            const echarts = await import("/ui/vendor/echarts-6.1.0.esm.min.mjs");
            return echarts.getInstanceByDom(element).getOption()[part].map((one) => one[name]);
        }""",
        [part, name],
    )
    return values


def axis_of(chart: Locator) -> list[float]:
    """From where to where the horizontal axis of a chart goes."""
    extent: list[float] = chart.evaluate(
        """async (element) => {
            const echarts = await import("/ui/vendor/echarts-6.1.0.esm.min.mjs");
            return echarts.getInstanceByDom(element).getModel().getComponent("xAxis", 0).axis.scale.getExtent();
        }"""
    )
    return extent
