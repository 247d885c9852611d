// What the line of a rule can be completed with: the names of the language, and what a run has besides.

/**
 * All that can be completed, each {name, kind, detail, help, within, insert(rest, word)}: `insert` gives the text and where in
 * it the caret goes, `within` is the function in whose quotes the name stands. `run` is a run with its metrics, or null.
 */
export function offersOf(language, run) {
  const measured = new Set(run === null ? [] : [...run.metrics.scalars, ...Object.keys(run.metrics.layers)]);
  const known = Object.entries(language.names).map(([name, { kind, help }]) => {
    const detail = `${kind === "layers" ? "per layer" : "number"}${run !== null && !measured.has(name) ? ", not in this run" : ""}`;
    return { name, kind: "metric", detail, help, rank: measured.has(name) ? 0 : 1, insert: plain(name) };
  });
  const functions = Object.entries(language.functions).map(([name, { signature, help }]) => ({ name, kind: "function", detail: signature, help, rank: 2, insert: called(name) }));
  const words = Object.entries(language.words).map(([name, help]) => ({ name, kind: "word", detail: "", help, rank: 3, insert: plain(name) }));
  return [...known, ...functions, ...words, ...(run === null ? [] : ownOf(language, run))];
}

/** What only this run has, or what stands in quotes there. */
function ownOf(language, run) {
  const quoted = (within, names, detail, isKnown) =>
    names.flatMap((name) => {
      const own = { name, kind: "own", detail, help: run.quantities?.[name]?.title ?? "", rank: 0 };
      const inQuotes = { ...own, within, insert: closed(name) };
      return isKnown(name) ? [inQuotes] : [{ ...own, insert: plain(`${within}(${JSON.stringify(name)})`) }, inQuotes];
    });
  const kindOf = (name) => (Object.hasOwn(language.names, name) ? language.names[name].kind : null);
  return [
    ...quoted("scalar", run.metrics.scalars, "number of this run", (name) => kindOf(name) === "scalar"),
    ...quoted("layers", Object.keys(run.metrics.layers), "per layer, of this run", (name) => kindOf(name) === "layers"),
    ...quoted("heads", Object.keys(run.metrics.heads), "per head, of this run", () => false),
  ];
}

const plain = (text) => () => [text, text.length];
const called = (name) => (rest) => (rest.startsWith("(") ? [name, name.length + 1] : [`${name}()`, name.length + 1]);

/** A name in quotes that are open already. */
const closed = (name) => (rest, { quote }) => {
  const text = JSON.stringify(name).slice(1, -1).replaceAll("'", quote === "'" ? "\\'" : "'");
  return rest.startsWith(quote) ? [text, text.length + 1] : [`${text}${quote}`, text.length + 1];
};

/** The name that ends at the caret: {from, to, typed, within, quote}, or null in the quotes of something else and in a number. */
export function nameAt(text, caret) {
  const before = text.slice(0, caret);
  const quoted = openQuote(before);
  if (quoted !== null) {
    const within = /\b(scalar|layers|heads)\(\s*$/.exec(before.slice(0, quoted.from - 1))?.[1];
    return within ? { ...quoted, to: caret, typed: before.slice(quoted.from), within } : null;
  }
  const typed = /\w*$/.exec(before)[0];
  if (/^\d/.test(typed)) return null;
  return { from: caret - typed.length, to: caret, typed, within: undefined, quote: null };
}

function openQuote(text) {
  let [quote, from] = [null, 0];
  for (let i = 0; i < text.length; i += 1) {
    if (quote === null && (text[i] === '"' || text[i] === "'")) [quote, from] = [text[i], i + 1];
    else if (quote !== null && text[i] === "\\") i += 1;
    else if (text[i] === quote) quote = null;
  }
  return quote === null ? null : { quote, from };
}

/** The offers that fit, the best first: names that begin with what was typed, then those with a part that does. */
export function offersFor(offers, { typed, within }) {
  const words = typed.toLowerCase();
  const fits = (name) => {
    const lower = name.toLowerCase();
    if (lower.startsWith(words)) return 0;
    if (lower.split(/[^a-z0-9]+/).some((part) => part.startsWith(words))) return 1;
    return words.length > 1 && lower.includes(words) ? 2 : null;
  };
  const found = offers.filter((offer) => offer.within === within).map((offer) => ({ ...offer, fit: fits(offer.name) })).filter(({ fit }) => fit !== null);
  const begun = found.filter(({ fit }) => fit === 0);
  if (begun.length === 1 && begun[0].name === typed && ["metric", "word"].includes(begun[0].kind)) return []; // it is complete
  return found.sort((a, b) => a.fit - b.fit || a.rank - b.rank || (a.name < b.name ? -1 : 1));
}
