// Choosing one of several.

import { h, inWords } from "../base/dom.js";

/** Let a select have these options, [value, text] or groups of them {label, options}; one that has them is left alone, so that it stays open. */
export function fill(select, chosen, options) {
  const key = JSON.stringify([chosen, options]);
  if (select.content === key) return;
  select.content = key;
  const make = (one) => (Array.isArray(one) ? h("option", { value: one[0], selected: one[0] === chosen }, inWords(one[1])) : h("optgroup", { label: one.label }, one.options.map(make)));
  select.replaceChildren(...options.map(make));
}

/** A filter: a select whose first option is any. `onChange(value or null)`. */
export class Filter {
  constructor(name, label, onChange) {
    this.select = h("select", { id: `filter-${name}`, onchange: () => onChange(this.select.value || null) });
    this.element = h("span", { class: "filter" }, h("label", { for: this.select.id }, label), this.select);
  }

  /** What the address asks for is among the options even where nothing of the kind is known. */
  show(chosen, options) {
    const isKnown = chosen === null || options.some(([value]) => value === chosen);
    fill(this.select, chosen ?? "", [["", "any"], ...options, ...(isKnown ? [] : [[chosen, chosen]])]);
  }
}
