"""The frame around the views: where one is, which keys there are, and what is said when the service is away."""

import re

import pytest
from playwright.sync_api import expect

from tests.ports import free_port
from tests.server.ui.conftest import events_of, opened, served
from tsemon_server.settings import Settings


def status(page):
    return page.locator("#pulse")


def banner(page):
    return page.locator("#banner")


def asked(page, what):
    """The addresses below the service's that the page asks for from now on, those with `what` in them."""
    found = []
    page.on("request", lambda request: found.append(request.url) if what in request.url else None)
    return found


def hide(page, is_hidden):
    """As when another tab is in front."""
    page.evaluate(
        """isHidden => {
            Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        is_hidden,
    )


VIEWS = {
    "#/": lambda main: main.get_by_role("link", name="tse_vit24-s0"),
    "#/run/{run}": lambda main: main.get_by_role("img", name="Value by layer"),
    "#/compare?run={run}": lambda main: main.get_by_role("img", name="by layer of 1 run"),
    "#/alerts?state=all": lambda main: main.get_by_role("article", name="token-similarity-escalation"),
    "#/rules?run={run}": lambda main: main.get_by_role("article", name="token-similarity-escalation"),
}
"""By address, what is there once the view is shown."""

FAINT = """async () => {
    const echarts = await import("/ui/vendor/echarts-6.1.0.esm.min.mjs");
    const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const paint = (colour) => {
        pen.fillStyle = colour;
        pen.fillRect(0, 0, 1, 1);
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (channels) => {
        const [r, g, b] = channels.map((one) => (one /= 255) <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const paper = (element) => {
        if (element.parentElement) paper(element.parentElement);
        return paint(getComputedStyle(element).backgroundColor);
    };
    const contrast = (element, ink) => {
        const [bright, dim] = [light(paper(element)), light(paint(ink))].sort((a, b) => b - a);
        return (bright + 0.05) / (dim + 0.05);
    };
    const findFaint = () => {
        const found = [];
        const look = (text, element, ink) => {
            const seen = contrast(element, ink);
            if (seen < 4.5) found.push(`${text}: ${seen.toFixed(1)}`);
        };
        const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (texts.nextNode()) {
            const { data, parentElement: element } = texts.currentNode;
            const isSeen = data.trim() && element.checkVisibility() && !element.closest(":disabled, .unseen, script, svg");
            if (isSeen) look(data.trim(), element, getComputedStyle(element).color);
        }
        for (const element of document.querySelectorAll("[_echarts_instance_]")) {
            if (!element.checkVisibility()) continue;
            const { xAxis, yAxis } = echarts.getInstanceByDom(element).getOption();
            for (const { show, axisLabel } of [...xAxis, ...yAxis]) {
                if (show !== false && axisLabel.show) look("axis", element, axisLabel.color);
            }
        }
        return found;
    };
    // Charts are drawn again a moment after the page has other colours.
    const deadline = performance.now() + 20_000;
    while (findFaint().length && performance.now() < deadline) await new Promise((resolve) => setTimeout(resolve, 50));
    return findFaint();
}"""
"""Texts of the page and of its charts that do not stand out as far as WCAG asks of small ones."""


class TestTheNavigation:
    def test_marks_the_view_that_is_shown(self, page, service):
        run_id = service.register("gpt")
        page.goto("/")
        here = page.locator("nav [aria-current=page]")
        expect(here).to_have_text("Runs")
        page.goto(f"/#/run/{run_id}")
        expect(page.get_by_role("heading", name="gpt")).to_be_visible()
        expect(here).to_have_text("Runs")

    def test_leads_to_all_views_and_to_the_description_of_the_routes(self, page):
        page.goto("/")
        links = page.get_by_role("navigation", name="Service").get_by_role("link")
        assert {link.inner_text(): link.get_attribute("href") for link in links.all()} == {
            "Runs": "#/",
            "Alerts": "#/alerts",
            "Rules": "#/rules",
            "Compare": "#/compare",
            "API": "docs",
            "Help": "help/",
        }

    @pytest.mark.parametrize("address", ["#/nonsense", "#nonsense"])
    def test_leads_on_from_where_there_is_no_view(self, page, address):
        page.goto(f"/{address}")
        expect(banner(page)).to_contain_text(f"There is no view at {address}.")
        expect(status(page)).to_have_text("not found")
        expect(page.locator("nav [aria-current=page]")).to_have_count(0)
        banner(page).get_by_role("link", name="All runs").click()
        expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
        expect(banner(page)).to_be_hidden()

    def test_can_be_skipped_and_leaves_the_address_as_it_is(self, page, service):
        service.register("gpt")
        page.goto("/#/?q=gpt")
        expect(page.get_by_role("link", name="gpt")).to_be_visible()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_role("main")).to_be_focused()
        expect(page).to_have_url(re.compile(r"#/\?q=gpt$"))


class TestTheAddress:
    def test_of_a_link_that_was_followed_is_not_taken_back_by_the_view_that_is_left(self, page, service):
        page.goto("/#/rules")
        expect(page.get_by_role("article", name="loss-spike")).to_be_visible()
        page.evaluate(
            """() => {
                document.querySelector("header nav a[href='#/alerts']").click();
                const filter = document.querySelector("main select");
                filter.selectedIndex = 1;
                filter.dispatchEvent(new Event("change"));
            }"""
        )
        expect(page.get_by_role("heading", name="Alerts")).to_be_visible()
        assert page.url.endswith("/#/alerts")


class TestTheKeys:
    def test_are_listed_on_demand(self, page, service):
        service.register("gpt")
        page.goto("/")
        expect(page.get_by_role("link", name="gpt")).to_be_visible()
        page.keyboard.press("?")
        keys = page.get_by_role("dialog", name="Keys")
        expect(keys).to_contain_text("compare the chosen runs")
        page.keyboard.press("Escape")
        expect(keys).to_have_count(0)

    def test_of_a_run_are_all_listed(self, page, service):
        page.goto(f"/#/run/{service.register('gpt')}")
        expect(page.get_by_role("heading", name="gpt")).to_be_visible()
        page.keyboard.press("?")
        for key in ("←", "PgUp", "PgDn", "Home", "End", "Esc"):
            expect(page.get_by_role("dialog", name="Keys").get_by_text(key, exact=True)).to_be_visible()

    def test_are_letters_in_a_field(self, page, service):
        service.register("gpt")
        page.goto("/")
        page.get_by_role("searchbox").press_sequentially("g?/j")
        expect(page.get_by_role("searchbox")).to_have_value("g?/j")
        expect(page.get_by_role("dialog")).to_have_count(0)


class TestAService:
    @pytest.mark.parametrize("run_id", ["nothing", "%E0%A4%A"])
    def test_without_that_run_says_so(self, browser, service, run_id):
        with opened(browser, service, but="404") as page:
            page.goto(f"/#/run/{run_id}")
            expect(banner(page)).to_contain_text(run_id)
            expect(banner(page).get_by_role("link", name="All runs")).to_be_visible()
            expect(status(page)).to_have_text("not found")

    def test_that_refuses_is_not_called_silent(self, browser, service):
        with opened(browser, service, but="status of 422") as page:
            page.goto(f"/#/run/{'x' * 65}")
            expect(banner(page)).to_contain_text("The service refused")
            expect(banner(page)).not_to_contain_text("Trying again")
            expect(status(page)).to_have_text("refused")

    def test_that_goes_away_is_told_apart_from_being_offline(self, browser, service):
        service.register("gpt")
        with opened(browser, service, but="Failed to load resource") as page:
            page.goto("/")
            expect(status(page)).to_have_text("live")
            page.context.set_offline(True)
            expect(banner(page)).to_contain_text("This computer is offline")
            expect(status(page)).to_have_text("offline")
            expect(page.get_by_role("link", name="gpt")).to_be_visible()
            page.context.set_offline(False)
            expect(banner(page)).to_be_hidden()
            expect(status(page)).to_have_text("live")

    def test_that_stays_away_is_told_of_once_and_takes_no_focus(self, browser, service):
        with opened(browser, service, but="Failed to load resource") as page:
            page.clock.install()
            page.goto("/")
            expect(status(page)).to_have_text("live")
            page.clock.pause_at(page.evaluate("Date.now()") + 1000)  # so the page does not try by itself meanwhile
            page.context.set_offline(True)
            expect(banner(page).get_by_role("alert")).to_have_text(re.compile("This computer is offline"))
            page.evaluate("window.told = document.querySelector('#banner [role=alert]').firstChild")
            again = banner(page).get_by_role("button", name="Try now")
            again.focus()
            expect(banner(page)).to_contain_text(re.compile(r"Trying again in \d+ s\."))
            wait = re.compile(r"Trying again in (\d+) s\.")
            before = wait.search(banner(page).inner_text())
            page.keyboard.press("Enter")
            expect(banner(page)).not_to_contain_text(before[0])
            expect(banner(page)).to_contain_text(wait)
            assert int(wait.search(banner(page).inner_text())[1]) > int(before[1])
            expect(again).to_be_focused()
            assert page.evaluate("window.told.isConnected")

    def test_whose_answer_is_cut_off_is_one_that_does_not_answer(self, page):
        page.route("**/api/v1/runs?*", lambda route: route.fulfill(content_type="application/json", body='{"runs": ['))
        page.goto("/")
        expect(banner(page)).to_contain_text("The service does not answer")
        expect(status(page)).to_have_text("no answer")

    def test_that_comes_back_is_shown_as_it_is_then(self, browser, tmp_path):
        settings = Settings(database=f"sqlite:///{tmp_path}/tsemon.db")
        port = free_port()
        with served(settings, port) as service:
            service.register("before")
            pages = opened(browser, service, but="Failed to load resource")
            page = pages.__enter__()
            page.goto("/")
            expect(page.get_by_role("link", name="before")).to_be_visible()
            expect(status(page)).to_have_attribute("title", re.compile("tells what changes"))
        expect(banner(page)).to_contain_text("The service does not answer")
        expect(status(page)).to_have_text("no answer")
        with served(settings, port) as service:
            service.register("after")
            expect(page.get_by_role("link", name="after")).to_be_visible()
            expect(banner(page)).to_be_hidden()
            expect(status(page)).to_have_text("live")
            pages.__exit__(None, None, None)

    def test_that_tells_no_events_is_asked_again_and_again(self, browser, service):
        """As behind a proxy that knows none."""
        run_id = service.register("gpt")
        with opened(browser, service, but="404") as page:
            page.route("**/api/v1/events*", lambda route: route.fulfill(status=404))
            page.goto("/")
            expect(page.get_by_role("row", name="gpt")).to_contain_text("no frames")
            expect(status(page)).to_have_attribute("title", re.compile("is asked every 2 s"))
            service.send_steps(run_id, [7], loss=1.5)
            expect(page.get_by_role("row", name="gpt")).to_contain_text("1.5")

    def test_is_left_alone_by_a_page_that_is_hidden(self, page, service):
        run_id = service.register("gpt")
        page.clock.install()
        page.goto("/")
        expect(status(page)).to_have_attribute("title", re.compile("tells what changes"))
        hide(page, True)
        requests = asked(page, "/api/")
        service.send_steps(run_id, [7], loss=1.5)
        page.clock.fast_forward("10:00")
        page.wait_for_timeout(100)  # time for a request, which must not come
        assert requests == []
        hide(page, False)
        expect(page.get_by_role("row", name="gpt")).to_contain_text("1.5")

    def test_is_asked_rarely_while_it_tells_what_changes(self, page, service):
        service.send_steps(service.register("gpt"), [7], loss=1.5)
        page.clock.install()
        page.goto("/")
        expect(status(page)).to_have_attribute("title", re.compile("tells what changes"))
        requests = asked(page, "/api/")
        page.clock.fast_forward(5000)  # a page that asks does so every two seconds
        page.wait_for_timeout(100)  # time for a request, which must not come
        assert requests == []
        with page.expect_request(re.compile("/api/v1/runs")):
            page.clock.fast_forward(6000)

    def test_that_is_away_is_missed_also_after_it_told_something(self, browser, service):
        run_id = service.register("gpt")
        with opened(browser, service, but="Failed to load resource") as page, events_of(page) as await_event:
            page.clock.install()
            page.goto("/")
            service.send_steps(run_id, [7], loss=1.5)
            expect(page.locator(".spark path").first).to_be_attached()
            page.clock.pause_at(page.evaluate("Date.now()") + 1000)  # so that a later round does not notice it instead
            beat = {"writer": "writer", "attempt": 1, "step": 8}
            service.request("POST", f"/api/v1/runs/{run_id}/heartbeat", json=beat).raise_for_status()
            await_event("run", run_id=run_id, process_step=8)
            page.context.set_offline(True)
            expect(banner(page)).to_contain_text("This computer is offline")


class TestEachView:
    @pytest.fixture(scope="class")
    @classmethod
    def service(cls, server, tmp_path_factory):
        with server.showing(Settings(database=f"sqlite:///{tmp_path_factory.mktemp('views')}/tsemon.db")) as service:
            yield service

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, service):
        return service.replay("tse_vit24-s0", project="vision")

    @pytest.mark.parametrize("view", VIEWS)
    def test_can_be_read_in_the_light_and_in_the_dark(self, page, run, view):
        page.goto(f"/{view.format(run=run)}")
        expect(VIEWS[view](page.get_by_role("main"))).to_be_visible()
        expect(page.locator("main [aria-busy=true]")).to_have_count(0)
        for scheme, paper in (("light", "rgb(246, 247, 249)"), ("dark", "rgb(17, 21, 27)")):
            page.emulate_media(color_scheme=scheme)
            expect(page.locator("body")).to_have_css("background-color", paper)
            assert page.evaluate(FAINT) == []
            page.route("**/api/v1/**", lambda route: None)  # no round draws the charts again

    @pytest.mark.parametrize(
        "view", [*[*VIEWS][:2], *(pytest.param(view, marks=pytest.mark.thorough) for view in [*VIEWS][2:])]
    )
    def test_says_that_it_loads_and_that_the_service_fails_and_is_shown_after_that(self, browser, service, run, view):
        with opened(browser, service, but="status of 500") as page:
            held, answers = [], []
            page.route("**/api/v1/**", lambda route: answers[-1](route) if answers else held.append(route))
            page.goto(f"/{view.format(run=run)}")
            expect(page.locator("main [aria-busy=true]")).to_be_visible()
            expect(banner(page)).to_be_hidden()
            answers.append(lambda route: route.fulfill(status=500, json={"error": "internal", "detail": "no disk"}))
            for route in held:
                answers[-1](route)
            expect(banner(page)).to_contain_text("The service refused: no disk.")
            answers.append(lambda route: route.continue_())
            banner(page).get_by_role("button", name="Try now").click()
            expect(VIEWS[view](page.get_by_role("main"))).to_be_visible()
            expect(banner(page)).to_be_hidden()
