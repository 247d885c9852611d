// Several runs by step, by token or by wall time, how far they are from one of them, and their layers side by side.

import { keepAddress } from "../base/address.js";
import { get, getCatalogue, getOrProblem, metricOf, noneIfGone, own, runPath } from "../base/api.js";
import { h, keyed, put } from "../base/dom.js";
import { count, duration, number, statePill } from "../base/format.js";
import { healthyRange, healthyWords } from "../base/healthy.js";
import { along as byX, difference, FIRST_CHOICE, isPlotted, lookOf, valueAt } from "../base/series.js";
import { layerLabel } from "../base/stacks.js";
import { loadCharts, nearestIndex } from "../charts/chart.js";
import { downloads } from "../charts/download.js";
import { Overlay } from "../charts/overlay.js";
import { Profiles } from "../charts/profiles.js";
import { fill } from "../parts/pickers.js";
import { RunSearch } from "../parts/run_search.js";

const BUSY_MS = 3000;
const IDLE_MS = 15_000;
const REREAD_MS = 30_000;
const MOST_RUNS = 20;
const POINTS = 600;
const COLUMNS = 400;
const ZOOM_SETTLES_MS = 250;
const LAST = -1;
/** A run is looked at a little beyond its ends: nobody clicks on the very last step. */
const MARGIN = 0.01;
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });

/** What runs can be laid along. */
const ALONG = {
  step: { name: "step", title: "by step", format: (x) => count(Math.round(x)) },
  tokens: { name: "tokens", title: "by token", format: (x) => compact.format(x) },
  time: { name: "time since the first frame", title: "by wall time", format: duration },
};

let catalogue = null;

export class CompareView {
  #details = new Map();
  #stale = new Set();
  #looks = new Map();
  #asked = null;
  #whole = null;
  #part = null;
  #frames = new Map();
  #zoomTimer = null;
  #model = null;

  constructor(main, query) {
    this.main = main;
    this.moved(query);
  }

  /** Read the choices from the address. */
  moved(query) {
    const number = (name) => (query.get(name) && Math.abs(Number(query.get(name))) <= Number.MAX_SAFE_INTEGER ? Number(query.get(name)) : null);
    const ids = [...new Set(query.getAll("run"))].filter(Boolean);
    this.tooMany = Math.max(0, ids.length - MOST_RUNS);
    this.ids = ids.slice(0, MOST_RUNS);
    this.metric = query.get("metric");
    this.layer = query.has("layer") && Number.isInteger(number("layer")) ? number("layer") : null;
    this.along = Object.hasOwn(ALONG, query.get("along")) ? query.get("along") : "step";
    this.baseline = query.get("baseline");
    this.picked = number(this.along === "step" ? "step" : "at");
    this.zoom = number("from") !== null && number("to") > number("from") ? { from: number("from"), to: number("to") } : null;
    this.hidden = new Set(query.getAll("hide"));
    this.log = query.has("log") ? query.get("log") === "1" : null; // null is what the catalogue says
    this.profileMetric = query.get("profile");
    this.#part = null;
    clearTimeout(this.#zoomTimer);
  }

  /** What changes, the service tells. */
  get watched() {
    return this.ids;
  }

  onEvent({ type, data }) {
    if (type !== "alert") this.#stale.add(data.run_id);
    return type !== "alert" && this.ids.includes(data.run_id);
  }

  destroy() {
    clearTimeout(this.#zoomTimer);
    this.#tearDown();
    this.search?.close();
    document.title = "tsemon";
  }

  redraw() {
    this.overlay?.redraw();
    this.profiles?.redraw();
    if (this.#model) this.#showRuns();
  }

  async refresh(signal) {
    catalogue ??= await getCatalogue(signal);
    document.title = "Compare · tsemon";
    if (this.ids.length === 0) {
      this.#showNone();
      return IDLE_MS;
    }
    await this.#fetchDetails(signal);
    this.#choose();
    await Promise.all([this.#fetchSeries(signal), loadCharts()]);
    signal.throwIfAborted();
    await this.#fetchFrames(signal);
    if (!this.root?.isConnected) this.#build();
    this.#show();
    return this.#known().some((run) => run.state === "running") ? BUSY_MS : IDLE_MS;
  }

  // What is asked of the service

  /** One that is over is read again when it changed, or after a while: it may go on, and nobody told. */
  #isDue(id) {
    const known = this.#details.get(id);
    return this.#stale.has(id) || known?.run?.state !== "finished" || Date.now() - known.readAt > REREAD_MS;
  }

  /** One that is not there is told in its row, and the others are compared all the same. */
  async #fetchDetails(signal) {
    const ask = async (id) => {
      this.#stale.delete(id); // what comes from now on may be newer than the answer
      const run = await getOrProblem(runPath(id), {}, signal).catch((error) => {
        this.#stale.add(id);
        throw error;
      });
      this.#details.set(id, run.problem ? run : { run, readAt: Date.now() });
    };
    await Promise.all(this.ids.filter((id) => this.#isDue(id)).map(ask));
    const free = [...Array(MOST_RUNS).keys()].filter((place) => ![...this.#looks].some(([id, taken]) => taken === place && this.ids.includes(id)));
    for (const id of [...this.#looks.keys()]) if (!this.ids.includes(id)) this.#looks.delete(id);
    for (const id of this.ids) if (!this.#looks.has(id)) this.#looks.set(id, free.shift());
  }

  #known() {
    return this.ids.map((id) => this.#details.get(id)?.run).filter(Boolean);
  }

  /** Fill in what the address leaves open. */
  #choose() {
    const runs = this.#known();
    const scalars = new Set(runs.flatMap((run) => run.metrics.scalars));
    const layered = new Set(runs.flatMap((run) => Object.keys(run.metrics.layers)));
    this.scalars = [...scalars].filter(isPlotted).sort();
    this.layered = [...layered].sort();
    const firstLayered = layered.has(FIRST_CHOICE) ? FIRST_CHOICE : (runs.map((run) => run.default_metric).find(Boolean) ?? null);
    if (this.metric === null) {
      this.metric = scalars.has("loss") ? "loss" : (firstLayered ?? this.scalars[0] ?? null);
      this.layer = this.metric !== null && !scalars.has(this.metric) ? LAST : null;
    } else if (this.layer === null && !scalars.has(this.metric) && layered.has(this.metric)) {
      this.layer = LAST;
    }
    const isChosen = this.profileMetric !== null && layered.has(this.profileMetric);
    this.shownProfile = isChosen ? this.profileMetric : this.layer !== null && layered.has(this.metric) ? this.metric : firstLayered;
  }

  /** As chosen; else as the catalogue says of a metric by layer. */
  get isLog() {
    return this.log ?? (this.layer !== null && Boolean(metricOf(catalogue, this.metric, this.#known())?.log_scale));
  }

  #has(run) {
    if (this.layer === null) return run.metrics.scalars.includes(this.metric);
    const layers = own(run.metrics.layers, this.metric) ?? 0;
    return this.layer < layers && this.layer >= -layers;
  }

  async #fetchSeries(signal) {
    const having = this.#known().filter((run) => this.#has(run));
    const what = { run: having.map((run) => run.run_id), metric: this.metric, layer: this.layer, along: this.along };
    const asked = JSON.stringify([what, having.map((run) => [run.num_frames, run.attempt])]);
    if (asked !== this.#asked) {
      this.#whole = having.length ? await this.#ask({ ...what, points: POINTS }, signal) : new Map();
      this.#asked = asked;
      this.#part = null;
    }
    if (this.zoom === null || having.length === 0) this.#part = null;
    else if (this.#part === null) this.#part = await this.#ask({ ...what, points: POINTS, ...this.#stepsOfZoom() }, signal);
  }

  async #ask(query, signal) {
    const { runs } = await get("compare", query, signal);
    return new Map(runs.map((run) => [run.run_id, { ...byX({ ...run, x: this.along === "step" ? run.step : (run.x ?? run.step.map(() => null)) }), damaged: run.damaged }]));
  }

  /** The steps in which some run is between the ends of the zoom, and a little more, so that lines go on to the edges. */
  #stepsOfZoom() {
    const steps = [...this.#whole.values()].flatMap(({ x, step }) => {
      if (!x.length) return [];
      const before = Math.max(0, x.findLastIndex((one) => one < this.zoom.from));
      const after = x.findIndex((one) => one > this.zoom.to);
      return [step[before], step[after < 0 ? x.length - 1 : after]];
    });
    return steps.length ? { from_step: Math.min(...steps), to_step: Math.max(...steps) } : {};
  }

  /** The layers of each run where it is looked at: of the newest frame, or of the one nearest to the place that was picked. */
  async #fetchFrames(signal) {
    const metric = this.shownProfile;
    const wanted = this.#known().filter((run) => metric !== null && own(run.metrics.layers, metric) !== undefined);
    const frames = await Promise.all(
      wanted.map(async (run) => {
        const at = this.#stepOf(run);
        const asked = JSON.stringify([metric, at, run.attempt, run.num_frames]);
        const known = this.#frames.get(run.run_id);
        if (known?.asked === asked) return known;
        return { asked, ...(typeof at === "string" ? { values: null, note: at } : await this.#profileOf(run, metric, at, signal)) };
      }),
    );
    this.#frames = new Map(wanted.map((run, i) => [run.run_id, frames[i]]));
  }

  /** The step at which a run is where was picked; null for its newest, in words why there is none. */
  #stepOf(run) {
    if (this.picked === null) return null;
    const ended = `ends at step ${count(run.last_step ?? 0)}`;
    if (this.along === "step") return this.picked <= (run.last_step ?? -1) * (1 + MARGIN) + 1 ? Math.max(0, Math.round(this.picked)) : ended;
    const series = this.#whole.get(run.run_id);
    if (!series?.x.length) return `not known ${ALONG[this.along].title}`;
    return this.picked > series.x.at(-1) * (1 + MARGIN) ? ended : series.step[nearestIndex(series.x, this.picked)];
  }

  async #profileOf(run, metric, step, signal) {
    const path = runPath(run.run_id);
    const frame = await get(`${path}/frame`, { step }, signal).catch(noneIfGone); // where retention has left only rollups
    const values = frame === null ? undefined : own(frame.layers, metric);
    if (values) return { values, note: `step ${count(frame.step)}` };
    // Some measures are taken at every tenth sample only: the nearest of those.
    const map = await get(`${path}/heatmap`, { metric, columns: COLUMNS }, signal);
    if (map.step.length === 0) return { values: null, note: "no frame has it" };
    const column = step === null ? map.step.length - 1 : nearestIndex(map.step, step);
    return { values: map.values[column], note: `around step ${count(map.step[column])}` };
  }

  // What is shown

  #showNone() {
    if (this.empty?.isConnected) return;
    this.#tearDown();
    this.search = this.#makeSearch("Find a run");
    const trouble = h("p", { class: "bad", role: "alert" });
    const latest = async () => {
      try {
        const { runs } = await get("runs", { order: "-updated", limit: 5 });
        if (runs.length === 0) trouble.textContent = "There is no run yet.";
        else this.#change(() => (this.ids = runs.map((run) => run.run_id)));
      } catch (error) {
        trouble.textContent = error.message;
      }
    };
    this.empty = h(
      "section",
      { class: "card empty" },
      h("h1", {}, "Compare runs"),
      h("p", {}, `Lay up to ${MOST_RUNS} runs over each other: any metric by step, by token or by wall time, the difference to one of them, and their layers side by side.`),
      this.search.element,
      h("div", { class: "buttons" }, h("button", { type: "button", onclick: latest }, "Compare the five latest runs")),
      trouble,
    );
    this.main.replaceChildren(this.empty);
  }

  #makeSearch(label) {
    return new RunSearch({ label, isLeftOut: (run) => this.ids.includes(run.run_id), onPick: (run) => this.#change(() => this.ids.push(run.run_id)) });
  }

  #tearDown() {
    this.overlay?.end();
    this.profiles?.end();
    this.overlay = this.profiles = this.root = null;
  }

  #build() {
    this.#tearDown();
    this.search = this.#makeSearch("Add a run");
    const select = (id, onchange) => h("select", { id, onchange });
    this.metricPicker = select("metric", () => this.#chooseMetric(this.metricPicker.value));
    this.layerPicker = select("layer", () => this.#change(() => (this.layer = Number(this.layerPicker.value))));
    this.layerBox = h("span", { class: "pair" }, h("label", { for: "layer" }, "layer"), this.layerPicker);
    this.baselinePicker = select("baseline", () => this.#change(() => (this.baseline = this.baselinePicker.value || null)));
    this.logBox = h("input", { type: "checkbox", id: "log", onchange: () => this.#change(() => (this.log = this.logBox.checked)) });
    this.alongPicker = h("fieldset", { class: "choices" }, h("legend", {}, "Along"), Object.entries(ALONG).map(([key, { title }]) =>
      h("label", {}, h("input", { type: "radio", name: "along", value: key, onchange: () => this.#lay(key) }), h("span", {}, title)),
    ));
    this.unzoom = h("button", { type: "button", onclick: () => this.overlay.resetZoom() }, "Whole range");
    this.chartTitle = h("h2");
    this.notes = h("ul", { class: "notes", role: "status" });
    this.chartBox = h("div", { class: "chart compared", role: "img" });
    this.runList = h("ul", { class: "compared-runs", "aria-label": "Runs that are compared" });
    this.runsTitle = h("h2");
    this.full = h("p", { class: "quiet" });
    this.profilePicker = select("profile", () => this.#change(() => (this.profileMetric = this.profilePicker.value)));
    this.profileTitle = h("h2");
    this.follow = h("button", { type: "button", onclick: () => this.#change(() => (this.picked = null)) }, "Latest of each");
    this.slider = h("input", { type: "range", min: "0", max: "400", step: "1", "aria-label": "Place of the layer profiles", oninput: () => this.#slide() });
    this.profileBox = h("div", { class: "chart", role: "img" });
    this.profileNote = h("p", { class: "note", hidden: true });
    this.profileCard = h(
      "section",
      { class: "card", "aria-label": "Layers side by side" },
      h("div", { class: "tools" }, this.profileTitle, h("span", { class: "pair" }, h("label", { for: "profile" }, "layers of"), this.profilePicker), downloads("Layers side by side", () => this.#profileTable())),
      h("div", { class: "tools place" }, this.slider, this.follow),
      this.profileNote,
      this.profileBox,
    );
    this.chartCard = h(
      "section",
      { class: "card", "aria-label": "Runs over each other" },
      h("div", { class: "tools choices-row" }, this.alongPicker, h("span", { class: "pair" }, h("label", { for: "metric" }, "metric"), this.metricPicker), this.layerBox, h("span", { class: "pair" }, h("label", { for: "baseline" }, "difference to"), this.baselinePicker), h("label", { class: "check" }, this.logBox, "logarithmic")),
      h("div", { class: "tools" }, this.chartTitle, this.unzoom, downloads("Comparison", () => this.#seriesTable())),
      this.notes,
      this.chartBox,
    );
    this.root = h(
      "div",
      { class: "stack" },
      h("h1", {}, "Compare"),
      h("div", { class: "split compare" }, h("div", { class: "stack" }, this.chartCard, this.profileCard), h("section", { class: "card runs-side", "aria-label": "Runs" }, this.runsTitle, this.search.element, this.full, this.runList)),
    );
    this.main.replaceChildren(this.root);
    this.overlay = new Overlay(this.chartBox, { onPick: (x) => this.#change(() => (this.picked = this.#place(x))), onZoom: (zoom) => this.#zoomTo(zoom) });
    this.profiles = new Profiles(this.profileBox);
  }

  #show() {
    const shown = this.zoom === null || this.#part === null ? this.#whole : this.#part;
    const reference = this.baseline !== null ? shown.get(this.baseline) : undefined;
    const isDifference = reference !== undefined && reference.x.length > 0;
    const drawn = (id) => (isDifference ? difference(shown.get(id), reference) : shown.get(id));
    this.#model = {
      isDifference,
      titles: titlesOf(this.#known()),
      lines: new Map([...shown.keys()].map((id) => [id, drawn(id)])),
    };
    const all = [...this.#whole.values()].filter(({ x }) => x.length);
    const first = Math.min(...all.map(({ x }) => x[0]));
    const last = Math.max(...all.map(({ x }) => x.at(-1)));
    this.extent = all.length ? (last > first ? [first, last] : [first - 0.5, first + 0.5]) : [0, 1];
    this.#showChoices();
    this.#showNotes();
    this.#showRuns();
    this.#showChart();
    this.#showProfiles();
  }

  #showChoices() {
    const metricKey = `${this.layer === null ? "scalar" : "layer"} ${this.metric}`;
    const isKnown = this.metric === null || (this.layer === null ? this.scalars.includes(this.metric) : this.layered.includes(this.metric));
    const group = (label, kind, names) => ({ label, options: names.map((name) => [`${kind} ${name}`, name]) });
    fill(this.metricPicker, metricKey, [...(isKnown ? [] : [[metricKey, this.metric]]), group("of the run", "scalar", this.scalars), group("of a layer", "layer", this.layered)].filter((one) => Array.isArray(one) || one.options.length));
    const runs = this.#known();
    const most = Math.max(0, ...runs.map((run) => own(run.metrics.layers, this.metric) ?? 0));
    const layers = [[String(LAST), "last of each"], ...[...Array(most).keys()].map((layer) => [String(layer), this.#layerLabel(layer)])];
    this.layerBox.hidden = this.layer === null;
    fill(this.layerPicker, String(this.layer), [...layers, ...(layers.some(([value]) => value === String(this.layer)) ? [] : [[String(this.layer), String(this.layer)]])]);
    const isThere = this.baseline === null || runs.some((run) => run.run_id === this.baseline);
    fill(this.baselinePicker, this.baseline ?? "", [["", "none"], ...runs.map((run) => [run.run_id, this.#model.titles.get(run.run_id)]), ...(isThere ? [] : [[this.baseline, `${this.baseline} (not among the runs)`]])]);
    fill(this.profilePicker, this.shownProfile, this.layered.map((name) => [name, name]));
    for (const radio of this.alongPicker.querySelectorAll("input")) radio.checked = radio.value === this.along;
    this.logBox.checked = this.isLog;
    this.unzoom.hidden = this.zoom === null;
    const { isDifference, titles } = this.#model;
    const of = isDifference ? `, difference to ${titles.get(this.baseline)}` : "";
    const text = `${this.#what()} ${ALONG[this.along].title}${of}`;
    if (this.chartTitle.textContent !== text) put(this.chartTitle, h("span", { class: "given" }, text));
  }

  #what() {
    if (this.layer === null) return this.metric ?? "Nothing";
    return this.layer === LAST ? `${this.metric} of the last layer` : `${this.metric} of layer ${this.#layerLabel(this.layer)}`;
  }

  /** The name of the layer within its stack, if all runs that have the layer agree on it, or else its number. */
  #layerLabel(layer) {
    const having = this.#known().filter((run) => (own(run.metrics.layers, this.metric) ?? 0) > layer);
    const labels = new Set(having.map((run) => layerLabel(layer, run, run.metrics.layers[this.metric])));
    return labels.size === 1 ? [...labels][0] : String(layer);
  }

  #showNotes() {
    const { titles, isDifference, lines } = this.#model;
    const name = (run) => h("b", { class: "given" }, titles.get(run.run_id));
    const names = (runs) => runs.flatMap((run, i) => [i ? ", " : "", name(run)]);
    const notes = [];
    const runs = this.#known();
    const lacking = runs.filter((run) => !this.#has(run) && run.num_frames > 0);
    const waiting = runs.filter((run) => run.num_frames === 0);
    const without = runs.filter((run) => this.#has(run) && !this.#whole.get(run.run_id)?.x.length && run.num_frames > 0);
    if (this.tooMany) notes.push([`${MOST_RUNS} runs are compared at most; ${count(this.tooMany)} more of the address are left out.`]);
    if (waiting.length) notes.push([...names(waiting), waiting.length === 1 ? " has sent no frame." : " have sent no frame."]);
    if (lacking.length) notes.push([...names(lacking), lacking.length === 1 ? " has" : " have", ` not recorded ${this.#what()}, so there is no line of ${lacking.length === 1 ? "it" : "them"}.`]);
    if (without.length && this.along === "tokens") notes.push([...names(without), without.length === 1 ? " has" : " have", " no scalar tokens, and cannot be drawn by token. Pass tokens= (all tokens so far) or step_tokens= (the tokens of one step) to monitor.step(), or compare by step."]);
    else if (without.length) notes.push([...names(without), without.length === 1 ? " has" : " have", " no value in these steps."]);
    if (this.baseline !== null && !isDifference) notes.push(["There is no difference to show: the baseline has no line here."]);
    if (isDifference) notes.push(["What is drawn is how far each mean lies above the baseline's, on the line between its two nearest points, where both have one."]);
    const broken = runs.filter((run) => this.#whole.get(run.run_id)?.nonfinite.some((num) => num > 0));
    if (broken.length) notes.push(["Not finite in places, which leaves gaps: ", ...names(broken), "."]);
    const damaged = runs.filter((run) => this.#whole.get(run.run_id)?.damaged);
    if (damaged.length) notes.push(["Samples that are damaged are left out of ", ...names(damaged), "."]);
    const healthy = this.#healthy();
    if (healthy) notes.push([healthyWords(healthy)]);
    if (this.isLog && [...lines.values()].some(({ mean }) => mean.some((value) => value !== null && value <= 0))) notes.push(["Values that are not above zero have no place on a logarithmic axis."]);
    this.notes.replaceChildren(...notes.map((note) => h("li", {}, note)));
    this.notes.hidden = notes.length === 0;
  }

  #showRuns() {
    const { titles, lines, isDifference } = this.#model;
    this.runsTitle.textContent = numRuns(this.ids.length);
    this.search.element.hidden = this.ids.length >= MOST_RUNS;
    this.full.textContent = this.ids.length >= MOST_RUNS ? `More than ${MOST_RUNS} cannot be told apart: remove one to add another.` : "";
    this.full.hidden = this.full.textContent === "";
    const items = this.ids.map((id) => {
      const { run = null, problem = null } = this.#details.get(id) ?? {};
      const series = this.#whole.get(id);
      const look = lookOf(this.#looks.get(id));
      const state = run && { name: run.run, project: run.project, state: run.state, title: titles.get(id) };
      const x = this.picked ?? series?.x.at(-1) ?? null;
      const value = !series?.x.length || x === null || x > series.x.at(-1) * (1 + MARGIN) ? undefined : series.mean[nearestIndex(series.x, x)];
      const line = lines.get(id);
      // Where no place is picked, the last at which both have a value: the baseline may have ended earlier.
      const apart = !isDifference || id === this.baseline || !line?.x.length ? null : this.picked === null ? (line.mean.findLast((one) => one !== null) ?? null) : valueAt(line, Math.min(x, line.x.at(-1)));
      return { id, look, state, problem, value: value === undefined ? null : number(value), apart: apart === null ? null : `${apart > 0 ? "+" : ""}${number(apart)}`, isBaseline: id === this.baseline, isHidden: this.hidden.has(id) };
    });
    // What changes from round to round is put into a row; who it is makes the row, so that its buttons stay where they are.
    keyed(this.runList, items.map(({ id, look, state, problem }) => ({ id, look, state, problem })), ({ id }) => id, (item) => this.#row(item));
    items.forEach((item, i) => this.runList.children[i].show(item));
  }

  #row({ id, look, state, problem }) {
    const swatch = h("span", { class: `line ${look.dash}`, "aria-hidden": "true" });
    swatch.style.borderColor = look.colour;
    const called = state?.name ?? id;
    const act = (label, text, change) => h("button", { type: "button", "aria-label": `${label} ${called}`, onclick: () => this.#change(change) }, text);
    const remove = () => {
      this.ids = this.ids.filter((one) => one !== id);
      this.hidden.delete(id);
      if (this.baseline === id) this.baseline = null;
    };
    const query = new URLSearchParams([...(this.layer === null ? [] : [["metric", this.metric]])]);
    const baseline = act("Baseline:", "baseline", () => (this.baseline = this.baseline === id ? null : id));
    const hide = act("Hide", "hide", () => (this.hidden.delete(id) ? null : this.hidden.add(id)));
    const worth = h("b");
    const apartBox = h("div", { class: "quiet" });
    const row = h(
      "li",
      {},
      swatch,
      h(
        "div",
        { class: "who" },
        state ? h("a", { class: "given", href: `#/run/${encodeURIComponent(id)}${query.size ? `?${query}` : ""}` }, state.name) : h("b", { class: "given" }, id),
        h("div", { class: "quiet" }, state ? [h("span", { class: "given", title: state.project }, state.project), statePill(state.state)] : h("span", { class: "bad" }, problem)),
      ),
      h("div", { class: "worth" }, worth, apartBox),
      h("div", { class: "buttons" }, state ? [baseline, hide] : null, act("Remove", "remove", remove)),
    );
    row.show = ({ value, apart, isBaseline, isHidden }) => {
      put(worth, value ?? "–");
      put(apartBox, apart ?? "");
      row.classList.toggle("off", isHidden);
      baseline.setAttribute("aria-pressed", String(isBaseline));
      hide.setAttribute("aria-pressed", String(isHidden));
      put(hide, isHidden ? "hidden" : "hide");
    };
    return row;
  }

  #showChart() {
    const { titles, lines, isDifference } = this.#model;
    const shown = [...lines].filter(([id, { x }]) => !this.hidden.has(id) && x.length);
    const { name, format } = ALONG[this.along];
    this.chartBox.hidden = shown.length === 0;
    this.chartBox.setAttribute("aria-label", `${this.#what()} of ${numRuns(shown.length)} ${ALONG[this.along].title}`);
    if (shown.length === 0) return;
    this.overlay.show({
      lines: shown.map(([id, series]) => ({ id, title: titles.get(id), ...lookOf(this.#looks.get(id)), series })),
      extent: this.extent,
      zoom: this.zoom,
      picked: this.picked,
      isLog: this.isLog && !isDifference,
      isDifference,
      axisName: name,
      formatX: format,
      healthy: this.#healthy()?.layer ?? null,
    });
  }

  /** The range of healthy runs, and that of the layer, if it is the same for all runs. */
  #healthy() {
    if (this.layer === null || this.#model.isDifference) return null;
    const metric = metricOf(catalogue, this.metric, this.#known());
    const ranges = this.#known().filter((run) => this.#has(run)).map((run) => healthyRange(metric, run, own(run.metrics.layers, this.metric)));
    const [first, ...others] = ranges.map((range) => range?.layers.at(this.layer));
    return first && others.every((one) => one?.low === first.low && one.high === first.high) ? { runs: ranges[0].runs, layer: first } : null;
  }

  #showProfiles() {
    this.profileCard.hidden = this.shownProfile === null;
    if (this.shownProfile === null) return;
    const { titles } = this.#model;
    const metric = metricOf(catalogue, this.shownProfile, this.#known());
    const panels = this.#known()
      .filter((run) => this.#frames.has(run.run_id) && !this.hidden.has(run.run_id))
      .map((run) => ({ run, title: titles.get(run.run_id), ...this.#frames.get(run.run_id), ...lookOf(this.#looks.get(run.run_id)), isBaseline: run.run_id === this.baseline }))
      .map((panel) => ({ ...panel, healthy: (panel.values && healthyRange(metric, panel.run, panel.values.length)) ?? null }));
    this.panels = panels;
    const { format } = ALONG[this.along];
    this.profileTitle.textContent = `${this.shownProfile} by layer, ${this.picked === null ? "at the latest step of each run" : this.along === "step" ? `at step ${format(this.picked)}` : `at ${this.along === "time" ? format(this.picked) : `${format(this.picked)} tokens`}`}`;
    this.follow.hidden = this.picked === null;
    const [first, last] = this.extent;
    this.slider.value = String(Math.round((400 * ((this.picked ?? last) - first)) / (last - first)));
    this.slider.setAttribute("aria-valuetext", `${ALONG[this.along].name} ${format(this.picked ?? last)}`);
    const lacking = this.#known().filter((run) => !this.#frames.has(run.run_id) && !this.hidden.has(run.run_id));
    const empty = panels.filter(({ values }) => values?.every((value) => value === null));
    const names = (runs) => runs.flatMap(({ title }, i) => [i ? ", " : "", h("b", { class: "given" }, title)]);
    const healthy = panels.find((panel) => panel.healthy)?.healthy;
    const notes = [
      healthy && [healthyWords(healthy)],
      lacking.length > 0 && [...names(lacking.map((run) => ({ title: titles.get(run.run_id) }))), lacking.length === 1 ? " does not measure it." : " do not measure it."],
      empty.length > 0 && ["No value is finite there, of any layer: ", ...names(empty), "."],
    ].filter(Boolean);
    this.profileNote.hidden = notes.length === 0;
    this.profileNote.replaceChildren(...notes.map((note) => h("span", {}, note)));
    this.profileBox.hidden = panels.length === 0;
    this.profileBox.setAttribute("aria-label", `${this.shownProfile} by layer of ${numRuns(panels.length)}`);
    if (panels.length) this.profiles.show({ metric: this.shownProfile, isLog: Boolean(metric?.log_scale), panels });
  }

  // What is chosen

  /** Change a choice, put it into the address, and show it. */
  #change(change) {
    change();
    this.#remember();
    if (this.#model && this.root?.isConnected && this.ids.length) this.#showRuns();
    this.reload();
  }

  #chooseMetric(key) {
    const [kind, ...name] = key.split(" ");
    this.#change(() => {
      this.metric = name.join(" ");
      this.layer = kind === "scalar" ? null : (this.layer ?? LAST);
    });
  }

  #lay(along) {
    this.#change(() => {
      this.along = along;
      // A place on one axis is none on another.
      this.picked = this.zoom = null;
    });
  }

  #place(x) {
    return this.along === "tokens" || this.along === "step" ? Math.max(0, Math.round(x)) : Number(x.toFixed(1));
  }

  #slide() {
    const [first, last] = this.extent;
    const at = Number(this.slider.value) / 400;
    this.picked = at === 1 ? null : this.#place(first + (last - first) * at);
    this.#remember();
    clearTimeout(this.#zoomTimer);
    this.#zoomTimer = setTimeout(() => this.reload(), ZOOM_SETTLES_MS);
  }

  #zoomTo(zoom) {
    if (JSON.stringify(zoom) === JSON.stringify(this.zoom)) return;
    this.zoom = zoom === null ? null : { from: this.#place(zoom.from), to: this.#place(zoom.to) };
    this.#part = null;
    this.unzoom.hidden = zoom === null;
    this.#remember();
    clearTimeout(this.#zoomTimer);
    this.#zoomTimer = setTimeout(() => this.reload(), ZOOM_SETTLES_MS);
  }

  /** All choices go into the address, so that it can be shared; no entry in the history for each. */
  #remember() {
    const query = new URLSearchParams(this.ids.map((id) => ["run", id]));
    const set = (name, value, isGiven = value !== null) => isGiven && query.set(name, value);
    set("metric", this.metric);
    set("layer", this.layer);
    set("along", this.along, this.along !== "step");
    set("baseline", this.baseline);
    set(this.along === "step" ? "step" : "at", this.picked);
    set("from", this.zoom?.from, this.zoom !== null);
    set("to", this.zoom?.to, this.zoom !== null);
    set("log", Number(this.log), this.log !== null);
    set("profile", this.profileMetric);
    for (const id of this.hidden) if (this.ids.includes(id)) query.append("hide", id);
    keepAddress(`#/compare${query.size ? `?${query}` : ""}`);
  }

  // What is taken away

  #stepsShown() {
    const steps = [...this.#model.lines.values()].flatMap(({ step }) => (step.length ? [step[0], step.at(-1)] : []));
    return steps.length ? [Math.min(...steps), Math.max(...steps)] : [0, 0];
  }

  #seriesTable() {
    const { lines, titles } = this.#model;
    const runs = this.#known().filter((run) => lines.has(run.run_id) && !this.hidden.has(run.run_id));
    if (!runs.length) return null;
    return {
      runs: runs.map((run) => titles.get(run.run_id)),
      metric: this.chartTitle.textContent,
      steps: this.#stepsShown(),
      chart: this.overlay.chart,
      columns: ["run_id", "project", "run", "step", this.along, "min", "mean", "max", "nonfinite"],
      rows: runs.flatMap((run) => {
        const { step, x, min, mean, max, nonfinite } = lines.get(run.run_id);
        return step.map((at, i) => [run.run_id, run.project, run.run, at, x[i], min[i], mean[i], max[i], nonfinite[i]]);
      }),
    };
  }

  #profileTable() {
    const panels = (this.panels ?? []).filter(({ values }) => values);
    if (!panels.length) return null;
    return {
      runs: panels.map(({ title }) => title),
      metric: this.profileTitle.textContent,
      steps: this.#stepsShown(),
      chart: this.profiles.chart,
      columns: ["run_id", "run", "at", "layer", this.shownProfile],
      rows: panels.flatMap(({ run, title, note, values }) => values.map((value, layer) => [run.run_id, title, note, layerLabel(layer, run, values.length), value])),
    };
  }
}

/** What to call each run: its name, with the project where two of them have the same name. */
function titlesOf(runs) {
  const num = (name) => runs.filter((run) => run.run === name).length;
  return new Map(runs.map((run) => [run.run_id, num(run.run) > 1 ? `${run.project} / ${run.run}` : run.run]));
}

const numRuns = (num) => (num === 1 ? "1 run" : `${num} runs`);
