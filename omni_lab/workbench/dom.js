/** Building blocks of a widget's page. */

const ICONS = {
  play: "M7 4.5v15l12.5-7.5z",
  pause: "M6.5 4.5h4v15h-4zM13.5 4.5h4v15h-4z",
  start: "M6 5h2.5v14H6zM19 5v14l-9.5-7z",
  loop: "M7 7h9v3l4.5-4L16 2v3H5v7h2zM17 17H8v-3l-4.5 4L8 22v-3h11v-7h-2z",
  more: "M11 5h2v6h6v2h-6v6h-2v-6H5v-2h6z",
  less: "M5 11h14v2H5z",
  fit: "M3 5h2v14H3zM19 5h2v14h-2zM7 11h10v2H7zM10 7v10l-4-5zM14 7l4 5-4 5z",
};

/** An element with attributes, handlers (`onclick`) and children; no text is ever read as HTML. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** A button whose label is read out and shown as its hint; without children it shows the label. */
export function button(label, onclick, attributes = {}, ...children) {
  const named = { type: "button", title: label, "aria-label": label, ...attributes };
  return element("button", { ...named, onclick }, ...(children.length ? children : [label]));
}

export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** Terms and facts, `[term, fact]` each. */
export function factList(facts) {
  const entry = ([term, fact]) => element("div", {}, element("dt", {}, term), element("dd", {}, String(fact)));
  return element("dl", {}, ...facts.map(entry));
}

/** Puts other children into a parent; the one that has the keyboard keeps it, by its place. */
export function refill(parent, ...children) {
  const controls = () => [...parent.querySelectorAll("button, input")];
  const place = controls().indexOf(parent.getRootNode().activeElement);
  parent.replaceChildren(...children);
  if (place >= 0) controls()[place]?.focus();
}

/** A duration as text: milliseconds below ten seconds. */
export function milliseconds(ms) {
  return Math.abs(ms) < 9999.5 ? `${ms.toFixed(ms && Math.abs(ms) < 10 ? 1 : 0)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

/** A time as text: minutes, seconds, hundredths. */
export function clockText(seconds) {
  const hundredths = Math.round(seconds * 100);
  const pad = (number) => String(number).padStart(2, "0");
  return `${Math.floor(hundredths / 6000)}:${pad(Math.floor(hundredths / 100) % 60)}.${pad(hundredths % 100)}`;
}
