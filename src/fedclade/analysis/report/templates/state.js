// The data, the reader's choices, and the style of groups. Only `change` changes a choice; it redraws the page.

let data = JSON.parse(byId("data").textContent);
const chosen = { run: null, group: null, sort: {}, zoom: {}, rows: {}, gain: [null, null] };
const redraws = [];

function change(patch) {
  Object.assign(chosen, patch);
  redrawAll();
}

// Keep the focus: redrawn elements have the same id.
function redrawAll() {
  const focused = document.activeElement?.id;
  tip.hide();
  for (const redraw of redraws) redraw();
  if (focused && document.activeElement?.id !== focused) byId(focused)?.focus({ preventScroll: true });
}

const chosenRun = () => data.runs.find((run) => run.name === chosen.run) ?? data.runs.find((run) => run.name === data.opened) ?? data.runs[0];
const withUnit = (label) => (data.metric.unit ? `${label} (${data.metric.unit})` : label);
const percent = (value) => (value === null || value === undefined ? NONE : `${value.toFixed(1)} %`);
const metricText = (value) => (data.metric.unit ? percent(value) : number(value));

// A color stands for one thing in a figure, and each has a shape too; everything else is gray.
const COLORS = 8;
const SHAPES = ["circle", "square", "up", "diamond", "down", "plus", "cross", "star"];
const colorOf = (index) => (index < 0 ? "plain" : `c${index}`);
const colorFor = (run, group) => run.colors[group] ?? -1;
const groupName = (group) => (group === -2 ? "several groups" : group < 0 ? "no group yet" : `group ${group}`);
const unitText = (unit) => (value) => (unit === "%" ? percent(value) : `${number(value)}${unit ? ` ${unit}` : ""}`);
const isDim = (group) => chosen.group !== null && group !== chosen.group;

function shapePath(index, x, y, r) {
  const at = (...points) => `M${points.map(([dx, dy]) => `${(x + dx * r).toFixed(1)},${(y + dy * r).toFixed(1)}`).join("L")}Z`;
  switch (index < 0 ? "circle" : SHAPES[index]) {
    case "square":
      return at([-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]);
    case "up":
      return at([0, -1.2], [1.1, 0.8], [-1.1, 0.8]);
    case "down":
      return at([0, 1.2], [1.1, -0.8], [-1.1, -0.8]);
    case "diamond":
      return at([0, -1.3], [1.1, 0], [0, 1.3], [-1.1, 0]);
    case "plus":
      return at(
        [-0.4, -1.2],
        [0.4, -1.2],
        [0.4, -0.4],
        [1.2, -0.4],
        [1.2, 0.4],
        [0.4, 0.4],
        [0.4, 1.2],
        [-0.4, 1.2],
        [-0.4, 0.4],
        [-1.2, 0.4],
        [-1.2, -0.4],
        [-0.4, -0.4],
      );
    case "cross":
      return at(
        [-1.1, -0.6],
        [-0.6, -1.1],
        [0, -0.5],
        [0.6, -1.1],
        [1.1, -0.6],
        [0.5, 0],
        [1.1, 0.6],
        [0.6, 1.1],
        [0, 0.5],
        [-0.6, 1.1],
        [-1.1, 0.6],
        [-0.5, 0],
      );
    case "star":
      return at([0, -1.3], [0.4, -0.4], [1.3, 0], [0.4, 0.4], [0, 1.3], [-0.4, 0.4], [-1.3, 0], [-0.4, -0.4]);
    default:
      return `M${(x - r).toFixed(1)},${y.toFixed(1)}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`;
  }
}

// The legend symbol of a series or group. It is hidden from screen readers, because the name is next to it.
function key(index, { line = false, dashed = false } = {}) {
  const parts = [draw("path", { d: shapePath(index, 13, 8, 5), class: "mark" })];
  if (line) parts.unshift(draw("path", { d: "M0,8H26", class: dashed ? "trace dashed" : "trace" }));
  return draw("svg", { class: `key ${colorOf(index)}`, viewBox: "0 0 26 16", "aria-hidden": "true" }, ...parts);
}

// A button that turns the highlight of a group on or off.
function groupButton(group, id) {
  const pressed = chosen.group === group;
  return make(
    "button",
    { type: "button", id, "aria-pressed": String(pressed), onclick: () => change({ group: pressed ? null : group }) },
    groupName(group),
  );
}

// The groups of a figure: a button for each color, and one entry for all gray ones.
function groupLegend(id, run, groups, options) {
  const all = [...new Set(groups)].filter((group) => group >= 0).sort((a, b) => a - b);
  const colored = all.filter((group) => colorFor(run, group) >= 0);
  const items = colored.map((group) => make("li", {}, key(colorFor(run, group), options), groupButton(group, `${id}-group-${group}`)));
  const others = all.length - colored.length;
  if (others) items.push(make("li", {}, key(-1, options), colored.length ? `other (${number(others)} groups)` : `${number(others)} groups`));
  byId(`${id}-legend`).replaceChildren(...(all.length > 1 ? items : []));
}

function mixOf(run, client) {
  const mix = run.mix === null ? null : data.mixes[run.mix];
  if (!mix) return null;
  mix.at ??= new Map(mix.ids.map((id, at) => [id, at]));
  return mix.at.has(client) ? labels(run, mix.top[mix.at.get(client)]) : null;
}

const labels = (run, top) => (top ?? []).map(([label, share]) => `${run.classNames?.[label] ?? label} (${share} %)`).join(", ");

// The name of a client where it has one, else its number.
const clientName = (run, client) => run.names?.[client] ?? client;
