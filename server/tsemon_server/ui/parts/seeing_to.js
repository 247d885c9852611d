// Seeing to an alert: who says so, what they say, and taking it back. Where the visitor may not, that stands in its place.

import { Refused, acknowledge, getSession, unacknowledge } from "../base/api.js";
import { h } from "../base/dom.js";
import { time } from "../base/format.js";

const KEPT_NAME = "tsemon.name";
const LONGEST_NAME = 128;
const LONGEST_NOTE = 4000;

export class SeeingTo {
  #session = undefined;
  #drafts = new Map();

  /** `onChange()` when an alert has changed by what was done here. */
  constructor(onChange) {
    this.onChange = onChange;
    // Without an answer nothing is refused beforehand: the service says what it does not allow.
    this.asked = getSession().catch(() => null).then((session) => (this.#session = session));
  }

  /** What was said of this alert, and what can be. A form that is open stays so when the alert's card is made again. */
  of(alert) {
    const box = h("div", { class: "seeing-to" });
    const show = () => box.replaceChildren(...this.#content(alert, this.#session, box));
    if (this.#session === undefined) this.asked.then(show);
    else show(); // at once, so that whoever types goes on
    return box;
  }

  #content(alert, session, box) {
    const again = () => box.replaceChildren(...this.#content(alert, session, box));
    const mayChange = session === null || session.scopes.includes("admin");
    const said = alert.acknowledged_at ? saidOf(alert) : null;
    if (!["firing", "acknowledged"].includes(alert.state)) return [said].filter(Boolean);
    if (!mayChange) return [said, h("p", { class: "quiet" }, "Your token may read alerts and not acknowledge them: that needs the scope admin.")].filter(Boolean);
    if (said) return [said, this.#undo(alert)];
    const draft = this.#drafts.get(alert.alert_id);
    if (draft) return [this.#form(alert, session, draft, again)];
    const open = () => {
      this.#drafts.set(alert.alert_id, { by: keptName(), note: "" });
      again();
      box.querySelector("input").focus();
    };
    return [h("button", { type: "button", onclick: open }, "Acknowledge …")];
  }

  #form(alert, session, draft, again) {
    const trouble = h("p", { class: "bad", role: "alert" });
    const name = session?.name ?? null;
    const close = () => {
      this.#drafts.delete(alert.alert_id);
      again();
    };
    const send = async (event) => {
      event.preventDefault();
      const by = name ?? draft.by.trim();
      if (!by) return;
      if (name === null) keepName(by);
      const isDone = await this.#try(event.submitter, trouble, () => acknowledge(alert.alert_id, by, draft.note.trim() || null));
      if (isDone) this.#drafts.delete(alert.alert_id);
    };
    const field = (key, label, options) => h("label", {}, h("span", {}, label), h("input", { type: "text", value: draft[key], oninput: (event) => (draft[key] = event.target.value), ...options }));
    const who = name === null
      ? field("by", "Your name", { required: true, maxlength: LONGEST_NAME, autocomplete: "name" })
      : h("p", { class: "quiet" }, "Signed as ", h("b", { class: "given" }, name));
    return h(
      "form",
      { class: "acknowledge", onsubmit: send, onkeydown: (event) => event.key === "Escape" && close() },
      who,
      field("note", "Note (optional)", { maxlength: LONGEST_NOTE, autocomplete: "off", placeholder: "what you do about it" }),
      h("div", { class: "buttons" }, h("button", { type: "submit", class: "chief" }, "Acknowledge"), h("button", { type: "button", onclick: close }, "Cancel")),
      trouble,
    );
  }

  #undo(alert) {
    const trouble = h("span", { class: "bad", role: "alert" });
    const undo = (event) => this.#try(event.currentTarget, trouble, () => unacknowledge(alert.alert_id));
    return h("div", { class: "buttons" }, h("button", { type: "button", onclick: undo }, "Undo acknowledgement"), trouble);
  }

  async #try(button, trouble, act) {
    button.disabled = true;
    trouble.textContent = "";
    try {
      await act();
      this.onChange();
      return true;
    } catch (error) {
      trouble.textContent = error instanceof Refused ? error.message : "The service does not answer.";
      button.disabled = false;
      return false;
    }
  }
}

function saidOf({ acknowledged_at, acknowledged_by, note }) {
  return h("p", { class: "said" }, "Acknowledged by ", h("b", { class: "given" }, acknowledged_by), ", ", time(acknowledged_at), note ? [": ", h("span", { class: "given" }, note)] : "");
}

/** Where the browser keeps nothing for us, the name is asked for each time. */
function keptName() {
  try {
    return localStorage.getItem(KEPT_NAME) ?? "";
  } catch {
    return "";
  }
}

function keepName(name) {
  try {
    localStorage.setItem(KEPT_NAME, name);
  } catch {
    // as above
  }
}
