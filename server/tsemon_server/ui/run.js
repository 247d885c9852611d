// One run: who it is, what the rules say, its loss and its layers over the steps, and the layers at one step.

import { get, getCatalogue, runPath } from "./api.js";
import { Alerts, shownState } from "./alerts.js";
import { nearestIndex } from "./charts.js";
import { GRADIENT } from "./colour.js";
import { h } from "./dom.js";
import { count, number, refreshAges, statePill, time } from "./format.js";
import { Profile } from "./profile.js";
import { Timeline } from "./timeline.js";

const BUSY_MS = 2000;
const IDLE_MS = 10_000;
const FIRST_CHOICE = "token_similarity";
const ZOOM_SETTLES_MS = 250;

let catalogue = null;

export class RunView {
  #stamp = null;
  #data = null;
  #zoom = null;
  #picked = null;
  #zoomTimer = null;

  constructor(main, runId, query) {
    this.main = main;
    this.runId = runId;
    this.metric = query.get("metric");
    this.#picked = query.has("step") ? Number(query.get("step")) : null;
  }

  destroy() {
    clearTimeout(this.#zoomTimer);
    this.timeline?.end();
    this.profile?.end();
    document.title = "tsemon";
  }

  redraw() {
    this.timeline?.redraw();
    this.profile?.redraw();
  }

  async refresh(signal) {
    catalogue ??= await getCatalogue(signal);
    const run = await get(runPath(this.runId), {}, signal);
    const layered = Object.keys(run.metrics.layers).sort();
    if (!this.metric && layered.length) this.metric = layered.includes(FIRST_CHOICE) ? FIRST_CHOICE : layered[0];
    const stamp = JSON.stringify([run.num_frames, run.attempt, run.state, run.open_alerts, this.metric, this.#zoom]);
    if (stamp !== this.#stamp) {
      this.#data = await this.#fetch(run, signal);
      this.#stamp = stamp;
    }
    if (!this.root?.isConnected) this.#build();
    this.#showHeader(run);
    this.#showPicker(layered);
    this.#showCharts(run);
    this.alerts.show(this.#data.alerts, run.num_frames > 0);
    refreshAges(this.root);
    return run.state === "running" ? BUSY_MS : IDLE_MS;
  }

  async #fetch(run, signal) {
    const path = runPath(this.runId);
    const margin = this.#zoom ? (this.#zoom.to - this.#zoom.from) * 0.05 : 0;
    const range = this.#zoom
      ? { from_step: Math.max(0, Math.floor(this.#zoom.from - margin)), to_step: Math.ceil(this.#zoom.to + margin) }
      : {};
    const [{ alerts: stored }, loss, map] = await Promise.all([
      get("alerts", { run: this.runId, limit: 100 }, signal),
      run.metrics.scalars.includes("loss") ? get(`${path}/series`, { metric: "loss", points: 1000, ...range }, signal) : null,
      this.metric in run.metrics.layers ? get(`${path}/heatmap`, { metric: this.metric, columns: 200, ...range }, signal) : null,
    ]);
    const alerts = stored.map((alert) => ({ ...alert, state: shownState(alert, run) }));
    const first = Math.min(loss?.step[0] ?? Infinity, map?.step[0] ?? Infinity);
    const extent = this.#zoom ? [this.#data.extent[0], run.last_step] : [Number.isFinite(first) ? first : 0, run.last_step ?? 0];
    return { alerts, loss, map, extent };
  }

  #build() {
    this.header = h("section", { class: "card run" });
    this.picker = h("select", { id: "metric", onchange: () => this.#choose(this.picker.value) });
    this.fit = h("input", { type: "checkbox", id: "fit", onchange: () => this.#drawCharts() });
    this.unzoom = h("button", { type: "button", hidden: true, onclick: () => this.timeline.resetZoom() }, "All steps");
    this.meaning = h("p", { class: "quiet meaning" });
    this.legend = h("div", { class: "legend" });
    this.note = h("p", { class: "note", hidden: true });
    this.chartBox = h("div", { class: "chart", role: "img", "aria-label": "Loss and layers by step" });
    this.profileBox = h("div", { class: "chart profile", role: "img", "aria-label": "Value by layer at the chosen step" });
    this.profileTitle = h("h2", {});
    this.slider = h("input", { type: "range", id: "column", min: "0", step: "1", "aria-label": "Step of the layer profile", oninput: () => this.#pick(this.#data.map.step[Number(this.slider.value)]) });
    this.follow = h("button", { type: "button", onclick: () => this.#pick(null) }, "Latest");
    this.alerts = new Alerts({ onShow: (alert) => this.#showAlert(alert), onChange: () => this.#reloadAll() });
    this.mapTools = h("div", { class: "tools" }, h("label", { for: "metric" }, "metric"), this.picker, h("label", { class: "check" }, this.fit, "fit colours to the data"), this.unzoom, this.legend);
    this.profileCard = h("section", { class: "card" }, h("div", { class: "tools" }, this.profileTitle, this.slider, this.follow), this.profileBox);
    this.chartCard = h("section", { class: "card" }, this.mapTools, this.meaning, this.note, this.chartBox);
    this.root = h("div", { class: "stack" }, this.header, h("div", { class: "split" }, h("div", { class: "stack" }, this.chartCard, this.profileCard), this.alerts.element));
    this.main.replaceChildren(this.root);
    this.timeline?.end();
    this.profile?.end();
    this.timeline = new Timeline(this.chartBox, { onPick: (step) => this.#pick(step), onZoom: (zoom) => this.#zoomTo(zoom) });
    this.profile = new Profile(this.profileBox);
  }

  #showHeader(run) {
    document.title = `${run.run} · tsemon`;
    const loss = run.latest?.scalars.loss;
    const facts = [
      ["step", run.last_step === null ? "no frames yet" : count(run.last_step)],
      ["loss", loss === undefined ? "–" : loss === null ? h("span", { class: "bad" }, "not finite") : number(loss)],
      ["attempt", attemptOf(run)],
      ["blocks", count(run.num_blocks)],
      ["last seen", time(run.updated_at)],
    ];
    const content = JSON.stringify([run.run, run.project, run.state, run.tags, run.config, run.updated_at, run.last_step, loss, run.attempt]);
    if (this.header.content === content) return;
    this.header.content = content;
    const isOpen = this.header.querySelector("details")?.open;
    this.header.replaceChildren(
      h("div", { class: "title" }, h("h1", { class: "given" }, run.run), statePill(run.state), h("span", { class: "quiet given" }, run.project), run.tags.map((tag) => h("span", { class: "tag given" }, tag))),
      h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      Object.keys(run.config).length ? h("details", { open: Boolean(isOpen) }, h("summary", {}, "Configuration"), h("pre", { tabindex: "0" }, JSON.stringify(run.config, null, 2))) : "",
    );
  }

  #showPicker(layered) {
    const names = this.metric && !layered.includes(this.metric) ? [this.metric, ...layered] : layered;
    if (names.join() !== this.picker.names) {
      this.picker.names = names.join();
      this.picker.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    }
    this.picker.value = this.metric ?? "";
    this.mapTools.hidden = names.length === 0;
  }

  #showCharts(run) {
    this.run = run;
    this.#drawCharts();
  }

  #drawCharts() {
    const { run } = this;
    const { loss, map, alerts, extent } = this.#data;
    const metric = catalogue[this.metric] ?? null;
    const isActivation = map !== null && map.layers === run.num_blocks + 1;
    this.note.textContent = this.#noteOf(run, map);
    this.note.hidden = this.note.textContent === "";
    this.meaning.textContent = map && metric ? `${metric.title}: ${metric.equation}` : "";
    this.chartBox.hidden = run.num_frames === 0;
    this.unzoom.hidden = this.#zoom === null;
    const column = map?.step.length ? (this.#picked === null ? map.step.length - 1 : nearestIndex(map.step, this.#picked)) : null;
    if (run.num_frames > 0) {
      const picked = this.#picked === null || column === null ? null : map.step[column];
      this.timeline.show({ loss, map, metric, alerts, extent, picked, isActivation, blocks: run.blocks, zoom: this.#zoom, fit: this.fit.checked });
    }
    this.legend.hidden = this.profileCard.hidden = column === null;
    if (column === null) return;
    this.#showLegend(map);
    const at = isMean(map.step, run.num_frames, extent) ? "around" : "at";
    this.profileTitle.textContent = `${this.metric} ${at} step ${count(map.step[column])}${this.#picked === null ? " (latest)" : ""}`;
    this.slider.max = String(map.step.length - 1);
    this.slider.value = String(column);
    this.slider.setAttribute("aria-valuetext", `step ${count(map.step[column])}`);
    this.follow.hidden = this.#picked === null;
    this.profile.show({ metric: this.metric, log: this.timeline.scale.log, values: map.values[column], blocks: run.blocks, isActivation });
  }

  #noteOf(run, map) {
    if (run.num_frames === 0) return "Registered, and no frame has come yet. The first one shows here on its own.";
    if (Object.keys(run.metrics.layers).length === 0) return "This run has sent no metric with layers, so there is no heat map.";
    if (map === null) return `This run does not measure ${this.metric}. Choose one of the metrics that it does.`;
    if (map.values.flat().every((value) => value === null)) return `No value of ${this.metric} is finite in these steps.`;
    return run.metrics.scalars.includes("loss") ? "" : "This run has sent no loss; pass it to monitor.step(loss=...).";
  }

  #showLegend(map) {
    const { low, high, log } = this.timeline.scale;
    const bar = h("span", { class: "bar", "aria-hidden": "true" });
    bar.style.background = GRADIENT;
    const isHatched = map.values.some((column) => column.includes(null));
    this.legend.replaceChildren(number(low), bar, number(high), log ? h("span", { class: "quiet" }, "logarithmic") : "", isHatched ? h("span", { class: "hatch" }, "not finite") : "");
  }

  #choose(metric) {
    this.metric = metric;
    this.#remember();
    this.reload();
  }

  #pick(step) {
    this.#picked = step;
    this.#remember();
    this.#drawCharts();
  }

  #zoomTo(zoom) {
    if (JSON.stringify(zoom) === JSON.stringify(this.#zoom)) return;
    this.#zoom = zoom;
    this.unzoom.hidden = zoom === null;
    clearTimeout(this.#zoomTimer);
    this.#zoomTimer = setTimeout(() => this.reload(), ZOOM_SETTLES_MS);
  }

  #reloadAll() {
    this.#stamp = null;
    this.reload();
  }

  #showAlert(alert) {
    this.metric = metricIn(alert.evidence, this.run.metrics.layers) ?? this.metric;
    this.#picked = alert.firing_step ?? alert.pending_step;
    this.#remember();
    this.reload();
    this.chartCard.scrollIntoView({ block: "nearest" });
  }

  /** Put the choice into the address, so that it can be shared; no entry in the history for each click. */
  #remember() {
    const query = new URLSearchParams();
    if (this.metric) query.set("metric", this.metric);
    if (this.#picked !== null) query.set("step", String(this.#picked));
    history.replaceState(null, "", `#/run/${encodeURIComponent(this.runId)}?${query}`);
  }
}

/** Whether a column of the heat map stands for several frames, judged by how close together the run's frames lie. */
function isMean(steps, numFrames, [first, last]) {
  const stepsPerColumn = (steps.at(-1) - steps[0]) / Math.max(steps.length - 1, 1);
  return (stepsPerColumn * numFrames) / (last - first + 1) > 1.5;
}

/** The first of the run's metrics that the evidence names, in a value or as a key, at any depth. */
function metricIn(evidence, recorded) {
  if (typeof evidence === "string") return evidence.split(/\W+/).find((word) => Object.hasOwn(recorded, word)) ?? null;
  for (const [name, value] of Object.entries(evidence ?? {})) {
    const found = name in recorded ? name : metricIn(value, recorded);
    if (found) return found;
  }
  return null;
}

function attemptOf({ attempt, attempts }) {
  const start = attempts.find((one) => one.attempt === attempt)?.resume_step ?? null;
  return start === null ? count(attempt) : `${count(attempt)}, from step ${count(start)}`;
}
