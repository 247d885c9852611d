"""The list of runs, on the real service with what training processes sent to it."""

import itertools
import math
import re
import time
from contextlib import closing
from statistics import median

import pytest
from playwright.sync_api import expect
from sqlalchemy import create_engine, delete, insert, select

from tests.server.ui.conftest import GROWING, START_S, opened
from tsemon.wire import Array, Frame
from tsemon_server.settings import Settings
from tsemon_server.store import Store
from tsemon_server.store.ledger import tables as ledger
from tsemon_server.store.series.sql import tables as series

HOSTILE_NAMES = (
    '<img src=x onerror="document.title=1"><script>document.title=1</script>',
    "\u202emoc.live \u05e2\u05d1\u05e8\u05d9\u05ea \u0645\u0634\u0631\u0648\u0639",  # from right to left
    "x" * 128,  # no name may be longer
)
FLEET = 10_000
LIVE = 60
DRAWN = 100
NUM_STEPS = 40
BLOCKS = ["h.0", "h.1", "h.2", "h.3"]


def row_of(page, name):
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))


def cell(page, name, column):
    return row_of(page, name).locator(f"td.{column}")


def names(page):
    return page.locator("tbody tr:not(.bones) a.name")


def search(page):
    return page.get_by_role("searchbox")


def cpu_of(page):
    """Asked, it says how many milliseconds of CPU the page's thread has used: others on the machine hardly change that."""
    thread = page.context.new_cdp_session(page)
    thread.send("Performance.enable", {"timeDomain": "threadTicks"})

    def used_ms():
        told = {one["name"]: one["value"] for one in thread.send("Performance.getMetrics")["metrics"]}
        return 1000 * told["TaskDuration"]

    return used_ms


@pytest.fixture(scope="class")
def three_runs(server, tmp_path_factory):
    """They differ in all that can be asked for."""
    with server.showing(Settings(database=f"sqlite:///{tmp_path_factory.mktemp('three')}/tsemon.db")) as service:
        for name, project, tags, loss, state in (
            ("alpha", "vision", ["vit", "bf16"], 3.0, "running"),
            ("beta", "vision", ["vit"], 1.0, "finished"),
            ("gamma", "text", ["gpt"], 2.0, "failed"),
        ):
            run_id = service.register(name, project=project, tags=tags)
            service.send_steps(run_id, range(len(name)), loss=loss)
            service.request("PATCH", f"/api/v1/runs/{run_id}", json={"state": state}).raise_for_status()
        yield service


def run_of_the_fleet(i, now):
    """What a run of the large fleet has of its own."""
    return {
        "run_id": f"{i:032x}",
        "project": f"project-{i % 7}",
        "run": f"run-{i:05d}",
        "state": "running" if i < LIVE else "failed" if i % 10 == 3 else "finished",
        "tags": [f"tag-{i % 50}"],
        "created_at": now - i,
        "updated_at": now - i,
        "num_frames": NUM_STEPS if i < DRAWN else 1,
        "loss": loss_of(i),
    }


def loss_of(i):
    """To each run its own, in another order than that of their names."""
    return i * 7919 % FLEET / 100


@pytest.fixture(scope="class")
def large_fleet(server, tmp_path_factory):
    """A run is stored as usual, and then copied with its newest frame; those that are looked at have all frames."""
    database = f"sqlite:///{tmp_path_factory.mktemp('fleet')}/tsemon.db"
    with closing(Store(database)) as store, store.write() as writer:
        about = {"blocks": BLOCKS, "config": {}, "tags": [], "resume_step": None, "attempt_key": None}
        run_id = writer.runs.register("project-0", "source", **about).run_id
        layers = {"token_similarity": Array.of(GROWING)}
        writer.frames.add(
            run_id, 1, "copied", [Frame(i, i, START_S + i, {"loss": 2.0}, layers) for i in range(NUM_STEPS)]
        )
    fleet = [run_of_the_fleet(i, float(int(time.time()))) for i in range(FLEET)]
    with create_engine(database).begin() as connection:
        for table in (ledger.run, ledger.attempt, series.layout, series.frame):
            rows = [dict(row) for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()]
            connection.execute(delete(table))
            copies = [
                row | {name: value for name, value in about.items() if name in table.c}
                for about in fleet
                for row in (rows[-about["num_frames"] :] if table is series.frame else rows)
            ]
            connection.execute(insert(table), copies)
    with server.showing(Settings(database=database)) as service:
        yield service


class TestAServiceWithoutRuns:
    def test_tells_how_to_attach_to_it(self, page, service):
        page.goto("/")
        expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
        expect(page.locator("pre")).to_contain_text(
            f'tsemon.attach(model, optimizer, run="my-run", server="{service.url}")'
        )
        expect(page.locator("pre")).to_contain_text("monitor.close()")

    def test_shows_the_first_run_without_a_reload(self, page, service):
        page.goto("/")
        expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
        service.register("gpt")
        expect(page.get_by_role("link", name="gpt")).to_be_visible()
        expect(page.get_by_role("heading", name="No runs yet")).to_be_hidden()


class TestARow:
    def test_says_where_the_run_is(self, page, service):
        run_id = service.register("gpt", project="pretrain", tags=["bf16"])
        service.send_steps(run_id, range(0, 1250, 50), loss=2.125)
        page.goto("/")
        for text in ("pretrain", "bf16", "running", "1,200", "2.125", "none"):
            expect(row_of(page, "gpt")).to_contain_text(text)

    def test_draws_the_loss_and_marks_where_it_was_not_finite(self, page, service):
        run_id = service.register("gpt")
        for step, loss in enumerate((3.0, 2.0, math.nan, 1.0)):
            service.send_steps(run_id, [step], loss=loss)
        page.goto("/")
        paths = cell(page, "gpt", "loss").locator("path")
        line, gaps = paths.first, paths.last
        expect(line).to_have_attribute("d", "M0.0 3.0L33.3 12.0M100.0 21.0m-1.5 0h3")
        expect(gaps).to_have_attribute("d", re.compile(r"^M66\.7 "))

    def test_tells_a_loss_that_is_not_finite(self, page, service):
        service.send_steps(service.register("gpt"), range(3), loss=math.nan)
        page.goto("/")
        expect(cell(page, "gpt", "loss")).to_contain_text("not finite")

    def test_names_the_layer_whose_tokens_are_most_alike(self, page, service):
        layers = {"token_diversity": Array.of([0.9, 0.8, 0.25, 0.7, 0.6])}
        service.send(service.register("gpt"), Frame(1, 1, START_S, {}, layers))
        service.send_steps(service.register("bert"), range(3))
        page.goto("/")
        expect(cell(page, "gpt", "worst")).to_have_text("0.25 layer 2token_diversity")
        expect(cell(page, "bert", "worst")).to_have_text("\N{EN DASH}")

    @pytest.mark.parametrize(
        ("update", "width", "title", "color"),
        [
            (0.0035, "50%", "1 decades from 0.035, the threshold of updates-too-large", "accent"),
            (0.35, "100%", "1 decades beyond 0.035, the threshold of updates-too-large", "alarm"),
        ],
    )
    def test_names_the_layer_that_is_nearest_to_a_rule_and_has_a_bar_of_the_distance(
        self, page, service, update, width, title, color
    ):
        layers = {"update_norm": Array.of([1e-4, 1e-4, update, 1e-4]), "param_norm": Array.of([1.0] * 4)}
        layers["token_diversity"] = Array.of([0.9, 0.5, 0.4, 0.3, 0.1])
        service.send(service.register("gpt"), Frame(1, 1, START_S, {}, layers))
        page.goto("/")
        worst = cell(page, "gpt", "worst")
        expect(worst).to_have_text(f"{update:g} layer 2update_norm / param_norm")
        expect(worst.locator("div")).to_have_attribute(
            "title", f"update_norm / param_norm of layer 2: {update:g}; {title}"
        )
        bar = worst.locator(".fill")
        assert bar.evaluate("bar => bar.style.width") == width
        drawn, of_theme = bar.evaluate(
            """(bar, name) => {
                const probe = document.body.appendChild(document.createElement("i"));
                probe.style.background = `var(--${name})`;
                return [bar, probe].map((element) => getComputedStyle(element).backgroundColor);
            }""",
            color,
        )
        assert drawn == of_theme

    def test_names_a_layer_that_is_not_finite_before_that(self, page, service):
        service.send_steps(service.register("gpt"), range(3), similarity=[0.1, 0.2, math.inf, 0.3, 0.9])
        layers = {"token_similarity": Array.of(GROWING), "nonfinite": Array.of([0.0, 0.0, 0.0, 0.125, 0.0])}
        service.send(service.register("bert"), Frame(1, 1, START_S, {}, layers))
        layers = {"nonfinite_entries": Array.of([0.0, 12.0, 0.0, 0.0])}  # of a checkpoint
        service.send(service.register("scan"), Frame(1, 1, START_S, {}, layers))
        page.goto("/")
        expect(cell(page, "gpt", "worst")).to_have_text("not finitelayer 2, centred_token_similarity")
        expect(cell(page, "bert", "worst")).to_have_text("not finitelayer 3")
        expect(cell(page, "scan", "worst")).to_have_text("not finitelayer 1")

    def test_keeps_a_step_of_sixteen_digits_in_its_column(self, page, service):
        service.send_steps(service.register("long"), [2**53 - 1], loss=2.0)
        page.goto("/")
        expect(cell(page, "long", "step")).to_have_text("9.01e15")
        assert cell(page, "long", "step").evaluate("cell => cell.scrollWidth <= cell.clientWidth")

    def test_shows_a_loss_that_stands_alone_as_a_dot_that_can_be_seen(self, page, service):
        run_id = service.register("dots")
        for step, loss in enumerate([2.0, math.nan, 1.0]):
            service.send(run_id, Frame(step, step, START_S + step, {"loss": loss}, {}))
        page.goto("/")
        course = cell(page, "dots", "loss").locator("path").first
        expect(course).to_be_attached()
        assert course.evaluate("path => path.getTotalLength()") == pytest.approx(2 * 3), "two dots, three pixels wide"

    @pytest.mark.parametrize("state", ["finished", "failed"])
    def test_tells_how_the_run_ended(self, page, service, state):
        run_id = service.register("gpt")
        service.request("PATCH", f"/api/v1/runs/{run_id}", json={"state": state}).raise_for_status()
        page.goto("/")
        expect(cell(page, "gpt", "condition")).to_have_text(state)

    @pytest.mark.parametrize(("rule", "condition"), [("process-silent", "silent"), ("training-stuck", "stuck")])
    def test_tells_what_the_clock_says_of_the_process(self, page, service, tmp_path, rule, condition):
        run_id = service.register("gpt")
        store = Store(f"sqlite:///{tmp_path}/tsemon.db")  # the rule itself waits for minutes
        with store.write() as writer:
            writer.alerts.open(
                run_id, 1, rule, family="liveness", severity="warning", state="firing",
                pending_step=0, firing_step=0, summary="", evidence={}, advice={},
            )  # fmt: skip
        store.close()
        page.goto(f"/#/?condition={condition}")
        expect(cell(page, "gpt", "condition")).to_have_text(condition)

    def test_shows_the_incident_while_it_is_open_and_after_the_run_ended_with_it(self, page, service):
        run_id = service.replay("tse_vit24-s0")
        page.goto("/")
        verdict, link = cell(page, "tse_vit24-s0", "alerts"), cell(page, "tse_vit24-s0", "alerts").get_by_role("link")
        expect(verdict).to_have_text("Tokens become the same over depthblocks 1 to 23, since step 0")
        expect(link).to_have_attribute("title", re.compile(r"1 alert is open\.$"))
        service.request("PATCH", f"/api/v1/runs/{run_id}", json={"state": "failed"}).raise_for_status()
        expect(link).to_have_attribute("title", re.compile(r"1 alert fired at the end\.$"))
        expect(verdict).to_have_text("Tokens become the same over depthblocks 1 to 23, since step 0")


class TestTheListWhileRunsTrain:
    def test_changes_the_row_in_place_and_asks_for_nothing_but_what_changed(self, page, service):
        still, going = service.register("still"), service.register("going")
        for run_id in (still, going):
            service.send_steps(run_id, range(3), loss=2.0)
        page.goto("/")
        expect(cell(page, "going", "loss").locator("path").first).to_be_attached()
        row = row_of(page, "going").element_handle()
        with page.expect_request(re.compile("/glances")) as request:
            service.send_steps(going, [1234], loss=1.5)
        expect(cell(page, "going", "step")).to_have_text("1,234")
        assert re.findall("run=([^&]+)", request.value.url) == [going]
        assert row.evaluate("row => row.isConnected")

    def test_keeps_the_box_that_has_the_focus(self, page, service):
        run_id = service.register("gpt")
        page.goto("/")
        box = page.get_by_role("checkbox", name="Choose gpt")
        box.focus()
        service.send_steps(run_id, [5], loss=1.5)
        service.register("another")
        expect(page.get_by_role("link", name="another")).to_be_visible()
        expect(cell(page, "gpt", "step")).to_have_text("5")
        expect(box).to_be_focused()

    def test_keeps_the_button_that_has_the_focus(self, page, service):
        page.goto("/#/?q=nothing+of+that+name")
        button = page.get_by_role("button", name="Show all runs")
        button.focus()
        with page.expect_response(re.compile("/runs")):
            page.evaluate("dispatchEvent(new Event('online'))")  # a round at once
        expect(page.locator("tbody[aria-busy]")).to_have_count(0)
        page.wait_for_function("() => new Promise((done) => setTimeout(() => done(true), 50))")
        expect(button).to_be_focused(timeout=1)

    def test_keeps_the_button_that_is_being_pressed(self, page, service):
        service.register("gpt")
        page.goto("/#/?order=name")
        row_of(page, "gpt").get_by_role("button", name="default").hover()
        page.mouse.down()
        service.register("llama")
        expect(names(page)).to_have_text(["gpt", "llama"])
        page.mouse.up()
        expect(page).to_have_url(re.compile("project=default"))

    def test_lets_go_of_a_run_that_is_deleted(self, page, service):
        run_id = service.register("gpt")
        service.register("other")
        # Otherwise the page may ask to hear of a run that is gone, and the browser complains of the 404.
        with page.expect_response(lambda response: "/events?" in response.url and run_id in response.url):
            page.goto("/#/?condition=running")
        expect(page.get_by_role("link", name="gpt")).to_be_visible()
        service.request("DELETE", f"/api/v1/runs/{run_id}").raise_for_status()
        expect(page.get_by_role("link", name="gpt")).to_have_count(0)
        expect(page.get_by_role("link", name="other")).to_be_visible()

    def test_lets_go_of_a_run_that_no_longer_fits_the_filter(self, page, service):
        run_id = service.register("gpt")
        service.register("other")
        page.goto("/#/?condition=running")
        expect(names(page)).to_have_count(2)
        service.request("PATCH", f"/api/v1/runs/{run_id}", json={"state": "failed"}).raise_for_status()
        expect(names(page)).to_have_text(["other"])


class TestFinding:
    @pytest.fixture
    def service(self, three_runs):
        return three_runs

    def test_is_what_the_address_says(self, page):
        for query, found in (
            ("q=ALPH", ["alpha"]),
            ("q=vision&order=name", ["alpha", "beta"]),
            ("q=gpt", ["gamma"]),
            ("condition=failed", ["gamma"]),
            ("project=vision&order=-name", ["beta", "alpha"]),
            ("tag=vit&tag=bf16", ["alpha"]),
            ("order=loss", ["beta", "gamma", "alpha"]),
            ("order=-created", ["gamma", "beta", "alpha"]),
        ):
            page.goto(f"/#/?{query}")
            expect(names(page)).to_have_text(found)

    def test_writes_each_choice_into_the_address(self, page):
        page.goto("/")
        expect(names(page)).to_have_count(3)
        search(page).fill("a")
        page.get_by_role("group", name="Condition").get_by_role("button", name="running").click()
        page.get_by_label("Only runs with the tag").select_option("vit")
        row_of(page, "alpha").get_by_role("button", name="bf16").click()
        row_of(page, "alpha").get_by_role("button", name="vision").click()
        page.get_by_role("columnheader", name="loss").get_by_role("button").click()
        expect(page).to_have_url(re.compile(r"#/\?q=a&condition=running&project=vision&order=loss&tag=vit&tag=bf16$"))
        expect(names(page)).to_have_text(["alpha"])
        page.reload()
        expect(search(page)).to_have_value("a")
        expect(page.get_by_role("columnheader", name="loss")).to_have_attribute("aria-sort", "ascending")
        filters = page.get_by_role("list", name="Filters").get_by_role("button")
        expect(filters).to_have_text(["project vision ×", "tag vit ×", "tag bf16 ×", "Clear all"])
        filters.last.click()
        expect(names(page)).to_have_text(["beta", "gamma", "alpha"])
        expect(page).to_have_url(re.compile(r"#/\?order=loss$"))

    def test_turns_the_order_where_a_heading_is_clicked_again(self, page):
        page.goto("/")
        heading = page.get_by_role("columnheader", name="run", exact=True).get_by_role("button")
        heading.click()
        expect(names(page)).to_have_text(["alpha", "beta", "gamma"])
        heading.click()
        expect(names(page)).to_have_text(["gamma", "beta", "alpha"])

    def test_begins_anew_where_the_address_names_no_page(self, browser, service):
        with opened(browser, service, but="status of 422") as page:
            page.goto("/#/?order=name&cursor=nonsense&at=50")
            expect(names(page)).to_have_text(["alpha", "beta", "gamma"])
            expect(page).to_have_url(re.compile(r"#/\?order=name$"))
            expect(page.locator("#pulse")).to_have_text("live")

    def test_of_nothing_says_so_and_leads_back(self, page):
        page.goto("/#/?q=nowhere")
        expect(page.get_by_text("No run fits these choices.")).to_be_visible()
        page.get_by_role("button", name="Show all runs").click()
        expect(names(page)).to_have_count(3)

    def test_shows_the_shape_of_the_list_until_it_is_there(self, page):
        held, is_open = [], False
        page.route("**/api/v1/runs?*", lambda route: route.continue_() if is_open else held.append(route))
        page.goto("/")
        expect(page.locator("tr.bones")).to_have_count(8)
        places = "thead", "tbody tr:first-child"
        before = [page.locator(place).bounding_box() for place in places]
        is_open = True
        for route in held:
            route.continue_()
        expect(names(page)).to_have_count(3)
        assert [page.locator(place).bounding_box() for place in places] == before


class TestChoosing:
    def test_runs_leads_to_their_comparison(self, page, service):
        ids = {name: service.register(name) for name in ("a", "b", "c")}
        page.goto("/")
        chosen = page.get_by_role("region", name="Chosen runs")
        expect(chosen).to_be_hidden()
        page.get_by_role("checkbox", name="Choose a").check()
        expect(chosen).to_contain_text("choose another to compare")
        page.get_by_role("checkbox", name="Choose c").check()
        expect(page).to_have_url(re.compile(rf"#/\?run={ids['a']}&run={ids['c']}$"))
        link = chosen.get_by_role("link", name="Compare")
        assert link.get_attribute("href") == f"#/compare?run={ids['a']}&run={ids['c']}"

    def test_is_kept_by_the_address_and_by_other_filters(self, page, service):
        run_id = service.register("gpt")
        service.register("other")
        page.goto(f"/#/?run={run_id}&q=other")
        expect(names(page)).to_have_text(["other"])
        expect(page.get_by_role("region", name="Chosen runs")).to_contain_text("1 chosen")
        search(page).fill("")
        expect(page.get_by_role("checkbox", name="Choose gpt")).to_be_checked()
        page.get_by_role("button", name="Choose none").click()
        expect(page.get_by_role("checkbox", name="Choose gpt")).not_to_be_checked()
        expect(page).to_have_url(re.compile("#/$"))


class TestTheKeyboard:
    def test_moves_in_the_list_and_opens_a_run(self, page, service):
        for name in ("a", "b", "c"):
            service.register(name)
        page.goto("/#/?order=name")
        expect(names(page)).to_have_count(3)
        for key, name in (("j", "a"), ("ArrowDown", "b"), ("j", "c"), ("j", "c"), ("k", "b"), ("ArrowUp", "a")):
            page.keyboard.press(key)
            expect(page.get_by_role("link", name=name, exact=True)).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="a", exact=True)).to_be_visible()

    def test_chooses_and_compares(self, page, service):
        for name in ("a", "b"):
            service.register(name)
        page.goto("/")
        expect(names(page)).to_have_count(2)
        for key in "jxjx":
            page.keyboard.press(key)
        expect(page.get_by_role("region", name="Chosen runs")).to_contain_text("2 chosen")
        page.keyboard.press("c")
        expect(page).to_have_url(re.compile("#/compare"))

    def test_searches_and_goes_on_to_what_is_found(self, page, service):
        for name in ("a", "b"):
            service.register(name)
        page.goto("/")
        expect(names(page)).to_have_count(2)
        page.keyboard.press("/")
        expect(search(page)).to_be_focused()
        page.keyboard.type("b")
        expect(names(page)).to_have_text(["b"])
        page.keyboard.press("Enter")
        expect(page.get_by_role("link", name="b", exact=True)).to_be_focused()

    def test_reaches_all_in_the_order_in_which_it_is_seen(self, page, service):
        service.register("gpt", tags=["vit"])
        page.goto("/")
        expect(names(page)).to_have_count(1)
        search(page).focus()
        reached = []
        for _ in range(15):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate("(document.activeElement.ariaLabel || document.activeElement.textContent).trim()")
            )
        conditions = ["all", "running", "silent", "stuck", "finished", "failed"]
        headings = ["run", "step", "loss", "last seen", "incident"]
        assert reached == ["Order", *conditions, "Only runs with the tag", *headings, "Choose gpt", "gpt"]


class TestTenThousandRuns:
    @pytest.fixture
    def service(self, large_fleet):
        return large_fleet

    def test_are_shown_a_page_at_a_time(self, page, service):
        page.goto("/")
        expect(names(page)).to_have_count(50)
        pages = page.get_by_role("navigation", name="Pages")
        expect(pages).to_contain_text("1 to 50 of 10,000")
        pages.get_by_role("link", name="Next").click()
        expect(pages).to_contain_text("51 to 100 of 10,000")
        expect(names(page).first).to_have_text("run-00050")
        page.reload()
        expect(names(page).first).to_have_text("run-00050")
        expect(pages).to_contain_text("51 to 100 of 10,000")
        page.go_back()
        expect(names(page).first).to_have_text("run-00000")
        page.keyboard.press("n")
        expect(names(page).first).to_have_text("run-00050")
        page.keyboard.press("p")
        expect(names(page).first).to_have_text("run-00000")

    def test_are_searched_filtered_and_ordered_by_the_service(self, page, service):
        page.goto("/")
        expect(names(page)).to_have_count(50)
        search(page).fill("RUN-0999")
        expect(names(page)).to_have_text([f"run-0999{i}" for i in range(10)])
        page.get_by_role("button", name="Clear all").click()
        page.get_by_role("button", name="failed").click()
        expect(page.locator(".total")).to_have_text("994")
        page.get_by_label("Order").select_option("-name")
        expect(names(page).first).to_have_text("run-09993")

    def test_are_ordered_by_their_loss_page_by_page(self, page, service):
        finished = (i for i in range(LIVE, FLEET) if i % 10 != 3)
        highest = [f"run-{i:05d}" for i in sorted(finished, key=loss_of, reverse=True)]
        page.goto("/#/?condition=finished")
        page.get_by_label("Order").select_option("-loss")
        expect(names(page)).to_have_text(highest[:50])
        page.get_by_role("navigation", name="Pages").get_by_role("link", name="Next").click()
        expect(names(page)).to_have_text(highest[50:100])
        page.get_by_label("Order").select_option("loss")
        expect(names(page)).to_have_text(highest[:-51:-1])

    def test_are_listened_to_where_they_are_shown(self, page, service):
        listened = []
        page.on("request", lambda request: listened.append(request.url) if "/events" in request.url else None)
        page.goto("/")
        expect(page.locator("#pulse")).to_have_attribute("title", re.compile("tells what changes"))
        service.send(f"{0:032x}", Frame(40, 4321, START_S, {"loss": 1.5}, {}))
        expect(cell(page, "run-00000", "step")).to_have_text("4,321")
        assert [url.count("run=") for url in listened] == [50]

    def test_cost_the_page_no_more_than_fifty(self, page, service):
        page.goto("/")
        expect(names(page)).to_have_count(50)
        search(page).fill("run")
        expect(page).to_have_url(re.compile("q=run"))
        expect(page.locator("tbody[aria-busy]")).to_have_count(0)
        expect(page.locator("svg.spark path")).to_have_count(100)
        assert page.locator("main *").count() < 2500
        used_ms, frames_ms = cpu_of(page), []
        before = used_ms()
        page.get_by_label("Order").select_option("name")
        expect(names(page).first).to_have_text("run-00000")
        assert used_ms() - before < 400, "another page of the list"
        for i in range(20):
            before = used_ms()
            page.evaluate("(y) => (scrollTo(0, y), new Promise(requestAnimationFrame))", 100 * i)
            frames_ms.append(used_ms() - before)
        assert median(frames_ms) < 1000 / 60, "sixty frames a second"
        assert max(frames_ms) < 50, "none that is felt"

    def test_keep_their_places_while_the_live_ones_send_frames(self, page, service):
        """More of them than a page has: what is on the second must not move to the first."""
        step = itertools.count(50)

        def train():
            for i in range(LIVE):
                at = next(step)
                service.send(f"{i:032x}", Frame(at, at, START_S + at, {"loss": 1.0}, {}))

        page.goto("/")
        expect(names(page)).to_have_text([f"run-{i:05}" for i in range(50)])
        train()
        page.get_by_role("link", name="Next").click()
        second = [f"run-{i:05}" for i in range(50, 100)]
        expect(names(page)).to_have_text(second)
        back = page.get_by_role("link", name="Previous")
        back.focus()
        train()
        expect(cell(page, "run-00059", "step")).not_to_have_text("39")
        expect(names(page)).to_have_text(second)
        expect(back).to_be_focused()
        page.reload()
        expect(names(page)).to_have_text(second)


class TestWhatAClientNames:
    @pytest.mark.parametrize("width", [1280, 400])
    def test_stays_text_and_within_its_place(self, page, service, width):
        for name in HOSTILE_NAMES:
            run_id = service.register(name, project=name, tags=[name])
            service.send_steps(run_id, range(5), loss=1.0)
        page.set_viewport_size({"width": width, "height": 800})
        page.goto("/")
        for name in HOSTILE_NAMES:
            row_of(page, name).locator("button.tag").click()
            expect(names(page)).to_have_text([name])
            expect(page.get_by_role("list", name="Filters")).to_contain_text(f"tag {name}")
            assert page.evaluate("document.documentElement.scrollWidth") == width
            page.get_by_role("button", name="Clear all").click()
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "tsemon"

    def test_shows_what_turns_the_writing_around_and_does_not_do_it(self, page, service):
        service.register("\u202eevil", project="\u2067default")
        page.goto("/")
        expect(names(page)).to_have_text(["\u202eevil"])
        places = names(page).evaluate(
            """link => [...link.lastChild.data].map((_, i) => {
                const range = document.createRange();
                range.setStart(link.lastChild, i);
                range.setEnd(link.lastChild, i + 1);
                return range.getBoundingClientRect().left;
            })"""
        )
        assert places == sorted(places), "it would read live"
        marks = page.locator("tbody .turn").evaluate_all(
            "all => all.map(one => getComputedStyle(one, '::before').content)"
        )
        assert [mark.split('"')[1] for mark in marks] == ["U+202E", "U+2067"]

    def test_can_be_clicked_where_it_is_nothing_but_blanks(self, page, service):
        run_id = service.register("  \u200b ")
        page.goto("/")
        page.get_by_role("link", name="(blank)").click()
        expect(page).to_have_url(re.compile(f"#/run/{run_id}"))
        expect(page.get_by_role("heading", name="(blank)")).to_be_visible()

    def test_may_have_any_characters_in_the_address(self, page, service):
        name = 'a&b=c#d?e%20+"'
        service.register(name, project=name, tags=[name])
        page.goto("/")
        row_of(page, name).locator("button.tag").click()
        row_of(page, name).locator(".of > button").click()
        page.reload()
        expect(names(page)).to_have_text([name])
        expect(page.get_by_role("list", name="Filters")).to_contain_text(f"project {name}")

    def test_may_be_searched_for_with_300_characters(self, page, service):
        service.register("gpt")
        page.goto("/")
        search(page).fill("\u202e" + "<b>" * 100)
        expect(page.get_by_text("No run fits these choices.")).to_be_visible()
