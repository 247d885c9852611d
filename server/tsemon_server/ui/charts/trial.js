// What a rule saw of a run: each comparison's value over steps with its bounds, and when the rule would have been pending and firing.

import { Chart, axis, base, nearestIndex, stepLabels, theme, tooltipOver, valueAxis } from "./chart.js";
import { h } from "../base/dom.js";
import { count, number, worded } from "../base/format.js";

/** The least of it: a head is as high as its words in the window need. */
const HEAD = 30;
const PLOT = 104;
const GAP = 10;
const FOOT = 26;
const LEFT = 58;
const RIGHT = 16;
const SPAN_FOR_LOG = 30;

export class TrialChart extends Chart {
  constructor(element) {
    super(element);
    this.heads = h("div", { class: "trial-heads" });
    element.append(this.heads);
    tooltipOver(element, this.chart, (x, y) => this.#describe(x, y));
  }

  /** model: {panels (panelsOf), spans, first_step, last_step} of a trace (`POST /rules/test`) */
  show(model) {
    this.model = model;
    const colours = theme();
    const { panels } = model;
    this.heads.replaceChildren(...panels.map(headOf));
    const tops = this.#layOut();
    this.setHeight(tops.at(-1) + PLOT + GAP + FOOT);
    const [min, max] = [model.first_step, Math.max(model.last_step, model.first_step + 1)];
    const option = {
      ...base(colours),
      grid: panels.map((_, i) => ({ id: `${i}`, outerBoundsMode: "none", left: LEFT, right: RIGHT, top: tops[i], height: PLOT })),
      xAxis: panels.map((_, i) =>
        axis(colours, { id: `${i}`, gridIndex: i, min, max, minInterval: 1, axisLabel: { ...stepLabels(colours), show: i === panels.length - 1, showMinLabel: true, showMaxLabel: true } }),
      ),
      yAxis: panels.map((panel, i) => valueAxis(colours, { id: `${i}`, gridIndex: i, splitNumber: 3, type: isLog(panel) ? "log" : "value" })),
      series: panels.flatMap((panel, i) => this.#seriesOf(panel, i, colours, max)),
    };
    // An axis that turns from linear to logarithmic is another axis, which a merge would not make.
    this.chart.setOption(option, { replaceMerge: ["grid", "xAxis", "yAxis", "series"] });
  }

  /** A window of another width needs heads of another height. */
  resized() {
    const isWider = this.element.clientWidth !== this.chart.getWidth();
    super.resized();
    if (isWider) this.redraw();
  }

  /** Let each head stand above its plot: the tops of the plots. */
  #layOut() {
    let bottom = 0;
    return [...this.heads.children].map((head) => {
      head.style.top = `${bottom + 4}px`;
      const top = bottom + Math.max(HEAD, head.offsetHeight + 12);
      bottom = top + PLOT + GAP;
      return top;
    });
  }

  #seriesOf({ comparisons }, i, colours, last) {
    const [{ points }] = comparisons;
    const at = { xAxisIndex: i, yAxisIndex: i, type: "line", silent: true, emphasis: { disabled: true } };
    const isAlone = (k) => (points[k - 1]?.seen ?? null) === null && (points[k + 1]?.seen ?? null) === null;
    return [
      {
        ...at, id: `${i} seen`, z: 3, color: colours.accent, lineStyle: { width: 1.5, color: colours.accent },
        data: points.map(({ step, seen }) => [step, seen]),
        symbol: "circle", symbolSize: (_, { dataIndex }) => (isAlone(dataIndex) ? 5 : 0),
        markArea: { silent: true, data: areasOf(this.model.spans, colours, last) },
        markLine: { silent: true, symbol: "none", animation: false, label: { show: false }, lineStyle: { color: colours.alarm, type: "solid", width: 1.5 }, data: firedAt(this.model.spans).map((xAxis) => ({ xAxis })) },
      },
      ...comparisons.flatMap(boundsOf).map(({ id, data }) => ({
        ...at, id: `${i} ${id}`, data, z: 2, color: colours.quiet, symbol: "none", lineStyle: { width: 1.2, type: "dashed", color: colours.quiet },
      })),
    ];
  }

  #describe(x, y) {
    if (!this.model) return null;
    const i = this.model.panels.findIndex((_, place) => this.chart.containPixel({ gridIndex: place }, [x, y]));
    if (i < 0) return null;
    const [step] = this.chart.convertFromPixel({ gridIndex: i }, [x, y]);
    const points = this.model.panels[i].comparisons.map(({ points }) => points[nearestIndex(points.map((one) => one.step), step)]);
    const [first] = points;
    const layer = first.layer === null ? [] : [["layer", first.layer]];
    const answers = points.flatMap(({ bounds, holds }) => {
      const told = Object.entries(bounds).map(([name, bound]) => `${name.replace("_", " ")} ${number(bound)}`);
      return [[told.join(", ") || "answer", holds === null ? "not known" : holds ? "holds" : "does not hold"]];
    });
    return [["step", count(first.step)], ["value", number(first.seen)], ...layer, ...answers];
  }
}

/** Comparisons that are drawn together: those of one curve that is held against several bounds, each once. */
export function panelsOf(comparisons) {
  const distinct = Object.values(Object.groupBy(comparisons, (one) => `${one.text} ${curveOf(one)}`)).map(([first]) => first);
  const known = distinct.filter(({ points }) => points.some(({ seen }) => seen !== null));
  const groups = Object.groupBy(known, curveOf);
  return Object.values(groups)
    .map((group) => ({ comparisons: group, at: known.indexOf(group[0]) }))
    .sort((a, b) => a.at - b.at);
}

/** What tells curves apart: of values with layers the bound may choose another layer, and so another curve. */
const curveOf = ({ value, points }) => (points.every(({ layer }) => layer === null) ? value : JSON.stringify([value, points.map(({ seen, layer }) => [seen, layer])]));

function headOf({ comparisons }) {
  const text = comparisons.map((one, k) => worded(k ? one.text.replace(one.value, "").trim() : one.text)).join(", ");
  const held = comparisons.map(({ num_held }) => count(num_held)).join(" and ");
  return h("h4", { title: text }, h("span", { class: "given" }, text), h("span", { class: "quiet" }, `held in ${held} of ${count(comparisons[0].num_known)} samples`));
}

const firedAt = (spans) => spans.map((span) => span.firing_step).filter((step) => step !== null);

/** From the step where the condition was met it is pending, from the one where it had lasted it fires. */
function areasOf(spans, colours, last) {
  const area = (from, to, color, opacity) => [{ xAxis: from, itemStyle: { color, opacity } }, { xAxis: to }];
  return spans.flatMap(({ pending_step, firing_step, end_step }) => [
    area(pending_step, firing_step ?? end_step ?? last, colours.warn, 0.16),
    ...(firing_step === null ? [] : [area(firing_step, end_step ?? last, colours.alarm, 0.16)]),
  ]);
}

/** Each bound of a comparison over steps. */
const boundsOf = ({ points }, k) =>
  [...new Set(points.flatMap(({ bounds }) => Object.keys(bounds)))].map((name) => ({ id: `${name} ${k}`, data: points.map(({ step, bounds }) => [step, bounds[name] ?? null]) }));

/** A value over several decades, with bounds that a logarithm has a place for. */
function isLog({ comparisons }) {
  const shown = comparisons.flatMap(({ points }) => points).flatMap(({ seen, bounds }) => [seen, ...Object.values(bounds)]).filter((value) => value !== null);
  return shown.length > 0 && Math.min(...shown) > 0 && Math.max(...shown) > SPAN_FOR_LOG * Math.min(...shown);
}
