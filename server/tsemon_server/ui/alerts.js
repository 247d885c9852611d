// What the rules say about a run: what fires now first, with what they saw and what to try.

import { h, keyed } from "./dom.js";
import { count, number } from "./format.js";

const ORDER = { firing: 0, pending: 1, resolved: 2 };
const MOST_ROWS = 12;

export class Alerts {
  /** `onShow(alert)` when someone asks for an alert's place in the charts. */
  constructor(onShow) {
    this.onShow = onShow;
    this.heading = h("h2", {}, "Alerts");
    this.open = h("div", { class: "stack tight" });
    this.past = h("div", { class: "stack tight" });
    this.pastTitle = h("summary");
    this.pastBox = h("details", {}, this.pastTitle, this.past);
    this.none = h("p", { class: "card quiet" });
    this.element = h("section", { class: "alerts stack tight", "aria-label": "Alerts" }, this.heading, this.none, this.open, this.pastBox);
  }

  show(alerts, hasFrames) {
    const sorted = [...alerts].sort((a, b) => ORDER[a.state] - ORDER[b.state] || b.pending_step - a.pending_step);
    const make = (alert) => this.#card(alert);
    const open = sorted.filter((alert) => alert.state !== "resolved");
    const past = sorted.filter((alert) => alert.state === "resolved");
    keyed(this.open, open, (alert) => alert.alert_id, make);
    keyed(this.past, past, (alert) => alert.alert_id, make);
    this.none.hidden = open.length > 0;
    this.none.textContent = hasFrames ? "No rule has anything to say." : "The rules look at each frame as it comes.";
    this.pastBox.hidden = past.length === 0;
    this.pastTitle.textContent = `Resolved (${past.length})`;
  }

  #card(alert) {
    return h(
      "article",
      { class: `alert ${alert.state}` },
      h("header", {}, h("span", { class: `pill ${alert.state}` }, alert.state), h("b", {}, alert.rule), h("span", { class: "quiet" }, alert.severity)),
      h("p", { class: "summary" }, alert.summary),
      h("p", { class: "quiet" }, stepsOf(alert)),
      evidenceOf(alert.evidence),
      alert.advice?.text
        ? h("div", { class: "advice" }, h("p", {}, alert.advice.text), alert.advice.source ? h("p", { class: "quiet" }, alert.advice.source) : null)
        : null,
      h("button", { type: "button", onclick: () => this.onShow(alert) }, `Show step ${count(alert.firing_step ?? alert.pending_step)}`),
    );
  }
}

function stepsOf({ pending_step, firing_step, resolved_step }) {
  const steps = [`first seen at step ${count(pending_step)}`];
  if (firing_step !== null) steps.push(`firing since ${count(firing_step)}`);
  if (resolved_step !== null) steps.push(`resolved at ${count(resolved_step)}`);
  return steps.join(", ");
}

/** Lists that go with `layers` as a table of rows, everything else as named values. */
function evidenceOf(evidence) {
  const entries = Object.entries(evidence ?? {}).filter(([, value]) => value !== null);
  if (entries.length === 0) return null;
  const { layers } = evidence;
  const isColumn = ([, value]) => Array.isArray(layers) && Array.isArray(value) && value.length === layers.length && value.every((one) => typeof one !== "object" || one === null);
  const columns = Array.isArray(layers) && layers.length ? entries.filter(isColumn) : [];
  const rest = entries.filter((entry) => !columns.includes(entry));
  return h("div", { class: "evidence" }, columns.length > 1 ? tableOf(columns) : listOf(columns), listOf(rest));
}

function tableOf(columns) {
  const length = columns[0][1].length;
  const shown = Math.min(length, MOST_ROWS);
  const rows = Array.from({ length: shown }, (_, i) => h("tr", {}, columns.map(([, values]) => h("td", {}, number(values[i])))));
  return [
    h("table", {}, h("thead", {}, h("tr", {}, columns.map(([name]) => h("th", { scope: "col" }, wordOf(name))))), h("tbody", {}, rows)),
    length > shown ? h("p", { class: "quiet" }, `and ${length - shown} more layers`) : null,
  ];
}

const wordOf = (name) => ({ layers: "layer", values: "value" })[name] ?? name;

function listOf(entries) {
  if (entries.length === 0) return null;
  return h("dl", {}, entries.map(([name, value]) => [h("dt", {}, name), h("dd", {}, textOf(value))]));
}

function textOf(value) {
  if (Array.isArray(value)) return value.map(textOf).join(", ");
  if (value !== null && typeof value === "object") return Object.entries(value).map(([name, one]) => `${name} ${textOf(one)}`).join(", ");
  return number(value);
}
