// The comparison of several runs.

function drawCompare() {
  if (!show("compare", Boolean(data.compared))) return;
  const rows = data.compared;
  const column = (label, name, format = number) => ({ label, value: (row) => row[name], numeric: true, format });
  const several = rows.some((row) => row.runs.length > 1);
  const columns = [
    {
      label: "Run",
      value: (row) => row.label,
      header: true,
      cell: (row) => make("span", { class: "named" }, key(rows.indexOf(row)), row.label, row.ended ? "" : " (not finished)"),
    },
    ...(several ? [{ label: "Seeds", value: (row) => row.runs.length, numeric: true }] : []),
    { label: withUnit(data.metric.label), value: (row) => row.score, numeric: true, format: (value, row) => scoreText(value, row) },
    column("Worst tenth", "worst", (value) => (data.metric.unit ? fixed(value) : number(value))),
    column(`${data.metric.label}, validation data`, "validation", (value) => (data.metric.unit ? fixed(value) : number(value))),
    ...[...new Set(rows.flatMap((row) => Object.keys(row.own)))].map((name) => ({
      label: name,
      value: (row) => row.own[name] ?? null,
      numeric: true,
      format: (value) => number(value),
    })),
    column("Variance", "variance", (value) => fixed(value)),
    column("Clients worse off than with FedAvg, %", "hurt_fedavg", (value) => fixed(value)),
    column("Clients worse off than with Local, %", "hurt_local", (value) => fixed(value)),
    column("Groups", "clusters", (value) => number(value, 3)),
    column("True groups (ARI)", "ari", (value) => fixed(value, 2)),
    column("Sent up", "bytes_up", bytes),
    column("Sent down", "bytes_down", bytes),
    column("Seconds", "seconds", (value) => number(value, 3)),
    column("Failures", "failures", (value) => number(value, 3)),
  ];
  // Omit columns without values, and the failures if there are none.
  const used = columns.filter(({ label, value }) => rows.some((row) => (label === "Failures" ? value(row) > 0 : value(row) !== null)));
  table("compare-table", { caption: "All runs", columns: used, rows });
  byId("differences").replaceChildren(...data.differences.map((sentence) => make("p", {}, sentence)));
  const series = rows.map((row, index) => ({
    name: row.label,
    index,
    points: row.curve.map(([round, value]) => [round, value]),
    band: row.runs.length > 1 ? row.curve.map(([round, , low, high]) => [round, low, high]) : null,
  }));
  lines("curves", {
    label: `${data.metric.label} of the mean client by round, all runs`,
    xLabel: "Round",
    yLabel: withUnit(data.metric.label),
    series,
    format: metricText,
    zoom: true,
  });
  drawGain();
}

// With several seeds, the mean ± its standard deviation over seeds; with one run, its binomial error.
function scoreText(value, row) {
  const error = row.spread ?? row.stderr;
  return `${data.metric.unit ? fixed(value, 2) : number(value)}${error === null ? "" : ` ± ${data.metric.unit ? fixed(error, 2) : number(error, 2)}`}`;
}

// Runs can be compared client by client only if data, partition and seed are the same.
const comparable = (run) => data.runs.filter((other) => other !== run && other.cohort === run.cohort && other.clients?.value);

function drawGain() {
  const able = data.runs.filter((run) => run.clients?.value && comparable(run).length);
  if (!show("gain", able.length > 0)) return;
  const now = able.find((run) => run.name === chosen.gain[0]) ?? bestFirst(able)[0];
  const others = comparable(now);
  const then = others.find((run) => run.name === chosen.gain[1]) ?? others.find((run) => run.method === "fedavg") ?? others[0];
  const names = (runs) => runs.map(({ name }) => [name, name]);
  offer(byId("gain-new"), names(able), now.name);
  offer(byId("gain-old"), names(others), then.name);

  const sign = data.metric.higher ? 1 : -1;
  const both = now.clients.id.map((_, at) => at).filter((at) => now.clients.value[at] !== null && then.clients.value[at] !== null);
  const gains = both.map((at) => sign * (now.clients.value[at] - then.clients.value[at]));
  const groups = both.map((at) => now.clients.cluster[at]);
  const unit = data.metric.unit ? " points" : "";
  setText("gain-text", gainText(now, then, gains, unit));
  histogram("gains", {
    label: `Gain of ${now.name} over ${then.name}, client by client`,
    xLabel: data.metric.unit ? "Gain (points)" : `Gain in ${data.metric.label.toLowerCase()} (lower is better)`,
    values: gains,
    groups,
    rules: gains.length ? [[mean(gains), `mean ${number(mean(gains), 3)}`]] : [],
    format: (value) => number(value, 3),
  });
  const points = both.map((at, place) => ({
    x: then.clients.value[at],
    y: now.clients.value[at],
    group: groups[place],
    text: `client ${clientName(now, now.clients.id[at])}, ${groupName(groups[place])} of ${now.name}\n${then.name}: ${metricText(then.clients.value[at])}\n${now.name}: ${metricText(now.clients.value[at])}`,
  }));
  const domain = padded(extent(points.flatMap(({ x, y }) => [x, y])), 0.05);
  const diagonal = (frame) =>
    frame.body.append(
      draw("line", { class: "rule", x1: frame.x(domain[0]), y1: frame.y(domain[0]), x2: frame.x(domain[1]), y2: frame.y(domain[1]) }),
    );
  scatter("before-after", {
    label: `${data.metric.label} of each client under ${then.name} and ${now.name}`,
    x: { label: withUnit(then.name), domain },
    y: { label: withUnit(now.name), domain },
    points,
    height: 300,
    before: diagonal,
  });
  byId("before-after").querySelector("figcaption").textContent =
    `Each client under both methods; clients ${data.metric.higher ? "above" : "below"} the line gain`;
  show("before-after-details", false); // the table of the histogram has the same numbers
}

function gainText(now, then, gains, unit) {
  if (!gains.length) return "No client has a value in both runs.";
  const [low, high] = extent(gains);
  const winners = gains.filter((gain) => gain > 0).length;
  const losers = gains.filter((gain) => gain < 0).length;
  const average = mean(gains);
  return `${number(winners)} of ${number(gains.length)} clients gain with ${now.name} over ${then.name}, ${number(losers)} lose. The mean is ${average >= 0 ? "a gain" : "a loss"} of ${number(Math.abs(average), 3)}${unit}; the range is ${number(low, 3)} to ${number(high, 3)}.`;
}
