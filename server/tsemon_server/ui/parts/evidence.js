// What a rule saw, each thing in the form that it reads best in.

import { h } from "../base/dom.js";
import { count, duration, number } from "../base/format.js";

const BOUNDS = ["above", "below", "at_least", "at_most"];
const PLACES = ["first", "middle", "last", "lowest", "highest"];

/** The conditions as lines: what was seen and what it was held against; null where the rule tells of none. */
export function seenOf(evidence) {
  const known = (Array.isArray(evidence?.conditions) ? evidence.conditions : []).filter((one) => isRecord(one) && typeof one.holds === "boolean");
  if (known.length === 0) return null;
  // A measure that is held against two bounds is one line; those that hold come first.
  const lines = Object.values(Object.groupBy(known, (one) => JSON.stringify([one.value, one.layer, one.holds])));
  return h("ul", { class: "seen", "aria-label": "Conditions" }, lines.sort(([a], [b]) => b.holds - a.holds).map(lineOf));
}

/** The first of the recorded metrics that the evidence names, in a value or as a key, at any depth. */
export function metricIn(evidence, recorded) {
  if (typeof evidence === "string") return evidence.split(/\W+/).find((word) => Object.hasOwn(recorded, word)) ?? null;
  for (const [name, value] of Object.entries(evidence ?? {})) {
    const found = Object.hasOwn(recorded, name) ? name : metricIn(value, recorded);
    if (found) return found;
  }
  return null;
}

/** Of which layer a condition speaks, as the service writes it; nothing where it has none. */
const whereOf = (at) => (at.layer === undefined || at.layer === null ? "" : ` (${nameOf(at)})`);

/** With several stacks a layer has a label, such as "decoder 3". Evidence of older versions has no block. */
const nameOf = ({ layer, block, label }) => label ?? (block === undefined ? `layer ${layer}` : block === null ? "input of the first block" : `block ${block}`);

/** The rule was met when this was seen, so that what does not hold is one of several of which some are enough. */
function lineOf(bounds) {
  const [{ value, seen, holds }] = bounds;
  const where = whereOf(bounds[0]);
  const limits = bounds.map(limitOf).filter(Boolean).join(" and ");
  return h("li", { class: holds ? "holds" : "fails" }, `${value}${where} `, h("b", {}, inUnit(value, seen)), limits ? `, ${limits}` : "", holds ? "" : ": does not hold, and need not");
}

function limitOf(condition) {
  const limits = BOUNDS.filter((name) => typeof condition[name] === "number").map((name) => `${wordsOf(name)} ${inUnit(condition.value, condition[name])}`);
  return limits.join(", ") + (limits.length && condition.against ? ` (${condition.against})` : "");
}

/** All else that the rule saw, closed; null is what was not measured or is not finite. */
export function evidenceOf(evidence) {
  const { layers, window, ...rest } = evidence ?? {};
  if (Array.isArray(rest.conditions)) delete rest.conditions;
  const entries = Object.entries(rest).filter(([, value]) => !isEmpty(value));
  const measured = Object.entries(layers ?? {}).filter(([, places]) => !isEmpty(places));
  const parts = [
    measured.length ? [h("h3", {}, "Layers"), layersOf(measured)] : null,
    isEmpty(window) ? null : windowOf(window),
    entries.length ? listOf(entries) : null,
  ].filter(Boolean);
  return parts.length ? h("details", { class: "evidence" }, h("summary", {}, "What the rule saw"), parts) : null;
}

function layersOf(layers) {
  const head = h("thead", {}, h("tr", {}, PLACES.map((place) => h("th", { scope: "col" }, place))));
  const cell = (at) => h("td", {}, at ? [number(at.value), h("small", {}, nameOf(at))] : "–");
  const body = ([name, places]) => h("tbody", {}, h("tr", {}, h("th", { scope: "rowgroup", colspan: PLACES.length }, name)), h("tr", {}, PLACES.map((place) => cell(places?.[place]))));
  return h("table", {}, head, layers.map(body));
}

/**
 * Samples down, values across. The checks of a time-based rule have no steps: their rows show how long before the alert they
 * were made. Names are too long for the heads of columns, so they are numbered above.
 */
function windowOf(rows) {
  const hasSteps = rows.some((row) => Object.hasOwn(row, "step"));
  const [title, place, head, textAt] = hasSteps ? ["Last samples before the alert", "step", "step", count] : ["Last checks before the alert", "seconds", "before", (seconds) => duration(-seconds)];
  const names = [...new Set(rows.flatMap(Object.keys))].filter((name) => name !== place);
  const heads = h("tr", {}, h("th", { scope: "col" }, head), names.map((name, i) => h("th", { scope: "col", "aria-label": name, title: name }, `${i + 1}`)));
  const row = (sample) => h("tr", {}, h("td", {}, textAt(sample[place])), names.map((name) => h("td", {}, inUnit(name, sample[name] ?? null, textOf))));
  return [h("h3", {}, title), h("ol", {}, names.map((name) => h("li", {}, name))), h("table", { class: "window" }, h("thead", {}, heads), h("tbody", {}, rows.map(row)))];
}

const listOf = (entries) => h("dl", {}, entries.map(([name, value]) => [h("dt", {}, wordsOf(name)), h("dd", {}, textOf(value))]));

/** A value with its unit, if the name tells it: `silent_seconds` does, the ratio of two times has none. */
const inUnit = (name, value, textOf = number) => (/^(\w+_)?seconds$/.test(name) && typeof value === "number" && value >= 0 ? duration(value) : textOf(value));

function textOf(value) {
  if (value === null) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.map(textOf).join(", ");
  if (isRecord(value)) return Object.entries(value).map(([name, one]) => `${wordsOf(name.replace(/_?seconds$/, ""))} ${inUnit(name, one, textOf)}`.trim()).join(", ");
  return number(value);
}

const isRecord = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isEmpty = (value) => value === null || value === undefined || (typeof value === "object" && Object.keys(value).length === 0);
const wordsOf = (name) => name.replaceAll("_", " ");
