// From a value to a colour, on scales that colour-blind eyes can read: viridis, ordered by lightness, for what goes one
// way; blue over pale to orange, dark at both ends, for what has two sides of zero.

const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
const DIVERGING = ["#08306b", "#1f5fa8", "#5d9bd1", "#aacfe8", "#f5f3ee", "#f5cd9f", "#e3954a", "#b45f16", "#6e3003"];

/** A metric with an upper limit has at least this range on a logarithmic scale. */
const LEAST_LOG_SPAN = 1000;

const channelsOf = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const STOPS = new Map([VIRIDIS, DIVERGING].map((colours) => [colours, colours.map(channelsOf)]));

/** The colour at `position` in [0, 1] of a row of colours. */
function colourIn(colours, position) {
  const stops = STOPS.get(colours);
  const at = Math.min(Math.max(position, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return `rgb(${stops[low].map((from, i) => Math.round(from + (stops[low + 1][i] - from) * (at - low))).join(",")})`;
}

export const gradientOf = (colours) => `linear-gradient(to right, ${colours.join(", ")})`;

/**
 * The scale of a metric over the values shown: its whole range where the catalogue bounds it on both sides, on a logarithmic
 * scale at least three decades below its upper limit, otherwise, or when `fit` is asked for, the range of the data. What has two sides (the catalogue's range, or that of the data where the
 * catalogue does not know the metric) keeps zero in the middle. `log` is true, false, or null for what the catalogue says.
 *
 * `position(v)` is in [0, 1], `colour(v)` its colour, `colours` those from one end to the other, `words` what a legend says.
 */
export function scaleOf(metric, values, { fit = false, log = null } = {}) {
  const finite = values.filter((value) => value !== null);
  const bounds = metric === null && finite.length ? extremesOf(finite) : [metric?.low ?? 0, metric?.high ?? 0];
  const isDiverging = bounds[0] < 0 && bounds[1] > 0;
  const isLog = !isDiverging && (log ?? Boolean(metric?.log_scale)) && finite.some((value) => value > 0);
  const isWhole = !fit && !isLog && Number.isFinite(metric?.low ?? NaN) && Number.isFinite(metric?.high ?? NaN);
  let [low, high] = isWhole ? [metric.low, metric.high] : extremesOf(finite.filter((value) => !isLog || value > 0));
  if (low > high) [low, high] = [0, 1];
  // With the range of its data, a healthy run would have as dark a layer as one that fails.
  const isWide = isLog && !fit && Number.isFinite(metric?.high ?? NaN) && metric.high > 0;
  if (isWide) [low, high] = [Math.min(low, metric.high / LEAST_LOG_SPAN), Math.max(high, metric.high)];
  if (isDiverging && !isWhole) {
    high = Math.max(Math.abs(low), Math.abs(high));
    low = -high;
  }
  const turn = isLog ? (value) => Math.log10(Math.max(value, low)) : (value) => value;
  const [start, width] = [turn(low), turn(high) - turn(low)];
  const position = (value) => (width > 0 ? (turn(value) - start) / width : 0.5);
  const colours = isDiverging ? DIVERGING : VIRIDIS;
  const words = [isWhole ? "the measure's whole range" : isWide ? "three decades or more" : "the range of these steps", isLog && "logarithmic", isDiverging && "pale is zero"];
  return { low, high, log: isLog, isDiverging, colours, words: words.filter(Boolean), position, colour: (value) => colourIn(colours, position(value)) };
}

function extremesOf(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}
