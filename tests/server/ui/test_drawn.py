"""What charts draw is whole: no text that an edge cuts off, no alert over another."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

from tsemon.wire import Array, Frame, frames_to_body
from tsemon_server.settings import Settings
from tsemon_server.store import Store

from .conftest import GROWING, START_S, Browser, Server, Service, opened

WIDTHS = {"desktop": 1280, "phone": 400}
LATE = 2000
"""So many steps after its last frame a process is heard of once more."""
SCHEMES = "light", "dark"
DRAWN = """async (element) => {
    const echarts = await import("/ui/vendor/echarts-6.1.0.esm.min.mjs");
    const chart = echarts.getInstanceByDom(element);
    const drawn = () => chart.getZr().storage.getDisplayList(true);
    const quiet = () => getComputedStyle(document.documentElement).getPropertyValue("--quiet").trim();
    const isOfThePage = () => drawn().some(({ style }) => style.text && style.fill === quiet());
    const isSettled = () => chart.getWidth() === element.clientWidth && isOfThePage();
    for (const end = Date.now() + 25_000; !isSettled() && Date.now() < end; ) await new Promise(requestAnimationFrame);
    const boxOf = (one) => {
        const box = one.getBoundingRect().clone();
        if (one.transform) box.applyTransform(one.transform);
        return { x: box.x, y: box.y, right: box.x + box.width, bottom: box.y + box.height };
    };
    return {
        isSettled: isSettled(),
        width: chart.getWidth(),
        height: chart.getHeight(),
        texts: drawn().filter(({ type }) => type === "tspan").map((one) => ({ text: one.style.text, ...boxOf(one) })),
        bars: drawn().filter(({ type, shape }) => type === "rect" && shape.r === 2).map(boxOf),
    };
}"""
"""What a chart draws once it has the size and the colors of the page, with the texts that show when the mouse is near."""


class Drawn:
    """Runs whose charts are hard to draw."""

    def __init__(self, service: Service, store: Store) -> None:
        self._service, self._store = service, store
        self.long = {last: self._run(f"to-{last}", last) for last in (100_000, 1_000_000)}
        self.odd = self._run("to-1005000", 1_005_000)
        self.resumed = self._run("resumed", 100_000)
        service.register("resumed", resume_step=99_000)
        body = frames_to_body("again", 2, [Frame(0, 99_000, START_S, {"loss": 1.0}).to_json()])
        service.request("POST", f"/api/v1/runs/{self.resumed}/frames", content=body).raise_for_status()
        self.failing = self._run("failing", 100_000)
        for i in range(10):
            self._fires(self.failing, f"rule-number-{i}", 20_000 + 4000 * i)
        self.flapping = self._run("flapping", 100_000)
        for rule in ("first", "second"):
            self._fires(self.flapping, rule, 50_000, until=50_000)
        self.silent = service.register("silent")
        service.send_steps(self.silent, range(0, 100_001, 500), loss=1.0)
        self._fires(self.silent, "process-silent", 100_000 + LATE)

    def _run(self, name: str, last_step: int) -> str:
        run_id = self._service.register(name)
        layers = {"token_similarity": Array.of(GROWING), "update_alignment": Array.of([-0.0016, -0.0012, 0.0, 0.0012])}
        steps = map(int, np.linspace(0, last_step, 200))
        self._service.send(
            run_id,
            *(
                Frame(i, step, START_S + step, {"loss": 1.0, "total_param_norm": 50.0}, layers)
                for i, step in enumerate(steps)
            ),
        )
        return run_id

    def _fires(self, run_id: str, rule: str, step: int, until: int | None = None) -> None:
        with self._store.write() as writer:
            writer.alerts.open(
                run_id, 1, rule, state="firing", pending_step=step, firing_step=step, family="loss", severity="warning",
                summary=f"It is {rule}.", evidence={}, advice={},
            )  # fmt: skip
            if until is not None:
                writer.alerts.change(run_id, 1, rule, "firing", state="resolved", resolved_step=until)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('drawn')}/tsemon.db"


@pytest.fixture(scope="module")
def service(server: Server, database: str) -> Iterator[Service]:
    with server.showing(Settings(database=database)) as service:
        yield service


@pytest.fixture(scope="module")
def drawn(service: Service, database: str) -> Iterator[Drawn]:
    store = Store(database)
    yield Drawn(service, store)
    store.close()


@pytest.fixture(scope="module")
def window(browser: Browser, service: Service) -> Iterator[Page]:
    with opened(browser, service) as page:
        yield page


@pytest.fixture
def page(window: Page) -> Page:
    window.set_viewport_size({"width": WIDTHS["desktop"], "height": 900})
    window.emulate_media(color_scheme="light")
    return window


def charts_at(page: Page, address: str) -> Locator:
    page.goto("about:blank")  # so that no chart of another test is taken for one of this
    page.goto(f"/{address}")
    charts = page.locator(".chart:visible")
    expect(charts.first.locator("canvas").first).to_be_visible()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    return charts


def chart_at(page: Page, address: str) -> Locator:
    """The first of a view: the timeline of a run, the curves that are compared."""
    return charts_at(page, address).first


def drawn_in(chart: Locator) -> dict[str, Any]:
    drawn: dict[str, Any] = chart.evaluate(DRAWN)
    assert drawn["isSettled"]
    return drawn


def texts_in(chart: Locator) -> list[str]:
    return [text["text"] for text in drawn_in(chart)["texts"]]


def cut_off_in(chart: Locator) -> list[dict[str, Any]]:
    """The texts that an edge of the chart goes through."""
    drawn = drawn_in(chart)
    return [
        text
        for text in drawn["texts"]
        if min(text["x"], text["y"]) < 0 or text["right"] > drawn["width"] or text["bottom"] > drawn["height"]
    ]


class TestTheLabelsOfAnAxis:
    @pytest.mark.parametrize("last_step", [100_000, pytest.param(1_000_000, marks=pytest.mark.thorough)])
    @pytest.mark.parametrize(
        "view",
        [
            "#/run/{}?layer=2",
            "#/run/{}?metric=update_alignment",
            "#/compare?run={}&profile=update_alignment",
            "#/compare?run={}&along=time",
        ],
    )
    def test_are_whole(self, page, drawn, view, last_step):
        charts = charts_at(page, view.format(drawn.long[last_step]))
        for width in WIDTHS.values():
            page.set_viewport_size({"width": width, "height": 900})
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                for chart in charts.all():
                    assert cut_off_in(chart) == [], (width, scheme)

    @pytest.mark.parametrize("last_step", [100_000, 1_000_000])
    def test_go_to_the_last_step_of_a_run(self, page, drawn, last_step):
        chart = chart_at(page, f"#/run/{drawn.long[last_step]}")
        texts = texts_in(chart)
        assert texts.count(f"{last_step:,}") >= 3, "below loss, norms and heat map"
        assert not [text for text in texts if text.startswith("-")], "there is no step before the first"

    def test_are_whole_where_the_last_is_near_the_end(self, page, drawn):
        chart = chart_at(page, f"#/compare?run={drawn.odd}")
        assert "1,000,000" in texts_in(chart)
        assert cut_off_in(chart) == []

    def test_name_an_attempt_that_began_near_the_end(self, page, drawn):
        chart = chart_at(page, f"#/run/{drawn.resumed}")
        assert "attempt 2" in texts_in(chart)
        assert cut_off_in(chart) == []


class TestTheBarsOfAlerts:
    @staticmethod
    def bars(chart):
        """From top to bottom."""
        return sorted(drawn_in(chart)["bars"], key=lambda bar: bar["y"])

    @pytest.mark.parametrize("width", WIDTHS.values())
    def test_are_below_one_another_however_many_fire_at_a_time(self, page, drawn, width):
        page.set_viewport_size({"width": width, "height": 900})
        chart = chart_at(page, f"#/run/{drawn.failing}")
        bars = self.bars(chart)
        assert len(bars) == 10
        for one, other in combinations(bars, 2):
            assert one["bottom"] <= other["y"]
        assert {f"rule-number-{i}" for i in range(10)} <= set(texts_in(chart)), "each is named"

    def test_each_can_be_pointed_at(self, page, drawn):
        chart = chart_at(page, f"#/run/{drawn.failing}")
        expect(page.locator(".incident .within").first).to_be_visible()  # it moves the chart down
        for i, bar in enumerate(self.bars(chart)):
            self.point_at(page, chart, bar)
            expect(page.locator(".tip:visible")).to_contain_text(f"It is rule-number-{i}.")

    def test_too_short_for_a_name_have_it_beside_them_and_it_can_be_pointed_at(self, page, drawn):
        chart = chart_at(page, f"#/run/{drawn.flapping}")
        (name,) = (text for text in drawn_in(chart)["texts"] if text["text"] == "first")
        bar = min(self.bars(chart), key=lambda bar: abs(bar["y"] - name["y"]))
        assert name["right"] < bar["x"]
        self.point_at(page, chart, name)
        expect(page.locator(".tip:visible")).to_contain_text("It is first.")

    def test_of_one_step_are_beside_each_other_and_can_be_pointed_at(self, page, drawn):
        chart = chart_at(page, f"#/run/{drawn.flapping}")
        upper, lower = self.bars(chart)
        assert upper["bottom"] <= lower["y"]
        for bar in (upper, lower):
            self.point_at(page, chart, bar)
            expect(page.locator(".tip:visible")).to_contain_text("resolved")

    def test_of_a_process_that_is_past_its_last_frame_is_there(self, page, drawn):
        chart = chart_at(page, f"#/run/{drawn.silent}")
        (bar,) = self.bars(chart)
        assert bar["right"] <= drawn_in(chart)["width"]
        self.point_at(page, chart, bar)
        expect(page.locator(".tip:visible")).to_contain_text("It is process-silent.")

    @staticmethod
    def point_at(page, chart, bar):
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        page.mouse.move(box["x"] + (bar["x"] + bar["right"]) / 2, box["y"] + (bar["y"] + bar["bottom"]) / 2)
