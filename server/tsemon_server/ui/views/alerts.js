// The alerts of all runs: what is open, what is over, who has seen to what.

import { keepAddress } from "../base/address.js";
import { get, getOrProblem, getPage, runPath } from "../base/api.js";
import { h, keyed, put } from "../base/dom.js";
import { count, refreshAges } from "../base/format.js";
import { addressOf, cardOf, shownState, stepOf } from "../parts/alert_cards.js";
import { Filter } from "../parts/pickers.js";
import { SeeingTo } from "../parts/seeing_to.js";

const BUSY_MS = 4000;
const PAGE_SIZE = 25;
const STATES = {
  open: { title: "Open", states: ["firing", "acknowledged", "pending"] },
  firing: { title: "Firing", states: ["firing"] },
  acknowledged: { title: "Acknowledged", states: ["acknowledged"] },
  pending: { title: "Pending", states: ["pending"] },
  past: { title: "Past", states: ["resolved"] },
  all: { title: "All", states: null },
};
const SEVERITIES = { critical: "critical", warning: "warning", info: "info" };
const SEEN = { true: "somebody has", false: "nobody has" };
const SILENCED = { true: "silenced", false: "not silenced" };

export class AlertsView {
  #rules = null; // of the project that is chosen, or of the server
  #rulesOf = null;
  #run = null; // that has no alerts here, or {problem} where it is not there; null where all runs are looked at
  #trail = [];
  watched = null;
  kinds = ["alert"];
  refreshMs = 10_000; // what was pending and does not come to fire goes without a word

  constructor(main, query) {
    this.main = main;
    this.seeingTo = new SeeingTo(() => this.reload());
    this.moved(query);
  }

  /** Read the choices from the address. */
  moved(query) {
    const oneOf = (name, known) => (Object.hasOwn(known, query.get(name) ?? "") ? query.get(name) : null);
    this.choice = {
      state: oneOf("state", STATES) ?? "open",
      severity: oneOf("severity", SEVERITIES),
      family: query.get("family") || null,
      rule: query.get("rule") || null,
      project: query.get("project") || null,
      run: query.get("run") || null,
      acknowledged: oneOf("acknowledged", SEEN),
      silenced: oneOf("silenced", SILENCED),
    };
    this.cursor = query.get("cursor") || null;
  }

  onEvent() {
    return true;
  }

  destroy() {
    document.title = "tsemon";
  }

  redraw() {}

  async refresh(signal) {
    const { state, ...filters } = this.choice;
    const wanted = { ...filters, state: STATES[state].states, limit: PAGE_SIZE, cursor: this.cursor };
    const asked = getPage("alerts", wanted, signal, () => this.#go(null));
    const { project } = this.choice;
    const known = this.#rulesOf === project ? this.#rules : null;
    const [page, rules] = await Promise.all([asked, known ?? get("rules", { project }, signal).then(({ rules }) => rules)]);
    [this.#rules, this.#rulesOf] = [rules, project];
    this.#run = page.alerts.length || this.choice.run === null ? null : await getOrProblem(runPath(this.choice.run), {}, signal);
    if (!this.root?.isConnected) this.#build();
    document.title = "Alerts · tsemon";
    this.#show(page);
    return BUSY_MS;
  }

  #build() {
    // Whatever can be clicked is made once: a round must not take it from under a pointer, or the focus from it.
    this.tabs = Object.entries(STATES).map(([state, { title }]) => h("button", { type: "button", "data-state": state, onclick: () => this.#set("state", state) }, title));
    this.filters = h("form", { class: "filters", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() });
    this.severity = new Filter("severity", "severity", (value) => this.#set("severity", value));
    this.family = new Filter("family", "family", (value) => this.#set("family", value));
    this.rule = new Filter("rule", "rule", (value) => this.#set("rule", value));
    this.acknowledged = new Filter("acknowledged", "seen to", (value) => this.#set("acknowledged", value));
    this.silenced = new Filter("silenced", "silences", (value) => this.#set("silenced", value));
    this.projects = h("datalist", { id: "projects" });
    this.project = h("input", { type: "search", id: "filter-project", list: "projects", placeholder: "any", autocomplete: "off", onchange: () => this.#set("project", this.project.value.trim() || null) });
    this.clear = h("button", { type: "button", onclick: () => this.#clear() }, "Clear filters");
    this.runName = h("b");
    this.ofRun = h("span", { class: "pair" }, h("span", { class: "tag" }, "run ", this.runName), h("button", { type: "button", "aria-label": "All runs", onclick: () => this.#set("run", null) }, "all runs"));
    this.filters.append(
      this.severity.element, this.family.element, this.rule.element,
      h("span", { class: "filter" }, h("label", { for: "filter-project" }, "project"), this.project, this.projects),
      this.acknowledged.element, this.silenced.element, this.ofRun, this.clear,
    );
    this.list = h("div", { class: "stack tight", "aria-live": "off" });
    this.noneTitle = h("h2");
    this.elsewhere = h("button", { type: "button", onclick: () => this.#set("state", "all") }, "Look at all states");
    this.clearNone = h("button", { type: "button", onclick: () => this.#clear() }, "Clear filters");
    this.none = h("section", { class: "card empty none" }, this.noneTitle, h("div", { class: "buttons" }, this.elsewhere, this.clearNone), h("p", { class: "quiet" }, "The rules look at each frame as it comes. ", h("a", { href: "#/rules" }, "What they watch"), "."));
    this.newest = h("button", { type: "button", onclick: () => this.#turn(null) }, "Newest");
    this.newer = h("button", { type: "button", onclick: () => this.#turn(this.#trail.pop() ?? null, true) }, "Newer");
    this.older = h("button", { type: "button" }, "Older");
    this.where = h("span", { class: "quiet", role: "status" });
    this.pages = h("nav", { class: "pages", "aria-label": "Pages" }, this.newest, this.newer, this.where, this.older);
    this.root = h("div", { class: "stack alerts-view" }, h("h1", {}, "Alerts"), h("section", { class: "card" }, h("nav", { class: "tabs", "aria-label": "State" }, this.tabs), this.filters), this.none, this.list, this.pages);
    this.main.replaceChildren(this.root);
  }

  #show({ alerts, next_cursor: next }) {
    this.#showFilters(alerts);
    const told = alerts.map((alert) => ({ ...alert, state: shownState(alert) }));
    keyed(this.list, told, (alert) => alert.alert_id, (alert) => cardOf(alert, { place: placeOf(alert), about: aboutOf(alert), seeingTo: this.seeingTo }));
    refreshAges(this.list);
    this.list.classList.remove("waiting");
    this.none.hidden = alerts.length > 0;
    if (alerts.length === 0) this.#showNone();
    this.pages.hidden = next === null && this.cursor === null;
    this.older.disabled = next === null;
    this.older.onclick = () => {
      this.#trail.push(this.cursor);
      this.#turn(next, true);
    };
    this.newest.disabled = this.cursor === null;
    this.newer.disabled = this.cursor === null || this.#trail.length === 0;
    put(this.where, alerts.length === 1 ? "1 alert" : `${count(alerts.length)} alerts${this.cursor === null && next !== null ? ", the newest" : ""}`);
  }

  #showNone() {
    const { state } = this.choice;
    const isFiltered = this.#isFiltered();
    const problem = this.#run?.problem;
    const word = { open: "open", past: "over", all: "there" }[state] ?? state;
    const text = problem ?? (this.cursor !== null ? "There are no older alerts." : isFiltered ? "No alert fits these filters." : state === "all" ? "There has been no alert yet." : `No alert is ${word}.`);
    put(this.noneTitle, text);
    this.elsewhere.hidden = problem !== undefined || state === "all";
    this.clearNone.hidden = !isFiltered;
  }

  #showFilters(alerts) {
    const { state, severity, family, rule, project, run, acknowledged, silenced } = this.choice;
    for (const tab of this.tabs) tab.setAttribute("aria-pressed", String(tab.dataset.state === state));
    const families = [...new Set(this.#rules.map(({ definition }) => definition.family ?? "custom"))].sort();
    const rules = this.#rules.filter(({ definition }) => family === null || (definition.family ?? "custom") === family).map(({ name }) => name);
    this.severity.show(severity, Object.entries(SEVERITIES));
    this.family.show(family, families.map((name) => [name, name]));
    this.rule.show(rule, rules.map((name) => [name, name]));
    this.acknowledged.show(acknowledged, Object.entries(SEEN));
    this.silenced.show(silenced, Object.entries(SILENCED));
    if (document.activeElement !== this.project) this.project.value = project ?? "";
    const projects = [...new Set([...this.projects.children].map((option) => option.value).concat(alerts.map((alert) => alert.project)))].sort();
    if (projects.length !== this.projects.children.length) this.projects.replaceChildren(...projects.map((value) => h("option", { value })));
    const name = alerts.find((alert) => alert.run_id === run)?.run ?? this.#run?.run ?? run;
    this.ofRun.hidden = run === null;
    put(this.runName, h("span", { class: "given" }, name ?? ""));
    this.clear.hidden = !this.#isFiltered();
  }

  #isFiltered() {
    return Object.entries(this.choice).some(([name, value]) => name !== "state" && value !== null);
  }

  #set(name, value) {
    this.choice[name] = value;
    if (name === "family") this.choice.rule = null;
    this.#trail = [];
    this.#turn(null);
  }

  #clear() {
    for (const name of Object.keys(this.choice)) if (name !== "state") this.choice[name] = null;
    this.#turn(null);
  }

  #turn(cursor, isNext = false) {
    if (!isNext) this.#trail = [];
    this.#go(cursor);
    this.list.classList.add("waiting");
    window.scrollTo(0, 0);
    this.reload();
  }

  #go(cursor) {
    this.cursor = cursor;
    const given = Object.entries({ ...this.choice, cursor }).filter(([name, value]) => value !== null && !(name === "state" && value === "open"));
    keepAddress(`#/alerts${given.length ? `?${new URLSearchParams(given)}` : ""}`);
  }
}

const placeOf = (alert) => h("a", { class: "step-link", href: addressOf(alert) }, `Show step ${count(stepOf(alert))}`);

/** Of which run it is. */
function aboutOf({ run_id, run, project }) {
  return h("p", { class: "about" }, h("a", { class: "given", href: `#/run/${encodeURIComponent(run_id)}` }, run), h("span", { class: "quiet given" }, project));
}
