// The layers of several runs at one place, a small chart each, on one scale; the baseline's stand behind those of the others.

import { Chart, axis, base, decadesAxis, healthyBand, theme, tooltipOver, valueAxis } from "./chart.js";
import { namedLayers, withGaps } from "./profile.js";
import { inWords } from "../base/dom.js";
import { number } from "../base/format.js";
import { firstLayers, layerLabel } from "../base/stacks.js";

const LEAST_WIDTH = 165;
const MOST_COLUMNS = 4;
const PLOT_HEIGHT = 120;
const HEAD = 50;
const FOOT = 34;
const LEFT = 44;
const RIGHT = 14;
const SPAN_FOR_LOG = 30;

export class Profiles extends Chart {
  #columns = 0;

  constructor(element) {
    super(element);
    tooltipOver(element, this.chart, (x, y) => this.#describe(x, y));
  }

  /** Other widths have room for another number of charts in a row. */
  resized() {
    super.resized();
    if (this.model && this.#numColumns() !== this.#columns) this.show(this.model);
  }

  /** model: {metric, isLog, panels: [{run, title, note, colour, dash, values: a list or null, healthy: {layers: [{low, high}]} or null, isBaseline}]} */
  show(model) {
    this.model = model;
    this.#columns = this.#numColumns();
    const { panels } = model;
    const rows = Math.ceil(panels.length / this.#columns);
    this.setHeight(rows * (HEAD + PLOT_HEIGHT + FOOT));
    const colours = theme();
    const width = this.element.clientWidth / this.#columns;
    const all = panels.flatMap(({ values, healthy }) => [...(values ?? []), ...(healthy?.layers ?? []).flatMap(({ low, high }) => [low, high])]).filter((value) => value !== null);
    const above = all.filter((value) => value > 0);
    const isLog = model.isLog && above.length > 0 && Math.max(...above) > SPAN_FOR_LOG * Math.min(...above);
    const shown = (value) => (value === null || (isLog && value <= 0) ? null : value);
    const scale = rounded(...(all.length ? [Math.min(...all), Math.max(...all)] : [0, 1]));
    const place = (i) => ({ left: (i % this.#columns) * width, top: Math.floor(i / this.#columns) * (HEAD + PLOT_HEIGHT + FOOT) });
    const baseline = panels.find(({ isBaseline }) => isBaseline);
    const points = ({ run, values }) => (values ? withGaps(values.map((value, layer) => [layer, shown(value)]), firstLayers(run, values.length)) : []);
    const line = (id, i, data, options) => ({ id, type: "line", xAxisIndex: i, yAxisIndex: i, data, silent: true, ...options });
    this.chart.setOption(
      {
        ...base(colours),
        title: panels.map(({ title, note }, i) => {
          const { left, top } = place(i);
          const cut = { width: width - LEFT - RIGHT, overflow: "truncate" };
          return {
            text: inWords(title),
            subtext: note,
            left: left + LEFT - 8,
            top: top + 4,
            padding: 0,
            itemGap: 4,
            textStyle: { ...cut, color: colours.ink, fontSize: 12, lineHeight: 16, fontWeight: 600 },
            subtextStyle: { ...cut, color: colours.quiet, fontSize: 11, lineHeight: 14 },
          };
        }),
        grid: panels.map((_, i) => ({ left: place(i).left + LEFT, top: place(i).top + HEAD, width: width - LEFT - RIGHT, height: PLOT_HEIGHT })),
        xAxis: panels.map(({ run, values }, i) => axis(colours, { gridIndex: i, min: 0, max: Math.max((values?.length ?? 1) - 1, 1), minInterval: 1, ...namedLayers(colours, run, values?.length ?? 1), nameLocation: "middle", nameGap: 20 })),
        yAxis: panels.map((_, i) => (isLog ? decadesAxis(colours, above, { gridIndex: i }) : valueAxis(colours, { gridIndex: i, ...scale }))),
        series: panels.flatMap((panel, i) => [
          ...healthyBand(colours, `healthy ${i}`, (panel.healthy?.layers ?? []).map((range, layer) => [layer, range]), { xAxisIndex: i, yAxisIndex: i }),
          line(`baseline ${i}`, i, panel.isBaseline || !baseline ? [] : points(baseline), { color: colours.quiet, symbol: "none", lineStyle: { width: 1.5, color: colours.quiet, type: "dashed", opacity: 0.8 } }),
          line(`profile ${i}`, i, points(panel), { color: panel.colour, symbol: "circle", symbolSize: 4, showSymbol: (panel.values?.length ?? 0) <= 32, lineStyle: { width: 2, color: panel.colour, type: panel.dash } }),
        ]),
      },
      { notMerge: true },
    );
  }

  /** As many in a row as have room, and no more than fill the rows evenly. */
  #numColumns() {
    const num = this.model?.panels.length ?? 1;
    const most = Math.max(1, Math.min(Math.floor(this.element.clientWidth / LEAST_WIDTH), MOST_COLUMNS));
    return Math.ceil(num / Math.ceil(num / most));
  }

  #describe(x, y) {
    const { panels, metric } = this.model ?? { panels: [] };
    const at = panels.findIndex((_, i) => this.chart.containPixel({ gridIndex: i }, [x, y]));
    if (at < 0 || !panels[at].values) return null;
    const { run, title, note, values, isBaseline } = panels[at];
    const layer = Math.min(Math.max(Math.round(this.chart.convertFromPixel({ gridIndex: at }, [x, y])[0]), 0), values.length - 1);
    const baseline = isBaseline ? null : (panels.find((panel) => panel.isBaseline)?.values ?? null);
    const lines = [title, note, ["layer", layerLabel(layer, run, values.length)], [metric, number(values[layer])]];
    if (baseline && layer < baseline.length) lines.push(["baseline", number(baseline[layer])]);
    return lines;
  }
}

/** An axis that all charts share, from one round number to another with at most four steps between. */
function rounded(low, high) {
  const width = high - low || Math.abs(high) || 1;
  const unit = 10 ** Math.floor(Math.log10(width / 4));
  const interval = [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((step) => width / step <= 4);
  const at = (steps) => Number((steps * interval).toPrecision(12));
  return { min: at(Math.floor(low / interval)), max: at(Math.ceil(high / interval)), interval };
}
