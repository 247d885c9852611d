// The address of the page, which a view keeps as it was last chosen, so that it can be shared and survives a reload.

let known = location.hash;

/** The view of this address is shown now. */
export const arrive = () => (known = location.hash);

/**
 * Replace the address without an entry in the history. If a link was followed a moment ago, its address stays: the view hears of
 * it only with the next event.
 */
export function keepAddress(hash) {
  if (location.hash !== known) return;
  history.replaceState(null, "", hash);
  arrive();
}
