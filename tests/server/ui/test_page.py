"""The page as people see it: Chromium on the real service."""

import json
import math
import re

import pytest
from playwright.sync_api import expect

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>'


def open_run(page, run_id, query=""):
    page.goto(f"/#/run/{run_id}{query}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()


def point_at_heat_map(page, x_ratio, y_ratio):
    """Move the mouse over the lower chart of the timeline; its plot begins 52 px from the left, 222 px from the top."""
    box = page.get_by_role("img", name="Loss and layers by step").bounding_box()
    height = box["height"] - 222 - 62
    x, y = box["x"] + 52 + x_ratio * (box["width"] - 66), box["y"] + 222 + y_ratio * height
    page.mouse.move(x, y)
    return x, y


def tooltip(page):
    return page.locator(".tip:visible")


def card_of(page, rule):
    return page.get_by_role("article", name=rule)


def fact(page, name):
    return page.locator(".facts div", has=page.get_by_text(name, exact=True)).locator("dd")


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


class TestTheListOfRuns:
    def test_says_where_each_run_is(self, page, service):
        run_id = service.register("gpt", project="pretrain")
        service.send_steps(run_id, range(0, 1250, 50), loss=2.125)
        page.goto("/")
        row = page.get_by_role("row", name="gpt")
        for text in ("pretrain", "running", "1,200", "2.125", "none"):
            expect(row).to_contain_text(text)

    def test_tells_a_loss_that_is_not_finite(self, page, service):
        service.send_steps(service.register("gpt"), range(3), loss=math.nan)
        page.goto("/")
        expect(page.get_by_role("row", name="gpt")).to_contain_text("not finite")

    def test_leads_to_a_run_by_keyboard(self, page, service):
        service.register("gpt")
        page.goto("/")
        page.get_by_role("link", name="gpt").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="gpt")).to_be_visible()

    def test_lays_the_losses_of_the_latest_runs_over_each_other(self, page, service):
        for run in ("left", "right"):
            service.send_steps(service.register(run), range(3), loss=1.5)
        page.goto("/")
        legend = page.get_by_role("list", name="Runs in the chart")
        expect(legend.get_by_role("button")).to_have_text(["right", "left"])
        legend.get_by_role("button", name="left").click()
        expect(legend.get_by_role("button", name="left")).to_have_attribute("aria-pressed", "false")
        box = page.get_by_role("img", name="Loss of the latest runs").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        expect(tooltip(page)).to_have_text("step1right1.5")


class TestARun:
    def test_without_frames_says_that_it_waits(self, page, service):
        open_run(page, service.register("gpt"))
        expect(page.get_by_text("no frame has come yet")).to_be_visible()

    def test_with_one_frame_shows_it(self, page, service):
        run_id = service.register("gpt")
        service.send_steps(run_id, [0], loss=3.25)
        open_run(page, run_id)
        expect(fact(page, "loss")).to_have_text("3.25")
        expect(page.get_by_role("heading", name="token_similarity at step 0 (latest)")).to_be_visible()
        point_at_heat_map(page, 0.5, 0.1)
        expect(tooltip(page)).to_have_text("step0layer4 · h.3token_similarity0.5")

    def test_reads_entry_zero_as_the_input_of_the_first_block(self, page, service):
        run_id = service.register("gpt")
        service.send_steps(run_id, range(10))
        open_run(page, run_id)
        expect(page.get_by_role("heading", name="at step 9")).to_be_visible()
        point_at_heat_map(page, 0.01, 0.95)
        expect(tooltip(page)).to_have_text("step0layer0 · input of h.0token_similarity0.1")

    def test_tells_what_is_not_finite_from_what_is_small(self, page, service):
        run_id = service.register("gpt")
        service.send_steps(run_id, range(10), loss=1.0)
        service.send_steps(
            run_id, range(10, 20), similarity=[0.0, math.nan, math.nan, math.inf, math.nan], loss=math.nan
        )
        open_run(page, run_id)
        expect(fact(page, "loss")).to_have_text("not finite")
        expect(page.locator(".legend")).to_contain_text("not finite")
        point_at_heat_map(page, 0.9, 0.1)
        expect(tooltip(page)).to_have_text(
            "step18layer4 · h.3token_similaritynot finitefiring, from step 10loss-not-finite"
        )
        point_at_heat_map(page, 0.9, 0.95)
        expect(tooltip(page)).to_have_text(
            "step18layer0 · input of h.0token_similarity0firing, from step 10loss-not-finite"
        )

    def test_shows_the_layers_at_the_step_that_is_clicked(self, page, service):
        run_id = service.register("gpt")
        service.send_steps(run_id, range(10))
        open_run(page, run_id)
        page.mouse.click(*point_at_heat_map(page, 0.25, 0.5))
        expect(page.get_by_role("heading", name="token_similarity at step 2")).to_be_visible()
        expect(page).to_have_url(re.compile("step=2$"))

    def test_lets_the_keyboard_choose_the_step(self, page, service):
        run_id = service.register("gpt")
        service.send_steps(run_id, range(10))
        open_run(page, run_id)
        page.get_by_label("Step of the layer profile").press("ArrowLeft")
        expect(page.get_by_role("heading", name="token_similarity at step 8")).to_be_visible()

    def test_offers_the_metrics_that_were_recorded(self, page, service):
        run_id = service.replay("h_vit24_pre-s0")
        open_run(page, run_id)
        page.get_by_label("metric").select_option("token_diversity")
        expect(page.locator(".legend")).to_contain_text("logarithmic")
        expect(page).to_have_url(re.compile("metric=token_diversity"))

    def test_says_so_where_a_metric_is_not_measured(self, page, service):
        run_id = service.register("gpt")
        service.send_steps(run_id, range(3), loss=1.0)
        open_run(page, run_id, "?metric=attention_entropy")
        expect(page.get_by_text("This run does not measure attention_entropy")).to_be_visible()

    def test_goes_on_while_it_is_looked_at(self, page, service):
        run_id = service.register("gpt")
        service.send_steps(run_id, range(3), loss=3.0)
        open_run(page, run_id)
        page.get_by_label("fit colours to the data").check()
        service.send_steps(run_id, range(3, 9), loss=2.5)
        expect(fact(page, "step")).to_have_text("8")
        expect(page.get_by_role("heading", name="token_similarity at step 8 (latest)")).to_be_visible()
        expect(page.get_by_label("fit colours to the data")).to_be_checked()

    def test_shows_finer_steps_where_it_is_zoomed_and_all_again_on_demand(self, page, service):
        run_id = service.register("gpt")
        service.send_steps(run_id, range(1000), loss=1.0)
        open_run(page, run_id)
        expect(page.get_by_role("heading", name="token_similarity around step")).to_be_visible()
        box = page.get_by_role("img", name="Loss and layers by step").bounding_box()
        handle = box["x"] + box["width"] - 14, box["y"] + box["height"] - 20
        page.mouse.move(*handle)
        page.mouse.down()
        page.mouse.move(box["x"] + 130, handle[1], steps=5)
        with page.expect_response(re.compile(r"heatmap.*to_step=\d+")) as answer:
            page.mouse.up()
        expect(page.get_by_role("heading", name=re.compile("token_similarity at step"))).to_be_visible()
        columns = answer.value.json()["step"]
        assert columns == list(range(len(columns)))
        assert 100 < len(columns) < 200
        page.get_by_role("button", name="All steps").click()
        expect(page.get_by_role("button", name="All steps")).to_be_hidden()


class TestAnAlert:
    @pytest.fixture
    def failing(self, service):
        return service.replay("tse_vit24-s0")

    @pytest.fixture
    def alert(self, service, failing):
        """One of those that fire on that run."""
        alerts = service.request("GET", f"/api/v1/alerts?run={failing}").json()["alerts"]
        return next(alert for alert in alerts if alert["rule"] == "token-similarity-escalation")

    def test_is_counted_in_the_list(self, page, service, failing):
        num_open = service.request("GET", f"/api/v1/runs/{failing}").json()["open_alerts"]
        page.goto("/")
        expect(page.get_by_role("row", name="tse_vit24-s0").get_by_role("cell").last).to_have_text(f"{num_open}")
        assert num_open > 0

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

    def test_says_what_each_condition_saw_and_what_it_was_held_against(self, page, service):
        open_run(page, service.replay("digits-post-norm-s0"))
        card = card_of(page, "token-similarity-escalation")
        expect(card.get_by_role("list", name="Conditions").get_by_role("listitem")).to_have_text(
            [
                "token_diversity of the last layer 1.53e-7, at most 5e-4 and at most 1e-6",
                "fall over depth of log10 odds of token_diversity -0.1511, at most -0.03",
                "r² of the fall over depth of log10 odds of token_diversity 0.9923, at least 0.8",
                "centred_token_similarity of the last layer 0.2619, at least 0.5: does not hold",
            ]
        )

    def test_keeps_the_layers_and_the_samples_folded(self, page, service):
        open_run(page, service.replay("digits-post-norm-s0"))
        card = card_of(page, "token-similarity-escalation")
        layers, window = card.locator("table").all()
        expect(layers).to_be_hidden()
        card.get_by_text("What the rule saw").click()
        expect(layers.get_by_role("cell", name="0.006503 layer 24")).to_be_visible()
        expect(window.get_by_role("row").last).to_contain_text("45")
        for table in (layers, window):
            assert table.evaluate("table => table.scrollWidth <= table.parentElement.clientWidth"), "nothing is cut off"

    def test_that_fired_when_its_run_ended_stays_in_sight(self, page, service, failing):
        service.request("PATCH", f"/api/v1/runs/{failing}", json={"state": "failed"}).raise_for_status()
        run = service.request("GET", f"/api/v1/runs/{failing}").json()
        page.goto("/")
        in_list = page.get_by_role("row", name="tse_vit24-s0").get_by_role("cell").last
        expect(in_list).to_have_text(f"{run['alerts_at_end']} at its end")
        open_run(page, failing)
        expect(card_of(page, "token-similarity-escalation")).to_contain_text("fired to the end of the run")
        expect(page.get_by_text("No alerts.")).to_be_hidden()

    def test_of_an_earlier_end_is_over_once_the_run_goes_on(self, page, service, failing):
        service.request("PATCH", f"/api/v1/runs/{failing}", json={"state": "failed"}).raise_for_status()
        blocks = service.request("GET", f"/api/v1/runs/{failing}").json()["blocks"]
        again = {"run": "tse_vit24-s0", "blocks": blocks, "resume_step": 0}
        service.request("POST", "/api/v1/runs", json=again).raise_for_status()
        open_run(page, failing)
        expect(page.get_by_text("No alerts.")).to_be_visible()
        expect(page.get_by_text("fired to the end of the run")).to_be_hidden()

    def test_can_be_acknowledged(self, page, failing, alert):
        open_run(page, failing)
        card = card_of(page, alert["rule"])
        card.get_by_role("button", name="Acknowledge").click()
        expect(card).to_contain_text("acknowledged by page")
        expect(card.get_by_role("button", name="Acknowledge")).to_have_count(0)

    def test_is_named_where_the_mouse_is_over_it_in_the_charts(self, page, failing, alert):
        open_run(page, failing)
        point_at_heat_map(page, 0.99, 0.5)
        expect(tooltip(page)).to_contain_text(f"firing, from step {alert['firing_step']}{alert['rule']}")

    def test_leads_to_its_step_in_the_charts(self, page, failing, alert):
        open_run(page, failing)
        card_of(page, alert["rule"]).get_by_role("button", name="Show step").click()
        expect(page.get_by_role("heading", name=f"token_diversity at step {alert['firing_step']}")).to_be_visible()


class TestWhatAClientSends:
    @pytest.fixture
    def hostile_run(self, service):
        """A run whose every name is markup."""
        blocks = [HOSTILE] * 4
        run_id = service.register(HOSTILE, project=HOSTILE, tags=[HOSTILE], config={HOSTILE: HOSTILE}, blocks=blocks)
        service.send_steps(run_id, range(3), loss=1.0)
        return run_id

    def test_stays_text_in_the_list(self, page, hostile_run):
        page.goto("/")
        expect(page.get_by_role("link", name=HOSTILE)).to_be_visible()
        box = page.get_by_role("img", name="Loss of the latest runs").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        expect(tooltip(page)).to_contain_text(HOSTILE)
        self._nothing_came_alive(page)

    def test_stays_text_on_its_own_page(self, page, hostile_run):
        open_run(page, hostile_run)
        expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
        page.get_by_text("Configuration").click()
        expect(page.locator("pre")).to_contain_text("<script>")
        point_at_heat_map(page, 0.5, 0.1)
        expect(tooltip(page)).to_contain_text(HOSTILE)
        self._nothing_came_alive(page)

    def test_stays_text_in_an_alert(self, page, service):
        run_id = service.replay("tse_vit24-s0")
        summary = service.request("GET", f"/api/v1/alerts?run={run_id}").json()["alerts"][0]["summary"]

        def put_summary(route):
            answer = route.fetch()
            route.fulfill(
                response=answer,
                body=answer.text().replace(json.dumps(summary, ensure_ascii=False), json.dumps(HOSTILE)),
            )

        page.route("**/api/v1/alerts**", put_summary)
        open_run(page, run_id)
        expect(page.get_by_role("article").filter(has_text=HOSTILE)).to_have_count(1)
        self._nothing_came_alive(page)

    def _nothing_came_alive(self, page):
        assert page.locator("main img, main script").count() == 0
        assert page.title() != "1"


class TestTrouble:
    @pytest.mark.parametrize("run_id", ["nothing", "%E0%A4%A"])
    def test_is_told_for_a_run_that_is_not_there(self, browser, service, run_id):
        # A page without the watch on the console: Chromium itself writes the 404 there.
        page = browser.new_page()
        page.goto(f"{service.url}/#/run/{run_id}")
        expect(page.get_by_role("alert")).to_contain_text(run_id)
        expect(page.get_by_role("alert").get_by_role("link", name="All runs")).to_be_visible()
        page.close()

    def test_is_told_while_the_service_is_away_and_goes_by_itself(self, browser, service):
        service.register("gpt")
        context = browser.new_context()
        page = context.new_page()
        page.goto(service.url)
        expect(page.get_by_role("status")).to_have_text("live")
        context.set_offline(True)
        expect(page.get_by_role("alert")).to_contain_text("The service does not answer")
        expect(page.get_by_role("link", name="gpt")).to_be_visible()
        context.set_offline(False)
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(page.get_by_role("status")).to_have_text("live")
        context.close()


class TestTheLayout:
    @pytest.mark.parametrize("width", [1280, 400])
    def test_fits_the_window(self, page, service, width):
        unbreakable = "x" * 120
        run_id = service.register(unbreakable, project=unbreakable, tags=[unbreakable])
        service.send_steps(run_id, range(5), loss=1.0)
        page.set_viewport_size({"width": width, "height": 800})
        page.goto("/")
        expect(page.get_by_role("link", name=unbreakable)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        open_run(page, run_id)
        expect(page.get_by_role("heading", name=unbreakable)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == width

    def test_follows_the_system_to_dark(self, page):
        page.goto("/")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.emulate_media(color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
