// The rules by the kind of trouble they look for: what each waits for, in words, and how it stands on a run.

import { keepAddress } from "../base/address.js";
import { get, getOrProblem, runPath } from "../base/api.js";
import { h, keyed, put } from "../base/dom.js";
import { count, refreshAges, time, wordsOf } from "../base/format.js";
import { Filter } from "../parts/pickers.js";
import { holdOf, isNone, originOf, startOf, termsOf, titleOf } from "../parts/rule_words.js";
import { RunSearch } from "../parts/run_search.js";

const BUSY_MS = 5000;
const IDLE_MS = 30_000;
const FAMILIES = {
  tse: ["Token similarity", "tokens, or samples, become the same from block to block"],
  entropy: ["Attention", "heads look at too few tokens, or scores grow too large"],
  rank: ["Rank", "representations use ever fewer directions"],
  norm: ["Norms", "weights and states grow without bound, or only grow"],
  dead: ["Dead parts", "parts that no longer learn or no longer answer"],
  diverge: ["Divergence", "gradients and updates that vanish, explode or are not finite"],
  data: ["Data", "batches that repeat, or say too little"],
  loss: ["Loss", "what the loss alone tells"],
  liveness: ["Liveness", "whether there is anything to watch"],
  custom: ["Custom", "rules that name no family"],
};
/** What a definition may leave out. */
const DEFAULTS = { family: "custom", severity: "warning", advice: "", source: "", origin: "" };
const STATES = { firing: "firing", stood: wordsOf("stood"), pending: "pending", quiet: "quiet", unknown: "unknown", disabled: "disabled" };
const ORIGINS = { "built-in": "built in", edited: "edited or added" };
const SEVERITIES = { critical: "critical", warning: "warning", info: "info" };

export class RulesView {
  #known = null;
  #run = null;
  #standings = null;
  #isScrolled = false;
  #open = new Set();

  constructor(main, query) {
    this.main = main;
    this.moved(query);
  }

  /** Read the choices from the address. */
  moved(query) {
    const oneOf = (name, known) => (Object.hasOwn(known, query.get(name) ?? "") ? query.get(name) : null);
    this.choice = {
      run: query.get("run") || null,
      project: query.get("project") || null,
      rule: query.get("rule") || null,
      q: query.get("q") || null,
      family: query.get("family") || null,
      severity: oneOf("severity", SEVERITIES),
      origin: oneOf("origin", ORIGINS),
      state: oneOf("state", STATES),
    };
    this.#isScrolled = false;
    if (this.choice.rule) this.#open.add(this.choice.rule);
  }

  /** What changes, the service tells. */
  get watched() {
    return this.choice.run === null ? [] : [this.choice.run];
  }

  onEvent({ data }) {
    return data.run_id === this.choice.run;
  }

  destroy() {
    this.search?.close();
    document.title = "tsemon";
  }

  redraw() {}

  async refresh(signal) {
    const { run: id } = this.choice;
    // A run that is not there is told beside the field; the rules are there all the same.
    const ofRun = (path) => (id === null ? null : getOrProblem(`${runPath(id)}${path}`, {}, signal));
    const [run, standings] = await Promise.all([ofRun(""), ofRun("/rules")]);
    this.#known = await get("rules", { project: run?.project ?? this.choice.project }, signal);
    [this.#run, this.#standings] = [run, shownStandings(standings, run)];
    if (!this.root?.isConnected) this.#build();
    document.title = "Rules · tsemon";
    this.#show();
    return run?.state === "running" ? BUSY_MS : IDLE_MS;
  }

  #build() {
    this.search = new RunSearch({ label: "How they stand on a run", onPick: (run) => this.#set("run", run.run_id) });
    this.field = h("input", { type: "search", id: "rule-words", placeholder: "name, metric, words", autocomplete: "off", oninput: () => this.#set("q", this.field.value.trim() || null) });
    this.family = new Filter("family", "family", (value) => this.#set("family", value));
    this.severity = new Filter("severity", "severity", (value) => this.#set("severity", value));
    this.origin = new Filter("origin", "origin", (value) => this.#set("origin", value));
    this.project = new Filter("project", "project", (value) => this.#set("project", value));
    this.state = new Filter("state", "state", (value) => this.#set("state", value));
    this.clear = h("button", { type: "button", onclick: () => this.#clear() }, "Clear filters");
    this.runLink = h("a");
    this.runProject = h("span", { class: "quiet" });
    this.counts = Object.entries(STATES).map(([state, word]) => {
      const num = h("b");
      return { state, num, button: h("button", { type: "button", onclick: () => this.#set("state", this.choice.state === state ? null : state) }, num, ` ${word}`) };
    });
    this.countRow = h("div", { class: "counts" }, this.counts.map(({ button }) => button));
    this.seen = h("p", { class: "quiet", role: "status" });
    this.other = h("button", { type: "button", onclick: () => this.#set("run", null) }, "Another run");
    this.standing = h("div", { class: "standing" }, h("div", { class: "who" }, this.runLink, this.runProject, this.other), this.countRow, this.seen);
    this.ofProject = h("h2");
    this.note = h("p", { class: "quiet" });
    this.list = h("div", { class: "stack" });
    this.fresh = h("a", { class: "button" }, "New rule");
    this.none = h("section", { class: "card empty none" }, h("h2", {}, "No rule fits these filters."), h("button", { type: "button", onclick: () => this.#clear() }, "Clear filters"));
    const filters = h(
      "form",
      { class: "filters", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() },
      h("span", { class: "filter" }, h("label", { for: "rule-words" }, "search"), this.field),
      this.family.element, this.severity.element, this.origin.element, this.state.element, this.project.element, this.clear,
    );
    this.root = h(
      "div",
      { class: "stack rules-view" },
      h("div", { class: "heading" }, h("h1", {}, "Rules"), this.fresh),
      this.ofProject,
      h("section", { class: "card of-run", "aria-label": "Run" }, this.search.element, this.standing),
      h("section", { class: "card" }, filters, this.note),
      this.none,
      this.list,
    );
    this.main.replaceChildren(this.root);
  }

  #show() {
    const { explained } = this.#known;
    const rules = this.#known.rules.map((rule) => ({ ...rule, definition: { ...DEFAULTS, title: titleOf(rule.name), ...rule.definition } }));
    const [run, standings] = [this.#run, this.#standings];
    const stands = new Map((standings?.rules ?? []).map((one) => [one.rule, one]));
    const items = rules
      .map((version) => ({ ...version, explained: explained[version.name] ?? null, standing: stands.get(version.name) ?? null, hasRun: stands.size > 0, editor: this.#editorOf(version.name) }))
      .filter((item) => this.#fits(item))
      .sort((a, b) => Object.keys(SEVERITIES).indexOf(a.definition.severity) - Object.keys(SEVERITIES).indexOf(b.definition.severity));
    this.#showFilters(rules, items.length);
    this.#showProject();
    this.#showRun(run, standings, rules);
    this.fresh.setAttribute("href", this.#editorOf(""));
    const families = Object.entries(Object.groupBy(items, ({ definition }) => definition.family));
    const place = (family) => (Object.hasOwn(FAMILIES, family) ? Object.keys(FAMILIES).indexOf(family) : Infinity);
    this.#showFamilies(families.sort(([a], [b]) => place(a) - place(b)));
    this.none.hidden = items.length > 0;
    refreshAges(this.list);
    if (this.choice.rule && !this.#isScrolled) {
      const card = this.list.querySelector(`[data-key="${CSS.escape(this.choice.rule)}"]`);
      card?.closest("details").setAttribute("open", "");
      card?.scrollIntoView({ block: "center" });
      this.#isScrolled = true;
    }
  }

  #editorOf(name) {
    const asked = Object.entries({ run: this.choice.run, project: this.#known.project }).filter(([, value]) => value !== null);
    return `#/rule${name && `/${encodeURIComponent(name)}`}${asked.length ? `?${new URLSearchParams(asked)}` : ""}`;
  }

  /** Whose rules these are. A chosen run has a project. */
  #showProject() {
    const { project, projects = [], rules } = this.#known;
    this.project.element.hidden = this.#run?.project !== undefined || (project === null && projects.length === 0);
    this.project.show(project, projects.map((name) => [name, name]));
    this.ofProject.hidden = project === null;
    const own = rules.filter((rule) => rule.project !== null).length;
    if (project !== null) put(this.ofProject, "In project ", h("span", { class: "given" }, project), own ? `: ${count(own)} of its own, the others are the server's` : ": the server's");
  }

  #showFamilies(families) {
    const before = new Map([...this.list.children].map((section) => [section.dataset.family, section]));
    const sections = families.map(([family, items]) => {
      const section = before.get(family) ?? this.#section(family);
      keyed(section.rules, items, ({ name }) => name, (item) => this.#card(item));
      return section;
    });
    if (sections.length !== this.list.children.length || sections.some((section, i) => section !== this.list.children[i])) this.list.replaceChildren(...sections);
  }

  #section(family) {
    const [title, about] = FAMILIES[family] ?? [family, ""];
    const rules = h("div", { class: "stack tight" });
    const heading = h("summary", { class: "family" }, h("h2", {}, title), " ", about);
    return Object.assign(h("section", { "data-family": family, "aria-label": title }, h("details", { open: true }, heading, rules)), { rules });
  }

  #fits({ name, enabled, origin, definition, explained, standing }) {
    const { q, family, severity, origin: from, state } = this.choice;
    const words = [name, definition.title, definition.advice, ...(definition.aliases ?? []), ...(explained?.watches ?? [])].join("\n").toLowerCase();
    return (
      (q === null || q.toLowerCase().split(/\s+/).every((word) => words.includes(word))) &&
      (family === null || definition.family === family) &&
      (severity === null || definition.severity === severity) &&
      (from === null || origin === from) &&
      (state === null || (state === "disabled" ? !enabled : standing?.state === state))
    );
  }

  #showFilters(rules, num) {
    const { q, family, severity, origin, state, run } = this.choice;
    if (document.activeElement !== this.field) this.field.value = q ?? "";
    const families = [...new Set(rules.map(({ definition }) => definition.family))].map((name) => [name, FAMILIES[name]?.[0] ?? name]);
    this.family.show(family, families);
    this.severity.show(severity, Object.entries(SEVERITIES));
    this.origin.show(origin, Object.entries(ORIGINS));
    this.state.show(state, Object.entries(STATES).filter(([name]) => run !== null || name === "disabled"));
    this.clear.hidden = !this.#isFiltered();
    const [added, edited] = ["added", "edited"].map((word) => rules.filter((rule) => originOf(rule) === word).length);
    const off = rules.filter((rule) => !rule.enabled).length;
    const parts = [num === rules.length ? `${count(num)} rules` : `${count(num)} of ${count(rules.length)} rules`, added ? `${count(added)} added` : "", edited ? `${count(edited)} edited` : added ? "" : "as they came", off ? `${count(off)} disabled` : ""];
    put(this.note, parts.filter(Boolean).join(", "));
  }

  #showRun(run, standings, rules) {
    this.search.element.hidden = run !== null;
    const problem = run?.problem ?? standings?.problem ?? null;
    const isKnown = run !== null && problem === null;
    this.other.hidden = run === null;
    this.runLink.hidden = this.runProject.hidden = this.countRow.hidden = !isKnown;
    this.seen.className = problem === null ? "quiet" : "bad";
    if (run === null) return put(this.seen, "Find a run to see what each rule watched of it, how it stands, what it lacked, and when it was last judged.");
    if (problem !== null) return put(this.seen, problem);
    put(this.runLink, h("span", { class: "given" }, run.run));
    this.runLink.setAttribute("href", `#/run/${encodeURIComponent(this.choice.run)}`);
    put(this.runProject, h("span", { class: "given" }, run.project));
    for (const { state, num, button } of this.counts) {
      const found = state === "disabled" ? rules.filter((rule) => !rule.enabled).length : standings.rules.filter((one) => one.state === state).length;
      put(num, count(found));
      button.hidden = found === 0;
      button.setAttribute("aria-pressed", String(this.choice.state === state));
    }
    put(this.seen, standings.step === null ? "They have seen no frame of its current attempt." : `They have seen it up to step ${count(standings.step)}.`);
  }

  #card({ name, version, project, origin, enabled, definition, created_at, explained, standing, hasRun, editor }) {
    const { severity, title, advice, source, origin: thresholds, aliases = [], on } = definition;
    const isClock = on === "clock";
    const more = h(
      "details",
      { open: this.#open.has(name), ontoggle: (event) => (event.target.open ? this.#open.add(name) : this.#open.delete(name)) },
      h("summary", {}, "What to try, when it is over, and where all that comes from"),
      h(
        "dl",
        {},
        advice && entry("What to try", advice.split(/(\{\w+\})/).map((part, i) => (i % 2 ? h("code", { title: "a number that the alert shows here" }, part) : part))),
        source && entry("Source", source),
        explained ? [entry("Over when", termsOf(explained.clear, holdOf(explained.clear_hold, isClock), "that is no longer so"))] : null,
        explained?.only_while.length ? entry("Judged only while", termsOf(explained.only_while)) : null,
        explained && !isNone(explained.after) ? entry("Not judged", startOf(explained.after, isClock)) : null,
        thresholds && entry("Its thresholds", thresholds),
        aliases.length ? entry("Elsewhere called", aliases.join(", ")) : null,
        entry("Version", [`${version}, ${originOf({ origin, version })}, made `, time(created_at)]),
      ),
    );
    return h(
      "article",
      { class: `card rule-card ${enabled ? "" : "disabled"}`, "aria-label": name },
      h(
        "div",
        { class: "what" },
        h("header", {}, h("span", { class: `severity ${severity}` }, severity), h("h3", {}, title)),
        h("p", { class: "name" }, h("code", {}, name), h("span", { class: "quiet" }, `version ${version}`), origin === "edited" ? h("span", { class: "pill pending" }, project === null ? originOf({ origin, version }) : "of the project") : null, enabled ? null : h("span", { class: "pill" }, "disabled"), h("a", { class: "edit", href: editor, "aria-label": `Edit ${name}` }, "Edit")),
        explained ? h("p", { class: "watches" }, h("span", { class: "quiet" }, "watches "), explained.watches.map((metric) => h("span", { class: "tag given" }, metric))) : null,
        hasRun ? standingOf(standing, enabled, isClock) : null,
      ),
      explained
        ? h("div", { class: "terms" }, h("h4", {}, "fires when"), termsOf(explained.when, holdOf(explained.hold, isClock)))
        : h("p", { class: "terms quiet" }, "This version of tsemon cannot read what it waits for, and it looks at no run."),
      more,
    );
  }

  #isFiltered() {
    return ["q", "family", "severity", "origin", "state"].some((name) => this.choice[name] !== null);
  }

  #clear() {
    for (const name of ["q", "family", "severity", "origin", "state"]) this.choice[name] = null;
    this.field.value = "";
    this.#keepChoices();
    this.#show();
  }

  #set(name, value) {
    this.choice[name] = value;
    if (name === "run" && value === null && this.choice.state !== "disabled") this.choice.state = null;
    this.#keepChoices();
    if (name === "run" || name === "project") this.reload();
    else this.#show(); // all rules are there: nothing is asked for
  }

  #keepChoices() {
    const given = Object.entries(this.choice).filter(([, value]) => value !== null);
    keepAddress(`#/rules${given.length ? `?${new URLSearchParams(given)}` : ""}`);
  }
}

const entry = (name, value) => [h("dt", {}, name), h("dd", {}, value)];

/** What fires when a run has ended does so no more: it `stood`, as its alert did. */
function shownStandings(standings, run) {
  if (!standings?.rules || run.state === "running") return standings;
  return { ...standings, rules: standings.rules.map((one) => ({ ...one, state: one.state === "firing" ? "stood" : one.state })) };
}

/** How it stands on the run that is chosen, when it was last judged, and what it lacks. */
function standingOf(standing, enabled, isClock) {
  if (!enabled) return h("p", { class: "stands" }, h("span", { class: "pill" }, "disabled"), " looks at no run");
  if (standing === null) return h("p", { class: "stands quiet" }, "not in force on this run");
  const { state, judged_step, not_measured, waits_for } = standing;
  const judged = isClock ? "reads the clock, every 10 seconds" : judged_step === null ? "never judged" : `last judged at step ${count(judged_step)}`;
  const lacks = not_measured.length ? ["; the run has never had ", not_measured.flatMap((metric, i) => [i ? ", " : "", h("b", { class: "given" }, metric)])] : waits_for ? `; cannot fire yet, needs ${waits_for}` : state === "unknown" && judged_step === null && !isClock ? "; it never had all that it needs" : "";
  return h("p", { class: "stands" }, h("span", { class: `pill ${state}` }, wordsOf(state)), " ", judged, lacks);
}
