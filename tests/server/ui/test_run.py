"""One run as people see it: Chromium on the real service, which all tests of this file share."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from tsemon.wire import MAX_BLOCK_NAME, MAX_REASON, Array, Frame, frames_to_body
from tsemon_server.settings import Settings
from tsemon_server.store import Store

from .conftest import START_S, axis_of, num_coloured, opened, option_of

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>'
RIGHT_TO_LEFT = "\u202eتدريب\u2066 abc"
CHARTS = "Loss and layers by step"
LEFT = 54
PANELS = ["alerts", "loss", "curves", "map", "history"]
BLOCKS, HEADS = 4, 3
MAX_NAME = 128
CURVE_COLUMNS = ["curve", "step", "min", "mean", "max", "nonfinite"]


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('runs')}/tsemon.db"


@pytest.fixture(scope="module")
def service(server, database):
    with server.showing(Settings(database=database)) as service:
        yield service


@pytest.fixture
def page(browser, service):
    with opened(browser, service) as page:
        page.set_viewport_size({"width": 1280, "height": 1500})  # all charts, so that the mouse reaches them
        yield page


@pytest.fixture
def name(request):
    """One for each test: two runs of the same name are one."""
    return request.node.name


def open_run(page, run_id, query=""):
    page.goto(f"/#/run/{run_id}{query}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    wait_for_charts(page)


def wait_for_charts(page):
    """Until they show what was chosen."""
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def charts(page):
    return page.get_by_role("application", name=CHARTS)


def plot(page, panel):
    """The plot of a panel of the timeline, as x, y, width and height in the page."""
    box = charts(page).bounding_box()
    head = page.locator(".panel-head").nth(PANELS.index(panel)).bounding_box()
    boxes = [one.bounding_box() for one in page.locator(".panel-head:visible").all()]
    nexts = [one["y"] for one in boxes if one["y"] > head["y"]]
    bottom = min(nexts) - 2 if nexts else box["y"] + box["height"] - 34
    top = head["y"] + 30
    right = option_of(charts(page), "grid", "right")[0]
    return box["x"] + LEFT, top, box["width"] - LEFT - right, bottom - 22 - top


def point_at(page, panel, x_ratio, y_ratio):
    """Move the mouse there; y counts from the top."""
    left, top, width, height = plot(page, panel)
    x, y = left + x_ratio * width, top + y_ratio * height
    page.mouse.move(x, y)
    return x, y


def click_at(page, panel, x_ratio, y_ratio):
    page.mouse.click(*point_at(page, panel, x_ratio, y_ratio))


def tooltip(page):
    return page.locator(".tip:visible")


def words_of(page):
    """What is written beside or in the bars of alerts."""
    return charts(page).evaluate(
        """async (element) => {
            const echarts = await import("/ui/vendor/echarts-6.1.0.esm.min.mjs");
            const shown = echarts.getInstanceByDom(element).getZr().storage.getDisplayList(true);
            const words = shown.filter((one) => one.type === "tspan" && one.style.font.startsWith("600 "));
            return words.map((one) => one.style.text);
        }"""
    )


def card_of(page, rule):
    return page.get_by_role("article", name=rule)


def fact(page, name):
    return page.locator(".facts div", has=page.get_by_text(name, exact=True)).locator("dd")


def pixels(page, panel):
    """How often each colour is in the plot of a panel."""
    wait_for_charts(page)
    left, top, width, height = plot(page, panel)
    clip = {"x": left, "y": top, "width": width, "height": height}
    image = Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")
    return Counter(map(tuple, np.asarray(image).reshape(-1, 3).tolist()))


def is_near(colour, other, by=24):
    return all(abs(one - two) <= by for one, two in zip(colour, other, strict=True))


def rich_frames(steps, seq0=0, **scalars):
    """Frames with norms, heads and what tsemon itself cost. Of layer i and head j the value is (i + j / 10) / 10."""
    heads = [(i + j / 10) / 10 for i in range(BLOCKS) for j in range(HEADS)]
    layers = {
        "effective_rank": Array.of([0.1, 0.2, 0.3, 0.4, 0.5]),
        "attention_entropy": Array.of([i / 10 for i in range(BLOCKS)]),
        "update_alignment": Array.of([-0.9, -0.1, 0.1, 0.9]),
    }
    known = {"loss": 2.0, "total_param_norm": 80.0, "total_grad_norm": 0.5, "overhead_ratio": 0.0083}
    return [
        Frame(
            seq0 + n,
            step,
            START_S + step,
            {**known, "learning_rate": 1e-3 * (1 + step), **scalars},
            layers,
            {"attention_entropy": Array.of(heads, (BLOCKS, HEADS))},
            {
                "saturation": "the model gives a tuple",
                "omega": "attention is fused",
                "spectral_gap": "attention is fused",
            },
        )
        for n, step in enumerate(steps)
    ]


@pytest.fixture
def rich(service, name):
    run_id = service.register(name)
    service.send(run_id, *rich_frames(range(20)))
    return run_id


class TestARun:
    def test_without_frames_says_that_it_waits(self, page, service, name):
        open_run(page, service.register(name))
        expect(page.get_by_text("no frame has come yet")).to_be_visible()

    @pytest.mark.parametrize("state", ["finished", "failed"])
    def test_that_ended_without_frames_says_why(self, page, service, name, state):
        run_id = service.register(name)
        service.request("PATCH", f"/api/v1/runs/{run_id}", json={"state": state}).raise_for_status()
        open_run(page, run_id)
        expect(page.get_by_text("This run ended without a frame: monitor.step() was never called")).to_be_visible()
        expect(page.get_by_text(re.compile("\\byet\\b"))).to_have_count(0)

    def test_asks_for_what_it_shows_while_the_chart_library_is_on_its_way(self, page, rich):
        held = []
        page.route(re.compile("vendor/echarts"), lambda route: held.append(route))
        with page.expect_response(re.compile("/heatmap")):
            page.goto(f"/#/run/{rich}")
        assert held
        for route in held:
            route.continue_()
        wait_for_charts(page)
        expect(charts(page)).to_be_visible()

    def test_with_one_frame_shows_it(self, page, service, name):
        run_id = service.register(name)
        service.send_steps(run_id, [0], loss=3.25)
        open_run(page, run_id)
        expect(fact(page, "loss")).to_have_text("3.25")
        expect(page.get_by_role("heading", name="centred_token_similarity at step 0 (latest)")).to_be_visible()
        point_at(page, "map", 0.5, 0.1)
        expect(tooltip(page)).to_have_text("step0layer4 · h.3centred_token_similarity0.5")

    def test_reads_entry_zero_as_the_input_of_the_first_block(self, page, service, name):
        run_id = service.register(name)
        service.send_steps(run_id, range(10))
        open_run(page, run_id)
        point_at(page, "map", 0.01, 0.95)
        expect(tooltip(page)).to_have_text("step0layer0 · input of h.0centred_token_similarity0.1")

    def test_tells_what_is_not_finite_from_what_is_small(self, page, service, name):
        run_id = service.register(name)
        service.send_steps(run_id, range(10), loss=1.0)
        service.send_steps(
            run_id, range(10, 20), similarity=[0.0, math.nan, math.nan, math.inf, math.nan], loss=math.nan
        )
        open_run(page, run_id)
        expect(fact(page, "loss")).to_have_text("not finite")
        expect(page.locator(".legend")).to_contain_text("not finite")
        point_at(page, "map", 0.92, 0.1)
        expect(tooltip(page)).to_have_text(
            "step18layer4 · h.3centred_token_similaritynot finitefiring, from step 10loss-not-finite"
        )
        point_at(page, "map", 0.92, 0.95)
        expect(tooltip(page)).to_have_text(
            "step18layer0 · input of h.0centred_token_similarity0firing, from step 10loss-not-finite"
        )

    def test_tells_of_a_single_value_that_is_not_finite_among_many(self, page, service, name):
        run_id = service.register(name)
        service.send_steps(run_id, range(700), loss=1.0)
        service.send_steps(run_id, [700], similarity=[0.1, 0.2, math.nan, 0.4, 0.5])
        service.send_steps(run_id, range(701, 1000), loss=1.0)
        open_run(page, run_id)
        expect(page.locator(".legend")).to_contain_text("not finite")
        point_at(page, "map", 0.7015, 0.5)
        expect(tooltip(page)).to_contain_text("not finite1 of them")

    def test_offers_the_metrics_that_were_recorded(self, page, service):
        run_id = service.replay("h_vit24_pre-s0")
        open_run(page, run_id)
        page.get_by_label("metric").select_option("token_diversity")
        expect(page.locator(".legend")).to_contain_text("logarithmic")
        expect(page).to_have_url(re.compile("metric=token_diversity"))
        page.get_by_label("logarithmic").uncheck()
        expect(page.locator(".legend")).not_to_contain_text("logarithmic")
        expect(page).to_have_url(re.compile("log=0"))

    def test_says_why_a_metric_is_not_measured(self, page, rich):
        open_run(page, rich, "?metric=saturation")
        expect(page.get_by_text("This run does not measure saturation: the model gives a tuple.")).to_be_visible()
        page.get_by_text("Not measured (3)").click()
        expect(page.get_by_role("term").filter(has_text="omega, spectral_gap")).to_be_visible()
        expect(page.get_by_role("definition").filter(has_text="attention is fused")).to_be_visible()

    def test_says_so_where_nobody_knows_why_a_metric_is_not_measured(self, page, service, name):
        run_id = service.register(name)
        service.send_steps(run_id, range(3), loss=1.0)
        open_run(page, run_id, "?metric=attention_entropy")
        expect(page.get_by_text("This run does not measure attention_entropy. Choose one")).to_be_visible()

    @pytest.mark.parametrize("metric", ["constructor", "__proto__"])
    def test_measures_nothing_that_only_javascript_has_a_name_for(self, page, rich, metric):
        open_run(page, rich, f"?metric={metric}&layer=1")
        expect(page.get_by_text(f"This run does not measure {metric}. Choose one")).to_be_visible()

    def test_shows_a_number_that_has_no_layers_as_a_curve(self, page, rich):
        for name in ("loss", "learning_rate"):
            open_run(page, rich, f"?metric={name}")
            expect(page.get_by_label("metric", exact=True)).to_have_value("effective_rank")
            expect(page.get_by_text("does not measure")).to_have_count(0)
        expect(page.get_by_label("Curve shown")).to_have_value("learning_rate")

    def test_of_checkpoints_begins_with_the_norms(self, page, service, name):
        run_id = service.register(name)
        layers = {metric: Array.of([0.5] * BLOCKS) for metric in ("checkpoint_alignment", "param_norm")}
        service.send(run_id, Frame(0, 0, START_S, {}, layers))
        open_run(page, run_id)
        expect(page.get_by_label("metric", exact=True)).to_have_value("param_norm")

    def test_without_a_loss_is_advised_only_while_it_trains(self, page, service, name):
        run_id = service.register(name)
        service.send_steps(run_id, range(3))
        open_run(page, run_id)
        expect(page.get_by_text("This run has no loss. Pass it to monitor.step(loss=...).")).to_be_visible()
        service.request("PATCH", f"/api/v1/runs/{run_id}", json={"state": "finished"}).raise_for_status()
        expect(page.get_by_text("This run has no loss.", exact=True)).to_be_visible()

    def test_says_of_all_that_has_no_sample_in_the_steps_asked_for(self, page, rich):
        open_run(page, rich, "?from=1000&to=2000&curve=learning_rate")
        expect(page.get_by_text("There is no sample of loss, learning_rate, effective_rank in these")).to_be_visible()
        page.get_by_role("button", name="All steps").click()
        expect(page.get_by_text("There is no sample of")).to_have_count(0)

    def test_says_what_tsemon_itself_cost(self, page, rich):
        open_run(page, rich)
        expect(fact(page, "own cost")).to_have_text("0.83 %of the training's time")

    def test_shows_its_norms_below_the_loss_or_another_curve(self, page, rich):
        open_run(page, rich)
        point_at(page, "curves", 0.5, 0.5)
        expect(tooltip(page)).to_contain_text("total_param_norm80total_grad_norm0.5")
        page.get_by_label("Curve shown").select_option("learning_rate")
        expect(page).to_have_url(re.compile("curve=learning_rate"))
        point_at(page, "curves", 0.01, 0.5)
        expect(tooltip(page)).to_contain_text("learning_rate0.001")
        page.get_by_label("Curve shown").select_option(label="norms")
        expect(tooltip(page)).to_contain_text("total_param_norm80total_grad_norm0.5")

    def test_without_norms_shows_any_other_number_below_the_loss(self, page, service, name):
        """As an import does: its steps and its names are another tool's."""
        run_id = service.register(name)
        service.send_steps(run_id, range(3), loss=2.0, acc=0.75, lr=0.5)
        open_run(page, run_id)
        point_at(page, "curves", 0.5, 0.5)
        expect(tooltip(page)).to_contain_text("acc0.75")
        expect(page.get_by_label("Curve shown")).to_have_value("acc")
        page.get_by_label("Curve shown").select_option("lr")
        expect(page.locator(".panel-head").nth(PANELS.index("curves")).get_by_role("heading")).to_have_text("lr")
        point_at(page, "curves", 0.9, 0.5)
        expect(tooltip(page)).to_contain_text("lr0.5")

    def test_says_where_curves_are_on_a_logarithmic_axis_and_keeps_the_axis_clear_of_it(self, page, rich):
        open_run(page, rich)
        head = page.locator(".panel-head").nth(PANELS.index("curves"))
        expect(head.get_by_role("heading")).to_have_text("parametersgradientlog")
        text = head.get_by_text("parameters").bounding_box()
        _, top, _, _ = plot(page, "curves")
        assert text["y"] + text["height"] < top - 6, "the label of the highest tick reaches so far above the plot"
        page.get_by_label("Curve shown").select_option("learning_rate")
        expect(head.get_by_role("heading")).to_have_text("learning_rate")


class TestTheColours:
    def test_have_two_sides_where_the_measure_has(self, page, rich):
        open_run(page, rich, "?metric=update_alignment")
        expect(page.locator(".legend")).to_have_text("-11the measure's whole range, pale is zero")
        expect(page.get_by_label("logarithmic")).to_be_hidden()
        most = [colour for colour, _ in pixels(page, "map").most_common(4)]
        assert sum(red > blue + 20 for red, _, blue in most) == 2, f"two layers are above zero: {most}"
        assert sum(blue > red + 20 for red, _, blue in most) == 2, f"two are below: {most}"

    def test_can_be_fitted_to_the_data_and_keep_zero_in_the_middle(self, page, rich):
        open_run(page, rich, "?metric=update_alignment")
        page.get_by_label("fit colours to the data").check()
        expect(page.locator(".legend")).to_have_text("-0.90.9the range of these steps, pale is zero")
        expect(page).to_have_url(re.compile("fit=1"))

    def test_are_told_apart_by_their_lightness(self, page):
        page.goto("/ui/catalogue.json")  # a document of the same origin, without scripts of its own
        lightness = page.evaluate("""async () => {
            const { scaleOf } = await import("/ui/base/colour.js");
            const light = (colour) => {
                const [r, g, b] = colour.match(/\\d+/g).map((channel) => (channel / 255) ** 2.2);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const of = (metric, values) => {
                const scale = scaleOf(metric, values);
                return values.map((value) => light(scale.colour(value)));
            };
            const steps = (low) => Array.from({ length: 41 }, (_, i) => low + (i / 40) * (1 - low));
            return { plain: of({ low: 0, high: 1 }, steps(0)), sided: of({ low: -1, high: 1 }, steps(-1)) };
        }""")
        assert (np.diff(lightness["plain"]) > 0).all()
        assert (np.diff(lightness["sided"][:21]) > 0).all()
        assert (np.diff(lightness["sided"][20:]) < 0).all()

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_of_the_norms_stand_out_from_the_card(self, page, scheme):
        page.emulate_media(color_scheme=scheme)
        page.goto("/")
        contrasts = page.evaluate("""async () => {
            const { COLOURS } = await import("/ui/base/series.js");
            const light = (hex) => {
                const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
                    .map((channel) => channel <= 0.03928 ? channel / 12.92 : ((channel + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const card = light(getComputedStyle(document.documentElement).getPropertyValue("--card").trim());
            const pairs = COLOURS.slice(0, 2).map((colour) => [card, light(colour)].sort((a, b) => b - a));
            return pairs.map(([bright, dim]) => (bright + 0.05) / (dim + 0.05));
        }""")
        assert min(contrasts) > 3.5, "WCAG asks for 3; a line of one and a half pixels needs some more"


class TestTheCursors:
    def test_a_cell_that_is_clicked_shows_its_step_its_layer_and_its_heads(self, page, rich):
        open_run(page, rich, "?metric=attention_entropy")
        click_at(page, "map", 0.26, 0.3)
        expect(page.get_by_role("heading", name="attention_entropy at step 5")).to_be_visible()
        expect(page.get_by_role("heading", name="layer 2 · h.2")).to_be_visible()
        expect(page.get_by_role("heading", name="heads of layer 2 at step 5")).to_be_visible()
        expect(page).to_have_url(re.compile("step=5&layer=2$"))
        heads = page.get_by_role("img", name="Value by head").bounding_box()
        page.mouse.click(heads["x"] + heads["width"] * 0.55, heads["y"] + heads["height"] / 2)
        expect(page.get_by_role("heading", name="layer 2 · h.2, head 1")).to_be_visible()
        point_at(page, "history", 0.5, 0.5)
        expect(tooltip(page)).to_contain_text("attention_entropy0.21")

    def test_say_why_there_are_no_heads_at_a_sample_without_the_metric(self, page, service, rich):
        service.send_steps(rich, [20], loss=2.0)
        open_run(page, rich, "?metric=attention_entropy&layer=2")
        expect(page.get_by_role("heading", name="heads of layer 2 at step 20")).to_be_visible()
        expect(page.get_by_text("That sample is without attention_entropy")).to_be_visible()
        expect(page.get_by_role("img", name="Value by head")).to_be_hidden()
        click_at(page, "map", 0.26, 0.3)
        expect(page.get_by_role("heading", name="heads of layer 2 at step 5")).to_be_visible()
        expect(page.get_by_role("img", name="Value by head")).to_be_visible()
        expect(page.get_by_text("That sample is without attention_entropy")).to_be_hidden()

    def test_a_step_that_is_clicked_in_the_loss_leaves_the_layer(self, page, rich):
        open_run(page, rich, "?layer=3")
        click_at(page, "loss", 0.5, 0.5)
        expect(page).to_have_url(re.compile("step=10&layer=3$|step=9&layer=3$"))
        expect(page.get_by_label("layer", exact=True)).to_have_value("3")

    def test_a_layer_can_be_picked_from_its_list_and_from_its_profile(self, page, rich):
        open_run(page, rich)
        page.get_by_label("layer", exact=True).select_option("1")
        expect(page.get_by_role("heading", name="layer 1 · h.0")).to_be_visible()
        profile = page.get_by_role("img", name="Value by layer").bounding_box()
        page.mouse.click(profile["x"] + profile["width"] - 16, profile["y"] + 60)
        expect(page.get_by_role("heading", name="layer 4 · h.3")).to_be_visible()

    def test_the_pointer_is_in_all_charts_at_once(self, page, rich):
        open_run(page, rich)
        page.mouse.move(5, 5)
        before = pixels(page, "map")
        point_at(page, "loss", 0.4, 0.5)
        expect(tooltip(page)).to_be_visible()
        assert pixels(page, "map") != before

    def test_are_in_the_address(self, page, rich):
        open_run(page, rich, "?metric=attention_entropy&step=7&layer=1&head=2&of=farthest&curve=learning_rate")
        expect(page.get_by_role("heading", name="attention_entropy at step 7")).to_be_visible()
        expect(page.get_by_role("heading", name="layer 1 · h.1, head 2")).to_be_visible()
        expect(page.get_by_label("Curve shown")).to_have_value("learning_rate")

    def test_follow_the_keys(self, page, rich):
        open_run(page, rich)
        charts(page).focus()
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("heading", name="effective_rank at step 18")).to_be_visible()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowUp")
        expect(page.get_by_role("status").filter(has_text="Layer")).to_have_text(
            "Layer 1 · h.0, at step 18: effective_rank 0.2"
        )
        page.keyboard.press("Home")
        expect(page.get_by_role("heading", name="effective_rank at step 0")).to_be_visible()
        page.keyboard.press("+")
        expect(page.get_by_role("button", name="All steps")).to_be_visible()
        page.keyboard.press("-")
        expect(page.get_by_role("button", name="All steps")).to_be_hidden()
        page.keyboard.press("Escape")
        expect(page.get_by_role("heading", name="effective_rank at step 19 (latest)")).to_be_visible()
        expect(page.get_by_label("layer", exact=True)).to_have_value("")

    def test_the_slider_chooses_the_step(self, page, rich):
        open_run(page, rich)
        page.get_by_label("Step of the layer profile").press("ArrowLeft")
        expect(page.get_by_role("heading", name="effective_rank at step 18")).to_be_visible()


class TestASpikeOfOneStep:
    NUM_STEPS, AT, LAYER = 20_000, 12_345, 2
    YELLOW = 253, 231, 37

    @pytest.fixture(scope="class")
    @classmethod
    def spiked(cls, service, database):
        """One value of 0.999 in one layer among 0.05 to 0.15, stored as a long run is."""
        run_id = service.register("spiked")
        values = np.random.default_rng(0).uniform(0.05, 0.15, (cls.NUM_STEPS, BLOCKS + 1))
        values[cls.AT, cls.LAYER] = 0.999
        frames = [
            Frame(step, step, START_S + step, {"loss": 1.0}, {"effective_rank": Array.of(row)})
            for step, row in enumerate(values.tolist())
        ]
        store = Store(database)
        with store.write() as writer:
            writer.frames.add(run_id, 1, "writer", frames)
        store.settle()
        store.close()
        return run_id

    def test_is_seen_at_all_zooms(self, page, spiked):
        open_run(page, spiked, f"?step={self.AT}")
        seen = []
        for _ in range(12):
            page.mouse.move(5, 5)
            found = pixels(page, "map")
            columns = page.get_by_label("Step of the layer profile").get_attribute("max")
            seen.append((int(columns) + 1, sum(n for colour, n in found.items() if is_near(colour, self.YELLOW))))
            if page.get_by_role("heading", name=f"effective_rank at step {self.AT:,}").is_visible():
                break
            with page.expect_response(re.compile("heatmap")):
                page.get_by_role("button", name="Zoom in").click()
        assert len(seen) > 4, "the first columns stand for many steps, the last for one"
        assert all(num > 20 for _, num in seen), f"columns, pixels of the spike: {seen}"

    def test_is_marked_and_told(self, page, spiked):
        open_run(page, spiked)
        expect(page.locator(".legend")).to_contain_text("a value far from its column's mean")
        point_at(page, "map", self.AT / self.NUM_STEPS, 0.5)
        expect(tooltip(page)).to_contain_text("farthest from this mean0.999")

    def test_is_in_the_history_of_its_layer(self, page, spiked):
        open_run(page, spiked, f"?layer={self.LAYER}")
        told = []
        for pixels_off in range(-2, 3):  # a bucket is about a pixel wide
            point_at(page, "history", self.AT / self.NUM_STEPS + pixels_off / 800, 0.5)
            told.append(tooltip(page).inner_text())
        assert any("0.999" in text for text in told), told

    def test_fills_its_cell_where_that_is_asked_for(self, page, spiked):
        open_run(page, spiked)
        before = sum(n for colour, n in pixels(page, "map").items() if is_near(colour, self.YELLOW))
        page.get_by_label("many steps show").select_option("farthest")
        expect(page).to_have_url(re.compile("of=farthest"))
        after = sum(n for colour, n in pixels(page, "map").items() if is_near(colour, self.YELLOW))
        assert after > before > 0

    def test_is_found_by_looking_closer_at_its_column(self, page, spiked):
        open_run(page, spiked)
        page.mouse.dblclick(*point_at(page, "map", self.AT / self.NUM_STEPS, 0.5))
        expect(page).to_have_url(re.compile("from=.*to="))
        first, last = map(int, re.search(r"from=(\d+)&to=(\d+)", page.url).groups())
        assert first <= self.AT <= last < first + 1000
        page.mouse.move(5, 5)  # the tooltip may be over it
        assert sum(n for colour, n in pixels(page, "map").items() if is_near(colour, self.YELLOW)) > 20
        page.get_by_role("button", name="All steps").click()
        expect(page.get_by_role("button", name="All steps")).to_be_hidden()
        expect(page).not_to_have_url(re.compile("from="))


class TestZooming:
    def test_by_the_handle_fetches_finer_steps(self, page, service, name):
        run_id = service.register(name)
        service.send_steps(run_id, range(1000), loss=1.0)
        open_run(page, run_id)
        expect(page.get_by_role("heading", name="centred_token_similarity around step")).to_be_visible()
        box = charts(page).bounding_box()
        _, right = option_of(charts(page), "dataZoom", "right")
        handle = box["x"] + box["width"] - right, box["y"] + box["height"] - 18
        page.mouse.move(*handle)
        page.mouse.down()
        page.mouse.move(box["x"] + 200, handle[1], steps=5)
        with page.expect_response(re.compile(r"heatmap.*to_step=\d+")) as answer:
            page.mouse.up()
        expect(page.get_by_role("heading", name=re.compile("centred_token_similarity at step"))).to_be_visible()
        columns = answer.value.json()["step"]
        assert columns == list(range(len(columns)))
        assert 100 < len(columns) < 256
        page.get_by_role("button", name="All steps").click()
        expect(page.get_by_role("button", name="All steps")).to_be_hidden()

    def test_is_given_up_where_the_address_has_none(self, page, rich):
        open_run(page, rich, "?from=5&to=9")
        assert axis_of(charts(page)) == [5, 9]
        page.evaluate("location.hash = location.hash.split('?')[0]")
        expect(page.get_by_role("button", name="All steps")).to_be_hidden()
        wait_for_charts(page)
        assert axis_of(charts(page)) == [-0.5, 19.5]


class TestARunThatGoesOn:
    def test_is_followed_without_a_reload(self, page, service, name):
        run_id = service.register(name)
        service.send_steps(run_id, range(3), loss=3.0)
        open_run(page, run_id)
        expect(page.locator("#pulse")).to_have_attribute("title", re.compile("tells what changes"))
        page.get_by_label("fit colours to the data").check()
        service.send_steps(run_id, range(3, 9), loss=2.5)
        expect(fact(page, "step")).to_have_text("8")
        expect(page.get_by_role("heading", name="centred_token_similarity at step 8 (latest)")).to_be_visible()
        expect(page.get_by_label("fit colours to the data")).to_be_checked()

    def test_disturbs_nothing_that_somebody_has_chosen(self, page, service, name):
        run_id = service.register(name, config={"depth": 4})
        service.send_steps(run_id, range(3), loss=3.0)
        open_run(page, run_id, "?step=1&layer=2")
        page.get_by_text("Configuration").click()
        charts(page).focus()
        page.evaluate("window.before = [...document.querySelectorAll('canvas, .tools select, .panel-head')]")
        service.send_steps(run_id, range(3, 9), loss=2.5)
        expect(fact(page, "step")).to_have_text("8")
        expect(page.get_by_role("heading", name="centred_token_similarity at step 1")).to_be_visible()
        expect(page.locator("pre")).to_be_visible()
        expect(charts(page)).to_be_focused()
        assert page.evaluate("window.before.length > 5 && window.before.every((element) => element.isConnected)")

    def test_leaves_the_focus_and_what_is_selected_as_its_frames_come(self, page, service, name):
        run_id = service.register(name, config={"depth": 4})
        service.send_steps(run_id, range(3), loss=3.0)
        open_run(page, run_id, "?attempt=1")
        page.get_by_text("Configuration").click()
        page.evaluate("getSelection().selectAllChildren(document.querySelector('pre'))")
        leave = page.locator(".note").get_by_role("button", name="Show the run as it stands")
        leave.focus()
        service.send_steps(run_id, range(3, 9), loss=2.5)
        expect(fact(page, "step")).to_have_text("8", timeout=30_000)
        wait_for_charts(page)
        expect(leave).to_be_focused()
        assert "depth" in page.evaluate("getSelection().toString()")

    def test_keeps_the_keyboard_where_it_is_in_a_part_that_is_made_again(self, page):
        page.goto("/ui/catalogue.json")  # a document of the same origin, without scripts of its own
        focused = page.evaluate("""async () => {
            const { h, keyed } = await import("/ui/base/dom.js");
            const list = document.body.appendChild(h("div"));
            const show = (...items) => keyed(list, items, ({ key }) => key, ({ key, text }) =>
                h("p", {}, h("button", {}, "first"), h("button", { id: key }, text)));
            show({ key: "a", text: "old" }, { key: "b", text: "old" });
            document.getElementById("b").focus();
            show({ key: "b", text: "new" });
            return document.activeElement.id + document.activeElement.textContent;
        }""")
        assert focused == "bnew"

    def test_is_asked_only_for_what_is_new(self, page, rich):
        open_run(page, rich, "?metric=attention_entropy")
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.get_by_label("layer", exact=True).select_option("1")
        expect(page.get_by_role("heading", name="heads of layer 1")).to_be_visible()
        assert not [url for url in asked if "heatmap" in url or "metric=loss" in url]


class TestAttempts:
    @pytest.fixture
    def resumed(self, service, name):
        """Of 20 steps of loss 2.0 the second half was taken back, and goes on with 1.0 until step 14."""
        run_id = service.register(name)
        service.send(run_id, *rich_frames(range(20)))
        service.end(run_id)
        service.register(name, resume_step=10)
        body = frames_to_body("again", 2, [frame.to_json() for frame in rich_frames(range(10, 15), loss=1.0)])
        service.request("POST", f"/api/v1/runs/{run_id}/frames", content=body).raise_for_status()
        return run_id

    def test_are_listed_with_what_became_of_them(self, page, resumed):
        open_run(page, resumed)
        expect(fact(page, "attempt")).to_have_text("2, from step 10")
        page.get_by_text("Attempts (2)").click()
        expect(page.get_by_role("row", name="attempt 1")).to_contain_text("failed")
        expect(page.get_by_role("row", name="attempt 1")).to_contain_text("taken back from step 10 on")
        expect(page.get_by_role("row", name="attempt 2")).to_contain_text("stands")

    def test_that_are_live_at_the_same_time_are_counted(self, page, service, name, resumed):
        service.register(name, resume_step=15)
        open_run(page, resumed)
        page.get_by_text("Attempts (3, 2 of them live)").click()
        expect(page.get_by_role("row", name="attempt 1")).not_to_contain_text("live")
        for attempt in (2, 3):
            expect(page.get_by_role("row", name=f"attempt {attempt}")).to_contain_text("live")

    def test_show_what_was_taken_back_beside_what_stands(self, page, resumed):
        open_run(page, resumed)
        point_at(page, "loss", 12 / 19.5, 0.5)
        expect(tooltip(page)).to_contain_text("loss1")
        expect(tooltip(page)).to_contain_text("attempt 1, taken back2")

    def test_can_be_shown_as_they_were(self, page, resumed):
        open_run(page, resumed)
        page.get_by_text("Attempts (2)").click()
        page.get_by_role("row", name="attempt 1").get_by_role("button", name="Show as it was").click()
        expect(page.get_by_text("This is attempt 1 as it was.")).to_be_visible()
        expect(page.get_by_role("heading", name="effective_rank at step 19")).to_be_visible()
        expect(page).to_have_url(re.compile("attempt=1"))
        point_at(page, "loss", 12 / 19.5, 0.5)
        expect(tooltip(page)).to_contain_text("loss2")
        page.get_by_role("button", name="Show the run as it stands").last.click()
        expect(page.get_by_role("heading", name="effective_rank at step 14 (latest)")).to_be_visible()

    def test_that_are_not_there_are_said_to_be_missing_and_the_run_is_shown(self, page, resumed):
        open_run(page, resumed, "?attempt=99")
        expect(page.get_by_text("This run has no attempt 99. It is shown as it stands.")).to_be_visible()
        expect(page.get_by_role("heading", name="effective_rank at step 14 (latest)")).to_be_visible()
        page.get_by_label("layer", exact=True).select_option("1")
        expect(page.get_by_text("This run has no attempt")).to_have_count(0)
        expect(page).to_have_url(re.compile(r"\?metric=effective_rank&layer=1$"))

    def test_are_shown_whole_also_where_the_run_was_zoomed(self, page, resumed):
        open_run(page, resumed, "?from=5&to=9")
        page.get_by_text("Attempts (2)").click()
        page.get_by_role("row", name="attempt 1").get_by_role("button", name="Show as it was").click()
        expect(page.get_by_role("heading", name="effective_rank at step 19")).to_be_visible()
        wait_for_charts(page)
        assert axis_of(charts(page)) == [-0.5, 19.5]


class TestTakingAway:
    @pytest.mark.parametrize(
        ("chart", "metric", "columns", "num_rows"),
        [
            ("Loss", "loss", CURVE_COLUMNS, 20),
            ("Curves", "total_param_norm, total_grad_norm", CURVE_COLUMNS, 40),
            ("Heat map", "attention_entropy", ["step", "samples", *(f"{i} h.{i}" for i in range(BLOCKS))], 20),
            ("Layer history", "attention_entropy of layer 1 · h.1", CURVE_COLUMNS, 20),
            ("Layer profile", "attention_entropy by layer", ["layer", "block", "mean", "farthest", "nonfinite"], BLOCKS),
            ("Heads", "attention_entropy by head of layer 1", ["head", "attention_entropy"], HEADS),
        ],
    )  # fmt: skip
    def test_each_chart_is_a_table_and_a_picture(self, page, service, chart, metric, columns, num_rows):
        run_id = service.register("taken", project=chart)
        service.send(run_id, *rich_frames(range(20)))
        open_run(page, run_id, "?metric=attention_entropy&step=7&layer=1")
        with page.expect_download() as given:
            page.get_by_role("button", name=f"{chart} as CSV", exact=True).click()
        steps = (7, 7) if chart in ("Layer profile", "Heads") else (0, 19)
        head, rows = _table(given.value)
        assert head == ["# run: taken", f"# metric: {metric}", f"# steps: {steps[0]} to {steps[1]}"]
        assert (rows[0], len(rows) - 1) == (columns, num_rows)
        with page.expect_download() as given:
            page.get_by_role("button", name=f"{chart} as PNG", exact=True).click()
        assert re.fullmatch(rf"taken_.*_steps-{steps[0]}-{steps[1]}\.png", given.value.suggested_filename)
        with Image.open(given.value.path()) as picture:
            assert picture.width > 1200
        assert num_coloured(given.value) > 1000, "something is drawn"

    def test_takes_the_values_that_are_shown(self, page, rich):
        open_run(page, rich, "?from=5&to=9")
        with page.expect_download() as given:
            page.get_by_role("button", name="Heat map as CSV").click()
        head, rows = _table(given.value)
        assert head[2] == "# steps: 5 to 9"
        assert rows[0][2:4] == ["0 input of h.0", "1 h.0"]
        assert [list(map(float, row)) for row in rows[1:]] == [
            [step, 1, *(pytest.approx(value) for value in (0.1, 0.2, 0.3, 0.4, 0.5))] for step in range(5, 10)
        ]


def _table(download):
    text = download.path().read_text()
    lines = text.splitlines()
    head = [line for line in lines if line.startswith("# ")]
    return head, list(csv.reader(lines[len(head) :]))


class TestAnAlert:
    @pytest.fixture
    def failing(self, service, name):
        return service.replay("tse_vit24-s0", project=name)

    @pytest.fixture
    def alert(self, service, failing):
        """One of those that fire on that run."""
        alerts = service.request("GET", f"/api/v1/alerts?run={failing}").json()["alerts"]
        return next(alert for alert in alerts if alert["rule"] == "token-similarity-escalation")

    def test_shows_what_the_rule_says_saw_and_advises(self, page, failing, alert):
        open_run(page, failing)
        card = card_of(page, alert["rule"])
        expect(card).to_contain_text(alert["state"])
        title, seen = alert["summary"].split(": ")
        for text in (
            title,
            seen.split(" is ")[0],
            alert["advice"]["text"],
            alert["advice"]["source"],
            f"firing since {alert['firing_step']}",
        ):
            expect(card).to_contain_text(text)

    def test_says_what_each_condition_saw_and_what_it_was_held_against(self, page, service, name):
        open_run(page, service.replay("digits-post-norm-s0", project=name))
        card = card_of(page, "token-similarity-escalation")
        expect(card.get_by_role("list", name="Conditions").get_by_role("listitem")).to_have_text(
            [
                "token_diversity of the last layer 1.53e-7, at most 5e-4 and at most 1e-6",
                "fall over depth of log10 odds of token_diversity -0.1511, at most -0.03",
                "r² of the fall over depth of log10 odds of token_diversity 0.9923, at least 0.8",
                "centred_token_similarity of the last layer 0.2619, at least 0.5: does not hold, and need not",
            ]
        )

    def test_keeps_the_layers_and_the_samples_folded(self, page, service, name):
        open_run(page, service.replay("digits-post-norm-s0", project=name))
        card = card_of(page, "token-similarity-escalation")
        layers, window = card.locator("table").all()
        expect(layers).to_be_hidden()
        card.get_by_text("What the rule saw").click()
        expect(layers.get_by_role("cell", name="0.006503 block 23")).to_be_visible()
        expect(window.get_by_role("row").last).to_contain_text("45")
        for table in (layers, window):
            assert table.evaluate("table => table.scrollWidth <= table.parentElement.clientWidth"), "nothing is cut off"

    def test_that_fired_when_its_run_ended_stays_in_sight(self, page, service, failing):
        service.request("PATCH", f"/api/v1/runs/{failing}", json={"state": "failed"}).raise_for_status()
        open_run(page, failing)
        expect(card_of(page, "token-similarity-escalation")).to_contain_text("fired to the end")
        expect(page.get_by_text("No alerts.")).to_be_hidden()

    def test_of_an_earlier_end_is_over_once_the_run_goes_on(self, page, service, failing, name):
        service.request("PATCH", f"/api/v1/runs/{failing}", json={"state": "failed"}).raise_for_status()
        blocks = service.request("GET", f"/api/v1/runs/{failing}").json()["blocks"]
        again = {"project": name, "run": "tse_vit24-s0", "blocks": blocks, "resume_step": 0}
        service.request("POST", "/api/v1/runs", json=again).raise_for_status()
        open_run(page, failing)
        expect(page.get_by_text("No alerts.")).to_be_visible()
        expect(page.get_by_text("fired to the end")).to_be_hidden()

    def test_has_its_name_at_its_bar_also_in_a_narrow_window(self, page, service, name):
        rules = {
            "ends-early-on": (0, 3),
            "is-later-than-that": (25, 33),
            "to-the-end": (50, 99),
        }
        for rule, (first, last) in rules.items():
            line = f'scalar("place") >= {first} and scalar("place") <= {last} for 1 samples'
            service.request("PUT", f"/api/v1/rules/{rule}", json={"name": rule, "when": line}).raise_for_status()
        run_id = service.register(name)
        for place in range(60):
            service.send_steps(run_id, [place], place=float(place))
        open_run(page, run_id)
        assert sorted(words_of(page)) == sorted(rules), "there is room"
        page.set_viewport_size({"width": 390, "height": 1500})
        wait_for_charts(page)
        assert sorted(words_of(page)) == sorted(rules), "each in a row of its own"
        for rule in rules:
            service.request("DELETE", f"/api/v1/rules/{rule}").raise_for_status()

    def test_has_a_name_that_ends_in_an_ellipsis_where_it_is_cut(self, page, service, name):
        rule = "a-name-that-is-too-long-for-any-place-at-its-bar-in-a-narrow-window"
        line = 'scalar("at") >= 25 and scalar("at") <= 29 for 1 samples'
        service.request("PUT", f"/api/v1/rules/{rule}", json={"name": rule, "when": line}).raise_for_status()
        run_id = service.register(name)
        for place in range(60):
            service.send_steps(run_id, [place], at=float(place))
        page.set_viewport_size({"width": 390, "height": 1500})
        open_run(page, run_id)
        (word,) = words_of(page)
        assert word.endswith("…")
        assert rule.startswith(word[:-1])
        service.request("DELETE", f"/api/v1/rules/{rule}").raise_for_status()

    @pytest.mark.parametrize(("severity", "ink"), [("warning", (163, 92, 0)), ("critical", (198, 40, 40))])
    def test_has_a_bar_in_the_colour_of_its_severity(self, page, service, name, severity, ink):
        rule = {
            "name": f"high-{severity}", "family": "loss", "severity": severity, "title": "High",
            "for": {"samples": 1, "steps": 0}, "when": {"value": [{"scalar": severity}], "above": 1e6},
            "advice": "None.", "source": "None.", "origin": "a guess",
        }  # fmt: skip
        service.request("PUT", f"/api/v1/rules/{rule['name']}", json=rule).raise_for_status()
        run_id = service.register(name)
        service.send_steps(run_id, range(3), **{severity: 2e6})
        open_run(page, run_id)
        seen = pixels(page, "alerts")
        reds = {(163, 92, 0), (198, 40, 40)}
        assert {red for red in reds if sum(n for colour, n in seen.items() if is_near(colour, red, 4)) > 500} == {ink}

    def test_says_its_severity_beside_its_state(self, page, service, failing):
        service.request("PATCH", f"/api/v1/runs/{failing}", json={"state": "failed"}).raise_for_status()
        open_run(page, failing)
        for card in page.get_by_role("article").all():
            pill, severity = (card.locator(part).bounding_box() for part in (".pill", ".severity"))
            assert abs(pill["y"] + pill["height"] / 2 - severity["y"] - severity["height"] / 2) < 4, "on one line"

    def test_can_be_acknowledged(self, page, failing, alert):
        open_run(page, failing)
        card = card_of(page, alert["rule"])
        card.get_by_role("button", name="Acknowledge").click()
        card.get_by_label("Your name").fill("on-call")
        card.get_by_label("Your name").press("Enter")
        expect(card).to_contain_text("Acknowledged by on-call")
        expect(card.get_by_role("button", name="Acknowledge", exact=True)).to_have_count(0)

    def test_that_somebody_else_acknowledged_says_so_without_a_frame_or_an_event(
        self, browser, service, failing, alert
    ):
        with opened(browser, service, but="404") as page:
            page.route("**/api/v1/events*", lambda route: route.fulfill(status=404))
            open_run(page, failing)
            expect(card_of(page, alert["rule"])).to_contain_text("firing")
            service.request("POST", f"/api/v1/alerts/{alert['alert_id']}/ack", json={"by": "on-call"})
            expect(card_of(page, alert["rule"])).to_contain_text("Acknowledged by on-call")

    def test_that_is_open_is_shown_however_many_came_after_it(self, page, service, failing, alert):
        """With pages of one alert in place of a hundred."""
        num, step = (
            service.request("GET", f"/api/v1/runs/{failing}").json()[key] for key in ("num_frames", "last_step")
        )
        for i, loss in enumerate([math.nan, 1.0, 1.0], 1):
            scalars = {"loss": loss, "loss_nonfinite": float(i == 1)}
            service.send(failing, Frame(num + i, step + i, START_S + step + i, scalars, {}))
        page.route("**/api/v1/alerts?*", lambda route: route.continue_(url=route.request.url.replace("=100", "=1")))
        open_run(page, failing)
        expect(card_of(page, alert["rule"])).to_contain_text("firing")
        expect(page.get_by_text("Resolved (1)")).to_be_visible()
        expect(page.get_by_text("There are older ones")).to_be_visible()
        page.get_by_role("link", name="All alerts of this run").click()
        expect(page).to_have_url(re.compile(f"#/alerts.*run={failing}"))

    def test_is_named_where_the_mouse_is_over_it_in_the_charts(self, page, failing, alert):
        open_run(page, failing)
        point_at(page, "map", 0.99, 0.5)
        expect(tooltip(page)).to_contain_text(f"firing, from step {alert['firing_step']}{alert['rule']}")
        point_at(page, "alerts", 0.9, 0.5)
        for text in (alert["rule"], alert["summary"][:100], alert["advice"]["text"][:100]):
            expect(tooltip(page)).to_contain_text(text)

    def test_is_in_the_table_and_the_picture_of_all_of_them(self, page, service, failing):
        alerts = service.request("GET", f"/api/v1/alerts?run={failing}").json()["alerts"]
        open_run(page, failing)
        with page.expect_download() as given:
            page.get_by_role("button", name="Alerts as CSV").click()
        head, rows = _table(given.value)
        assert head[:2] == ["# run: tse_vit24-s0", "# metric: alerts"]
        assert rows[0] == ["rule", "severity", "state", "first seen", "firing from", "over at", "summary"]
        assert sorted((rule, summary) for rule, *_, summary in rows[1:]) == sorted(
            (alert["rule"], alert["summary"]) for alert in alerts
        )
        with page.expect_download() as given:
            page.get_by_role("button", name="Alerts as PNG").click()
        assert num_coloured(given.value) > 1000, "something is drawn"

    def test_leads_to_its_step_in_the_charts(self, page, failing, alert):
        open_run(page, failing)
        card_of(page, alert["rule"]).get_by_role("button", name="Show step").click()
        expect(page.get_by_role("heading", name=f"token_diversity at step {alert['firing_step']}")).to_be_visible()

    def test_leads_to_the_attempt_that_it_is_about_and_out_of_a_zoom(self, page, service, name):
        run_id = service.register(name)
        service.send(run_id, *rich_frames(range(15)), *rich_frames(range(15, 20), 15, loss=math.nan))
        service.end(run_id)
        service.register(name, resume_step=10)
        again = rich_frames(range(10, 15), loss=math.nan)
        body = frames_to_body("again", 2, [frame.to_json() for frame in again])
        service.request("POST", f"/api/v1/runs/{run_id}/frames", content=body).raise_for_status()
        open_run(page, run_id, "?from=2&to=12")
        page.get_by_text("Resolved (1)").click()
        page.get_by_role("button", name="Show step 15").click()
        expect(page.get_by_role("heading", name="effective_rank at step 15")).to_be_visible()
        expect(page.get_by_text("This is attempt 1 as it was.")).to_be_visible()
        expect(page).to_have_url(re.compile(r"\?metric=effective_rank&step=15&attempt=1$"))
        wait_for_charts(page)
        assert axis_of(charts(page)) == [-0.5, 19.5]
        page.evaluate("location.hash += '&from=2&to=12'")
        page.get_by_role("button", name="Show step 10").click()
        expect(page.get_by_text("This is attempt 1 as it was.")).to_have_count(0)
        expect(page).to_have_url(re.compile(r"\?metric=effective_rank&step=10&from=2&to=12$"))

    def test_is_called_by_a_click_on_its_band(self, page, failing, alert):
        open_run(page, failing)
        click_at(page, "alerts", 0.9, 0.5)
        expect(page.locator(".alert.called")).to_contain_text(alert["rule"])


class TestWhatAClientSends:
    @pytest.mark.parametrize("given", [HOSTILE, RIGHT_TO_LEFT, "x" * MAX_REASON, "=HYPERLINK(1)"])
    def test_stays_text(self, page, service, given):
        name, block = given[:MAX_NAME], given[:MAX_BLOCK_NAME]
        fields = {"project": name, "tags": [name], "config": {given: given}, "blocks": [block] * 4}
        run_id = service.register(name, **fields)
        layers = {"effective_rank": Array.of([0.1, 0.2, 0.3, 0.4, 0.5])}
        reasons = {"omega": given}
        service.send(run_id, *(Frame(i, i, START_S + i, {"loss": 1.0}, layers, {}, reasons) for i in range(3)))
        open_run(page, run_id, "?layer=1")
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
        page.get_by_text("Configuration").click()
        expect(page.locator("pre")).to_contain_text(given.replace('"', '\\"'))
        page.get_by_text("Not measured").click()
        expect(page.get_by_role("definition").filter(has_text=given)).to_be_visible()
        point_at(page, "map", 0.5, 0.1)
        expect(tooltip(page)).to_contain_text(block)
        with page.expect_download() as download:
            page.get_by_role("button", name="Heat map as CSV").click()
        _, rows = _table(download.value)
        assert rows[0][2:] == [f"0 input of {block}", *(f"{i} {block}" for i in range(1, 5))]
        assert page.locator("main img, main script").count() == 0
        assert page.title() != "1"
        assert page.evaluate("document.documentElement.scrollWidth") == 1280

    def test_stays_text_in_an_alert(self, page, service, name):
        rule = {
            "name": "hostile", "family": "loss", "severity": "critical", "title": HOSTILE, "for": {"samples": 1, "steps": 0},
            "when": {"value": [{"scalar": "loss"}], "above": 1e6}, "advice": HOSTILE, "source": HOSTILE, "origin": "a guess",
        }  # fmt: skip
        service.request("PUT", "/api/v1/rules/hostile", json=rule).raise_for_status()
        run_id = service.register("gpt", project=name)
        service.send_steps(run_id, range(3), loss=2e6)
        open_run(page, run_id)
        alert = page.get_by_role("article", name="hostile")
        expect(alert.locator(".summary")).to_have_text(HOSTILE)
        expect(alert.locator(".advice p")).to_have_text([HOSTILE, HOSTILE])
        assert page.locator("main img, main script").count() == 0
        assert page.title() != "1"


class TestTheLayout:
    @pytest.mark.parametrize("width", [1280, 400])
    def test_fits_the_window(self, page, service, width):
        unbreakable = "x" * MAX_NAME
        project, blocks = f"{width}".ljust(MAX_NAME, "x"), ["x" * MAX_BLOCK_NAME] * BLOCKS
        run_id = service.register(unbreakable, project=project, tags=[unbreakable], blocks=blocks)
        service.send(run_id, *rich_frames(range(5)))
        page.set_viewport_size({"width": width, "height": 800})
        open_run(page, run_id, "?metric=attention_entropy&layer=2&step=3")
        expect(page.get_by_role("heading", name="heads of layer 2 at step 3")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        for head in page.locator(".panel-head:visible").all():
            assert head.evaluate("head => head.scrollWidth <= head.clientWidth"), "nothing is cut off"


class TestTheMetricThatIsShownFirst:
    def test_is_never_raw_token_similarity_which_can_be_picked(self, page, service, name):
        run_id = service.register(name)
        service.send(run_id, Frame(1, 1, START_S, {"loss": 1.0}, {"token_similarity": Array.of([0.9] * 5)}))
        open_run(page, run_id)
        expect(page.get_by_text("Raw token similarity alone says little, so it is not shown first.")).to_be_visible()
        expect(page.locator(".panel-head:visible")).to_have_count(1)
        page.get_by_label("metric", exact=True).select_option("token_similarity")
        expect(page.get_by_role("heading", name="token_similarity at step 1 (latest)")).to_be_visible()
