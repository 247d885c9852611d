// The start page: all runs, the losses of the latest, and how to attach where there is none yet.

import { get, runPath } from "./api.js";
import { h, keyed } from "./dom.js";
import { count, number, refreshAges, statePill, time } from "./format.js";
import { COLOURS, Losses } from "./losses.js";

const BUSY_MS = 2000;
const IDLE_MS = 10_000;
const PAGE_SIZE = 50;

export class RunsView {
  #pages = 1;
  #charted = new Map();

  constructor(main) {
    this.main = main;
    this.redraw = () => this.losses?.redraw();
  }

  destroy() {
    this.losses?.end();
    document.title = "tsemon";
  }

  async refresh(signal) {
    const { runs, hasMore } = await this.#fetchRuns(signal);
    if (runs.length === 0) {
      this.#showNone();
      return BUSY_MS;
    }
    const charted = await this.#fetchLosses(runs.slice(0, COLOURS.length), signal);
    this.#showRuns(runs, hasMore, charted);
    return runs.some((run) => run.state === "running") ? BUSY_MS : IDLE_MS;
  }

  async #fetchRuns(signal) {
    const runs = [];
    let cursor = null;
    for (let page = 0; page < this.#pages; page += 1) {
      const answer = await get("runs", { order: "-updated", limit: PAGE_SIZE, cursor }, signal);
      runs.push(...answer.runs);
      cursor = answer.next_cursor;
      if (cursor === null) break;
    }
    // Runs that go on overtake each other with every frame; among themselves they stay where they are.
    const going = runs.filter((run) => run.state === "running").sort((a, b) => (a.created_at < b.created_at ? 1 : -1));
    return { runs: [...going, ...runs.filter((run) => run.state !== "running")], hasMore: cursor !== null };
  }

  /** The losses of these runs; what did not change since the last round is not asked for again. */
  async #fetchLosses(runs, signal) {
    const wanted = runs.filter((run) => run.loss !== null || run.num_frames > 0);
    const fetched = await Promise.all(
      wanted.map(async (run) => {
        const known = this.#charted.get(run.run_id);
        const stamp = `${run.num_frames} ${run.attempt}`;
        if (known?.stamp === stamp) return known;
        const series = await get(`${runPath(run.run_id)}/series`, { metric: "loss", points: 400 }, signal).catch((error) => {
          if (error.status === 404) return null; // this run has sent no loss
          throw error;
        });
        return { id: run.run_id, stamp, series };
      }),
    );
    const before = this.#charted;
    this.#charted = new Map(fetched.map((entry) => [entry.id, entry]));
    const taken = new Set(fetched.map(({ id }) => before.get(id)?.colour));
    const free = COLOURS.filter((colour) => !taken.has(colour));
    for (const entry of fetched) entry.colour = before.get(entry.id)?.colour ?? free.shift();
    const projects = new Set(runs.map((run) => run.project));
    const titles = new Map(runs.map((run) => [run.run_id, projects.size > 1 ? `${run.project} / ${run.run}` : run.run]));
    return fetched.filter(({ series }) => series?.step.length).map((entry) => ({ ...entry, title: titles.get(entry.id) }));
  }

  #showNone() {
    if (this.empty?.isConnected) return;
    this.losses?.end();
    this.losses = null;
    const snippet = [
      "import tsemon",
      `monitor = tsemon.attach(model, optimizer, run="my-run", server="${location.href.split("#")[0].replace(/\/$/, "")}")`,
      "for batch in loader:",
      "    loss = train_step(model, optimizer, batch)",
      "    monitor.step(loss=loss)",
      "monitor.close()",
    ].join("\n");
    this.empty = h(
      "section",
      { class: "card empty" },
      h("h1", {}, "No runs yet"),
      h("p", {}, "A run shows here as soon as a training process attaches to this service. In the training script:"),
      h("pre", { tabindex: "0", "aria-label": "Six lines that attach a training to this service" }, h("code", {}, snippet)),
      h("p", { class: "quiet" }, "This page looks for it every two seconds; there is nothing to reload."),
    );
    this.main.replaceChildren(this.empty);
  }

  #build() {
    this.chartBox = h("div", { class: "chart losses", role: "img", "aria-label": "Loss of the latest runs by step" });
    this.legend = h("ul", { class: "series", "aria-label": "Runs in the chart" });
    this.chartCard = h("section", { class: "card" }, h("h2", {}, "Loss of the latest runs"), this.legend, this.chartBox);
    this.rows = h("tbody");
    this.more = h("button", { type: "button", onclick: () => ((this.#pages += 1), this.reload()) }, "Show more");
    const columns = ["run", "state", "step", "loss", "last seen", "alerts"];
    this.root = h(
      "div",
      { class: "stack" },
      h("h1", {}, "Runs"),
      this.chartCard,
      h(
        "section",
        { class: "card flush" },
        h("table", { class: "runs" }, h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name)))), this.rows),
      ),
      this.more,
    );
    this.main.replaceChildren(this.root);
    this.losses = new Losses(this.chartBox, this.legend);
  }

  #showRuns(runs, hasMore, charted) {
    if (!this.root?.isConnected) this.#build();
    const items = runs.map((run) => {
      const { colour, series } = this.#charted.get(run.run_id) ?? {};
      return { ...run, colour: series?.step.length ? colour : null, endsNotFinite: run.loss === null && series?.nonfinite.at(-1) > 0 };
    });
    keyed(this.rows, items, (run) => run.run_id, rowOf);
    refreshAges(this.rows);
    this.more.hidden = !hasMore;
    this.chartCard.hidden = charted.length === 0;
    this.losses.show(charted);
  }
}

function rowOf(run) {
  const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
  swatch.style.background = run.colour ?? "transparent";
  const cell = (label, ...content) => h("td", { "data-label": label }, ...content);
  return h(
    "tr",
    {},
    h(
      "td",
      {},
      h(
        "div",
        { class: "name" },
        swatch,
        h("div", {}, h("a", { class: "given", href: `#/run/${encodeURIComponent(run.run_id)}` }, run.run), h("div", { class: "quiet given" }, run.project)),
      ),
    ),
    cell("state", statePill(run.state)),
    cell("step", run.last_step === null ? "no frames yet" : count(run.last_step)),
    cell("loss", lossOf(run)),
    cell("last seen", time(run.updated_at)),
    cell("alerts", alertsOf(run)),
  );
}

function alertsOf({ open_alerts, alerts_at_end }) {
  if (open_alerts) return h("span", { class: "pill failed" }, count(open_alerts));
  return alerts_at_end ? h("span", { class: "pill failed" }, `${count(alerts_at_end)} at its end`) : h("span", { class: "quiet" }, "none");
}

function lossOf({ loss, endsNotFinite }) {
  if (endsNotFinite) return h("span", { class: "bad" }, "not finite");
  return loss === null ? h("span", { class: "quiet", title: "no finite loss in the last frame" }, "–") : number(loss);
}
