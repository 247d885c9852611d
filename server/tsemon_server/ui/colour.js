// From a value to a colour: viridis (ordered by lightness, safe for colour-blind eyes) on a linear or logarithmic scale.

const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
const STOPS = VIRIDIS.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));

export const GRADIENT = `linear-gradient(to right, ${VIRIDIS.join(", ")})`;

/** The colour at `position` in [0, 1]. */
export function viridis(position) {
  const at = Math.min(Math.max(position, 0), 1) * (STOPS.length - 1);
  const low = Math.min(Math.floor(at), STOPS.length - 2);
  const channels = STOPS[low].map((from, i) => Math.round(from + (STOPS[low + 1][i] - from) * (at - low)));
  return `rgb(${channels.join(",")})`;
}

/**
 * The scale of a metric over the values shown: its whole range where the catalogue bounds it on both sides, otherwise, or
 * when `fit` is asked for, the range of the data. `position(v)` is in [0, 1].
 */
export function scaleOf(metric, values, fit) {
  const log = Boolean(metric?.log_scale);
  const usable = values.filter((value) => value !== null && (!log || value > 0));
  let low = usable.reduce((a, b) => Math.min(a, b), Infinity);
  let high = usable.reduce((a, b) => Math.max(a, b), -Infinity);
  const bounded = Number.isFinite(metric?.low) && Number.isFinite(metric?.high);
  if (bounded && !log && !fit) [low, high] = [metric.low, metric.high];
  if (low > high) [low, high] = log ? [1e-3, 1] : [0, 1];
  const turn = log ? (value) => Math.log10(Math.max(value, low)) : (value) => value;
  const width = turn(high) - turn(low);
  const position = (value) => (width > 0 ? (turn(value) - turn(low)) / width : 0.5);
  return { low, high, log, position };
}
