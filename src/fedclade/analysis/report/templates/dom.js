// Elements, number formatting, and the tooltip. Text from data is inserted as text, never as HTML.

const byId = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function show(id, visible) {
  byId(id).hidden = !visible;
  return visible;
}

function setText(id, text) {
  byId(id).textContent = text ?? "";
}

// Fill a select with [value, text] pairs; keep the chosen value if it still exists.
function offer(select, options, chosen) {
  select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  select.value = options.some(([value]) => String(value) === String(chosen)) ? chosen : options[0]?.[0];
}

const NONE = "–";

function number(value, digits = 4) {
  if (value === null || value === undefined) return NONE;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (Math.abs(value) < 1e-4) return value.toExponential(Math.min(2, digits - 1));
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}

const fixed = (value, digits = 1) => (value === null || value === undefined ? NONE : value.toFixed(digits));

function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit += 1) value /= 1000;
  return `${unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const known = (values) => (values ?? []).filter((value) => value !== null && value !== undefined);
const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

const tip = {
  show(x, y, text) {
    const box = byId("tip");
    box.textContent = text;
    box.hidden = false;
    const left = Math.min(x + 14, window.innerWidth - box.offsetWidth - 8);
    const above = y - box.offsetHeight - 14;
    box.style.left = `${Math.max(8, left)}px`;
    box.style.top = `${above > 8 ? above : y + 18}px`;
  },
  hide() {
    byId("tip").hidden = true;
  },
  // For screen readers.
  announce(text) {
    byId("announcement").textContent = text;
  },
};
