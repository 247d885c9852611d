// One run: who it is, what the rules say, its loss and its layers over the steps, and one step, one layer, one cell of them.

import { keepAddress } from "../base/address.js";
import { get, getCatalogue, metricOf, noneIfGone, own, runPath } from "../base/api.js";
import { gradientOf, scaleOf } from "../base/colour.js";
import { h, keyed } from "../base/dom.js";
import { count, number, refreshAges } from "../base/format.js";
import { healthyRange, healthyWords } from "../base/healthy.js";
import { FIRST_CHOICE, isPlotted } from "../base/series.js";
import { WEIGHTS, isOfAttention, smoothingWords } from "../base/smoothing.js";
import { blockOf, layerLabel, layerOfBlock, layerTitle } from "../base/stacks.js";
import { loadCharts, nearestIndex } from "../charts/chart.js";
import { downloads } from "../charts/download.js";
import { Heads } from "../charts/heads.js";
import { Profile } from "../charts/profile.js";
import { Timeline } from "../charts/timeline.js";
import { Alerts, shownState, stepOf } from "../parts/alert_cards.js";
import { metricIn } from "../parts/evidence.js";
import { Incidents, worstFirst } from "../parts/incident_cards.js";
import { RunHeader, takenBackFrom } from "../parts/run_header.js";

const BUSY_MS = 2000;
const IDLE_MS = 10_000;
const ZOOM_SETTLES_MS = 250;
const COLUMNS = 256;
const POINTS = 1000;
const MARGIN_RATIO = 0.05;
const NORMS = new Map([["total_param_norm", "parameters"], ["total_grad_norm", "gradient"]]);
const NORMS_CHOICE = "";
const MOST_TAILS = 3;
const MOST_ALERTS = 100;
const MAX_DETAILED = 20;
const OPEN = ["firing", "acknowledged", "pending"];
const PAGE_COLUMNS = 10;

let catalogue = null;

export class RunView {
  #asked = new Map();
  #data = null;
  #zoomTimer = null;
  #lackedAttempt = null;
  #isMetricChosen = false;
  #causes = new Map(); // alerts of causes that are not among the newest, by id
  #details = new Map();

  keys = [
    ["← →", "in the charts: the step before, the step after"],
    ["↑ ↓", "in the charts: the layer above, the layer below"],
    ["PgUp PgDn", "in the charts: ten columns before, ten after"],
    ["Home End", "in the charts: the first step, the latest"],
    ["+ −", "in the charts: look closer, look from farther away"],
    ["Esc", "in the charts: let go of step and layer"],
  ];

  constructor(main, runId, query) {
    this.main = main;
    this.runId = runId;
    this.watched = [runId];
    this.moved(query);
  }

  /** Show what an address says. */
  moved(query) {
    const numberIn = (name) => (/^\d+$/.test(query.get(name) ?? "") && Number.isSafeInteger(Number(query.get(name))) ? Number(query.get(name)) : null);
    this.#lackedAttempt = null;
    this.metric = query.get("metric");
    this.#isMetricChosen = Boolean(this.metric);
    this.step = numberIn("step");
    this.layer = numberIn("layer");
    this.block = numberIn("block"); // a layer in the words of an incident
    this.incident = query.get("incident"); // the cell in which it began, until another one is chosen
    this.head = numberIn("head");
    this.attempt = numberIn("attempt");
    this.curve = query.get("curve") ?? NORMS_CHOICE;
    this.shows = query.get("of") === "farthest" ? "farthest" : "mean";
    this.fit = query.get("fit") === "1";
    this.log = query.has("log") ? query.get("log") === "1" : null;
    clearTimeout(this.#zoomTimer);
    const [from, to] = [numberIn("from"), numberIn("to")];
    this.zoom = from !== null && to !== null && from < to ? { from, to } : null;
  }

  destroy() {
    clearTimeout(this.#zoomTimer);
    for (const chart of this.#charts()) chart.end();
    document.title = "tsemon";
  }

  redraw() {
    for (const chart of this.#charts()) chart.redraw();
  }

  #charts() {
    return [this.timeline, this.profile, this.headsChart].filter(Boolean);
  }

  /** Told of a change (base/live.js); true asks for a round. */
  onEvent() {
    return true;
  }

  async refresh(signal) {
    const path = runPath(this.runId);
    const [run, metrics, { incidents }, alerts] = await Promise.all([get(path, {}, signal), catalogue ?? getCatalogue(signal), get(`${path}/incidents`, {}, signal), this.#alerts(signal)]);
    catalogue = metrics;
    const [causes, details] = await Promise.all([this.#causesOf(incidents, alerts.alerts, signal), this.#detailsOf([...new Set([...this.#currentOf(incidents, run), ...incidents.filter((one) => this.attempt === null || one.attempt === this.attempt).slice(0, MAX_DETAILED)])], run.num_frames, signal)]);
    const layered = Object.keys(run.metrics.layers).sort();
    this.#complete(run, layered, incidents, causes);
    const [data] = await Promise.all([this.#collect(run, signal, alerts), loadCharts()]);
    signal.throwIfAborted();
    this.#data = { ...data, incidents, causes, details };
    if (!this.root?.isConnected) this.#build();
    this.run = run;
    document.title = `${run.run} · tsemon`;
    this.header.show(run, this.attempt);
    this.#showChoices(layered);
    this.#draw();
    this.#showIncidents();
    this.alerts.show(this.#data.alerts, run.num_frames > 0);
    this.olderAlerts.hidden = !this.#data.hasOlder;
    this.#setBusy(false);
    refreshAges(this.root);
    return run.state === "running" ? BUSY_MS : IDLE_MS;
  }

  // -- what is shown

  /** Fill in what the address leaves open, or asks for where there is none. */
  #complete(run, layered, incidents, causes) {
    if (this.attempt !== null && !run.attempts.some(({ attempt }) => attempt === this.attempt)) {
      this.#lackedAttempt = this.attempt;
      this.attempt = null;
    }
    const linked = incidents.find(({ incident_id }) => incident_id === this.incident);
    this.incident = null;
    if (linked) {
      const { metric, layer, step } = this.#cellOf(linked, run, causes);
      Object.assign(this, { metric, layer, step, attempt: attemptAt(step, linked, run) });
      this.#isMetricChosen = metric !== null;
    }
    // A number of the run as a whole is a curve, and has no layers.
    if (run.metrics.scalars.includes(this.metric) && !layered.includes(this.metric)) {
      if (this.metric !== "loss") this.curve = this.metric;
      this.metric = null;
    }
    if (this.block !== null && own(run.metrics.layers, this.metric)) this.layer ??= layerOfBlock(this.block, run, run.metrics.layers[this.metric]);
    this.block = null;
    if (this.#isMetricChosen && this.metric !== null) return;
    const incident = this.#currentOf(incidents, run)[0];
    const deciding = incident && metricIn(causes.get(incident.cause_id)?.evidence, run.metrics.layers);
    // The metric nearest to a threshold changes as the run goes on: the first one stays.
    const suggested = run.default_metric === FIRST_CHOICE || !layered.includes(this.metric) ? run.default_metric : this.metric;
    this.metric = deciding ?? suggested;
  }

  /** The incidents at the top: the open ones, of earlier attempts that are live, too, the worst first; else the latest of the attempt that is shown. */
  #currentOf(incidents, run) {
    const open = incidents.filter((one) => one.state === "open" && (this.attempt ?? one.attempt) === one.attempt);
    return open.length ? worstFirst(open) : incidents.filter((one) => one.attempt === (this.attempt ?? run.attempt)).slice(0, 1);
  }

  /** The alerts of the causes by their ids; those that are over may not be among the newest alerts. */
  async #causesOf(incidents, alerts, signal) {
    const known = new Map(alerts.map((alert) => [alert.alert_id, alert]));
    const lacking = [...new Set(incidents.map(({ cause_id }) => cause_id))].filter((id) => !known.has(id) && !this.#causes.has(id));
    const found = await Promise.all(lacking.map((id) => get(`alerts/${encodeURIComponent(id)}`, {}, signal).catch(noneIfGone)));
    lacking.forEach((id, i) => this.#causes.set(id, found[i]));
    return new Map([...this.#causes, ...known].filter(([, alert]) => alert !== null));
  }

  /** The details {within, sequences} by the ids of their incidents; asked for again if an incident has changed, or if new samples may tell its sub-step. */
  async #detailsOf(incidents, numFrames, signal) {
    const stampOf = ({ updated_at, is_settled }, details) => `${updated_at} ${is_settled} ${is_settled || details?.within.sub_step ? "" : numFrames}`;
    const isKnown = (one) => {
      const known = this.#details.get(one.incident_id);
      return known !== undefined && known.stamp === stampOf(one, known.details);
    };
    const lacking = incidents.filter((one) => !isKnown(one));
    const found = await Promise.all(lacking.map(({ incident_id }) => get(`incidents/${encodeURIComponent(incident_id)}`, {}, signal).catch(noneIfGone)));
    lacking.forEach((one, i) => this.#details.set(one.incident_id, { stamp: stampOf(one, found[i]), details: found[i] }));
    return new Map(incidents.map(({ incident_id }) => [incident_id, this.#details.get(incident_id).details]));
  }

  /** Where the rule of an incident's cause found it, as {metric, layer, step}; the first step of the cause, without a layer, if the rule reads none. */
  #cellOf(incident, run = this.run, causes = this.#data.causes) {
    const evidence = causes.get(incident.cause_id)?.evidence;
    const metric = metricIn(evidence, run.metrics.layers);
    const layer = metric === null || incident.blocks === null ? null : layerOfBlock(incident.blocks[0], run, run.metrics.layers[metric]);
    return { metric, layer, step: (layer === null ? null : evidence?.step) ?? incident.left_step };
  }

  /** All that the charts need. What was asked before is asked again only where the run has gone on. */
  async #collect(run, signal, { alerts, hasOlder }) {
    const stamp = JSON.stringify([run.num_frames, run.attempt, run.state]);
    const wanted = new Set();
    const ask = (path, query) => {
      const key = JSON.stringify([path, query]);
      wanted.add(key);
      const known = this.#asked.get(key);
      if (known?.stamp === stamp) return known.answer;
      const entry = { stamp, answer: get(path, query, signal) };
      this.#asked.set(key, entry);
      entry.answer.catch(() => this.#asked.get(key) === entry && this.#asked.delete(key));
      return entry.answer;
    };
    const path = runPath(this.runId);
    const { attempt } = this;
    const series = (metric, more) => ask(`${path}/series`, { metric, points: POINTS, attempt, ...this.#range(), ...more });
    const { scalars, layers, heads } = run.metrics;
    const numLayers = own(layers, this.metric) ?? 0;
    const hasMap = numLayers > 0;
    const layer = this.layer !== null && this.layer < numLayers ? this.layer : null;
    const [depth, width] = own(heads, this.metric) ?? [0, 0];
    const numHeads = layer !== null && layer < depth ? width : 0;
    const head = this.head !== null && this.head < numHeads ? this.head : null;
    const curves = this.#curvesOf(scalars);
    const heatMap = (metric) => ask(`${path}/heatmap`, { metric, columns: COLUMNS, extremes: true, attempt, ...this.#range() });
    const [loss, curveSeries, map, weights, history, frame, tails, ends] = await Promise.all([
      scalars.includes("loss") ? series("loss") : null,
      Promise.all(curves.map((name) => series(name))),
      hasMap ? heatMap(this.metric) : null,
      isOfAttention(this.metric) && own(layers, WEIGHTS) ? heatMap(WEIGHTS) : null,
      layer === null ? null : series(this.metric, { layer, head }),
      numHeads ? ask(`${path}/frame`, { step: this.step, attempt }).catch(noneIfGone) : null,
      this.#tails(run, series),
      this.#ends(run, ask),
    ]);
    for (const key of this.#asked.keys()) if (!wanted.has(key)) this.#asked.delete(key);
    const drawn = [loss, ...curveSeries, map, ...tails.map((tail) => tail.series)].filter((one) => one?.step.length);
    const firsts = [...ends, ...drawn.map(({ step }) => step[0])];
    const lasts = [...ends, ...drawn.map(({ step }) => step.at(-1)), this.attempt === null ? (run.last_step ?? 0) : 0];
    return {
      alerts: alerts.map((alert) => ({ ...alert, state: shownState(alert, run.attempt) })),
      hasOlder,
      loss,
      curves: curves.map((name, i) => ({ name, key: curves.length > 1 ? NORMS.get(name) : null, series: curveSeries[i] })),
      map,
      weights,
      history: history && { layer, head, series: history },
      hasHeads: numHeads > 0,
      frame: frame && { step: frame.step, values: own(frame.heads, this.metric)?.[layer] ?? null },
      tails,
      extent: firsts.length ? [Math.min(...firsts), Math.max(...lasts)] : [0, 0],
    };
  }

  /**
   * The newest, and all that are open, however old. They are asked for in each round: that somebody has seen to one shows
   * nowhere else.
   */
  async #alerts(signal) {
    const query = { run: this.runId, limit: MOST_ALERTS };
    const { alerts, next_cursor: next } = await get("alerts", query, signal);
    if (next === null) return { alerts, hasOlder: false };
    const { alerts: open } = await get("alerts", { ...query, state: OPEN }, signal);
    const known = new Set(alerts.map((alert) => alert.alert_id));
    return { alerts: [...alerts, ...open.filter((alert) => !known.has(alert.alert_id))], hasOlder: true };
  }

  #range() {
    if (!this.zoom) return {};
    const margin = (this.zoom.to - this.zoom.from) * MARGIN_RATIO;
    return { from_step: Math.max(0, Math.floor(this.zoom.from - margin)), to_step: Math.min(Math.ceil(this.zoom.to + margin), Number.MAX_SAFE_INTEGER) };
  }

  #curvesOf(scalars) {
    if (scalars.includes(this.curve)) return [this.curve];
    const norms = normsIn(scalars);
    return norms.length ? norms : othersIn(scalars).slice(0, 1);
  }

  /** The loss that later attempts took back. */
  async #tails(run, series) {
    if (this.attempt !== null || !run.metrics.scalars.includes("loss")) return [];
    const hidden = run.attempts.filter(({ attempt }) => takenBackFrom(run, attempt) < Infinity).slice(-MOST_TAILS);
    const found = await Promise.all(
      hidden.map(async ({ attempt }) => {
        const from = Math.max(takenBackFrom(run, attempt), this.#range().from_step ?? 0);
        const to = this.#range().to_step ?? null;
        if (to !== null && to < from) return null;
        return { attempt, series: await series("loss", { attempt, from_step: from, to_step: to }) };
      }),
    );
    return found.filter((tail) => tail?.series.step.length);
  }

  /** Where all of it begins and ends, which a part of it does not tell. */
  async #ends(run, ask) {
    const [metric] = run.metrics.scalars;
    if (!this.zoom || !metric) return this.zoom ? [0] : [];
    const { step } = await ask(`${runPath(this.runId)}/series`, { metric, points: 3, attempt: this.attempt });
    return step;
  }

  // -- the page

  #build() {
    this.header = new RunHeader({ onAttempt: (attempt) => this.#choose({ attempt, zoom: null, step: null }) });
    this.picker = h("select", { id: "metric", onchange: () => this.#choose({ metric: this.picker.value, head: null, log: null }) });
    this.fitBox = h("input", { type: "checkbox", onchange: () => this.#choose({ fit: this.fitBox.checked }) });
    this.logBox = h("input", { type: "checkbox", onchange: () => this.#choose({ log: this.logBox.checked }) });
    this.logLabel = h("label", { class: "check" }, this.logBox, "logarithmic");
    this.showsPicker = h("select", { id: "shows", onchange: () => this.#choose({ shows: this.showsPicker.value }) }, h("option", { value: "mean" }, "their mean"), h("option", { value: "farthest" }, "what is farthest from it"));
    this.showsLabel = h("span", { class: "pair" }, h("label", { for: "shows" }, "many steps show"), this.showsPicker);
    this.curvePicker = h("select", { "aria-label": "Curve shown", onchange: () => this.#choose({ curve: this.curvePicker.value }) });
    this.layerPicker = h("select", { id: "layer", onchange: () => this.#choose({ layer: this.layerPicker.value === "" ? null : Number(this.layerPicker.value), head: null }) });
    this.headPicker = h("select", { "aria-label": "Head", onchange: () => this.#choose({ head: this.headPicker.value === "" ? null : Number(this.headPicker.value) }) });
    this.closer = h("button", { type: "button", title: "Look closer at the chosen step", onclick: () => this.#zoomBy(0.5) }, "Zoom in");
    this.farther = h("button", { type: "button", onclick: () => this.#zoomBy(2) }, "Zoom out");
    this.unzoom = h("button", { type: "button", hidden: true, onclick: () => this.timeline.resetZoom() }, "All steps");
    this.meaning = h("p", { class: "quiet meaning" });
    this.legend = h("div", { class: "legend" });
    this.viewTools = h("div", { class: "tools below" }, this.legend, h("span", { class: "buttons" }, this.closer, this.farther, this.unzoom));
    this.note = h("p", { class: "note", hidden: true });
    this.chartBox = h("div", { class: "chart timeline", role: "application", tabindex: "0", "aria-label": "Loss and layers by step", "aria-describedby": "readout", onkeydown: (event) => this.#onKey(event) });
    this.readout = h("p", { id: "readout", class: "readout quiet", role: "status" });
    this.profileBox = h("div", { class: "chart profile", role: "img", "aria-label": "Value by layer at the chosen step" });
    this.profileTitle = h("h2", {});
    this.profileNote = h("p", { class: "quiet meaning", hidden: true });
    this.slider = h("input", { type: "range", min: "0", step: "1", "aria-label": "Step of the layer profile", oninput: () => this.#pick({ step: this.#data.map.step[Number(this.slider.value)] }) });
    this.follow = h("button", { type: "button", onclick: () => this.#pick({ step: null }) }, "Latest");
    this.headsBox = h("div", { class: "chart profile", role: "img", "aria-label": "Value by head at the chosen step and layer" });
    this.headsTitle = h("h2", {});
    this.headsNote = h("p", { class: "note", hidden: true });
    this.incidents = new Incidents({ onShow: (incident) => this.#showIncident(incident), onAlert: (alertId) => this.#goToCard(alertId) });
    this.alerts = new Alerts({ onShow: (alert) => this.#showAlert(alert), onChange: () => this.reload() });
    this.olderAlerts = h("p", { class: "card quiet", hidden: true }, `Here are the newest ${MOST_ALERTS} alerts and all that are open. There are older ones: `, h("a", { href: `#/alerts?state=all&run=${encodeURIComponent(this.runId)}` }, "All alerts of this run"));
    this.alerts.element.append(this.olderAlerts);
    this.mapTools = h(
      "div",
      { class: "tools" },
      h("span", { class: "pair" }, h("label", { for: "metric" }, "metric"), this.picker),
      h("span", { class: "pair" }, h("label", { for: "layer" }, "layer"), this.layerPicker),
      h("label", { class: "check" }, this.fitBox, "fit colours to the data"),
      this.logLabel,
      this.showsLabel,
    );
    this.profileCard = h("section", { class: "card" }, h("div", { class: "tools" }, this.profileTitle, this.slider, this.follow, downloads("Layer profile", () => this.#profileShown())), this.profileNote, this.profileBox);
    this.headsCard = h("section", { class: "card" }, h("div", { class: "tools" }, this.headsTitle, downloads("Heads", () => this.#headsShown())), this.headsNote, this.headsBox);
    this.chartCard = h("section", { class: "card" }, this.mapTools, this.meaning, this.viewTools, this.note, this.chartBox, this.readout);
    this.root = h("div", { class: "stack" }, this.header.element, this.incidents.element, h("div", { class: "stack charts" }, this.chartCard, this.profileCard, this.headsCard), this.alerts.element);
    this.main.replaceChildren(this.root);
    for (const chart of this.#charts()) chart.end();
    this.timeline = new Timeline(this.chartBox, {
      tools: { curves: this.curvePicker, history: this.headPicker },
      onPick: (at) => this.#pick(at),
      onZoom: (zoom) => this.#zoomTo(zoom),
      onAlert: (alert) => this.#goToCard(alert.alert_id),
    });
    this.profile = new Profile(this.profileBox, { onPick: (layer) => this.#pick({ layer }) });
    this.headsChart = new Heads(this.headsBox, { onPick: (head) => this.#choose({ head: head === this.head ? null : head }) });
  }

  #showIncidents() {
    const { run } = this;
    const { incidents, causes, details } = this.#data;
    const current = this.#currentOf(incidents, run);
    const isOfAttempt = (one) => this.attempt === null || one.attempt === this.attempt;
    this.incidents.show({ current, earlier: incidents.filter((one) => isOfAttempt(one) && !current.includes(one)), alerts: causes, details, attempt: run.attempt, isMapped: (incident) => this.#cellOf(incident).layer !== null });
  }

  #showChoices(layered) {
    const names = this.metric && !layered.includes(this.metric) ? [this.metric, ...layered] : layered;
    offer(this.picker, names.map((name) => [name, name]), this.metric ?? "");
    const { scalars } = this.run.metrics;
    const norms = normsIn(scalars).length ? [[NORMS_CHOICE, "norms"]] : [];
    const curve = !scalars.includes(this.curve) && norms.length ? NORMS_CHOICE : this.#curvesOf(scalars)[0];
    offer(this.curvePicker, [...norms, ...othersIn(scalars).map((name) => [name, name])], curve);
    const layers = Array.from({ length: own(this.run.metrics.layers, this.metric) ?? 0 }, (_, layer) => [String(layer), this.#layerTitle(layer)]);
    offer(this.layerPicker, [["", "none chosen"], ...layers], String(this.layer ?? ""));
    const numHeads = own(this.run.metrics.heads, this.metric)?.[1] ?? 0;
    offer(this.headPicker, [["", "all heads"], ...Array.from({ length: numHeads }, (_, head) => [String(head), `head ${head}`])], String(this.head ?? ""));
    this.headPicker.hidden = numHeads === 0;
    this.mapTools.hidden = names.length === 0;
    this.fitBox.checked = this.fit;
    this.showsPicker.value = this.shows;
  }

  #layerTitle(layer) {
    return layerTitle(layer, this.run, own(this.run.metrics.layers, this.metric) ?? 0);
  }

  #layerLabel(layer) {
    return layerLabel(layer, this.run, own(this.run.metrics.layers, this.metric) ?? 0);
  }

  #draw() {
    const { run } = this;
    const { map, alerts, history } = this.#data;
    const name = map?.metric ?? this.metric; // another one may be on its way
    const metric = metricOf(catalogue, name, [run]);
    const scale = scaleOf(metric, (this.shows === "farthest" ? map?.farthest : map?.values)?.flat() ?? [], { fit: this.fit, log: this.log });
    this.scale = scale;
    keyed(this.note, this.#noteOf(run, map), (note) => note.text, (note) => this.#noteElement(note));
    this.note.hidden = !this.note.hasChildNodes();
    this.meaning.textContent = map && metric ? meaningOf(metric) : "";
    this.unzoom.hidden = this.zoom === null;
    this.logBox.checked = scale.log;
    this.logLabel.hidden = scale.isDiverging;
    this.showsLabel.hidden = !map?.samples.some((samples) => samples > 1);
    const column = this.#column();
    this.chartBox.hidden = this.readout.hidden = column === null && !this.#data.loss && !this.#data.curves.length;
    const step = this.step === null || column === null ? null : map.step[column];
    const shown = alerts.filter((alert) => this.#isShown(alert));
    const steps = [...this.#data.extent, ...shown.map(stepOf)]; // a time-based alert may be at a step after the last sample
    const healthy = map && healthyRange(metric, run, map.layers);
    const framed = this.#currentOf(this.#data.incidents, run).map((incident) => this.#cellOf(incident)).filter((cell) => cell.metric === name && cell.layer !== null);
    const layer = history?.layer ?? (map && this.layer !== null && this.layer < map.layers ? this.layer : null);
    if (!this.chartBox.hidden) {
      this.timeline.show({
        ...this.#data,
        run,
        metric: name,
        map: column === null ? null : map,
        scale,
        shows: this.shows,
        history: history && { title: `layer ${this.#layerTitle(history.layer)}${history.head === null ? "" : `, head ${history.head}`}`, series: history.series, healthy: healthy?.layers[history.layer] ?? null },
        alerts: shown,
        extent: [Math.min(...steps), Math.max(...steps)],
        starts: this.attempt === null ? run.attempts.filter(({ resume_step }) => resume_step).map(({ attempt, resume_step }) => ({ attempt, step: resume_step })) : [],
        step,
        layer,
        framed,
        zoom: this.zoom,
      });
    }
    this.legend.hidden = this.profileCard.hidden = column === null;
    this.viewTools.hidden = this.chartBox.hidden;
    this.#drawHeads(layer);
    if (column === null) return;
    this.#showLegend(map, healthy);
    this.profileTitle.textContent = `${name} ${this.#atStep(column)}`;
    this.slider.max = String(map.step.length - 1);
    this.slider.value = String(column);
    this.slider.setAttribute("aria-valuetext", `step ${count(map.step[column])}`);
    this.follow.hidden = this.step === null;
    this.readout.textContent = this.#readoutOf(column, layer);
    const note = healthy ? healthyWords(healthy) : smoothingWords(name, map.values[column], this.#weightsAt(map.step[column]));
    this.profileNote.hidden = note === null;
    this.profileNote.textContent = note;
    this.profile.show({ run, metric: name, log: scale.log, values: map.values[column], layer, healthy: healthy?.layers ?? null });
  }

  #drawHeads(layer) {
    const { frame, hasHeads } = this.#data;
    this.headsCard.hidden = layer === null || !hasHeads;
    if (this.headsCard.hidden) return;
    const values = frame?.values ?? null;
    this.headsBox.hidden = values === null;
    this.headsNote.hidden = values !== null;
    this.headsTitle.textContent = `heads of layer ${this.#layerLabel(layer)}${frame ? ` at step ${count(frame.step)}` : ""}`;
    this.headsNote.textContent = frame ? `That sample is without ${this.metric}, which is taken at fewer steps. Click a cell for the heads at its step.` : "No single sample of this attempt is kept near this step.";
    if (values !== null) this.headsChart.show({ metric: this.metric, values, head: this.head });
  }

  /** The column of the heat map that is shown below it: the picked one, else the last. */
  #column() {
    const { map } = this.#data;
    if (!map?.step.length) return null;
    return nearestIndex(map.step, this.step ?? this.zoom?.to ?? map.step.at(-1));
  }

  /** The weights' growth in each block, at the sample that is nearest to this step; `when` names another step. */
  #weightsAt(step) {
    const { weights } = this.#data;
    if (!weights?.step.length) return null;
    const at = nearestIndex(weights.step, step);
    return { values: weights.values[at], when: weights.step[at] === step ? "" : ` at step ${count(weights.step[at])}` };
  }

  #atStep(column) {
    const { map } = this.#data;
    const isPicked = this.step !== null;
    return `${map.samples[column] > 1 ? "around" : "at"} step ${count(map.step[column])}${isPicked ? "" : this.zoom ? " (the last shown)" : " (latest)"}`;
  }

  #readoutOf(column, layer) {
    const { map } = this.#data;
    if (layer === null) return "Click a cell for its step, layer and heads; or focus the charts and use the arrow keys.";
    return `Layer ${this.#layerTitle(layer)}, ${this.#atStep(column)}: ${this.metric} ${number(map.values[column][layer])}`;
  }

  #isShown(alert) {
    if (this.attempt !== null) return alert.attempt === this.attempt;
    return stepOf(alert) < takenBackFrom(this.run, alert.attempt);
  }

  /** What there is to say, as {text, hasWayBack}. */
  #noteOf(run, map) {
    const notes = this.#lackedAttempt === null ? [] : [{ text: `This run has no attempt ${count(this.#lackedAttempt)}. It is shown as it stands.` }];
    if (run.num_frames === 0) {
      const isOver = run.state !== "running";
      return [...notes, { text: isOver ? "This run ended without a frame: monitor.step() was never called, or the run ended before its first sample." : "Registered, and no frame has come yet. The first one shows here on its own." }];
    }
    const { loss, curves } = this.#data;
    const unseen = [{ name: "loss", series: loss }, ...curves, { name: this.metric, series: map }].filter(({ series }) => series?.step.length === 0);
    if (this.attempt !== null) notes.push({ text: this.#attemptNote(run), hasWayBack: true });
    if (Object.keys(run.metrics.layers).length === 0) notes.push({ text: "This run has sent no metric with layers, so there is no heat map." });
    else if (this.metric === null) notes.push({ text: "Choose a metric for the heat map. Raw token similarity alone says little, so it is not shown first." });
    else if (map === null) notes.push({ text: `This run does not measure ${this.metric}${own(run.not_measured, this.metric) ? `: ${run.not_measured[this.metric]}` : ". Choose one of the metrics that it does"}.` });
    else if (map.step.length && map.values.flat().every((value) => value === null)) notes.push({ text: `No value of ${this.metric} is finite in these steps.` });
    if (unseen.length) notes.push({ text: `There is no sample of ${unseen.map(({ name }) => name).join(", ")} in these steps.` });
    if (loss === null) notes.push({ text: `This run has no loss.${run.state === "running" ? " Pass it to monitor.step(loss=...)." : ""}` });
    return notes;
  }

  #attemptNote(run) {
    const end = takenBackFrom(run, this.attempt);
    const since = end === Infinity ? "" : ` What it recorded from step ${count(end)} on was taken back by a later one.`;
    return `This is attempt ${this.attempt} as it was.${since} `;
  }

  #noteElement({ text, hasWayBack = false }) {
    const wayBack = hasWayBack && h("button", { type: "button", onclick: () => this.#choose({ attempt: null }) }, "Show the run as it stands");
    return h("div", { class: "given" }, text, wayBack);
  }

  #showLegend(map, healthy) {
    const { low, high, colours, words, position } = this.scale;
    const bar = h("span", { class: "bar", "aria-hidden": "true" });
    bar.style.background = gradientOf(colours);
    const range = healthy && { low: Math.min(...healthy.layers.map((one) => one.low)), high: Math.max(...healthy.layers.map((one) => one.high)) };
    const [from, to] = range ? [position(range.low), position(range.high)].map((at) => Math.min(Math.max(at, 0), 1)) : [0, 0];
    if (from < to) {
      const mark = h("span", { class: "healthy" });
      Object.assign(mark.style, { left: `${100 * from}%`, right: `${100 * (1 - to)}%` });
      bar.append(mark);
    }
    const isHatched = map.values.some((column) => column.includes(null)) || map.nonfinite.some((column) => column.some((bad) => bad > 0));
    const hasSpikes = this.shows === "mean" && this.timeline.columnsWithSpikes().length > 0;
    const content = [number(low), bar, number(high), h("span", { class: "quiet" }, words.join(", ")), range && h("span", { class: "healthy" }, `healthy runs, ${number(range.low)} to ${number(range.high)} by depth`), isHatched && h("span", { class: "hatch" }, "not finite"), hasSpikes && h("span", { class: "spike" }, "a value far from its column's mean")];
    const text = JSON.stringify([low, high, words, range, isHatched, hasSpikes, colours[0]]);
    if (this.legend.content === text) return;
    this.legend.content = text;
    this.legend.replaceChildren(...content.filter(Boolean));
  }

  // -- what is picked

  /** Take a choice, show it at once with what is there, and ask for the rest. */
  #choose(choice) {
    Object.assign(this, choice);
    this.#remember();
    this.#showChoices(Object.keys(this.run.metrics.layers).sort());
    this.#setBusy(true);
    this.reload();
  }

  #pick({ step, layer }) {
    if (step !== undefined) this.step = step;
    if (layer !== undefined && layer !== this.layer) Object.assign(this, { layer, head: null });
    this.#remember();
    this.#showChoices(Object.keys(this.run.metrics.layers).sort());
    this.#draw();
    this.#setBusy(true);
    this.reload();
  }

  /** Whether what is shown is not yet all that was chosen. */
  #setBusy(isBusy) {
    this.chartCard.setAttribute("aria-busy", String(isBusy));
  }

  #onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.chartBox) return;
    const { map } = this.#data;
    const column = this.#column();
    if (column === null) return;
    const to = (at) => {
      const next = Math.min(Math.max(at, 0), map.step.length - 1);
      this.#pick({ step: next === map.step.length - 1 ? null : map.step[next] });
    };
    const moveLayer = (by) => this.#pick({ layer: this.layer === null ? (by > 0 ? 0 : map.layers - 1) : Math.min(Math.max(this.layer + by, 0), map.layers - 1) });
    const actions = {
      ArrowLeft: () => to(column - 1),
      ArrowRight: () => to(column + 1),
      PageUp: () => to(column - PAGE_COLUMNS),
      PageDown: () => to(column + PAGE_COLUMNS),
      Home: () => to(0),
      End: () => to(map.step.length - 1),
      ArrowUp: () => moveLayer(1),
      ArrowDown: () => moveLayer(-1),
      "+": () => this.#zoomBy(0.5),
      "=": () => this.#zoomBy(0.5),
      "-": () => this.#zoomBy(2),
      Escape: () => this.#pick({ step: null, layer: null }),
    };
    if (!Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    actions[event.key]();
  }

  #zoomBy(factor) {
    const column = this.#column();
    if (column !== null) this.timeline.zoomAround(this.#data.map.step[column], factor);
  }

  #zoomTo(zoom) {
    if (JSON.stringify(zoom) === JSON.stringify(this.zoom)) return;
    this.zoom = zoom;
    this.unzoom.hidden = zoom === null;
    this.#setBusy(true);
    clearTimeout(this.#zoomTimer);
    this.#zoomTimer = setTimeout(() => {
      this.#remember();
      this.#setBusy(true); // a round that was under way may have ended meanwhile
      this.reload();
    }, ZOOM_SETTLES_MS);
  }

  #showAlert(alert) {
    const layers = (alert.evidence?.conditions ?? []).map?.((one) => one?.layer).filter(Number.isInteger) ?? [];
    const step = stepOf(alert);
    const isInSight = this.zoom !== null && step >= this.zoom.from && step <= this.zoom.to;
    this.#choose({
      metric: metricIn(alert.evidence, this.run.metrics.layers) ?? this.metric,
      step,
      // What a later attempt took back is to be seen in its own only.
      attempt: step < takenBackFrom(this.run, alert.attempt) ? null : alert.attempt,
      zoom: isInSight ? this.zoom : null,
      layer: layers[0] ?? this.layer,
      head: null,
    });
    this.chartCard.scrollIntoView({ block: "nearest" });
  }

  /** Show the cell in which the rule found the cause; of a rule that reads no metric by layer, the step. */
  #showIncident(incident) {
    const { metric, layer, step } = this.#cellOf(incident);
    const isInSight = this.zoom !== null && step >= this.zoom.from && step <= this.zoom.to;
    this.#choose({
      metric: metric ?? this.metric,
      step,
      attempt: attemptAt(step, incident, this.run),
      zoom: isInSight ? this.zoom : null,
      layer: layer ?? this.layer,
      head: null,
    });
    this.chartBox.scrollIntoView({ block: "end" });
  }

  #goToCard(alertId) {
    const card = [...this.alerts.element.querySelectorAll("[data-key]")].find((one) => one.dataset.key === String(alertId));
    if (!card) return;
    card.closest("details")?.setAttribute("open", "");
    card.scrollIntoView({ block: "nearest" });
    card.classList.remove("called");
    void card.offsetWidth; // so that the animation begins anew
    card.classList.add("called");
  }

  /** Put the choice into the address, so that it can be shared; no entry in the history for each click. */
  #remember() {
    this.#lackedAttempt = null;
    this.#isMetricChosen = true;
    const { metric, step, layer, head, attempt, zoom } = this;
    const chosen = {
      metric, step, layer, head, attempt,
      from: zoom && Math.ceil(zoom.from),
      to: zoom && Math.floor(zoom.to),
      curve: this.curve || null,
      of: this.shows === "mean" ? null : this.shows,
      fit: this.fit ? 1 : null,
      log: this.log === null ? null : Number(this.log),
    };
    const query = new URLSearchParams(Object.entries(chosen).filter(([, value]) => value !== null && value !== undefined));
    keepAddress(`#/run/${encodeURIComponent(this.runId)}?${query}`);
  }

  // -- what can be taken away

  #profileShown() {
    const { map } = this.#data;
    const column = this.#column();
    const rows = map.values[column].map((value, layer) => [layer, blockOf(layer, this.run, map.layers), value, map.farthest[column][layer], map.nonfinite[column][layer]]);
    return { runs: [this.run.run], metric: `${this.metric} by layer`, steps: [map.step[column], map.step[column]], chart: this.profile.chart, columns: ["layer", "block", "mean", "farthest", "nonfinite"], rows };
  }

  #headsShown() {
    const { frame, history } = this.#data;
    if (!frame?.values) return null;
    return { runs: [this.run.run], metric: `${this.metric} by head of layer ${this.#layerLabel(history.layer)}`, steps: [frame.step, frame.step], chart: this.headsChart.chart, columns: ["head", this.metric], rows: frame.values.map((value, head) => [head, value]) };
  }
}

/** Fill a select with [value, text] pairs, unless it has them already: one that is open stays open. */
function offer(select, options, chosen) {
  const content = JSON.stringify(options);
  if (select.content !== content) {
    select.content = content;
    select.replaceChildren(...options.map(([value, text]) => h("option", { value }, text)));
  }
  select.value = chosen;
}

const normsIn = (scalars) => [...NORMS.keys()].filter((name) => scalars.includes(name));

/** What else than the loss can be shown below it. */
const othersIn = (scalars) => scalars.filter((name) => name !== "loss" && isPlotted(name)).sort();

/** What a metric says, in a sentence under the heat map. */
const meaningOf = ({ title, unit, equation }) => `${title}${unit === "1" ? "" : ` [${unit}]`}${equation ? `: ${equation}` : ""}`;

/** The attempt to show for a step of an incident: null for the run as a whole, unless a later attempt took the step back. */
const attemptAt = (step, incident, run) => (step < takenBackFrom(run, incident.attempt) ? null : incident.attempt);
