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

export const count = (value) => value.toLocaleString("en");

/** How long ago, in the largest unit that fits. */
export function ago(iso) {
  const seconds = Math.max(0, (serverNow() - Date.parse(iso)) / 1000);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  }
  return seconds < 5 ? "just now" : `${Math.floor(seconds)} s ago`;
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
