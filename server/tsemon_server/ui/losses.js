// The losses of the latest runs, one over the other.

import { base, chartIn, linesOf, nearestIndex, stepAxis, theme, tooltipOver, valueAxis } from "./charts.js";
import { count, number } from "./format.js";

/** Okabe and Ito's colours, told apart by colour-blind eyes, each readable on light and on dark. */
export const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#a08c00"];

export class Losses {
  #shown = [];

  constructor(element) {
    this.chart = chartIn(element);
    tooltipOver(element, this.chart, (x, y) => this.#describe(x, y));
  }

  /** shown: [{id, title, colour, series}] */
  show(shown) {
    this.#shown = shown;
    const colours = theme();
    const titles = new Map(shown.map(({ id, title }) => [id, title]));
    this.chart.setOption(
      {
        ...base(colours),
        grid: { left: 52, right: 14, top: 40, bottom: 30 },
        legend: {
          type: "scroll",
          top: 4,
          left: 44,
          right: 10,
          icon: "roundRect",
          itemWidth: 14,
          itemHeight: 4,
          data: shown.map(({ id }) => id),
          formatter: (id) => titles.get(id) ?? "",
          textStyle: { color: colours.ink, fontSize: 11, width: 160, overflow: "truncate" },
          pageTextStyle: { color: colours.quiet },
        },
        xAxis: stepAxis(colours, { min: "dataMin", max: "dataMax" }),
        yAxis: valueAxis(colours, {}),
        series: shown.flatMap(({ id, colour, series }) => linesOf(series, { id, colour, band: false })),
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

  #describe(x, y) {
    if (!this.chart.containPixel({ gridIndex: 0 }, [x, y])) return null;
    const step = this.chart.convertFromPixel({ gridIndex: 0 }, [x, y])[0];
    const selected = this.chart.getOption().legend[0].selected;
    const lines = this.#shown
      .filter(({ id, series }) => selected[id] !== false && series.step.length && step <= series.step.at(-1))
      .map(({ title, series }) => [title, number(series.mean[nearestIndex(series.step, step)])]);
    return lines.length ? [["step", count(Math.round(step))], ...lines] : null;
  }
}
