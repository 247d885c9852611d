"""The real service on a database of its own, and a real browser to look at its page."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser as PlaywrightBrowser
from playwright.sync_api import ConsoleMessage, Download, Locator, Page, ViewportSize, expect, sync_playwright

from tests.databases import SqliteFile
from tests.serving import Stage, serving
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
VIEWPORT: ViewportSize = {"width": 1280, "height": 900}

START_S = 1_700_000_000.0
GROWING = (0.1, 0.2, 0.3, 0.4, 0.5)


class Service:
    """A running service, and what a training process says to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        # The server closes connections that are idle for 5 seconds, perhaps while a request is on its way.
        self._http = httpx.Client(base_url=url, timeout=30, limits=httpx.Limits(keepalive_expiry=2.0))

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._http.request(method, path, **options)

    def register(self, run: str, num_blocks: int = 4, **fields: Any) -> str:
        body = {"run": run, "blocks": [f"h.{i}" for i in range(num_blocks)], **fields}
        answer = self.request("POST", f"{API}/runs", json=body).raise_for_status()
        return str(answer.json()["run_id"])

    def end(self, run_id: str, attempt: int = 1) -> None:
        """The process of this attempt has failed."""
        body = {"state": "failed", "attempt": attempt}
        self.request("PATCH", f"{API}/runs/{run_id}", json=body).raise_for_status()

    def send(self, run_id: str, *frames: Frame) -> None:
        body = frames_to_body("writer", 1, [frame.to_json() for frame in frames])
        self.request("POST", f"{API}/runs/{run_id}/frames", content=body).raise_for_status()

    def send_steps(
        self, run_id: str, steps: Iterable[int], similarity: Sequence[float] = GROWING, **scalars: float
    ) -> None:
        """One frame for each of `steps`, all of the same values; the blocks are one fewer than the entries."""
        layers = {"centred_token_similarity": Array.of(similarity)}
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


def _migrate(settings: Settings) -> None:
    file = SqliteFile(settings.database.removeprefix("sqlite:///"))
    if not file.path.exists():
        file.migrate()


@contextmanager
def served(settings: Settings, port: int = 0) -> Iterator[Service]:
    """A server of its own."""
    _migrate(settings)
    with serving(create_app(settings), settings.limits, port) as url, closing(Service(url)) as service:
        yield service


class Server:
    """A running server, whose address the tests of a file share: each shows a database of its own there."""

    def __init__(self, stage: Stage, service: Service) -> None:
        self._stage, self._service = stage, service

    @contextmanager
    def showing(self, settings: Settings, **options: Any) -> Iterator[Service]:
        """`options` are those of `create_app`."""
        _migrate(settings)
        with self._stage.showing(create_app(settings, **options)):
            yield self._service


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = Settings(database=f"sqlite:///{tmp_path_factory.mktemp('stage')}/tsemon.db")
    _migrate(settings)
    stage = Stage(settings)
    with serving(stage) as url, closing(Service(url)) as service:
        yield Server(stage, service)


@pytest.fixture
def service(server: Server, tmp_path: Path) -> Iterator[Service]:
    with server.showing(Settings(database=f"sqlite:///{tmp_path}/tsemon.db")) as service:
        yield service


class Window:
    """A page and its context. The page can be emptied for the next test: a new one would compile all modules again."""

    def __init__(self, chromium: PlaywrightBrowser, url: str) -> None:
        self._url = url
        self.context = chromium.new_context(base_url=url, viewport=VIEWPORT)
        self.page = self.context.new_page()
        self._devtools = self.context.new_cdp_session(self.page)
        self.complaints: list[str] = []
        self.page.on("console", self._complain)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self._listeners: list[tuple[Any, Any]] = []
        vars(self.page)["on"] = self._listen

    def _complain(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} {message.location['url']}")

    def _listen(self, event: Any, listener: Any) -> None:
        """In place of `page.on`: the listeners of a test end with it."""
        type(self.page).on(self.page, event, listener)
        self._listeners.append((event, listener))

    def empty(self) -> None:
        """Leave nothing of a test: no view that still asks the server, no listener, nothing stored, the usual size."""
        page, context = self.page, self.context
        page.evaluate("origin === 'null' || sessionStorage.clear()")
        page.goto("about:blank")
        page.unroute_all()
        context.unroute_all()
        for event, listener in self._listeners:
            page.remove_listener(event, listener)
        self._listeners.clear()
        for other in context.pages:
            if other is not page:
                other.close()
        context.set_offline(False)
        context.clear_cookies()
        self._devtools.send("Storage.clearDataForOrigin", {"origin": self._url, "storageTypes": "all"})
        page.mouse.move(0, 0)
        page.set_viewport_size(VIEWPORT)
        page.emulate_media(media="null", color_scheme="light", reduced_motion="no-preference", forced_colors="none")

    @property
    def is_as_new(self) -> bool:
        """False where a test has set its own clock, which Playwright cannot take back."""
        return bool(self.page.evaluate("Function.prototype.toString.call(Date).includes('[native code]')"))


class Browser:
    """Chromium's windows that the tests of a file share."""

    def __init__(self, chromium: PlaywrightBrowser) -> None:
        self._chromium = chromium
        self._free: dict[str, Window] = {}

    def close(self) -> None:
        for context in self._chromium.contexts:  # also of a test that failed
            context.close()

    @contextmanager
    def window(self, url: str) -> Iterator[Window]:
        """One at this address, which no other test has now, with the complaints of this test only."""
        window = self._free.pop(url, None) or Window(self._chromium, url)
        window.complaints.clear()
        is_reusable = False
        try:
            yield window
            window.empty()
            is_reusable = window.is_as_new
        finally:
            if is_reusable:
                self._free[url] = window
            else:
                window.context.close()


@pytest.fixture(scope="package")
def chromium() -> Iterator[PlaywrightBrowser]:
    """For all files here: while it is there an event loop runs, so that tests of other folders can run none."""
    executable = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if executable is None:
        if os.environ.get("CI"):
            pytest.fail("Chromium is not installed; scripts/system_parts.py installs it")
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        expect.set_options(timeout=25_000)  # less than a view waits that hears of all changes
        chromium = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def browser(chromium: PlaywrightBrowser) -> Iterator[Browser]:
    browser = Browser(chromium)
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser, service: Service) -> Iterator[Page]:
    with opened(browser, service) as page:
        yield page


@contextmanager
def opened(browser: Browser, service: Service, but: str | None = None) -> Iterator[Page]:
    """A page on the service. Whatever it complains of in the console is a failure, `but` what has that in it."""
    with browser.window(service.url) as window:
        yield window.page
    assert [complaint for complaint in window.complaints if but is None or but not in complaint] == []


@contextmanager
def events_of(page: Page) -> Iterator[Callable[..., None]]:
    """Wait until the server has told the page of something: `await_event("run", run_id=..., state="failed")`."""
    events: list[tuple[str, dict[str, Any]]] = []
    devtools = page.context.new_cdp_session(page)
    devtools.on(
        "Network.eventSourceMessageReceived",
        lambda message: events.append((message["eventName"], json.loads(message["data"]))),
    )
    devtools.send("Network.enable")

    def await_event(kind: str, **values: Any) -> None:
        deadline = time.monotonic() + 25
        while not any(name == kind and values.items() <= data.items() for name, data in events):
            assert time.monotonic() < deadline, f"the page was told of {events}"
            page.wait_for_timeout(20)

    yield await_event
    devtools.detach()


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
