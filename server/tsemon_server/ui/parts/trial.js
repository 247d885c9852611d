// A rule on a past run: where it would have fired, in a sentence and as a chart.

import { Refused, get, own, runPath, tryRule } from "../base/api.js";
import { h, put } from "../base/dom.js";
import { count, number } from "../base/format.js";
import { TrialChart, panelsOf } from "../charts/trial.js";
import { loadCharts } from "../charts/chart.js";
import { nearestName } from "./nearest.js";
import { fill } from "./pickers.js";
import { RunSearch } from "./run_search.js";

const POINTS = 300;
const MOST_PANELS = 6;
const MOST_STEPS = 4;
/** What the server answers when it has too much to do. */
const BUSY = [429, 503];
const RETRY_MS = 5000;

export class Trial {
  #chart = null;
  #controller = new AbortController();
  #wanted = null;
  #shownKey = null;
  #isBusy = false;
  #tried = null;
  #attempt = null;
  #timer = null;
  run = null;

  /** Without a choice it is a run of `project`, or of any if that is null. `onRun(run)` is told which run is chosen: with all its metrics. */
  constructor({ project, onRun }) {
    this.ofProject = project;
    this.onRun = onRun;
    this.search = new RunSearch({ label: "Find a run", onPick: (run) => this.choose(run.run_id) });
    this.search.element.hidden = true;
    this.other = h("button", { type: "button", onclick: () => this.#find() }, "Another run");
    this.link = h("a");
    this.project = h("span", { class: "quiet" });
    this.said = h("p", { class: "said", role: "status" });
    this.details = h("ul", { class: "quiet details" });
    this.attempts = h("select", { "aria-label": "Attempt", hidden: true, onchange: () => this.#pickAttempt(Number(this.attempts.value)) });
    this.drawing = h("div", { class: "chart trial-chart", role: "img", hidden: true });
    this.legend = h("p", { class: "legend quiet", hidden: true }, h("span", { class: "key pending" }), "pending", h("span", { class: "key firing" }), "firing", h("span", { class: "key bound" }), "bound");
    this.more = h("p", { class: "quiet", hidden: true });
    this.element = h(
      "section",
      { class: "card trial", "aria-label": "On a past run" },
      h("h2", {}, "On a past run"),
      h("div", { class: "who" }, this.link, this.project, this.attempts, this.other),
      this.search.element, this.said, this.details, this.drawing, this.legend, this.more,
    );
  }

  /** The run of this id; without one, the run that was last written to. */
  async choose(runId) {
    try {
      const id = runId ?? (await newestRun(this.ofProject, this.#controller.signal));
      if (id === null) return put(this.said, ...this.#noRun());
      this.run = await get(runPath(id), {}, this.#controller.signal);
    } catch (error) {
      if (!this.#controller.signal.aborted) this.#fail(error);
      return;
    }
    put(this.link, h("span", { class: "given" }, this.run.run));
    this.link.setAttribute("href", `#/run/${encodeURIComponent(this.run.run_id)}`);
    put(this.project, h("span", { class: "given" }, this.run.project));
    this.search.element.hidden = true;
    this.#attempt = null;
    this.onRun(this.run);
    if (this.#wanted === null) put(this.said, "Write a condition to see where it would have fired.");
    else this.want(this.#wanted);
  }

  #noRun() {
    if (this.ofProject === null) return ["There is no run with frames yet. Train one, and see here where the rule would have fired."];
    return ["Project ", h("span", { class: "given" }, this.ofProject), " has no run with frames yet. Choose a run of another project to see where the rule would have fired."];
  }

  /** Try this rule. One is tried at a time: of those that come meanwhile only the last. */
  want(rule) {
    clearTimeout(this.#timer);
    this.#wanted = rule;
    if (!this.#isBusy) this.#next();
  }

  /** What is shown is of a rule that is not the one in the fields any more. */
  set isStale(isStale) {
    this.element.classList.toggle("stale", isStale);
  }

  redraw() {
    this.#chart?.redraw();
  }

  end() {
    clearTimeout(this.#timer);
    this.#controller.abort();
    this.search.close();
    this.#chart?.end();
  }

  #find() {
    this.search.element.hidden = false;
    this.search.focus();
  }

  async #next() {
    const rule = this.#wanted;
    if (rule === null || this.run === null) return;
    const key = JSON.stringify([this.run.run_id, seenBy(rule)]);
    if (key === this.#shownKey) return void (this.isStale = false);
    this.#isBusy = true;
    this.element.setAttribute("aria-busy", "true");
    try {
      const [tried] = await Promise.all([tryRule(rule, this.run.run_id, POINTS, this.#controller.signal), loadCharts()]);
      this.#shownKey = key;
      this.#tried = tried;
      this.#show();
      this.isStale = false;
    } catch (error) {
      if (this.#controller.signal.aborted) return;
      this.#shownKey = null;
      this.#fail(error);
      if (BUSY.includes(error.status)) this.#timer = setTimeout(() => this.want(this.#wanted), RETRY_MS);
    } finally {
      this.#isBusy = false;
      this.element.removeAttribute("aria-busy");
    }
    if (this.#wanted !== rule) this.#next();
  }

  #fail(error) {
    put(this.said, error instanceof Refused ? `The server refused: ${error.message}` : `The rule cannot be tried now: ${error.message}`);
    this.details.replaceChildren();
    this.drawing.hidden = this.legend.hidden = this.more.hidden = true;
  }

  #pickAttempt(attempt) {
    this.#attempt = attempt;
    this.#show();
  }

  #show() {
    const traces = this.#tried.traces;
    const trace = traces.find(({ attempt }) => attempt === this.#attempt) ?? traces.findLast((one) => one.spans.some(({ firing_step }) => firing_step !== null)) ?? traces.at(-1);
    this.attempts.hidden = traces.length < 2;
    if (trace === undefined) {
      put(this.said, "This rule follows the server's clock, so a past run cannot show when it would have fired.");
      this.details.replaceChildren();
      return void (this.drawing.hidden = this.legend.hidden = this.more.hidden = true);
    }
    fill(this.attempts, String(trace.attempt), traces.map(({ attempt }) => [String(attempt), `attempt ${attempt}`]));
    put(this.said, sentenceOf(trace));
    this.details.replaceChildren(...detailsOf(trace, this.run, this.#tried.problems).map((text) => h("li", { class: "given" }, text)));
    const panels = panelsOf(trace.comparisons);
    const drawn = panels.slice(0, MOST_PANELS);
    const hidden = panels.length - drawn.length;
    this.drawing.hidden = this.legend.hidden = drawn.length === 0;
    this.drawing.setAttribute("aria-label", `${[...new Set(trace.comparisons.map(({ text }) => text))].join("; ")} over steps ${trace.first_step} to ${trace.last_step}`);
    if (drawn.length) {
      this.#chart ??= new TrialChart(this.drawing);
      this.#chart.show({ ...trace, panels: drawn });
    }
    const notes = [
      hidden > 0 && (hidden === 1 ? "One more value is not drawn." : `${count(hidden)} more values are not drawn.`),
      trace.samples_per_point > 1 && `Each point is the one of ${count(trace.samples_per_point)} samples that comes closest to its bound.`,
    ].filter(Boolean);
    put(this.more, notes.join(" "));
    this.more.hidden = notes.length === 0;
  }
}

/** What of a rule a trial depends on. */
const seenBy = ({ when, clear, only_while, for: hold, clear_for, after, on }) => [when, clear, only_while, hold, clear_for, after, on];

async function newestRun(project, signal) {
  const { runs } = await get("runs", { limit: 20, order: "-updated", project }, signal);
  return runs.find((run) => run.last_step !== null)?.run_id ?? null;
}

/** Whether it would have fired, and when. */
function sentenceOf({ spans, num_spans, comparisons, num_samples, not_measured }) {
  if (num_samples === 0) return "This attempt has no frames.";
  const fired = spans.filter(({ firing_step }) => firing_step !== null);
  if (fired.length === 1) {
    const [{ firing_step, end_step }] = fired;
    return `Would have fired at step ${count(firing_step)}${end_step === null ? ", to the end of the run." : `, resolved at ${count(end_step)}.`}`;
  }
  if (fired.length > 1) {
    const at = fired.slice(0, MOST_STEPS).map(({ firing_step }) => count(firing_step));
    const isMore = fired.length > MOST_STEPS || num_spans > spans.length;
    const last = fired.at(-1).end_step === null && num_spans === spans.length ? " The last one lasts to the end of the run." : "";
    const steps = isMore ? `${at.join(", ")}, …` : `${at.slice(0, -1).join(", ")} and ${at.at(-1)}.`;
    return `Would have fired ${num_spans > spans.length ? "at least " : ""}${count(fired.length)} times, at steps ${steps}${last}`;
  }
  if (comparisons.length && comparisons.every(({ num_known }) => num_known === 0)) {
    return `Would never have fired: ${not_measured.length ? "the run has nothing that the rule reads" : "its condition was never known"}.`;
  }
  if (num_spans > 0) return `Would never have fired: the condition was met ${num_spans === 1 ? "once" : `${count(num_spans)} times`}, but not for long enough.`;
  return `Would never have fired.${comparisons.length === 1 ? nearestOf(comparisons[0]) : ""}`;
}

/** How close it came, in words: the value, its bounds, and where. */
function nearestOf({ nearest }) {
  const bounds = Object.values(nearest?.bounds ?? {}).map(number);
  if (nearest === null || nearest.seen === null || !bounds.length) return "";
  return ` Nearest: ${number(nearest.seen)} against ${bounds.join(" and ")} at step ${count(nearest.step)}${nearest.layer === null ? "" : ` (layer ${nearest.layer})`}.`;
}

/** What the run lacks, and what of it was lost. */
function detailsOf({ not_measured, comparisons }, { metrics }, problems) {
  const has = [...metrics.scalars, ...Object.keys(metrics.layers), ...Object.keys(metrics.heads)];
  const meant = new Set(not_measured.map((name) => nearestName(name, has)).filter((name) => name !== null));
  const lacks = not_measured.length ? [`The run has no ${not_measured.join(", ")}${meant.size ? `; did you mean ${[...meant].join(", ")}?` : "."}`] : [];
  return [...lacks, ...new Set(comparisons.flatMap(({ text }) => outsideOf(text, metrics.layers))), ...problems];
}

/** The layers that a condition names and the run does not have. */
function outsideOf(text, layers) {
  return [...text.matchAll(/([\w/.-]+) \(index (-?\d+) of layers\)/g)].flatMap(([, name, place]) => {
    const num = own(layers, name);
    const isThere = num === undefined || (Number(place) < num && Number(place) >= -num);
    return isThere ? [] : [`In this run ${name} has the layers 0 to ${num - 1}, and none is ${place}.`];
  });
}
