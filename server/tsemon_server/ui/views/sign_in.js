// Signing in: the token goes to the service once, and from then on the browser sends it where no script can read it.

import { Refused, signIn } from "../base/api.js";
import { h } from "../base/dom.js";

/** Ask for a token in `main`, and say what was wrong with the one before, if any; `onDone` is called once one is accepted. */
export function askForToken(main, wrong, onDone) {
  const field = h("input", { type: "password", name: "token", id: "token", autocomplete: "current-password", required: true, spellcheck: "false", placeholder: "tsm_…" });
  const trouble = h("p", { class: "bad", role: "alert" }, wrong);
  const button = h("button", { type: "submit" }, "Sign in");
  const submit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    trouble.textContent = "";
    try {
      await signIn(field.value.trim());
      onDone();
    } catch (error) {
      trouble.textContent = error instanceof Refused ? error.message : "The service does not answer.";
      button.disabled = false;
      field.select();
    }
  };
  main.replaceChildren(
    h("section", { class: "card empty", "aria-label": "Sign in" },
      h("h1", {}, "Sign in"),
      h("p", { class: "quiet" }, "This service asks for a token. The browser keeps it where no script can read it."),
      h("form", { class: "sign-in", onsubmit: submit }, h("label", { for: "token" }, "Token"), field, button),
      trouble,
      h("p", { class: "quiet" }, "Where the service runs, this makes one that may look at everything:"),
      h("pre", {}, "tsemon token create NAME --scope read"),
    ),
  );
  field.focus();
}
