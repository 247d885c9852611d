// A run as a row of the list. The row stays the same element for as long as it is shown: only what changed is set anew.

import { h, put, svg } from "../base/dom.js";
import { count, number, time, worded } from "../base/format.js";
import { incidentTitle, placeOf } from "./incident_cards.js";

const WIDTH = 100;
const HEIGHT = 24;
const LONG_STEP = 1e10;
/** The bar of the worst layer is empty at this distance from the threshold, and full at the threshold. */
const MOST_DECADES = 2;

/** The cells after the name: the class of each, and what it is called where there is no room for headings. */
const LABELS = { condition: "condition", step: "step", loss: "loss", worst: "worst layer", age: "last seen", alerts: "incident" };

export class RunRow {
  #shown = {};

  /** `onChoose(isChosen)`, `onProject()` and `onTag(tag)` are called for what is clicked. */
  constructor(run, { onChoose, onProject, onTag }) {
    this.onTag = onTag;
    this.box = h("input", { type: "checkbox", "aria-label": `Choose ${run.run}`, onchange: () => onChoose(this.box.checked) });
    this.link = h("a", { class: "given name", href: `#/run/${encodeURIComponent(run.run_id)}`, title: run.run }, run.run);
    // By keyboard the same is done above the list, so that there are not a hundred stops on the way down.
    this.project = h("button", { type: "button", class: "plain given", tabindex: "-1", title: `Only runs of ${run.project}`, onclick: onProject }, run.project);
    this.tags = h("span", { class: "tags" });
    this.cells = Object.fromEntries(Object.entries(LABELS).map(([name, label]) => [name, h("td", { class: name, "data-label": label })]));
    this.element = h("tr", {}, h("td", { class: "pick" }, h("label", {}, this.box)), h("td", { class: "who" }, this.link, h("div", { class: "of" }, this.project, this.tags)), Object.values(this.cells));
  }

  get isChosen() {
    return this.box.checked;
  }

  set isChosen(isChosen) {
    this.box.checked = isChosen;
    this.element.classList.toggle("chosen", isChosen);
  }

  toggle() {
    this.box.click();
  }

  /** `glance` is null or undefined until it is known. `incidents` are open or lasted until the end of the run, the worst first. */
  show(run, glance, incidents) {
    const { condition, step, loss, worst, age, alerts } = this.cells;
    this.#set("tags", run.tags, () => this.tags.replaceChildren(...run.tags.map((tag) => h("button", { type: "button", class: "tag given", tabindex: "-1", title: `Only runs with the tag ${tag}`, onclick: () => this.onTag(tag) }, tag))));
    this.#set("condition", run.condition, () => put(condition, h("span", { class: `pill ${run.condition}` }, run.condition)));
    this.#set("step", run.last_step, () => put(step, run.last_step === null ? h("span", { class: "quiet" }, "no frames") : stepOf(run.last_step)));
    this.#set("loss", [run.loss, run.num_frames > 0, glance?.loss], () => put(loss, h("div", {}, h("span", { class: "value" }, lossOf(run.loss, glance?.loss)), run.num_frames > 0 && sparkline(glance?.loss))));
    this.#set("worst", glance?.worst, () => put(worst, worstOf(glance?.worst)));
    this.#set("age", run.updated_at, () => put(age, time(run.updated_at)));
    this.#set("alerts", [run.open_alerts, run.alerts_at_end, incidents], () => put(alerts, incidents.length ? incidentOf(run, incidents) : alertsOf(run)));
  }

  #set(name, value, draw) {
    const content = JSON.stringify(value) ?? "";
    if (this.#shown[name] === content) return;
    this.#shown[name] = content;
    draw();
  }
}

/** A row that is on its way, as high as one that is there. */
export const boneRow = () =>
  h("tr", { class: "bones", "aria-hidden": "true" },
    h("td", { class: "pick" }),
    h("td", { class: "who" }, h("span", { class: "bone" }), h("span", { class: "bone short" })),
    Object.entries(LABELS).map(([name, label]) => h("td", { class: name, "data-label": label }, h("span", { class: "bone" }))),
  );

/** A step that is too long for its column is written as a measured value is. */
const stepOf = (step) => (step < LONG_STEP ? count(step) : h("span", { title: count(step) }, number(step)));

function lossOf(last, series) {
  if (last !== null) return number(last);
  if (series?.mean.length && series.mean.at(-1) === null) return h("span", { class: "bad" }, "not finite");
  return h("span", { class: "quiet", title: "no finite loss in the last frame" }, "–");
}

function worstOf(worst) {
  if (!worst) return h("span", { class: "quiet" }, "–");
  const { metric, value, rule, threshold, decades } = worst;
  const layer = worst.label ?? `layer ${worst.layer}`; // with several stacks it has a label
  const distance = rule === null ? "" : `; ${number(Math.abs(decades))} decades ${decades > 0 ? "from" : "beyond"} ${number(threshold)}, the threshold of ${rule}`;
  const title = `${metric} of ${layer}: ${number(value)}${distance}`;
  const isCount = metric === "nonfinite" || metric === "nonfinite_entries"; // of what is not finite
  if (isCount || value === null) return h("div", { title }, h("span", { class: "bad" }, "not finite"), h("small", {}, layer, isCount ? "" : `, ${metric}`));
  const bar = h("span", { class: "fill" });
  bar.style.width = `${100 * Math.min(Math.max(1 - decades / MOST_DECADES, 0), 1)}%`;
  return h("div", { title }, `${number(value)} `, h("small", {}, layer), h("small", { class: "metric" }, metric), rule !== null && h("span", { class: decades > 0 ? "meter" : "meter beyond", "aria-hidden": "true" }, bar));
}

function incidentOf(run, [incident, ...others]) {
  const isOpen = incident.state === "open";
  const num = isOpen ? run.open_alerts : run.alerts_at_end;
  const alerts = `${count(num)} ${num === 1 ? "alert" : "alerts"} ${isOpen ? (num === 1 ? "is open" : "are open") : "fired at the end"}.`;
  const more = others.length ? ` and ${count(others.length)} more` : "";
  return h("a", { class: `wrong ${incident.severity}`, href: `#/run/${encodeURIComponent(run.run_id)}`, title: `${worded(incident.summary)} ${alerts}` }, h("span", { class: "what" }, incidentTitle(incident)), h("small", {}, placeOf(incident), more));
}

/** Of a run without an incident: alerts that are pending or only inform. */
function alertsOf({ run_id, open_alerts }) {
  if (!open_alerts) return h("span", { class: "quiet" }, "none");
  const href = `#/alerts?${new URLSearchParams({ run: run_id })}`;
  return h("a", { class: "quiet", href, title: "No incident: these alerts are pending, or only inform" }, `${count(open_alerts)} ${open_alerts === 1 ? "alert" : "alerts"}`);
}

/** The course of the loss; values that are not finite leave a gap, and are marked below it. */
function sparkline(series) {
  const drawing = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const finite = series?.mean.filter((value) => value !== null) ?? [];
  if (!series?.step.length) return drawing;
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  const [first, last] = [series.step[0], series.step.at(-1)];
  const x = (step) => (last > first ? ((step - first) / (last - first)) * WIDTH : WIDTH / 2).toFixed(1);
  const y = (value) => (high > low ? HEIGHT - 3 - ((value - low) / (high - low)) * (HEIGHT - 6) : HEIGHT / 2).toFixed(1);
  let pen = "M";
  const isAlone = (i) => (series.mean[i - 1] ?? null) === null && (series.mean[i + 1] ?? null) === null;
  const path = series.mean.map((value, i) => {
    const mark = value === null ? "" : `${pen}${x(series.step[i])} ${y(value)}${isAlone(i) ? "m-1.5 0h3" : ""}`; // a line needs two points
    pen = value === null ? "M" : "L";
    return mark;
  });
  const gaps = series.mean.map((value, i) => (value === null ? `M${x(series.step[i])} ${HEIGHT - 1}h.01` : ""));
  drawing.append(svg("path", { d: path.join("") }), svg("path", { class: "gap", d: gaps.join("") }));
  return drawing;
}
