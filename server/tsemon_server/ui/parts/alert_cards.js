// An alert as people read it: what is wrong, what was seen, what to try. And those of a run: what fires first, of that the worst.

import { h, keyed } from "../base/dom.js";
import { count, time, worded, wordsOf } from "../base/format.js";
import { evidenceOf, metricIn, seenOf } from "./evidence.js";
import { SeeingTo } from "./seeing_to.js";

const ORDER = { firing: 0, stood: 1, acknowledged: 2, pending: 3, resolved: 4 };
const SEVERITY = { critical: 0, warning: 1, info: 2 };
const ENDS = { "new attempt": "a new attempt began", "run ended": "the run ended", "rule disabled": "its rule was disabled", "by hand": "a person resolved it" };

/** The state as this page tells it: what fired when the run ended did not resolve, it `stood`; until a later `attempt`, where that is known. */
export const shownState = (alert, attempt = alert.attempt) => (alert.resolved_reason === "run ended" && alert.attempt === attempt ? "stood" : alert.state);

/** The step that an alert is about. */
export const stepOf = (alert) => alert.firing_step ?? alert.pending_step;

/**
 * What its rule says is wrong, without what was seen, which the service writes after it: "Title: value is 3 (above 2); ...".
 * Titles and values may have colons of their own, so the end of the title is where a value that held is named.
 */
export function titleOf({ summary, evidence }) {
  const held = (Array.isArray(evidence?.conditions) ? evidence.conditions : []).filter((one) => one?.holds === true);
  const places = held.flatMap((one) => [" is ", " ("].map((next) => summary.lastIndexOf(`: ${one.name ?? one.value}${next}`)));
  const end = Math.max(-1, ...places);
  return (end < 0 ? summary : summary.slice(0, end)).replace(/\.$/, "");
}

/** The run's page at the step of the alert, on the first metric by layer that its evidence names. */
export function addressOf(alert) {
  const metric = metricIn(alert.evidence, alert.evidence?.layers ?? {});
  const query = new URLSearchParams([...(metric ? [["metric", metric]] : []), ["step", stepOf(alert)]]);
  // A later attempt hides what this one wrote from some step on.
  if (alert.resolved_reason === "new attempt") query.set("attempt", alert.attempt);
  return `#/run/${encodeURIComponent(alert.run_id)}?${query}`;
}

/** `place` is what leads to the alert's place in the charts; `about` stands between its head and its title. */
export function cardOf(alert, { place, about = null, seeingTo }) {
  const { summary, seen, evidence } = sawOf(alert);
  return h(
    "article",
    { class: `alert ${alert.state} ${alert.severity}`, "aria-label": alert.rule },
    h(
      "header",
      {},
      alert.superseded
        ? h("span", { class: "pill", title: "The condition is over, but the incident has not recovered." }, "superseded")
        : h("span", { class: `pill ${alert.state}` }, wordsOf(alert.state)),
      h("span", { class: `severity ${alert.severity}` }, alert.severity),
      h("a", { class: "rule", href: `#/rules?${new URLSearchParams({ rule: alert.rule, project: alert.project })}` }, alert.rule),
      alert.silenced ? h("span", { class: "pill", title: "a silence applies: nobody is told" }, "silenced") : null,
    ),
    about,
    h("p", { class: "summary" }, worded(summary)),
    seen,
    h("p", { class: "quiet steps" }, stepsOf(alert), ", opened ", time(alert.opened_at)),
    h("div", { class: "buttons" }, place, seeingTo.of(alert)),
    alert.advice?.text
      ? h("div", { class: "advice" }, h("p", {}, worded(alert.advice.text)), alert.advice.source ? h("p", { class: "quiet" }, alert.advice.source) : null)
      : null,
    evidence,
  );
}

/** What the rule saw, as parts of its card. If this fails, the card says so: the rest of the card and the other cards stay visible. */
function sawOf(alert) {
  try {
    const seen = seenOf(alert.evidence);
    // The lines of what was seen say the rest of the summary.
    return { summary: seen ? titleOf(alert) : alert.summary, seen, evidence: evidenceOf(alert.evidence) };
  } catch (error) {
    console.error(error);
    return { summary: alert.summary, evidence: h("p", { class: "bad" }, `The web UI cannot show the evidence of this alert: ${error.message}.`) };
  }
}

export class Alerts {
  /** `onShow(alert)` when someone asks for an alert's place in the charts, `onChange()` when someone has seen to one. */
  constructor({ onShow, onChange }) {
    this.onShow = onShow;
    this.seeingTo = new SeeingTo(onChange);
    this.heading = h("h2", {}, "Alerts");
    this.open = h("div", { class: "stack tight" });
    this.past = h("div", { class: "stack tight" });
    this.pastTitle = h("summary");
    this.pastBox = h("details", {}, this.pastTitle, this.past);
    this.none = h("p", { class: "card quiet" });
    this.element = h("section", { class: "alerts alerts-view stack tight", "aria-label": "Alerts" }, this.heading, this.none, this.open, this.pastBox);
  }

  show(alerts, hasFrames) {
    const sorted = [...alerts].sort((a, b) => ORDER[a.state] - ORDER[b.state] || SEVERITY[a.severity] - SEVERITY[b.severity] || a.pending_step - b.pending_step);
    const make = (alert) => cardOf(alert, { place: this.#place(alert), seeingTo: this.seeingTo });
    const open = sorted.filter((alert) => alert.state !== "resolved");
    const past = sorted.filter((alert) => alert.state === "resolved");
    keyed(this.open, open, (alert) => alert.alert_id, make);
    keyed(this.past, past, (alert) => alert.alert_id, make);
    this.none.hidden = open.length > 0;
    this.none.textContent = hasFrames ? "No alerts." : "The rules look at each frame as it comes.";
    this.pastBox.hidden = past.length === 0;
    this.pastTitle.textContent = `Resolved (${past.length})`;
  }

  #place(alert) {
    return h("button", { type: "button", onclick: () => this.onShow(alert) }, `Show step ${count(stepOf(alert))}`);
  }
}

function stepsOf({ pending_step, firing_step, resolved_step, resolved_reason }) {
  const steps = [`first seen at step ${count(pending_step)}`];
  if (firing_step !== null) steps.push(`firing since ${count(firing_step)}`);
  const end = ENDS[resolved_reason];
  if (resolved_step !== null) steps.push(end ? `still firing when ${end} at ${count(resolved_step)}` : `resolved at ${count(resolved_step)}`);
  return steps.join(", ");
}
