// Keys that work without a modifier, and the list of them.

import { h } from "../base/dom.js";

/** Whether a key is for the page: not typed into a field, no shortcut of the browser, and nothing in front of the view. */
export function isPlainKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return false;
  const { target } = event;
  return !target.closest?.("textarea, select, dialog, [contenteditable], input:not([type=checkbox])");
}

/** Show what the keys do: those of the view, and those that work everywhere. */
export function showKeys(keys) {
  const rows = [...keys, ["?", "show this list"]];
  const close = () => dialog.close();
  const dialog = h(
    "dialog",
    { class: "keys", "aria-labelledby": "keys-title", onclose: () => dialog.remove(), onclick: ({ target }) => target === dialog && close() },
    h("div", {},
      h("h2", { id: "keys-title" }, "Keys"),
      h("dl", {}, rows.map(([key, what]) => [h("dt", {}, key.split(" ").map((one) => h("kbd", {}, one))), h("dd", {}, what)])),
      h("button", { type: "button", onclick: close }, "Close"),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
  return true;
}
