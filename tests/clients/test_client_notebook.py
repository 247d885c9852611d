import asyncio
import base64
import copy
import io
import json
import math
import pickle
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from scripts.healthy_band import FILE
from tests.clients.conftest import Writer
from tsemon.wire import Array, Frame
from tsemon_client import AsyncClient, Client, Heatmap, Records, TagUse

HOSTILE = "<script>alert(1)</script>'\"&"


class Page(HTMLParser):
    """What a browser makes of HTML: the tags that there are, and the text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.attributes = [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data + " "


def pictures(html):
    """Width, height and pixels of each, row by row."""
    return [
        Image.open(io.BytesIO(base64.b64decode(found))) for found in re.findall(r"data:image/png;base64,([^']*)'", html)
    ]


@pytest.fixture(scope="module")
def run_id(service):
    writer = Writer(service)
    run_id = writer.register(HOSTILE, project=HOSTILE, tags=[HOSTILE])
    frames = (
        Frame(
            i,
            10 * i,
            1.0,
            {"loss": 2.5},
            {"centred_token_similarity": Array.of([0.0, 1.0, 0.5 if i else float("nan")])},
        )
        for i in range(4)
    )
    writer.send(run_id, *frames)
    return run_id


def shown(service, run_id, kind):
    """A run as a notebook shows it, when the client is closed already."""
    if kind is Client:
        with Client(service.url) as client:
            return client.run(run_id)._repr_html_()

    async def ask():
        async with AsyncClient(service.url) as client:
            return await client.run(run_id)

    return asyncio.run(ask())._repr_html_()


class TestARunInANotebook:
    @pytest.mark.parametrize("kind", [Client, AsyncClient])
    def test_shows_its_facts_and_its_heat_map(self, service, run_id, kind):
        page = Page(html := shown(service, run_id, kind))
        assert page.text.startswith(f"{HOSTILE} / {HOSTILE}")
        assert "loss 2.5" in page.text
        assert "centred_token_similarity, 3 layers, steps 0 to 30" in page.text
        heatmap, _ = pictures(html)
        assert heatmap.size == (4, 3)
        assert heatmap.getpixel((0, 2)) == (0x44, 0x01, 0x54), "the first layer is at the bottom, 0 is dark"
        assert heatmap.getpixel((3, 1)) == (0xFD, 0xE7, 0x25), "1 is bright"
        assert heatmap.getpixel((0, 0)) == (0xD0, 0xD0, 0xD0), "what is not finite is grey"

    @pytest.mark.parametrize("kind", [Client, AsyncClient])
    def test_shows_its_incidents_the_newest_with_its_advice(self, service, kind):
        writer = Writer(service)
        run_id = writer.register(f"broken-{kind.__name__}", project="notebook")
        for step, loss in enumerate([2.5, float("nan"), float("nan")]):
            writer.send(run_id, Frame(step, 10 * step, 1.0, {"loss": loss}))
        with Client(service.url) as client:
            [incident] = client.incidents(run_id=run_id).all()
        page = Page(shown(service, run_id, kind))
        assert f"loss-not-finite : {incident.summary}" in page.text
        assert incident.advice["text"] in page.text

    def test_runs_nothing_that_somebody_sent(self, service, run_id):
        page = Page(shown(service, run_id, Client))
        assert set(page.tags) == {"div", "strong", "bdi", "table", "tr", "th", "td", "img"}
        assert {name for name, _ in page.attributes} == {"src", "alt", "title", "style"}

    def test_has_none_without_frames_or_a_service(self, service, run_id):
        with Client(service.url) as client:
            run = client.run(run_id)
            bare = client.run(Writer(service).register("bare"))
        assert pictures(bare._repr_html_()) == []
        copied = pickle.loads(pickle.dumps(run))
        assert copied == copy.deepcopy(run) == run
        assert pictures(copied._repr_html_()) == [], "a copy knows no service, and no token"

    def test_has_no_heat_map_of_raw_token_similarity(self, service):
        writer = Writer(service)
        run_id = writer.register("raw")
        writer.send(run_id, Frame(0, 0, 1.0, {}, {"token_similarity": Array.of([0.5] * 3)}))
        assert pictures(shown(service, run_id, Client)) == []

    def test_says_what_the_service_says_where_that_refuses(self, service):
        writer = Writer(service)
        gone = writer.register("gone")
        writer.send(gone, Frame(0, 0, 1.0, {}, {"centred_token_similarity": Array.of([0.5] * 3)}))
        with Client(service.url) as client:
            run = client.run(gone)
            writer.delete(gone)
            assert (
                f"No heat map of centred_token_similarity: no run has the id '{gone}'" in Page(run._repr_html_()).text
            )

    def test_lists_are_tables(self, service, run_id):
        with Client(service.url) as client:
            page = Page(client.runs(run=HOSTILE).all()._repr_html_())
            assert run_id in page.text
            assert set(page.tags) == {"table", "thead", "tbody", "tr", "th", "td"}
            assert "definition" not in Page(client.rules()._repr_html_()).text

    def test_a_long_list_says_how_much_more_there_is(self):
        page = Page(Records(TagUse, [TagUse(tag=HOSTILE, runs=i) for i in range(60)])._repr_html_())
        assert page.tags.count("tr") == 1 + 50
        assert "and 10 more" in page.text


class TestAHeatMap:
    def heatmap(self, metric, *columns):
        values = [list(column) for column in columns]
        return Heatmap(metric=metric, step=list(range(len(values))), layers=2, values=values, damaged=0)._repr_html_()

    def test_is_logarithmic_where_the_catalogue_says_so(self):
        html = self.heatmap("token_diversity", (1.0, 1e-4), (1e-2, 0.0))
        heatmap, _ = pictures(html)
        assert "(log scale)" in html
        assert heatmap.getpixel((1, 1)) == (34, 144, 140), "1e-2 is the middle between 1e-4 and 1"
        assert heatmap.getpixel((1, 0)) == (0x44, 0x01, 0x54), "0 is as dark as the least there is"

    def test_marks_the_range_of_healthy_runs_on_its_scale(self):
        _, key = pictures(html := self.heatmap("token_diversity", (1.0, 1e-4), (1e-2, 1e-6)))
        low = min(json.loads(FILE.read_text())["token_diversity"]["low"])
        assert f"{low:.4g} to 1 in healthy recorded runs" in html
        marks = [key.getpixel((x, 2)) == (0x1B, 0x7A, 0x3D) for x in range(120)]
        first = marks.index(True)
        assert first == pytest.approx(119 * (1 - math.log10(low) / -6), abs=1)
        assert marks == [False] * first + [True] * (120 - first)
        assert pictures(self.heatmap("hidden_rms", (1.0, 2.0)))[1].size == (120, 2), "without a range, there is no mark"

    def test_of_a_healthy_run_is_bright_on_a_log_scale(self):
        heatmap, _ = pictures(self.heatmap("token_diversity", (0.9, 0.6), (0.8, 0.5)))
        least = min(heatmap.getpixel((x, y))[1] for x in (0, 1) for y in (0, 1))
        assert least > 0xB7, "the green of 0.5 is that of the upper tenth of three decades"

    def test_of_an_unknown_metric_goes_from_its_least_to_its_largest_value(self):
        heatmap, _ = pictures(html := self.heatmap(HOSTILE.replace("'", ""), (-5.0, 15.0)))
        assert [heatmap.getpixel((0, y)) for y in (0, 1)] == [(0xFD, 0xE7, 0x25), (0x44, 0x01, 0x54)]
        assert "script" not in Page(html).tags

    @pytest.mark.parametrize("columns", [(), ((None, None),), ((1.0, 1.0),)], ids=["none", "not finite", "all equal"])
    def test_is_shown_whatever_is_in_it(self, columns):
        assert Page(self.heatmap("hidden_rms", *columns)).text
