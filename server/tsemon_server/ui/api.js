// Asking the service. Paths are relative, so the page also works below a proxy's prefix.

const TIMEOUT_MS = 15_000;
let skewMs = 0;

/** The service's clock: ages are shown by it, as it wrote the times. */
export const serverNow = () => Date.now() + skewMs;

/** The service answered with an error. `status` 404 means that what was asked for is not there. */
export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** No answer came: the service is down, or the network between. */
export class Unreachable extends Error {}

/** GET below /api/v1, as JSON. Throws Refused for an answer that is an error, Unreachable when none came. */
export function get(path, query = {}, signal = undefined) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  return ask(`api/v1/${path}${given.length ? `?${new URLSearchParams(given)}` : ""}`, signal);
}

/** Say that somebody has seen to an alert. */
export const acknowledge = (alertId) => ask(`api/v1/alerts/${encodeURIComponent(alertId)}/ack`, undefined, { method: "POST", body: JSON.stringify({ by: "page" }) });

/** The layered metrics by name: title, equation, range, scale. */
export const getCatalogue = (signal) => ask("ui/catalogue.json", signal);

async function ask(url, signal, options = {}) {
  const limits = [AbortSignal.timeout(TIMEOUT_MS), ...(signal ? [signal] : [])];
  const response = await fetch(url, { ...options, signal: AbortSignal.any(limits) }).catch((error) => {
    throw new Unreachable(error.message);
  });
  const date = Date.parse(response.headers.get("date"));
  // The header counts whole seconds, so only a real difference of clocks is taken as one.
  if (Number.isFinite(date)) skewMs = Math.abs(date - Date.now()) > 3000 ? date - Date.now() : 0;
  if (response.ok) return response.json();
  const body = await response.json().catch(() => ({}));
  throw new Refused(response.status, body.detail ?? `the service answered ${response.status}`);
}

export const runPath = (runId) => `runs/${encodeURIComponent(runId)}`;
