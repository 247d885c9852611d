// Asking the service. Paths are relative, so the page also works below a proxy's prefix.

const TIMEOUT_MS = 15_000;
/** A run of 100,000 frames is read from its beginning to its end. */
const TRIAL_MS = 120_000;
let skewMs = 0;

/** The service's clock: ages are shown by it, as it wrote the times. */
export const serverNow = () => Date.now() + skewMs;

/** The service answered with an error. `status` 404 means that what was asked for is not there, 401 that it needs a token. */
export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** No answer came, or none that is whole: the service is down, or the network between. */
export class Unreachable extends Error {}

/** GET below /api/v1, as JSON; a list in `query` is given value by value. Throws Refused for an answer that is an error, Unreachable when none came. */
export function get(path, query = {}, signal = undefined) {
  const given = Object.entries(query).flatMap(([name, value]) => [value ?? []].flat().map((one) => [name, one]));
  return ask(`api/v1/${path}${given.length ? `?${new URLSearchParams(given)}` : ""}`, signal);
}

/** The same; {problem: what the service says} of what is not there, or not for whoever asks. */
export async function getOrProblem(path, query, signal) {
  try {
    return await get(path, query, signal);
  } catch (error) {
    if (error instanceof Refused && [403, 404, 422].includes(error.status)) return { problem: error.message };
    throw error;
  }
}

/** For `catch`: what retention has dropped cannot be shown; the rest can. */
export function noneIfGone(error) {
  if (error instanceof Refused && error.status === 404) return null;
  throw error;
}

/** A page of a list. A list that has changed may have no place for a cursor any more; then `onLost()` is told, and it is the first page. */
export async function getPage(path, { cursor, ...query }, signal, onLost) {
  try {
    return await get(path, { ...query, cursor }, signal);
  } catch (error) {
    if (cursor === null || !(error instanceof Refused) || error.status !== 422) throw error;
    onLost();
    return get(path, query, signal);
  }
}

/** Say that `by` has seen to an alert, with a note or null. */
export const acknowledge = (alertId, by, note) => ask(ackPath(alertId), undefined, { method: "POST", body: JSON.stringify({ by, note }) });

/** Take that back. */
export const unacknowledge = (alertId) => ask(ackPath(alertId), undefined, { method: "DELETE" });

const ackPath = (alertId) => `api/v1/alerts/${encodeURIComponent(alertId)}/ack`;

/** Who asks, as far as the service knows: {needs_token, scopes, project, name}. */
export const getSession = (signal) => ask("api/v1/session", signal);

/** Keep a token in a cookie that the page itself cannot read. Throws Refused where it is wrong. */
export const signIn = (token) => ask("api/v1/session", undefined, { method: "POST", body: JSON.stringify({ token }) });

export const signOut = () => ask("api/v1/session", undefined, { method: "DELETE" });

/** The layered metrics by name: title, equation, range, scale. */
export const getCatalogue = (signal) => ask("ui/catalogue.json", signal);

/** What may stand in the line of a rule: {names, functions, words, families, severities, default_hold}. */
export const getLanguage = (signal) => ask("ui/language.json", signal);

/** The mistakes of a rule that somebody writes, or the rule in words; nothing is kept. */
export const checkRule = (rule, signal) => ask("api/v1/rules/check", signal, { method: "POST", body: asFile(rule) });

/** What a rule would have said of a stored run, and what it saw, with so many points at most. */
export const tryRule = (rule, runId, points, signal) =>
  ask("api/v1/rules/test", signal, { method: "POST", body: JSON.stringify({ run_id: runId, rules: asFile(rule), points }), timeoutMs: TRIAL_MS });

/** Put a rule in force, in a project or, with null, on the server: its versions, the newest first. */
export const putRule = (rule, project) => ask(rulePath(rule.name, project), undefined, { method: "PUT", body: asFile(rule) });

/** Let a rule look at no run any more. */
export const disableRule = (name, project) => ask(rulePath(name, project), undefined, { method: "DELETE" });

/** Let a built-in rule count as it came; in a project, the server's rule. */
export const restoreRule = (name, project) => ask(rulePath(name, project, "/restore"), undefined, { method: "POST" });

const rulePath = (name, project, path = "") => `api/v1/rules/${encodeURIComponent(name)}${path}${project === null ? "" : `?${new URLSearchParams({ project })}`}`;

const asFile = (rule) => JSON.stringify({ rules: [rule] });

async function ask(url, signal, { timeoutMs = TIMEOUT_MS, ...options } = {}) {
  const limits = [AbortSignal.timeout(timeoutMs), ...(signal ? [signal] : [])];
  const lost = (error) => {
    throw new Unreachable(error.message);
  };
  const response = await fetch(url, { ...options, signal: AbortSignal.any(limits) }).catch(lost);
  const date = Date.parse(response.headers.get("date"));
  // The header counts whole seconds, so only a real difference of clocks is taken as one.
  if (Number.isFinite(date)) skewMs = Math.abs(date - Date.now()) > 3000 ? date - Date.now() : 0;
  if (response.status === 204) return null;
  if (response.ok) return response.json().catch(lost);
  const body = await response.json().catch(() => ({}));
  throw new Refused(response.status, body.detail ?? `the service answered ${response.status}`);
}

/** What a record of the service has under a name that somebody chose: every object has a `constructor`, and no run measures one. */
export const own = (record, name) => (Object.hasOwn(record, name) ? record[name] : undefined);

/** What a metric is: from the catalogue, else from the runs, which describe metrics of the user's own; null if nobody knows. */
export const metricOf = (catalogue, name, runs) => own(catalogue, name) ?? runs.map((run) => own(run.quantities, name)).find(Boolean) ?? null;

export const runPath = (runId) => `runs/${encodeURIComponent(runId)}`;
