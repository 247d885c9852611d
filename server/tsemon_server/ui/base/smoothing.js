// Whether parts of a block smooth (make tokens alike) or sharpen, by what they do to the states and by their weights.
// Setting the Record Straight on Transformer Oversmoothing (arXiv 2401.04301), Definition 1 and Lemma 2.

/** The metric of the weights that explains what attention does. */
export const WEIGHTS = "value_output_growth";
const ATTENTION = "residual_hfc_lfc_ratio";
const PARTS = {
  [ATTENTION]: ["attention", "smooths", "sharpens"],
  feedforward_hfc_lfc_ratio: ["the feed-forward part", "smooths", "sharpens"],
  norm1_hfc_lfc_ratio: ["attention's norm", "smooths", "sharpens"],
  norm2_hfc_lfc_ratio: ["the feed-forward part's norm", "smooths", "sharpens"],
  [WEIGHTS]: ["the weights of attention", "smooth", "sharpen"],
};
const EVEN = 0.02; // as in the incident's sub-step
const EVEN_WEIGHTS = 0.1; // of an estimate of the largest eigenvalue

export const isOfAttention = (metric) => metric === ATTENTION;

/**
 * What a metric of smoothing says of each block at one step, as a sentence; null for another metric. `weights` has the values
 * of WEIGHTS, if they are known, and `when` they were measured if that was at another step.
 */
export function smoothingWords(metric, values, weights = null) {
  if (!(metric in PARTS)) return null;
  const sides = values.map((value) => (metric === WEIGHTS ? sideOf(value, EVEN_WEIGHTS) : -sideOf(value, EVEN)));
  const known = sides.filter(Number.isFinite).length;
  if (!known) return null;
  const [part, smooth, sharpen] = PARTS[metric];
  const count = (side) => sides.filter((one) => one === side).length;
  const [smoothing, sharpening] = [count(1), count(-1)];
  const says = `Here ${part} ${smooth} in ${smoothing} and ${sharpen} in ${sharpening} of ${known} blocks.`;
  if (!weights || !isOfAttention(metric) || !(smoothing + sharpening)) return says;
  const explained = sides.filter((side, block) => side && side === sideOf(weights.values[block], EVEN_WEIGHTS)).length;
  return `${says} Its weights (${WEIGHTS}${weights.when}) alone would do the same in ${explained} of these ${smoothing + sharpening}.`;
}

/** 1 above 1, -1 below, 0 as near to it as this; NaN for what is unknown. */
const sideOf = (value, near) => (!Number.isFinite(value) ? NaN : value > 1 + near ? 1 : value < 1 - near ? -1 : 0);
