// Distances between clients as two matrices, before and after reordering, with a strip that shows the group of each row.

const NAME_MARGIN = 100; // pixels for the names of few clients
const STRIP = 18; // pixels: wide enough for a group's number

function shade(value, stops) {
  const [from, to, share] = value < 0.5 ? [stops[0], stops[1], value * 2] : [stops[1], stops[2], value * 2 - 1];
  return from.map((part, at) => part + (to[at] - part) * share);
}

const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function drawMatrix(run, matrix) {
  if (!show("matrix", Boolean(matrix))) return;
  const stops = ["--near", "--middle", "--far"].map((name) => cssColor(name).split(",").map(Number));
  const palette = Array.from({ length: 256 }, (_, value) => shade(value / 255, stops));
  const sorted = matrix.groups.flatMap(([group, from, to]) => Array(to - from).fill(group));
  square("matrix-before", "Before: ordered by client", matrix, matrix.before, run.figures.map.groups, named(run, matrix.ids), palette, run);
  square("matrix-after", "After: ordered by group", matrix, matrix.after, sorted, named(run, matrix.order), palette, run);
  setText(
    "matrix-caption",
    `Distances between ${number(matrix.clients)} clients: ${isDark() ? "lighter" : "darker"} is closer.${blockNote(matrix)} The strips at the left and top show the groups.`,
  );
  scaleBar(matrix, palette);
  tableOfDistances(matrix);
}

// The colors of the distances, from 0 to the largest one that is distinguished.
function scaleBar({ scale, high }, palette) {
  const [width, left, right] = [300, 8, 252];
  const step = (right - left) / 64;
  const cells = Array.from({ length: 64 }, (_, at) =>
    draw("rect", { x: left + at * step, y: 2, width: step + 0.5, height: 14, fill: `rgb(${palette[4 * at + 2].map(Math.round).join(",")})` }),
  );
  const marks = [0, 0.5, 1].map((share) =>
    draw("text", { x: left + share * (right - left), y: 31, "text-anchor": share ? (share === 1 ? "end" : "middle") : "start" }, `${number(share * high, 2)}${share === 1 ? " or more" : ""}`),
  );
  byId("matrix-scale").replaceChildren(
    make("p", {}, scale),
    draw("svg", { viewBox: `0 0 ${width} 36`, role: "img", "aria-label": `${scale}: colors from 0 to ${number(high, 2)} or more` }, ...cells, draw("rect", { class: "frame", x: left, y: 2, width: right - left, height: 14 }), ...marks),
  );
}

const named = (run, ids) => ids && ids.map((client) => clientName(run, client));
const isDark = () => window.matchMedia("screen and (prefers-color-scheme: dark)").matches;
const blockNote = ({ clients, side }) =>
  clients > side
    ? ` A cell is the mean over about ${number(Math.round(clients / side))} by ${number(Math.round(clients / side))} clients.`
    : "";

function square(id, title, matrix, encoded, groups, ids, palette, run) {
  const { side, clients } = matrix;
  const cells = Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0));
  const scale = Math.max(1, Math.ceil(480 / side));
  const edge = STRIP + 4;
  const names = matrix.names ? ids : null;
  const margin = names ? NAME_MARGIN : 0; // at the left
  const canvas = make("canvas", {
    width: margin + side * scale + edge,
    height: side * scale + edge,
    role: "img",
    "aria-label": `${title}. The distances are in the table below.`,
    id: `${id}-canvas`,
  });
  const paint = canvas.getContext("2d");
  const image = new ImageData(side, side);
  cells.forEach((value, at) => image.data.set([...palette[value], 255], at * 4));
  const small = make("canvas", { width: side, height: side });
  small.getContext("2d").putImageData(image, 0, 0);
  paint.imageSmoothingEnabled = false;
  if (names) writeRowNames(paint, names, scale, edge);
  paint.translate(margin, 0);
  paint.drawImage(small, edge, edge, side * scale, side * scale);
  strips(paint, run, groups, clients, side * scale, edge);
  byId(id).replaceChildren(make("p", {}, title), canvas);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const cell = (pixel) => Math.floor((pixel - edge) / scale);
    const column = cell(((event.clientX - box.left) / box.width) * canvas.width - margin);
    const row = cell(((event.clientY - box.top) / box.height) * canvas.height);
    if (row < 0 || column < 0 || row >= side || column >= side) return tip.hide();
    const distance = (cells[row * side + column] / 255) * matrix.high;
    return tip.show(
      event.clientX,
      event.clientY,
      `${clientText(row, matrix, groups, ids)}\n${clientText(column, matrix, groups, ids)}\ndistance ${cells[row * side + column] === 255 ? "at least " : ""}${number(distance, 3)}`,
    );
  });
  canvas.addEventListener("pointerleave", tip.hide);
}

function writeRowNames(paint, names, scale, edge) {
  Object.assign(paint, { font: "14px sans-serif", textAlign: "right", textBaseline: "middle", fillStyle: cssColor("--ink") });
  names.forEach((name, at) => paint.fillText(shortened(String(name), NAME_MARGIN), NAME_MARGIN - 6, edge + (at + 0.5) * scale));
}

// Consecutive rows of one group: [group, from, to].
function groupRanges(groups) {
  const ranges = [];
  groups.forEach((group, at) => {
    if (ranges.length && ranges[ranges.length - 1][0] === group) ranges[ranges.length - 1][2] = at + 1;
    else ranges.push([group, at, at + 1]);
  });
  return ranges;
}

// The group of every row, along both edges, with its number if there is space. Only a chosen group is colored and framed.
function strips(paint, run, groups, clients, length, edge) {
  const colors = Array.from({ length: COLORS }, (_, at) => cssColor(`--c${at}`));
  const [plain, page, ink] = ["--line", "--page", "--ink"].map(cssColor);
  const cell = length / clients;
  Object.assign(paint, { font: "bold 14px sans-serif", textAlign: "center", textBaseline: "middle", strokeStyle: ink, lineWidth: 2 });
  for (const [group, from, to] of groupRanges(groups)) {
    const [begin, size] = [edge + from * cell, Math.max((to - from) * cell, 0.5)];
    const color = colorFor(run, group);
    const muted = color < 0 || isDim(group);
    paint.fillStyle = muted ? plain : colors[color];
    paint.fillRect(0, begin, STRIP, size);
    paint.fillRect(begin, 0, size, STRIP);
    if (group >= 0 && size > 22) {
      paint.fillStyle = muted ? ink : page;
      paint.fillText(group, STRIP / 2, begin + size / 2);
      paint.fillText(group, begin + size / 2, STRIP / 2 + 1);
    }
    if (group === chosen.group && to - from > 1) paint.strokeRect(begin + 1, begin + 1, size - 2, size - 2);
  }
}

function clientText(cell, { clients, side }, groups, ids) {
  const from = Math.floor((cell * clients) / side);
  const to = Math.max(from + 1, Math.floor(((cell + 1) * clients) / side));
  const inside = [...new Set(groups.slice(from, to))];
  const where = inside.length === 1 ? groupName(inside[0]) : "several groups";
  return ids ? `client ${ids[cell]}, ${where}` : `${to - from} clients, ${where}`;
}

function tableOfDistances({ between, measure }) {
  if (!show("matrix-details", between !== null)) return;
  const columns = [{ label: "Mean distance to", value: (row) => groupName(between.groups[row]), header: true }];
  between.groups.forEach((group, at) =>
    columns.push({ label: groupName(group), value: (row) => between.mean[row][at], numeric: true, format: (value) => number(value, 3) }),
  );
  table("matrix-table", {
    caption: `Mean ${measure} distance between clients of two groups`,
    columns,
    rows: between.groups.map((_, at) => at),
    sortable: false,
  });
}
