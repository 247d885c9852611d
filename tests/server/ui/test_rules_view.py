"""The rules and how they stand on a run, in Chromium on the real service."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.server.ui.conftest import opened
from tsemon_server.rules import PACK
from tsemon_server.settings import Settings

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>'
LONG = "x" * 200
MINE = {
    "name": "my-rule",
    "family": "loss",
    "severity": "info",
    "title": HOSTILE,
    "aliases": [LONG[:128]],
    "when": {
        "all": [
            {"value": [{"scalar": "loss"}, {"minus": 1}, {"over": [{"scalar": HOSTILE}]}], "above": 2},
            {"not": {"value": [{"layers": "token_similarity"}], "in": "any", "at_most": 0.5}},
        ]
    },
    "clear": {"value": [{"scalar": "loss"}], "below": 1},
    "only_while": {"value": [{"scalar": "loss"}], "is": "finite"},
    "for": {"samples": 2, "steps": 40},
    "after": {"samples": 0, "steps": 100},
    "evidence": {"loss_now": [{"scalar": "loss"}]},
    "advice": f"The loss is {{loss_now}}. {LONG}",
    "source": "מקור",
    "origin": "a guess",
}


@pytest.fixture(scope="module")
def service(server, tmp_path_factory):
    with server.showing(Settings(database=f"sqlite:///{tmp_path_factory.mktemp('rules')}/tsemon.db")) as service:
        yield service


@pytest.fixture(scope="module")
def run(service):
    return service.replay("tse_vit24-s0", project="vision")


@pytest.fixture(scope="module")
def edited(service):
    """A rule of one's own, an edited one, and one that is disabled."""
    built_in = next(rule for rule in PACK if rule.name == "loss-stall")
    for rule in (MINE, {**built_in.definition, "severity": "warning"}):
        service.request("PUT", f"/api/v1/rules/{rule['name']}", content=json.dumps(rule)).raise_for_status()
    service.request("DELETE", "/api/v1/rules/saturation").raise_for_status()


@pytest.fixture(scope="module")
def own(service):
    """A rule of the project `speech` alone, and one that it has in place of the server's."""
    built_in = next(rule for rule in PACK if rule.name == "loss-spike")
    for rule in ({**MINE, "name": "of-speech"}, {**built_in.definition, "severity": "info"}):
        path = f"/api/v1/rules/{rule['name']}?project=speech"
        service.request("PUT", path, content=json.dumps(rule)).raise_for_status()


def look(page, query=""):
    page.goto(f"/#/rules{query}")
    expect(page.get_by_role("heading", name="Rules", exact=True)).to_be_visible()


def card(page, name):
    return page.get_by_role("article", name=name, exact=True)


def names(page):
    return [card.get_attribute("aria-label") for card in page.get_by_role("article").all()]


class TestTheRules:
    def test_are_all_there_by_family(self, page, edited):
        look(page)
        assert sorted(names(page)) == sorted([*(rule.name for rule in PACK), "my-rule"])
        counts = f"{len(PACK) + 1} rules, 1 added, 2 edited, 1 disabled"
        expect(page.get_by_text(counts, exact=True)).to_be_visible()
        token_similarity = page.get_by_role("region", name="Token similarity")
        expect(token_similarity.get_by_role("article")).to_have_count(4)

    def test_say_what_they_wait_for_and_watch(self, page):
        look(page, "?rule=token-rank-collapse")
        found = card(page, "token-rank-collapse")
        for text in (
            "warning",
            "The tokens of a sequence lie on one line",
            "version 1",
            "watches effective_rank",
            "fires when all of",
            "effective_rank of the last layer below 1.35",
            "effective_rank of the first layer above 3",
            "for 2 samples in a row, over at least 5 steps",
        ):
            expect(found).to_contain_text(re.compile(re.escape(text).replace(r"\ ", r"\s*")))

    def test_write_numbers_as_their_alerts_do(self, page):
        look(page)
        for text in ("token_diversity of the last layer at most 5e-4", "at most 1e-6"):
            expect(card(page, "token-similarity-escalation")).to_contain_text(text)

    def test_fold_by_family_and_unfold_where_one_is_asked_for(self, page):
        look(page)
        page.get_by_role("heading", name="Token similarity", exact=True).click()
        expect(card(page, "states-collapse")).to_be_hidden()
        expect(card(page, "loss-spike")).to_be_visible()
        page.evaluate("location.hash = '#/rules?rule=states-collapse'")
        expect(card(page, "states-collapse")).to_be_in_viewport()

    def test_tell_what_to_try_and_where_that_comes_from(self, page):
        look(page)
        found = card(page, "loss-spike")
        advice = found.get_by_text("If the loss does not come back by itself")
        expect(advice).to_be_hidden()
        found.get_by_text("What to try, when it is over").click()
        expect(advice).to_be_visible()
        expect(found).to_contain_text("Spike rules of OLMo")
        expect(found).to_contain_text("Calibration. It must be large in three ways")
        expect(found).to_contain_text("|the lowest loss_before so far| or, if more, 1e-6) below 0.09")

    def test_that_people_have_changed_say_so(self, page, edited):
        look(page, "?origin=edited")
        assert sorted(names(page)) == ["loss-stall", "my-rule", "saturation"]
        expect(card(page, "loss-stall")).to_contain_text("version 2")
        expect(card(page, "loss-stall")).to_contain_text("edited")
        expect(card(page, "my-rule")).to_contain_text("added")
        expect(card(page, "my-rule")).not_to_contain_text("edited")
        expect(card(page, "saturation")).to_contain_text("disabled")

    def test_can_be_searched_and_narrowed(self, page, edited):
        look(page)
        page.get_by_label("search").fill("logits softmax")
        expect(page.get_by_role("article")).to_have_count(1)
        expect(page).to_have_url(re.compile(r"q=logits\+softmax$"))
        page.get_by_label("search").fill("VanishingGradient")
        expect(card(page, "vanishing-gradient")).to_be_visible()
        page.get_by_role("button", name="Clear filters").click()
        page.get_by_label("family").select_option("liveness")
        page.get_by_label("severity").select_option("critical")
        expect(page.get_by_role("article")).to_have_count(2)
        look(page, "?q=nothing+like+this")
        page.reload()
        expect(page.get_by_text("No rule fits these filters.")).to_be_visible()

    def test_are_searched_and_narrowed_without_asking_the_service(self, page, edited):
        look(page)
        expect(page.get_by_role("article").first).to_be_visible()
        asked = []
        page.on("request", lambda request: asked.append(request.url) if "/api/" in request.url else None)
        page.get_by_label("search").press_sequentially("logits", delay=5)
        page.get_by_label("severity").select_option("warning")
        expect(page).to_have_url(re.compile("q=logits&severity=warning"))
        expect(card(page, "vanishing-gradient")).to_have_count(0)
        page.get_by_role("button", name="Clear filters").click()
        expect(card(page, "vanishing-gradient")).to_be_visible()
        assert asked == []


class TestOnARun:
    def test_each_says_how_it_stands_what_it_lacked_and_when_it_was_judged(self, page, service, run):
        stands = {one["rule"]: one for one in service.request("GET", f"/api/v1/runs/{run}/rules").json()["rules"]}
        look(page, f"?run={run}")
        escalation = card(page, "token-similarity-escalation")
        expect(escalation).to_contain_text("firing")
        expect(escalation).to_contain_text(
            f"last judged at step {stands['token-similarity-escalation']['judged_step']}"
        )
        lacking = card(page, "vanishing-gradient")
        assert stands["vanishing-gradient"]["not_measured"] == ["grad_norm"]
        expect(lacking).to_contain_text("unknown never judged; the run has never had grad_norm")
        expect(card(page, "process-silent")).to_contain_text("reads the clock")
        num = sum(one["state"] == "unknown" for one in stands.values())
        expect(page.get_by_role("button", name=f"{num} unknown")).to_be_visible()

    def test_they_can_be_narrowed_by_state(self, page, service, run):
        look(page, f"?run={run}")
        page.get_by_role("button", name=re.compile(r"^\d+ firing$")).click()
        expect(card(page, "token-similarity-escalation")).to_be_visible()
        stands = service.request("GET", f"/api/v1/runs/{run}/rules").json()["rules"]
        expect(page.get_by_role("article")).to_have_count(sum(one["state"] == "firing" for one in stands))
        expect(page).to_have_url(re.compile("state=firing"))

    def test_that_has_ended_nothing_fires_any_more(self, page, service):
        ended = service.replay("tse_vit24-s0", project="ended")
        service.request("PATCH", f"/api/v1/runs/{ended}", json={"state": "finished"}).raise_for_status()
        look(page, f"?run={ended}")
        expect(card(page, "token-similarity-escalation")).to_contain_text("fired to the end")
        expect(page.get_by_role("button", name=re.compile(r"^\d+ firing$"))).to_have_count(0)
        page.get_by_role("button", name=re.compile(r"^\d+ fired to the end$")).click()
        expect(page).to_have_url(re.compile("state=stood"))
        expect(card(page, "token-similarity-escalation")).to_be_visible()
        expect(card(page, "loss-spike")).to_have_count(0)
        service.request("DELETE", f"/api/v1/runs/{ended}").raise_for_status()

    def test_that_is_too_short_for_a_rule_it_says_how_much_is_missing(self, page, service):
        rule = {"name": "patient", "when": "mean(loss, samples=900) > 100 after 90000 steps"}
        service.request("PUT", "/api/v1/rules/patient?project=short", content=json.dumps(rule)).raise_for_status()
        short = service.replay("tse_vit24-s0", project="short")
        look(page, f"?run={short}")
        stands = service.request("GET", f"/api/v1/runs/{short}/rules").json()["rules"]
        needs = next(one["waits_for"] for one in stands if one["rule"] == "patient")
        assert re.fullmatch(r"\d+ more samples with loss and \d+ more steps", needs)
        expect(card(page, "patient")).to_contain_text(f"never judged; cannot fire yet, needs {needs}")
        service.request("DELETE", f"/api/v1/runs/{short}").raise_for_status()

    def test_it_is_found_by_a_search(self, page, run):
        look(page)
        field = page.get_by_role("combobox", name="How they stand on a run")
        field.fill("vit24")
        expect(page.get_by_role("listbox").get_by_role("option")).to_have_count(1)
        field.press("Enter")
        expect(card(page, "token-similarity-escalation")).to_contain_text("last judged at step")
        expect(page).to_have_url(re.compile(f"run={run}"))
        page.get_by_role("button", name="Another run").click()
        expect(card(page, "token-similarity-escalation")).not_to_contain_text("last judged at step")

    def test_that_is_not_there_they_are_shown_all_the_same(self, browser, service):
        with opened(browser, service, but="status of 404") as page:
            look(page, "?run=nothing")
            expect(page.get_by_text("no run has the id 'nothing'")).to_be_visible()
            expect(card(page, "loss-spike")).to_be_visible()

    def test_they_follow_it_while_it_goes_on(self, page, service):
        live = service.register("live")
        look(page, f"?run={live}&rule=loss-stall")
        expect(card(page, "loss-stall")).to_contain_text("never judged")
        expect(page.locator("#pulse")).to_have_attribute("title", re.compile("tells what changes"))
        service.send_steps(live, range(8), loss_mean=1.0)
        expect(card(page, "loss-stall")).to_contain_text("quiet last judged at step 7")

    def test_their_counts_keep_the_focus_while_it_goes_on(self, page, service):
        live = service.register("goes-on")
        service.send_steps(live, [1], loss_mean=1.0)
        look(page, f"?run={live}")
        other = page.get_by_role("button", name="Another run")
        other.focus()
        service.send_steps(live, [2, 3], loss_mean=1.0)
        expect(page.get_by_role("status").filter(has_text="up to step 3")).to_be_visible()
        expect(other).to_be_focused()
        count = page.get_by_role("button", name=re.compile("unknown$"))
        count.focus()
        service.send_steps(live, [4, 5], loss_mean=1.0)
        expect(page.get_by_role("status").filter(has_text="up to step 5")).to_be_visible()
        expect(count).to_be_focused()


class TestWhatAClientSends:
    @pytest.mark.parametrize("width", [1280, 400])
    def test_stays_text_and_within_the_window(self, page, service, edited, width):
        page.set_viewport_size({"width": width, "height": 900})
        run = service.register(HOSTILE + str(width), project=HOSTILE)
        look(page, f"?run={run}&rule=my-rule")
        found = card(page, "my-rule")
        expect(found.get_by_role("heading", name=HOSTILE)).to_be_in_viewport()
        for text in (f"(loss - 1) / {HOSTILE} above 2", "not token_similarity at most 0.5 in any layer", "{loss_now}"):
            expect(found).to_contain_text(text)
        expect(found).to_contain_text("in the first 100 steps of an attempt")
        expect(page.get_by_role("link", name=HOSTILE + str(width))).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "Rules · tsemon"


class TestARuleOfOnesOwn:
    """Last, because the other tests count the rules."""

    def test_may_be_no_more_than_a_name_and_a_line(self, page, service):
        rule = {"name": "short-rule", "when": "loss > 10 for 4 samples"}
        service.request("PUT", "/api/v1/rules/short-rule", content=json.dumps(rule)).raise_for_status()
        look(page, "?rule=short-rule")
        found = page.get_by_role("region", name="Custom").get_by_role("article", name="short-rule", exact=True)
        for text in ("warning", "Short rule", "fires when loss above 10", "for 4 samples in a row"):
            expect(found).to_contain_text(re.compile(re.escape(text).replace(r"\ ", r"\s*")))
        expect(found).not_to_contain_text("undefined")


class TestTheRulesOfAProject:
    def test_are_chosen_and_told_from_the_servers(self, page, edited, own):
        look(page)
        expect(card(page, "of-speech")).to_have_count(0)
        page.get_by_label("project", exact=True).select_option("speech")
        expect(page.get_by_role("heading", name="In project speech: 2 of its own")).to_be_visible()
        expect(card(page, "of-speech")).to_contain_text("of the project")
        expect(card(page, "loss-spike")).to_contain_text("info")
        expect(card(page, "loss-stall")).not_to_contain_text("of the project")
        assert "project=speech" in page.url
        page.get_by_label("project", exact=True).select_option("any")
        expect(card(page, "of-speech")).to_have_count(0)

    def test_are_those_that_a_run_of_the_project_shows(self, page, service, own):
        run_id = service.register("a-run", project="speech")
        look(page, f"?run={run_id}")
        expect(page.get_by_role("heading", name="In project speech")).to_be_visible()
        expect(card(page, "of-speech").locator(".stands")).to_contain_text("unknown")

    def test_are_where_its_alerts_lead(self, page, run):
        page.goto(f"/#/run/{run}")
        link = page.get_by_role("link", name="token-similarity-escalation").first
        expect(link).to_have_attribute("href", "#/rules?rule=token-similarity-escalation&project=vision")
