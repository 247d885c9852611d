// The start page: all runs, a page at a time, as the address filters and orders them; and how to attach where there is none yet.

import { keepAddress } from "../base/address.js";
import { get, getPage } from "../base/api.js";
import { h, put } from "../base/dom.js";
import { count } from "../base/format.js";
import { worstFirst } from "../parts/incident_cards.js";
import { RunRow, boneRow } from "../parts/run_row.js";

const PAGE_SIZE = 50;
const BUSY_MS = 2000;
const IDLE_MS = 10_000;
const TYPING_MS = 200;
const LONGEST_SEARCH = 200;
const MOST_TAGS = 20;
const MOST_COMPARED = 20;
const MOST_LISTENED = 100; // that the service follows for one listener
const NUM_BONES = 8;
const SPARK_POINTS = 40;
const TAGS_MS = 60_000;
const COUNTED = 10_000;
const MOST_INCIDENTS = 1000;
const CONDITIONS = ["running", "silent", "stuck", "finished", "failed"];
const ORDERS = {
  live: "live ones first",
  "-updated": "last seen first",
  updated: "last seen last",
  "-created": "newest first",
  created: "oldest first",
  name: "name, A to Z",
  "-name": "name, Z to A",
  "-step": "most steps first",
  step: "fewest steps first",
  loss: "lowest loss first",
  "-loss": "highest loss first",
  "-alerts": "most alerts first",
  alerts: "fewest alerts first",
};
const USUAL_ORDER = "live"; // runs that train keep their places in it, on all pages
/** The heading of each column, and by what it orders. */
const COLUMNS = [
  ["", null],
  ["run", "name"],
  ["condition", null],
  ["step", "-step"],
  ["loss", "loss"],
  ["worst layer", null, "At the newest step: a layer with values that are not finite, else the one that is nearest to a threshold of a built-in rule"],
  ["last seen", "-updated"],
  ["incident", "-alerts", "The open incident of the run; without one, its open alerts. Sorted by the number of open alerts."],
];

/** What the address says. `at` is how many runs come before this page, `chosen` are ids of runs to compare. */
function choicesOf(query) {
  const order = query.get("order");
  return {
    q: (query.get("q") ?? "").slice(0, LONGEST_SEARCH),
    condition: CONDITIONS.includes(query.get("condition")) ? query.get("condition") : null,
    project: query.get("project"),
    tags: [...new Set(query.getAll("tag"))].slice(0, MOST_TAGS),
    order: Object.hasOwn(ORDERS, order ?? "") ? order : USUAL_ORDER,
    cursor: query.get("cursor") || null,
    at: Math.max(0, Number.parseInt(query.get("at"), 10) || 0),
    chosen: [...new Set(query.getAll("run"))],
  };
}

function addressOf({ q, condition, project, tags, order, cursor, at, chosen }) {
  const given = { q, condition, project, order: order === USUAL_ORDER ? null : order, cursor, at: cursor ? String(at) : null };
  const query = [...Object.entries(given).filter(([, value]) => value), ...tags.map((tag) => ["tag", tag]), ...chosen.map((id) => ["run", id])];
  return query.length ? `#/?${new URLSearchParams(query)}` : "#/";
}

const isNarrowed = ({ q, condition, project, tags }) => Boolean(q || condition || project || tags.length);

export class FleetView {
  keys = [
    ["/", "search"],
    ["j k ↓ ↑", "next run, run before"],
    ["Enter", "open the run"],
    ["x", "choose the run"],
    ["c", "compare the chosen runs"],
    ["n p", "next page, page before"],
    ["Esc", "leave the search"],
  ];

  refreshMs = IDLE_MS; // whoever listens to all is not told of deleted runs, and to these, not of new ones

  #choices;
  #answer = null; // the list as it was last read
  #listedAt = 0;
  #listIsOld = true;
  #heard = false; // whether the next round is only for what a run has sent since
  #runs = [];
  #rows = new Map(); // by id, as they are shown
  #glances = new Map(); // by id: {stamp, glance}
  #incidents = new Map(); // by id of the run: its incidents that are open or lasted until its end, the worst first
  #arrived = new Map(); // runs that changed, until they are drawn
  #sinceAsked = new Map(); // the same, since the list was last asked for
  #known = new Set(); // ids that were there already
  #tagsAt = -Infinity;
  #before = []; // the addresses of the pages that led to this one
  #typing = null;

  constructor(main, query) {
    this.main = main;
    this.#choices = choicesOf(query);
    this.#build();
    this.#showChoices();
  }

  destroy() {
    clearTimeout(this.#typing);
  }

  redraw() {} // the style sheet does it

  /** A link to this view was followed: another page of the list, or other choices. */
  moved(query) {
    const from = addressOf(this.#choices);
    this.#choices = choicesOf(query);
    if (!this.#choices.cursor) this.#before = [];
    else if (this.#before.at(-1) === addressOf(this.#choices)) this.#before.pop();
    else this.#before.push(from);
    this.#listIsOld = true;
    this.#showChoices();
    window.scrollTo(0, 0);
  }

  /** All runs while they are few, else those that are shown; the same ones in another order are no reason to listen anew. */
  get watched() {
    return this.#hearsAll() ? null : this.#runs.map((run) => run.run_id).sort();
  }

  #hearsAll() {
    return !isNarrowed(this.#choices) && !this.#choices.cursor && (this.#answer?.total ?? 0) <= MOST_LISTENED;
  }

  onEvent({ type, data }) {
    const id = data.run_id;
    const isShown = this.#rows.has(id);
    if (type === "run" && isShown) {
      this.#sinceAsked.set(id, data);
      if (this.#arrived.size === 0) requestAnimationFrame(() => this.#drawArrived());
      this.#arrived.set(id, data);
      this.#listIsOld ||= this.#runs.find((run) => run.run_id === id)?.condition !== data.condition && (this.#choices.condition !== null || this.#choices.order === USUAL_ORDER);
      this.#heard = true;
      return this.#listIsOld || this.#isUnseen(data);
    }
    const isOther = isShown || (type === "run" && !this.#known.has(id));
    this.#known.add(id);
    this.#listIsOld ||= isOther;
    return isOther;
  }

  #drawArrived() {
    this.#runs = this.#runs.map((run) => this.#arrived.get(run.run_id) ?? run);
    for (const run of this.#arrived.values()) this.#show(run);
    this.#arrived.clear();
  }

  async refresh(signal) {
    // A round always asks for something, or it would not notice that the service is away.
    const isListEnough = this.#heard && !this.#listIsOld && performance.now() - this.#listedAt < IDLE_MS && this.#runs.some((run) => this.#isUnseen(run));
    this.#heard = false;
    const tags = this.#readTags(signal);
    tags.catch(() => null); // told below, unless the list has failed before
    if (!isListEnough) await this.#list(signal);
    await Promise.all([this.#glance(signal), tags]);
    return this.#runs.length === 0 || this.#runs.some((run) => run.state === "running") ? BUSY_MS : IDLE_MS;
  }

  async #list(signal) {
    const { q, condition, project, tags, order, cursor } = this.#choices;
    this.#sinceAsked.clear();
    this.#listIsOld = false; // what is told while the answer is on its way makes it old again
    const wanted = { q: q || null, condition, project, tag: tags, order, cursor, limit: PAGE_SIZE };
    const asked = getPage("runs", wanted, signal, () => this.#begin());
    const incidents = (which) => get("incidents", { ...which, project, limit: MOST_INCIDENTS }, signal);
    const [answer, ...pages] = await Promise.all([asked, incidents({ state: "open" }), incidents({ at_end: true })]).catch((error) => {
      this.#listIsOld = true;
      throw error;
    });
    this.#answer = answer;
    const lasting = pages.flatMap((page) => page.incidents);
    this.#incidents = new Map([...Map.groupBy(lasting, (one) => one.run_id)].map(([id, those]) => [id, worstFirst(those)]));
    this.#listedAt = performance.now();
    this.#runs = answer.runs.map((run) => this.#sinceAsked.get(run.run_id) ?? run);
    for (const { run_id } of this.#runs) this.#known.add(run_id);
    this.#showRuns();
  }

  /** Go back to the first page. */
  #begin() {
    this.#before = [];
    this.#setChoices({ cursor: null, at: 0 });
  }

  async #readTags(signal) {
    if (performance.now() - this.#tagsAt < TAGS_MS) return;
    const { tags } = await get("tags", {}, signal);
    this.#tagsAt = performance.now();
    this.#showTags(tags);
  }

  /** The newest losses and the worst layer, of those runs alone that have sent something since. */
  async #glance(signal) {
    const old = this.#runs.filter((run) => this.#isUnseen(run));
    if (old.length === 0) return;
    const { glances } = await get("glances", { run: old.map((run) => run.run_id), points: SPARK_POINTS }, signal);
    const found = new Map(glances.map((glance) => [glance.run_id, glance]));
    for (const run of old) {
      const glance = found.get(run.run_id) ?? null;
      this.#glances.set(run.run_id, { stamp: stampOf(run), glance });
      this.#show(run);
    }
  }

  /** Whether it has sent frames since it was last looked at. */
  #isUnseen(run) {
    return run.num_frames > 0 && this.#glances.get(run.run_id)?.stamp !== stampOf(run);
  }

  // ---- what is shown

  #build() {
    this.total = h("span", { class: "quiet total" });
    this.search = h("input", { type: "search", maxlength: LONGEST_SEARCH, "aria-label": "Search runs, projects and tags", placeholder: "Search runs, projects, tags", autocomplete: "off", spellcheck: "false", "aria-keyshortcuts": "/", oninput: () => this.#type(), onkeydown: (event) => this.#leaveSearch(event) });
    this.order = h("select", { "aria-label": "Order", onchange: () => this.#choose({ order: this.order.value }) }, Object.entries(ORDERS).map(([value, text]) => h("option", { value }, text)));
    this.conditions = [null, ...CONDITIONS].map((condition) => h("button", { type: "button", "data-condition": condition ?? "", onclick: () => this.#choose({ condition }) }, condition ?? "all"));
    this.tags = h("select", { "aria-label": "Only runs with the tag", onchange: () => this.#addTag(this.tags.value) });
    this.narrowing = h("ul", { class: "narrowing", "aria-label": "Filters" });
    this.tools = h(
      "section",
      { class: "fleet-tools", role: "search" },
      h("div", { class: "line" }, this.search, this.order),
      h("div", { class: "line" }, h("div", { class: "choice", role: "group", "aria-label": "Condition" }, this.conditions), this.tags, this.narrowing),
    );
    this.headings = COLUMNS.map(([name, order, title], i) =>
      h("th", { scope: "col", class: `c${i}`, title }, order ? h("button", { type: "button", onclick: () => this.#orderBy(order) }, name) : name || h("span", { class: "unseen" }, "chosen")),
    );
    this.body = h("tbody", { "aria-busy": "true" }, Array.from({ length: NUM_BONES }, boneRow));
    // Whatever can be clicked is made once: a round must not take it from under a pointer, or the focus from it.
    this.nothingText = h("p");
    this.nothing = h("div", { class: "nothing", hidden: true }, this.nothingText, h("button", { type: "button", onclick: () => this.#clear() }, "Show all runs"));
    this.previousLink = h("a", { rel: "prev" });
    this.nextLink = h("a", { rel: "next" }, "Next →");
    this.place = h("span", { class: "quiet" });
    this.pager = h("nav", { class: "pager", "aria-label": "Pages", hidden: true }, this.previousLink, this.place, this.nextLink);
    this.card = h("section", { class: "card flush" }, h("table", { class: "runs" }, h("thead", {}, h("tr", {}, this.headings)), this.body), this.nothing);
    this.bar = h("section", { class: "card chosen", "aria-label": "Chosen runs", hidden: true });
    this.list = h("div", { class: "stack fleet" }, h("div", { class: "title" }, h("h1", {}, "Runs"), this.total), this.tools, this.card, this.pager, this.bar);
    this.none = noRuns();
    this.none.hidden = true;
    this.main.replaceChildren(this.list, this.none);
    this.#showTags([]);
  }

  #showChoices() {
    const { q, condition, project, tags, order, chosen } = this.#choices;
    if (this.search.value !== q && document.activeElement !== this.search) this.search.value = q;
    this.order.value = order;
    for (const button of this.conditions) button.setAttribute("aria-pressed", String(button.dataset.condition === (condition ?? "")));
    for (const [i, [, by]] of COLUMNS.entries()) {
      const isIt = by !== null && by.replace("-", "") === order.replace("-", "");
      if (isIt) this.headings[i].setAttribute("aria-sort", order.startsWith("-") ? "descending" : "ascending");
      else this.headings[i].removeAttribute("aria-sort");
    }
    const drop = (text, change) => h("li", {}, h("button", { type: "button", "aria-label": `Without ${text}`, onclick: () => this.#choose(change) }, h("span", { class: "given" }, text), " ×"));
    this.narrowing.replaceChildren(
      ...(project ? [drop(`project ${project}`, { project: null })] : []),
      ...tags.map((tag) => drop(`tag ${tag}`, { tags: tags.filter((one) => one !== tag) })),
      ...(isNarrowed(this.#choices) ? [h("li", {}, h("button", { type: "button", class: "plain", onclick: () => this.#clear() }, "Clear all"))] : []),
    );
    this.#showChosen(chosen);
  }

  #showTags(tags) {
    const shown = JSON.stringify(tags);
    if (this.tags.shown === shown) return;
    this.tags.shown = shown;
    this.tags.replaceChildren(h("option", { value: "", disabled: true, selected: true }, "tag …"), ...tags.map(({ tag, runs }) => h("option", { value: tag }, `${tag} (${count(runs)})`)));
    this.tags.disabled = tags.length === 0;
  }

  #showRuns() {
    const { total } = this.#answer;
    const hasNone = this.#runs.length === 0;
    const isNew = hasNone && !isNarrowed(this.#choices) && !this.#choices.cursor;
    this.none.hidden = !isNew;
    this.list.hidden = isNew;
    put(this.total, totalOf(total));
    this.body.removeAttribute("aria-busy");
    this.#showRows();
    this.nothing.hidden = !hasNone;
    put(this.nothingText, this.#choices.cursor ? "No more runs on this page." : "No run fits these choices.");
    this.#showPager();
  }

  /** Rows stay the elements that they are, in the new order; the one in focus keeps it. */
  #showRows() {
    const before = this.#rows;
    this.#rows = new Map(this.#runs.map((run) => [run.run_id, before.get(run.run_id) ?? this.#makeRow(run)]));
    this.#glances = new Map([...this.#glances].filter(([id]) => this.#rows.has(id)));
    for (const run of this.#runs) this.#show(run);
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    put(this.body, ...[...this.#rows.values()].map((row) => row.element));
    if (focused?.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
  }

  #show(run) {
    this.#rows.get(run.run_id)?.show(run, this.#glances.get(run.run_id)?.glance, this.#incidents.get(run.run_id) ?? []);
  }

  #makeRow(run) {
    const row = new RunRow(run, {
      onChoose: (isChosen) => this.#setChosen(run.run_id, isChosen),
      onProject: () => this.#choose({ project: run.project }),
      onTag: (tag) => this.#addTag(tag),
    });
    row.isChosen = this.#choices.chosen.includes(run.run_id);
    return row;
  }

  #showPager() {
    const { cursor, at } = this.#choices;
    const { next_cursor: next, total } = this.#answer;
    const first = this.#runs.length ? at + 1 : at;
    this.previousPage = cursor ? (this.#before.at(-1) ?? addressOf({ ...this.#choices, cursor: null })) : null;
    this.nextPage = next ? addressOf({ ...this.#choices, cursor: next, at: at + this.#runs.length }) : null;
    this.pager.hidden = !cursor && !next;
    lead(this.previousLink, this.previousPage);
    put(this.previousLink, this.#before.length ? "← Previous" : "← First page");
    put(this.place, `${count(first)} to ${count(at + this.#runs.length)} of ${totalOf(total)}`);
    lead(this.nextLink, this.nextPage);
  }

  #showChosen(chosen) {
    for (const [id, row] of this.#rows) row.isChosen = chosen.includes(id);
    this.bar.hidden = chosen.length === 0;
    const query = new URLSearchParams(chosen.map((id) => ["run", id]));
    this.comparison = chosen.length > 1 && chosen.length <= MOST_COMPARED ? `#/compare?${query}` : null;
    const hint = chosen.length === 1 ? "choose another to compare" : `at most ${MOST_COMPARED} can be compared`;
    this.bar.replaceChildren(
      h("b", {}, `${chosen.length} chosen`),
      this.comparison ? h("a", { class: "button", href: this.comparison }, "Compare") : h("span", { class: "quiet" }, hint),
      h("button", { type: "button", onclick: () => this.#setChoices({ chosen: [] }) }, "Choose none"),
    );
  }

  // ---- choices

  /** Take a choice that makes it another list, from its first page on; what was typed just now is one, too. */
  #choose(change) {
    clearTimeout(this.#typing);
    this.#before = [];
    this.#setChoices({ q: this.search.value.trim().slice(0, LONGEST_SEARCH), ...change, cursor: null, at: 0 });
    this.body.setAttribute("aria-busy", "true");
    this.#listIsOld = true;
    this.reload();
  }

  /** No entry in the history for each click, but the address can be shared. */
  #setChoices(change) {
    this.#choices = { ...this.#choices, ...change };
    keepAddress(addressOf(this.#choices));
    this.#showChoices();
    if (this.#answer) this.#showPager();
  }

  #addTag(tag) {
    this.tags.value = ""; // it goes on to offer others
    this.#choose({ tags: [...new Set([...this.#choices.tags, tag])].slice(0, MOST_TAGS) });
  }

  #clear() {
    this.search.value = "";
    this.#choose({ q: "", condition: null, project: null, tags: [] });
  }

  #setChosen(id, isChosen) {
    const others = this.#choices.chosen.filter((one) => one !== id);
    this.#setChoices({ chosen: isChosen ? [...others, id] : others });
  }

  /** The heading's own direction first, the other one when it is asked again. */
  #orderBy(order) {
    const turned = order.startsWith("-") ? order.slice(1) : `-${order}`;
    this.#choose({ order: this.#choices.order === order ? turned : order });
  }

  #type() {
    clearTimeout(this.#typing);
    this.#typing = setTimeout(() => this.#choose({}), TYPING_MS);
  }

  // ---- keys

  onKey(event) {
    const { key } = event;
    const focused = document.activeElement;
    const isInList = focused === document.body || focused === this.main || this.body.contains(focused);
    if (key === "/") this.search.select();
    else if (key === "j" || (key === "ArrowDown" && isInList)) this.#step(1);
    else if (key === "k" || (key === "ArrowUp" && isInList)) this.#step(-1);
    else if (key === "x") this.#rowInFocus()?.toggle();
    else if (key === "c" && this.comparison) location.hash = this.comparison;
    else if (key === "n" && this.nextPage) location.hash = this.nextPage;
    else if (key === "p" && this.previousPage) location.hash = this.previousPage;
    else return false;
    return true;
  }

  #rowInFocus() {
    return [...this.#rows.values()].find((row) => row.element.contains(document.activeElement));
  }

  #step(by) {
    const rows = [...this.#rows.values()];
    const at = rows.indexOf(this.#rowInFocus());
    const to = at < 0 ? 0 : Math.min(Math.max(at + by, 0), rows.length - 1);
    rows[to]?.link.focus();
  }

  #leaveSearch(event) {
    if (!["Escape", "ArrowDown", "Enter"].includes(event.key)) return;
    event.preventDefault();
    this.search.blur();
    if (event.key !== "Escape") this.#step(1);
  }
}

/** What a run has sent, as one word: as long as it stays, so does what is seen of it at a glance. */
const stampOf = (run) => `${run.num_frames} ${run.attempt}`;

/** Let a link lead there; to nowhere it is not shown. */
function lead(link, address) {
  link.hidden = address === null;
  if (address !== null && link.getAttribute("href") !== address) link.setAttribute("href", address);
}

/** The service stops counting there. */
const totalOf = (total) => (total >= COUNTED ? `${count(COUNTED)} or more` : count(total));

function noRuns() {
  const snippet = [
    "import tsemon",
    `monitor = tsemon.attach(model, optimizer, run="my-run", server="${location.href.split("#")[0].replace(/\/$/, "")}")`,
    "for batch in loader:",
    "    loss = train_step(model, optimizer, batch)",
    "    monitor.step(loss=loss)",
    "monitor.close()",
  ].join("\n");
  return h(
    "section",
    { class: "card empty" },
    h("h1", {}, "No runs yet"),
    h("p", {}, "A run shows here as soon as a training process attaches to this service. In the training script:"),
    h("pre", { tabindex: "0", "aria-label": "Six lines that attach a training to this service" }, h("code", {}, snippet)),
    h("p", { class: "quiet" }, "It shows by itself; there is nothing to reload."),
  );
}
