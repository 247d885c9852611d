// What the rules say about a run: what fires now first, with what they saw and what to try.

import { h, keyed } from "./dom.js";
import { count, number } from "./format.js";

const ORDER = { firing: 0, pending: 1, resolved: 2 };

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
      evidenceOf(alert.evidence, alert.state === "firing"),
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

/** What a rule saw: lists of records, or lists as long as `layers`, as tables; everything else by name. */
function evidenceOf(evidence, isOpen) {
  const entries = Object.entries(evidence ?? {}).filter(([, value]) => value !== null && value?.length !== 0);
  if (entries.length === 0) return null;
  const isList = ([, value]) => Array.isArray(value) && value.every((one) => one === null || typeof one !== "object");
  const columns = entries.filter((entry) => isList(entry) && entry[1].length === evidence.layers?.length);
  const parallel = columns.length > 1 ? columns : [];
  const rest = entries.filter((entry) => !parallel.includes(entry));
  const tables = rest.filter(([, value]) => Array.isArray(value) && value.every(isRecord));
  return h(
    "details",
    { class: "evidence", open: isOpen },
    h("summary", {}, "What the rule saw"),
    parallel.length ? tableOf("layers", parallel.map(([name]) => name), parallel[0][1].map((_, i) => parallel.map(([, values]) => values[i]))) : null,
    tables.map(([name, records]) => tableOf(name, Object.keys(records[0]), records.map((record) => Object.values(record)))),
    h("dl", {}, rest.filter((entry) => !tables.includes(entry)).map(([name, value]) => [h("dt", {}, name), h("dd", {}, textOf(value))])),
  );
}

const isRecord = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function tableOf(caption, names, rows) {
  const cells = (row) => row.map((value) => h("td", {}, textOf(value)));
  const head = h("tr", {}, names.map((name) => h("th", { scope: "col" }, name.replaceAll("_", " "))));
  return h(
    "div",
    { class: "scroll", tabindex: "0" },
    h("table", {}, h("caption", {}, caption), h("thead", {}, head), h("tbody", {}, rows.map((row) => h("tr", {}, cells(row))))),
  );
}

function textOf(value) {
  if (value === null) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.map(textOf).join(", ");
  if (isRecord(value)) return Object.entries(value).map(([name, one]) => `${name} ${textOf(one)}`).join(", ");
  return number(value);
}
