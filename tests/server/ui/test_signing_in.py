"""The page of a service that asks for tokens, and the description of its routes."""

import pytest
from playwright.sync_api import expect

from tests.server.ui.conftest import opened
from tsemon_server.access.tokens import new_token
from tsemon_server.settings import Settings
from tsemon_server.store import Store


@pytest.fixture
def store(tmp_path):
    found = Store(f"sqlite:///{tmp_path}/guarded.db")
    yield found
    found.close()


@pytest.fixture
def guarded(server, store, tmp_path):
    with server.showing(Settings(database=f"sqlite:///{tmp_path}/guarded.db", tokens=True)) as service:
        yield service


@pytest.fixture
def stranger(browser, guarded):
    """A page of somebody who has not signed in: the browser notes each answer of 401 by itself."""
    with opened(browser, guarded, but="status of 401") as page:
        yield page


def token(store, *scopes, project=None, name="on-call"):
    made = new_token()
    store.tokens.add(made.token_id, name=name, digest=made.digest, scopes=scopes, project=project, expires_at=None)
    return made.text


def register(service, store, run, project):
    headers = {"Authorization": f"Bearer {token(store, 'admin')}"}
    body = {"project": project, "run": run, "blocks": []}
    service.request("POST", "/api/v1/runs", json=body, headers=headers).raise_for_status()


class TestAStranger:
    def test_is_asked_for_a_token_and_sees_nothing(self, stranger, guarded, store):
        register(guarded, store, "secret-run", "a")
        stranger.goto("/")
        expect(stranger.get_by_role("heading", name="Sign in")).to_be_visible()
        expect(stranger.get_by_label("Token")).to_be_focused()
        expect(stranger.get_by_text("secret-run")).to_have_count(0)

    def test_with_a_wrong_token_is_told(self, stranger):
        stranger.goto("/")
        stranger.get_by_label("Token").fill("tsm_wrong")
        stranger.get_by_role("button", name="Sign in").click()
        expect(stranger.locator(".bad")).to_contain_text("expected a token that `tsemon token create` made")

    def test_signs_in_and_out_and_no_script_can_read_the_token(self, stranger, guarded, store):
        register(guarded, store, "mine", "a")
        register(guarded, store, "theirs", "b")
        stranger.goto("/")
        stranger.get_by_label("Token").fill(token(store, "read", project="a"))
        stranger.keyboard.press("Enter")
        expect(stranger.get_by_role("link", name="mine")).to_be_visible()
        expect(stranger.get_by_text("theirs")).to_have_count(0)
        expect(stranger.locator("#visitor")).to_contain_text("on-call · a")
        assert stranger.evaluate("document.cookie") == ""
        stranger.reload()
        expect(stranger.get_by_role("link", name="mine")).to_be_visible()
        stranger.get_by_role("button", name="Sign out").click()
        expect(stranger.get_by_role("heading", name="Sign in")).to_be_visible()
        expect(stranger.get_by_role("link", name="mine")).to_have_count(0)


class TestATokenThatIsNotEnough:
    @pytest.fixture
    def visitor(self, browser, guarded):
        with opened(browser, guarded, but="Failed to load resource") as page:
            page.goto("/")
            yield page

    def sign_in(self, page, text):
        page.get_by_label("Token", exact=True).fill(text)  # another label is "Your token does not allow this"
        page.keyboard.press("Enter")

    def test_is_told_what_it_may_and_what_it_lacks(self, visitor, guarded, store):
        register(guarded, store, "secret-run", "a")
        self.sign_in(visitor, token(store, "ingest", project="a", name="trainer"))
        expect(visitor.get_by_role("heading", name="Your token does not allow this")).to_be_visible()
        facts = visitor.locator(".facts > div")
        expect(facts).to_have_text(["tokentrainer", "it mayingest", "ina", "it lacksread"])
        expect(visitor.locator("pre")).to_have_text("tsemon token create NAME --scope read")
        expect(visitor.locator("#pulse")).to_have_text("not allowed")

    def test_is_changed_for_another_one(self, visitor, guarded, store):
        register(guarded, store, "mine", "a")
        self.sign_in(visitor, token(store, "metrics"))
        visitor.get_by_role("button", name="Use another token").click()
        self.sign_in(visitor, token(store, "read"))
        expect(visitor.get_by_role("link", name="mine")).to_be_visible()
        expect(visitor.locator("#pulse")).to_have_text("live")


class TestTheDescriptionOfTheRoutes:
    def test_is_shown_without_anything_from_elsewhere(self, page):
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto("/docs")
        expect(page.get_by_role("heading", name="tsemon")).to_be_visible()
        expect(page.get_by_text("/api/v1/runs/{run_id}/series")).to_be_visible()
        assert all(url.startswith((page.url.rpartition("/")[0], "data:")) for url in asked)
