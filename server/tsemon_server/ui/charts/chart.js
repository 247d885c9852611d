// What all charts share: the page's colours, one tooltip made of DOM nodes, the marks of a step axis.

import { h } from "../base/dom.js";
import { count, number } from "../base/format.js";
import { neighbours } from "../base/series.js";

let echarts = null;

/** To be awaited before the first chart. The library takes long to start: a view asks the service first, and loads it meanwhile. */
export async function loadCharts() {
  echarts ??= await import("../vendor/echarts-6.1.0.esm.min.mjs");
}

/** The colours of the style sheet, as they are now (light or dark). */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["ink", "quiet", "line", "card", "accent", "alarm", "warn", "good", "font"];
  return Object.fromEntries(names.map((name) => [name, read(name)]));
}

/** A chart that fills `element` and follows its size. A kind of chart has `show(model)`, which draws `this.model`. */
export class Chart {
  #observer;
  model = null;

  constructor(element) {
    this.element = element;
    this.chart = echarts.init(element, null, { renderer: "canvas" });
    this.#observer = new ResizeObserver(() => this.resized());
    this.#observer.observe(element);
  }

  /** An observer tells also of the size that was there when it began; to be drawn for it again would cost as much as the first time. */
  resized() {
    const { element, chart } = this;
    if (element.clientWidth !== chart.getWidth() || element.clientHeight !== chart.getHeight()) chart.resize();
  }

  /** Let the chart be so many pixels high. */
  setHeight(pixels) {
    const height = `${pixels}px`;
    if (this.element.style.height === height) return;
    this.element.style.height = height;
    this.chart.resize();
  }

  /** `onClick(x, y)` is told where the chart is clicked, in pixels. */
  onClick(onClick) {
    this.chart.getZr().on("click", ({ offsetX, offsetY }) => onClick(offsetX, offsetY));
  }

  redraw() {
    if (this.model) this.show(this.model);
  }

  end() {
    this.#observer.disconnect();
    this.chart.dispose();
  }
}

/** A chart of one list, `model.values`, along its x axis: `onPick(index)` is told which of them is clicked. */
export class ListChart extends Chart {
  constructor(element, { onPick }) {
    super(element);
    tooltipOver(element, this.chart, (x, y) => {
      const index = this.#indexAt(x, y);
      return index === null ? null : this.describe(index);
    });
    this.onClick((x, y) => {
      const index = this.#indexAt(x, y);
      if (index !== null) onPick(index);
    });
  }

  #indexAt(x, y) {
    if (!this.model || !this.chart.containPixel({ gridIndex: 0 }, [x, y])) return null;
    const at = Math.round(this.chart.convertFromPixel({ gridIndex: 0 }, [x, y])[0]);
    return Math.min(Math.max(at, 0), this.model.values.length - 1);
  }
}

/** A chart whose axis is shown in part: `onZoom({from, to} or null)` is told when the part changes, null being all. */
export class ZoomChart extends Chart {
  #isDragging = false;

  constructor(element, { onZoom }) {
    super(element);
    const zr = this.chart.getZr();
    zr.on("mousedown", () => (this.#isDragging = true));
    zr.on("mouseup", () => (this.#isDragging = false));
    this.chart.on("datazoom", () => {
      const { start, end, startValue, endValue } = this.chart.getOption().dataZoom[0];
      onZoom(start <= 0 && end >= 100 ? null : { from: startValue, to: endValue });
    });
  }

  /** The `dataZoom` of an option: wheel and dragging within the chart, and a slider below it. What is shown is set each time except during a drag: a chart keeps what it is not told. */
  zoomOf(zoom, colours, { left, last, format, bottom, ...options }) {
    const shown = zoom ? { startValue: zoom.from, endValue: zoom.to } : { start: 0, end: 100 };
    const all = { filterMode: "none", ...options, ...(this.#isDragging ? {} : shown) };
    return [
      { id: "pan", type: "inside", zoomOnMouseWheel: "ctrl", preventDefaultMouseMove: false, ...all },
      { ...slider(colours, { left, last, format, bottom }), ...all },
    ];
  }

  resetZoom() {
    this.chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 });
  }
}

export const base = (colours) => ({
  animation: false,
  textStyle: { fontFamily: colours.font, color: colours.ink },
});

/** A value axis in the page's quiet style. */
export const axis = (colours, options) => ({
  type: "value",
  axisLine: { show: true, onZero: false, lineStyle: { color: colours.line } },
  axisTick: { show: false },
  splitLine: { show: false },
  axisLabel: { color: colours.quiet, fontSize: 11, hideOverlap: true },
  nameTextStyle: { color: colours.quiet, fontSize: 11 },
  ...options,
});

export const stepLabels = (colours, formatter = count) => ({ color: colours.quiet, fontSize: 11, hideOverlap: true, showMinLabel: false, showMaxLabel: false, formatter });

/** The line of the pointer, across all charts of one axis. */
export const pointer = (colours) => ({ show: true, snap: false, lineStyle: { color: colours.quiet }, label: { show: false }, triggerTooltip: false });

export const valueAxis = (colours, options) =>
  axis(colours, {
    scale: true,
    splitNumber: 4,
    splitLine: { show: true, lineStyle: { color: colours.line, opacity: 0.6 } },
    axisLabel: { color: colours.quiet, fontSize: 11, formatter: number },
    ...options,
  });

/** The range of healthy runs as a band through the points [x, {low, high}]. */
export function healthyBand(colours, id, points, options) {
  const edge = { ...options, type: "line", stack: id, stackStrategy: "all", symbol: "none", silent: true, emphasis: { disabled: true }, lineStyle: { width: 1, color: colours.good, opacity: 0.5 }, z: 1 };
  return [
    { ...edge, id: `${id} low`, data: points.map(([x, { low }]) => [x, low]) },
    { ...edge, id: `${id} high`, data: points.map(([x, { low, high }]) => [x, high - low]), areaStyle: { color: colours.good, opacity: 0.13 } },
  ];
}

const MOST_STRIDES = 4;

/** A logarithmic axis from one power of ten to another. ECharts names only both ends if they are nine decades apart. */
export function decadesAxis(colours, values, options) {
  const [first, last] = [Math.floor(Math.log10(Math.min(...values))), Math.ceil(Math.log10(Math.max(...values)))];
  const stride = Math.max(1, Math.ceil((last - first) / MOST_STRIDES));
  const powers = Array.from({ length: Math.floor((last - first) / stride) + 1 }, (_, i) => 10 ** (last - i * stride));
  return valueAxis(colours, { type: "log", min: 10 ** first, max: 10 ** last, axisTick: { show: false, customValues: powers }, axisLabel: { color: colours.quiet, fontSize: 11, formatter: number, customValues: powers }, ...options });
}

const ruler = document.createElement("canvas").getContext("2d");

/** Width in pixels of a text in a CSS `font`, such as that of the axis labels. */
export function widthOf(text, font) {
  ruler.font = font;
  return Math.ceil(ruler.measureText(text).width);
}

export const labelFont = (colours) => `11px ${colours.font}`;

/** The slider below a chart that chooses which part of its axis is shown, with room at its right for the label of its end, `format(last)`. */
const slider = (colours, { left, last, format, bottom }) => ({
  id: "slider",
  type: "slider",
  height: 16,
  left,
  bottom,
  right: widthOf(format(last), labelFont(colours)) + 10,
  showDataShadow: false,
  brushSelect: false,
  borderColor: colours.line,
  fillerColor: "rgba(128, 128, 128, 0.15)",
  handleSize: "120%",
  textStyle: { color: colours.quiet, fontSize: 10 },
  labelFormatter: format,
});

/** A tooltip over `chart`; `describe(x, y)` gives its lines, as [label, value] or text, or null for none. Under a pointer at rest it follows what is drawn. */
export function tooltipOver(element, chart, describe) {
  const tip = h("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  element.append(tip);
  let at = null;
  const show = () => {
    const lines = at && describe(at.offsetX, at.offsetY);
    tip.hidden = !lines;
    if (!lines) return;
    tip.replaceChildren(
      ...lines.map((line) => (Array.isArray(line) ? h("div", {}, h("span", { class: "given" }, line[0]), h("b", { class: "given" }, line[1])) : h("div", {}, h("span", { class: "given" }, line)))),
    );
    const left = at.offsetX + 16 + tip.offsetWidth > element.clientWidth ? at.offsetX - 16 - tip.offsetWidth : at.offsetX + 16;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${Math.max(0, Math.min(at.offsetY + 12, element.clientHeight - tip.offsetHeight))}px`;
  };
  const moveTo = (place) => {
    at = place;
    show();
  };
  chart.getZr().on("globalout", () => moveTo(null));
  chart.getZr().on("mousemove", ({ offsetX, offsetY }) => moveTo({ offsetX, offsetY }));
  chart.on("finished", show);
}

/** The index of the entry of `steps` (rising) that is nearest to `step`. */
export function nearestIndex(steps, step) {
  const [low, high] = neighbours(steps, step);
  return Math.abs(steps[high] - step) < Math.abs(step - steps[low]) ? high : low;
}

/** Where columns at these steps begin and end: halfway between neighbours, the outer ones as wide as inwards. */
export function edgesOf(steps) {
  if (steps.length === 0) return [];
  const inner = steps.slice(1).map((step, i) => (steps[i] + step) / 2);
  const first = inner.length ? 2 * steps[0] - inner[0] : steps[0] - 0.5;
  const last = inner.length ? 2 * steps.at(-1) - inner.at(-1) : steps.at(-1) + 0.5;
  return [first, ...inner, last];
}

/** The lines of a series of buckets: its mean, with the band from min to max where a bucket holds more than one value. */
export function linesOf(series, { id, colour, band = true, ...options }) {
  const points = (values) => series.step.map((step, i) => [step, values[i]]);
  const isAlone = (i) => (series.mean[i - 1] ?? null) === null && (series.mean[i + 1] ?? null) === null;
  const mean = {
    ...options,
    id,
    name: id,
    type: "line",
    data: points(series.mean),
    color: colour,
    lineStyle: { width: 1.5, color: colour },
    symbol: "circle",
    // A line needs two points; a value between two gaps shows as a dot.
    symbolSize: (_, { dataIndex }) => (isAlone(dataIndex) ? 5 : 0),
    emphasis: { disabled: true },
    silent: true,
    z: 3,
  };
  if (!band || series.min.every((value, i) => value === series.max[i])) return [mean];
  const edge = { type: "line", stack: `${id} band`, stackStrategy: "all", symbol: "none", silent: true, emphasis: { disabled: true } };
  // The upper edge is drawn too: a spike of one step in a thousand is too narrow for its area to be seen.
  const height = series.max.map((value, i) => (value === null ? null : value - series.min[i]));
  return [
    { ...options, ...edge, id: `${id} low`, data: points(series.min), lineStyle: { opacity: 0 } },
    { ...options, ...edge, id: `${id} high`, data: points(height), areaStyle: { color: colour, opacity: 0.22 }, lineStyle: { color: colour, opacity: 0.45, width: 1 } },
    mean,
  ];
}
