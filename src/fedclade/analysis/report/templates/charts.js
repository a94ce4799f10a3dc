// Line charts, histograms and scatter plots, each with a legend and a table.

/* series: [{ name, index, group, choosable: whether the legend entry is a button, points: [[x, y]], band: [[x, low, high]], dashed }]. */
function lines(id, { label, xLabel, yLabel, series, format = number, fromZero = false, zoom = false }) {
  const drawn = series.filter((line) => line.points.length);
  if (!show(id, drawn.length > 0)) return;
  const every = drawn.flatMap((line) => line.points);
  const ys = every.map(([, y]) => y).concat(drawn.flatMap((line) => (line.band ?? []).flatMap(([, low, high]) => [low, high])));
  const [low, high] = padded(extent(ys));
  const xs = extent(every.map(([x]) => x));
  const domain = { x: xs[0] === xs[1] ? padded(xs) : xs, y: [fromZero ? 0 : low, high] };
  plot(
    id,
    { label, x: { label: xLabel, domain: domain.x, whole: true }, y: { label: yLabel, domain: domain.y }, nearest: "x", zoom },
    (frame) => {
      for (const line of drawn) frame.body.append(trace(frame, line));
      return readings(frame, drawn, xLabel, format);
    },
  );
  byId(`${id}-legend`).replaceChildren(...(drawn.length > 1 ? drawn.map((line) => legendItem(id, line)) : []));
  const rounds = [...new Set(every.map(([x]) => x))].sort((a, b) => a - b);
  const at = drawn.map((line) => new Map(line.points));
  const columns = [{ label: xLabel, value: (x) => x, numeric: true }];
  drawn.forEach((line, place) => columns.push({ label: line.name, value: (x) => at[place].get(x) ?? null, numeric: true, format }));
  table(`${id}-table`, { caption: label, columns, rows: rounds, sortable: false });
}

function trace(frame, { points, band, index, group, dashed }) {
  const path = (list) => `M${list.map(([x, y]) => `${frame.x(x).toFixed(1)},${frame.y(y).toFixed(1)}`).join("L")}`;
  const dim = group !== undefined && isDim(group) ? " dim" : "";
  const drawn = draw("g", { class: `${colorOf(index)}${dim}`, "data-series": index });
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
      drawn.append(draw("path", { class: "mark", d: shapePath(index, frame.x(x), frame.y(y), 4) }));
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

function legendItem(id, { name, index, group, choosable, dashed }) {
  return make("li", {}, key(index, { line: true, dashed }), choosable ? groupButton(group, `${id}-group-${group}`) : name);
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

/* values, with their groups; rules: [[value, name]], vertical lines; the chosen group's part of each bar is colored. */
function histogram(id, { label, xLabel, values, groups, rules = [], format = number }) {
  const pairs = values.map((value, at) => [value, groups[at]]).filter(([value]) => value !== null);
  if (!show(id, pairs.length > 0)) return;
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
  const x = { label: xLabel, domain: [rows[0].from, rows[rows.length - 1].to] };
  plot(id, { label, x, y: { label: "Clients", domain: [0, most * 1.12], whole: true }, nearest: "x" }, (frame) => {
    for (const row of rows) bars(frame, row);
    rules.forEach(([value, name], place) => rule(frame, value, name, place));
    return rows.map((row) => ({ x: frame.x((row.from + row.to) / 2), y: frame.y(row.all), text: describe(row) }));
  });
  const columns = [
    { label: "From", value: (row) => row.from, numeric: true, format },
    { label: "To", value: (row) => row.to, numeric: true, format },
    { label: "Clients", value: (row) => row.all, numeric: true },
  ];
  if (chosen.group !== null) columns.push({ label: `Of ${groupName(chosen.group)}`, value: (row) => row.chosen, numeric: true });
  table(`${id}-table`, { caption: label, columns, rows, sortable: false });
}

function bars(frame, { from, to, all, chosen: part }) {
  const bar = (count, kind) =>
    draw("rect", {
      class: kind,
      x: frame.x(from) + 0.5,
      width: Math.max(1, frame.x(to) - frame.x(from) - 1),
      y: frame.y(count),
      height: frame.y(0) - frame.y(count),
    });
  if (all) frame.body.append(bar(all, chosen.group === null ? "bin" : "bin dim"));
  if (part) frame.body.append(bar(part, `bin chosen ${colorOf(chosen.group)}`));
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

/* points: [{ x, y, group, text }]; before: draws what is under the points. */
function scatter(id, { label, x, y, points, height = 340, before = () => {} }) {
  if (!show(id, points.length > 0)) return;
  const toggle = ({ group }) => change({ group: chosen.group === group || group < 0 ? null : group });
  plot(id, { label, x, y, height, zoom: true, onpick: toggle }, (frame) => {
    before(frame);
    const r = points.length > 1500 ? 3 : points.length > 300 ? 3.4 : 5;
    // The chosen group is drawn last, on top.
    const order = points.map((point, at) => [isDim(point.group) ? 0 : 1, at]).sort(([a, p], [b, q]) => a - b || p - q);
    for (const [, at] of order) {
      const { x: px, y: py, group } = points[at];
      const kind = `mark ${colorOf(group)}${isDim(group) ? " dim" : ""}`;
      frame.body.append(draw("path", { class: kind, d: shapePath(group, frame.x(px), frame.y(py), r), "data-group": group }));
    }
    return points.map((point) => ({ x: frame.x(point.x), y: frame.y(point.y), text: point.text, group: point.group })).sort((a, b) => a.x - b.x);
  });
  const groups = [...new Set(points.map(({ group }) => group))].sort((a, b) => a - b);
  const named = groups.length <= 24 ? groups.filter((group) => group >= 0) : [];
  byId(`${id}-legend`).replaceChildren(...named.map((group) => make("li", {}, key(group), groupButton(group, `${id}-group-${group}`))));
}
