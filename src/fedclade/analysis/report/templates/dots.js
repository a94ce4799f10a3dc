// A row for each name: dots with intervals, and bars. They draw the descriptions of figure_descriptions.py.

const ROW = 26; // pixels
const CHARACTER = 6.6; // pixels, about

/* rows: [{ name, color, value, low, high, note, group }]; rules: [[value, name]], vertical lines. */
const dots = (id, figure) => rowsPlot(id, figure, dot, "Value");
const barRows = (id, figure) => rowsPlot(id, figure, bar, "Value");

function rowsPlot(id, figure, drawRow, heading) {
  if (!show(id, Boolean(figure))) return;
  const { label, x, rows, rules } = figure;
  const format = unitText(x.unit);
  const values = rows.flatMap((row) => [row.value, row.low ?? row.value, row.high ?? row.value]);
  const domain = padded(extent([...values, ...rules.map(([value]) => value), ...(figure.kind === "bars" ? [0] : [])]), 0.06);
  const left = Math.min(240, 0.42 * plotWidth(id), 18 + 7.2 * Math.max(...rows.map((row) => row.name.length)));
  const height = 62 + 16 * rules.length + ROW * rows.length;
  const text = (row) =>
    `${row.name}: ${format(row.value)}${row.low === undefined ? "" : ` (${format(row.low)} to ${format(row.high)})`}${row.note ? `, ${row.note}` : ""}`;
  const y = { label: "", ticks: false, domain: [rows.length, 0] };
  plot(id, { label, x: { label: x.label, domain }, y, height, left, top: 10 + 16 * rules.length, nearest: "y" }, (frame) => {
    rules.forEach(([value, name], place) => ruleAbove(frame, value, name, rules.length - place));
    rows.forEach((row, at) => {
      const middle = frame.y(at + 0.5);
      frame.root.append(rowName(row.name, left, middle));
      const group = draw("g", { class: `${colorOf(row.color ?? 0)}${row.group !== undefined && isDim(row.group) ? " dim" : ""}`, "data-row": at });
      drawRow(frame, group, row, middle);
      frame.body.append(group);
    });
    return rows.map((row, at) => ({ x: frame.x(row.value), y: frame.y(at + 0.5), text: text(row), group: row.group }));
  });
  byId(`${id}-legend`).replaceChildren();
  const columns = [
    { label: "Name", value: (row) => row.name, header: true },
    { label: x.label, value: (row) => row.value, numeric: true, format },
    ...(rows.some((row) => row.low !== undefined)
      ? [
          { label: "From", value: (row) => row.low ?? null, numeric: true, format },
          { label: "To", value: (row) => row.high ?? null, numeric: true, format },
        ]
      : []),
    ...(rows.some((row) => row.note) ? [{ label: "Note", value: (row) => row.note ?? "" }] : []),
  ];
  table(`${id}-table`, { caption: label, columns, rows, sortable: false });
}

// The name of a row, at the left of the plot; a long one has two lines.
function rowName(name, left, middle) {
  const most = Math.floor((left - 10) / CHARACTER);
  const place = { x: left - 8, "text-anchor": "end" };
  const space = name.lastIndexOf(" ", most);
  if (name.length <= most || space < 0) return draw("text", { ...place, y: middle + 4, class: "row" }, shortened(name, most));
  return draw(
    "text",
    { ...place, class: "row" },
    draw("tspan", { x: left - 8, y: middle - 2 }, name.slice(0, space + 1)),
    draw("tspan", { x: left - 8, y: middle + 11 }, shortened(name.slice(space + 1), most)),
  );
}

const shortened = (name, most) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);

function dot(frame, group, row, y) {
  if (row.low !== undefined) {
    const [low, high] = [frame.x(row.low), frame.x(row.high)];
    group.append(draw("path", { class: "trace whisker", d: `M${low},${y - 5}V${y + 5}M${low},${y}H${high}M${high},${y - 5}V${y + 5}` }));
  }
  group.append(draw("path", { class: "mark", d: shapePath(row.color ?? 0, frame.x(row.value), y, 6) }));
}

function bar(frame, group, row, y) {
  const [from, to] = [frame.x(0), frame.x(row.value)].sort((a, b) => a - b);
  group.append(draw("rect", { class: "mark", x: from, y: y - 8, width: Math.max(1, to - from), height: 16 }));
}

// A vertical line with its name above the rows; names are below each other, inside the figure.
function ruleAbove(frame, value, name, line) {
  const x = frame.x(value);
  const width = 7 * name.length;
  const middle = Math.max(width / 2 + 4, Math.min(frame.area.right - width / 2, x));
  frame.body.append(draw("line", { class: "rule", x1: x, x2: x, y1: frame.area.top, y2: frame.area.bottom }));
  frame.root.append(draw("text", { class: "strong", x: middle, y: frame.area.top - 16 * line + 10, "text-anchor": "middle" }, name));
}
