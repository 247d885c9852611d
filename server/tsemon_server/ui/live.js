// Polling: one request round at a time, none while nobody looks, and back on its own after an outage.

const FIRST_RETRY_MS = 2000;
const LONGEST_RETRY_MS = 15_000;
const REST_RATIO = 4;

export class Live {
  #controller = null;
  #timer = null;
  #failures = 0;
  #onVisibility = () => (document.hidden ? this.#halt() : this.now());

  /**
   * `refresh(signal)` does one round and returns the milliseconds until the next.
   * `report({error, retryMs})` is told after each round; error is null when all went well.
   */
  constructor(refresh, report) {
    this.refresh = refresh;
    this.report = report;
  }

  start() {
    document.addEventListener("visibilitychange", this.#onVisibility);
    this.now();
  }

  stop() {
    document.removeEventListener("visibilitychange", this.#onVisibility);
    this.#halt();
  }

  /** Begin a round at once, in place of the one under way. */
  now() {
    this.#halt();
    if (!document.hidden) this.#round();
  }

  #halt() {
    clearTimeout(this.#timer);
    this.#controller?.abort();
    this.#controller = null;
  }

  async #round() {
    const controller = new AbortController();
    this.#controller = controller;
    const startedAt = performance.now();
    let waitMs;
    let error = null;
    try {
      // Long answers are asked for less often, so that a page that stays open never keeps the service busy.
      waitMs = await this.refresh(controller.signal);
      waitMs = Math.max(waitMs, REST_RATIO * (performance.now() - startedAt));
      this.#failures = 0;
    } catch (caught) {
      error = caught;
      waitMs = Math.min(FIRST_RETRY_MS * 2 ** this.#failures, LONGEST_RETRY_MS);
      this.#failures += 1;
    }
    if (controller.signal.aborted) return;
    this.report({ error, retryMs: waitMs });
    this.#timer = setTimeout(() => this.#round(), waitMs);
  }
}
