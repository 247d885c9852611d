// A question before changes are lost.

import { h } from "../base/dom.js";

/** Ask whether to leave without saving; `onLeave()` if so. */
export function askToLeave(onLeave) {
  document.querySelector("dialog.leaving")?.remove();
  const leave = () => {
    dialog.close();
    onLeave();
  };
  const dialog = h(
    "dialog",
    { class: "leaving", "aria-labelledby": "leaving-title", onclose: () => dialog.remove() },
    h("div", {},
      h("h2", { id: "leaving-title" }, "Leave without saving?"),
      h("p", {}, "Your changes to this rule are not saved."),
      h("div", { class: "buttons" }, h("button", { type: "button", class: "chief", onclick: () => dialog.close() }, "Stay"), h("button", { type: "button", onclick: leave }, "Leave")),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
}
