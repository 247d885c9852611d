"""The documentation: `make site` builds it from docs/, the server serves it at /help."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tsemon_server.settings import Settings

from .conftest import opened
from .test_routes import get_as_written

ROOT = Path(__file__).parents[3]
PAGES = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built with warnings as errors."""
    if importlib.util.find_spec("material") is None:
        if os.environ.get("CI"):
            pytest.fail("mkdocs-material is not installed; the extra `docs` has it")
        pytest.skip("mkdocs-material is not installed; the extra `docs` has it")
    folder = tmp_path_factory.mktemp("help") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def service(server, site, tmp_path):
    with server.showing(Settings(database=f"sqlite:///{tmp_path}/tsemon.db"), help_folder=site) as service:
        yield service


def address_of(page):
    return re.sub(r"\bREADME$", "index", page.removesuffix(".md")) + ".html"


class TestTheSite:
    @pytest.mark.parametrize("page", PAGES)
    def test_has_each_page_in_its_navigation(self, site, page):
        links = re.findall(r'<a href="([^"]+)" class="md-nav__link', (site / "glossary.html").read_text())
        assert address_of(page) in links
        assert (site / address_of(page)).exists()

    def test_loads_nothing_from_elsewhere_and_has_nothing_inline(self, site):
        forbidden = r'src="(?:https?:)?//|<link [^>]*href="(?:https?:)?//|<style|<script>| style="'
        assert [page for page in PAGES if re.search(forbidden, (site / address_of(page)).read_text())] == []

    def test_names_files_outside_docs_and_does_not_link_to_them(self, site):
        text = (site / "deploy.html").read_text()
        assert "a systemd unit (<code>deploy/tsemon.service</code>)" in text
        assert "Use docker-compose.yml (server" in text


class TestHelp:
    @pytest.mark.parametrize(
        ("path", "title"), [("", "tsemon"), ("/", "tsemon"), ("/measures.html", "Metrics - tsemon")]
    )
    def test_shows_the_pages(self, service, path, title):
        answer = service.request("GET", f"/help{path}", follow_redirects=True)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert f"<title>{title}</title>" in answer.text

    def test_may_load_nothing_from_elsewhere_and_run_no_inline_script(self, service):
        policy = service.request("GET", "/help/").headers["content-security-policy"]
        assert "default-src 'self'; " in policy
        assert "script-src" not in policy
        assert "unsafe" not in policy

    def test_is_not_sent_again_while_unchanged(self, service):
        first = service.request("GET", "/help/glossary.html")
        again = service.request("GET", "/help/glossary.html", headers={"If-None-Match": first.headers["etag"]})
        assert first.headers["cache-control"] == "no-cache"
        assert (again.status_code, again.content) == (304, b"")

    def test_has_an_index_for_its_search(self, service):
        answer = service.request("GET", "/help/search/search_index.json")
        assert answer.headers["content-type"] == "application/json"
        assert any("token_diversity" in json.dumps(part) for part in answer.json()["docs"])

    @pytest.mark.parametrize(
        "target",
        [
            "/help/nothing.html",
            "/help/decisions/",
            "/help/../mkdocs.yml",
            "/help/..%2f..%2fmkdocs.yml",
            "/help/%2e%2e/%2e%2e/tsemon.db",
            "/help//etc/passwd",
            "/help/%2fetc%2fpasswd",
            "/help/glossary.html%00",
        ],
    )
    def test_has_no_other_files(self, service, target):
        status, body = get_as_written(service.url, target)
        assert status == 404
        assert b'"error":"not_found"' in body

    def test_says_how_to_build_it(self, server, tmp_path):
        settings = Settings(database=f"sqlite:///{tmp_path}/tsemon.db")
        with server.showing(settings, help_folder=tmp_path / "help") as service:
            answer = service.request("GET", "/help", follow_redirects=True)
        assert (answer.status_code, answer.json()["error"]) == (404, "not_found")
        assert "run `make site`" in answer.json()["detail"]

    def test_finds_a_metric(self, browser, service):
        """In the browser, whose console stays empty: no request elsewhere, nothing that the policy forbids."""
        with opened(browser, service) as page:
            page.goto("/help")
            page.get_by_role("textbox", name="Search").press_sequentially("token_diversity")
            page.locator(".md-search-result__link").first.click()
            expect(page).to_have_url(re.compile(r"/help/.+\.html"))
            expect(page.get_by_role("article")).to_contain_text("token_diversity")

    def test_has_the_colors_of_the_system(self, browser, service):
        """Also if these have changed since the last visit, which the theme remembers."""
        with opened(browser, service) as page:
            for system, scheme in (("light", "default"), ("dark", "slate")):
                page.emulate_media(color_scheme=system)
                page.goto("/help/")
                expect(page.locator("body")).to_have_attribute("data-md-color-scheme", scheme)
