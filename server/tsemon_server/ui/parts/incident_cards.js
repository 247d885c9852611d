// The incidents of a run as people read them: what is wrong, once, with its place, one piece of advice, and what else fired because of it.

import { h, keyed } from "../base/dom.js";
import { count, worded } from "../base/format.js";
import { titleOf } from "./alert_cards.js";

const SEVERITY = { critical: 0, warning: 1, info: 2 };
/** What the state of an alert means. */
const TITLES = {
  superseded: "The condition of this alert is over, but the incident has not recovered.",
  ended: "This alert was firing when its attempt ended.",
};
/** The summary begins with the title of the rule: "Title: value is 3 (above 2)". */
const TITLE = /^(.+?): .* is /;

/** What is wrong. `cause` is the alert of the cause, or null if it is not known; its evidence tells where the title ends. */
export const incidentTitle = ({ summary }, cause = null) => (cause ? titleOf({ ...cause, summary }) : (summary.match(TITLE)?.[1] ?? summary).replace(/\.$/, ""));

/** Such as "blocks 5 to 23, since step 40". */
export const placeOf = ({ where, head, left_step }) => [where, head === null ? null : `head ${count(head)}`, `since step ${count(left_step)}`].filter(Boolean).join(", ");

/** The worst first; among equals they stay in their order, the newest first. */
export const worstFirst = (incidents) => [...incidents].sort((a, b) => SEVERITY[a.severity] - SEVERITY[b.severity]);

export class Incidents {
  #isOpen = new Set();

  /** `onShow(incident)` if someone asks for an incident's place in the charts, `onAlert(alertId)` for the card of an alert. */
  constructor({ onShow, onAlert }) {
    this.onShow = onShow;
    this.onAlert = onAlert;
    this.current = h("div", { class: "stack tight" });
    this.earlier = h("div", { class: "stack tight" });
    this.earlierTitle = h("summary");
    this.earlierBox = h("details", {}, this.earlierTitle, this.earlier);
    this.element = h("section", { class: "incidents stack tight", "aria-label": "Incidents", hidden: true }, this.current, this.earlierBox);
  }

  /** `current` and `earlier` are incidents, `alerts` the known alerts by id, `details` their {within, sequences} by the ids of incidents, `attempt` the current one, `isMapped(incident)` says whether the heat map can show it. */
  show({ current, earlier, alerts, details, attempt, isMapped }) {
    const itemOf = (incident) => ({ incident, isOfAnother: incident.attempt !== attempt, ...this.#wordsOf(incident, alerts), details: details.get(incident.incident_id) ?? null, isMapped: isMapped(incident) });
    const make = (item) => this.#cardOf(item);
    const keyOf = ({ incident }) => incident.incident_id;
    keyed(this.current, current.map(itemOf), keyOf, make);
    keyed(this.earlier, earlier.map(itemOf), keyOf, make);
    this.element.hidden = current.length + earlier.length === 0;
    this.earlierBox.hidden = earlier.length === 0;
    this.earlierTitle.textContent = `Earlier incidents (${earlier.length})`;
  }

  #wordsOf(incident, alerts) {
    const cause = alerts.get(incident.cause_id);
    const titleIn = ({ alert_id, rule }) => (alerts.has(alert_id) ? titleOf(alerts.get(alert_id)) : rule);
    const title = incidentTitle(incident, cause ?? null);
    return {
      title,
      seen: incident.summary.startsWith(`${title}: `) ? incident.summary.slice(title.length + 2) : null,
      place: placeOf(incident),
      also: incident.consequences.map((one) => ({ ...one, title: titleIn(one) })),
    };
  }

  #cardOf({ incident, isOfAnother, title, seen, place, details, also, isMapped }) {
    const { state, severity, advice } = incident;
    return h(
      "article",
      { class: `incident ${state} ${severity}`, "aria-label": `Incident: ${title}` },
      h(
        "header",
        {},
        h("span", { class: `pill ${state}` }, state),
        h("span", { class: `severity ${severity}` }, severity),
        isOfAnother && h("span", { class: "pill" }, `attempt ${incident.attempt}`),
        incident.acknowledged && h("span", { class: "pill" }, "acknowledged"),
        incident.silenced && h("span", { class: "pill", title: "A silence applies to all alerts of this incident that fire." }, "silenced"),
      ),
      h("h2", {}, title),
      h("p", { class: "place" }, place[0].toUpperCase() + place.slice(1), endOf(incident)),
      !incident.is_settled && h("p", { class: "quiet" }, `The cause may still change until step ${count(incident.settles_step)}.`),
      seen && h("p", { class: "quiet saw" }, worded(seen)),
      details !== null && h("p", { class: details.within.block === null ? "within quiet" : "within" }, details.within.text),
      (details?.sequences ?? []).filter((one, i) => i === 0 || one.stands_out).map((one) => h("p", { class: "sequence" }, one.text)),
      h(
        "div",
        { class: "buttons" },
        h("button", { type: "button", class: "chief", onclick: () => this.onShow(incident) }, isMapped ? "Show in the heat map" : `Show step ${count(incident.left_step)}`),
        h("button", { type: "button", onclick: () => this.onAlert(incident.cause_id) }, "Show the alert"),
      ),
      advice.text && h("div", { class: "advice" }, h("p", {}, worded(advice.text))),
      also.length > 0 && this.#alsoOf(incident, also),
    );
  }

  #alsoOf({ incident_id }, also) {
    const details = h(
      "details",
      { class: "also", open: this.#isOpen.has(incident_id), ontoggle: () => (details.open ? this.#isOpen.add(incident_id) : this.#isOpen.delete(incident_id)) },
      h("summary", {}, `also fired (${also.length})`),
      h("ul", {}, also.map((one) => this.#consequence(one))),
    );
    return details;
  }

  #consequence({ alert_id, title, rule, state, firing_step, resolved_step }) {
    const until = resolved_step === null ? "" : ` to ${count(resolved_step)}`;
    return h(
      "li",
      {},
      h("span", { class: `pill ${state}`, title: TITLES[state] }, state),
      h("div", {}, h("button", { type: "button", class: "plain", title: rule, onclick: () => this.onAlert(alert_id) }, title), " ", h("span", { class: "quiet" }, resolved_step === null ? `since step ${count(firing_step)}` : `step ${count(firing_step)}${until}`)),
    );
  }
}

function endOf({ state, ended_step }) {
  if (state === "open" || ended_step === null) return "";
  return state === "recovered" ? `; recovered at step ${count(ended_step)}` : `; ended at step ${count(ended_step)}`;
}
