// Line charts, histograms and maps, each with a legend and a table. They draw the descriptions of figure_descriptions.py.

function lines(id, figure, { run = null, zoom = true } = {}) {
  if (!show(id, Boolean(figure))) return;
  const { label, x, y, series } = figure;
  const every = series.flatMap((line) => line.points);
  const ys = every.map(([, value]) => value).concat(series.flatMap((line) => (line.band ?? []).flatMap(([, low, high]) => [low, high])));
  const [low, high] = padded(extent(ys));
  const xs = extent(every.map(([value]) => value));
  const domain = { x: xs[0] === xs[1] ? padded(xs) : xs, y: [figure.fromZero ? 0 : low, high] };
  const format = unitText(y.unit);
  plot(
    id,
    { label, x: { label: x.label, domain: domain.x, whole: true }, y: { label: y.label, domain: domain.y }, nearest: "x", zoom },
    (frame) => {
      for (const line of [...series].sort((a, b) => a.color - b.color)) frame.body.append(trace(frame, line));
      return readings(frame, series, x.label, format);
    },
  );
  if (series.some((line) => line.group !== undefined)) groupLegend(id, run, series.map((line) => line.group), { line: true });
  else byId(`${id}-legend`).replaceChildren(...(series.length > 1 ? lineLegend(series) : []));
  const rounds = [...new Set(every.map(([value]) => value))].sort((a, b) => a - b);
  const at = series.map((line) => new Map(line.points));
  const columns = [{ label: x.label, value: (round) => round, numeric: true, header: true }];
  series.forEach((line, place) => columns.push({ label: line.name, value: (round) => at[place].get(round) ?? null, numeric: true, format }));
  table(`${id}-table`, { caption: label, columns, rows: rounds, sortable: false });
}

// An entry for each colored line, and one for all gray ones.
function lineLegend(series) {
  const gray = series.filter((line) => line.color < 0);
  const items = series
    .filter((line) => line.color >= 0)
    .map(({ name, color, dashed }) => make("li", {}, key(color, { line: true, dashed }), name));
  if (gray.length) items.push(make("li", {}, key(-1, { line: true }), `other (${number(gray.length)})`));
  return items;
}

function trace(frame, { points, band, color, group, dashed }) {
  const path = (list) => `M${list.map(([x, y]) => `${frame.x(x).toFixed(1)},${frame.y(y).toFixed(1)}`).join("L")}`;
  const dim = group !== undefined && isDim(group) ? " dim" : "";
  const drawn = draw("g", { class: `${colorOf(color)}${dim}`, "data-series": color });
  if (band)
    drawn.append(
      draw("path", {
        class: "band",
        d: `${path([...band.map(([x, low]) => [x, low]), ...band.map(([x, , high]) => [x, high]).reverse()])}Z`,
      }),
    );
  drawn.append(draw("path", { class: dashed ? "trace dashed" : "trace", d: path(points) }));
  const every = Math.ceil(points.length / 12);
  points.forEach(([x, y], place) => {
    if ((points.length - 1 - place) % every === 0)
      drawn.append(draw("path", { class: "mark", d: shapePath(color, frame.x(x), frame.y(y), 4) }));
  });
  return drawn;
}

// For each x the values of all lines, the highest first.
function readings(frame, drawn, xLabel, format) {
  const at = new Map();
  for (const line of drawn) for (const [x, y] of line.points) at.set(x, [...(at.get(x) ?? []), { y, name: line.name }]);
  return [...at.entries()]
    .sort(([a], [b]) => a - b)
    .map(([x, values]) => {
      const sorted = values.sort((a, b) => b.y - a.y);
      const text = [`${xLabel} ${number(x)}`, ...sorted.slice(0, 12).map(({ name, y }) => `${name}: ${format(y)}`)];
      return { x: frame.x(x), y: frame.y(sorted[0].y), text: text.join("\n") };
    });
}

// About twenty bins of a round width.
function binned(values) {
  const [low, high] = extent(values);
  const [from, to] = low === high ? padded([low, high]) : [low, high];
  const marks = ticks([from, to], 20);
  const width = marks.length > 1 ? marks[1] - marks[0] : to - from;
  const start = Math.floor(from / width + 1e-9) * width;
  const count = Math.max(1, Math.ceil((to - start) / width - 1e-9));
  const place = (value) => Math.min(count - 1, Math.max(0, Math.floor((value - start) / width + 1e-9)));
  return { start, width, count, place };
}

/* The chosen group's part of each bar is colored. */
function histogram(id, figure, run) {
  if (!show(id, Boolean(figure))) return;
  const { label, x: axis, y, values, groups, rules } = figure;
  const format = unitText(axis.unit);
  const pairs = values.map((value, at) => [value, groups[at]]).filter(([value]) => value !== null);
  const bins = binned(pairs.map(([value]) => value));
  const rows = Array.from({ length: bins.count }, (_, at) => ({
    from: bins.start + at * bins.width,
    to: bins.start + (at + 1) * bins.width,
    all: 0,
    chosen: 0,
  }));
  for (const [value, group] of pairs) {
    const row = rows[bins.place(value)];
    row.all += 1;
    if (group === chosen.group) row.chosen += 1;
  }
  const most = Math.max(...rows.map((row) => row.all));
  const describe = (row) => {
    const part = chosen.group === null ? "" : `, ${row.chosen} of them in ${groupName(chosen.group)}`;
    return `${format(row.from)} to ${format(row.to)}: ${number(row.all)} clients${part}`;
  };
  const x = { label: axis.label, domain: [rows[0].from, rows[rows.length - 1].to] };
  plot(id, { label, x, y: { label: y.label, domain: [0, most * 1.12], whole: true }, nearest: "x" }, (frame) => {
    for (const row of rows) bin(frame, row, colorFor(run, chosen.group));
    rules.forEach(([value, name], place) => rule(frame, value, name, place));
    return rows.map((row) => ({ x: frame.x((row.from + row.to) / 2), y: frame.y(row.all), text: describe(row) }));
  });
  const columns = [
    { label: "From", value: (row) => row.from, numeric: true, format, header: true },
    { label: "To", value: (row) => row.to, numeric: true, format },
    { label: "Clients", value: (row) => row.all, numeric: true },
  ];
  if (chosen.group !== null) columns.push({ label: `Of ${groupName(chosen.group)}`, value: (row) => row.chosen, numeric: true });
  byId(`${id}-legend`).replaceChildren();
  table(`${id}-table`, { caption: label, columns, rows, sortable: false });
}

function bin(frame, { from, to, all, chosen: part }, color) {
  const bar = (count, kind) =>
    draw("rect", {
      class: kind,
      x: frame.x(from) + 0.5,
      width: Math.max(1, frame.x(to) - frame.x(from) - 1),
      y: frame.y(count),
      height: frame.y(0) - frame.y(count),
    });
  if (all) frame.body.append(bar(all, chosen.group === null ? "bin" : "bin dim"));
  if (part) frame.body.append(bar(part, `bin chosen ${colorOf(color)}`));
}

// A vertical line with its name, on the side with more space; names are below each other.
function rule(frame, value, name, place) {
  const x = frame.x(value);
  const right = x < (frame.area.left + frame.area.right) / 2;
  frame.body.append(draw("line", { class: "rule", x1: x, x2: x, y1: frame.area.top, y2: frame.area.bottom }));
  frame.body.append(
    draw(
      "text",
      { class: "strong", x: x + (right ? 6 : -6), y: frame.area.top + 12 + 18 * place, "text-anchor": right ? "start" : "end" },
      name,
    ),
  );
}

/* points: [{ x, y, group, text, name }]; before: draws what is under the points. Names are written where there is space. */
function scatter(id, { label, x, y, points, run, height = 340, before = () => {} }) {
  if (!show(id, points.length > 0)) return;
  const toggle = ({ group }) => change({ group: chosen.group === group || group < 0 ? null : group });
  plot(id, { label, x, y, height, zoom: true, onpick: toggle }, (frame) => {
    before(frame);
    const r = points.length > 1500 ? 3 : points.length > 300 ? 3.4 : 5;
    const at = points.map((point) => ({ ...point, x: frame.x(point.x), y: frame.y(point.y) }));
    // The chosen group is drawn last, on top.
    const order = at.map((point, place) => [isDim(point.group) ? 0 : 1, place]).sort(([a, p], [b, q]) => a - b || p - q);
    for (const [, place] of order) {
      const { x: px, y: py, group } = at[place];
      const color = colorFor(run, group);
      const kind = `mark ${colorOf(color)}${isDim(group) ? " dim" : ""}`;
      frame.body.append(draw("path", { class: kind, d: shapePath(color, px, py, r), "data-group": group }));
    }
    writeNames(frame, at, r);
    return at.sort((a, b) => a.x - b.x);
  });
  groupLegend(id, run, points.map(({ group }) => group));
}

// The name of each point on one of its four sides, or not at all if every side is taken.
function writeNames(frame, points, r) {
  const height = 14;
  const taken = points.map(({ x, y }) => ({ left: x - r, right: x + r, top: y - r, bottom: y + r }));
  const free = (box) =>
    box.left >= frame.area.left - 4 &&
    box.right <= frame.area.right + 5 &&
    box.top >= frame.area.top - 6 &&
    box.bottom <= frame.area.bottom + 2 &&
    taken.every((other) => box.right < other.left || box.left > other.right || box.bottom < other.top || box.top > other.bottom);
  for (const { x, y, name } of points) {
    if (!name) continue;
    const width = 7 * name.length;
    const sides = [
      { left: x + r + 3, top: y - height / 2, anchor: "start" },
      { left: x - r - 3 - width, top: y - height / 2, anchor: "end" },
      { left: x - width / 2, top: y - r - height - 1, anchor: "middle" },
      { left: x - width / 2, top: y + r + 1, anchor: "middle" },
    ];
    const box = sides.map((side) => ({ ...side, right: side.left + width, bottom: side.top + height })).find(free);
    if (!box) continue;
    taken.push(box);
    // The width is an estimate: the text keeps its distance from the point, however wide it is.
    const at = { start: box.left, middle: x, end: box.right }[box.anchor];
    frame.body.append(draw("text", { class: "strong name", x: at, y: box.bottom - 3, "text-anchor": box.anchor }, name));
  }
}
