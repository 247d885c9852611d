// What the line of a rule can be completed with: the names of the language, and what a run has besides.

const CLAUSES = ["for", "after"];
/** Behind `for` and `after` there are numbers with their units, and no names. */
const AT_THE_END = "the end of the line";

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
  const atTheEnd = words.filter(({ name }) => CLAUSES.includes(name)).map((word) => ({ ...word, within: AT_THE_END }));
  return [...known, ...functions, ...words, ...atTheEnd, ...(run === null ? [] : ownOf(language, run))];
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

/** The name that ends at the caret: {from, to, typed, within, quote}, or null where none can stand: in the quotes of something else, in a number, in its unit. */
export function nameAt(text, caret) {
  const before = text.slice(0, caret);
  const quoted = openQuote(before);
  if (quoted !== null) {
    const within = /\b(scalar|layers|heads)\(\s*$/.exec(before.slice(0, quoted.from - 1))?.[1];
    return within ? { ...quoted, to: caret, typed: before.slice(quoted.from), within } : null;
  }
  const typed = /\w*$/.exec(before)[0];
  const place = caret - typed.length;
  const isAtTheEnd = /\b(?:for|after)\s/.test(withoutQuotes(before).slice(0, place));
  if (/^\d/.test(typed) || (isAtTheEnd && /\d\s+$/.test(before.slice(0, place)))) return null;
  return { from: place, to: caret, typed, within: isAtTheEnd ? AT_THE_END : undefined, quote: null };
}

/** The text with blanks for what is in quotes. */
const withoutQuotes = (text) => text.replace(/"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'/g, (quoted) => " ".repeat(quoted.length));

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
  if (begun.length === 1 && isComplete(begun[0], typed)) return [];
  return found.sort((a, b) => (b.name === typed) - (a.name === typed) || a.fit - b.fit || a.rank - b.rank || (a.name < b.name ? -1 : 1));
}

/** Whether what was typed is all of this offer, so that there is nothing left to take: a function lacks its parentheses. */
export const isComplete = ({ name, kind }, typed) => name === typed && ["metric", "word"].includes(kind);
