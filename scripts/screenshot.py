"""Take the pictures of the documentation: one run's page, or an alert on it, as Chromium shows it.

tsemon demo --port 8731                       # in another terminal, until it says "Still serving"
python scripts/screenshot.py http://127.0.0.1:8731 digits-post-norm docs/images/run.png
python scripts/screenshot.py http://127.0.0.1:8731 digits-post-norm docs/images/alert.png token-similarity-escalation
"""

from __future__ import annotations

import shutil
import sys

from playwright.sync_api import sync_playwright

from tsemon_client import Client


def main(url: str, run: str, path: str, rule: str | None = None) -> None:
    with Client(url) as client:
        run_id = client.find_run(run, project="demo")["run_id"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        page.goto(f"{url}/#/run/{run_id}")
        page.get_by_role("heading", name=run).wait_for()
        page.wait_for_load_state("networkidle")
        if rule is None:
            page.screenshot(path=path)
        else:
            alert = page.get_by_role("article", name=rule, exact=True)
            alert.get_by_text("What the rule saw").click()
            alert.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
