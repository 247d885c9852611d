// One metric of several runs, over each other along one axis, with the place that is looked at.

import { ZoomChart, axis, base, decadesAxis, healthyBand, linesOf, nearestIndex, pointer, stepLabels, theme, tooltipOver, valueAxis } from "./chart.js";
import { number } from "../base/format.js";

const SIDE = { left: 58, right: 16 };
const MOST_BANDS = 3;

export class Overlay extends ZoomChart {
  /** `onPick(x)` when a place is clicked, `onZoom` as in `ZoomChart`. */
  constructor(element, { onPick, onZoom }) {
    super(element, { onZoom });
    this.onClick((offsetX, offsetY) => {
      const x = this.#xAt(offsetX, offsetY);
      if (x !== null) onPick(x);
    });
    tooltipOver(element, this.chart, (x, y) => this.#describe(x, y));
  }

  /**
   * model: {lines: [{id, title, colour, dash, series: {x, min, mean, max}}], extent: [first, last x], zoom, picked: x or null,
   * isLog, isDifference, axisName, formatX, healthy: {low, high} or null}
   */
  show(model) {
    this.model = model;
    const colours = theme();
    const [min, max] = model.extent;
    const values = [...model.lines.flatMap(({ series }) => series.mean), ...Object.values(model.healthy ?? {})];
    const above = model.isLog ? values.filter((value) => value > 0) : [];
    const option = {
      ...base(colours),
      grid: { ...SIDE, top: 14, bottom: 74 },
      xAxis: axis(colours, {
        min,
        max,
        name: model.axisName,
        nameLocation: "middle",
        nameGap: 24,
        axisLabel: stepLabels(colours, model.formatX),
        axisPointer: pointer(colours),
      }),
      yAxis: above.length ? decadesAxis(colours, above, {}) : valueAxis(colours, {}),
      dataZoom: this.zoomOf(model.zoom, colours, { left: SIDE.left, last: max, format: model.formatX, bottom: 12 }),
      series: [...(model.healthy ? healthyBand(colours, "healthy", model.extent.map((x) => [x, model.healthy])) : []), ...this.#lines(model), ...this.#marks(model, colours)],
    };
    this.chart.setOption(option, { replaceMerge: ["series", "yAxis"] });
  }

  #lines({ lines, isLog, isDifference }) {
    // A logarithm has no place for what is not above zero.
    const shown = (values) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);
    const band = !isDifference && !isLog && lines.length <= MOST_BANDS;
    return lines.flatMap(({ id, colour, dash, series }) => {
      const { x, min, mean, max } = series;
      const drawn = linesOf({ step: x, min: shown(min), mean: shown(mean), max: shown(max) }, { id, colour, band });
      drawn.at(-1).lineStyle.type = dash;
      return drawn;
    });
  }

  #marks({ picked, isDifference }, colours) {
    const marks = [];
    if (picked !== null) marks.push({ xAxis: picked, lineStyle: { color: colours.ink, type: "dotted", width: 1.5 } });
    if (isDifference) marks.push({ yAxis: 0, lineStyle: { color: colours.quiet, type: "solid", width: 1 } });
    return [{ id: "marks", type: "line", data: [], silent: true, markLine: { symbol: "none", silent: true, animation: false, label: { show: false }, data: marks } }];
  }

  #xAt(x, y) {
    return this.model && this.chart.containPixel({ gridIndex: 0 }, [x, y]) ? this.chart.convertFromPixel({ gridIndex: 0 }, [x, y])[0] : null;
  }

  #describe(offsetX, offsetY) {
    const x = this.#xAt(offsetX, offsetY);
    if (x === null) return null;
    const { lines, formatX, axisName, extent } = this.model;
    const near = (extent[1] - extent[0]) / 50;
    const values = lines.flatMap(({ title, series }) => {
      if (!series.x.length) return [];
      const at = nearestIndex(series.x, x);
      const isPast = x < series.x[0] - near || x > series.x.at(-1) + near;
      return isPast ? [] : [[title, number(series.mean[at]), series.mean[at]]];
    });
    if (!values.length) return null;
    const descending = values.sort(([, , a], [, , b]) => (b ?? Infinity) - (a ?? Infinity));
    return [[axisName, formatX(x)], ...descending.map(([title, value]) => [title, value])];
  }
}
