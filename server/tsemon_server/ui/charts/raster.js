// The cells of a heat map as one image: 10,000 of them cost one draw, and their edges stay sharp.
//
// A column stands for as many steps as fit behind it, and shows their mean. What a mean hides is drawn within its cell, as a
// stripe: the colour of a value that is far from the mean, or the hatching of values that are not finite.

const FAR_RATIO = 0.08;
const FAR_TIMES_USUAL = 5;

/**
 * Which cells hide a value far from their mean: by more of the colour scale than people overlook, and far more than what the
 * noise of the layer hides in its other columns. Returns a test of (column, layer).
 */
export function hiddenIn(map, scale) {
  const distance = (column, layer) => {
    const [mean, far] = [map.values[column][layer], map.farthest[column][layer]];
    return mean === null ? 0 : Math.abs(scale.position(far) - scale.position(mean));
  };
  const several = map.step.map((_, column) => column).filter((column) => map.samples[column] > 1);
  const usual = Array.from({ length: map.layers }, (_, layer) => median(several.map((column) => distance(column, layer))));
  return (column, layer) => map.samples[column] > 1 && distance(column, layer) > Math.max(FAR_RATIO, FAR_TIMES_USUAL * usual[layer]);
}

function median(values) {
  const sorted = Float64Array.from(values).sort();
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}

/**
 * An image of `width` x `height` CSS pixels. `edges` are where columns begin and end, in CSS pixels; `hides(column, layer)` says
 * where to draw a stripe; `shows` is "mean", or "farthest" for the value of each cell that is farthest from its mean.
 */
export function rasterOf({ map, scale, hides, shows, edges, width, height, density, colours }) {
  const image = document.createElement("canvas");
  image.width = Math.max(1, Math.round(width * density));
  image.height = Math.max(1, Math.round(height * density));
  const pen = image.getContext("2d");
  pen.scale(density, density);
  const hatch = hatching(pen, colours);
  // Cells end on whole device pixels, otherwise hairlines of the background show between them.
  const whole = (at) => Math.round(at * density) / density;
  const tops = Array.from({ length: map.layers + 1 }, (_, layer) => whole(height - (layer * height) / map.layers));
  const values = shows === "farthest" ? map.farthest : map.values;
  const inkOf = (value) => (value === null ? hatch : scale.colour(value));
  map.step.forEach((_, column) => {
    const [left, right] = [whole(edges[column]), whole(edges[column + 1])];
    if (right < 0 || left > width) return;
    const wide = Math.max(right - left, 1 / density);
    const stripe = Math.max(2, Math.min(wide / 3, 10));
    const fill = (ink, layer, x, w) => {
      pen.fillStyle = ink;
      pen.fillRect(x, tops[layer + 1], w, tops[layer] - tops[layer + 1]);
    };
    values[column].forEach((value, layer) => {
      fill(inkOf(value), layer, left, wide);
      const middle = whole(left + (wide - stripe) / 2);
      if (value === null) return;
      if (shows === "mean" && hides(column, layer)) fill(inkOf(map.farthest[column][layer]), layer, middle, stripe);
      if (map.nonfinite[column][layer] > 0) fill(hatch, layer, middle, Math.max(stripe, 3));
    });
  });
  return image;
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
