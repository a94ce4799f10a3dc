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

// The run with the best mean client comes first; runs without results keep their order.
function bestFirst(runs) {
  const score = (run) => (known(run.rounds.value).length ? known(run.rounds.value).at(-1) * (data.metric.higher ? 1 : -1) : -Infinity);
  return [...runs].sort((a, b) => (score(b) > score(a)) - (score(b) < score(a)));
}

const chosenRun = () => data.runs.find((run) => run.name === chosen.run) ?? bestFirst(data.runs)[0];
const withUnit = (label) => (data.metric.unit ? `${label} (${data.metric.unit})` : label);
const metricText = (value) =>
  data.metric.unit ? (value === null || value === undefined ? NONE : `${value.toFixed(1)} ${data.metric.unit}`) : number(value);

// Color and shape repeat with different periods, so 56 groups look different, and color is never the only difference.
const COLORS = 8;
const SHAPES = ["circle", "square", "up", "diamond", "down", "plus", "cross"];
const colorOf = (index) => (index < 0 ? "plain" : `c${index % COLORS}`);
const groupName = (group) => (group === -2 ? "several groups" : group < 0 ? "no group yet" : `group ${group}`);
const isDim = (group) => chosen.group !== null && group !== chosen.group;

function shapePath(index, x, y, r) {
  const at = (...points) => `M${points.map(([dx, dy]) => `${(x + dx * r).toFixed(1)},${(y + dy * r).toFixed(1)}`).join("L")}Z`;
  switch (index < 0 ? "circle" : SHAPES[index % SHAPES.length]) {
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

function mixOf(run, client) {
  const mix = run.mix === null ? null : data.mixes[run.mix];
  if (!mix) return null;
  mix.at ??= new Map(mix.ids.map((id, at) => [id, at]));
  return mix.at.has(client) ? labels(run, mix.top[mix.at.get(client)]) : null;
}

const labels = (run, top) => (top ?? []).map(([label, share]) => `${run.classNames?.[label] ?? label} (${share} %)`).join(", ");

// The name of a client where it has one, else its number.
const clientName = (run, client) => run.names?.[client] ?? client;
