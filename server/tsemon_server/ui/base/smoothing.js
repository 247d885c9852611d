// Whether parts of a block smooth (make tokens alike) or sharpen, by what they do to the states or by their weights.
// Setting the Record Straight on Transformer Oversmoothing (arXiv 2401.04301), Definition 1, Lemma 2 and Corollary 3.

const EVEN = {
  residual_hfc_lfc_ratio: ["attention", 1, "sharpens", "smooths"],
  feedforward_hfc_lfc_ratio: ["the feed-forward part", 1, "sharpens", "smooths"],
  norm_hfc_lfc_ratio: ["the norms", 1, "sharpen", "smooth"],
  value_output_growth: ["the weights of attention", 1, "smooth", "sharpen"],
  value_output_negative_share: ["the weights of attention", 0.5, "mostly sharpen", "mostly smooth"],
};

/** "attention smooths in 5 of 6 blocks (below 1)." for a metric that tells it, of its value in each block; else null. */
export function smoothingWords(metric, values) {
  const known = values.filter(Number.isFinite);
  if (!(metric in EVEN) || !known.length) return null;
  const [part, even, above, below] = EVEN[metric];
  const numAbove = known.filter((value) => value > even).length;
  const numBelow = known.filter((value) => value < even).length;
  const [verb, num, side] = numAbove >= numBelow ? [above, numAbove, "above"] : [below, numBelow, "below"];
  return `Here ${part} ${verb} in ${num} of ${known.length} blocks (${side} ${even}).`;
}
