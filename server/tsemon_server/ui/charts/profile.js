// One column of the heat map: the metric's value against depth, at one step.

import { ListChart, axis, base, decadesAxis, healthyBand, theme, valueAxis } from "./chart.js";
import { number } from "../base/format.js";
import { firstLayers, layerLabel, layerTitle } from "../base/stacks.js";

const SPAN_FOR_LOG = 30;

export class Profile extends ListChart {
  /** model: {run, metric name, log, values: one column, layer: the one that is picked or null, healthy: [{low, high}] of the layers or null} */
  show(model) {
    this.model = model;
    const colours = theme();
    // Within a decade or so, a logarithmic axis has no ticks to read by.
    const band = model.healthy ?? [];
    const above = [...model.values, ...band.flatMap(({ low, high }) => [low, high])].filter((value) => value > 0);
    const isLog = model.log && Math.max(...above) > SPAN_FOR_LOG * Math.min(...above);
    // A logarithm has no place for what is not above zero; those points are gaps, and the tooltip still names them.
    const shown = (value) => (isLog && !(value > 0) ? null : value);
    const firsts = firstLayers(model.run, model.values.length);
    const mark = (xAxis, type) => ({ xAxis, label: { show: false }, lineStyle: { color: colours.ink, type, width: type === "solid" ? 1 : 1.5 } });
    const option = {
      ...base(colours),
      title: {
        show: model.values.every((value) => shown(value) === null),
        text: "nothing finite at this step",
        left: "center",
        top: "middle",
        textStyle: { color: colours.quiet, fontSize: 12, fontWeight: 400 },
      },
      grid: { left: 54, right: 14, top: 12, bottom: 36 },
      xAxis: axis(colours, { min: 0, max: Math.max(model.values.length - 1, 1), minInterval: 1, ...namedLayers(colours, model.run, model.values.length), nameLocation: "middle", nameGap: 22 }),
      yAxis: isLog ? decadesAxis(colours, above, {}) : valueAxis(colours, {}),
      series: [
        {
          id: "profile",
          type: "line",
          data: withGaps(model.values.map((value, layer) => [layer, shown(value)]), firsts),
          color: colours.accent,
          lineStyle: { width: 1.5 },
          symbol: "circle",
          symbolSize: ([layer]) => (layer === model.layer ? 11 : 5),
          showSymbol: true,
          silent: true,
          markLine: {
            symbol: "none",
            silent: true,
            animation: false,
            data: [...firsts.slice(1).map((first) => mark(first - 0.5, "solid")), ...(model.layer === null ? [] : [mark(model.layer, "dotted")])],
          },
        },
        ...(band.length ? healthyBand(colours, "healthy", band.map((range, layer) => [layer, range])) : []),
      ],
    };
    // An axis that turns from linear to logarithmic is another axis, which a merge would not make.
    this.chart.setOption(option, { replaceMerge: ["yAxis", "series"] });
  }

  describe(layer) {
    const { run, values, metric, healthy } = this.model;
    const range = healthy ? [["healthy runs", `${number(healthy[layer].low)} to ${number(healthy[layer].high)}`]] : [];
    return [["layer", layerTitle(layer, run, values.length)], [metric, number(values[layer])], ...range];
  }
}

/** Points [layer, value] with a gap between stacks: a line goes from block to block only. */
export const withGaps = (points, firsts) => points.flatMap((point) => (point[0] > 0 && firsts.includes(point[0]) ? [[point[0] - 0.5, null], point] : [point]));

/** The layers of an axis; with several stacks, each by its name where it begins. */
export function namedLayers(colours, run, numLayers) {
  const firsts = firstLayers(run, numLayers);
  if (firsts.length < 2) return { name: "layer" };
  const last = numLayers - 1;
  return { name: "layer", axisLabel: { color: colours.quiet, fontSize: 11, hideOverlap: true, customValues: [...firsts, last], formatter: (layer) => layerLabel(layer, run, numLayers) } };
}
