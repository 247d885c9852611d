"""From a message in Slack, or an alert of Prometheus, to the cell that it is about: one click."""

from __future__ import annotations

import contextlib
import re

import pytest
from playwright.sync_api import expect

from tests.ports import free_port
from tests.server.notify.receivers import HttpReceiver, await_that
from tests.server.replay.runs import FOLDER, RecordedRun
from tsemon_server.settings import Settings

from .conftest import opened, served
from .test_incidents import RED, framed_in, wait_for_charts


@pytest.fixture
def slack():
    with contextlib.closing(HttpReceiver()) as receiver:
        yield receiver


@pytest.fixture
def service(tmp_path, slack):
    """A server that sends messages to the receiver at once, with links to itself."""
    port, file = free_port(), tmp_path / "notify.yaml"
    receiver = f"{{name: ops, type: slack, url: '{slack.url}/hook', allow_private: true}}"
    spans = "group_wait: 0s\ngroup_interval: 0s"
    file.write_text(f"base_url: http://127.0.0.1:{port}\n{spans}\nreceivers: [{receiver}]")
    with served(Settings(database=f"sqlite:///{tmp_path}/tsemon.db", notify=str(file)), port) as service:
        yield service


def link_in(slack):
    """The address behind "Open the page" in the first message."""
    await_that(lambda: slack.requests, "a message arrived")
    (attachment,) = slack.requests[0].json["attachments"]
    (link,) = (found for block in attachment["blocks"] if (found := re.match(r"<(.+)\|.+>", block["text"]["text"])))
    return link[1]


@pytest.mark.parametrize(
    ("trace", "metric"),
    [
        ("tse_vit24", "token_diversity"),
        ("ent_qk20", "attention_entropy"),
        ("dead_relu", "dead_units"),
        ("dead_frozen", "update_norm"),
    ],
)
class TestTheLinkOfAMessage:
    def test_opens_the_cell_in_which_the_rule_found_the_cause(self, browser, service, slack, trace, metric):
        recorded = RecordedRun(FOLDER / f"{trace}-s0.jsonl.gz")
        run_id = service.register(trace, recorded.num_blocks)
        service.send(run_id, *recorded.frames)
        [incident] = service.request("GET", f"/api/v1/runs/{run_id}/incidents").json()["incidents"]
        is_of_states = metric == "token_diversity"
        num_layers = recorded.num_blocks + is_of_states
        layer, steps = incident["blocks"][0] + is_of_states, [frame.step for frame in recorded.frames]
        step = service.request("GET", f"/api/v1/alerts/{incident['cause_id']}").json()["evidence"]["step"]
        column = steps.index(step)
        cell = [(column + 0.5) / len(steps), (layer + 0.5) / num_layers]
        of_prometheus = (
            f"{service.url}/#/run/{run_id}?incident={incident['incident_id']}"  # as in the rule TsemonIncident
        )
        with opened(browser, service) as page:
            page.set_viewport_size({"width": 1280, "height": 1500})
            for link in (link_in(slack), of_prometheus):
                page.goto("about:blank")
                page.goto(link)
                wait_for_charts(page)
                expect(page.get_by_label("metric", exact=True)).to_have_value(metric)
                expect(page.locator("#readout")).to_contain_text(f"at step {step}: {metric} ")
                expect(page.get_by_label("layer", exact=True)).to_have_value(str(layer))
                assert framed_in(page, RED) == pytest.approx(cell, abs=0.03)
