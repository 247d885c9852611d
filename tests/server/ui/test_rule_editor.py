"""The editor of rules, in Chromium on the real service."""

import json
import math
import re
from contextlib import ExitStack, closing

import pytest
from playwright.sync_api import expect

from tests.server.test_rulebook import RULE
from tests.server.ui.conftest import START_S, Server, opened, option_of, served
from tsemon.wire import Array, Frame
from tsemon_server.access.tokens import new_token
from tsemon_server.settings import Settings
from tsemon_server.store import Store

HOSTILE = '"><img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def service(server: Server, tmp_path_factory):
    with server.showing(Settings(database=f"sqlite:///{tmp_path_factory.mktemp('editor')}/tsemon.db")) as service:
        yield service


@pytest.fixture(scope="module")
def run(service):
    """A loss that falls, and is high from step 500 to 690."""
    quantities = [{"name": "own_norm", "axis": "block", "title": HOSTILE}]
    run_id = service.register("spiky", project="vision", quantities=quantities)
    send(service, run_id, 100)
    return run_id


def send(service, run_id, num):
    frames = []
    for place in range(num):
        loss = 20.0 if 50 <= place < 70 else 3 * math.exp(-place / 50)
        scalars = {"loss": loss, "val/loss": 2.0}
        layers = {"grad_norm": Array.of([1.0, 2.0, 3.0, 4.0]), "own_norm": Array.of([1.0, 1.0, 1.0, 1.0])}
        frames.append(Frame(place, place * 10, START_S + place, scalars, layers))
    service.send(run_id, *frames)


def open_editor(page, run, name=""):
    page.goto(f"/#/rule{name and '/' + name}?run={run}")
    expect(when(page)).to_be_visible()
    expect(page.get_by_role("link", name="spiky")).to_be_visible()


def when(page):
    return page.get_by_role("combobox", name="Fires when")


def options(page):
    return page.get_by_role("listbox", name="Names that fit").get_by_role("option")


def said(page):
    return page.locator(".trial .said")


def mark_of(page, field="rule-when"):
    """The text that is marked as wrong, and whether the mark lies exactly below these letters of the field."""
    return page.locator(f".box:has(#{field}) mark")


def put(service, rule):
    service.request("PUT", f"/api/v1/rules/{rule['name']}", content=json.dumps(rule)).raise_for_status()


def newest(service, name):
    return service.request("GET", f"/api/v1/rules/{name}").json()["versions"][0]


class TestAMistake:
    def test_is_shown_at_its_column_while_one_types_and_goes_once_it_is_mended(self, page, run):
        open_editor(page, run)
        when(page).press_sequentially("any(grd_norm > 10)", delay=5)
        expect(page.locator("#rule-when-mistake")).to_contain_text("column 5")
        expect(page.locator("#rule-when-mistake")).to_contain_text("no metric is named 'grd_norm'")
        expect(mark_of(page)).to_have_text("grd_norm")
        expect(when(page)).to_have_attribute("aria-invalid", "true")
        page.get_by_role("button", name="Use grad_norm").click()
        expect(when(page)).to_have_value("any(grad_norm > 10)")
        expect(when(page)).to_be_focused()
        expect(page.locator("#rule-when-mistake")).to_be_empty()
        expect(mark_of(page)).to_have_count(0)
        expect(page.locator(".words")).to_contain_text("grad_norm above 10 in any layer")

    def test_is_marked_where_the_letters_are_also_in_a_line_that_wraps(self, page, run):
        open_editor(page, run)
        when(page).fill("loss > 1 and " * 12 + "lss > 3")
        expect(mark_of(page)).to_have_text("lss")
        mark, field = mark_of(page).bounding_box(), when(page).bounding_box()
        assert field["y"] + field["height"] - 45 < mark["y"] < field["y"] + field["height"]
        assert when(page).evaluate("field => field.scrollHeight <= field.clientHeight + 1"), "all of the line is seen"

    def test_keeps_its_place_while_one_goes_on_typing(self, page, run):
        open_editor(page, run)
        when(page).fill("lss > 3 ")
        expect(mark_of(page)).to_have_text("lss")
        page.route("**/rules/check", lambda route: None)  # no answer comes
        when(page).press_sequentially("and loss > 1")
        expect(mark_of(page)).to_have_text("lss")
        when(page).press("Home")
        when(page).press_sequentially("loss > 2 or ")
        expect(mark_of(page)).to_have_text("lss")

    def test_at_the_end_is_a_gap(self, page, run):
        open_editor(page, run)
        when(page).fill("loss >")
        expect(page.locator("#rule-when-mistake")).to_contain_text("column 7something is missing at the end")
        expect(page.locator("mark.gap")).to_have_count(1)

    def test_of_an_older_line_is_not_shown_when_its_answer_comes_late(self, page, run):
        open_editor(page, run)
        held = []

        def hold_first(route):
            if "lss" in route.request.post_data and not held:
                held.append(route)
            else:
                route.continue_()

        page.route("**/rules/check", hold_first)
        when(page).fill("lss > 3")
        page.wait_for_timeout(400)
        when(page).fill("loss > 3")
        expect(page.locator(".words")).to_contain_text("loss above 3")
        held[0].abort()
        page.wait_for_timeout(200)
        expect(page.locator("#rule-when-mistake")).to_be_empty()
        expect(page.locator(".mistake", has_text="cannot be checked")).to_have_count(0)

    def test_is_shown_at_its_own_field(self, page, run):
        open_editor(page, run)
        when(page).fill("loss > 3 for 3 samples")
        page.get_by_label("Name", exact=True).fill("No Name")
        expect(page.locator("#rule-name-mistake")).to_contain_text("expected a name of small letters")
        page.get_by_label("Name", exact=True).fill("fine")
        page.get_by_label("For: samples", exact=True).fill("2")
        expect(page.locator("#rule-for-mistake")).to_contain_text("the line of 'when' has `for`, too")
        page.get_by_label("For: samples", exact=True).fill("")
        expect(page.get_by_label("For: samples", exact=True)).to_have_attribute("placeholder", "3")
        page.get_by_text("When it clears").click()
        page.get_by_role("combobox", name="Clears when").fill("los < 2")
        expect(mark_of(page, "rule-clear")).to_have_text("los")
        page.get_by_label("Advice", exact=True).fill("The loss is {x}.")
        expect(page.locator("#rule-advice-mistake")).to_contain_text("{x} is not in evidence")

    def test_does_not_greet_whoever_begins_a_new_rule(self, page, run):
        open_editor(page, run)
        when(page).press_sequentially("loss > 3")
        expect(page.locator(".words")).to_contain_text("loss above 3")
        assert page.locator(".mistake").all_text_contents() == [""] * page.locator(".mistake").count()


class TestCompletion:
    def test_takes_a_name_with_the_keyboard_alone(self, page, run):
        open_editor(page, run)
        when(page).press_sequentially("any(grad")
        expect(when(page)).to_have_attribute("aria-expanded", "true")
        expect(options(page).first).to_have_attribute("aria-selected", "true")
        active = when(page).get_attribute("aria-activedescendant")
        expect(page.locator(f"#{active}")).to_contain_text("grad_norm")
        expect(page.locator(f"#{active}")).to_contain_text("norm of the block's gradient")
        when(page).press("Enter")
        expect(when(page)).to_have_value("any(grad_norm")
        expect(page.get_by_role("listbox", name="Names that fit")).to_be_hidden()
        when(page).press_sequentially(" > 3)")
        expect(page.locator(".words")).to_contain_text("grad_norm above 3 in any layer")

    def test_moves_with_the_arrows_and_puts_the_caret_into_a_function(self, page, run):
        open_editor(page, run)
        when(page).press_sequentially("me")
        expect(options(page).nth(0)).to_contain_text("mean(x[, samples])")
        when(page).press("ArrowDown")
        when(page).press("ArrowDown")
        expect(options(page).nth(2)).to_have_attribute("aria-selected", "true")
        expect(options(page).nth(2)).to_contain_text("Median over layers or heads")
        when(page).press("Tab")
        when(page).press_sequentially("loss, samples=5")
        expect(when(page)).to_have_value("median(loss, samples=5)")
        expect(when(page)).to_be_focused()

    def test_goes_with_escape_and_comes_with_control_and_space(self, page, run):
        open_editor(page, run)
        when(page).press_sequentially("lo")
        expect(options(page).first).to_be_visible()
        when(page).press("Escape")
        expect(options(page)).to_have_count(0)
        when(page).press("Tab")
        expect(when(page)).not_to_be_focused()
        when(page).focus()
        when(page).press("Control+ ")
        expect(options(page).first).to_contain_text("loss")
        when(page).fill("")
        when(page).press("Control+ ")
        assert options(page).count() > 20

    def test_offers_what_the_run_has_in_quotes(self, page, run):
        open_editor(page, run)
        when(page).press_sequentially("val")
        first = options(page).first
        expect(first).to_contain_text("val/loss")
        first.click()
        expect(when(page)).to_have_value('scalar("val/loss")')
        when(page).fill("")
        when(page).press_sequentially('max(layers("ow')
        expect(options(page)).to_have_count(1)
        when(page).press("Enter")
        when(page).press_sequentially(")) > 3")
        expect(when(page)).to_have_value('max(layers("own_norm")) > 3')
        expect(page.locator(".words")).to_contain_text("own_norm")

    def test_shows_what_a_client_sent_as_text(self, page, run):
        open_editor(page, run)
        when(page).press_sequentially("own_n")
        expect(options(page).first).to_contain_text(HOSTILE)
        when(page).press("Enter")
        expect(when(page)).to_have_value('layers("own_norm")')
        assert page.locator("main img").count() == 0
        assert page.title() == "New rule · tsemon"

    def test_can_be_undone(self, page, run):
        open_editor(page, run)
        when(page).press_sequentially("any(token_div")
        when(page).press("Enter")
        expect(when(page)).to_have_value("any(token_diversity")
        when(page).press("Control+z")
        expect(when(page)).not_to_have_value("any(token_diversity")

    @pytest.mark.parametrize(
        "line", ["loss > 3 for 200 steps", "loss > 3 after 5 samples, 200 steps", "loss > 3 for 2 st"]
    )
    @pytest.mark.parametrize("key", ["Tab", "Enter"])
    def test_leaves_the_unit_of_a_duration_alone(self, page, run, line, key):
        open_editor(page, run)
        when(page).press_sequentially(line)
        when(page).press(key)
        expect(when(page)).to_have_value(line)

    def test_offers_at_the_end_of_a_line_what_can_follow_there(self, page, run):
        open_editor(page, run)
        when(page).press_sequentially("loss > 3 for 200 steps a")
        expect(options(page)).to_have_count(1)
        when(page).press("Tab")
        expect(when(page)).to_have_value("loss > 3 for 200 steps after")

    @pytest.mark.parametrize("key", ["Tab", "Enter"])
    def test_takes_nothing_of_itself_where_the_word_is_complete(self, page, run, key):
        open_editor(page, run)
        when(page).press_sequentially("loss")
        expect(options(page).first).to_contain_text("loss")
        expect(page.locator("[role=option][aria-selected=true]")).to_have_count(0)
        when(page).press(key)
        expect(when(page)).to_have_value("loss")
        expect(options(page)).to_have_count(0)
        when(page).focus()
        when(page).press("Control+ ")
        when(page).press("ArrowDown")
        when(page).press("ArrowDown")
        when(page).press(key)
        expect(when(page)).not_to_have_value("loss")

    @pytest.mark.parametrize("width", [1280, 390])
    def test_leaves_what_is_wrong_elsewhere_in_the_line_to_be_read(self, page, run, width):
        page.set_viewport_size({"width": width, "height": 900})
        open_editor(page, run)
        when(page).press_sequentially("lss > 3 and steps_")
        expect(options(page)).to_have_count(3)
        expect(page.locator("#rule-when-mistake")).to_contain_text("no metric is named 'lss'")
        expect(page.locator("#rule-when-mistake")).to_be_visible()
        mistake = page.locator("#rule-when-mistake").bounding_box()
        assert (
            page.get_by_role("listbox", name="Names that fit").bounding_box()["y"] >= mistake["y"] + mistake["height"]
        )
        expect(mark_of(page)).to_have_css("text-decoration-line", "underline")

    def test_hides_what_is_wrong_with_the_word_that_is_typed_until_it_is_closed(self, page, run):
        open_editor(page, run)
        with page.expect_response("**/rules/check"):
            when(page).press_sequentially("3 < grad_n")
        expect(mark_of(page)).to_have_text("grad_n")
        expect(page.locator("#rule-when-mistake")).to_be_hidden()
        when(page).press("Escape")
        expect(page.locator("#rule-when-mistake")).to_be_visible()

    def test_breaks_no_name_in_a_narrow_window(self, page, run):
        page.set_viewport_size({"width": 390, "height": 900})
        open_editor(page, run)
        when(page).press_sequentially("steps_since")
        for name in options(page).locator("b").all():
            assert name.bounding_box()["height"] < 25, "one line"

    def test_fits_a_narrow_window(self, page, run):
        page.set_viewport_size({"width": 375, "height": 800})
        open_editor(page, run)
        when(page).press_sequentially("loss > 1 and any(attention_e")
        box = page.get_by_role("listbox", name="Names that fit").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 375
        assert page.evaluate("document.documentElement.scrollWidth") == 375


class TestWhereItWouldHaveFired:
    def test_is_told_and_drawn_for_the_run_that_one_came_from(self, page, run):
        open_editor(page, run)
        when(page).fill("loss > 10 for 3 samples")
        expect(said(page)).to_have_text("Would have fired at step 520, resolved at 720.")
        chart = page.get_by_role("img", name=re.compile("loss above 10 over steps 0 to 990"))
        expect(chart.locator("canvas")).to_be_visible()
        expect(page.get_by_role("heading", name=re.compile("loss above 10.*held in 20 of 100 samples"))).to_be_visible()
        chart.hover(position={"x": chart.bounding_box()["width"] * 0.6, "y": 70})
        expect(chart.locator(".tip")).to_contain_text("above 10")

    @pytest.mark.parametrize(
        ("line", "text"),
        [
            ("loss > 30", "Would never have fired. Nearest: 20 against 30 at step 500."),
            (
                "loss > 10 for 50 samples",
                "Would never have fired: the condition was met once, but not for long enough.",
            ),
            (
                "loss < 2.9 for 3 samples",
                "Would have fired 2 times, at steps 40 and 720. The last one lasts to the end",
            ),
            ("any(sink_share > 0.5)", "Would never have fired: the run has nothing that the rule reads."),
        ],
    )
    def test_is_told_in_a_sentence(self, page, run, line, text):
        open_editor(page, run)
        when(page).fill(line)
        expect(said(page)).to_contain_text(text)

    def test_cannot_be_told_of_a_rule_that_follows_the_clock(self, page, run):
        open_editor(page, run, "process-silent")
        expect(said(page)).to_contain_text("This rule follows the server's clock")

    def test_has_no_run_to_show_on_a_server_without_frames(self, page, service, run):
        page.route("**/api/v1/runs?*", lambda route: route.fulfill(json={"runs": [], "next_cursor": None, "total": 0}))
        page.goto("/#/rule")
        expect(said(page)).to_contain_text("There is no run with frames yet.")
        when(page).press_sequentially("any(grad")
        expect(options(page).first).to_contain_text("grad_norm")

    def test_begins_with_a_run_of_the_project(self, page, service, run):
        other = service.register("elsewhere", project="elsewhere")
        service.send_steps(other, range(10), loss=1.0)
        page.goto("/#/rule?project=vision")
        expect(page.get_by_role("link", name="spiky")).to_be_visible()
        page.goto("/#/rule?project=empty")
        expect(said(page)).to_contain_text("Project empty has no run with frames yet.")
        service.request("DELETE", f"/api/v1/runs/{other}").raise_for_status()

    def test_draws_each_quantity_once(self, page, run):
        open_editor(page, run)
        when(page).fill(" or ".join(["any(grad_norm > 10)"] * 5 + ["any(grad_norm > 3)"]))
        expect(page.locator(".trial-heads h4")).to_have_count(1)
        expect(page.locator(".trial-heads h4 .given")).to_have_text(
            "grad_norm above 10 in any layer, above 3 in any layer"
        )

    @pytest.mark.parametrize(
        ("num", "text"), [(7, "One more value is not drawn."), (8, "2 more values are not drawn.")]
    )
    def test_counts_what_is_not_drawn(self, page, run, num, text):
        open_editor(page, run)
        when(page).fill(" or ".join(f"mean(loss, samples={2 + place}) > 30" for place in range(num)))
        expect(page.get_by_text(text)).to_be_visible()

    def test_has_whole_headings_in_a_narrow_window(self, page, run):
        page.set_viewport_size({"width": 390, "height": 900})
        open_editor(page, run)
        when(page).fill("highest(mean(loss, samples=20)) / median(loss, samples=30) > 10 or loss > 30")
        heads = page.locator(".trial-heads h4")
        expect(heads).to_have_count(2)
        boxes = [head.bounding_box() for head in heads.all()]
        for head in heads.all():
            expect(head).to_contain_text(re.compile(r"held in \d+ of \d+ samples"))
            assert head.locator(".quiet").is_visible()
            assert head.locator(".given").evaluate("one => one.scrollWidth <= one.clientWidth + 1")
        tops = option_of(page.locator(".trial-chart"), "grid", "top")
        assert tops[0] >= boxes[0]["height"]
        assert tops[1] - tops[0] - 104 >= boxes[1]["height"]

    @pytest.mark.parametrize(
        ("line", "text"),
        [
            ('scalar("los") > 3', "The run has no los; did you mean loss?"),
            ('any(layers("ownnorm") > 3)', "The run has no ownnorm; did you mean own_norm?"),
            ('scalar("quite_other") > 3', "The run has no quite_other."),
            ("layer(grad_norm, 99) < 0.1", "In this run grad_norm has the layers 0 to 3, and none is 99."),
        ],
    )
    def test_says_why_a_condition_can_never_change(self, page, run, line, text):
        open_editor(page, run)
        when(page).fill(line)
        expect(page.locator(".trial .details")).to_have_text(text)

    def test_does_not_say_that_a_run_has_nothing_of_a_metric_that_it_has(self, page, run):
        open_editor(page, run)
        when(page).fill("layer(grad_norm, 99) < 0.1")
        expect(said(page)).to_have_text("Would never have fired: its condition was never known.")

    def test_names_what_the_run_lacks(self, page, run):
        open_editor(page, run)
        when(page).fill("any(sink_share > 0.5) or loss > 10")
        expect(page.locator(".trial .details")).to_have_text("The run has no sink_share.")

    @pytest.fixture
    def newer(self, service):
        run_id = service.register("calm", project="vision")
        service.send_steps(run_id, range(10), loss=1.0)
        yield
        service.request("DELETE", f"/api/v1/runs/{run_id}").raise_for_status()

    def test_is_of_the_newest_run_or_of_one_that_is_searched(self, page, newer, run):
        page.goto("/#/rule")
        expect(page.get_by_role("link", name="calm")).to_be_visible()
        when(page).fill("loss > 10 for 3 samples")
        expect(said(page)).to_contain_text("Would never have fired. Nearest: 1 against 10")
        page.get_by_role("button", name="Another run").click()
        field = page.get_by_role("combobox", name="Find a run")
        expect(field).to_be_focused()
        field.fill("spiky")
        # By its name: until the search is answered, the list has the runs from before.
        page.get_by_role("listbox", name="Runs that fit").get_by_role("option", name="spiky").first.click()
        expect(said(page)).to_have_text("Would have fired at step 520, resolved at 720.")
        expect(page).to_have_url(re.compile(f"run={run}"))

    def test_follows_the_line_one_trial_at_a_time(self, page, run):
        open_editor(page, run)
        held, asked = [], []

        def hold_first(route):
            asked.append(route.request.post_data_json["rules"])
            if held:
                route.continue_()
            else:
                held.append(route)

        page.route("**/rules/test", hold_first)
        for bound in ("10", "11", "12"):
            when(page).fill(f"loss > {bound} for 3 samples")
            expect(page.locator(".words")).to_contain_text(f"loss above {bound}")
        page.wait_for_timeout(300)
        assert len(asked) == 1
        held[0].continue_()
        expect(page.get_by_role("heading", name=re.compile("loss above 12"))).to_be_visible()
        assert len(asked) == 2, "the line in between is not tried"

    def test_is_shown_for_each_attempt(self, page, service):
        run_id = service.register("spiky", project="attempts")
        send(service, run_id, 100)
        service.register("spiky", project="attempts", resume_step=400)
        body = {
            "writer": "writer",
            "attempt": 2,
            "frames": [{"seq": i, "step": 400 + i, "time": START_S + i, "scalars": {"loss": 1}} for i in range(5)],
        }
        service.request("POST", f"/api/v1/runs/{run_id}/frames", json=body).raise_for_status()
        open_editor(page, run_id)
        when(page).fill("loss > 10 for 3 samples")
        expect(said(page)).to_contain_text("Would have fired at step 520")
        page.get_by_label("Attempt").select_option("2")
        expect(said(page)).to_contain_text("Would never have fired. Nearest: 1 against 10")
        service.request("DELETE", f"/api/v1/runs/{run_id}").raise_for_status()


class TestSaving:
    def test_a_new_rule(self, page, service, run):
        open_editor(page, run)
        when(page).fill("  loss > 10 ")
        page.get_by_label("Name", exact=True).fill("loss-is-high")
        page.get_by_label("Severity").select_option("critical")
        page.get_by_label("For: samples", exact=True).fill("4")
        page.get_by_label("For: steps", exact=True).fill("20")
        page.get_by_label("After: steps").fill("100")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_text("Saved as version 1.")).to_be_visible()
        assert newest(service, "loss-is-high")["definition"] == {
            "name": "loss-is-high",
            "when": "loss > 10",
            "severity": "critical",
            "for": {"samples": 4, "steps": 20},
            "after": {"steps": 100},
        }
        expect(page.get_by_role("button", name="Save")).to_be_disabled()
        expect(page).to_have_url(re.compile("#/rule/loss-is-high"))
        page.reload()
        expect(when(page)).to_have_value("loss > 10")
        expect(page.get_by_label("For: steps", exact=True)).to_have_value("20")

    def test_a_change_keeps_what_the_editor_does_not_show(self, page, service, run):
        rule = {
            **RULE,
            "name": "old-form",
            "aliases": ["HighLoss"],
            "evidence": {"tree": [{"scalar": "loss"}], "line": "2 * loss"},
        }
        put(service, rule)
        open_editor(page, run, "old-form")
        expect(when(page)).to_have_value("loss > 10")
        expect(page.get_by_role("button", name="Save")).to_be_disabled()
        page.get_by_text("When it clears").click()
        expect(page.get_by_role("combobox", name="Clears when")).to_have_value("loss < 5")
        when(page).fill("loss > 12")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_text("Saved as version 2.")).to_be_visible()
        assert newest(service, "old-form")["definition"] == {**rule, "when": "loss > 12"}

    def test_is_refused_with_what_the_server_says(self, browser, service, run):
        with opened(browser, service, but="status of 422") as page:
            open_editor(page, run)
            page.get_by_label("Name", exact=True).fill("refused")
            when(page).fill("lss > 10")
            page.get_by_role("button", name="Save").click()
            expect(page.get_by_text("Not saved. body line 1: rules[0].when: column 1: no metric")).to_be_visible()
            expect(mark_of(page)).to_have_text("lss")
            expect(page.get_by_role("button", name="Save")).to_be_enabled()

    def test_needs_a_name(self, page, run):
        open_editor(page, run)
        when(page).fill("loss > 10")
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#rule-name-mistake")).to_contain_text("Give the rule a name")
        expect(page.get_by_label("Name", exact=True)).to_be_focused()

    def test_goes_on_to_ask_for_a_name_while_the_line_is_checked(self, page, run):
        open_editor(page, run)
        with page.expect_response("**/rules/check"):
            when(page).fill("loss > 10")
            page.get_by_role("button", name="Save").click()
        expect(page.locator(".words")).to_contain_text("loss above 10")
        expect(page.locator("#rule-name-mistake")).to_contain_text("Give the rule a name")
        expect(page.get_by_text("Not saved: the rule has no name yet.")).to_be_visible()
        page.get_by_label("Name", exact=True).fill("a-name")
        expect(page.locator("#rule-name-mistake")).to_be_empty()

    def test_says_what_another_name_does(self, page, service, run):
        put(service, RULE | {"name": "there-already"})
        open_editor(page, run, "loss-stall")
        page.get_by_label("Name", exact=True).fill("mine")
        expect(page.get_by_text("Saving adds the rule mine; loss-stall stays as it is.")).to_be_visible()
        page.get_by_label("Name", exact=True).fill("there-already")
        expect(page.get_by_text("Saving replaces the rule there-already")).to_be_visible()


class TestTheRuleInWords:
    def test_says_when_it_begins(self, page, run):
        open_editor(page, run)
        when(page).fill("loss > 10 for 4 samples after 300 steps")
        expect(page.locator(".words")).to_contain_text("not in the first 300 steps of an attempt")
        when(page).fill("loss > 10 for 4 samples")
        expect(page.locator(".words")).not_to_contain_text("not in the first")

    def test_is_called_added_before_it_is_edited(self, page, service, run):
        put(service, RULE | {"name": "added-here"})
        open_editor(page, run, "added-here")
        expect(page.get_by_text("added, version 1")).to_be_visible()
        when(page).fill("loss > 11")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_text("edited, version 2")).to_be_visible()

    def test_has_its_advice_without_a_line_that_is_cut(self, page, service, run):
        put(service, RULE | {"name": "long-advice", "advice": "A sentence of some length. " * 30})
        page.set_viewport_size({"width": 390, "height": 900})
        open_editor(page, run, "long-advice")
        page.get_by_text("When it clears").click()
        assert page.get_by_label("Advice", exact=True).evaluate("one => one.scrollHeight <= one.clientHeight + 1")


class TestTheProject:
    def test_stays_in_the_address_and_counts_after_a_reload(self, page, service, run):
        service.request(
            "PUT", "/api/v1/rules/loss-spike?project=vision", json={"name": "loss-spike", "when": "loss > 7"}
        )
        page.goto(f"/#/rule/loss-spike?project=vision&run={run}")
        expect(page.get_by_text("of the project, version 2")).to_be_visible()
        expect(page.get_by_role("link", name="spiky")).to_be_visible()
        assert "project=vision" in page.url
        page.reload()
        expect(page.get_by_text("of the project, version 2")).to_be_visible()
        expect(page.get_by_text("Saves for: project vision only")).to_be_visible()
        page.get_by_role("link", name="All rules").click()
        expect(page).to_have_url(re.compile("#/rules\\?project=vision"))

    def test_of_a_new_rule_is_where_it_is_saved(self, page, service, run):
        page.goto("/#/rule?project=vision")
        expect(page.get_by_role("link", name="spiky")).to_be_visible()
        page.reload()
        expect(page.get_by_text("Saves for: project vision only")).to_be_visible()
        when(page).fill("loss > 10")
        page.get_by_label("Name", exact=True).fill("vision-only")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_text("of the project, version 1")).to_be_visible()
        assert service.request("GET", "/api/v1/rules/vision-only").status_code == 404

    def test_is_all_of_them_where_none_is_chosen(self, page, run):
        open_editor(page, run, "loss-stall")
        expect(page.get_by_text("Saves for: all projects without a version of their own")).to_be_visible()

    def test_is_followed_in_the_address_with_a_question_before_changes_are_lost(self, page, service, run):
        open_editor(page, run, "loss-stall")
        when(page).fill("loss > 10")
        page.evaluate("location.hash = '#/rule/loss-stall?project=vision'")
        page.get_by_role("button", name="Leave").click()
        expect(page.get_by_text("Saves for: project vision only")).to_be_visible()
        expect(when(page)).not_to_have_value("loss > 10")


class TestWhetherItIsInForce:
    def test_is_told_before_it_is_disabled_and_it_can_be_enabled_again(self, page, service, run):
        put(service, RULE | {"name": "switched"})
        open_editor(page, run, "switched")
        expect(page.get_by_role("button", name="Enable")).to_be_hidden()
        expect(page.get_by_role("button", name="Restore")).to_be_hidden()
        page.get_by_role("button", name="Disable").click()
        dialog = page.get_by_role("dialog", name="Disable switched?")
        expect(dialog).to_contain_text("Its firing alerts there are resolved with “rule disabled”")
        dialog.get_by_role("button", name="Cancel").click()
        assert newest(service, "switched")["enabled"]
        page.get_by_role("button", name="Disable").click()
        when_unsaved = "loss > 77"
        dialog.get_by_role("button", name="Disable").click()
        expect(page.get_by_text("version 2, disabled")).to_be_visible()
        assert not newest(service, "switched")["enabled"]
        expect(page.get_by_role("button", name="Disable")).to_be_hidden()
        when(page).fill(when_unsaved)
        page.get_by_role("button", name="Enable").click()
        expect(page.get_by_text("Enabled. It counts from the next frame on.")).to_be_visible()
        found = newest(service, "switched")
        assert (found["enabled"], found["definition"]["when"]) == (True, RULE["when"]), (
            "what is not saved does not count"
        )
        expect(when(page)).to_have_value(when_unsaved)

    def test_resolves_its_alerts_when_it_is_disabled(self, page, service, run):
        put(service, {"name": "always", "when": "loss > 0 for 1 samples"})
        other = service.register("alerting", project="alerting")
        service.send_steps(other, range(3), loss=1.0)
        open_editor(page, run, "always")
        page.get_by_role("button", name="Disable").click()
        page.get_by_role("dialog").get_by_role("button", name="Disable").click()
        expect(page.get_by_text("Disabled. Its alerts are resolved.")).to_be_visible()
        alerts = service.request("GET", f"/api/v1/alerts?run={other}&rule=always").json()["alerts"]
        assert [(alert["state"], alert["resolved_reason"]) for alert in alerts] == [("resolved", "rule disabled")]
        service.request("DELETE", f"/api/v1/runs/{other}").raise_for_status()

    def test_can_be_as_it_came(self, page, service, run):
        came = newest(service, "states-collapse")["definition"]
        put(service, {**came, "severity": "info"})
        open_editor(page, run, "states-collapse")
        page.get_by_role("button", name="Restore").click()
        dialog = page.get_by_role("dialog", name="Restore states-collapse?")
        expect(dialog).to_contain_text("The rule as it came with tsemon counts again.")
        dialog.get_by_role("button", name="Restore").click()
        expect(page.get_by_text("built in, version 3")).to_be_visible()
        expect(page.get_by_label("Severity")).to_have_value(came["severity"])
        expect(page.get_by_role("button", name="Restore")).to_be_hidden()
        assert newest(service, "states-collapse")["definition"] == came

    def test_can_be_the_servers_again_in_a_project(self, page, service, run):
        path = "/api/v1/rules/token-rank-collapse?project=vision"
        service.request("PUT", path, json={"name": "token-rank-collapse", "when": "loss > 7"}).raise_for_status()
        page.goto(f"/#/rule/token-rank-collapse?project=vision&run={run}")
        expect(page.get_by_text("of the project, version 2")).to_be_visible()
        page.get_by_role("button", name="Restore").click()
        dialog = page.get_by_role("dialog", name="Restore token-rank-collapse?")
        expect(dialog).to_contain_text("The server's version counts again in project vision.")
        dialog.get_by_role("button", name="Restore").click()
        expect(page.get_by_text("built in, version 1")).to_be_visible()
        expect(when(page)).to_have_value(re.compile("effective_rank"))


class TestWhatAnotherSavedMeanwhile:
    def test_is_asked_about_with_both_texts_at_hand(self, page, service, run):
        put(service, {"name": "contested", "when": "loss > 10"})
        open_editor(page, run, "contested")
        when(page).fill("loss > 12")
        put(service, {"name": "contested", "when": "loss > 11", "severity": "critical"})
        page.get_by_role("button", name="Save").click()
        notice = page.get_by_role("alert").filter(has_text="Not saved yet.")
        expect(notice).to_contain_text("You began with version 1. Another person saved a newer one meanwhile")
        expect(notice).to_contain_text("loss > 11")
        expect(notice).to_contain_text("critical")
        assert newest(service, "contested")["version"] == 2
        expect(when(page)).to_have_value("loss > 12")
        page.get_by_role("button", name="Put version 2 into the fields").click()
        expect(when(page)).to_have_value("loss > 11")
        expect(page.get_by_label("Severity")).to_have_value("critical")
        expect(page.get_by_role("button", name="Save")).to_be_disabled()
        page.get_by_role("button", name="Put my text into the fields").click()
        expect(when(page)).to_have_value("loss > 12")
        expect(page.get_by_label("Severity")).to_have_value("warning")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_text("Saved as version 3.")).to_be_visible()
        assert newest(service, "contested")["definition"]["when"] == "loss > 12"
        expect(page.get_by_role("button", name="Put version 2 into the fields")).to_be_visible()

    def test_is_also_a_rule_that_was_added_under_the_same_name(self, page, service, run):
        open_editor(page, run)
        when(page).fill("loss > 12")
        page.get_by_label("Name", exact=True).fill("also-mine")
        put(service, {"name": "also-mine", "when": "loss > 11"})
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_text("Another person added a rule of this name meanwhile")).to_be_visible()
        assert newest(service, "also-mine")["definition"]["when"] == "loss > 11"
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_text("Saved as version 2.")).to_be_visible()


class TestUnsavedChanges:
    def test_are_not_left_without_a_question(self, page, run):
        open_editor(page, run)
        when(page).fill("loss > 10")
        page.get_by_role("link", name="Alerts").click()
        page.get_by_role("button", name="Stay").click()
        expect(when(page)).to_have_value("loss > 10")
        expect(page).to_have_url(re.compile("#/rule"))
        page.get_by_role("link", name="Alerts").click()
        page.get_by_role("button", name="Leave").click()
        expect(page).to_have_url(re.compile("#/alerts"))
        expect(page.get_by_role("heading", name="Alerts", exact=True)).to_be_visible()

    def test_are_asked_for_by_the_browser_when_the_tab_closes(self, page, run):
        open_editor(page, run)
        when(page).press_sequentially("loss > 10")
        asked = []
        page.on("dialog", lambda dialog: (asked.append(dialog.type), dialog.accept()))
        page.reload()
        assert asked == ["beforeunload"]

    def test_can_be_discarded(self, page, run):
        open_editor(page, run, "loss-stall")
        before = when(page).input_value()
        when(page).fill("loss > 10")
        page.get_by_role("button", name="Discard changes").click()
        expect(when(page)).to_have_value(before)
        page.get_by_role("link", name="Alerts").click()
        expect(page.get_by_role("heading", name="Alerts", exact=True)).to_be_visible()


class TestTheWay:
    def test_leads_from_the_rules_to_the_editor_and_back_with_the_run(self, page, run):
        page.goto(f"/#/rules?run={run}")
        page.get_by_role("link", name="Edit loss-stall").click()
        expect(page.get_by_role("heading", name="loss-stall")).to_be_visible()
        expect(page.get_by_role("link", name="spiky")).to_be_visible()
        expect(page.get_by_role("link", name="Rules", exact=True)).to_have_attribute("aria-current", "page")
        page.get_by_role("link", name="All rules").click()
        page.get_by_role("link", name="New rule").click()
        expect(page.get_by_role("heading", name="New rule")).to_be_visible()

    def test_of_a_rule_that_is_not_there_ends_with_a_word(self, page):
        page.goto("/#/rule/nothing")
        expect(page.get_by_text("no rule is named 'nothing'")).to_be_visible()


@pytest.fixture
def guarded(browser, tmp_path):
    """Opens the editor of a rule with a token of its own."""
    database = f"sqlite:///{tmp_path}/guarded.db"
    with served(Settings(database=database, tokens=True)) as service, closing(Store(database)) as store:

        def token(scope, project=None):
            made = new_token()
            about = {"name": scope, "digest": made.digest, "scopes": [scope], "project": project, "expires_at": None}
            store.tokens.add(made.token_id, **about)
            return made.text

        def sent(path, body):
            headers = {"Authorization": f"Bearer {admin}"}
            return service.request("POST", f"/api/v1{path}", json=body, headers=headers).raise_for_status().json()

        admin = token("admin")
        registered = sent("/runs", {"run": "spiky", "project": "p", "blocks": []})
        losses = [20 if step > 5 else 1 for step in range(20)]
        frames = [
            {"seq": step, "step": step, "time": START_S + step, "scalars": {"loss": loss}}
            for step, loss in enumerate(losses)
        ]
        sent(f"/runs/{registered['run_id']}/frames", {"writer": "w", "attempt": 1, "frames": frames})
        with ExitStack() as pages:

            def opened_with(scope, project=None):
                page = pages.enter_context(opened(browser, service, but="status of 401"))
                page.goto("/#/rule/loss-stall")
                page.get_by_label("Token", exact=True).fill(token(scope, project))
                page.keyboard.press("Enter")
                return page

            yield opened_with


class TestAReader:
    """Somebody whose token has the scope `read` only."""

    def test_checks_and_tries_and_cannot_save(self, guarded):
        reader = guarded("read")
        expect(reader.get_by_text("Your token may not change rules")).to_be_visible()
        expect(reader.get_by_role("button", name="Save")).to_have_count(0)
        when(reader).fill("lss > 10")
        expect(mark_of(reader)).to_have_text("lss")
        when(reader).fill("loss > 10 for 3 samples")
        expect(said(reader)).to_have_text("Would have fired at step 8, to the end of the run.")


class TestAnAdministratorOfAProject:
    def test_saves_rules_of_the_project(self, guarded):
        page = guarded("admin", "p")
        expect(page.get_by_text("In project p")).to_be_visible()
        when(page).fill("loss > 10 for 3 samples")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_text("Saved as version 2.")).to_be_visible()
        expect(page.get_by_text("of the project, version 2")).to_be_visible()
        expect(page).to_have_url(re.compile("project=p"))
        everywhere = guarded("admin")
        expect(everywhere.get_by_text("built in, version 1")).to_be_visible()
