// Makes and updates elements. Text is always set as text, never as markup: names come from outside.

const SVG = "http://www.w3.org/2000/svg";

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** Makes an element: attributes (`on*` are listeners, `class`, `data-*`; null and false are left out) and children. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** As `el`, in SVG. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Sets text only when it differs: what has not changed is neither drawn nor read out again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Shows or hides. */
export function show(node, visible) {
  node.hidden = !visible;
}

/**
 * Keeps the children of `parent` in step with `items`: `make(item)` builds one for a new key and returns
 * `{node, update}`; those that stay keep their place, focus and listeners.
 */
export function keyed(parent, items, keyOf, make) {
  const held = (parent.keyedChildren ??= new Map());
  const seen = new Set();
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    seen.add(key);
    let child = held.get(key);
    if (!child) held.set(key, (child = make(item)));
    child.update?.(item);
    if (child.node === at) at = at.nextElementSibling;
    else parent.insertBefore(child.node, at);
  }
  for (const [key, child] of held) {
    if (seen.has(key)) continue;
    child.node.remove();
    held.delete(key);
  }
}

/** Opens a dialog and gives the focus back to where it was when it closes. */
export function open(dialog) {
  const before = document.activeElement;
  dialog.addEventListener("close", () => before?.isConnected && before.focus(), { once: true });
  if (!dialog.open) dialog.showModal();
}
