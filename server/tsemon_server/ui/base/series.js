// Series of buckets side by side: how each is drawn, what it is worth somewhere, and how far two are apart.

/** Okabe and Ito's colours, told apart by colour-blind eyes, each readable on light and on dark. */
export const COLOURS = ["#1f86c8", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#a08c00"];
const DASHES = ["solid", "dashed", "dotted"];

/** The look of the series in a place: each colour once with a solid line, then with dashes, then with dots. */
export const lookOf = (place) => ({ colour: COLOURS[place % COLOURS.length], dash: DASHES[Math.floor(place / COLOURS.length) % DASHES.length] });

/** The series along `x` in place of steps, in the order of x; buckets without an x are left out. */
export function along(series) {
  const kept = series.x.map((x, i) => [x, i]).filter(([x]) => x !== null).sort(([a], [b]) => a - b);
  const pick = (values) => kept.map(([, i]) => values[i]);
  return { x: kept.map(([x]) => x), step: pick(series.step), min: pick(series.min), mean: pick(series.mean), max: pick(series.max), nonfinite: pick(series.nonfinite) };
}

/** The indices of the two entries of `xs` (rising) around x, or nearest to it. */
export function neighbours(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return [low, high];
}

/** The mean of `series` at x, on the line between the two buckets around it; null outside, and where one of them is not finite. */
export function valueAt({ x: xs, mean }, x) {
  if (xs.length === 0 || x < xs[0] || x > xs.at(-1)) return null;
  const [low, high] = neighbours(xs, x);
  if (x === xs[low]) return mean[low];
  if (x === xs[high]) return mean[high];
  if (mean[low] === null || mean[high] === null) return null;
  return mean[low] + ((mean[high] - mean[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}

/** How far `series` is above `baseline`, where both have a value. */
export function difference(series, baseline) {
  const mean = series.x.map((x, i) => {
    const other = valueAt(baseline, x);
    return other === null || series.mean[i] === null ? null : series.mean[i] - other;
  });
  return { ...series, mean, min: mean, max: mean };
}

/** Whether a scalar is a quantity: the ids of sequences and the steps with them only name something. */
export const isPlotted = (name) => !/^sequence_(id|seen)_\d$/.test(name);

/** The metric that is shown first of every run that has it. */
export const FIRST_CHOICE = "token_diversity";
