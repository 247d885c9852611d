// The range of a metric in healthy recorded runs, which depends on the relative depth of the layer. scripts/healthy_band.py computes it.

/** {runs, layers: [{low, high}]} for a metric of the catalogue; null if there is no range or the model has several stacks. */
export function healthyRange(metric, run, numLayers) {
  if (!metric?.healthy || run.stacks.length > 1 || numLayers < 2) return null;
  const { runs, low, high } = metric.healthy;
  return { runs, layers: Array.from({ length: numLayers }, (_, layer) => ({ low: between(low, layer / (numLayers - 1)), high: between(high, layer / (numLayers - 1)) })) };
}

export const healthyWords = ({ runs }) => `Green: range at the same relative depth in ${runs} healthy recorded runs.`;

/** The value at a depth from 0 to 1, on a straight line between logarithms. */
function between(values, depth) {
  const at = depth * (values.length - 1);
  const first = Math.min(Math.floor(at), values.length - 2);
  return values[first] * (values[first + 1] / values[first]) ** (at - first);
}
