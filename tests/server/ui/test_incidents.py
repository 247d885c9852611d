"""Incidents as people see them: at the top of a run, in its heat map, and in the list of runs."""

from __future__ import annotations

import math
import re

import pytest
from playwright.sync_api import expect

from tsemon.wire import Array, Frame
from tsemon_server.rules.documents import load
from tsemon_server.settings import Settings

from .conftest import START_S, opened

NUM_BLOCKS = 4
RULES = load("""
rules:
  - name: high-loss
    title: The loss is high
    family: loss
    when: loss > 10 for 2 samples
    clear: loss < 5 for 1 sample
    severity: warning
  - name: very-high-loss
    title: The loss is very high
    when: loss > 100 for 2 samples
    clear: loss < 50 for 1 sample
    severity: warning
  - name: same-tokens
    title: Tokens become the same
    when: last(token_diversity) < 1e-3 for 2 samples
    clear: last(token_diversity) > 1e-2 for 1 sample
    where: token_diversity < 0.01
    severity: critical
    advice: Lower the learning rate.
""")
HEALTHY = 0.9, 0.8, 0.7, 0.6, 0.5
COLLAPSED = 0.9, 0.8, 1e-3, 1e-4, 1e-5
EVERY = 5


@pytest.fixture
def service(server, tmp_path):
    with server.showing(Settings(database=f"sqlite:///{tmp_path}/tsemon.db"), rules=RULES) as service:
        yield service


@pytest.fixture
def page(browser, service):
    with opened(browser, service) as page:
        page.set_viewport_size({"width": 1280, "height": 1500})
        yield page


def send_gains(service, run_id, gain_of_block_2, sample):
    gains = {"attention_gain": 0.3, "residual_gain": 1.044, "norm_gain": 1.0, "feedforward_gain": 1.04}
    layers = {name: Array.of([gain] * NUM_BLOCKS) for name, gain in gains.items()}
    layers["feedforward_gain"] = Array.of([1.04, 1.04, gain_of_block_2, 1.04])
    layers["token_diversity"] = Array.of(COLLAPSED if gain_of_block_2 > 2 else HEALTHY)
    service.send(run_id, Frame(sample, EVERY * sample, START_S + sample, {"loss": 1.0}, layers))


def send(service, run_id, diversities, losses=None, from_sample=0):
    for i, diversity in enumerate(diversities, from_sample):
        loss = 1.0 if losses is None else losses[i - from_sample]
        layers = {
            "attention_entropy": Array.of([1.0] * NUM_BLOCKS),
            "token_diversity": Array.of(diversity),
            "token_similarity": Array.of([1 - value for value in diversity]),
        }
        service.send(run_id, Frame(i, EVERY * i, START_S + i, {"loss": loss}, layers))


@pytest.fixture
def failing(service):
    """Tokens become the same in blocks 1 to 3 from step 20 on."""
    run_id = service.register("failing")
    send(service, run_id, [HEALTHY] * 4 + [COLLAPSED] * 4)
    return run_id


def open_run(page, run_id, query=""):
    page.goto(f"/#/run/{run_id}{query}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    wait_for_charts(page)


def wait_for_charts(page):
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def card_of(page, title):
    return page.get_by_role("article", name=f"Incident: {title}", exact=True)


def framed_in(page, ink):
    """The middle of the frame of this color in the heat map, as ratios from left and bottom; None without a frame."""
    return page.get_by_role("application").evaluate(
        """async (element, ink) => {
            const echarts = await import("/ui/vendor/echarts-6.1.0.esm.min.mjs");
            const shown = echarts.getInstanceByDom(element).getZr().storage.getDisplayList(true);
            const { image } = shown.find((one) => one.type === "image").style;
            const { data } = image.getContext("2d").getImageData(0, 0, image.width, image.height);
            const [xs, ys] = [[], []];
            for (let y = 0; y < image.height; y += 1) {
                let length = 0;
                for (let x = 0; x < image.width; x += 1) {
                    const at = 4 * (y * image.width + x);
                    length = ink.every((value, i) => Math.abs(data[at + i] - value) < 12) ? length + 1 : 0;
                    if (length >= 8) xs.push(x), ys.push(y);
                }
            }
            if (!xs.length) return null;
            const reach = (values) => [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
            const [[left, right], [top, bottom]] = [reach(xs), reach(ys)];
            return [(left + right) / 2 / image.width, 1 - (top + bottom) / 2 / image.height];
        }""",
        list(ink),
    )


RED, DARK = (198, 40, 40), (27, 35, 48)


def middle_of(sample, layer, num_samples=8):
    return pytest.approx([(sample + 0.5) / num_samples, (layer + 0.5) / (NUM_BLOCKS + 1)], abs=0.03)


class TestTheCardOfAnIncident:
    def test_says_what_is_wrong_where_since_when_and_what_to_try(self, page, failing):
        open_run(page, failing)
        card = card_of(page, "Tokens become the same")
        for text in ("open", "critical", "Blocks 1 to 3, since step 20", "Lower the learning rate."):
            expect(card).to_contain_text(text)
        expect(card.get_by_role("heading")).to_have_text("Tokens become the same")

    def test_is_above_the_charts_and_the_alerts_are_below_them(self, page, failing):
        open_run(page, failing)
        tops = [
            part.bounding_box()["y"]
            for part in (
                card_of(page, "Tokens become the same"),
                page.get_by_role("application"),
                page.get_by_role("article", name="same-tokens", exact=True),
            )
        ]
        assert tops == sorted(tops)

    def test_says_until_when_its_cause_may_change(self, page, service, failing):
        open_run(page, failing)
        note = card_of(page, "Tokens become the same").get_by_text("The cause may still change until step 85.")
        expect(note).to_be_visible()
        send(service, failing, [COLLAPSED] * 12, from_sample=8)
        expect(note).to_be_hidden()

    def test_lists_what_also_fired_folded_and_with_its_state(self, page, service):
        run_id = service.register("spike")
        send(service, run_id, [HEALTHY] * 6, [1.0, 20.0, 20.0, 200.0, 200.0, 20.0])
        open_run(page, run_id)
        card = card_of(page, "The loss is high")
        consequence = card.get_by_role("listitem")
        expect(consequence).to_be_hidden()
        card.get_by_text("also fired (1)").click()
        expect(consequence).to_have_text("supersededThe loss is very high step 20 to 25")
        consequence.get_by_role("button").click()
        alert = page.get_by_role("article", name="very-high-loss", exact=True)
        expect(alert).to_have_class(re.compile("called"))
        expect(alert.locator(".pill")).to_have_text("superseded")

    def test_stays_unfolded_while_the_run_goes_on(self, page, service):
        run_id = service.register("spike")
        send(service, run_id, [HEALTHY] * 5, [1.0, 20.0, 20.0, 200.0, 200.0])
        open_run(page, run_id)
        card = card_of(page, "The loss is high")
        card.get_by_text("also fired (1)").click()
        expect(card.get_by_role("listitem")).to_contain_text("firing")
        send(service, run_id, [HEALTHY], [20.0], from_sample=5)
        expect(card.get_by_role("listitem")).to_contain_text("superseded")
        expect(card.get_by_role("listitem")).to_be_visible()

    def test_is_of_the_latest_where_none_is_open_and_folds_the_earlier_ones(self, page, service):
        run_id = service.register("twice")
        losses = [1.0, 20.0, 20.0, 1.0]
        send(service, run_id, [HEALTHY] * 4, losses)
        send(service, run_id, [HEALTHY] * 4, losses, from_sample=100)
        open_run(page, run_id)
        cards = card_of(page, "The loss is high")
        expect(cards).to_have_count(1)
        expect(cards).to_contain_text("Since step 505; recovered at step 515")
        page.get_by_text("Earlier incidents (1)").click()
        expect(cards.last).to_contain_text("Since step 5; recovered at step 15")
        expect(cards.last).to_contain_text("The sub-step is unknown")

    def test_of_an_earlier_attempt_that_is_live_names_the_attempt(self, page, service, failing):
        open_run(page, failing)
        card = card_of(page, "Tokens become the same")
        expect(card).not_to_contain_text("attempt 1")
        service.register("failing")
        open_run(page, failing, "?metric=loss")
        expect(card).to_contain_text("attempt 1")
        expect(card).to_contain_text("open")

    def test_is_not_there_without_an_incident(self, page, service):
        run_id = service.register("healthy")
        send(service, run_id, [HEALTHY] * 4)
        open_run(page, run_id)
        expect(page.get_by_role("region", name="Incidents")).to_be_hidden()

    @pytest.mark.parametrize("width", [390, 1440])
    def test_fits_the_window(self, page, failing, width):
        page.set_viewport_size({"width": width, "height": 900})
        open_run(page, failing)
        assert page.evaluate("document.documentElement.scrollWidth") == width


class TestTheHeatMapOfAnIncident:
    def test_shows_the_deciding_metric_and_frames_where_it_began(self, page, failing):
        open_run(page, failing)
        expect(page.get_by_label("metric", exact=True)).to_have_value("token_diversity")
        assert framed_in(page, RED) == middle_of(sample=5, layer=2)

    def test_has_the_cell_picked_by_the_button_of_the_card(self, page, failing):
        open_run(page, failing, "?metric=attention_entropy")
        assert framed_in(page, RED) is None
        card_of(page, "Tokens become the same").get_by_role("button", name="Show in the heat map").click()
        expect(page).to_have_url(re.compile(r"\?metric=token_diversity&step=25&layer=2$"))
        wait_for_charts(page)
        assert framed_in(page, RED) == middle_of(sample=5, layer=2)

    def test_turns_to_that_metric_when_the_incident_opens(self, page, service):
        run_id = service.register("late")
        for step in range(3):
            layers = {"hidden_rms": Array.of([1.0] * 5), "param_norm": Array.of([1.0] * 4)}
            service.send(run_id, Frame(step, EVERY * step, START_S + step, {"loss": 1.0}, layers))
        open_run(page, run_id)
        expect(page.get_by_label("metric", exact=True)).to_have_value("param_norm")
        send(service, run_id, [COLLAPSED] * 3, from_sample=3)
        expect(page.get_by_label("metric", exact=True)).to_have_value("token_diversity")

    def test_leaves_a_chosen_metric_alone(self, page, service):
        run_id = service.register("chosen")
        send(service, run_id, [HEALTHY] * 3)
        open_run(page, run_id)
        page.get_by_label("metric", exact=True).select_option("attention_entropy")
        send(service, run_id, [COLLAPSED] * 3, from_sample=3)
        expect(card_of(page, "Tokens become the same")).to_be_visible()
        expect(page.get_by_label("metric", exact=True)).to_have_value("attention_entropy")

    def test_is_token_diversity_on_a_log_scale_without_an_incident(self, page, service):
        run_id = service.register("healthy")
        send(service, run_id, [HEALTHY] * 4)
        open_run(page, run_id)
        expect(page.get_by_label("metric", exact=True)).to_have_value("token_diversity")
        expect(page.get_by_label("logarithmic")).to_be_checked()
        assert framed_in(page, RED) is None

    def test_of_a_rule_on_the_loss_is_the_usual_one_and_the_card_leads_to_the_step(self, page, service):
        run_id = service.register("nan")
        send(service, run_id, [HEALTHY] * 4, [1.0, 20.0, 20.0, math.nan])
        open_run(page, run_id)
        expect(page.get_by_label("metric", exact=True)).to_have_value("token_diversity")
        card_of(page, "The loss is high").get_by_role("button", name="Show step 5").click()
        expect(page).to_have_url(re.compile(r"\?metric=token_diversity&step=5$"))

    @pytest.mark.parametrize("place", ["layer=3", "block=2"])
    def test_frames_the_cell_of_an_address(self, page, service, place):
        run_id = service.register("healthy")
        send(service, run_id, [HEALTHY] * 8)
        open_run(page, run_id, f"?metric=token_diversity&{place}&step=25")
        expect(page.get_by_role("heading", name="token_diversity at step 25")).to_be_visible()
        expect(page.get_by_text("Layer 3 · h.2, at step 25: token_diversity 0.6")).to_be_visible()
        assert framed_in(page, DARK)[1] == pytest.approx(3.5 / 5, abs=0.03)


class TestTheListOfRuns:
    def cell(self, page, name):
        return page.get_by_role("row").filter(has_text=name).locator("td.alerts")

    def test_shows_the_open_incident_of_a_run_and_leads_to_its_cell(self, page, service, failing):
        service.register("healthy")
        page.goto("/")
        cell = self.cell(page, "failing")
        expect(cell).to_have_text("Tokens become the sameblocks 1 to 3, since step 20")
        expect(cell.get_by_role("link")).to_have_attribute("title", re.compile("1 alert is open"))
        expect(self.cell(page, "healthy")).to_have_text("none")
        cell.get_by_role("link").click()
        expect(card_of(page, "Tokens become the same")).to_be_visible()
        wait_for_charts(page)
        assert framed_in(page, RED) == middle_of(sample=5, layer=2)

    def test_shows_one_that_opens_while_it_is_looked_at(self, page, service):
        run_id = service.register("late")
        send(service, run_id, [HEALTHY] * 3)
        page.goto("/")
        expect(self.cell(page, "late")).to_have_text("none")
        send(service, run_id, [COLLAPSED] * 3, from_sample=3)
        expect(self.cell(page, "late")).to_have_text("Tokens become the sameblocks 1 to 3, since step 15")

    def test_shows_the_worst_of_several(self, page, service):
        run_id = service.register("both")
        send(service, run_id, [HEALTHY] * 3, [1.0, 20.0, 20.0])
        page.goto("/")
        expect(self.cell(page, "both")).to_have_text("The loss is highsince step 5")

    def test_asks_for_incidents_once_for_all_runs(self, page, service, failing):
        for name in ("a", "b", "c"):
            service.register(name)
        asked = []
        page.on("request", lambda request: asked.append(request.url) if "/incidents" in request.url else None)
        page.goto("/")
        expect(self.cell(page, "failing")).to_contain_text("Tokens become the same")
        assert len({url.split("?")[0] for url in asked}) == 1


class TestTheSubStep:
    def test_is_on_the_card(self, page, service):
        run_id = service.register("fed")
        for sample in range(6):
            send_gains(service, run_id, 1.04 if sample < 3 else 30.0, sample)
        open_run(page, run_id)
        expect(page.locator(".incident .within")).to_contain_text("In block 2, ")

    def test_comes_with_the_sample_that_decides(self, page, service):
        run_id = service.register("fed")
        for sample in range(3):
            send_gains(service, run_id, 1.04, sample)
        send(service, run_id, [COLLAPSED] * 3, from_sample=3)
        open_run(page, run_id)
        expect(page.locator(".incident .within")).to_contain_text("The sub-step is unknown")
        send_gains(service, run_id, 30.0, sample=6)
        expect(page.locator(".incident .within")).to_contain_text("In block 2, ")


class TestTheSequences:
    def test_that_carry_the_loss_are_on_the_card_and_their_ids_are_not_curves(self, page, service):
        run_id = service.register("poisoned")
        for sample, loss in enumerate((1.0, 20.0, 20.0)):
            scalars = {"loss": loss, "learning_rate": 0.1, "sequence_loss_1": 82.0 * sample, "sequence_loss_2": 1.5}
            scalars["sequence_loss_mean"] = loss
            scalars |= {"sequence_id_1": 7341.0, "sequence_id_2": 5.0, "sequence_seen_1": EVERY * (sample - 1.0)}
            service.send(run_id, Frame(sample, EVERY * sample, START_S + sample, scalars))
        open_run(page, run_id)
        expect(page.locator(".incident .sequence")).to_have_text(
            "At step 10, sequence 7341 had a loss of 164, 8.2 times the mean of the batch. It was also in the batch of "
            "step 5. Its loss is among the four largest in 1 other sample of the incident, too."
        )
        offered = page.get_by_label("Curve").locator("option").all_text_contents()
        assert offered == ["learning_rate", "sequence_loss_1", "sequence_loss_2", "sequence_loss_mean"]
