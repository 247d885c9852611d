"""A model with several stacks as people see it: charts and alerts name the stack, and no line crosses a border."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from tsemon.wire import Array, Frame

from .conftest import START_S, option_of

STACKS = [{"name": "encoder", "blocks": 4}, {"name": "decoder", "blocks": 4}]
BLOCKS = [f"{stack['name']}.block.{number}" for stack in STACKS for number in range(4)]
EVEN = [0.30, 0.28, 0.27, 0.26, 0.25]
COLLAPSE = [0.3, 0.03, 0.003, 0.0003, 0.00003]


def frames(num=12):
    """Tokens of the decoder become the same from block to block."""
    diversity = Array.of([*EVEN, *COLLAPSE])
    layers = {
        "token_similarity": Array.of([1 - value for value in (*EVEN, *COLLAPSE)]),
        "token_diversity": diversity,
        "centred_token_similarity": Array.of([0.6] * 10),
        "attention_entropy": Array.of([0.1 * number for number in range(8)]),
    }
    heads = {"attention_entropy": Array.of([0.1 * number for number in range(16)], (8, 2))}
    return [Frame(5 * n, 5 * n, START_S + 5 * n, {"loss": 2.0}, layers, heads) for n in range(num)]


@pytest.fixture
def run_id(service):
    run_id = service.register("t5", blocks=BLOCKS, stacks=STACKS)
    service.send(run_id, *frames())
    return run_id


def open_run(page, run_id, query=""):
    page.set_viewport_size({"width": 1280, "height": 1700})
    page.goto(f"/#/run/{run_id}{query}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def timeline(page):
    return page.get_by_role("application", name="Loss and layers by step")


def profile(page):
    return page.get_by_role("img", name="Value by layer at the chosen step")


def labels(chart, axis, index):
    """What the chart's axis says at its ticks."""
    return chart.evaluate(
        """async (element, [axis, index]) => {
            const echarts = await import("/ui/vendor/echarts-6.1.0.esm.min.mjs");
            const { formatter, customValues } = echarts.getInstanceByDom(element).getOption()[axis][index].axisLabel;
            return customValues.map(formatter);
        }""",
        [axis, index],
    )


class TestTheHeatMap:
    def test_calls_layers_by_their_stack(self, page, run_id):
        open_run(page, run_id)
        place = option_of(timeline(page), "yAxis", "id").index("map y")
        found = labels(timeline(page), "yAxis", place)
        assert found == ["encoder 0", "encoder 1", "encoder 2", "encoder 3", "encoder 4",
                         "decoder 0", "decoder 1", "decoder 2", "decoder 3", "decoder 4"]  # fmt: skip

    def test_draws_a_line_between_two_stacks(self, page, run_id):
        open_run(page, run_id)
        x, border = timeline(page).evaluate(
            """async (element) => {
                const echarts = await import("/ui/vendor/echarts-6.1.0.esm.min.mjs");
                return echarts.getInstanceByDom(element).convertToPixel({ gridId: "map" }, [27, 4.5]);
            }"""
        )
        box = timeline(page).bounding_box()
        clip = {"x": box["x"] + x, "y": box["y"] + border - 30, "width": 1, "height": 60}
        with Image.open(io.BytesIO(page.screenshot(clip=clip))) as image:
            brightness = np.asarray(image.convert("L")).ravel()
        (dark,) = np.nonzero(brightness < 80)  # no cell of these values is so dark
        assert 28 <= dark.min() <= dark.max() <= 32

    def test_says_the_stack_and_the_block_of_what_is_picked(self, page, run_id):
        open_run(page, run_id, "?layer=7")
        expect(page.locator("#readout")).to_contain_text("Layer decoder 2 · decoder.block.1,")
        open_run(page, run_id, "?layer=5")
        expect(page.locator("#readout")).to_contain_text("Layer decoder 0 · input of decoder.block.0,")

    def test_of_blocks_has_no_input(self, page, run_id):
        open_run(page, run_id, "?metric=attention_entropy&layer=4")
        expect(page.locator("#readout")).to_contain_text("Layer decoder 0 · decoder.block.0,")
        expect(page.get_by_role("heading", name="heads of layer decoder 0")).to_be_visible()


class TestTheProfile:
    def test_has_a_gap_and_a_line_between_two_stacks(self, page, run_id):
        open_run(page, run_id)
        (data,) = option_of(profile(page), "series", "data")  # no range: the recorded healthy runs have one stack
        assert data[5] == [4.5, None]
        assert [layer for layer, _ in data] == [0, 1, 2, 3, 4, 4.5, 5, 6, 7, 8, 9]
        marks = option_of(profile(page), "series", "markLine")[0]
        assert [mark["xAxis"] for mark in marks["data"]] == [4.5]
        assert labels(profile(page), "xAxis", 0) == ["encoder 0", "decoder 0", "decoder 4"]


class TestTheRun:
    def test_says_its_stacks(self, page, run_id):
        open_run(page, run_id)
        fact = page.locator(".facts div", has=page.get_by_text("blocks", exact=True)).locator("dd")
        expect(fact).to_have_text("8encoder 4, decoder 4")

    def test_names_its_worst_layer_in_the_list(self, page, run_id):
        page.goto("/#/")
        expect(page.get_by_role("row", name="t5")).to_contain_text("decoder 3centred_token_similarity")


class TestAnAlert:
    def test_names_its_stack_and_its_layers(self, page, run_id):
        open_run(page, run_id)
        card = page.get_by_role("article", name="token-similarity-escalation")
        expect(card).to_contain_text("Tokens become the same over depth (decoder)")
        card.get_by_text("What the rule saw").click()
        expect(card.get_by_role("table").first).to_contain_text("decoder 4")
        expect(card.get_by_text("stack", exact=True)).to_be_visible()


class TestAComparison:
    def test_calls_layers_by_their_stack(self, page, service, run_id):
        page.set_viewport_size({"width": 1280, "height": 1700})
        page.goto(f"/#/compare?run={run_id}&metric=token_similarity&layer=7&profile=token_similarity")
        expect(page.get_by_text("token_similarity of layer decoder 2").first).to_be_visible()
        expect(page.get_by_label("layer", exact=True)).to_contain_text("decoder 4")


class TestOneStack:
    def test_has_layers_with_numbers_and_no_line(self, page, service):
        run_id = service.register("gpt")
        service.send_steps(run_id, range(5), loss=1.0)
        open_run(page, run_id, "?layer=1")
        place = option_of(timeline(page), "yAxis", "id").index("map y")
        assert labels(timeline(page), "yAxis", place) == ["0", "1", "2", "3", "4"]
        (marks,) = option_of(profile(page), "series", "markLine")
        assert [mark["xAxis"] for mark in marks["data"]] == [1]
        expect(page.locator("#readout")).to_contain_text("Layer 1 · h.0,")
