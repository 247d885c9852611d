// Any chart as a picture and as a table. Both say of which run, metric and steps they are, in their name and in their head.

import { h, inWords } from "../base/dom.js";
import { count, number } from "../base/format.js";

const DENSITY = 2;
const MARGIN = 16;
const HEAD_LINE = 20;
const SCALE_HEIGHT = 34;
const LONGEST_NAME = 60;

/**
 * Two buttons, PNG and CSV. `name` is what they say is downloaded ("Loss").
 *
 * `describe()` is asked when one is pressed, and gives null where there is nothing yet, else:
 *   runs     names of the runs that are shown
 *   metric   what is shown, as in "token_diversity of layer 3"
 *   steps    [first, last] that are shown
 *   chart    the chart (of a Chart); `area` {top, height} where only a part of it is meant
 *   scale    {low, high, gradient: [colours], note} of a heat map, drawn below the picture; optional
 *   columns  names of the table's columns
 *   rows     its rows; null is a value that is not finite or not there
 */
export function downloads(name, describe) {
  const button = (suffix, save) =>
    h("button", { type: "button", class: "download", "aria-label": `${name} as ${suffix.toUpperCase()}`, title: `Download: ${name} as ${suffix.toUpperCase()}`, onclick: () => {
      const shown = describe();
      if (shown) save(shown);
    } }, suffix.toUpperCase());
  return h("span", { class: "downloads" }, button("png", savePng), button("csv", saveCsv));
}

/** "gpt-82m_token_diversity_steps-0-1000.csv": of letters, digits and a few signs that every file system takes. */
export function fileName({ runs, metric, steps }, suffix) {
  const [first, ...others] = runs;
  const who = others.length ? `${tame(first)}-and-${others.length}-more` : tame(first);
  return `${who}_${tame(metric)}_steps-${steps[0]}-${steps[1]}.${suffix}`;
}

const tame = (text) => text.replace(/[^\p{L}\p{N}._-]+/gu, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, LONGEST_NAME) || "unnamed";

/** A table after three lines of comment. `pandas.read_csv(path, comment="#")` and most programs read it as it is. */
export function csvOf({ runs, metric, steps, columns, rows }) {
  const head = [`run: ${runs.join(", ")}`, `metric: ${metric}`, `steps: ${steps[0]} to ${steps[1]}`];
  return `${[...head.map((line) => `# ${inert(oneLine(line))}`), ...[columns, ...rows].map((row) => row.map(cell).join(","))].join("\r\n")}\r\n`;
}

const oneLine = (text) => text.replace(/[\r\n\u0085\u2028\u2029]+/g, " ");

// In a comment, a comma of a name begins another cell.
const inert = (text) => text.replace(/([,;\t]\s*)([=+\-@＝＋－＠])/g, "$1'$2");

function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  // What begins like a formula would be run as one by a spreadsheet, and names come from clients.
  const text = /^[=+\-@\t\r\n＝＋－＠]/.test(value) ? `'${value}` : value;
  return /[",#\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const saveCsv = (shown) => save(new Blob([csvOf(shown)], { type: "text/csv" }), fileName(shown, "csv"));

const savePng = (shown) => pictureOf(shown).toBlob((blob) => save(blob, fileName(shown, "png")), "image/png");

/** The chart as it is on the screen, twice as sharp, with what it is above it. */
function pictureOf({ runs, metric, steps, chart, area, scale }) {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const drawn = chart.renderToCanvas({ pixelRatio: DENSITY, backgroundColor: read("card") });
  const { top, height } = area ?? { top: 0, height: drawn.height / DENSITY };
  const width = drawn.width / DENSITY;
  const head = MARGIN + 2 * HEAD_LINE + 6;
  const picture = document.createElement("canvas");
  picture.width = drawn.width + 2 * MARGIN * DENSITY;
  picture.height = (head + height + (scale ? SCALE_HEIGHT : 0) + MARGIN) * DENSITY;
  const pen = picture.getContext("2d");
  pen.scale(DENSITY, DENSITY);
  pen.fillStyle = read("card");
  pen.fillRect(0, 0, picture.width, picture.height);
  const write = (text, x, y, ink, weight = 400) => {
    pen.font = `${weight} 13px ${read("font")}`;
    pen.fillStyle = read(ink);
    pen.fillText(inWords(text), x, y, MARGIN + width - x);
  };
  write(metric, MARGIN, MARGIN + 12, "ink", 650);
  write(`${oneLine(runs.join(", "))} · steps ${count(steps[0])} to ${count(steps[1])}`, MARGIN, MARGIN + 12 + HEAD_LINE, "quiet");
  pen.drawImage(drawn, 0, top * DENSITY, drawn.width, height * DENSITY, MARGIN, head, width, height);
  if (scale) drawScale(pen, scale, head + height + 8, width, write);
  return picture;
}

function drawScale(pen, { low, high, gradient, note }, top, width, write) {
  const [left, long] = [MARGIN + 52, Math.min(180, width / 3)];
  const colours = pen.createLinearGradient(left, 0, left + long, 0);
  gradient.forEach((colour, i) => colours.addColorStop(i / (gradient.length - 1), colour));
  pen.fillStyle = colours;
  pen.fillRect(left, top, long, 10);
  write(`${number(low)} to ${number(high)}${note ? ` · ${note}` : ""}`, left + long + 10, top + 10, "quiet");
}

function save(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000); // the browser reads it after the click has been handled
}
