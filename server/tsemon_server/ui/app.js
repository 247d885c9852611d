// The page's frame: which view the address names, whether the service answers and lets us in, the keys, light or dark.

import { arrive } from "./base/address.js";
import { Refused, Unreachable, getSession, signOut } from "./base/api.js";
import { refreshAges } from "./base/format.js";
import { h, put } from "./base/dom.js";
import { Live } from "./base/live.js";
import { isPlainKey, showKeys } from "./parts/keys.js";
import { askToLeave } from "./parts/asking.js";
import { showForbidden, skeleton } from "./parts/states.js";
import { AlertsView } from "./views/alerts.js";
import { CompareView } from "./views/compare.js";
import { FleetView } from "./views/fleet.js";
import { RuleView } from "./views/rule.js";
import { RulesView } from "./views/rules.js";
import { RunView } from "./views/run.js";
import { askForToken } from "./views/sign_in.js";

const AGES_MS = 5000;

const main = document.getElementById("main");
const banner = document.getElementById("banner");
const pulse = document.getElementById("pulse");
const visitor = document.getElementById("visitor");
const links = document.querySelectorAll("header nav a");
// The parts of the banner stay over rounds that fail: what is wrong is read out once, and the button keeps the focus.
const trouble = h("span", { role: "alert" });
const waiting = h("span");
const again = h("button", { type: "button", onclick: () => live?.now() }, "Try now");
const allRuns = h("a", { href: "#/" }, "All runs");

let view = null;
let live = null;

/**
 * By the first word of the address after `#/`; each is made of (where it shows, the id that follows, the query).
 *
 * A view has `refresh(signal)`, which resolves to the milliseconds until the next, `redraw()` for another theme and `destroy()`. It
 * may have `onEvent` (base/live.js), `moved(query)` for a link to itself with another query (else it is made anew), `keys`
 * ([key, what it does] for the list of keys) and `onKey(event)`, true where the key was one of them. It gets `reload()`. One with
 * changes that are not saved `isDirty`, and is left only after a question; `forget()` drops them.
 */
const VIEWS = {
  "": (main, _id, query) => new FleetView(main, query),
  run: (main, id, query) => new RunView(main, id, query),
  alerts: (main, _id, query) => new AlertsView(main, query),
  rules: (main, _id, query) => new RulesView(main, query),
  rule: (main, id, query) => new RuleView(main, id, query),
  compare: (main, _id, query) => new CompareView(main, query),
};

/** By the kind of a view without a link of its own: the one whose link stands for it. */
const PARENTS = { run: "", rule: "rules" };

/** `kind` is null where there is no such view. */
function viewOf(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  const [name, id = ""] = path.split("/");
  const kind = Object.hasOwn(VIEWS, name) ? name : null;
  const asked = new URLSearchParams(query);
  const of = kind === "rule" ? `?project=${asked.get("project") ?? ""}` : ""; // a rule in another project is another rule
  return { kind, key: `${kind}/${id}${of}`, query: asked, make: (query) => VIEWS[kind](main, decoded(id), query) };
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
  arrive();
  const { kind, key, query, make } = viewOf(location.hash);
  if (view?.key === key && view.moved) {
    banner.hidden = true;
    view.moved(query);
    return live.now();
  }
  close();
  for (const link of links) {
    if (link.hash === `#/${PARENTS[kind] ?? kind}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (kind === null) return report({ error: new Refused(404, `There is no view at ${location.hash}.`) });
  main.replaceChildren(skeleton());
  view = Object.assign(make(query), { key });
  live = new Live(view, report);
  view.reload = () => live.now();
  live.start();
  window.scrollTo(0, 0);
}

function close() {
  live?.stop();
  view?.destroy();
  live = view = null;
  banner.hidden = true;
}

function report({ error, retryMs, hasStream }) {
  banner.hidden = error === null;
  pulse.className = `pulse ${error ? "off" : "on"}`;
  pulse.title = error ? "" : hasStream ? "the service tells what changes" : `the service is asked every ${seconds(retryMs)}`;
  if (error === null) return put(pulse, "live");
  const status = error instanceof Refused ? error.status : null;
  if (status === 401) return turnAway(error);
  if (status === 403) return forbid(error);
  put(pulse, pulseOf(error));
  if (status === 404) {
    main.replaceChildren();
    put(trouble, error.message);
    return put(banner, trouble, " ", allRuns);
  }
  put(trouble, troubleOf(error));
  if (status === 422) return put(banner, trouble, " ", allRuns); // it will not do so later
  put(waiting, ` Trying again in ${seconds(retryMs)}. `);
  put(banner, trouble, waiting, again);
}

const seconds = (ms) => `${Math.ceil(ms / 1000)} s`;

/** Nothing can be shown without a token. */
function turnAway(error) {
  close();
  put(pulse, "signed out");
  const wasIn = visitor.hasChildNodes(); // and the token has expired since, or was revoked
  visitor.replaceChildren();
  signInAgain(wasIn ? error.message : "");
}

function signInAgain(wrong) {
  askForToken(main, wrong, () => {
    greet();
    navigate();
  });
}

/** The token is good, and not for this. */
async function forbid(error) {
  close();
  put(pulse, "not allowed");
  const session = await getSession().catch(() => null);
  const useAnother = async () => {
    await signOut().catch(() => null);
    visitor.replaceChildren();
    signInAgain("");
  };
  if (view === null) showForbidden(main, { reason: error.message, session, useAnother, again: navigate });
}

/** Who is signed in, and the way out; nothing where the service needs no token. */
async function greet() {
  const session = await getSession().catch(() => null);
  if (!session?.needs_token || !session.scopes.length) return visitor.replaceChildren();
  const of = session.project === null ? "" : ` · ${session.project}`;
  const leave = async () => {
    await signOut().catch(() => null);
    location.reload();
  };
  visitor.replaceChildren(h("span", { class: "given", title: session.scopes.join(", ") }, `${session.name}${of}`), h("button", { type: "button", onclick: leave }, "Sign out"));
}

function pulseOf(error) {
  if (error instanceof Refused) return error.status === 404 ? "not found" : "refused";
  if (error instanceof Unreachable) return navigator.onLine ? "no answer" : "offline";
  return "not shown";
}

function troubleOf(error) {
  if (error instanceof Unreachable) {
    return navigator.onLine
      ? "The service does not answer; what is shown may be old."
      : "This computer is offline; what is shown may be old.";
  }
  if (error instanceof Refused) return `The service refused: ${error.message}.`;
  console.error(error); // a slip of the page itself
  return `The page could not show this: ${error.message}.`;
}

/** Another address: what is not saved is not left without a question. */
function moved({ oldURL, newURL }) {
  if (!view?.isDirty || viewOf(location.hash).key === view.key) return navigate();
  history.replaceState(null, "", oldURL);
  askToLeave(() => {
    view.forget();
    location.href = newURL;
  });
}

window.addEventListener("hashchange", moved);
window.addEventListener("beforeunload", (event) => view?.isDirty && event.preventDefault());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address is the view's
  main.focus();
});
document.addEventListener("keydown", (event) => {
  if (!isPlainKey(event)) return;
  const isOurs = event.key === "?" ? showKeys(view?.keys ?? []) : view?.onKey?.(event);
  if (isOurs) event.preventDefault();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view?.redraw());
setInterval(() => refreshAges(document), AGES_MS);
greet();
navigate();
