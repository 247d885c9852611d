// What the rules say about a run: what fires now first, with what they saw and what to try.

import { h, keyed } from "./dom.js";
import { count, number } from "./format.js";

const SHOWN_FIRST = new Set(["layers", "values", "fit", "window"]);
const ORDER = { firing: 0, acknowledged: 1, pending: 2, resolved: 3 };

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
    this.none.textContent = hasFrames ? "No alerts." : "The rules look at each frame as it comes.";
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
      h("button", { type: "button", onclick: () => this.onShow(alert) }, `Show step ${count(alert.firing_step ?? alert.pending_step)}`),
      alert.advice?.text
        ? h("div", { class: "advice" }, h("p", {}, alert.advice.text), alert.advice.source ? h("p", { class: "quiet" }, alert.advice.source) : null)
        : null,
      // Below the charts' own breakpoint the alerts stand above the charts, and should leave them in sight.
      evidenceOf(alert.evidence, alert.state === "firing" && matchMedia("(min-width: 961px)").matches),
    );
  }
}

const ENDS = { "new attempt": "a new attempt began", "run ended": "the run ended", "by hand": "somebody called it over" };

function stepsOf({ pending_step, firing_step, resolved_step, resolved_reason }) {
  const steps = [`first seen at step ${count(pending_step)}`];
  if (firing_step !== null) steps.push(`firing since ${count(firing_step)}`);
  const end = ENDS[resolved_reason];
  if (resolved_step !== null) steps.push(end ? `still firing when ${end} at ${count(resolved_step)}` : `resolved at ${count(resolved_step)}`);
  return steps.join(", ");
}

/** What a rule saw, each thing in the form that it reads best in; null is what was not measured or is not finite. */
function evidenceOf(evidence, isOpen) {
  const entries = Object.entries(evidence ?? {}).filter(([, value]) => value !== null);
  const plain = entries.filter(([, value]) => typeof value !== "object");
  const rich = entries.filter(([, value]) => typeof value === "object" && Object.keys(value).length > 0);
  if (plain.length + rich.length === 0) return null;
  return h(
    "details",
    { class: "evidence", open: isOpen },
    h("summary", {}, "What the rule saw"),
    plain.length ? listOf(plain) : null,
    rich.map(([name, value]) => h("details", { open: SHOWN_FIRST.has(name) }, h("summary", {}, wordsOf(name)), formOf(value))),
  );
}

const isRecord = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const wordsOf = (name) => name.replaceAll("_", " ");

function formOf(value) {
  const rows = Object.values(value);
  if (rows.every(isRecord)) return tableOf(Array.isArray(value) ? null : Object.keys(value), rows);
  return Array.isArray(value) ? h("p", {}, textOf(value)) : listOf(Object.entries(value));
}

function tableOf(names, records) {
  const columns = [...new Set(records.flatMap(Object.keys))];
  const head = [names ? h("td") : null, columns.map((column) => h("th", { scope: "col" }, wordsOf(column)))];
  const row = (record, i) => h("tr", {}, names ? h("th", { scope: "row" }, wordsOf(names[i])) : null, columns.map((column) => h("td", {}, textOf(record[column] ?? null))));
  return h("div", { class: "scroll", tabindex: "0" }, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, records.map(row))));
}

const listOf = (entries) => h("dl", {}, entries.map(([name, value]) => [h("dt", {}, wordsOf(name)), h("dd", {}, textOf(value))]));

function textOf(value) {
  if (value === null) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.map(textOf).join(", ");
  if (isRecord(value)) return Object.entries(value).map(([name, one]) => `${wordsOf(name)} ${textOf(one)}`).join(", ");
  return number(value);
}
