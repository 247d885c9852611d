// What the rules say about a run: what fires first, of that the worst, with what they saw and what to try.

import { acknowledge } from "./api.js";
import { h, keyed } from "./dom.js";
import { evidenceOf, seenOf } from "./evidence.js";
import { count } from "./format.js";

const ORDER = { firing: 0, stood: 1, acknowledged: 2, pending: 3, resolved: 4 };
const SEVERITY = { critical: 0, warning: 1, info: 2 };
const ENDS = { "new attempt": "a new attempt began", "run ended": "the run ended", "rule disabled": "its rule was disabled", "by hand": "somebody called it over" };

/** The state as this page tells it: what fired when this attempt of the run ended did not resolve, it `stood`. */
export const shownState = (alert, run) => (alert.resolved_reason === "run ended" && alert.attempt === run.attempt ? "stood" : alert.state);
export const wordsOf = (state) => (state === "stood" ? "fired to the end of the run" : state);

export class Alerts {
  /** `onShow(alert)` when someone asks for an alert's place in the charts, `onChange()` when someone has seen to one. */
  constructor({ onShow, onChange }) {
    this.onShow = onShow;
    this.onChange = onChange;
    this.heading = h("h2", {}, "Alerts");
    this.open = h("div", { class: "stack tight" });
    this.past = h("div", { class: "stack tight" });
    this.pastTitle = h("summary");
    this.pastBox = h("details", {}, this.pastTitle, this.past);
    this.none = h("p", { class: "card quiet" });
    this.element = h("section", { class: "alerts stack tight", "aria-label": "Alerts" }, this.heading, this.none, this.open, this.pastBox);
  }

  show(alerts, hasFrames) {
    const sorted = [...alerts].sort((a, b) => ORDER[a.state] - ORDER[b.state] || SEVERITY[a.severity] - SEVERITY[b.severity] || a.pending_step - b.pending_step);
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
    const seen = seenOf(alert.evidence);
    return h(
      "article",
      { class: `alert ${alert.state}`, "aria-label": alert.rule },
      h("header", {}, h("span", { class: `pill ${alert.state}` }, wordsOf(alert.state)), h("b", {}, alert.rule), h("span", { class: "quiet" }, alert.severity)),
      // The lines of what was seen say the rest of the summary.
      h("p", { class: "summary" }, seen ? alert.summary.split(": ", 1)[0].replace(/\.$/, "") : alert.summary),
      seen,
      h("p", { class: "quiet" }, stepsOf(alert)),
      h("div", { class: "buttons" }, this.#show(alert), alert.state === "firing" ? this.#acknowledge(alert) : null),
      alert.advice?.text
        ? h("div", { class: "advice" }, h("p", {}, alert.advice.text), alert.advice.source ? h("p", { class: "quiet" }, alert.advice.source) : null)
        : null,
      evidenceOf(alert.evidence),
    );
  }

  #show(alert) {
    return h("button", { type: "button", onclick: () => this.onShow(alert) }, `Show step ${count(alert.firing_step ?? alert.pending_step)}`);
  }

  #acknowledge(alert) {
    const trouble = h("span", { class: "bad", role: "alert" });
    const send = () => acknowledge(alert.alert_id).then(this.onChange, (error) => (trouble.textContent = error.message));
    return [h("button", { type: "button", onclick: send }, "Acknowledge"), trouble];
  }
}

function stepsOf({ pending_step, firing_step, resolved_step, resolved_reason, acknowledged_by }) {
  const steps = [`first seen at step ${count(pending_step)}`];
  if (firing_step !== null) steps.push(`firing since ${count(firing_step)}`);
  if (acknowledged_by) steps.push(`acknowledged by ${acknowledged_by}`);
  const end = ENDS[resolved_reason];
  if (resolved_step !== null) steps.push(end ? `still firing when ${end} at ${count(resolved_step)}` : `resolved at ${count(resolved_step)}`);
  return steps.join(", ");
}
