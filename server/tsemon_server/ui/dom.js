// Building the document. Strings become text nodes and nothing here parses HTML, so what a client sent stays text.

/** An element: `h("a", {class: "run", href, onclick}, "text", child)`; children that are null or false are left out. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Show one child per item, in order; a child whose item did not change is left alone, so that polling disturbs nobody. */
export function keyed(parent, items, keyOf, make) {
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
  const focused = parent.contains(document.activeElement) ? document.activeElement.closest("[data-key]")?.dataset.key : null;
  if (after.length !== parent.children.length || after.some((child, i) => child !== parent.children[i])) {
    parent.replaceChildren(...after);
    if (focused) after.find((child) => child.dataset.key === focused)?.querySelector("a, button, summary")?.focus();
  }
}
