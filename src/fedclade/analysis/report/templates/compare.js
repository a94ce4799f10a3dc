// The comparison of several runs.

function drawCompare() {
  if (!show("compare", Boolean(data.compared))) return;
  const rows = data.compared;
  const column = (label, name, format = number) => ({ label, value: (row) => row[name], numeric: true, format });
  const several = rows.some((row) => row.runs.length > 1);
  const columns = [
    {
      label: "Setting",
      value: (row) => row.label,
      header: true,
      cell: (row) =>
        make(
          "span",
          { class: "named" },
          make("span", { class: "named" }, key(row.color), make("span", { class: "setting" }, row.label)),
          rankMark(row),
          row.ended ? "" : " (not finished)",
        ),
    },
    { label: withUnit(data.metric.label), value: (row) => row.score, numeric: true, format: (value, row) => scoreText(value, row) },
    { label: "Difference from the best", value: (row) => against(row) },
    column("Worst tenth", "worst", (value) => (data.metric.unit ? fixed(value) : number(value))),
    column("Clients hurt, against FedAvg", "hurt_fedavg", percent),
    column("Clients hurt, against Local", "hurt_local", percent),
    column(`${data.metric.label}, validation data`, "validation", (value) => (data.metric.unit ? fixed(value) : number(value))),
    ...[...new Set(rows.flatMap((row) => Object.keys(row.own)))].map((name) => ({
      label: name,
      value: (row) => row.own[name] ?? null,
      numeric: true,
      format: (value) => number(value),
    })),
    ...(several ? [{ label: "Seeds", value: (row) => row.runs.length, numeric: true }] : []),
    column("Variance", "variance", (value) => fixed(value)),
    column("Groups", "clusters", (value) => number(value, 3)),
    column("True groups (ARI)", "ari", (value) => fixed(value, 2)),
    column("Sent up", "bytes_up", bytes),
    column("Sent down", "bytes_down", bytes),
    column("Seconds", "seconds", (value) => number(value, 3)),
    column("Failures", "failures", (value) => number(value, 3)),
  ];
  // Omit columns without values, and the failures if there are none.
  const used = columns.filter(({ label, value }) => rows.some((row) => (label === "Failures" ? value(row) > 0 : (value(row) ?? null) !== null)));
  const first = { column: used.findIndex(({ label }) => label === withUnit(data.metric.label)), rising: !data.metric.higher };
  table("compare-table", { caption: "All settings, the best first", columns: used, rows, first, chosenRow: (row) => row === rows[0] && row.score !== null });
  setText("waiting", data.waiting.length ? `Not begun: ${data.waiting.join(", ")}.` : "");
  dots("forest", data.figures.differences);
  byId("differences").replaceChildren(...data.differences.map((sentence) => make("p", {}, sentence)));
  if (show("pairs", data.differences.length > 0)) pairTable();
  lines("curves", data.figures.curves);
  drawGain();
}

// The best setting, and those that are not shown to be worse.
function rankMark(row) {
  const [best] = data.compared;
  if (row.score === null || best.score === null) return null;
  if (row === best) return make("span", { class: "mark-best" }, data.progress ? "best so far" : "best mean");
  const pair = data.pairs.find(({ first, second }) => first === best.label && second === row.label);
  const text = { uncertain: "uncertain", "not shown": "not shown worse", "the same": "the same" }[pair?.verdict];
  return text ? make("span", { class: "mark-level" }, text) : null;
}

function against(row) {
  const pair = data.pairs.find(({ first, second }) => first === data.compared[0].label && second === row.label);
  if (!pair) return null;
  return `−${differenceText(pair)}, ${VERDICTS[pair.verdict]}`;
}

const VERDICTS = { real: "worse", uncertain: "uncertain", "not shown": "no difference shown", "the same": "the same", "one seed": "one seed" };
const differenceText = ({ difference, half_width: half }) => {
  const text = (value) => (data.metric.unit ? fixed(value, 2) : number(value, 3));
  return `${text(Math.abs(difference))}${half === null ? "" : ` ± ${text(half)}`}`;
};

function pairTable() {
  const share = (value) => (value === null ? NONE : `${Math.round(100 * value)} %`);
  const columns = [
    { label: "First", value: (pair) => pair.first, header: true },
    { label: "Second", value: (pair) => pair.second },
    { label: "First − second, 95 % interval", value: (pair) => pair.difference, numeric: true, format: (value, pair) => differenceText(pair) },
    { label: "p, corrected", value: (pair) => pair.p_holm, numeric: true, format: (value) => number(value, 2) },
    { label: "Clients that gain", value: (pair) => pair.gain, numeric: true, format: share },
    { label: "Clients that lose", value: (pair) => pair.lose, numeric: true, format: share },
    { label: "Verdict", value: (pair) => (pair.verdict === "real" ? "the first is better" : VERDICTS[pair.verdict]) },
  ];
  table("pairs-table", { caption: "All pairs", columns, rows: data.pairs });
}

// With several seeds, the mean ± its standard deviation over seeds; with one run, its binomial error.
function scoreText(value, row) {
  const error = row.spread ?? row.stderr;
  return `${data.metric.unit ? fixed(value, 2) : number(value)}${error === null ? "" : ` ± ${data.metric.unit ? fixed(error, 2) : number(error, 2)}`}`;
}

// Runs can be compared client by client only if data, partition and seed are the same.
const comparable = (run) => data.runs.filter((other) => other !== run && other.cohort === run.cohort && other.clients?.value);

// The other runs of the same seed: of FedAvg if there is one.
const rivalsOf = (run) => comparable(run).sort((a, b) => (b.method === "fedavg") - (a.method === "fedavg"));
const NAMED_ROWS = 30; // of so few clients each has its row

function drawGain() {
  const able = data.runs.filter((run) => run.clients?.value && comparable(run).length);
  if (!show("gain", able.length > 0)) return;
  const now = able.find((run) => run.name === chosen.gain[0]) ?? able.find((run) => run.name === data.opened) ?? able[0];
  const others = rivalsOf(now);
  const then = others.find((run) => run.name === chosen.gain[1]) ?? others[0];
  const names = (runs) => runs.map(({ name }) => [name, name]);
  offer(byId("gain-new"), names(able), now.name);
  offer(byId("gain-old"), names(others), then.name);

  const sign = data.metric.higher ? 1 : -1;
  const both = now.clients.id.map((_, at) => at).filter((at) => now.clients.value[at] !== null && then.clients.value[at] !== null);
  const clients = both.map((at) => ({
    name: String(clientName(now, now.clients.id[at])),
    group: now.clients.cluster[at],
    color: colorFor(now, now.clients.cluster[at]),
    value: sign * (now.clients.value[at] - then.clients.value[at]),
    now: now.clients.value[at],
    then: then.clients.value[at],
  }));
  setText("gain-text", gainText(now, then, clients.map(({ value }) => value), data.metric.unit ? " points" : ""));
  drawGains(now, then, clients);
  const points = clients.map((client) => ({
    x: client.then,
    y: client.now,
    group: client.group,
    name: clients.length <= NAMED_ROWS && now.names ? client.name : null,
    text: `client ${client.name}, ${groupName(client.group)} of ${now.name}\n${then.name}: ${metricText(client.then)}\n${now.name}: ${metricText(client.now)}`,
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
    run: now,
    height: 300,
    before: diagonal,
  });
  byId("before-after").querySelector("figcaption").textContent =
    `Each client under both methods; clients ${data.metric.higher ? "above" : "below"} the line gain`;
  show("before-after-details", false); // the table of the gains has the same numbers
}

// Few clients have a row each, many are counted. The reader chooses the runs, so the page describes this figure itself.
function drawGains(now, then, clients) {
  const average = mean(clients.map(({ value }) => value));
  const figure = {
    label: `Gain of ${now.name} over ${then.name}, client by client`,
    x: { label: data.metric.unit ? "Gain (points)" : `Gain in ${data.metric.label.toLowerCase()} (lower is better)`, unit: "" },
    rules: clients.length ? [[average, `mean ${number(average, 3)}`]] : [],
  };
  if (!clients.length) show("gains", false);
  else if (clients.length <= NAMED_ROWS) dots("gains", { ...figure, kind: "dots", rules: [[0, "no gain"], ...figure.rules], rows: [...clients].sort((a, b) => b.value - a.value) });
  else
    histogram("gains", { ...figure, y: { label: "Clients" }, values: clients.map(({ value }) => value), groups: clients.map(({ group }) => group) }, now);
}

function gainText(now, then, gains, unit) {
  if (!gains.length) return "No client has a value in both runs.";
  const [low, high] = extent(gains);
  const winners = gains.filter((gain) => gain > 0).length;
  const losers = gains.filter((gain) => gain < 0).length;
  const average = mean(gains);
  return `${number(winners)} of ${number(gains.length)} clients gain with ${now.name} over ${then.name}, ${number(losers)} lose. The mean is ${average >= 0 ? "a gain" : "a loss"} of ${number(Math.abs(average), 3)}${unit}; the range is ${number(low, 3)} to ${number(high, 3)}.`;
}
