// A question before something is done that one click does not take back.

import { h } from "../base/dom.js";

/** Ask, with `no` as the way out that has the focus; `onYes()` if so. */
export function ask({ title, text, yes, no, onYes }) {
  document.querySelector("dialog.question")?.remove();
  const agree = () => {
    dialog.close();
    onYes();
  };
  const dialog = h(
    "dialog",
    { class: "question", "aria-labelledby": "question-title", onclose: () => dialog.remove() },
    h("div", {},
      h("h2", { id: "question-title" }, title),
      [text].flat().filter(Boolean).map((one) => h("p", { class: "given" }, one)),
      h("div", { class: "buttons" }, h("button", { type: "button", class: "chief", onclick: () => dialog.close() }, no), h("button", { type: "button", onclick: agree }, yes)),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
}

export const askToLeave = (onYes) => ask({ title: "Leave without saving?", text: "Your changes to this rule are not saved.", yes: "Leave", no: "Stay", onYes });
