"""Take the pictures of the documentation: the page's views as Chromium shows them, with the demo's runs.

tsemon demo --port 8731                                    # in another terminal, until it says "Still serving"
python scripts/screenshot.py http://127.0.0.1:8731         # all of them, into docs/images
python scripts/screenshot.py http://127.0.0.1:8731 run alert
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
from playwright.sync_api import Locator, Page, sync_playwright

IMAGES = Path(__file__).parent.parent / "docs/images"
RUN, TWIN = "digits-post-norm", "digits-de-escalated"


def charts(page: Page) -> Locator:
    """A run's charts, as tall as they are."""
    return page.locator(".charts")


def open_alert(page: Page) -> Locator:
    """The alert that docs/rules.md shows, unfolded."""
    alert = page.get_by_role("article", name="token-similarity-escalation", exact=True)
    alert.get_by_text("What the rule saw").click()
    return alert


@dataclass(frozen=True)
class Picture:
    """One picture, `docs/images/NAME.png`."""

    name: str
    address: str
    """After the service's; `{run}` and `{twin}` are the ids of the demo's runs."""
    shown: str
    """A text that is there once the view is."""
    part: Callable[[Page], Locator] | None = None
    """What to do first, and what is in the picture: the window where there is none."""
    size: tuple[int, int] = (1280, 860)
    scheme: Literal["light", "dark"] = "light"


PICTURES = [
    Picture("fleet", "#/", RUN, size=(1280, 380)),
    Picture("run", "#/run/{run}", RUN, size=(1280, 1240)),
    Picture("run-cell", "#/run/{run}?metric=attention_entropy&layer=20&step=100&fit=1", "heads of layer 20", charts),
    Picture("run-narrow", "#/run/{run}?metric=token_diversity", RUN, size=(400, 1200), scheme="dark"),
    Picture("alert", "#/run/{run}", RUN, open_alert),
    Picture(
        "compare",
        "#/compare?run={run}&run={twin}&metric=token_diversity&layer=-1",
        "by layer, at the latest",
        size=(1280, 1000),
    ),
    Picture("alerts", "#/alerts?state=all", "Tokens become the same", size=(1280, 700)),
    Picture("rule-editor", "#/rule/token-similarity-escalation?run={run}", "Would have fired", size=(1280, 920)),
    Picture("rules", "#/rules?run={run}&family=tse", "fires when", size=(1280, 1000)),
]


def main(url: str, *names: str) -> None:
    known = {picture.name: picture for picture in PICTURES}
    runs = httpx.get(f"{url}/api/v1/runs", params={"project": "demo"}).raise_for_status().json()["runs"]
    ids = {run["run"]: run["run_id"] for run in runs}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell") or shutil.which("chromium"), args=["--no-sandbox"]
        )
        for picture in [known[name] for name in names] or PICTURES:
            width, height = picture.size
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=picture.scheme)
            page.goto(f"{url}/{picture.address.format(run=ids.get(RUN), twin=ids.get(TWIN))}")
            page.get_by_text(picture.shown).first.wait_for()
            page.wait_for_timeout(1000)  # of live events no network ever falls idle
            path = IMAGES / f"{picture.name}.png"
            (picture.part(page) if picture.part else page).screenshot(path=path)
            print(path)
            page.close()
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
