// Elements from values. Text goes in as text nodes only: nothing here, or anywhere else in this page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `properties`: attributes; `onclick` and the like are listeners; null and false leave one out. */
export function el(name, properties = {}, ...children) {
  return filled(document.createElement(name), properties, children);
}

export function svg(name, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, name), properties, children);
}

function filled(node, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function button(label, onclick, properties = {}) {
  return el("button", { type: "button", onclick, ...properties }, label);
}

/** What a screen reader says next. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}
