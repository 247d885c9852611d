// A rule in words.

import { h } from "../base/dom.js";
import { count, worded } from "../base/format.js";

/** The title of a rule that has none. */
export const titleOf = (name) => `${name[0].toUpperCase()}${name.slice(1)}`.replaceAll("-", " ");

/** A condition, line by line; what goes on in the next line of the page hangs. */
export function termsOf(lines, hold = "", otherwise = "") {
  const told = lines.map(({ depth, text }) => {
    const line = h("li", {}, worded(text));
    line.style.marginInlineStart = `${depth * 16}px`;
    return line;
  });
  return h("div", { class: "term" }, told.length ? h("ul", {}, told) : otherwise, hold ? h("p", { class: "quiet" }, hold) : null);
}

/** The start of an attempt that a rule leaves out. */
export function startOf({ samples, steps }, isClock) {
  const parts = [samples ? some(samples, "sample") : "", steps ? some(steps, isClock ? "second" : "step") : ""].filter(Boolean);
  return `in the first ${parts.join(" and ")} of an attempt`;
}

export const isNone = ({ samples, steps }) => samples === 0 && steps === 0;

const some = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

export function holdOf({ samples, steps }, isClock) {
  const unit = isClock ? "second" : "step";
  if (samples <= 1 && steps === 0) return "at once";
  if (steps === 0) return `for ${some(samples, "sample")} in a row`;
  if (samples <= 1) return `for ${some(steps, unit)}`;
  return `for ${some(samples, "sample")} in a row, over at least ${some(steps, unit)}`;
}

/** Whether a rule is as it came with tsemon, was written by somebody, or changed by somebody. */
export const originOf = ({ origin, version }) => (origin === "built-in" ? "built in" : version === 1 ? "added" : "edited");
