// The page's frame: which view the address names, whether the service answers, light or dark.

import { Refused, Unreachable } from "./api.js";
import { refreshAges } from "./format.js";
import { h } from "./dom.js";
import { Live } from "./live.js";
import { RunView } from "./run.js";
import { RunsView } from "./runs.js";

const main = document.getElementById("main");
const banner = document.getElementById("banner");
const pulse = document.getElementById("pulse");

let view = null;
let live = null;

function viewOf(hash) {
  const [path, query] = hash.replace(/^#/, "").split("?");
  const [, kind, id] = path.split("/");
  if (kind === "run" && id) return { key: `run ${id}`, make: () => new RunView(main, decoded(id), new URLSearchParams(query)) };
  return { key: "runs", make: () => new RunsView(main) };
}

/** The id as it was before it went into the address; as it stands where no page wrote it, which no run has. */
function decoded(id) {
  try {
    return decodeURIComponent(id);
  } catch {
    return id;
  }
}

function navigate() {
  if (location.hash === "#main") return main.focus();
  const { key, make } = viewOf(location.hash);
  if (view?.key === key) return;
  live?.stop();
  view?.destroy();
  banner.hidden = true;
  main.replaceChildren(h("p", { class: "quiet" }, "Loading …"));
  view = Object.assign(make(), { key });
  live = new Live((signal) => view.refresh(signal), report);
  view.reload = () => live.now();
  live.start();
  window.scrollTo(0, 0);
}

function report({ error, retryMs }) {
  refreshAges(document);
  banner.hidden = error === null;
  pulse.className = `pulse ${error ? "off" : "on"}`;
  pulse.textContent = "live";
  if (error === null) return;
  const gone = error instanceof Refused && error.status === 404;
  pulse.textContent = gone ? "not found" : "no answer";
  if (gone) {
    main.replaceChildren();
    banner.replaceChildren(`${error.message} `, h("a", { href: "#/" }, "All runs"));
    return;
  }
  banner.replaceChildren(
    `${troubleOf(error)} Trying again in ${Math.ceil(retryMs / 1000)} s. `,
    h("button", { type: "button", onclick: () => live.now() }, "Try now"),
  );
}

function troubleOf(error) {
  if (error instanceof Unreachable) return "The service does not answer; what is shown may be old.";
  if (error instanceof Refused) return `The service refused: ${error.message}.`;
  console.error(error); // a slip of the page itself
  return `The page could not show this: ${error.message}.`;
}

window.addEventListener("hashchange", navigate);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view?.redraw());
navigate();
