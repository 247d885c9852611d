// Finding a run by a part of its name, its project or a tag: a field with the runs that fit below it.

import { get } from "../base/api.js";
import { h } from "../base/dom.js";
import { count, statePill } from "../base/format.js";

const SETTLES_MS = 150;
const MOST = 12;
let numFields = 0;

export class RunSearch {
  #found = [];
  #at = -1;
  #timer = null;
  #controller = null;

  /** `onPick(run)` for the one that is chosen; `isLeftOut(run)` for those that are not offered. */
  constructor({ label, onPick, isLeftOut = () => false }) {
    this.onPick = onPick;
    this.isLeftOut = isLeftOut;
    const id = `run-search-${(numFields += 1)}`;
    this.list = h("ul", { id: `${id}-list`, role: "listbox", "aria-label": "Runs that fit", hidden: true });
    this.note = h("p", { class: "quiet", role: "status", hidden: true });
    this.field = h("input", {
      type: "search", id, role: "combobox", autocomplete: "off", spellcheck: "false", placeholder: "name, project or tag",
      "aria-expanded": "false", "aria-controls": `${id}-list`, "aria-autocomplete": "list",
      oninput: () => this.#later(), onfocus: () => this.#later(), onkeydown: (event) => this.#onKey(event), onblur: () => this.close(),
    });
    this.drop = h("div", { class: "drop", hidden: true, onmousedown: (event) => event.preventDefault() }, this.list, this.note);
    this.element = h("div", { class: "run-search" }, h("label", { for: id }, label), h("div", { class: "field" }, this.field, this.drop));
  }

  focus() {
    this.field.focus();
  }

  close() {
    clearTimeout(this.#timer);
    this.#controller?.abort();
    this.#show([], "");
    this.drop.hidden = true;
    this.field.setAttribute("aria-expanded", "false");
  }

  #later() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#search(), SETTLES_MS);
  }

  async #search() {
    this.#controller?.abort();
    const controller = new AbortController();
    this.#controller = controller;
    const q = this.field.value.trim();
    try {
      const { runs } = await get("runs", { q: q || null, limit: MOST, order: "-updated" }, controller.signal);
      if (controller.signal.aborted) return;
      const found = runs.filter((run) => !this.isLeftOut(run));
      this.#show(found, found.length ? "" : q ? "No other run fits." : "There is no other run.");
    } catch (error) {
      if (!controller.signal.aborted) this.#show([], `Runs cannot be searched now: ${error.message}`);
    }
  }

  #show(found, note) {
    this.#found = found;
    this.#at = -1;
    this.list.replaceChildren(...found.map((run, i) => this.#option(run, i)));
    this.list.hidden = found.length === 0;
    this.note.textContent = note;
    this.note.hidden = note === "";
    this.drop.hidden = false;
    this.field.setAttribute("aria-expanded", String(found.length > 0));
    this.field.removeAttribute("aria-activedescendant");
  }

  #option(run, i) {
    const step = run.last_step === null ? "no frames" : `step ${count(run.last_step)}`;
    return h(
      "li",
      { role: "option", id: `${this.field.id}-${i}`, "aria-selected": "false", onclick: () => this.#pick(run) },
      h("span", { class: "who" }, h("b", { class: "given" }, run.run), " ", h("span", { class: "quiet given" }, run.project)),
      h("span", { class: "quiet" }, step),
      statePill(run.state),
    );
  }

  #onKey(event) {
    const { key } = event;
    if (key === "Escape") {
      if (!this.drop.hidden) event.preventDefault(); // or the field would be emptied
      return this.close();
    }
    if (key === "Enter" && this.#found.length) {
      event.preventDefault();
      return this.#pick(this.#found[Math.max(this.#at, 0)]);
    }
    const move = { ArrowDown: 1, ArrowUp: -1 }[key];
    if (!move) return;
    event.preventDefault();
    if (!this.#found.length) return this.#later();
    this.#at = (this.#at + move + this.#found.length) % this.#found.length;
    [...this.list.children].forEach((option, i) => option.setAttribute("aria-selected", String(i === this.#at)));
    this.field.setAttribute("aria-activedescendant", `${this.field.id}-${this.#at}`);
    this.list.children[this.#at].scrollIntoView({ block: "nearest" });
  }

  #pick(run) {
    this.field.value = "";
    this.close();
    this.onPick(run);
  }
}
