// Distances between clients as two matrices, before and after reordering, with a strip that shows the group of each row.

const STRIP = 18; // pixels: wide enough for a group's number

function shade(value, stops) {
  const [from, to, share] = value < 0.5 ? [stops[0], stops[1], value * 2] : [stops[1], stops[2], value * 2 - 1];
  return from.map((part, at) => part + (to[at] - part) * share);
}

const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function drawMatrix(run) {
  const matrix = run.matrix;
  if (!show("matrix", Boolean(matrix))) return;
  const stops = ["--near", "--middle", "--far"].map((name) => cssColor(name).split(",").map(Number));
  const palette = Array.from({ length: 256 }, (_, value) => shade(value / 255, stops));
  const sorted = matrix.groups.flatMap(([group, from, to]) => Array(to - from).fill(group));
  square("matrix-before", "Before: ordered by client", matrix, matrix.before, run.map.cluster, named(run, matrix.ids), palette);
  square("matrix-after", "After: ordered by group", matrix, matrix.after, sorted, named(run, matrix.order), palette);
  setText(
    "matrix-caption",
    `Distances between ${number(matrix.clients)} clients: ${isDark() ? "lighter" : "darker"} is closer.${blockNote(matrix)} The strips at the left and top show the groups.`,
  );
  tableOfDistances(matrix);
}

const named = (run, ids) => ids && ids.map((client) => clientName(run, client));
const isDark = () => window.matchMedia("screen and (prefers-color-scheme: dark)").matches;
const blockNote = ({ clients, side }) =>
  clients > side
    ? ` A cell is the mean over about ${number(Math.round(clients / side))} by ${number(Math.round(clients / side))} clients.`
    : "";

function square(id, title, matrix, encoded, groups, ids, palette) {
  const { side, clients } = matrix;
  const cells = Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0));
  const scale = Math.max(1, Math.ceil(480 / side));
  const edge = STRIP + 4;
  const canvas = make("canvas", {
    width: side * scale + edge,
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
  paint.drawImage(small, edge, edge, side * scale, side * scale);
  strips(paint, groups, clients, side * scale, edge);
  byId(id).replaceChildren(make("p", {}, title), canvas);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const cell = (at, start, length) => Math.floor((((at - start) / length) * canvas.width - edge) / scale);
    const [column, row] = [cell(event.clientX, box.left, box.width), cell(event.clientY, box.top, box.height)];
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
function strips(paint, groups, clients, length, edge) {
  const colors = Array.from({ length: COLORS }, (_, at) => cssColor(`--c${at}`));
  const [plain, page, ink] = ["--line", "--page", "--ink"].map(cssColor);
  const cell = length / clients;
  Object.assign(paint, { font: "bold 14px sans-serif", textAlign: "center", textBaseline: "middle", strokeStyle: ink, lineWidth: 2 });
  for (const [group, from, to] of groupRanges(groups)) {
    const [begin, size] = [edge + from * cell, Math.max((to - from) * cell, 0.5)];
    const muted = group < 0 || isDim(group);
    paint.fillStyle = muted ? plain : colors[group % COLORS];
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
