"""The alerts of all runs, in Chromium on the real service."""

import re
import time

import pytest
from playwright.sync_api import expect

from tests.server.ui.conftest import events_of, opened, served
from tsemon_answers.alerts import AlertsQuery
from tsemon_server.access.tokens import new_token
from tsemon_server.settings import Settings
from tsemon_server.store import Store

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>'
RIGHT_TO_LEFT = "\u202eאימון"
LONG = "x" * 300
FILTERS = "severity", "family", "rule", "seen to", "silences"


class Told:
    """A service with runs and their alerts: some as the rules found them, some written as a rule would have them."""

    def __init__(self, service, url):
        self.service = service
        self._url, self._store = url, Store(url)
        self.failing = service.replay("tse_vit24-s0", project="vision")
        self.quiet = service.register("quiet", project="language")
        stalled = {"step": 4, "numbers": {"stalled_steps": 4}}
        self.open_alert(
            self.quiet, "loss-stall", severity="info", family="loss", summary="The loss stalls.", evidence=stalled
        )
        self.open_alert(self.quiet, "loss-spike", severity="warning", family="loss", state="resolved")
        self.many = service.register("many", project="many")
        for i in range(60):
            self.open_alert(self.many, "loss-regressed", state="resolved", family="loss", summary=f"Alert {i}.")

    def open_alert(self, run_id, rule, *, state="firing", **values):
        """Its id."""
        told = {"family": "norm", "severity": "warning", "summary": "It is so.", "evidence": {}, "advice": {}}
        with self._store.write() as writer:
            at = {"state": "pending" if state == "pending" else "firing", "pending_step": 2}
            at["firing_step"] = None if state == "pending" else 4
            writer.alerts.open(run_id, 1, rule, **at, **{**told, **values})
            alert_id = writer.alerts.find(AlertsQuery(run_id=run_id), limit=1)[0].alert_id
            if state == "resolved":
                writer.alerts.change(run_id, 1, rule, "firing", state="resolved", resolved_step=9)
        return alert_id

    def register_later(self, run, project):
        """Open an attempt when the lease of those before is over."""
        later = Store(self._url, clock=lambda: time.time() + 100)
        with later.write() as writer:
            given = {"blocks": [], "config": None, "tags": None, "resume_step": 0, "attempt_key": None}
            writer.runs.register(project, run, **given)
        later.close()

    def withdraw(self, run_id, rule):
        with self._store.write() as writer:
            writer.alerts.withdraw(run_id, 1, rule)

    def alerts(self, **query):
        return self.service.request("GET", "/api/v1/alerts", params=query).json()["alerts"]

    def forget(self, run_id):
        self.service.request("DELETE", f"/api/v1/runs/{run_id}").raise_for_status()

    def close(self):
        self._store.close()


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('alerts')}/tsemon.db"


@pytest.fixture(scope="module")
def service(server, database):
    with server.showing(Settings(database=database)) as service:
        yield service


@pytest.fixture(scope="module")
def told(service, database):
    found = Told(service, database)
    yield found
    found.close()


@pytest.fixture
def run(told):
    """A run of its own for a test, which goes again with its alerts."""
    run_id = told.service.register("of-this-test", project="tests")
    yield run_id
    told.forget(run_id)


def look(page, query=""):
    page.goto(f"/#/alerts{query}")
    expect(page.get_by_role("heading", name="Alerts", exact=True)).to_be_visible()


def ask_at_once(page):
    """Let the page begin a round of requests in place of whatever it waits for, and wait until it has read the answer."""
    with page.expect_event("requestfinished", lambda request: "/api/v1/alerts" in request.url):
        page.evaluate("() => { dispatchEvent(new Event('online')) }")
    page.evaluate("async () => { await fetch('/healthz') }")


def cards(page):
    return page.get_by_role("article")


def card(page, rule):
    return page.get_by_role("article", name=rule, exact=True)


def tab(page, name):
    return page.get_by_role("navigation", name="State").get_by_role("button", name=name, exact=True)


class TestTheList:
    def test_has_what_is_open_in_all_runs(self, page, told):
        look(page)
        fired = [alert["rule"] for alert in told.alerts(state=["firing", "pending", "acknowledged"])]
        assert {"loss-stall", "token-similarity-escalation"} <= set(fired)
        assert sorted(article.get_attribute("aria-label") for article in cards(page).all()) == sorted(fired)
        expect(card(page, "loss-stall").get_by_role("link", name="quiet")).to_have_attribute(
            "href", f"#/run/{told.quiet}"
        )
        expect(tab(page, "Open")).to_have_attribute("aria-pressed", "true")

    def test_has_what_is_over_beneath_another_tab(self, page, told):
        look(page, "?project=language")
        expect(cards(page)).to_have_count(1)
        tab(page, "Past").click()
        expect(card(page, "loss-spike")).to_contain_text("resolved at 9")
        expect(page).to_have_url(re.compile(r"state=past&project=language$"))
        tab(page, "All").click()
        expect(cards(page)).to_have_count(2)

    @pytest.mark.parametrize(
        ("query", "rules"),
        [
            ("severity=info", ["loss-stall"]),
            ("family=loss", ["loss-stall"]),
            ("rule=loss-stall", ["loss-stall"]),
            ("project=language&silenced=false&acknowledged=false", ["loss-stall"]),
            ("project=language&acknowledged=true", []),
            ("project=language&state=all", ["loss-spike", "loss-stall"]),
        ],
    )
    def test_can_be_narrowed_by_the_address(self, page, told, query, rules):
        look(page, f"?{query}")
        expect(cards(page)).to_have_count(len(rules))
        assert [article.get_attribute("aria-label") for article in cards(page).all()] == rules

    def test_can_be_narrowed_by_hand_and_opened_again(self, page, told):
        look(page)
        page.get_by_label("family").select_option("loss")
        page.get_by_label("severity").select_option("info")
        page.get_by_label("silences").select_option("false")
        expect(page).to_have_url(re.compile(r"\?severity=info&family=loss&silenced=false$"))
        expect(cards(page)).to_have_count(1)
        page.get_by_role("button", name="Clear filters").click()
        expect(card(page, "token-similarity-escalation")).to_be_visible()
        expect(page).to_have_url(re.compile("#/alerts$"))

    def test_of_one_run_says_so(self, page, told):
        look(page, f"?run={told.quiet}")
        expect(cards(page)).to_have_count(1)
        expect(page.get_by_role("form", name="Filters")).to_contain_text("run quiet")
        page.get_by_role("button", name="All runs").click()
        expect(card(page, "token-similarity-escalation")).to_be_visible()

    def test_says_so_where_nothing_fits(self, page, told):
        look(page, "?project=nowhere")
        expect(page.get_by_text("No alert fits these filters.")).to_be_visible()
        elsewhere = page.get_by_role("button", name="Look at all states").bounding_box()
        clear = page.get_by_role("button", name="Clear filters").last.bounding_box()
        assert elsewhere["x"] + elsewhere["width"] + 4 < clear["x"], "they do not touch"
        page.get_by_role("main").get_by_role("button", name="Clear filters").first.click()
        expect(cards(page).first).to_be_visible()

    def test_says_so_where_the_run_is_not_there(self, browser, told):
        with opened(browser, told.service, but="404") as page:
            look(page, "?run=nosuch&state=all")
            expect(page.get_by_role("heading", name="no run has the id 'nosuch'")).to_be_visible()
            expect(page.get_by_role("button", name="Look at all states")).to_be_hidden()
            page.get_by_role("button", name="All runs").click()
            expect(cards(page).first).to_be_visible()

    def test_names_a_run_that_has_none(self, page, run):
        look(page, f"?run={run}")
        expect(page.get_by_text("No alert fits these filters.")).to_be_visible()
        expect(page.get_by_role("form", name="Filters")).to_contain_text("run of-this-test")

    def test_goes_on_page_by_page(self, page, told):
        look(page, "?state=past&project=many")
        expect(cards(page)).to_have_count(25)
        expect(cards(page).first).to_contain_text("Alert 59")
        page.get_by_role("button", name="Older").click()
        expect(cards(page).first).to_contain_text("Alert 34")
        expect(page).to_have_url(re.compile("cursor="))
        page.get_by_role("button", name="Older").click()
        expect(cards(page)).to_have_count(10)
        expect(page.get_by_role("button", name="Older")).to_be_disabled()
        page.get_by_role("button", name="Newer").click()
        expect(cards(page).first).to_contain_text("Alert 34")
        page.reload()
        expect(cards(page).first).to_contain_text("Alert 34")
        page.get_by_role("button", name="Newest").click()
        expect(cards(page).first).to_contain_text("Alert 59")

    def test_begins_anew_where_the_address_names_no_page(self, browser, told):
        with opened(browser, told.service, but="status of 422") as page:
            look(page, "?state=past&project=many&cursor=nonsense")
            expect(cards(page).first).to_contain_text("Alert 59")
            expect(page).to_have_url(re.compile("state=past&project=many$"))

    def test_leaves_the_focus_where_it_is(self, page, told, run):
        look(page, f"?run={run}&severity=warning")
        expect(page.get_by_text("No alert fits these filters.")).to_be_visible()
        main = page.get_by_role("main")
        for button in (
            tab(page, "Firing"),
            page.get_by_role("button", name="All runs"),
            main.get_by_role("button", name="Clear filters").last,
            main.get_by_role("button", name="Look at all states"),
        ):
            button.focus()
            ask_at_once(page)
            expect(button).to_be_focused(timeout=1)

    def test_listens_to_no_frames(self, page, told):
        with page.expect_request(re.compile("/events")) as request:
            look(page)
        assert request.value.url.endswith("/events?kind=alert")

    def test_lets_go_of_what_was_pending_and_did_not_come_to_fire(self, page, told, run):
        page.clock.install()
        look(page, f"?run={run}")
        expect(page.locator("#pulse")).to_have_attribute("title", re.compile("tells what changes"))
        told.open_alert(run, "may-be", state="pending")
        expect(card(page, "may-be")).to_be_visible()
        page.clock.pause_at(page.evaluate("Date.now()") + 1000)
        ask_at_once(page)
        told.withdraw(run, "may-be")
        page.clock.fast_forward(11_000)  # this view asks every ten seconds, others every thirty
        expect(card(page, "may-be")).to_have_count(0)

    def test_shows_what_fires_meanwhile(self, page, told, run):
        page.clock.install()
        look(page, "?project=tests")
        expect(page.get_by_text("No alert fits these filters.")).to_be_visible()
        expect(page.locator("#pulse")).to_have_attribute("title", re.compile("tells what changes"))
        page.clock.pause_at(page.evaluate("Date.now()") + 1000)
        ask_at_once(page)
        with events_of(page) as await_event, page.expect_response(re.compile("/alerts")):
            told.service.send_steps(run, range(10), similarity=[0.1] * 5, loss=float("nan"))
            await_event("alert", run_id=run, rule="loss-not-finite")
            page.clock.run_for(6000)  # by itself it asks after ten seconds
        expect(card(page, "loss-not-finite")).to_be_visible()


class TestAnAlert:
    def test_has_its_evidence_its_advice_and_a_way_to_the_heat_map(self, page, told):
        (alert,) = told.alerts(rule="token-similarity-escalation")
        look(page, f"?run={told.failing}")
        found = card(page, "token-similarity-escalation")
        for text in ("Tokens become the same over depth", alert["advice"]["text"], alert["advice"]["source"]):
            expect(found).to_contain_text(text)
        expect(found.get_by_role("list", name="Conditions")).to_contain_text("token_diversity of the last layer")
        found.get_by_text("What the rule saw").click()
        expect(found.get_by_role("table").first).to_be_visible()
        metric = "token_diversity"
        found.get_by_role("link", name=f"Show step {alert['firing_step']}").click()
        expect(page.get_by_role("heading", name=f"{metric} at step {alert['firing_step']}")).to_be_visible()
        expect(page).to_have_url(re.compile(rf"#/run/{told.failing}\?metric={metric}&step={alert['firing_step']}"))

    @pytest.mark.parametrize("place", ["#/alerts?project=tests", "#/run/{run}"])
    def test_has_the_whole_title_of_its_rule(self, page, told, run, place):
        told.service.send_steps(run, range(3), loss=1.0)
        seen = {"value": "ratio a: b", "seen": 3.0, "above": 2.0, "holds": True}
        summary = "Watch out: loss of A: B is high: ratio a: b is 3 (above 2)."
        told.open_alert(run, "colons", summary=summary, evidence={"conditions": [seen]})
        of_layer = seen | {"value": "x of 3", "layer": 2}
        told.open_alert(run, "layered", summary="Late: x of 3 (layer 2) is 1.", evidence={"conditions": [of_layer]})
        none_holds = seen | {"holds": False}
        told.open_alert(run, "alone", summary="A title: nothing seen.", evidence={"conditions": [none_holds]})
        page.goto(f"/{place.format(run=run)}")
        expect(card(page, "colons").locator(".summary")).to_have_text("Watch out: loss of A: B is high")
        expect(card(page, "layered").locator(".summary")).to_have_text("Late")
        expect(card(page, "alone").locator(".summary")).to_have_text("A title: nothing seen")

    @pytest.mark.parametrize("place", ["#/alerts?project=tests", "#/run/{run}"])
    def test_with_evidence_that_cannot_be_shown_says_so_and_hides_no_other(self, browser, told, run, place):
        told.open_alert(run, "odd", summary="It is odd.", evidence={"window": 5}, advice={"text": "Look at it."})
        told.open_alert(run, "plain")
        with opened(browser, told.service, but="TypeError") as page:
            page.goto(f"/{place.format(run=run)}")
            expect(card(page, "plain")).to_be_visible()
            for text in ("It is odd.", "Look at it.", "The web UI cannot show the evidence of this alert: rows."):
                expect(card(page, "odd")).to_contain_text(text)

    def test_that_another_attempt_overtook_leads_to_its_own_attempt(self, page, told, run):
        told.open_alert(run, "overtaken", evidence={"layers": {"token_similarity": {"last": {"layer": 4, "value": 1}}}})
        told.register_later("of-this-test", "tests")
        look(page, "?project=tests&state=past")
        expect(card(page, "overtaken")).to_contain_text("still firing when a new attempt began")
        expect(card(page, "overtaken").get_by_role("link", name="Show step 4")).to_have_attribute(
            "href", f"#/run/{run}?metric=token_similarity&step=4&attempt=1"
        )

    def test_that_fired_when_its_run_ended_did_not_resolve(self, page, told, run):
        told.open_alert(run, "to-the-end")
        told.service.request("PATCH", f"/api/v1/runs/{run}", json={"state": "finished"}).raise_for_status()
        look(page, "?project=tests&state=past")
        expect(card(page, "to-the-end")).to_contain_text("fired to the end")
        expect(card(page, "to-the-end")).not_to_contain_text("resolved")

    def test_that_is_silenced_says_so(self, page, told, run):
        told.open_alert(run, "muted")
        silence = {"rule": "muted", "until": "2999-01-01T00:00:00Z", "created_by": "tests"}
        told.service.request("POST", "/api/v1/silences", json=silence).raise_for_status()
        look(page, "?project=tests&silenced=true")
        expect(card(page, "muted")).to_contain_text("silenced")

    def test_leads_to_its_rule(self, page, told):
        look(page, f"?run={told.failing}")
        card(page, "token-similarity-escalation").get_by_role("link", name="token-similarity-escalation").click()
        expect(page.get_by_role("heading", name="Rules", exact=True)).to_be_visible()
        expect(
            page.get_by_role("article", name="token-similarity-escalation").get_by_text("What to try", exact=True)
        ).to_be_visible()


class TestAcknowledging:
    def test_takes_a_name_and_a_note_and_can_be_undone(self, page, told, run):
        told.open_alert(run, "first")
        told.open_alert(run, "second")
        look(page, "?project=tests")
        card(page, "first").get_by_role("button", name="Acknowledge").click()
        expect(card(page, "first").get_by_label("Your name")).to_be_focused()
        card(page, "first").get_by_label("Your name").fill("Ada")
        card(page, "first").get_by_label("Note").fill("lowering the rate")
        card(page, "first").get_by_role("button", name="Acknowledge", exact=True).click()
        expect(card(page, "first")).to_contain_text("Acknowledged by Ada, just now: lowering the rate")
        (alert,) = told.alerts(rule="first")
        assert (alert["state"], alert["acknowledged_by"], alert["note"]) == ("acknowledged", "Ada", "lowering the rate")
        card(page, "second").get_by_role("button", name="Acknowledge").click()
        expect(card(page, "second").get_by_label("Your name")).to_have_value("Ada")
        card(page, "first").get_by_role("button", name="Undo acknowledgement").click()
        expect(card(page, "first")).not_to_contain_text("Acknowledged by")
        assert told.alerts(rule="first")[0]["state"] == "firing"

    def test_asks_for_a_name_and_leaves_with_escape(self, page, told, run):
        told.open_alert(run, "first")
        look(page, "?project=tests")
        card(page, "first").get_by_role("button", name="Acknowledge").click()
        card(page, "first").get_by_role("button", name="Acknowledge", exact=True).click()
        assert card(page, "first").get_by_label("Your name").evaluate("field => field.validity.valueMissing")
        card(page, "first").get_by_label("Your name").press("Escape")
        expect(card(page, "first").get_by_label("Your name")).to_have_count(0)
        assert told.alerts(rule="first")[0]["state"] == "firing"

    def test_keeps_what_is_typed_while_the_list_goes_on(self, page, told, run):
        told.open_alert(run, "first")
        look(page, "?project=tests")
        card(page, "first").get_by_role("button", name="Acknowledge").click()
        card(page, "first").get_by_label("Note").fill("half a thou")
        silence = {"rule": "first", "until": "2999-01-01T00:00:00Z", "created_by": "tests"}
        told.service.request("POST", "/api/v1/silences", json=silence).raise_for_status()
        expect(card(page, "first")).to_contain_text("silenced")
        expect(card(page, "first").get_by_label("Note")).to_have_value("half a thou")

    def test_says_what_went_wrong(self, browser, told, run):
        told.open_alert(run, "first")
        with opened(browser, told.service, but="status of 409") as page:
            look(page, "?project=tests")
            card(page, "first").get_by_role("button", name="Acknowledge").click()
            card(page, "first").get_by_label("Your name").fill("Ada")
            page.route("**/api/v1/alerts?*", lambda route: None)  # no answer: the page does not know yet
            alert_id = told.alerts(rule="first")[0]["alert_id"]
            told.service.request("POST", f"/api/v1/alerts/{alert_id}/resolve", json={"by": "Bob"}).raise_for_status()
            with page.expect_response("**/ack"):
                card(page, "first").get_by_role("button", name="Acknowledge", exact=True).click()
            expect(card(page, "first").get_by_role("alert")).to_contain_text("over")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('guarded')}/tsemon.db"


@pytest.fixture(scope="module")
def store(url):
    found = Store(url)
    yield found
    found.close()


@pytest.fixture(scope="module")
def guarded(url, store):
    with served(Settings(database=url, tokens=True)) as service:
        yield service


class TestAVisitorWithAToken:
    @pytest.fixture
    def visit(self, browser, guarded, store):
        """The page of alerts of somebody whose token is for this, on a run with an alert that fires."""
        admin = {"Authorization": f"Bearer {self._token(store, 'admin')}"}
        run = guarded.request("POST", "/api/v1/runs", json={"run": "gpt", "blocks": []}, headers=admin).json()["run_id"]
        with store.write() as writer:
            writer.alerts.open(
                run, 1, "first", state="firing", pending_step=2, firing_step=4, family="norm", severity="warning",
                summary="It is so.", evidence={}, advice={},
            )  # fmt: skip
        with opened(browser, guarded, but="status of 401") as page:

            def visit(*scopes, name="on-call"):
                page.goto("/#/alerts")
                page.get_by_label("Token").fill(self._token(store, *scopes, name=name))
                page.get_by_role("button", name="Sign in").click()
                expect(card(page, "first")).to_be_visible()
                return page

            yield visit
        guarded.request("DELETE", f"/api/v1/runs/{run}", headers=admin).raise_for_status()

    def _token(self, store, *scopes, name="tests"):
        made = new_token()
        store.tokens.add(made.token_id, name=name, digest=made.digest, scopes=scopes, project=None, expires_at=None)
        return made.text

    def test_signs_with_the_name_of_the_token(self, visit):
        page = visit("admin", name=HOSTILE)
        card(page, "first").get_by_role("button", name="Acknowledge").click()
        expect(card(page, "first")).to_contain_text(f"Signed as {HOSTILE}")
        expect(card(page, "first").get_by_label("Your name")).to_have_count(0)
        card(page, "first").get_by_role("button", name="Acknowledge", exact=True).click()
        expect(card(page, "first")).to_contain_text(f"Acknowledged by {HOSTILE}")
        assert page.locator("main img, main script").count() == 0

    def test_is_told_that_it_may_only_look(self, visit):
        page = visit("read")
        expect(card(page, "first")).to_contain_text("Your token may read alerts and not acknowledge them")
        expect(card(page, "first").get_by_role("button")).to_have_count(0)


class TestWhatAClientSends:
    @pytest.mark.parametrize("width", [1280, 400])
    def test_stays_text_and_within_the_window(self, page, told, width):
        page.set_viewport_size({"width": width, "height": 900})
        found = []
        for i, name in enumerate((HOSTILE, RIGHT_TO_LEFT, LONG)):
            run = told.service.register(name[:128], project=name[:128])
            found.append(run)
            seen = {"value": name, "seen": 3.0, "above": 2.0, "holds": True, "against": name}
            evidence = {
                "conditions": [seen],
                "numbers": {name: name},
                "layers": {name: {"last": {"layer": 1, "value": 2}}},
            }
            advice = {"text": name, "source": name}
            told.open_alert(run, f"hostile-{i}", summary=f"{name}: {name} is 3.", evidence=evidence, advice=advice)
        look(page)
        for i, name in enumerate((HOSTILE, RIGHT_TO_LEFT, LONG)):
            expect(card(page, f"hostile-{i}").locator(".summary")).to_have_text(name)
            card(page, f"hostile-{i}").get_by_text("What the rule saw").click()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "Alerts · tsemon"
        for run in found:
            told.forget(run)
