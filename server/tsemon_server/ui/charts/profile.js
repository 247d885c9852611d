// One column of the heat map: the metric's value against depth, at one step.

import { ListChart, axis, base, theme, valueAxis } from "./chart.js";
import { number } from "../base/format.js";
import { layerName } from "./timeline.js";

const SPAN_FOR_LOG = 30;

export class Profile extends ListChart {
  /** model: {metric name, log, values: one column, layer: the one that is picked or null, blocks, isActivation} */
  show(model) {
    this.model = model;
    const colours = theme();
    // Within a decade or so, a logarithmic axis has no ticks to read by.
    const above = model.values.filter((value) => value > 0);
    const isLog = model.log && Math.max(...above) > SPAN_FOR_LOG * Math.min(...above);
    // A logarithm has no place for what is not above zero; those points are gaps, and the tooltip still names them.
    const shown = (value) => (isLog && !(value > 0) ? null : value);
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
      xAxis: axis(colours, { min: 0, max: Math.max(model.values.length - 1, 1), minInterval: 1, name: "layer", nameLocation: "middle", nameGap: 22 }),
      yAxis: valueAxis(colours, { type: isLog ? "log" : "value" }),
      series: [
        {
          id: "profile",
          type: "line",
          data: model.values.map((value, layer) => [layer, shown(value)]),
          color: colours.accent,
          lineStyle: { width: 1.5 },
          symbol: "circle",
          symbolSize: (_, { dataIndex }) => (dataIndex === model.layer ? 11 : 5),
          showSymbol: true,
          silent: true,
          markLine: {
            symbol: "none",
            silent: true,
            animation: false,
            data: model.layer === null ? [] : [{ xAxis: model.layer, label: { show: false }, lineStyle: { color: colours.ink, type: "dotted", width: 1.5 } }],
          },
        },
      ],
    };
    // An axis that turns from linear to logarithmic is another axis, which a merge would not make.
    this.chart.setOption(option, { replaceMerge: ["yAxis", "series"] });
  }

  describe(layer) {
    const { values, metric, blocks, isActivation } = this.model;
    return [["layer", `${layer} · ${layerName(layer, blocks, isActivation)}`], [metric, number(values[layer])]];
  }
}
