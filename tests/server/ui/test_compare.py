"""Several runs over each other, in Chromium on the real service."""

import csv
import math
import re

import pytest
from playwright.sync_api import expect

from tests.server.ui.conftest import START_S, axis_of, events_of, num_coloured, opened, option_of
from tsemon.wire import Array, Frame, frames_to_body
from tsemon_server.settings import Settings

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>'
RIGHT_TO_LEFT = "\u202e" + "אימון"
LONG = "x" * 128
STEPS = range(0, 200, 2)


def similarity(num_blocks, step):
    return Array.of([0.1 + layer / 10 + step / 10_000 for layer in range(num_blocks + 1)])


class Runs:
    """Runs with known values: `slow` is deeper than `fast`, takes twice the time a step, and never says its tokens."""

    def __init__(self, service):
        self.fast = self._train(
            service, "fast", 3, 1.0, loss=lambda step: 3 - step / 100, tokens=lambda step: 1000 * step
        )
        self.slow = self._train(service, "slow", 5, 2.0, loss=lambda step: 2 - step / 200)
        self.wide = self._train(service, "wide", 3, 1.0, loss=lambda step: 3.0, tokens=lambda step: 2000 * step)
        self.broken = service.register("broken", 3)
        service.send_steps(self.broken, range(0, 20, 2), similarity=[0.1, 0.2, math.nan, 0.4], loss=1.0)
        service.send_steps(self.broken, range(20, 40, 2), similarity=[0.1, 0.2, math.nan, 0.4], loss=math.nan)
        self.hostile = [service.register(name, 2, project=name, tags=[name]) for name in (HOSTILE, RIGHT_TO_LEFT, LONG)]
        for run_id in self.hostile:
            service.send_steps(run_id, range(3), similarity=[0.1, 0.2, 0.3], loss=1.0)

    def _train(self, service, name, num_blocks, seconds, **scalars):
        run_id = service.register(name, num_blocks, project="pretrain", tags=["sweep"])
        frames = []
        for seq, step in enumerate(STEPS):
            values = {scalar: float(value(step)) for scalar, value in scalars.items()}
            layers = {"centred_token_similarity": similarity(num_blocks, step)}
            frames.append(Frame(seq, step, START_S + seconds * step, values, layers))
        service.send(run_id, *frames)
        return run_id


@pytest.fixture(scope="module")
def service(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    with server.showing(Settings(database=f"sqlite:///{folder}/tsemon.db")) as service:
        yield service


@pytest.fixture(scope="module")
def runs(service):
    return Runs(service)


def compare(page, *run_ids, **query):
    parts = [f"run={run_id}" for run_id in run_ids] + [f"{name}={value}" for name, value in query.items()]
    page.goto("about:blank")  # or another query would be a link within the page
    page.goto(f"/#/compare?{'&'.join(parts)}")
    expect(page.get_by_role("heading", name="Compare", exact=True)).to_be_visible()


def resume(service, name, attempt, step, **scalars):
    """Three more steps, in an attempt of their own, with which the run is over."""
    run_id = service.register(name, resume_step=step)
    frames = [Frame(i, step + i, START_S + step + i, scalars, {}) for i in range(3)]
    body = frames_to_body(f"writer-{attempt}", attempt, [frame.to_json() for frame in frames])
    service.request("POST", f"/api/v1/runs/{run_id}/frames", content=body).raise_for_status()
    end(service, run_id, "finished")


def end(service, run_id, state):
    service.request("PATCH", f"/api/v1/runs/{run_id}", json={"state": state}).raise_for_status()


def rows(page):
    return page.get_by_role("list", name="Runs that are compared").get_by_role("listitem")


def row(page, name):
    return rows(page).filter(has=page.get_by_role("link", name=name, exact=True))


def found(page):
    return page.get_by_role("listbox", name="Runs that fit").get_by_role("option")


def worth(page, name):
    """What the row of a run says that it is worth where one looks, and how far that is from the baseline."""
    return row(page, name).locator(".worth")


def chart(page):
    return page.get_by_role("region", name="Runs over each other").get_by_role("img")


def table(page, name):
    """What the chart of that name shows, as its CSV has it."""
    with page.expect_download() as download:
        page.get_by_role("button", name=f"{name} as CSV").click()
    lines = [line for line in download.value.path().read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def profiles(page):
    """The values of the charts of layers, by run and layer."""
    drawn = table(page, "Layers side by side")
    return {(line["run"], int(line["layer"])): float(line["centred_token_similarity"]) for line in drawn}


class TestTheChoiceOfRuns:
    def test_begins_with_the_latest_where_none_is_named(self, page, runs):
        page.goto("/#/compare")
        page.get_by_role("button", name="Compare the five latest runs").click()
        expect(rows(page)).to_have_count(5)
        assert page.url.count("run=") == 5

    def test_grows_by_a_search_with_the_keyboard(self, page, runs):
        compare(page, runs.fast)
        field = page.get_by_role("combobox", name="Add a run")
        field.fill("pretrain")
        options = found(page)
        expect(options).to_have_count(2)
        expect(options.filter(has_text="fast")).to_have_count(0)
        field.press("ArrowDown")
        expect(options.first).to_have_attribute("aria-selected", "true")
        name = options.first.locator("b").inner_text()
        field.press("Enter")
        expect(row(page, name)).to_be_visible()
        expect(chart(page)).to_have_attribute("aria-label", "loss of 2 runs by step")
        assert page.url.count("run=") == 2

    def test_says_so_where_no_run_fits_and_lets_go_with_escape(self, page, runs):
        compare(page, runs.fast)
        field = page.get_by_role("combobox", name="Add a run")
        field.fill("nothing like this")
        expect(page.get_by_text("No other run fits.")).to_be_visible()
        field.press("Escape")
        expect(page.get_by_text("No other run fits.")).to_be_hidden()

    def test_shrinks_and_hides(self, page, runs):
        compare(page, runs.fast, runs.slow, runs.wide)
        page.get_by_role("button", name="Hide slow").click()
        expect(chart(page)).to_have_attribute("aria-label", "loss of 2 runs by step")
        page.get_by_role("button", name="Remove wide").click()
        expect(rows(page)).to_have_count(2)
        expect(chart(page)).to_have_attribute("aria-label", "loss of 1 run by step")
        expect(page).to_have_url(re.compile(f"run={runs.fast}&run={runs.slow}&metric=loss&hide={runs.slow}$"))

    def test_tells_of_one_that_is_not_there_and_compares_the_others(self, browser, service, runs):
        with opened(browser, service, but="404") as page:
            compare(page, runs.fast, "nothing")
            expect(rows(page).filter(has_text="no run has the id 'nothing'")).to_be_visible()
            expect(chart(page)).to_have_attribute("aria-label", "loss of 1 run by step")
            page.get_by_role("button", name="Remove nothing").click()
            expect(rows(page)).to_have_count(1)

    def test_takes_twenty_at_most_and_says_so(self, page, service, runs):
        compare(page, *(service.register(f"one-of-many-{i}") for i in range(21)))
        expect(rows(page)).to_have_count(20)
        expect(page.get_by_text("1 more of the address are left out")).to_be_visible()
        expect(page.get_by_role("combobox", name="Add a run")).to_be_hidden()


class TestTheChart:
    def test_lays_runs_over_each_other_by_step(self, page, runs):
        compare(page, runs.fast, runs.slow)
        expect(page.get_by_role("heading", name="loss by step")).to_be_visible()
        expect(worth(page, "fast")).to_have_text("1.02")
        box = chart(page).bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
        expect(page.locator(".tip:visible")).to_contain_text(re.compile(r"^step\d+fast[\d.]+slow[\d.]+$"))
        drawn = table(page, "Comparison")
        assert {line["run"] for line in drawn} == {"fast", "slow"}
        assert {(line["run"], int(line["step"])): float(line["mean"]) for line in drawn}["fast", 100] == 2.0

    def test_takes_the_last_layer_of_each_however_deep_it_is(self, page, runs):
        compare(page, runs.fast, runs.slow, metric="centred_token_similarity")
        expect(page.get_by_role("heading", name="centred_token_similarity of the last layer by step")).to_be_visible()
        expect(worth(page, "fast")).to_have_text("0.4198")
        expect(worth(page, "slow")).to_have_text("0.6198")
        page.get_by_label("layer", exact=True).select_option("5")
        expect(page.get_by_text("fast has not recorded centred_token_similarity of layer 5")).to_be_visible()
        expect(worth(page, "slow")).to_have_text("0.6198")
        expect(page).to_have_url(re.compile("metric=centred_token_similarity&layer=5$"))

    def test_shows_how_far_runs_are_from_a_baseline(self, page, runs):
        compare(page, runs.fast, runs.slow)
        page.get_by_role("button", name="Baseline: slow").click()
        expect(page.get_by_role("heading", name="loss by step, difference to slow")).to_be_visible()
        expect(worth(page, "fast")).to_have_text("1.02+0.01")
        drawn = {(line["run"], int(line["step"])): float(line["mean"]) for line in table(page, "Comparison")}
        assert drawn["fast", 100] == pytest.approx(2.0 - 1.5)
        assert drawn["slow", 100] == 0
        expect(page.get_by_label("difference to")).to_have_value(runs.slow)

    def test_by_wall_time_puts_next_to_each_other_what_came_after_as_many_seconds(self, page, runs):
        compare(page, runs.fast, runs.slow)
        page.get_by_text("by wall time").click()
        expect(page.get_by_role("heading", name="loss by wall time")).to_be_visible()
        at = {(line["run"], float(line["time"])): int(line["step"]) for line in table(page, "Comparison")}
        assert (at["fast", 100.0], at["slow", 100.0]) == (100, 50)
        expect(page).to_have_url(re.compile("along=time$"))

    def test_reads_a_baseline_between_its_samples_and_not_beyond_its_end(self, page, runs):
        compare(page, runs.fast, runs.slow, along="time", baseline=runs.slow)
        expect(page.get_by_role("heading", name="loss by wall time, difference to slow")).to_be_visible()
        drawn = {(line["run"], float(line["time"])): line["mean"] for line in table(page, "Comparison")}
        assert float(drawn["fast", 102.0]) == pytest.approx((3 - 1.02) - (2 - 51 / 200))
        compare(page, runs.fast, runs.slow, along="time", baseline=runs.fast)
        expect(page.get_by_role("heading", name="loss by wall time, difference to fast")).to_be_visible()
        drawn = {(line["run"], float(line["time"])): line["mean"] for line in table(page, "Comparison")}
        assert drawn["slow", 196.0] != ""
        assert drawn["slow", 200.0] == ""

    def test_by_token_says_of_which_run_nobody_knows_them(self, page, runs):
        compare(page, runs.fast, runs.slow, runs.wide, along="tokens")
        expect(page.get_by_text("slow has no scalar tokens, and cannot be drawn by token")).to_be_visible()
        expect(chart(page)).to_have_attribute("aria-label", "loss of 2 runs by token")
        at = {(line["run"], float(line["tokens"])): int(line["step"]) for line in table(page, "Comparison")}
        assert (at["fast", 100_000.0], at["wide", 100_000.0]) == (100, 50)

    def test_says_what_is_not_finite_and_who_never_had_the_metric(self, page, service, runs):
        compare(page, runs.broken, runs.fast)
        expect(page.get_by_text("Not finite in places, which leaves gaps: broken.")).to_be_visible()
        expect(worth(page, "broken")).to_have_text("not finite")
        waiting = service.register("waiting")
        compare(page, waiting, runs.fast, metric="tokens")
        expect(page.get_by_text("waiting has sent no frame.")).to_be_visible()

    def test_shows_a_spike_of_one_step_and_more_of_it_where_it_is_zoomed(self, page, service, runs):
        spiky = service.register("spiky")
        frames = [Frame(step, step, START_S + step, {"loss": 9.0 if step == 650 else 1.0}, {}) for step in range(1300)]
        for begin in range(0, 1300, 500):
            service.send(spiky, *frames[begin : begin + 500])
        compare(page, spiky)
        expect(chart(page)).to_be_visible()
        whole = table(page, "Comparison")
        assert len(whole) <= 600
        assert max(float(line["max"]) for line in whole) == 9.0
        with page.expect_response(re.compile(r"compare.*from_step=")):
            compare(page, spiky, **{"from": 600, "to": 700})
        expect(page.get_by_role("button", name="Whole range")).to_be_visible()
        zoomed = {int(line["step"]): float(line["mean"]) for line in table(page, "Comparison")}
        assert (zoomed[649], zoomed[650], zoomed[651]) == (1.0, 9.0, 1.0)
        page.get_by_role("button", name="Whole range").click()
        expect(page.get_by_role("button", name="Whole range")).to_be_hidden()

    def test_is_whole_on_another_axis_also_where_it_was_zoomed(self, page, runs):
        compare(page, runs.fast, runs.wide, **{"from": 50, "to": 100})
        expect(page.get_by_role("button", name="Whole range")).to_be_visible()
        assert axis_of(chart(page)) == [50, 100]
        page.get_by_text("by token").click()
        expect(page.get_by_role("heading", name="loss by token")).to_be_visible()
        assert axis_of(chart(page)) == [0, 2000 * STEPS[-1]]

    def test_goes_on_while_it_is_looked_at(self, page, service, runs):
        live = service.register("live")
        service.send_steps(live, range(3), loss=3.0)
        compare(page, live, runs.fast)
        expect(worth(page, "live")).to_have_text("3")
        hide = page.get_by_role("button", name="Hide live")
        hide.focus()
        expect(page.locator("#pulse")).to_have_attribute("title", re.compile("tells what changes"))
        service.send_steps(live, range(3, 9), loss=2.5)
        # The page rests four times as long as a round took, which is long on a busy machine. By itself it asks every 30 s.
        expect(worth(page, "live")).to_have_text("2.5", timeout=25_000)
        expect(hide).to_be_focused()
        page.keyboard.press("Enter")
        expect(hide).to_have_attribute("aria-pressed", "true")
        expect(hide).to_be_focused()

    def test_follows_a_run_that_was_over_and_goes_on_also_where_nobody_tells(self, browser, service, runs):
        over = service.register("over")
        service.send_steps(over, range(3), loss=3.0)
        end(service, over, "finished")
        with opened(browser, service, but="404") as page:
            page.route("**/api/v1/events*", lambda route: route.fulfill(status=404))
            page.clock.install()
            compare(page, over)
            expect(worth(page, "over")).to_have_text("3")
            resume(service, "over", 2, 3, loss=2.5)
            page.clock.fast_forward(31_000)
            expect(worth(page, "over")).to_have_text("2.5")

    def test_misses_nothing_that_it_is_told_while_it_asks(self, page, service, runs):
        over = service.register("told while asking")
        service.send_steps(over, range(3), loss=3.0)
        end(service, over, "finished")
        with events_of(page) as await_event:
            compare(page, over)
            expect(row(page, "told while asking")).to_contain_text("finished")
            expect(page.locator("#pulse")).to_have_attribute("title", re.compile("tells what changes"))
            held = []

            def hold(route):
                """Answers with what was, after the page was told that it is so no more."""
                if held:
                    route.continue_()
                    return
                held.append(route)
                end(service, over, "finished")
                before = route.fetch()
                end(service, over, "failed")
                await_event("run", run_id=over, state="failed")
                route.fulfill(response=before)

            page.route(f"**/api/v1/runs/{over}", hold)
            service.register("told while asking", resume_step=3)
            # The page rests four times as long as a round took.
            expect(row(page, "told while asking")).to_contain_text("failed", timeout=25_000)


class TestTheLayersSideBySide:
    def test_are_those_of_the_latest_frames_and_of_the_step_that_is_picked(self, page, runs):
        compare(page, runs.fast, runs.slow)
        title = page.get_by_role("heading", name=re.compile("^centred_token_similarity by layer"))
        expect(title).to_have_text("centred_token_similarity by layer, at the latest step of each run")
        expect(page.get_by_role("img", name="centred_token_similarity by layer of 2 runs")).to_be_visible()
        latest = {
            (line["run"], int(line["layer"])): float(line["centred_token_similarity"])
            for line in table(page, "Layers side by side")
        }
        assert latest["slow", 5] == pytest.approx(0.6198)
        assert len(latest) == 4 + 6
        box = chart(page).bounding_box()
        page.mouse.click(box["x"] + 58, box["y"] + 100)
        expect(title).to_have_text(re.compile(r"at step \d$"))
        expect(page).to_have_url(re.compile(r"step=\d$"))
        first = {
            (line["run"], int(line["layer"])): float(line["centred_token_similarity"])
            for line in table(page, "Layers side by side")
        }
        assert first["slow", 5] == pytest.approx(0.6, abs=1e-3)
        page.get_by_role("button", name="Latest of each").click()
        expect(title).to_have_text("centred_token_similarity by layer, at the latest step of each run")

    def test_are_each_at_its_own_step_where_time_is_picked(self, page, runs):
        compare(page, runs.fast, runs.slow, along="time", at=100)
        expect(page.get_by_role("heading", name="centred_token_similarity by layer, at 1 min 40 s")).to_be_visible()
        drawn = table(page, "Layers side by side")
        assert {(line["run"], line["at"]) for line in drawn} == {("fast", "step 100"), ("slow", "step 50")}

    def test_are_those_of_a_frame_that_came_nearer_since(self, page, service, runs):
        live = service.register("nearer")
        service.send_steps(live, range(5), loss=3.0)
        compare(page, live, runs.fast, step=5)
        expect(worth(page, "nearer")).to_have_text("–")
        assert {line["run"]: line["at"] for line in table(page, "Layers side by side")}["nearer"] == "step 4"
        service.send_steps(live, range(5, 6), loss=2.5)
        expect(worth(page, "nearer")).to_have_text("2.5", timeout=30_000)
        assert {line["run"]: line["at"] for line in table(page, "Layers side by side")}["nearer"] == "step 5"

    def test_of_a_run_that_has_not_come_so_far_are_not_made_up(self, page, runs):
        compare(page, runs.broken, runs.fast, step=150)
        expect(page.get_by_role("img", name="centred_token_similarity by layer of 2 runs")).to_be_visible()
        assert {line["run"] for line in table(page, "Layers side by side")} == {"fast"}

    def test_have_no_value_where_it_is_not_finite(self, page, runs):
        compare(page, runs.broken)
        expect(page.get_by_role("img", name="centred_token_similarity by layer of 1 run")).to_be_visible()
        drawn = [line["centred_token_similarity"] for line in table(page, "Layers side by side")]
        assert (drawn[0][:3], drawn[2]) == ("0.1", "")

    def test_say_in_a_line_who_does_not_measure_them_and_who_has_nothing_finite(self, page, service, runs):
        lost, mute, silent = (service.register(name, 3) for name in ("lost", "mute", "silent"))
        service.send_steps(lost, range(3), similarity=[math.nan] * 4, loss=1.0)
        for run_id in (mute, silent):
            service.send(run_id, Frame(0, 0, START_S, {"loss": 1.0}, {}))
        compare(page, runs.fast, lost, mute, silent)
        note = page.get_by_role("region", name="Layers side by side").locator(".note")
        told = note.get_by_text("mute, silent do not measure it.")
        expect(told).to_be_visible()
        expect(note.get_by_text("No value is finite there, of any layer: lost.")).to_be_visible()
        assert told.bounding_box()["height"] < 30, "one line"

    def test_name_their_axis(self, page, runs):
        compare(page, runs.fast, runs.slow)
        drawn = page.get_by_role("img", name="centred_token_similarity by layer of 2 runs")
        expect(drawn).to_be_visible()
        assert option_of(drawn, "xAxis", "name") == ["layer", "layer"]

    def test_can_be_moved_by_the_keyboard(self, page, runs):
        compare(page, runs.fast, runs.slow)
        page.get_by_label("Place of the layer profiles").press("Home")
        expect(page.get_by_role("heading", name="centred_token_similarity by layer, at step 0")).to_be_visible()


class TestTakingAway:
    @pytest.mark.parametrize("chart", ["Comparison", "Layers side by side"])
    def test_gives_a_picture_of_what_is_shown(self, page, runs, chart):
        compare(page, runs.fast, runs.slow)
        expect(page.get_by_role("img", name="centred_token_similarity by layer of 2 runs")).to_be_visible()
        with page.expect_download() as given:
            page.get_by_role("button", name=f"{chart} as PNG").click()
        assert given.value.suggested_filename.startswith("fast-and-1-more_")
        assert num_coloured(given.value) > 1000, "something is drawn"


class TestTheAddress:
    def test_holds_every_choice(self, page, runs):
        ids = runs.fast, runs.slow
        query = {
            "metric": "centred_token_similarity",
            "layer": 1,
            "along": "time",
            "baseline": runs.fast,
            "at": 60,
            "log": 1,
        }
        compare(page, *ids, **query, hide=runs.slow)
        expect(page.get_by_label("metric", exact=True)).to_have_value("layer centred_token_similarity")
        expect(page.get_by_label("layer", exact=True)).to_have_value("1")
        expect(page.get_by_role("radio", name="by wall time")).to_be_checked()
        expect(page.get_by_label("difference to")).to_have_value(runs.fast)
        expect(page.get_by_label("logarithmic")).to_be_checked()
        expect(page.get_by_role("button", name="Hide slow")).to_have_attribute("aria-pressed", "true")
        expect(page.get_by_role("heading", name="centred_token_similarity by layer, at 1 min")).to_be_visible()
        before = page.url
        page.get_by_label("logarithmic").uncheck()
        page.get_by_label("logarithmic").check()
        assert sorted(page.url.split("?")[1].split("&")) == sorted(before.split("?")[1].split("&"))

    def test_of_another_choice_is_followed_without_a_reload(self, page, runs):
        compare(page, runs.fast, runs.slow)
        page.evaluate(f"location.hash = '#/compare?run={runs.wide}&run={runs.slow}&along=time'")
        expect(row(page, "wide")).to_be_visible()
        expect(row(page, "fast")).to_have_count(0)
        expect(page.get_by_role("radio", name="by wall time")).to_be_checked()

    def test_that_makes_no_sense_shows_what_it_can(self, page, runs):
        compare(page, runs.fast, metric="nothing", layer="x", along="moon", step="soon", **{"from": 9, "to": 2})
        expect(page.get_by_text("fast has not recorded nothing")).to_be_visible()
        page.get_by_label("metric", exact=True).select_option("scalar loss")
        expect(worth(page, "fast")).to_have_text("1.02")
        for step in ("1e99", "99999999999999999999"):
            compare(page, runs.fast, step=step)
            expect(page.get_by_role("heading", name="at the latest step of each run")).to_be_visible()
        compare(page, runs.fast, metric="constructor", layer=0)
        expect(page.get_by_text("fast has not recorded constructor of layer 0")).to_be_visible()


class TestWhatAClientSends:
    @pytest.mark.parametrize("width", [1280, 400])
    def test_stays_text_and_within_the_window(self, page, runs, width):
        page.set_viewport_size({"width": width, "height": 900})
        compare(page, *runs.hostile, runs.fast, baseline=runs.hostile[0], along="tokens")
        for name in (HOSTILE, RIGHT_TO_LEFT, LONG):
            expect(row(page, name)).to_be_visible()
        field = page.get_by_role("combobox", name="Add a run")
        field.fill("pretrain")
        expect(found(page).first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "Compare · tsemon"

    def test_turns_no_text_round(self, page, runs):
        name = RIGHT_TO_LEFT.replace("\u202e", "U+202E")
        compare(page, *runs.hostile, baseline=runs.hostile[1])
        small = page.get_by_role("region", name="Layers side by side").get_by_role("img")
        expect(small).to_be_visible()
        assert option_of(small, "title", "text") == [HOSTILE, name, LONG]
        assert page.get_by_label("difference to").locator("option").all_inner_texts() == ["none", HOSTILE, name, LONG]
        turns = page.locator(".turn")
        expect(page.get_by_role("heading", name="difference to").locator(turns)).to_have_attribute(
            "data-code", "U+202E"
        )
        chart(page).hover()
        expect(page.locator(".tip:visible").locator(turns)).to_have_attribute("data-code", "U+202E")
        small.hover()
        expect(page.locator(".tip:visible").locator(turns)).to_have_attribute("data-code", "U+202E")
