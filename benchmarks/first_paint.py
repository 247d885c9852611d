"""How long does the page of a long run take to show its charts?

`tsemon serve` in a process of its own, on a run of 48 layers that was stored and settled before; Chromium opens the run's
page with nothing in its cache, and again with what it kept. Wall time is from the start of the navigation to the frame in
which loss and heat map are drawn. CPU, which others on the machine change less, is of all until half a second after that.
Then what a person does there: another metric, a picked layer.
"""

from __future__ import annotations

import shutil
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from databases import Service, SQLite
from long_runs import NARROW, conditions, filled
from playwright.sync_api import Browser, sync_playwright
from values import METRICS, Size

AFTERWARDS_MS = 500
_LOOK = """new Promise((resolve) => {
    const drawn = () => requestAnimationFrame(() => setTimeout(() => resolve(performance.now())));
    const look = () => IS_THERE ? drawn() : setTimeout(look, 2);
    look();
})"""
_DRAWN = "document.querySelector('.legend:not([hidden]) .bar') && document.querySelector('.timeline canvas')"
PAINTED = f"() => {_LOOK.replace('IS_THERE', _DRAWN)}"
"""Milliseconds since the navigation began, at the end of the first frame in which the charts are drawn."""
SHOWN = f"(text) => {_LOOK.replace('IS_THERE', 'document.body.textContent.includes(text)')}"
"""The same of a text."""


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10**3, 10**5])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="keep the runs here, and use what is here already")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="tsemon-") as scratch:
        folder = (arguments.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        engine = SQLite(folder)
        runs = {
            size: filled(engine, size, folder).run_id for size in (Size(steps, NARROW) for steps in arguments.steps)
        }
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium-headless-shell") or shutil.which("chromium"),
                args=["--no-sandbox", "--disable-gpu"],
            )
            print(
                conditions([engine]),
                f"Chromium {browser.version}, {arguments.rounds} rounds, milliseconds: median, and the longest.\n",
            )
            print(
                f"| | {' | '.join(f'{size.steps:,} steps' for size in runs)} |",
                "|---" * (len(runs) + 1) + "|",
                sep="\n",
            )
            columns = []
            for size, run_id in runs.items():
                with closing(Service(engine, size.name)) as service:
                    columns.append(_measured(browser, service, run_id, arguments.rounds))
            for what in columns[0]:
                print(f"| {what} | {' | '.join(_cell(column[what]) for column in columns)} |")
            browser.close()


def _measured(browser: Browser, service: Service, run_id: str, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        context = browser.new_context(viewport={"width": 1280, "height": 1400})
        for kept in ("nothing in the cache", "the page's files in the cache"):
            page, used_s = context.new_page(), service.cpu_s()
            thread = context.new_cdp_session(page)
            thread.send("Performance.enable", {"timeDomain": "threadTicks"})
            page.goto(f"{service.url}/#/run/{run_id}", wait_until="commit")
            _note(found, f"first paint, {kept}", page.evaluate(PAINTED))
            page.wait_for_timeout(AFTERWARDS_MS)
            told = {one["name"]: one["value"] for one in thread.send("Performance.getMetrics")["metrics"]}
            _note(found, f"{kept}: CPU of the page's thread", 1000 * told["TaskDuration"])
            _note(found, f"{kept}: CPU of the service", 1000 * (service.cpu_s() - used_s))
            if kept == "nothing in the cache":
                page.close()
        for what, label, choice, shown in (
            ("another metric", "metric", METRICS[1], f"{METRICS[1]} by layer"),
            ("the history of a layer", "layer", "24", "Layer 24"),
        ):
            begun = page.evaluate("performance.now()")
            page.get_by_label(label, exact=True).select_option(choice)
            _note(found, what, page.evaluate(SHOWN, shown) - begun)
        context.close()
    return found


def _note(found: dict[str, list[float]], what: str, ms: float) -> None:
    found.setdefault(what, []).append(ms)


def _cell(times: list[float]) -> str:
    return f"{median(times):,.0f} ({max(times):,.0f})"


if __name__ == "__main__":
    main()
