// Numbers and times for people.

import { serverNow } from "./api.js";
import { h } from "./dom.js";

/** A measured value: four significant digits; null is what JSON carries for NaN and the infinities. */
export function number(value) {
  if (value === null || value === undefined) return "not finite";
  if (typeof value !== "number") return String(value);
  if (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5)) return String(Number(value.toPrecision(4)));
  return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
}

/** What the service says, with its numbers as they are written here: it writes 0.0005 and 1e-06. */
export const worded = (text) => text.replace(/(?<![\w.])(?:0\.000\d+|\d(?:\.\d+)?e[+-]\d+)(?!\w|\.\d)/g, (found) => number(Number(found)));

export const count = (value) => value.toLocaleString("en");

/** How long ago, in the largest unit that fits. */
export function ago(iso) {
  const seconds = Math.max(0, (serverNow() - Date.parse(iso)) / 1000);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  }
  return seconds < 5 ? "just now" : `${Math.floor(seconds)} s ago`;
}

/** So many seconds, in the two largest units. */
export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const [d, rest] = [Math.floor(whole / 86400), whole % 86400];
  const [hours, min, s] = [Math.floor(rest / 3600), Math.floor((rest % 3600) / 60), rest % 60];
  if (d) return hours ? `${count(d)} d ${hours} h` : `${count(d)} d`;
  if (hours) return min ? `${hours} h ${min} min` : `${hours} h`;
  if (min) return s ? `${min} min ${s} s` : `${min} min`;
  return whole >= 10 || seconds === whole ? `${whole} s` : `${number(seconds)} s`;
}

export const time = (iso) => h("time", { datetime: iso, title: new Date(iso).toLocaleString() }, ago(iso));

/** Bring all shown ages up to date. */
export function refreshAges(root) {
  for (const element of root.querySelectorAll("time")) {
    const text = ago(element.dateTime);
    if (element.textContent !== text) element.textContent = text;
  }
}

export const statePill = (state) => h("span", { class: `pill ${state}` }, state);

/** An alert's state in words; one that `stood` fired when its run ended, and did not resolve. */
export const wordsOf = (state) => (state === "stood" ? "fired to the end" : state);
