// One rule in an editor: the server checks each change, says the rule in words, and shows where it would have fired on a past run.

import { keepAddress } from "../base/address.js";
import { Refused, checkRule, disableRule, get, getLanguage, getSession, putRule, restoreRule } from "../base/api.js";
import { h, put } from "../base/dom.js";
import { count, time } from "../base/format.js";
import { ask } from "../parts/asking.js";
import { offersOf } from "../parts/completion.js";
import { LineField } from "../parts/line_field.js";
import { fill } from "../parts/pickers.js";
import { holdOf, isNone, originOf, startOf, termsOf } from "../parts/rule_words.js";
import { Trial } from "../parts/trial.js";

const SETTLES_MS = 200;
const REST_MS = 10 * 60_000;
/** Stands for the name that a new rule does not have yet, so that its line can be checked and tried. */
const NAMELESS = "new-rule";
const LINES = ["when", "clear", "only_while"];
const HOLDS = ["for", "clear_for", "after"];
const TEXTS = ["title", "advice", "source", "origin"];

export class RuleView {
  #rules = null;
  #rule = null;
  #versions = [];
  #other = null;
  #titleOfFields = MINE;
  #language = null;
  #session = null;
  #baseline = "";
  #hadLines = {};
  #controller = null;
  #timer = null;
  #shows = {};
  #offers = [];
  #touched = new Set();
  #isSaving = false;
  #needsName = false;

  constructor(main, name, query) {
    this.main = main;
    this.name = name;
    this.runId = query.get("run");
    this.project = query.get("project") || null;
  }

  /** Another run of the same rule. */
  moved(query) {
    const run = query.get("run");
    if (run !== null && run !== this.trial?.run?.run_id) this.trial?.choose(run);
  }

  get isDirty() {
    return this.root !== undefined && JSON.stringify(this.#definition()) !== this.#baseline;
  }

  forget() {
    this.#baseline = JSON.stringify(this.#definition());
  }

  async refresh(signal) {
    if (this.root?.isConnected) return REST_MS; // what somebody writes is not read again under their hands
    const [language, session] = await Promise.all([getLanguage(signal), getSession(signal)]);
    this.project ??= session.project;
    const known = await get("rules", { project: this.project }, signal);
    [this.#rules, this.#language, this.#session] = [known.rules, language, session];
    this.#rule = this.name === "" ? null : known.rules.find(({ name }) => name === this.name) ?? null;
    if (this.name !== "" && this.#rule === null) throw new Refused(404, `no rule is named '${this.name}'; the list of rules has those there are`);
    const definition = this.#rule?.definition ?? { name: "", when: "" };
    const lines = await linesOf(definition, signal);
    this.#versions = this.#rule === null ? [] : (await get(`rules/${encodeURIComponent(this.name)}`, { project: this.project }, signal)).versions;
    this.#offers = offersOf(language, null);
    this.#build();
    this.#fill(definition, lines);
    document.title = `${this.name || "New rule"} · tsemon`;
    this.#keepAddress();
    this.trial.choose(this.runId);
    this.#check();
    return REST_MS;
  }

  redraw() {
    this.trial?.redraw();
  }

  destroy() {
    clearTimeout(this.#timer);
    this.#controller?.abort();
    this.trial?.end();
    document.title = "tsemon";
  }

  // The form

  #build() {
    const changed = (key) => this.#changed(key);
    const line = (key, label, placeholder) => new LineField({ id: `rule-${key}`, label, placeholder, offers: () => this.#offers, onInput: () => changed(key) });
    this.lines = {
      when: line("when", "Fires when", "any(attention_entropy < 0.1)"),
      clear: line("clear", "Clears when", "the condition does not hold"),
      only_while: line("only_while", "Only while", "always"),
    };
    const number = (key, unit) => h("input", { type: "text", inputmode: "numeric", class: "num", id: `rule-${key}-${unit}`, "aria-label": `${LABELS[key]}: ${unit}`, autocomplete: "off", oninput: () => changed(key) });
    this.holds = Object.fromEntries(HOLDS.map((key) => [key, { samples: number(key, "samples"), steps: number(key, "steps") }]));
    this.nameField = h("input", { type: "text", id: "rule-name", autocomplete: "off", spellcheck: "false", placeholder: "my-rule", "aria-describedby": "rule-name-mistake", oninput: () => changed("name") });
    this.severity = h("select", { id: "rule-severity", onchange: () => changed("severity") });
    this.family = h("select", { id: "rule-family", onchange: () => changed("family") });
    this.texts = Object.fromEntries(TEXTS.map((key) => [key, this.#text(key)]));
    this.evidence = h("textarea", { id: "rule-evidence", rows: 2, spellcheck: "false", class: "code", placeholder: "loss_now: loss", oninput: () => changed("evidence") });
    this.fold = h(
      "details",
      { class: "more" },
      h("summary", {}, "When it clears, its guard, advice and evidence"),
      h("div", { class: "stack tight" },
        this.lines.clear.element, this.#hold("clear_for"), this.lines.only_while.element,
        this.#labelled("family", "Family", this.family), ...TEXTS.map((key) => this.#labelled(key, LABELS[key], this.texts[key])),
        this.#labelled("evidence", "Numbers that an alert shows, one in a line", this.evidence),
      ),
    );
    this.save = h("button", { type: "button", class: "chief", onclick: () => this.#save() }, "Save");
    this.undo = h("button", { type: "button", onclick: () => this.#discard() }, "Discard changes");
    this.disable = h("button", { type: "button", onclick: () => this.#askToDisable() }, "Disable");
    this.enable = h("button", { type: "button", onclick: () => this.#enable() }, "Enable");
    this.restore = h("button", { type: "button", onclick: () => this.#askToRestore() }, "Restore");
    this.newer = h("section", { class: "newer", role: "alert", hidden: true });
    this.outcome = h("p", { class: "outcome", role: "status" });
    this.general = h("p", { class: "mistake", role: "status" });
    this.#shows[""] = (mistake) => put(this.general, mistake === null ? "" : mistake.text);
    for (const key of LINES) this.#shows[key] = (mistake, checked) => this.lines[key].show(mistake, checked[key] ?? "");
    const mayChange = !this.#session.needs_token || (this.#session.scopes.includes("admin") && [null, this.project].includes(this.#session.project));
    const footer = mayChange
      ? h("div", { class: "stack tight" }, this.newer, this.#whom(), h("div", { class: "buttons" }, this.save, this.undo, this.disable, this.enable, this.restore), this.outcome)
      : h("p", { class: "quiet read-only" }, "Your token may not change rules: that needs the scope admin. You can still write and try here.");
    this.heading = h("h1");
    this.about = h("p", { class: "quiet" });
    const ofProject = this.project === null ? null : h("p", {}, "In project ", h("span", { class: "given" }, this.project));
    const rules = this.project === null ? "#/rules" : `#/rules?${new URLSearchParams({ project: this.project })}`;
    this.words = h("div", { class: "words" });
    this.notes = h("ul", { class: "quiet details" });
    this.trial = new Trial({ project: this.project, onRun: (run) => this.#withRun(run) });
    const form = h(
      "form",
      { class: "card stack", "aria-label": "Rule", onsubmit: (event) => event.preventDefault() },
      h("div", { class: "row" }, this.#labelled("name", "Name", this.nameField), this.#labelled("severity", "Severity", this.severity)),
      this.lines.when.element,
      h("div", { class: "row" }, this.#hold("for"), this.#hold("after")),
      h("div", { class: "said-in-words" }, this.words, this.notes),
      this.fold, this.general, footer,
    );
    this.root = h("div", { class: "stack rule-view" }, h("div", {}, h("a", { class: "back", href: rules }, "All rules"), this.heading, this.about, ofProject), h("div", { class: "sides" }, form, this.trial.element));
    this.main.replaceChildren(this.root);
  }

  /** For whom the rule is saved, where it is saved. */
  #whom() {
    const whom = this.project === null ? [h("b", {}, "all projects"), " without a version of their own"] : ["project ", h("b", { class: "given" }, this.project), " only"];
    return h("p", { class: "saves-for" }, "Saves for: ", whom);
  }

  #text(key) {
    const props = { id: `rule-${key}`, autocomplete: "off", oninput: () => this.#changed(key) };
    return key === "advice" ? h("textarea", { ...props, rows: 3 }) : h("input", { ...props, type: "text" });
  }

  /** A field with its label above it and its mistake below. */
  #labelled(key, label, field) {
    return h("div", { class: "labelled" }, h("label", { for: field.id }, label), field, this.#noteOf(key, [field]));
  }

  #hold(key) {
    const { samples, steps } = this.holds[key];
    return h("div", { class: "labelled hold", role: "group", "aria-label": LABELS[key] }, h("span", { class: "label" }, LABELS[key]), h("span", {}, samples, "samples", steps, "steps"), this.#noteOf(key, [samples, steps]));
  }

  #noteOf(key, fields) {
    const note = h("p", { class: "mistake given", id: `rule-${key}-mistake`, role: "status" });
    this.#shows[key] = (mistake) => {
      put(note, mistake === null ? "" : mistake.text);
      for (const field of fields) field.setAttribute("aria-invalid", String(mistake !== null));
    };
    return note;
  }

  /** Let the fields show a definition; `lines` are those of conditions that are trees. */
  #fill(definition, lines) {
    this.#hadLines = { ...lines };
    this.#write(definition, lines);
    const { default_hold: hold } = this.#language;
    this.#showHolds({ for: hold, clear_for: hold, after: { samples: 0, steps: 0 } });
    this.#touched = new Set(this.#rule === null ? [] : Object.keys(this.#shows));
    this.forget();
    this.#showState();
  }

  #write(definition, lines) {
    for (const key of LINES) this.lines[key].value = typeof definition[key] === "string" ? definition[key] : lines[key] ?? "";
    for (const key of HOLDS) for (const unit of ["samples", "steps"]) this.holds[key][unit].value = definition[key]?.[unit] ?? "";
    for (const key of TEXTS) this.texts[key].value = definition[key] ?? "";
    this.nameField.value = definition.name;
    fill(this.severity, definition.severity ?? "warning", this.#language.severities.map((one) => [one, one]));
    fill(this.family, definition.family ?? "custom", this.#language.families.map((one) => [one, one]));
    this.severity.value = definition.severity ?? "warning";
    this.family.value = definition.family ?? "custom";
    this.evidence.value = Object.entries(definition.evidence ?? {}).filter(([, value]) => typeof value !== "object").map(([name, value]) => `${name}: ${value}`).join("\n");
  }

  /** What the fields say; what they do not show stays as it was. */
  #definition() {
    const before = this.#rule?.definition ?? {};
    const after = { ...before, name: this.nameField.value.trim() };
    const set = (key, value) => {
      if (value === null) delete after[key];
      else after[key] = value;
    };
    for (const key of LINES) {
      const text = this.lines[key].value; // as it is, or the columns of mistakes would move
      const isTree = typeof before[key] === "object" && text === this.#hadLines[key];
      if (!isTree) set(key, text.trim() || key === "when" ? text : null);
    }
    for (const key of HOLDS) {
      const given = Object.entries(this.holds[key]).filter(([, field]) => field.value.trim() !== "");
      set(key, given.length ? Object.fromEntries(given.map(([unit, field]) => [unit, wholeOf(field.value.trim())])) : null);
    }
    for (const key of TEXTS) set(key, this.texts[key].value.trim() || null);
    for (const [key, otherwise] of [["severity", "warning"], ["family", "custom"]]) set(key, this[key].value === otherwise && !(key in before) ? null : this[key].value);
    const trees = Object.entries(before.evidence ?? {}).filter(([, value]) => typeof value === "object");
    const evidence = Object.fromEntries([...trees, ...numbersOf(this.evidence.value)]);
    set("evidence", Object.keys(evidence).length ? evidence : null);
    return after;
  }

  #withRun(run) {
    this.#offers = offersOf(this.#language, run);
    this.runId = run.run_id;
    this.#keepAddress();
  }

  /** Let the address say all that is chosen: whose rule it is, above all, or a reload would edit another one. */
  #keepAddress() {
    if (!this.root.isConnected) return; // it was left while the service answered
    const asked = Object.entries({ run: this.runId, project: this.project }).filter(([, value]) => value !== null);
    keepAddress(`#/rule${this.name && `/${encodeURIComponent(this.name)}`}${asked.length ? `?${new URLSearchParams(asked)}` : ""}`);
    this.key = `rule/${encodeURIComponent(this.name)}?project=${this.project ?? ""}`; // as app.js has it
  }

  // Checking

  #changed(key) {
    this.#touched.add(key);
    this.#say("quiet", "");
    this.#showState();
    this.trial.isStale = true;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#check(), SETTLES_MS);
  }

  /** Ask the server what it thinks of the rule; of several answers only the last one counts. */
  async #check() {
    this.#controller?.abort();
    const controller = new AbortController();
    this.#controller = controller;
    const [rule, texts] = [this.#definition(), Object.fromEntries(LINES.map((key) => [key, this.lines[key].value]))];
    try {
      const checked = await checkRule({ ...rule, name: rule.name || NAMELESS }, controller.signal);
      if (!controller.signal.aborted) this.#showChecked(checked, { ...rule, name: rule.name || NAMELESS }, texts);
    } catch (error) {
      if (!controller.signal.aborted) put(this.general, `The rule cannot be checked now: ${error.message}`);
    }
  }

  #showChecked(checked, rule, texts) {
    const byField = new Map(checked.mistakes.map((mistake) => [fieldOf(mistake, this.#shows), mistake]));
    for (const [key, show] of Object.entries(this.#shows)) {
      const mistake = byField.get(key) ?? null;
      const shown = mistake !== null && (this.#touched.has(key) || key === "") ? named(mistake, key) : null;
      if (key === "name") this.#showNameMistake(shown);
      else show(shown, texts);
    }
    if ([...byField.keys()].some((key) => IN_FOLD.has(key))) this.fold.open = true;
    this.words.classList.toggle("stale", checked.explained === null);
    if (checked.explained === null) return void (this.trial.isStale = true);
    this.#showWords(checked, rule.on === "clock");
    this.trial.want(rule);
  }

  #showWords({ explained, notes }, isClock) {
    this.#showHolds({ for: explained.hold, clear_for: explained.clear_hold, after: explained.after });
    const hold = holdOf(explained.hold, isClock);
    const start = isNone(explained.after) ? null : h("p", { class: "quiet" }, `not ${startOf(explained.after, isClock)}`);
    put(this.words, h("span", { class: "label" }, "In words"), termsOf(explained.when, hold), ...(start ? [start] : []));
    this.notes.replaceChildren(...notes.map((note) => h("li", { class: "given" }, note)));
  }

  /** What holds if a field is empty: what the line says, or the default. */
  #showHolds(holds) {
    for (const [key, hold] of Object.entries(holds)) for (const unit of ["samples", "steps"]) this.holds[key][unit].placeholder = hold[unit];
  }

  #showState() {
    const name = this.nameField.value.trim();
    const isOther = name !== this.name && this.#rules.some((rule) => rule.name === name);
    put(this.heading, this.#rule === null ? "New rule" : h("span", { class: "given" }, this.name));
    const was = this.#rule === null ? "" : `${this.#rule.project === null ? originOf(this.#rule) : "of the project"}, version ${count(this.#rule.version)}${this.#rule.enabled ? "" : ", disabled: saving enables it"}`;
    const becomes = isOther ? `Saving replaces the rule ${name}, which is there already.` : this.#rule !== null && name !== this.name && name ? `Saving adds the rule ${name}; ${this.name} stays as it is.` : "";
    put(this.about, [was, becomes].filter(Boolean).join(". "));
    this.save.disabled = this.#isSaving || !this.isDirty;
    this.undo.hidden = !this.isDirty;
    this.disable.hidden = !this.#rule?.enabled;
    this.enable.hidden = this.#rule?.enabled !== false;
    this.restore.hidden = !this.#canRestore;
    for (const button of [this.disable, this.enable, this.restore]) button.disabled = this.#isSaving;
  }

  // Saving

  async #save() {
    for (const line of Object.values(this.lines)) if (line.value !== line.value.trim()) line.value = line.value.trim();
    const rule = this.#definition();
    if (rule.name === "") return this.#askForName();
    this.#touched = new Set(Object.keys(this.#shows));
    await this.#change("saved", async () => {
      if (await this.#isOutdated(rule.name)) return;
      this.#saved(rule, await putRule(rule, this.project));
    });
  }

  /** Change what is in force; one change at a time. */
  async #change(done, make) {
    this.#isSaving = true;
    this.#showState();
    try {
      await make();
    } catch (error) {
      this.#say("bad", error instanceof Refused ? `Not ${done}. ` : `Not ${done}: ${error.message}`, ...(error instanceof Refused ? [h("span", { class: "given refusal" }, error.message)] : []));
      this.#check();
    } finally {
      this.#isSaving = false;
      this.#showState();
    }
  }

  #say(kind, ...content) {
    this.outcome.className = `outcome ${kind}`;
    put(this.outcome, ...content);
  }

  #askForName() {
    this.#needsName = true;
    this.#showNameMistake(null);
    this.#say("bad", "Not saved: the rule has no name yet.");
    this.nameField.focus();
  }

  /** A rule is checked also before it has a name, so a check does not take back that it needs one. */
  #showNameMistake(mistake) {
    const isMissing = this.#needsName && this.nameField.value.trim() === "";
    this.#shows.name(isMissing ? { text: "Give the rule a name, such as loss-is-high: small letters, digits and hyphens." } : mistake);
  }

  #saved(rule, { versions }) {
    const [version] = versions;
    this.#isNow(versions);
    this.#hadLines = Object.fromEntries(LINES.filter((key) => typeof version.definition[key] === "object").map((key) => [key, this.lines[key].value.trim()]));
    this.#baseline = JSON.stringify(rule);
    this.#showOther();
    this.#say("good", `Saved as version ${count(version.version)}. It counts from the next frame on.`);
  }

  /** These are the versions of the rule now, of which the first is active. */
  #isNow(versions) {
    [this.#rule] = this.#versions = versions;
    this.name = this.#rule.name;
    this.#rules = [...this.#rules.filter(({ name }) => name !== this.name), this.#rule];
    document.title = `${this.name} · tsemon`;
    this.#keepAddress();
  }

  // What others saved meanwhile

  /** Whether the rule of this name is not the one that was there when one began to write. Then both texts are at hand, and saving again is a decision. */
  async #isOutdated(name) {
    const { rules } = await get("rules", { project: this.project });
    const [before, now] = [this.#rules, rules].map((some) => some.find((rule) => rule.name === name));
    if (now === undefined || now.version === before?.version) return false;
    const [lines, { versions }] = await Promise.all([linesOf(now.definition), get(`rules/${encodeURIComponent(name)}`, { project: this.project })]);
    const mine = this.#written();
    this.#isNow(versions);
    this.#fill(now.definition, lines);
    this.#other = { ...this.#written(), title: `Version ${count(now.version)}` };
    this.#titleOfFields = MINE;
    this.#write(mine.definition, mine.lines);
    const since = before === undefined ? "Another person added a rule of this name meanwhile, " : `You began with version ${count(before.version)}. Another person saved a newer one meanwhile, `;
    this.#showOther([h("b", {}, "Not saved yet. "), since, time(now.created_at), ". Save again to replace it; it stays in the history of the rule."]);
    return true;
  }

  /** What is in the fields. */
  #written() {
    return { definition: this.#definition(), lines: Object.fromEntries(LINES.map((key) => [key, this.lines[key].value])) };
  }

  /** The text that is not in the fields, as far as it differs, and the way to have it there. */
  #showOther(said = []) {
    this.newer.hidden = this.#other === null;
    if (this.#other === null) return;
    const { title, definition } = this.#other;
    const mine = this.#definition();
    const keys = [...new Set([...Object.keys(definition), ...Object.keys(mine)])].filter((key) => JSON.stringify(definition[key]) !== JSON.stringify(mine[key]));
    const entries = keys.map((key) => [h("dt", {}, key), h("dd", {}, h("code", { class: "given" }, shownOf(definition[key])))]);
    const button = h("button", { type: "button", onclick: () => this.#exchange() }, `Put ${title === MINE ? "my text" : title.toLowerCase()} into the fields`);
    put(this.newer, h("p", {}, said), h("p", {}, keys.length ? `${title} says:` : `${title} says the same.`), h("dl", {}, entries), h("div", { class: "buttons" }, button));
  }

  #exchange() {
    const [mine, { title, definition, lines }] = [this.#written(), this.#other];
    this.#write(definition, lines);
    this.#other = { ...mine, title: this.#titleOfFields };
    this.#titleOfFields = title;
    this.#showOther();
    this.#changed("when");
  }

  // In force or not

  get #canRestore() {
    if (this.#rule === null) return false;
    const known = this.#versions.some(({ origin, project }) => (this.project === null ? origin === "built-in" : project === null));
    return known && (this.project === null ? this.#rule.origin !== "built-in" : this.#rule.project !== null);
  }

  #askToDisable() {
    const where = this.project === null ? "in all projects without a version of their own" : `in project ${this.project}`;
    const text = [`It is not evaluated any more ${where}. Its firing alerts there are resolved with “rule disabled”, and pending ones are withdrawn.`, "Its versions stay, and Enable puts it in force again.", this.isDirty && "Your unsaved changes stay in the fields."];
    const disable = async () => {
      this.#isNow((await disableRule(this.name, this.project)).versions);
      this.#say("good", "Disabled. Its alerts are resolved.");
    };
    ask({ title: `Disable ${this.name}?`, text, yes: "Disable", no: "Cancel", onYes: () => this.#change("disabled", disable) });
  }

  /** Put the version that is disabled in force, and not what the fields say. */
  #enable() {
    this.#change("enabled", async () => {
      this.#isNow((await putRule(this.#rule.definition, this.project)).versions);
      this.#say("good", "Enabled. It counts from the next frame on.");
    });
  }

  #askToRestore() {
    const servers = this.#versions.find(({ project }) => project === null);
    const counts = this.project === null ? "The rule as it came with tsemon counts again." : `The server's version counts again in project ${this.project}.`;
    const isOff = this.project !== null && !servers.enabled && "It is disabled there, so the firing alerts of the rule are resolved with “rule disabled”.";
    const text = [counts, isOff, "The present version stays in the history of the rule.", this.isDirty && "Your unsaved changes are lost."];
    const restore = async () => {
      this.#isNow((await restoreRule(this.name, this.project)).versions);
      this.#fill(this.#rule.definition, await linesOf(this.#rule.definition));
      this.#check();
      this.#say("good", `${this.project === null ? "Restored" : "The server's version counts again"}: version ${count(this.#rule.version)}.`);
    };
    ask({ title: `Restore ${this.name}?`, text, yes: "Restore", no: "Cancel", onYes: () => this.#change("restored", restore) });
  }

  #discard() {
    const definition = this.#rule?.definition ?? { name: "", when: "" };
    this.#fill(definition, this.#hadLines);
    this.#say("quiet", "");
    this.#check();
  }
}

const MINE = "Your text";

/** The conditions that a definition has as trees, as lines. */
async function linesOf(definition, signal) {
  return LINES.some((key) => typeof definition[key] === "object") ? (await checkRule(definition, signal)).lines : {};
}

const shownOf = (value) => (value === undefined ? "(not given)" : typeof value === "string" ? value : JSON.stringify(value));

const LABELS = { for: "For", clear_for: "Clear for", after: "After", title: "Title", advice: "Advice", source: "Source of the advice", origin: "Reason for the thresholds" };
const IN_FOLD = new Set(["clear", "clear_for", "only_while", "family", "evidence", ...TEXTS]);

/** The field that a mistake is shown at: that of its key, else below all. */
function fieldOf({ field }, shows) {
  const [key] = field.split(/[.[]/);
  return Object.hasOwn(shows, key) ? key : "";
}

/** A mistake within a key says where in it. */
const named = (mistake, key) => (mistake.field === key || mistake.column === null && !mistake.field.includes(".") ? mistake : { ...mistake, text: `${mistake.field.slice(key.length + 1)}: ${mistake.text}` });

const wholeOf = (text) => (/^-?\d{1,15}$/.test(text) ? Number(text) : text);

/** Lines such as `loss_now: loss`. */
const numbersOf = (text) =>
  text.split("\n").filter((line) => line.trim() !== "").map((line) => {
    const [name, ...value] = line.split(":");
    return [name.trim(), value.join(":").trim()];
  });
