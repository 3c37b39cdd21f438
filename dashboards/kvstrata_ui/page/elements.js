// Elements of the page. Text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties (`class`, `title`, `on...`, `data-...`, others as attributes) and children. */
export function element(name, properties = {}, ...children) {
  return filled(document.createElement(name), properties, children);
}

/** The same of a drawing. */
export function shape(name, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, name), properties, children);
}

function filled(made, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

/** A value of the style sheet, by the name of its property. */
export function styled(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Ask this server. Throws an `Error` with its reason. */
export async function ask(path, query, signal) {
  const address = query ? `${path}?${query}` : path;
  const answer = await fetch(address, { signal, credentials: "same-origin" });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(body.error ?? `${path}: ${answer.status} ${answer.statusText}`);
  return body;
}
