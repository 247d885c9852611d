// The heads of one layer at one step, as they were recorded.

import { ListChart, axis, base, theme, valueAxis } from "./chart.js";
import { number } from "../base/format.js";

export class Heads extends ListChart {
  /** model: {metric name, values: one per head, head: the one that is picked or null} */
  show(model) {
    this.model = model;
    const colours = theme();
    const bar = (value, head) => ({ value, itemStyle: { color: colours.accent, opacity: model.head === null || model.head === head ? 1 : 0.45 } });
    const gaps = model.values.flatMap((value, head) => (value === null ? [[head, 0]] : []));
    this.chart.setOption(
      {
        ...base(colours),
        grid: { left: 54, right: 14, top: 12, bottom: 36 },
        xAxis: axis(colours, { type: "category", data: model.values.map((_, head) => String(head)), name: "head", nameLocation: "middle", nameGap: 22 }),
        yAxis: valueAxis(colours, { scale: false }),
        series: [
          { id: "heads", type: "bar", data: model.values.map(bar), barCategoryGap: "25%", silent: true },
          // A head without a finite value is not one of value zero.
          { id: "not finite", type: "scatter", data: gaps, symbol: "rect", symbolSize: [10, 14], symbolOffset: [0, -7], itemStyle: { color: colours.alarm }, silent: true },
        ],
      },
      { replaceMerge: ["series"] },
    );
  }

  describe(head) {
    const { metric, values } = this.model;
    return [["head", String(head)], [metric, number(values[head])]];
  }
}
