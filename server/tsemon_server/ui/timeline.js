// The run over its steps: loss above, the layer x step heat map below, on one axis, with the alerts on both.

import { wordsOf } from "./alerts.js";
import { axis, base, chartIn, edgesOf, linesOf, nearestIndex, stepAxis, theme, tooltipOver, valueAxis } from "./charts.js";
import { scaleOf, viridis } from "./colour.js";
import { count, number } from "./format.js";

const LOSS_TOP = 28;
const LOSS_HEIGHT = 150;
const MAP_TOP = LOSS_TOP + LOSS_HEIGHT + 44;
const BELOW_MAP = 62;
const SIDE = { left: 52, right: 14 };

/** How layer `index` reads: activations begin with the first block's input, and entry k is what block k - 1 gave. */
export function layerName(index, blocks, isActivation) {
  if (!isActivation) return blocks[index] ?? `layer ${index}`;
  return index === 0 ? `input of ${blocks[0] ?? "the first block"}` : (blocks[index - 1] ?? `layer ${index}`);
}

export class Timeline {
  #model = null;
  #raster = document.createElement("canvas");
  #isDragging = false;

  /** `onPick(step)` when a column is clicked, `onZoom({from, to} or null)` when the steps shown change. */
  constructor(element, { onPick, onZoom }) {
    this.element = element;
    this.chart = chartIn(element);
    const zr = this.chart.getZr();
    zr.on("mousedown", () => (this.#isDragging = true));
    zr.on("mouseup", () => (this.#isDragging = false));
    zr.on("click", ({ offsetX, offsetY }) => {
      const column = this.#columnAt(offsetX, offsetY);
      if (column !== null) onPick(this.#model.map.step[column]);
    });
    this.chart.on("datazoom", () => {
      const { start, end, startValue, endValue } = this.chart.getOption().dataZoom[0];
      onZoom(start <= 0 && end >= 100 ? null : { from: startValue, to: endValue });
    });
    tooltipOver(element, this.chart, (x, y) => this.#describe(x, y));
  }

  /**
   * model: {loss: series or null, map: heat map or null, metric: catalogue entry or null, blocks, isActivation, alerts,
   * extent: [first, last step], zoom, picked: step or null, fit}
   */
  show(model) {
    this.#model = model;
    const values = (model.map?.values ?? []).flat();
    this.scale = scaleOf(model.metric, values, model.fit);
    const layers = Math.max(model.map?.layers ?? 0, 1);
    const mapHeight = model.map ? Math.min(Math.max(layers * 11, 150), 400) : 0;
    const height = `${MAP_TOP + mapHeight + BELOW_MAP}px`;
    if (this.element.style.height !== height) {
      this.element.style.height = height;
      this.chart.resize();
    }
    this.chart.setOption(this.#option(model, layers, mapHeight), { replaceMerge: ["series"] });
  }

  resetZoom() {
    this.chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 });
  }

  redraw() {
    if (this.#model) this.show(this.#model);
  }

  end() {
    this.chart.end();
  }

  #option(model, layers, mapHeight) {
    const colours = theme();
    const edges = model.map ? edgesOf(model.map.step) : [];
    const [min, max] = [Math.min(model.extent[0], edges[0] ?? Infinity), Math.max(model.extent[1], edges.at(-1) ?? -Infinity)];
    const x = (gridIndex, show) => stepAxis(colours, { gridIndex, min, max, show: gridIndex === 0 || show, ...(show ? {} : { axisLabel: { show: false } }) });
    const title = (text, top) => ({ text, left: SIDE.left - 4, top, padding: 0, textStyle: { color: colours.ink, fontSize: 12, fontWeight: 600 } });
    const zoom = model.zoom && !this.#isDragging ? { startValue: model.zoom.from, endValue: model.zoom.to } : {};
    const both = { xAxisIndex: [0, 1], filterMode: "none", ...zoom };
    return {
      ...base(colours),
      title: [title("loss", 6), title(model.map ? `${model.map.metric}  ·  layer by step` : "", MAP_TOP - 20)],
      grid: [
        { ...SIDE, top: LOSS_TOP, height: LOSS_HEIGHT },
        { ...SIDE, top: MAP_TOP, height: mapHeight },
      ],
      axisPointer: { link: [{ xAxisIndex: [0, 1] }] },
      xAxis: [x(0, !model.map), x(1, Boolean(model.map))],
      yAxis: [
        valueAxis(colours, { gridIndex: 0 }),
        axis(colours, {
          gridIndex: 1,
          show: Boolean(model.map),
          min: -0.5,
          max: layers - 0.5,
          minInterval: 1,
          axisPointer: { show: false },
          axisLabel: { color: colours.quiet, fontSize: 11, showMinLabel: true, showMaxLabel: true, formatter: (at) => (Number.isInteger(at) ? `${at}` : ""), customValues: ticksOf(layers) },
        }),
        { gridIndex: 0, min: 0, max: 1, show: false, type: "value" },
      ],
      dataZoom: [
        { id: "pan", type: "inside", zoomOnMouseWheel: "ctrl", preventDefaultMouseMove: false, ...both },
        {
          id: "slider",
          type: "slider",
          height: 16,
          bottom: 12,
          ...SIDE,
          showDataShadow: false,
          brushSelect: false,
          borderColor: colours.line,
          fillerColor: "rgba(128, 128, 128, 0.15)",
          handleSize: "120%",
          textStyle: { color: colours.quiet, fontSize: 10 },
          labelFormatter: (step) => count(Math.round(step)),
          ...both,
        },
      ],
      series: [...this.#lossSeries(model, colours, max), ...(model.map ? [this.#mapSeries(model, colours, edges)] : [])],
    };
  }

  #lossSeries({ loss, alerts, picked }, colours, max) {
    const marks = alerts.map((alert) => ({
      xAxis: alert.firing_step ?? alert.pending_step,
      lineStyle: { color: inkOf(alert, colours), type: alert.firing_step === null ? "dashed" : "solid", width: 1.5 },
      label: { show: false },
    }));
    if (picked !== null) marks.push({ xAxis: picked, lineStyle: { color: colours.ink, type: "dotted", width: 1.5 }, label: { show: false } });
    const bands = alerts
      .filter((alert) => alert.firing_step !== null)
      .map((alert) => [
        { xAxis: alert.firing_step, itemStyle: { color: inkOf(alert, colours), opacity: 0.09 } },
        { xAxis: alert.resolved_step ?? max },
      ]);
    const lines = loss ? linesOf(loss, { id: "loss", colour: colours.accent, xAxisIndex: 0, yAxisIndex: 0 }) : [];
    const notFinite = (loss?.step ?? []).filter((_, i) => loss.nonfinite[i] > 0).map((step) => [step, 0]);
    return [
      ...lines,
      {
        id: "not finite",
        type: "scatter",
        xAxisIndex: 0,
        yAxisIndex: 2,
        symbol: "rect",
        symbolSize: [3, 14],
        symbolOffset: [0, -7],
        itemStyle: { color: colours.alarm },
        data: notFinite,
        silent: true,
      },
      {
        id: "alerts",
        type: "line",
        xAxisIndex: 0,
        yAxisIndex: 2,
        data: [],
        silent: true,
        markLine: { symbol: "none", silent: true, data: marks, animation: false },
        markArea: { silent: true, data: bands },
      },
    ];
  }

  /** All cells as one image, painted at the screen's own resolution: 10,000 cells cost one draw, and edges stay sharp. */
  #mapSeries(model, colours, edges) {
    return {
      id: "map",
      type: "custom",
      xAxisIndex: 1,
      yAxisIndex: 1,
      data: [[0, 0]],
      silent: true,
      clip: true,
      renderItem: ({ coordSys }, api) => {
        const toX = (step) => api.coord([step, 0])[0] - coordSys.x;
        this.#paint(coordSys, edges.map(toX), toX, model, colours);
        const { x, y, width, height } = coordSys;
        return { type: "image", style: { image: this.#raster, x, y, width, height }, silent: true };
      },
    };
  }

  #paint({ width, height }, edges, toX, { map, alerts, picked }, colours) {
    const density = window.devicePixelRatio || 1;
    this.#raster = document.createElement("canvas");
    this.#raster.width = Math.max(1, Math.round(width * density));
    this.#raster.height = Math.max(1, Math.round(height * density));
    const pen = this.#raster.getContext("2d");
    pen.scale(density, density);
    const hatch = hatching(pen, colours);
    const top = (layer) => height - ((layer + 1) * height) / map.layers;
    // Cells end on whole device pixels, otherwise hairlines of the background show between them.
    const whole = (at) => Math.round(at * density) / density;
    map.values.forEach((column, i) => {
      const [left, right] = [whole(edges[i]), whole(edges[i + 1])];
      if (right < 0 || left > width) return;
      column.forEach((value, layer) => {
        pen.fillStyle = value === null ? hatch : viridis(this.scale.position(value));
        pen.fillRect(left, whole(top(layer)), Math.max(right - left, 1 / density), whole(top(layer - 1)) - whole(top(layer)));
      });
    });
    const rule = (step, colour, dash) => {
      for (const [thickness, ink] of [[4, colours.card], [2, colour]]) {
        pen.setLineDash(thickness === 2 ? dash : []);
        pen.lineWidth = thickness;
        pen.strokeStyle = ink;
        pen.beginPath();
        pen.moveTo(toX(step), 0);
        pen.lineTo(toX(step), height);
        pen.stroke();
      }
    };
    for (const alert of alerts) {
      rule(alert.firing_step ?? alert.pending_step, inkOf(alert, colours), alert.firing_step === null ? [4, 3] : []);
      if (alert.firing_step === null) continue;
      const from = Math.max(0, toX(alert.firing_step));
      const to = Math.min(width, alert.resolved_step === null ? edges.at(-1) : toX(alert.resolved_step));
      pen.fillStyle = colours.card;
      pen.fillRect(from, 0, to - from, 6);
      pen.fillStyle = inkOf(alert, colours);
      pen.fillRect(from, 0, to - from, 4);
    }
    if (picked !== null) rule(picked, colours.ink, [1, 3]);
  }

  #columnAt(x, y) {
    if (!this.#model?.map?.step.length || !this.chart.containPixel({ gridIndex: 1 }, [x, y])) return null;
    return nearestIndex(this.#model.map.step, this.chart.convertFromPixel({ gridIndex: 1 }, [x, y])[0]);
  }

  #describe(x, y) {
    const { map, loss, blocks, isActivation, alerts } = this.#model ?? {};
    const isMap = map && this.chart.containPixel({ gridIndex: 1 }, [x, y]);
    if (!isMap && !(loss && this.chart.containPixel({ gridIndex: 0 }, [x, y]))) return null;
    const [step, height] = this.chart.convertFromPixel({ gridIndex: isMap ? 1 : 0 }, [x, y]);
    const lines = [];
    if (isMap && map.step.length) {
      const column = nearestIndex(map.step, step);
      const layer = Math.min(Math.max(Math.round(height), 0), map.layers - 1);
      lines.push(
        ["step", count(map.step[column])],
        ["layer", `${layer} · ${layerName(layer, blocks, isActivation)}`],
        [map.metric, number(map.values[column][layer])],
      );
    } else if (!isMap && loss.step.length) {
      const at = nearestIndex(loss.step, step);
      lines.push(["step", count(loss.step[at])], ["loss", number(loss.mean[at])]);
      if (loss.min[at] !== loss.max[at]) lines.push(["lowest, highest", `${number(loss.min[at])}, ${number(loss.max[at])}`]);
      if (loss.nonfinite[at]) lines.push(["not finite", `${loss.nonfinite[at]} of this bucket`]);
    }
    for (const alert of alerts) {
      const from = alert.firing_step ?? alert.pending_step;
      const isHere = step >= from && (alert.resolved_step === null || step <= alert.resolved_step);
      if (isHere) lines.push([`${wordsOf(alert.state)}, from step ${count(from)}`, alert.rule]);
    }
    return lines.length ? lines : null;
  }
}

const inkOf = ({ state }, colours) => ({ firing: colours.alarm, stood: colours.alarm, pending: colours.warn })[state] ?? colours.quiet;

/** At most nine layer numbers, the first and the last among them. */
function ticksOf(layers) {
  const stride = Math.max(1, Math.ceil((layers - 1) / 8));
  const ticks = [];
  for (let layer = 0; layer < layers - stride / 2; layer += stride) ticks.push(layer);
  if (ticks.at(-1) !== layers - 1) ticks.push(layers - 1);
  return ticks;
}

/** What a cell without a finite value is filled with: no colour of the scale, and not a colour alone. */
function hatching(pen, colours) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const tilePen = tile.getContext("2d");
  tilePen.fillStyle = colours.line;
  tilePen.fillRect(0, 0, 8, 8);
  tilePen.strokeStyle = colours.alarm;
  tilePen.lineWidth = 1.5;
  tilePen.beginPath();
  for (const shift of [-8, 0, 8]) {
    tilePen.moveTo(shift, 8);
    tilePen.lineTo(shift + 8, 0);
  }
  tilePen.stroke();
  return pen.createPattern(tile, "repeat");
}
