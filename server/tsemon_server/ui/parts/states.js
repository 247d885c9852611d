// What stands in place of a view: while it loads, and where a token is not enough.

import { h } from "../base/dom.js";

/** A view that is on its way, of about its shape. */
export const skeleton = () =>
  h("div", { class: "stack", "aria-busy": "true", "aria-label": "Loading" }, h("div", { class: "bone title" }), h("div", { class: "card bone tall" }));

/** Say what the token may do, and what it would need. `session` is null where the service did not tell. */
export function showForbidden(main, { reason, session, useAnother, again }) {
  const wanted = reason.match(/the scope '(\w+)'/)?.[1] ?? null;
  main.replaceChildren(
    h("section", { class: "card empty", "aria-labelledby": "forbidden" },
      h("h1", { id: "forbidden" }, "Your token does not allow this"),
      h("p", { class: "given" }, `The service says: ${reason}.`),
      session && h("dl", { class: "facts" }, factsOf(session, wanted).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { class: "given" }, value)))),
      wanted && [h("p", { class: "quiet" }, "Where the service runs, this makes one that may:"), h("pre", {}, `tsemon token create NAME --scope ${wanted}`)],
      h("div", { class: "tools" },
        h("button", { type: "button", onclick: useAnother }, "Use another token"),
        h("button", { type: "button", onclick: again }, "Try again"),
      ),
    ),
  );
}

const factsOf = ({ name, scopes, project }, wanted) => [
  ["token", name ?? "–"],
  ["it may", scopes.join(", ") || "nothing"],
  ["in", project === null ? "all projects" : project],
  ...(wanted ? [["it lacks", wanted]] : []),
];
