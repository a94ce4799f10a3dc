// The data, what the reader has chosen, and how groups look. `change` is the only way to choose; it draws the page again.

let data = JSON.parse(byId("data").textContent);
const chosen = { run: null, group: null, sort: {}, zoom: {}, rows: {}, gain: [null, null] };
const redraws = [];

function change(patch) {
  Object.assign(chosen, patch);
  redrawAll();
}

// Focus stays where it was: what is drawn again keeps its id.
function redrawAll() {
  const focused = document.activeElement?.id;
  tip.hide();
  for (const redraw of redraws) redraw();
  if (focused && document.activeElement?.id !== focused) byId(focused)?.focus({ preventScroll: true });
}

// The best for the mean client comes first; where nothing is known yet, the order stays.
function bestFirst(runs) {
  const worth = (run) => (known(run.rounds.value).length ? known(run.rounds.value).at(-1) * (data.metric.higher ? 1 : -1) : -Infinity);
  return [...runs].sort((a, b) => (worth(b) > worth(a)) - (worth(b) < worth(a)));
}

const chosenRun = () => data.runs.find((run) => run.name === chosen.run) ?? bestFirst(data.runs)[0];
const withUnit = (label) => (data.metric.unit ? `${label} (${data.metric.unit})` : label);
const metricText = (value) =>
  data.metric.unit ? (value === null || value === undefined ? NONE : `${value.toFixed(1)} ${data.metric.unit}`) : number(value);

// Colour and shape repeat with different periods, so that 56 groups look different and colour is never alone.
const COLOURS = 8;
const SHAPES = ["circle", "square", "up", "diamond", "down", "plus", "cross"];
const colourOf = (index) => (index < 0 ? "plain" : `c${index % COLOURS}`);
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

// A sample of how a series or group is drawn; it says nothing that the name beside it does not.
function key(index, { line = false, dashed = false } = {}) {
  const parts = [draw("path", { d: shapePath(index, 13, 8, 5), class: "mark" })];
  if (line) parts.unshift(draw("path", { d: "M0,8H26", class: dashed ? "trace dashed" : "trace" }));
  return draw("svg", { class: `key ${colourOf(index)}`, viewBox: "0 0 26 16", "aria-hidden": "true" }, ...parts);
}

// A button that highlights a group everywhere, or no longer.
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
