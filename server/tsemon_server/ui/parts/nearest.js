// The name that somebody meant.

/** The known name that is most like `name`, itself or in its last part after a slash; null if none is alike. */
export function nearestName(name, known) {
  const most = Math.max(1, Math.floor(name.length / 3));
  const [first] = known
    .map((one) => ({ one, distance: Math.min(distanceOf(name, one), distanceOf(name, one.split("/").at(-1))) }))
    .filter(({ distance }) => distance <= most)
    .sort((a, b) => a.distance - b.distance || (a.one < b.one ? -1 : 1));
  return first?.one ?? null;
}

/** The least number of letters to add, leave out or replace. */
function distanceOf(from, to) {
  let row = Array.from({ length: to.length + 1 }, (_, place) => place);
  for (const [i, letter] of [...from].entries()) {
    const next = [i + 1];
    for (let k = 1; k <= to.length; k += 1) next.push(Math.min(row[k] + 1, next[k - 1] + 1, row[k - 1] + (letter === to[k - 1] ? 0 : 1)));
    row = next;
  }
  return row.at(-1);
}
