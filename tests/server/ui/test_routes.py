"""What the service hands out as its page, and that it hands out nothing else."""

import http.client
import posixpath
import re
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from tsemon.catalogue import LAYERED
from tsemon_server.settings import Settings

from .conftest import opened, served

VENDORED = "/ui/vendor/echarts-6.1.0.esm.min.mjs"
FETCHED = """() => Object.fromEntries(performance.getEntriesByType("resource")
    .filter(({ name }) => /\\.m?js$/.test(name))
    .map(({ name, responseStatus, transferSize }) => [new URL(name).pathname, [responseStatus, transferSize]]))"""
"""The modules of the page: status and bytes of each response."""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(Settings(database=f"sqlite:///{tmp_path_factory.mktemp('routes')}/tsemon.db")) as service:
        yield service


def get_as_written(url, target):
    """GET without a client library's tidying of the path."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.putrequest("GET", target)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


class TestTheFilesOfThePage:
    @pytest.mark.parametrize(
        ("path", "media_type"),
        [
            ("/", "text/html; charset=utf-8"),
            ("/ui/style.css", "text/css; charset=utf-8"),
            ("/ui/app.js", "text/javascript; charset=utf-8"),
            (VENDORED, "text/javascript; charset=utf-8"),
            ("/ui/catalogue.json", "application/json"),
            ("/ui/icon.svg", "image/svg+xml"),
        ],
    )
    def test_say_what_they_are_and_forbid_guessing(self, service, path, media_type):
        answer = service.request("GET", path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == media_type
        assert answer.headers["x-content-type-options"] == "nosniff"

    @pytest.mark.parametrize("path", ["/", "/ui/app.js"])
    def test_are_not_sent_again_while_unchanged(self, service, path):
        first = service.request("GET", path)
        again = service.request("GET", path, headers={"If-None-Match": first.headers["etag"]})
        assert first.headers["cache-control"] == "no-cache"
        assert (again.status_code, again.content) == (304, b"")

    def test_are_asked_after_and_not_sent_again_by_a_browser(self, browser, service):
        with opened(browser, service) as page:
            page.goto("/")
            expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
            first = page.evaluate(FETCHED)
            page.goto("about:blank")
            page.goto("/")
            expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
            again = page.evaluate(FETCHED)
        assert first.keys() == again.keys()
        assert first["/ui/app.js"][1] > 1000, "it is not in the cache yet"
        for path, (status, _) in first.items():
            assert status == 200, path
        for path, (_, sent_bytes) in again.items():
            assert sent_bytes < 1000, path

    def test_are_kept_for_good_where_their_name_carries_a_version(self, service):
        assert "immutable" in service.request("GET", VENDORED).headers["cache-control"]

    def test_may_load_nothing_from_elsewhere_and_run_no_inline_script(self, service):
        policy = service.request("GET", "/").headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "script-src" not in policy
        assert "http" not in policy

    def test_are_named_by_the_page_so_that_none_waits_for_another(self, service):
        """And what it names is there."""
        named = re.findall(r'<link rel="modulepreload" href="([^"]+)">', service.request("GET", "/").text)
        sources = {name: service.request("GET", f"/{name}").raise_for_status().text for name in named}
        for name, source in sources.items():
            for imported in re.findall(r'from "(\.[^"]+)"', "" if "vendor" in name else source):
                assert posixpath.normpath(f"{posixpath.dirname(name)}/{imported}") in named
        assert {"ui/app.js", "ui/views/run.js", VENDORED[1:]} <= set(named)
        assert not [name for name in named if "swagger" in name]

    def test_carry_the_catalogue_as_it_is(self, service):
        metrics = service.request("GET", "/ui/catalogue.json").json()
        assert {name: metric["title"] for name, metric in metrics.items()} == {
            name: metric.title for name, metric in LAYERED.items()
        }


class TestEverythingElse:
    @pytest.mark.parametrize(
        "target",
        [
            "/ui/nothing.js",
            "/ui/",
            "/ui/__init__.py",
            "/ui/vendor/LICENSE",
            "/ui/../__init__.py",
            "/ui/..%2f__init__.py",
            "/ui/%2e%2e/%2e%2e/%2e%2e/pyproject.toml",
            "/ui/..\\..\\main.py",
            "/ui//etc/passwd",
            "/ui/%2fetc%2fpasswd",
            "/ui/./app.js",
            "/ui/vendor/../app.js",
            "/ui/app.js%00",
        ],
    )
    def test_is_not_found(self, service, target):
        status, body = get_as_written(service.url, target)
        assert status == 404
        assert b'"error":"not_found"' in body
