// Staying up to date: what the service tells by itself (SSE), and asking where it does not, or for what it does not tell.
//
// One round of requests at a time, none while nobody looks, and back on its own after an outage. A page that is hidden
// lets its stream go, too: browsers keep six connections to a service, over all tabs.

const FIRST_RETRY_MS = 2000;
const LONGEST_RETRY_MS = 15_000;
/** So long, in times of what the last round took, the service is left in peace: a page never keeps it busy. */
const REST_RATIO = 4;
const SHORTEST_REST_MS = 1000;
/** How often a view is refreshed that hears of all changes: for what happened while the stream was away unnoticed. */
const WITH_EVENTS_MS = 30_000;
/** A stream that was refused (no room for it, or a proxy that knows none) is tried again after so long. */
const STREAM_RETRY_MS = 60_000;
const KINDS = ["run", "alert", "deleted"];

export class Live {
  #controller = null;
  #timer = null;
  #failures = 0;
  #roundEndedAt = -Infinity;
  #roundTookMs = 0;
  #isWanted = false;
  #source = null;
  #address = null;
  #hasStream = false;
  #streamTimer = null;
  #onVisibility = () => (document.hidden ? this.#halt() : this.now());
  #onNetwork = () => this.now();

  /**
   * `view.refresh(signal)` does one round and returns the milliseconds until the next. A view that also has `onEvent({type,
   * data})` is told of each change, with `data` as `GET /events` describes it, and is then refreshed rarely; what returns true
   * asks for a round soon. `view.watched`, if given, holds the ids of the runs that matter (100 at most); null is all. `view.kinds`, if
   * given, are the kinds of events that matter, besides what is deleted. A view that cannot hear of all that it shows says in `view.refreshMs` how often it wants to ask nevertheless.
   *
   * `report({error, retryMs, hasStream})` is told after each round; error is null when all went well.
   */
  constructor(view, report) {
    this.view = view;
    this.report = report;
  }

  start() {
    document.addEventListener("visibilitychange", this.#onVisibility);
    window.addEventListener("online", this.#onNetwork);
    window.addEventListener("offline", this.#onNetwork);
    this.now();
  }

  stop() {
    document.removeEventListener("visibilitychange", this.#onVisibility);
    window.removeEventListener("online", this.#onNetwork);
    window.removeEventListener("offline", this.#onNetwork);
    this.#halt();
  }

  /** Begin a round at once, in place of the one under way. */
  now() {
    this.#stopRound();
    if (!document.hidden) this.#round();
  }

  /** Begin a round as soon as the service has had its rest since the last. */
  soon() {
    if (document.hidden) return;
    if (this.#controller) this.#isWanted = true;
    else this.#schedule(this.#rest(SHORTEST_REST_MS) - (performance.now() - this.#roundEndedAt));
  }

  #rest(leastMs) {
    return Math.max(leastMs, REST_RATIO * this.#roundTookMs);
  }

  #schedule(waitMs) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#round(), Math.max(0, waitMs));
  }

  #halt() {
    this.#stopRound();
    this.#closeStream();
  }

  #stopRound() {
    clearTimeout(this.#timer);
    this.#controller?.abort();
    this.#controller = null;
  }

  async #round() {
    const controller = new AbortController();
    this.#controller = controller;
    this.#isWanted = false;
    const startedAt = performance.now();
    let waitMs;
    let error = null;
    try {
      waitMs = await this.view.refresh(controller.signal);
      if (controller.signal.aborted) return;
      this.#follow();
      if (this.#hasStream) waitMs = Math.max(waitMs, this.view.refreshMs ?? WITH_EVENTS_MS);
      this.#failures = 0;
    } catch (caught) {
      if (controller.signal.aborted) return;
      error = caught;
      waitMs = Math.min(FIRST_RETRY_MS * 2 ** this.#failures, LONGEST_RETRY_MS);
      this.#failures += 1;
    }
    this.#controller = null;
    this.#roundEndedAt = performance.now();
    this.#roundTookMs = this.#roundEndedAt - startedAt;
    waitMs = this.#rest(this.#isWanted && error === null ? SHORTEST_REST_MS : waitMs);
    this.#schedule(waitMs);
    this.report({ error, retryMs: waitMs, hasStream: this.#hasStream });
  }

  /** Listen to the runs that the view shows now, and to the kinds of events that it asks for. */
  #follow() {
    if (!this.view.onEvent) return;
    const watched = this.view.watched ?? null;
    const query = [...(watched ?? []).map((id) => ["run", id]), ...(this.view.kinds ?? []).map((kind) => ["kind", kind])];
    const address = `api/v1/events${query.length ? `?${new URLSearchParams(query)}` : ""}`;
    if (address === this.#address) return;
    const wasLive = this.#hasStream;
    this.#closeStream();
    this.#address = address;
    if (watched !== null && watched.length === 0) return;
    this.#open();
    this.#hasStream = wasLive;
  }

  #open() {
    const source = new EventSource(this.#address);
    this.#source = source;
    source.addEventListener("ready", () => {
      if (this.#hasStream) return; // it follows other runs than before, and those have just been read
      this.#hasStream = true;
      // What happened before the service listened is read once more.
      if (this.#failures) this.now();
      else this.soon();
    });
    for (const type of KINDS) {
      source.addEventListener(type, ({ data }) => {
        if (this.view.onEvent({ type, data: JSON.parse(data) })) this.soon();
      });
    }
    source.addEventListener("error", () => {
      const wasLive = this.#hasStream;
      this.#hasStream = false;
      if (source.readyState === EventSource.CLOSED) this.#streamTimer = setTimeout(() => this.#open(), STREAM_RETRY_MS);
      if (wasLive) this.soon(); // tells at once whether the service is gone
    });
  }

  #closeStream() {
    clearTimeout(this.#streamTimer);
    this.#source?.close();
    this.#source = this.#address = null;
    this.#hasStream = false;
  }
}
