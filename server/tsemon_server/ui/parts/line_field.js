// A field for a line of a rule: it grows with its text, marks what is wrong, and completes names.

import { h } from "../base/dom.js";
import { isComplete, nameAt, offersFor } from "./completion.js";

const MOST = 40;
const WIDEST = 460;

export class LineField {
  #mistake = null;
  #mark = null;
  #before = "";
  #found = [];
  #at = null;
  #word = null;

  /** `offers` gives what can be completed (completion.js); `onInput()` is told of each change. */
  constructor({ id, label, placeholder, offers, onInput }) {
    this.offers = offers;
    this.onInput = onInput;
    this.list = h("ul", { id: `${id}-list`, role: "listbox", "aria-label": "Names that fit", hidden: true, onmousedown: (event) => event.preventDefault() });
    this.mirror = h("div", { class: "mirror", "aria-hidden": "true" });
    this.field = h("textarea", {
      id, rows: 1, placeholder, role: "combobox", spellcheck: "false", autocomplete: "off", autocapitalize: "off",
      "aria-autocomplete": "list", "aria-haspopup": "listbox", "aria-expanded": "false", "aria-controls": `${id}-list`, "aria-describedby": `${id}-mistake`,
      oninput: () => this.#typed(), onkeydown: (event) => this.#onKey(event), onblur: () => this.close(), onclick: () => this.close(),
    });
    this.note = h("div", { class: "mistake", id: `${id}-mistake`, role: "status" });
    this.element = h("div", { class: "line-field" }, h("label", { for: id }, label), h("div", { class: "box" }, this.mirror, this.field, this.list), this.note);
    this.#show();
  }

  get value() {
    return this.field.value;
  }

  set value(text) {
    this.field.value = text;
    this.close();
    this.show(null, text);
  }

  /** The mistake of the text as it was when it was checked, or null. What was typed since moves its mark. */
  show(mistake, checked) {
    const isSame = JSON.stringify(mistake) === JSON.stringify(this.#mistake);
    this.#mistake = mistake;
    const mark = mistake === null || mistake.column === null ? null : [mistake.column - 1, mistake.column - 1 + mistake.length];
    this.#mark = movedTo(mark, checked, this.value);
    this.field.setAttribute("aria-invalid", String(mistake !== null));
    this.#show();
    if (!isSame) this.#tell(mistake);
    if (!this.list.hidden) this.#place();
  }

  #tell(mistake) {
    if (mistake === null) return this.note.replaceChildren();
    const { column, text, nearest, example } = mistake;
    const said = column === null || nearest === null ? text : text.replace(/; did you mean .*?\?/, ".");
    const mend = nearest === null ? null : h("button", { type: "button", onclick: () => this.#mend() }, "Use ", h("code", {}, nearest));
    this.note.replaceChildren(
      h("p", {}, column === null ? null : h("span", { class: "column" }, `column ${column}`), h("span", { class: "given" }, said), mend && [" ", mend]),
      ...(example === null ? [] : [h("p", { class: "quiet" }, "for example ", h("code", {}, example))]),
    );
  }

  close() {
    this.#found = [];
    this.list.hidden = true;
    this.list.replaceChildren();
    this.field.setAttribute("aria-expanded", "false");
    this.field.removeAttribute("aria-activedescendant");
    this.element.classList.remove("completing");
  }

  #typed() {
    this.#mark = movedTo(this.#mark, this.#before, this.value);
    this.#show();
    this.onInput();
    this.#complete(1);
  }

  /** The text behind the field, with a mark below what is wrong. */
  #show() {
    const text = this.value;
    this.#before = text;
    const after = (rest) => `${rest}\u200b`; // a last line that is empty has its height
    if (this.#mark === null) return this.mirror.replaceChildren(after(text));
    const [from, to] = this.#mark;
    this.mirror.replaceChildren(text.slice(0, from), h("mark", { class: from === to ? "gap" : "" }, text.slice(from, to)), after(text.slice(to)));
  }

  #mend() {
    if (this.#mark !== null) this.#replace(...this.#mark, this.#mistake.nearest);
  }

  // Completion

  #complete(least) {
    const { selectionStart, selectionEnd } = this.field;
    const word = selectionStart === selectionEnd ? nameAt(this.value, selectionStart) : null;
    if (word === null || word.typed.length < least) return this.close();
    this.#word = word;
    this.#found = offersFor(this.offers(), word).slice(0, MOST);
    if (!this.#found.length) return this.close();
    this.list.replaceChildren(...this.#found.map((offer, i) => this.#option(offer, i)));
    this.list.hidden = false;
    this.field.setAttribute("aria-expanded", "true");
    this.#place();
    this.#at = null;
    this.field.removeAttribute("aria-activedescendant");
    if (!isComplete(this.#found[0], word.typed)) this.#select(0);
  }

  #option({ name, kind, detail, help }, i) {
    return h(
      "li",
      { role: "option", id: `${this.list.id}-${i}`, "aria-selected": "false", onclick: () => this.#take(i), onmousemove: () => this.#at !== i && this.#select(i) },
      h("span", { class: "head" }, h("b", { class: "given" }, name), h("span", { class: `kind ${kind}` }, detail)),
      help ? h("span", { class: "help given" }, help) : null,
    );
  }

  #select(i) {
    this.list.children[this.#at]?.setAttribute("aria-selected", "false");
    this.#at = i;
    const option = this.list.children[i];
    option.setAttribute("aria-selected", "true");
    this.field.setAttribute("aria-activedescendant", option.id);
    option.scrollIntoView({ block: "nearest" });
  }

  /** Let the list begin below the word, the line, and what is said to be wrong in it; but a word that is being typed is not wrong yet. */
  #place() {
    const { from, to } = this.#word;
    const isOfWord = this.#mark === null ? this.#mistake !== null : this.#mark[0] <= to && this.#mark[1] >= from; // without a mark it was just edited
    this.element.classList.toggle("completing", isOfWord);
    const [node, offset] = this.#nodeAt(from);
    const range = document.createRange();
    range.setStart(node, offset);
    range.setEnd(node, Math.min(offset + 1, node.length));
    const [word, box] = [range.getClientRects()[0] ?? this.mirror.getBoundingClientRect(), this.field.parentElement.getBoundingClientRect()];
    const width = Math.min(WIDEST, box.width);
    this.list.style.width = `${width}px`;
    this.list.style.left = `${Math.max(0, Math.min(word.left - box.left - 10, box.width - width - 2))}px`;
    const bottom = Math.max(box.bottom, this.note.getBoundingClientRect().bottom); // 0 while the note is empty or hidden
    this.list.style.top = `${bottom - box.top + 3}px`;
  }

  #nodeAt(place) {
    const walker = document.createTreeWalker(this.mirror, NodeFilter.SHOW_TEXT);
    let left = place;
    let node = walker.nextNode();
    for (let next = node; next; next = walker.nextNode()) {
      node = next;
      if (left < node.length) break;
      left -= node.length;
    }
    return [node, Math.max(0, Math.min(left, node.length))];
  }

  #take(i) {
    const { from, to } = this.#word;
    const [insert, caret] = this.#found[i].insert(this.value.slice(to), this.#word);
    this.close();
    this.#replace(from, to, insert, from + caret);
    this.close();
  }

  /** Replace a part of the text as if it was typed, so that it can be undone. */
  #replace(from, to, text, caret = from + text.length) {
    this.field.focus();
    this.field.setSelectionRange(from, to);
    if (!document.execCommand("insertText", false, text)) {
      this.field.setRangeText(text, from, to, "end");
      this.#typed();
    }
    this.field.setSelectionRange(caret, caret);
  }

  #onKey(event) {
    const { key } = event;
    const isOpen = !this.list.hidden;
    if (key === " " && event.ctrlKey) {
      event.preventDefault();
      return this.#complete(0);
    }
    if (key === "Enter" && !isOpen) return event.preventDefault(); // a line is one line
    if (!isOpen) return;
    if (["ArrowLeft", "ArrowRight", "Home", "End"].includes(key)) return this.close();
    if (key === "ArrowDown") this.#select(((this.#at ?? -1) + 1) % this.#found.length);
    else if (key === "ArrowUp") this.#select(((this.#at ?? 0) || this.#found.length) - 1);
    else if (key === "Tab" && (event.shiftKey || this.#at === null)) return this.close();
    else if (key === "Enter" || key === "Tab") this.#at === null ? this.close() : this.#take(this.#at);
    else if (key === "Escape") this.close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/** Where a part [from, to] of a text is once the text was edited in one place; null if it was edited itself. */
function movedTo(part, before, after) {
  if (part === null || before === after) return part;
  const most = Math.min(before.length, after.length);
  let [start, end] = [0, 0];
  while (start < most && before[start] === after[start]) start += 1;
  while (end < most && before.at(-1 - end) === after.at(-1 - end)) end += 1;
  const by = after.length - before.length;
  if (before.length - end <= part[0]) return [part[0] + by, part[1] + by];
  return start > part[1] || (start === part[1] && !/^\w/.test(after.slice(start))) ? part : null;
}
