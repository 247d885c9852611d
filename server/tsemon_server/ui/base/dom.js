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

/** Let an element show this and nothing else; one that does already is left alone, so nothing flickers or is read out again. */
export function put(element, ...content) {
  const shown = [...element.childNodes];
  const isSame = content.length === shown.length && content.every((one, i) => (one instanceof Node ? one === shown[i] : shown[i] instanceof Text && shown[i].data === String(one)));
  if (!isSame) element.replaceChildren(...content);
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
  if (after.length === parent.children.length && after.every((child, i) => child === parent.children[i])) return;
  parent.replaceChildren(...after);
  const heir = holder && after.find((child) => child.dataset.key === holder.dataset.key);
  if (!heir) return;
  const stops = stopsIn(heir);
  (stops[place]?.tagName === focused.tagName ? stops[place] : stops[0])?.focus({ preventScroll: true });
}
