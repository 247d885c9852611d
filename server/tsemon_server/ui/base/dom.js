// Building the document. Strings become text nodes and nothing here parses HTML, so what a client sent stays text.

/** An element: `h("a", {class: "run", href, onclick}, "text", child)`; children that are null or false are left out. */
export const h = (tag, props = {}, ...children) => fill(document.createElement(tag), props, children);

/** The same for an element of a drawing. */
export const svg = (tag, props = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  const shown = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  if (!element.classList.contains("given")) element.append(...shown);
  else {
    element.append(...shown.flatMap((child) => (typeof child === "string" ? marked(child) : [child])));
    element.classList.toggle("blank", BLANK.test(element.textContent));
  }
  return element;
}

/** What turns the direction of writing, and would show one name as another: the style sheet says where it stands, and keeps it to itself. */
const TURN = /([\u202a-\u202e\u2066-\u2069])/;
const BLANK = /^[\p{White_Space}\p{C}\p{DI}\u2800]+$/u;

/** Such a text where no style sheet reaches: in a drawing, an option, an attribute. */
export const inWords = (text) => text.split(TURN).map((part, i) => (i % 2 ? codeOf(part) : part)).join("");

const codeOf = (turn) => `U+${turn.charCodeAt(0).toString(16).toUpperCase()}`;
const marked = (text) => text.split(TURN).map((part, i) => (i % 2 ? h("span", { class: "turn", "data-code": codeOf(part) }, part) : part));

/**
 * Let an element show this and nothing else. A child that is there already and in its place is not touched: nothing flickers
 * or is read out again, and a button that somebody is pressing stays under the pointer, or the browser would drop the click.
 */
export function put(element, ...content) {
  const before = [...element.childNodes];
  const after = content.map((one, i) => (one instanceof Node ? one : before[i] instanceof Text && before[i].data === String(one) ? before[i] : new Text(one)));
  const kept = new Set(after);
  for (const child of before) if (!kept.has(child)) child.remove();
  for (const [i, child] of after.entries()) if (element.childNodes[i] !== child) element.insertBefore(child, element.childNodes[i] ?? null);
}

/** Where the keyboard can be within an element. */
const stopsIn = (element) => [...element.querySelectorAll("a, button, input, select, summary, textarea, [tabindex]")];

/**
 * Show one child per item, in order. A child whose item did not change is left alone, and in one that is made again the
 * keyboard stays where it was: polling disturbs nobody.
 */
export function keyed(parent, items, keyOf, make) {
  const focused = document.activeElement;
  const holder = [...parent.children].find((child) => child.contains(focused));
  const place = holder ? stopsIn(holder).indexOf(focused) : -1;
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const after = items.map((item) => {
    const key = keyOf(item);
    const content = JSON.stringify(item);
    const old = before.get(key);
    if (old?.content === content) return old;
    const fresh = make(item);
    fresh.dataset.key = key;
    fresh.content = content;
    return fresh;
  });
  put(parent, ...after);
  const heir = holder && after.find((child) => child.dataset.key === holder.dataset.key);
  if (!heir || heir.contains(document.activeElement)) return;
  const stops = stopsIn(heir);
  (stops[place]?.tagName === focused.tagName ? stops[place] : stops[0])?.focus({ preventScroll: true });
}
