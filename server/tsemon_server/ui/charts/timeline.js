// The run over its steps, on one axis: alerts, loss, further curves, the layer x step heat map, and the history of one layer.
// What fires is a band in all of them, attempts are marks, and the pointer is in all of them at once.

import { ZoomChart, axis, base, edgesOf, healthyBand, labelFont, linesOf, nearestIndex, pointer, stepLabels, theme, tooltipOver, valueAxis, widthOf } from "./chart.js";
import { downloads } from "./download.js";
import { hiddenIn, rasterOf } from "./raster.js";
import { h } from "../base/dom.js";
import { count, number, wordsOf } from "../base/format.js";
import { COLOURS } from "../base/series.js";
import { blockOf, firstLayers, layerLabel, layerTitle } from "../base/stacks.js";

const HEAD = 32;
const FOOT = 22;
const BELOW = 34;
const HEIGHTS = { loss: 120, curves: 84, history: 104 };
const LEFT = 54;
const MOST_LEFT = 150;
const LEAST_RIGHT = 14;
const SPAN_FOR_LOG = 30;
const SPIKE_MARK = 4;
const NARROW = 8;
const BRACKET = 9;
/** A frame is never smaller than this, so that the cell of a long run can be seen. */
const LEAST_FRAME = 12;
const LONGEST_TIP = 180;
const LANE = 17;
const LEAST_BAR = 3;
const LEAST_TEXT = 30;
/** In less, names of rules have no room beside each other. */
const LEAST_SHARED = 560;

export class Timeline extends ZoomChart {
  #panels = [];
  #edges = [];
  #spans = new Map(); // by alert: both ends of its bar with its name, in pixels
  #hides = null;
  #left = LEFT;
  #wasNarrow = false;

  /**
   * `tools` are elements for the heads of panels, by the panel's key. `onPick({step, layer})` is told what is clicked, with the
   * layer only in the heat map; `onZoom({from, to} or null)` when the steps shown change; `onAlert(alert)` when a band is clicked.
   */
  constructor(element, { tools = {}, onPick, onZoom, onAlert }) {
    super(element, { onZoom });
    this.heads = Object.fromEntries(
      Object.entries({ alerts: "Alerts", loss: "Loss", curves: "Curves", map: "Heat map", history: "Layer history" }).map(([key, name]) => {
        const title = h("h3", {});
        const save = downloads(name, () => this.#shownIn(key));
        return [key, { title, element: h("div", { class: "panel-head", hidden: true }, title, tools[key], save) }];
      }),
    );
    element.append(...Object.values(this.heads).map((head) => head.element));
    this.onClick((offsetX, offsetY) => {
      const at = this.#at(offsetX, offsetY);
      if (!at) return;
      if (at.alert) onAlert(at.alert);
      else if (at.panel.key !== "alerts") onPick({ step: at.step, layer: at.layer });
    });
    this.chart.getZr().on("dblclick", ({ offsetX, offsetY }) => {
      const at = this.#at(offsetX, offsetY);
      if (at && at.panel.key !== "alerts") this.zoomAround(at.step);
    });
    tooltipOver(element, this.chart, (x, y) => this.#describe(x, y));
  }

  /**
   * model: {run, metric name, loss series or null, curves: [{name, key: a shorter name or none, series}], tails: [{attempt, series}] of the loss that a
   * later attempt took back, map (with extremes) or null, scale, shows: "mean" or "farthest", history: {title, series, healthy: {low, high} or null} or null,
   * alerts, starts: [{attempt, step}], extent: [first, last step], zoom, step, layer (as picked, or null), framed: [{step, layer}] of incidents}
   */
  show(model) {
    this.#hides = model.map && hiddenIn(model.map, model.scale);
    this.model = model;
    this.#wasNarrow = this.#isNarrow;
    this.#edges = model.map ? edgesOf(model.map.step) : [];
    this.#panels = this.#laidOut(model);
    this.#left = leftOf(model);
    this.setHeight(this.#panels.at(-1).bottom + BELOW);
    for (const [key, { element, title }] of Object.entries(this.heads)) {
      const panel = this.#panels.find((one) => one.key === key);
      element.hidden = !panel;
      if (!panel) continue;
      element.style.top = `${panel.top - HEAD + 2}px`;
      const content = JSON.stringify(panel.title);
      if (title.content === content) continue;
      title.content = content;
      title.replaceChildren(...panel.title.map((one) => keyOf(...one)));
    }
    // All refer to each other by id: with panels that come and go, indices would not stay those of this list.
    this.chart.setOption(this.#option(model), { replaceMerge: ["grid", "xAxis", "yAxis", "series"] });
  }

  /** A window that becomes narrow shows alerts in other rows. */
  resized() {
    super.resized();
    if (this.model && this.#wasNarrow !== this.#isNarrow) this.redraw();
  }

  get #isNarrow() {
    return this.element.clientWidth < LEAST_SHARED;
  }

  /** Look closer at a step, so that what its column stands for falls apart into finer ones; by `factor` where that is given. */
  zoomAround(step, factor = null) {
    const { map, zoom, extent } = this.model;
    const [from, to] = zoom ? [zoom.from, zoom.to] : extent;
    let reach = ((to - from) / 2) * (factor ?? 0.25);
    if (factor === null && map?.step.length) {
      const column = nearestIndex(map.step, step);
      reach = Math.min(reach, Math.max(2 * (this.#edges[column + 1] - this.#edges[column]), 4));
    }
    const centre = Math.min(Math.max(step, extent[0] + reach), Math.max(extent[1] - reach, extent[0] + reach));
    if (2 * reach >= extent[1] - extent[0]) return this.resetZoom();
    this.chart.dispatchAction({ type: "dataZoom", startValue: Math.round(centre - Math.max(reach, 2)), endValue: Math.round(centre + Math.max(reach, 2)) });
  }

  /** The columns that hide a value far from their mean, or one that is not finite. */
  columnsWithSpikes() {
    const { map } = this.model;
    if (!map) return [];
    return map.step.map((_, column) => column).filter((column) => map.values[column].some((value, layer) => value !== null && (this.#hides(column, layer) || map.nonfinite[column][layer] > 0)));
  }

  #laidOut(model) {
    const layers = model.map?.layers ?? 0;
    const lanes = lanesOf(model.alerts, this.#isNarrow);
    const named = { alerts: [["alerts"]], loss: [["loss"]], curves: model.curves.map(({ name, key }, i) => [key ?? name, COLOURS[i]]), history: [[model.history?.title ?? ""]] };
    const panels = [
      lanes.length > 0 && { key: "alerts", lanes, height: lanes.length * LANE },
      model.loss && { key: "loss", lines: [{ name: "loss", series: model.loss }] },
      model.curves.length > 0 && { key: "curves", lines: model.curves },
      model.map && { key: "map", height: Math.min(Math.max(layers * 10, 140), 380), title: [[`${model.metric} by layer and step`]] },
      model.history && { key: "history", lines: [{ name: model.metric, series: model.history.series }] },
    ].filter(Boolean);
    let bottom = 0;
    return panels.map((panel) => {
      const healthy = panel.key === "history" && model.history.healthy ? [["healthy runs", theme().good]] : [];
      const title = [...(panel.title ?? named[panel.key]), ...healthy, ...(panel.lines && this.#isLog(panel) ? [["log", null, "quiet"]] : [])];
      const top = bottom + HEAD;
      const height = panel.height ?? HEIGHTS[panel.key];
      bottom = top + height + FOOT;
      return { ...panel, title, top, height, bottom };
    });
  }

  #option(model) {
    const colours = theme();
    const panels = this.#panels;
    const [min, max] = [Math.min(model.extent[0], this.#edges[0] ?? Infinity), Math.max(model.extent[1], this.#edges.at(-1) ?? -Infinity)];
    // Half of the last label lies beyond the end of the axis.
    const right = Math.max(LEAST_RIGHT, widthOf(count(Math.floor(max)), labelFont(colours)) / 2 + 1);
    const format = (step) => count(Math.round(Math.min(Math.max(step, model.extent[0]), model.extent[1]))); // the axis ends half a column beyond them
    const axes = { xAxisId: panels.map(({ key }) => `${key} x`), minValueSpan: 2 };
    return {
      ...base(colours),
      // No room is made for labels: the plots are to begin and end at the same place.
      grid: panels.map(({ key, top, height }) => ({ id: key, left: this.#left, right, top, height, outerBoundsMode: "none" })),
      axisPointer: { link: [{ xAxisIndex: "all" }] },
      xAxis: panels.map(({ key }) => axis(colours, { id: `${key} x`, gridId: key, min, max, minInterval: 1, axisLabel: stepLabels(colours), axisPointer: pointer(colours) })),
      yAxis: [
        ...panels.map((panel) => ({ alerts: () => this.#laneAxis(panel), map: () => this.#layerAxis(panel, colours) })[panel.key]?.() ?? this.#valueAxis(panel, colours)),
        ...panels.map(({ key }) => ({ id: `${key} marks`, gridId: key, min: 0, max: 1, show: false, type: "value" })),
      ],
      dataZoom: this.zoomOf(model.zoom, colours, { left: this.#left, last: max, format, bottom: 10, ...axes }),
      series: panels.flatMap((panel) => ({ alerts: () => [this.#laneSeries(panel, colours, max)], map: () => [this.#mapSeries(panel, colours)] })[panel.key]?.() ?? this.#lineSeries(panel, colours, max)),
    };
  }

  #laneAxis({ key, lanes }) {
    return { id: `${key} y`, gridId: key, type: "value", min: 0, max: lanes.length, inverse: true, show: false };
  }

  #layerAxis({ key }, colours) {
    const { run, map: { layers } } = this.model;
    return axis(colours, {
      id: `${key} y`,
      gridId: key,
      min: -0.5,
      max: layers - 0.5,
      minInterval: 1,
      axisPointer: { show: false },
      axisLabel: { color: colours.quiet, fontSize: 11, width: this.#left - 12, overflow: "truncate", hideOverlap: true, showMinLabel: true, showMaxLabel: true, formatter: (at) => (Number.isInteger(at) ? layerLabel(at, run, layers) : ""), customValues: ticksOf(layers, firstLayers(run, layers)) },
    });
  }

  #valueAxis(panel, colours) {
    return valueAxis(colours, { id: `${panel.key} y`, gridId: panel.key, splitNumber: panel.key === "loss" ? 4 : 3, type: this.#isLog(panel) ? "log" : "value" });
  }

  /** Whether a line panel has a logarithmic axis: where the measure has one, or where its curves lie decades apart. */
  #isLog({ key, lines }) {
    if (key === "loss" || (key === "history" && !this.model.scale.log)) return false;
    const healthy = key === "history" ? Object.values(this.model.history.healthy ?? {}) : [];
    const values = [...lines.flatMap(({ series }) => [...series.min, ...series.max]), ...healthy].filter((value) => value !== null);
    const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    return low > 0 && high > SPAN_FOR_LOG * low && (lines.length > 1 || key === "history");
  }

  #lineSeries(panel, colours, max) {
    const { key, lines } = panel;
    const { tails, step } = this.model;
    const at = { xAxisId: `${key} x`, yAxisId: `${key} y` };
    const onMarks = { xAxisId: `${key} x`, yAxisId: `${key} marks`, silent: true };
    const inkOf = (i) => (key === "curves" ? COLOURS[i] : colours.accent);
    const drawn = lines.flatMap(({ name, series }, i) => linesOf(series, { id: `${key} ${name}`, colour: inkOf(i), ...at }));
    const taken = key === "loss" ? tails.flatMap(({ attempt, series }) => linesOf(series, { id: `attempt ${attempt}`, colour: colours.quiet, band: false, ...at })) : [];
    for (const line of taken) line.lineStyle = { ...line.lineStyle, type: [4, 3], width: 1 };
    const notFinite = lines.flatMap(({ series }) => series.step.filter((_, i) => series.nonfinite[i] > 0)).map((one) => [one, 0]);
    const marks = this.#marks(colours, key === "loss");
    const bands = this.#bands(colours, max);
    if (step !== null) marks.push({ xAxis: step, lineStyle: { color: colours.ink, type: "dotted", width: 1.5 }, label: { show: false } });
    return [
      ...drawn,
      ...taken,
      ...(key === "history" && this.model.history.healthy ? healthyBand(colours, `${key} healthy`, [this.model.extent[0], max].map((step) => [step, this.model.history.healthy]), at) : []),
      { id: `${key} not finite`, type: "scatter", ...onMarks, symbol: "rect", symbolSize: [3, 14], symbolOffset: [0, -7], itemStyle: { color: colours.alarm }, data: notFinite },
      {
        id: `${key} alerts`,
        type: "line",
        ...onMarks,
        data: [],
        markLine: { symbol: "none", silent: true, data: marks, animation: false },
        markArea: { silent: true, data: bands },
      },
    ];
  }

  #marks(colours, isNamed) {
    const { alerts, starts, zoom, extent } = this.model;
    const middle = zoom ? (zoom.from + zoom.to) / 2 : (extent[0] + extent[1]) / 2;
    return [
      ...alerts.map((alert) => ({
        xAxis: beginOf(alert),
        lineStyle: { color: inkOf(alert, colours), type: alert.firing_step === null ? "dashed" : "solid", width: 1 },
        label: { show: false },
      })),
      ...starts.map(({ attempt, step }) => ({
        xAxis: step,
        lineStyle: { color: colours.quiet, type: [6, 4], width: 1 },
        label: { show: isNamed, formatter: `attempt ${attempt}`, position: "insideEndTop", offset: [0, 8], rotate: 0, align: step > middle ? "right" : "left", padding: [0, 4], color: colours.quiet, fontSize: 11 },
      })),
    ];
  }

  /** Where anything fires: one band, however many alerts there are. */
  #bands(colours, max) {
    const fired = this.model.alerts.filter((alert) => alert.firing_step !== null);
    const spans = fired.map((alert) => [alert.firing_step, alert.resolved_step ?? max]).sort(([a], [b]) => a - b);
    const joined = [];
    for (const [from, to] of spans) {
      const last = joined.at(-1);
      if (last && from <= last[1]) last[1] = Math.max(last[1], to);
      else joined.push([from, to]);
    }
    const color = fired.some(({ severity }) => severity === "critical") ? colours.alarm : colours.warn;
    return joined.map(([from, to]) => [{ xAxis: from, itemStyle: { color, opacity: 0.07 } }, { xAxis: to }]);
  }

  /**
   * A bar for each alert, from the step at which it fired, or was first seen, to the one at which it was over, and never too
   * short to see. The name of its rule is in the bar, before or behind it: where it fits, else where least of it is cut.
   */
  #laneSeries({ key, lanes }, colours, max) {
    const bars = lanes.flatMap((alerts, lane) => alerts.map((alert, i) => ({ alert, lane, before: alerts[i - 1], after: alerts[i + 1] })));
    const font = `600 ${labelFont(colours)}`;
    this.#spans.clear();
    return {
      id: "alerts",
      type: "custom",
      xAxisId: `${key} x`,
      yAxisId: `${key} y`,
      silent: true,
      clip: true,
      data: bars.map(({ alert, lane }) => [beginOf(alert), lane]),
      renderItem: ({ dataIndex, coordSys: { x, width } }, api) => {
        const { alert, lane, before, after } = bars[dataIndex];
        const endsOf = (one) => {
          const left = api.coord([beginOf(one), lane])[0];
          return [left, Math.max(api.coord([one.resolved_step ?? max, lane])[0], left + LEAST_BAR)];
        };
        /** What the name of the next bar needs before it. */
        const beforeOf = (one) => {
          const [from, to] = endsOf(one);
          const needed = widthOf(one.rule, font) + 10;
          return needed <= Math.min(to, x + width) - Math.max(from, x) ? 0 : needed;
        };
        const [start, end] = endsOf(alert);
        this.#spans.delete(alert);
        if (end < x || start > x + width) return null;
        const [left, right] = [Math.min(Math.max(start, x), x + width - LEAST_BAR), Math.min(end, x + width)];
        const y = api.coord([0, lane])[1];
        const ink = inkOf(alert, colours);
        const isOpen = alert.firing_step !== null;
        const bar = { type: "rect", shape: { x: left, y: y + 1, width: right - left, height: LANE - 3, r: 2 }, style: isOpen ? { fill: ink } : { fill: "none", stroke: ink, lineDash: [4, 3] } };
        const wide = widthOf(alert.rule, font);
        const room = (after ? Math.min(endsOf(after)[0], x + width) - beforeOf(after) : x + width) - right - 6;
        const places = [
          { x: left + 6, width: right - left - 10, fill: isOpen ? colours.card : ink, beside: [0, 0] },
          { x: left - 4, width: left - 6 - Math.max(x, before ? endsOf(before)[1] : x), align: "right", fill: ink, beside: [-1, 0] },
          { x: right + 4, width: room, fill: ink, beside: [0, 1] },
        ];
        const { beside, ...place } = places.find((one) => one.width >= wide) ?? places.reduce((a, b) => (b.width > a.width ? b : a));
        const text = { type: "text", style: { ...place, y: y + LANE / 2, text: alert.rule, font, verticalAlign: "middle", overflow: "truncate", ellipsis: "…" } };
        const reach = Math.min(wide, place.width);
        this.#spans.set(alert, [left + beside[0] * reach - LEAST_BAR, right + beside[1] * reach]);
        return { type: "group", children: place.width > LEAST_TEXT ? [bar, text] : [bar] };
      },
    };
  }

  #mapSeries({ key }, colours) {
    return {
      id: "map",
      type: "custom",
      xAxisId: `${key} x`,
      yAxisId: `${key} y`,
      data: [[0, 0]],
      silent: true,
      clip: true,
      renderItem: ({ coordSys }, api) => {
        if (this.model.map === null) return null; // a new attempt has hidden it, and the chart still draws what was there before
        const toX = (step) => api.coord([step, 0])[0] - coordSys.x;
        const { x, y, width, height } = coordSys;
        return { type: "image", style: { image: this.#paint(coordSys, toX, colours), x, y, width, height }, silent: true };
      },
    };
  }

  #paint({ width, height }, toX, colours) {
    const { map, scale, shows, alerts, starts, step, layer, framed } = this.model;
    const density = window.devicePixelRatio || 1;
    const image = rasterOf({ map, scale, hides: this.#hides, shows, edges: this.#edges.map(toX), width, height, density, colours });
    const pen = image.getContext("2d");
    // Each line has a halo, so that it can be seen on every colour of the scale.
    const stroke = (ink, dash, thickness, path) => {
      for (const [wide, colour, dashes] of [[thickness + 2, colours.card, []], [thickness, ink, dash]]) {
        pen.setLineDash(dashes);
        pen.lineWidth = wide;
        pen.strokeStyle = colour;
        pen.beginPath();
        path();
        pen.stroke();
      }
    };
    // Where columns are narrow, the line at a step is drawn where its column begins: what is to be seen there stays in sight.
    const column = (at) => nearestIndex(map.step, at);
    const rule = (at, ink, dash, thickness = 2) => {
      const [left, right] = [toX(this.#edges[column(at)]), toX(this.#edges[column(at) + 1])];
      const x = right - left < NARROW ? left - thickness / 2 - 1 : toX(at);
      stroke(ink, dash, thickness, () => (pen.moveTo(x, 0), pen.lineTo(x, height)));
    };
    for (const start of starts) rule(start.step, colours.quiet, [6, 4], 1);
    for (const alert of alerts) rule(beginOf(alert), inkOf(alert, colours), alert.firing_step === null ? [4, 3] : [], 1);
    if (step !== null) {
      const [left, right] = [toX(this.#edges[column(step)]), toX(this.#edges[column(step) + 1])];
      // Two brackets: a line from end to end would hide the columns beside it.
      for (const [outer, inner] of [[-4, BRACKET], [height + 4, height - BRACKET]]) {
        stroke(colours.ink, [], 2, () => (pen.moveTo(left - 1, inner), pen.lineTo(left - 1, outer), pen.lineTo(right + 1, outer), pen.lineTo(right + 1, inner)));
      }
    }
    const tall = height / map.layers;
    // What lies on both sides of this line does not follow each other.
    for (const first of firstLayers(this.model.run, map.layers).slice(1)) {
      stroke(colours.ink, [], 2, () => (pen.moveTo(0, height - first * tall), pen.lineTo(width, height - first * tall)));
    }
    if (layer !== null && layer < map.layers) {
      stroke(colours.ink, [], 1.5, () => pen.rect(1.5, height - (layer + 1) * tall - 1.5, width - 3, tall + 3));
    }
    const frame = (at, row, ink) => {
      const [left, right] = [toX(this.#edges[column(at)]), toX(this.#edges[column(at) + 1])];
      const [wide, high] = [Math.max(right - left + 2, LEAST_FRAME), Math.max(tall + 2, LEAST_FRAME)];
      const x = Math.min(Math.max((left + right - wide) / 2, 1), width - wide - 1);
      const y = Math.min(Math.max(height - (row + 0.5) * tall - high / 2, 1), height - high - 1);
      stroke(ink, [], 2.5, () => pen.rect(x, y, wide, high));
    };
    if (step !== null && layer !== null && layer < map.layers) frame(step, layer, colours.ink);
    for (const cell of framed) if (cell.layer < map.layers) frame(cell.step, cell.layer, colours.alarm);
    pen.setLineDash([]);
    for (const spiked of shows === "mean" ? this.columnsWithSpikes() : []) {
      const x = (toX(this.#edges[spiked]) + toX(this.#edges[spiked + 1])) / 2;
      stroke(colours.ink, [], 0, () => (pen.moveTo(x - SPIKE_MARK, height), pen.lineTo(x, height - 1.6 * SPIKE_MARK), pen.lineTo(x + SPIKE_MARK, height), pen.closePath()));
      pen.fillStyle = colours.ink;
      pen.fill();
    }
    return image;
  }

  /** What is at a point of the chart: the panel, the step of its nearest sample or column, and in the heat map the layer. */
  #at(pixelX, pixelY) {
    const panel = this.#panels.find(({ key }) => this.chart.containPixel({ gridId: key }, [pixelX, pixelY]));
    if (!panel) return null;
    const [x, y] = this.chart.convertFromPixel({ gridId: panel.key }, [pixelX, pixelY]);
    const { map } = this.model;
    if (panel.key === "alerts") {
      const lane = panel.lanes[Math.min(Math.max(Math.floor(y), 0), panel.lanes.length - 1)];
      const isAt = ([left, right] = []) => pixelX >= left && pixelX <= right;
      return { panel, x, alert: lane.findLast((alert) => isAt(this.#spans.get(alert))) ?? null };
    }
    const steps = panel.key === "map" ? map.step : panel.lines[0].series.step;
    if (!steps.length) return null;
    const nearest = nearestIndex(steps, x);
    const layer = panel.key === "map" ? Math.min(Math.max(Math.round(y), 0), map.layers - 1) : undefined;
    return { panel, x, nearest, step: steps[nearest], layer };
  }

  #alertsAt(step) {
    return this.model.alerts.filter((alert) => step >= beginOf(alert) && (alert.resolved_step === null || step <= alert.resolved_step));
  }

  #describe(pixelX, pixelY) {
    const at = this.model && this.#at(pixelX, pixelY);
    if (!at) return null;
    if (at.panel.key === "alerts") return at.alert && this.#alertLines(at.alert);
    const lines = at.panel.key === "map" ? this.#cellLines(at) : this.#curveLines(at);
    for (const alert of this.#alertsAt(at.x)) {
      lines.push([`${wordsOf(alert.state)}, from step ${count(beginOf(alert))}`, alert.rule]);
    }
    return lines;
  }

  #alertLines(alert) {
    const advice = alert.advice?.text;
    return [[wordsOf(alert.state), alert.rule], ["from step", count(beginOf(alert))], clipped(alert.summary), ...(advice ? [clipped(advice)] : [])];
  }

  #cellLines({ nearest, layer }) {
    const { run, map, metric } = this.model;
    const [value, farthest, bad, samples] = [map.values[nearest][layer], map.farthest[nearest][layer], map.nonfinite[nearest][layer], map.samples[nearest]];
    const lines = [["step", count(map.step[nearest])], ["layer", layerTitle(layer, run, map.layers)], [metric, number(value)]];
    if (samples > 1) {
      if (value !== null && farthest !== value) lines.push(["farthest from this mean", number(farthest)]);
      lines.push(["samples behind it", count(samples)]);
      if (bad && value !== null) lines.push(["not finite", `${count(bad)} of them`]);
    }
    return lines;
  }

  #curveLines({ panel, x, step }) {
    const lines = [["step", count(step)]];
    for (const { name, series } of panel.lines) {
      if (!series.step.length) continue;
      const i = nearestIndex(series.step, x);
      lines.push([name, number(series.mean[i])]);
      if (series.min[i] !== series.max[i]) lines.push(["lowest, highest", `${number(series.min[i])}, ${number(series.max[i])}`]);
      if (series.nonfinite[i]) lines.push(["not finite", `${series.nonfinite[i]} of this bucket`]);
    }
    if (panel.key !== "loss") return lines;
    for (const { attempt, series } of this.model.tails) {
      if (x < series.step[0] || x > series.step.at(-1)) continue;
      lines.push([`attempt ${attempt}, taken back`, number(series.mean[nearestIndex(series.step, x)])]);
    }
    return lines;
  }

  /** A panel as a picture and a table. */
  #shownIn(key) {
    const panel = this.#panels.find((one) => one.key === key);
    if (!panel) return null;
    const { run, metric, map, scale, shows, history, zoom, extent } = this.model;
    const steps = zoom ? [Math.ceil(zoom.from), Math.floor(zoom.to)] : extent;
    const isIn = (step) => step >= steps[0] && step <= steps[1];
    const shown = { runs: [run.run], steps, chart: this.chart, area: { top: panel.top - 8, height: panel.height + FOOT + 8 } };
    if (key === "alerts") {
      return {
        ...shown,
        metric: "alerts",
        columns: ["rule", "severity", "state", "first seen", "firing from", "over at", "summary"],
        rows: this.model.alerts.map((alert) => [alert.rule, alert.severity, wordsOf(alert.state), alert.pending_step, alert.firing_step, alert.resolved_step, alert.summary]),
      };
    }
    if (key === "map") {
      const layers = Array.from({ length: map.layers }, (_, layer) => `${layerLabel(layer, run, map.layers)} ${blockOf(layer, run, map.layers)}`);
      const values = shows === "farthest" ? map.farthest : map.values;
      return {
        ...shown,
        metric: shows === "farthest" ? `${metric}, farthest from the mean` : metric,
        columns: ["step", "samples", ...layers],
        rows: map.step.map((step, i) => [step, map.samples[i], ...values[i]]).filter(([step]) => isIn(step)),
        scale: { low: scale.low, high: scale.high, gradient: scale.colours, note: scale.words.join(", ") },
      };
    }
    return {
      ...shown,
      metric: { loss: "loss", curves: panel.lines.map(({ name }) => name).join(", "), history: `${metric} of ${history?.title}` }[key],
      columns: ["curve", "step", "min", "mean", "max", "nonfinite"],
      rows: panel.lines.flatMap(({ name, series }) => series.step.map((step, i) => [name, step, series.min[i], series.mean[i], series.max[i], series.nonfinite[i]])).filter(([, step]) => isIn(step)),
    };
  }
}

const beginOf = (alert) => alert.firing_step ?? alert.pending_step;

/** Red is what fires and is critical; what is seen to or over is quiet. */
function inkOf({ state, severity }, colours) {
  if (!["firing", "stood", "pending"].includes(state)) return colours.quiet;
  return severity === "critical" && state !== "pending" ? colours.alarm : colours.warn;
}

const clipped = (text) => (text.length > LONGEST_TIP ? `${text.slice(0, LONGEST_TIP)} …` : text);

function keyOf(text, colour = null, kind = "given") {
  if (!colour) return h("span", { class: kind }, text);
  const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
  swatch.style.background = colour;
  return h("span", { class: "key" }, swatch, h("span", { class: "given" }, text));
}

/** Alerts in rows without overlap, `byRule` if rules share no row. There are about as many rows as rules at most, because a rule has one open alert per attempt. */
function lanesOf(alerts, byRule) {
  const lanes = [];
  for (const alert of [...alerts].sort((a, b) => beginOf(a) - beginOf(b))) {
    const free = lanes.find((lane) => (!byRule || lane.at(-1).rule === alert.rule) && beginOf(lane.at(-1)) < beginOf(alert) && (lane.at(-1).resolved_step ?? Infinity) <= beginOf(alert));
    if (free) free.push(alert);
    else lanes.push([alert]);
  }
  return lanes;
}

/** At most nine layers, the first of each stack and the last among them, and at least two of each stack. */
function ticksOf(layers, firsts) {
  const most = Math.max(2, Math.floor(8 / firsts.length));
  return firsts.flatMap((first, i) => {
    const last = (firsts[i + 1] ?? layers) - 1;
    const stride = Math.max(1, Math.ceil((last - first) / most));
    const ticks = [];
    for (let layer = first; layer < last + 1 - stride / 2; layer += stride) ticks.push(layer);
    if (last === layers - 1 && ticks.at(-1) !== last) ticks.push(last); // others stand next to the first of the next stack
    return ticks;
  });
}

/** Room for the labels of layers, which have the names of stacks if there are several. */
function leftOf({ run, map }) {
  if (!map || run.stacks.length < 2) return LEFT;
  const labels = firstLayers(run, map.layers).map((first, i, firsts) => layerLabel((firsts[i + 1] ?? map.layers) - 1, run, map.layers));
  return Math.min(Math.max(LEFT, ...labels.map((label) => widthOf(label, labelFont(theme())) + 14)), MOST_LEFT);
}
