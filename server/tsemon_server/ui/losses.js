// The losses of the latest runs, one over the other.

import { base, chartIn, linesOf, nearestIndex, stepAxis, theme, tooltipOver, valueAxis } from "./charts.js";
import { h, keyed } from "./dom.js";
import { count, number } from "./format.js";

/** Okabe and Ito's colours, told apart by colour-blind eyes, each readable on light and on dark. */
export const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#a08c00"];

export class Losses {
  #shown = [];
  #off = new Set();

  /** The chart goes into `element`, a button per run into `legend`. */
  constructor(element, legend) {
    this.legend = legend;
    this.chart = chartIn(element);
    tooltipOver(element, this.chart, (x, y) => this.#describe(x, y));
  }

  /** shown: [{id, title, colour, series}] */
  show(shown) {
    this.#shown = shown;
    const colours = theme();
    this.#showLegend();
    this.chart.setOption(
      {
        ...base(colours),
        grid: { left: 52, right: 14, top: 14, bottom: 30 },
        xAxis: stepAxis(colours, { min: "dataMin", max: "dataMax" }),
        yAxis: valueAxis(colours, {}),
        series: this.#visible().flatMap(({ id, colour, series }) => linesOf(series, { id, colour, band: false })),
      },
      { replaceMerge: ["series"] },
    );
  }

  redraw() {
    this.show(this.#shown);
  }

  end() {
    this.chart.end();
  }

  #visible() {
    return this.#shown.filter(({ id }) => !this.#off.has(id));
  }

  #showLegend() {
    const items = this.#shown.map(({ id, title, colour }) => ({ id, title, colour, isOn: !this.#off.has(id) }));
    keyed(this.legend, items, ({ id }) => id, ({ id, title, colour, isOn }) => {
      const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.background = colour;
      const button = h("button", { type: "button", "aria-pressed": String(isOn), onclick: () => this.#toggle(id) }, swatch, h("span", { class: "given" }, title));
      return h("li", {}, button);
    });
  }

  #toggle(id) {
    if (!this.#off.delete(id)) this.#off.add(id);
    this.redraw();
  }

  #describe(x, y) {
    if (!this.chart.containPixel({ gridIndex: 0 }, [x, y])) return null;
    const step = this.chart.convertFromPixel({ gridIndex: 0 }, [x, y])[0];
    const lines = this.#visible()
      .filter(({ series }) => series.step.length && step <= series.step.at(-1))
      .map(({ title, series }) => [title, number(series.mean[nearestIndex(series.step, step)])]);
    return lines.length ? [["step", count(Math.round(step))], ...lines] : null;
  }
}
