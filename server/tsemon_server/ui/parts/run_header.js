// Who a run is: its name and state, a few numbers, and what is closed until it is asked for.

import { h, keyed } from "../base/dom.js";
import { count, number, statePill, time } from "../base/format.js";

export class RunHeader {
  #isOpen = new Set();

  /** `onAttempt(number or null)` is told which attempt is to be shown: null is the run as it stands. */
  constructor({ onAttempt }) {
    this.onAttempt = onAttempt;
    this.title = h("div");
    this.facts = h("dl", { class: "facts" });
    this.folds = h("div", { class: "folds" });
    this.element = h("section", { class: "card run", "aria-label": "The run" }, this.title, this.facts, this.folds);
  }

  /**
   * `attempt` is the one that is shown, null for the run as it stands. What did not change is left alone: with each frame that
   * comes the facts are others, and what somebody reads, selects or scrolls below them is not.
   */
  show(run, attempt) {
    const { project, tags, config, attempts, not_measured } = run;
    keyed(this.title, [{ name: run.run, state: run.condition ?? run.state, project, tags }], () => "title", titleOf);
    keyed(this.facts, factsOf(run), ({ name }) => name, factOf);
    const numLive = attempts.filter((one) => one.is_live).length;
    const live = numLive > 1 ? `, ${numLive} of them live` : "";
    const folds = [
      attempts.length > 1 && { key: "attempts", title: `Attempts (${attempts.length}${live})`, attempts },
      Object.keys(not_measured).length > 0 && { key: "not measured", title: `Not measured (${Object.keys(not_measured).length})`, not_measured },
      Object.keys(config).length > 0 && { key: "config", title: "Configuration", config },
    ];
    keyed(this.folds, folds.filter(Boolean), ({ key }) => key, (fold) => this.#fold(fold));
    for (const button of this.folds.querySelectorAll("[data-attempt]")) button.setAttribute("aria-pressed", String(button.dataset.attempt === String(attempt ?? "")));
  }

  #fold(fold) {
    const { key, title } = fold;
    const make = { attempts: () => this.#attempts(fold), "not measured": () => notMeasured(fold), config: () => h("pre", { tabindex: "0" }, JSON.stringify(fold.config, null, 2)) };
    const details = h("details", { open: this.#isOpen.has(key), ontoggle: () => (details.open ? this.#isOpen.add(key) : this.#isOpen.delete(key)) }, h("summary", {}, title), make[key]());
    return details;
  }

  #attempts({ attempts }) {
    const choose = (attempt, text) => h("button", { type: "button", "data-attempt": String(attempt ?? ""), onclick: () => this.onAttempt(attempt) }, text);
    const row = ({ attempt, resume_step, started_at, state, is_live }) => {
      const end = takenBackFrom({ attempts }, attempt);
      return h("tr", {},
        h("th", { scope: "row" }, `attempt ${count(attempt)}`),
        h("td", { "data-label": "began" }, time(started_at)),
        h("td", { "data-label": "from step" }, count(resume_step ?? 0)),
        h("td", { "data-label": "process" }, is_live ? "live" : state === "running" ? "silent" : state),
        h("td", { "data-label": "since then" }, end === Infinity ? "stands" : end === 0 ? "taken back whole" : `taken back from step ${count(end)} on`),
        h("td", {}, choose(attempt, "Show as it was")),
      );
    };
    const head = h("thead", {}, h("tr", {}, ["", "began", "from step", "process", "since then", ""].map((name) => h("th", { scope: "col" }, name))));
    return [
      h("p", { class: "quiet" }, "Each start of the training is an attempt. One that resumes from an earlier step takes back what was recorded from there on; nothing is deleted."),
      h("div", { class: "wide" }, h("table", { class: "attempts" }, head, h("tbody", {}, attempts.map(row)))),
      h("div", { class: "buttons" }, choose(null, "Show the run as it stands")),
    ];
  }
}

const titleOf = ({ name, state, project, tags }) =>
  h("div", { class: "title" }, h("h1", { class: "given" }, name), statePill(state), h("span", { class: "quiet given" }, project), tags.map((tag) => h("span", { class: "tag given" }, tag)));

function factsOf(run) {
  const { loss, overhead_ratio: overhead } = run.latest?.scalars ?? {};
  const start = run.attempts.find((one) => one.attempt === run.attempt)?.resume_step ?? null;
  return [
    { name: "step", value: run.last_step === null ? "no frames" : count(run.last_step) },
    { name: "loss", value: loss === undefined ? "–" : number(loss), isBad: loss === null },
    { name: "attempt", value: start === null ? count(run.attempt) : `${count(run.attempt)}, from step ${count(start)}` },
    { name: "blocks", value: count(run.num_blocks), of: run.stacks.length > 1 && run.stacks.map(({ name, blocks }) => `${name} ${count(blocks)}`).join(", ") },
    ...(typeof overhead === "number" ? [{ name: "own cost", value: `${Number((100 * overhead).toPrecision(2))} %`, of: "of the training's time", meaning: "The share of the training's wall time that tsemon itself took, as it measured in the training process." }] : []),
    { name: "last seen", at: run.updated_at },
  ];
}

const factOf = ({ name, value, isBad, of, at, meaning }) =>
  h("div", { title: meaning }, h("dt", {}, name), h("dd", {}, at ? time(at) : isBad ? h("span", { class: "bad" }, value) : value, of && h("small", {}, of)));

/** The first step of an attempt that a later one hides; Infinity where none does. */
export function takenBackFrom(run, attempt) {
  const later = run.attempts.filter((one) => one.attempt > attempt).map((one) => one.resume_step ?? 0);
  return Math.min(Infinity, ...later);
}

/** By reason: many metrics are missing for the same one. */
function notMeasured(run) {
  const reasons = Object.groupBy(Object.keys(run.not_measured).sort(), (name) => run.not_measured[name]);
  return h("dl", { class: "reasons" }, Object.entries(reasons).map(([reason, names]) => [h("dt", { class: "given" }, names.join(", ")), h("dd", { class: "given" }, reason)]));
}
