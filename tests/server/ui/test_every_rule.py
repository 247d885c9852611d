"""What each built-in rule shows when it fires, in every view that shows alerts, in Chromium.

The evidence is the rules' own. Recorded trainings, and made-up frames for what no recording has, go to the real server; the
real liveness engine looks at processes that are slow, stuck and silent by a clock that the test moves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.server.replay.runs import FOLDER, RecordedRun, wire_frame
from tsemon.wire import API
from tsemon_server.alerts import ActiveRules
from tsemon_server.alerts.liveness import Liveness
from tsemon_server.rules import PACK
from tsemon_server.rules.program import View
from tsemon_server.settings import Settings
from tsemon_server.store import Store
from tsemon_server.store.ledger.progress import Progress

from .conftest import Browser, Server, Service, opened

RULES = {rule.name: rule for rule in PACK}
TIMELESS = ("training-slow", "unevaluated-frames")
"""Time-based rules without a duration in their conditions."""
RECORDED = {
    "div_lr_noclip": 190,
    "tse_vit36": 140,
    "norm_tanh": 60,
    "dead_frozen": 15,
    "div_sgd": 15,
    "h_massdim": 30,
    "dead_relu_lr": 70,
    "norm_wdneg": 120,
    "dead_wd": 225,
    "tse_pre_lr": 240,
    "rank_attn": 20,
}
"""Recorded trainings, each up to a step at which rules fire that fire in no other: 28 of them between these eleven."""
PAGE_SIZE = 25
HEARTBEAT_S = 30.0
STATES = {
    "open": ("pending", "firing", "acknowledged"),
    "firing": ("firing",),
    "past": ("resolved",),
    "all": ("pending", "firing", "acknowledged", "resolved"),
}
ARE_SHOWN = """(ids) => {
    const cards = [...document.querySelectorAll("article.alert")];
    return cards.map((card) => card.dataset.key).sort().join() === ids;
}"""
CARDS = """() => {
    for (const fold of document.querySelectorAll("main details")) fold.open = true;
    const textsOf = (parent, selector) => [...parent.querySelectorAll(selector)].map((element) => element.innerText);
    return [...document.querySelectorAll("article.alert")].map((card) => ({
        id: card.dataset.key,
        rule: card.getAttribute("aria-label"),
        title: card.querySelector(".summary").innerText,
        conditions: textsOf(card, ".seen li"),
        advice: card.querySelector(".advice").innerText,
        window: [...card.querySelectorAll("table.window tbody tr")].map((row) => textsOf(row, "td")),
        text: card.innerText,
    }));
}"""


def made_up(num_frames=80, breaks_at=50):
    """A training with the faults that no recording has: its loss has stalled, then nearly everything breaks at once."""
    draw = np.random.default_rng(0)
    for sample in range(num_frames):
        is_broken = sample >= breaks_at
        similarity, diversity = (0.7, 0.3) if is_broken else (draw.normal(0.7, 0.02), draw.normal(0.3, 0.01))
        drift = 1e-6 * sample
        scalars = {
            "loss": 2.0,
            "loss_mean": 2.0,
            "loss_before": 2.0,
            "loss_recent": -2.0 if sample == num_frames - 1 else 3.0 if sample >= breaks_at - 2 else 2.0,
            "loss_noise": 0.1,
            "loss_start": 4.0,
            "loss_nonfinite": 0.0,
            "learning_rate": 1e-3,
            "total_grad_norm": np.inf if is_broken else 1.0,
            "norm_growth_exponent": 2.0,
            "norm_growth_r2": 0.99,
            "input_overlap": 1.0 if is_broken else 0.0,
            "dropped_frames": 3.0 * is_broken * sample,
            "untrained_parameters": 2.0 * is_broken,
            "step_size": 1e-4,
            "total_param_norm": 100.0,
            "output_variation": 1e-6 if is_broken else 0.5,
        }
        layers = {
            "batch_similarity": np.array([similarity + drift, 0.9, 0.9]),
            "global_diversity": np.array([diversity + drift, 0.1, 0.1]),
            "saturation": np.array([0.2, 0.99, 0.98] if sample >= num_frames - 3 else [0.2, 0.4, 0.3]),
            "param_norm": np.array([10.0, 100.0 if sample >= num_frames - 4 else 10.0]),
        }
        if sample < num_frames - 3:
            layers["grad_norm"] = np.array([1.0, 1.0])
            layers["nonfinite"] = np.array([0.0, 0.0, 0.25 if is_broken else 0.0])
        if sample == breaks_at:
            scalars["nonfinite_parameters"] = 1.0
        yield View(5 * sample, scalars, layers)


class Clock:
    """The time, which passes when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1.8e9

    def __call__(self) -> float:
        return self.seconds


class Told:
    """A server on which every rule has an alert that fires, and one of a run that has ended."""

    def __init__(self, service: Service, clock: Clock, store: Store) -> None:
        self.service = service
        self._clock, self._liveness = clock, Liveness(store, ActiveRules(PACK), clock=clock, monotonic=clock)
        self.running, self.ended = (
            [self.service.register(f"{name}{copy}") for name in ("hangs", "never-heard")] for copy in ("", "-ended")
        )
        with store.write() as writer:
            for run_ids in (self.running, self.ended):
                writer.progress.keep(run_ids[1], 1, Progress(num_skipped=3))
        self._hang([self.running[0], self.ended[0]])
        for run_ids, copy in ((self.running, ""), (self.ended, "-ended")):
            for name, last_step in RECORDED.items():
                run = RecordedRun(FOLDER / f"{name}-s0.jsonl.gz")
                run_ids.append(self.service.register(**run.registration() | {"run": name + copy}))
                self.service.send(run_ids[-1], *(frame for frame in run.frames if frame.step <= last_step))
            run_ids.append(self.service.register(f"made-up{copy}", num_blocks=2))
            self.service.send(run_ids[-1], *(wire_frame(seq, view) for seq, view in enumerate(made_up())))
        for run_id in self.ended:
            self._ask("PATCH", f"/runs/{run_id}", json={"state": "finished"})
        self.alerts: list[dict[str, Any]] = self._ask("GET", "/alerts", params={"limit": 1000})["alerts"]
        """All, in the order of the web UI."""

    def _hang(self, run_ids: list[str]) -> None:
        """Steps, then ever slower ones, then heartbeats without a step, then nothing."""
        pace = [10] * 20 + [1] * 6 + [0] * 61
        for step in [*np.cumsum(pace).tolist(), *[None] * 61]:
            self._clock.seconds += HEARTBEAT_S
            for run_id in run_ids if step is not None else ():
                self._ask("POST", f"/runs/{run_id}/heartbeat", json={"writer": "w", "attempt": 1, "step": step})
            self._liveness.look()

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        return self.service.request(method, API + path, **options).raise_for_status().json()

    def of(self, *states: str) -> list[dict[str, Any]]:
        return [alert for alert in self.alerts if alert["state"] in states]


@pytest.fixture(scope="module")
def told(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    settings, clock = Settings(database=f"sqlite:///{tmp_path_factory.mktemp('rules')}/tsemon.db"), Clock()
    with (
        server.showing(settings, clock=clock) as service,
        closing(Store(settings.database, clock)) as store,
    ):
        yield Told(service, clock, store)


@pytest.fixture(scope="module")
def page(browser: Browser, told: Told) -> Iterator[Page]:
    with opened(browser, told.service) as page:
        yield page


def cards_of(page: Page, alerts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the cards of `alerts` show, all folds open, in the order of `alerts`."""
    ids = ",".join(sorted(str(alert["alert_id"]) for alert in alerts))
    page.wait_for_function(ARE_SHOWN, arg=ids, timeout=25_000)
    cards = {card["id"]: card for card in page.evaluate(CARDS)}
    return [cards[str(alert["alert_id"])] for alert in alerts]


def assert_is_whole(card: dict[str, Any], alert: dict[str, Any]) -> None:
    """The card has the title of its rule, all that the rule saw, and its advice."""
    evidence, text = alert["evidence"], card["text"]
    assert (card["rule"], card["title"]) == (alert["rule"], RULES[alert["rule"]].title)
    assert numberless(alert["advice"]["text"]) in numberless(card["advice"])
    seen = {
        (one["value"], place_in_words(one), one["holds"]) for one in evidence["conditions"] if one["holds"] is not None
    }
    assert len(card["conditions"]) == len(seen) > 0
    for value, place, _ in seen:
        assert any(line.startswith(value + place) for line in card["conditions"])
    if RULES[alert["rule"]].on == "clock":
        times = [row[0] for row in card["window"]]
        assert all(re.fullmatch(r"(\d+ min)?( ?\d+ s)?", time) for time in times), times
        assert times[-1] == "0 s"
        assert re.search(r"_seconds (\d+ min|\d+ s)", "\n".join(card["conditions"])) or alert["rule"] in TIMELESS
    else:
        assert [row[0] for row in card["window"]] == [f"{row['step']:,}" for row in evidence["window"]]
    assert len(card["window"]) == len(evidence["window"])
    for row in card["window"]:
        assert len(row) == len(set().union(*evidence["window"])), "a column for each value"
        assert all(row)
    names = [name for name, places in evidence["layers"].items() if places]
    for name in (*names, *evidence["also_firing"], *evidence["not_measured"]):
        assert name in text
    assert not re.search(r"undefined|NaN|Infinity|null|\[object", text.replace(card["advice"], ""))


def place_in_words(condition: dict[str, Any]) -> str:
    if condition.get("layer") is None:
        return ""
    block = condition["block"]
    return f" ({condition.get('label') or ('input of the first block' if block is None else f'block {block}')})"


def numberless(text: str) -> str:
    """The web UI writes numbers in its own way."""
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", text)


class TestEveryRule:
    @pytest.mark.parametrize("states", [("firing",), ("resolved",)])
    def test_has_an_alert_to_look_at(self, told, states):
        """A rule that is new needs a training here on which it fires."""
        assert {alert["rule"] for alert in told.of(*states)} == set(RULES)

    def test_names_blocks_if_it_is_about_blocks(self, told):
        of_blocks = [
            alert
            for alert in told.of("firing")
            if alert["family"] in ("tse", "rank", "norm", "entropy", "dead") and alert["severity"] != "info"
        ]
        assert {alert["rule"] for alert in of_blocks if alert["evidence"]["blocks"] is None} == set()

    @pytest.mark.parametrize("state", STATES)
    def test_is_whole_in_the_list_of_alerts(self, page, told, state):
        alerts = told.of(*STATES[state])
        page.goto(f"/#/alerts?state={state}")
        for start in range(0, len(alerts), PAGE_SIZE):
            on_page = alerts[start : start + PAGE_SIZE]
            for card, alert in zip(cards_of(page, on_page), on_page, strict=True):
                assert_is_whole(card, alert)
            if start + PAGE_SIZE < len(alerts):
                page.get_by_role("button", name="Older").click()
        page.set_viewport_size({"width": 400, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        page.set_viewport_size({"width": 1280, "height": 900})

    @pytest.mark.parametrize("copy", ["running", "ended"])
    def test_is_whole_on_the_page_of_its_run(self, page, told, copy):
        for run_id in getattr(told, copy):
            alerts = [alert for alert in told.alerts if alert["run_id"] == run_id]
            page.goto(f"/#/run/{run_id}")
            for card, alert in zip(cards_of(page, alerts), alerts, strict=True):
                assert_is_whole(card, alert)
            expect(page.locator("[aria-busy=true]")).to_have_count(0)

    def test_is_in_the_list_of_runs_with_its_incident_or_as_one_of_some_alerts(self, page, told):
        page.goto("/")
        for run_id in told.running:
            rules = {alert["rule"] for alert in told.of(*STATES["open"]) if alert["run_id"] == run_id}
            row = page.locator("tr", has=page.locator(f"a[href='#/run/{run_id}']"))
            expect(row.locator("td").last).to_have_text(
                re.compile("since step" if any(RULES[rule].severity != "info" for rule in rules) else str(len(rules)))
            )

    @pytest.mark.parametrize("run", ["hangs", "made-up"])
    def test_stands_in_the_list_of_rules(self, page, told, run):
        (alert, *others) = (alert for alert in told.of("firing") if alert["run"] == run)
        page.goto(f"/#/rules?run={alert['run_id']}")
        for one in (alert, *others):
            card = page.get_by_role("article", name=one["rule"], exact=True)
            expect(card.locator(".stands")).to_contain_text("firing")
            expect(card).to_contain_text(RULES[one["rule"]].title)


class TestATimeBasedRule:
    def test_shows_times_with_their_units_and_how_long_before_the_alert_they_were(self, page, told):
        (alert,) = (
            alert for alert in told.of("firing") if (alert["run"], alert["rule"]) == ("hangs", "process-silent")
        )
        page.goto(f"/#/alerts?run={alert['run_id']}&rule=process-silent")
        (card,) = cards_of(page, [alert])
        assert card["conditions"] == [
            "silent_seconds 2 min, at least 1 min 35 s",
            "usual_heard_seconds 30 s, at most 45 s",
            "silent_seconds / usual_heard_seconds 4, at least 10: does not hold, and need not",
        ]
        assert card["window"][-2:] == [["30 s", "1 min 30 s", "30 s", "3"], ["0 s", "2 min", "30 s", "4"]]
        assert "numbers\nsilent 2 min" in card["text"]
        assert "held\nsamples 1, 0 s" in card["text"]

    def test_leaves_out_what_is_not_known_yet(self, page, told):
        (alert,) = (
            alert for alert in told.of("firing") if (alert["run"], alert["rule"]) == ("never-heard", "process-silent")
        )
        page.goto(f"/#/alerts?run={alert['run_id']}&rule=process-silent")
        (card,) = cards_of(page, [alert])
        assert card["conditions"] == ["silent_seconds 2 min, at least 1 min 35 s"]
        assert card["window"][-1] == ["0 s", "2 min", "–", "–"]

    def test_says_on_the_page_of_its_run_when_it_opened(self, page, told):
        alerts = [alert for alert in told.of("firing") if alert["run"] == "hangs"]
        page.goto(f"/#/run/{alerts[0]['run_id']}")
        for card in cards_of(page, alerts):
            assert re.search(r"firing since 206, opened (just now|\d+ (s|min) ago)", card["text"])
