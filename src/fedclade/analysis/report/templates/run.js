// The sections of one run.

function drawRun() {
  if (!show("run", data.runs.length > 0)) return;
  const run = chosenRun();
  choices(run);
  setText("run-title", data.runs.length > 1 ? `Run ${run.name}` : "Result");
  setText("run-headline", data.runs.length > 1 ? run.headline : "");
  setText("run-progress", run.progress);
  tiles(run);
  learning(run);
  groupTable(run);
  related(run);
  fairness(run);
  costs(run);
  failures(run);
  settings(run);
}

const groupsOf = (run) => (run.groups ?? []).map((row) => row.group).filter((group) => group >= 0);

function choices(run) {
  const groups = groupsOf(run);
  if (!groups.includes(chosen.group)) chosen.group = null;
  show("run-choice", data.runs.length > 1);
  show("group-choice", groups.length > 1);
  show("bar", data.runs.length > 1 || groups.length > 1);
  offer(
    byId("run-select"),
    data.runs.map(({ name }) => [name, name]),
    run.name,
  );
  offer(
    byId("group-select"),
    [["", "all groups"], ...groups.map((group) => [String(group), groupName(group)])],
    chosen.group === null ? "" : String(chosen.group),
  );
}

function tiles(run) {
  const summary = run.summary ?? {};
  const worst = summary[`${data.metric.key}_worst10`] ?? known(run.rounds.worst).at(-1);
  const facts = [
    ["Method", run.method],
    ["Clients", number(summary.clients)],
    ["Groups", number(summary.clusters ?? run.rounds.clusters.at(-1))],
    [data.metric.label, metricText(summary[data.metric.key] ?? known(run.rounds.value).at(-1))],
    ["Worst tenth", metricText(worst)],
    [`${data.metric.label}, validation data`, metricText(summary[`validation_${data.metric.key}`] ?? known(run.rounds.validation).at(-1))],
    ...run.ownMetrics.map(({ name, value }) => [name, number(value)]),
    ["True groups (ARI)", summary.ari === null || summary.ari === undefined ? null : fixed(summary.ari, 2)],
    ["Rounds", number(run.rounds.round.at(-1))],
    ["Stopped by", summary.stopped ?? null],
    ...(summary.privacy?.in_words ?? []).map((line) => ["Differential privacy", line]),
    ["Selected round", summary.selected_round === summary.rounds ? null : number(summary.selected_round)],
    ["Sent by clients", bytes(run.rounds.up.at(-1))],
    ["Sent to clients", bytes(run.rounds.down.at(-1))],
    ["Seconds", number(run.rounds.seconds.at(-1), 3)],
  ];
  const shown = facts.filter(([, value]) => value !== null && value !== NONE);
  byId("tiles").replaceChildren(...shown.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function learning(run) {
  const { round, value, train, validation, worst } = run.rounds;
  const points = (column) => round.map((at, place) => [at, column[place]]).filter(([, y]) => y !== null);
  const series = [
    { name: "mean client", index: 0, points: points(value) },
    { name: "worst tenth", index: 1, points: points(worst) },
    { name: "mean client, training data", index: 7, points: points(train), dashed: true },
    { name: "mean client, validation data", index: 2, points: points(validation), dashed: true },
  ];
  const { label } = data.metric;
  const any = series.some((line) => line.points.length) || run.byGroup;
  if (!show("learning", Boolean(any))) return;
  lines("learning-all", {
    label: `${label} of all clients by round`,
    xLabel: "Round",
    yLabel: withUnit(label),
    series,
    format: metricText,
    zoom: true,
  });
  lines("learning-metrics", {
    label: "Other metrics of the mean client by round",
    xLabel: "Round",
    yLabel: "Value",
    series: run.ownMetrics.map(({ name, points }, index) => ({ name, index, points })),
    zoom: true,
  });
  const of = run.byGroup?.of ?? "accuracy";
  const name = of[0].toUpperCase() + of.slice(1);
  const groups = (run.byGroup?.series ?? []).map(([group, points]) => ({
    name: groupName(group),
    index: group,
    group,
    choosable: groupsOf(run).includes(group),
    points,
  }));
  lines("learning-groups", {
    label: `${name} by group and round`,
    xLabel: "Round",
    yLabel: of === "accuracy" ? `${name} (%)` : name,
    series: groups.length > 1 ? groups : [],
    format: of === "accuracy" ? (y) => `${fixed(y)} %` : number,
    zoom: true,
  });
}

function groupTable(run) {
  if (!show("groups", Boolean(run.groups))) return;
  const columns = [
    {
      label: "Group",
      value: (row) => row.group,
      header: true,
      cell: (row) =>
        make(
          "span",
          { class: "named" },
          key(row.group),
          row.group < 0 ? groupName(row.group) : groupButton(row.group, `groups-choose-${row.group}`),
        ),
    },
    { label: "Clients", value: (row) => row.clients, numeric: true },
    { label: "Examples", value: (row) => row.examples ?? null, numeric: true },
    { label: withUnit(`Mean ${data.metric.label.toLowerCase()}`), value: (row) => row.mean, numeric: true, format: shortMetric },
    { label: "Worst tenth", value: (row) => row.worst ?? null, numeric: true, format: shortMetric },
    { label: "Classes", value: (row) => labels(run, row.classes) || null },
    { label: "Members", value: members, wide: true },
  ];
  const used = columns.filter((column) => run.groups.some((row) => column.value(row) !== null));
  table("groups-table", { caption: "The groups", columns: used, rows: run.groups, chosenRow: (row) => row.group === chosen.group });
}

// The names of a group's clients. Of a large group the page has the first ones.
function members({ members, clients }) {
  if (!members) return null;
  const more = clients - members.length;
  return members.join(", ") + (more > 0 ? ` and ${number(more)} more (see the table of clients)` : "");
}

const shortMetric = (value) => (data.metric.unit ? fixed(value) : number(value));

function related(run) {
  setText("similarity-caption", run.caption);
  if (!show("similarity-plots", Boolean(run.map))) return;
  const { id, x, y, cluster, value, share } = run.map;
  const points = id.map((client, at) => {
    const text = [`client ${clientName(run, client)}, ${groupName(cluster[at])}`];
    if (value && value[at] !== null) text.push(`${data.metric.label.toLowerCase()} ${metricText(value[at])}`);
    const mix = mixOf(run, client);
    if (mix) text.push(`labels ${mix}`);
    return { x: x[at], y: y[at], group: cluster[at], text: text.join("\n") };
  });
  const axis = (values, name) => ({ label: name, domain: padded(extent(values), 0.06) });
  scatter("map", {
    label: `Map of ${number(id.length)} clients; two principal components with ${number(100 * share, 2)} % of the variance`,
    x: axis(x, "First component"),
    y: axis(y, "Second component"),
    points,
  });
  byId("map").querySelector("figcaption").textContent =
    `Map of the clients: similar clients are close. It shows ${number(100 * share, 2)} % of the variance. Drag to zoom; choose a client to highlight its group.`;
  show("map-details", false); // the table of all clients has the same groups
  drawMatrix(run);
  drawTree(run);
}

function fairness(run) {
  const clients = run.clients;
  if (!show("fairness", Boolean(clients))) return;
  const { label } = data.metric;
  const values = known(clients.value);
  const worst = run.summary?.[`${data.metric.key}_worst10`];
  const rules = values.length ? [[mean(values), `mean ${metricText(mean(values))}`]] : [];
  if (worst !== null && worst !== undefined) rules.push([worst, `worst tenth ${metricText(worst)}`]);
  const some = clients.id.length < clients.all ? ` (${number(clients.id.length)} of ${number(clients.all)}, evenly spaced)` : "";
  histogram("spread", {
    label: `${label} of ${number(values.length)} clients${some}`,
    xLabel: withUnit(label),
    values: clients.value ?? [],
    groups: clients.cluster,
    rules,
    format: shortMetric,
  });
  const at = clients.id.map((_, place) => place).filter((place) => chosen.group === null || clients.cluster[place] === chosen.group);
  const columns = [
    { label: "Client", value: (place) => clientName(run, clients.id[place]), numeric: !run.names, header: true },
    { label: "Group", value: (place) => clients.cluster[place], numeric: true },
    ...(clients.truth ? [{ label: "True group", value: (place) => clients.truth[place], numeric: true }] : []),
    { label: "Examples", value: (place) => clients.examples[place], numeric: true },
    ...(clients.value ? [{ label: withUnit(label), value: (place) => clients.value[place], numeric: true, format: shortMetric }] : []),
    ...(clients.validation
      ? [{ label: `${label}, validation data`, value: (place) => clients.validation[place], numeric: true, format: shortMetric }]
      : []),
    ...Object.entries(clients.own).map(([name, values]) => ({ label: name, value: (place) => values[place], numeric: true, format: (value) => number(value) })),
    { label: "Labels", value: (place) => mixOf(run, clients.id[place]) },
  ];
  table("clients-table", { caption: `Clients${some}${chosen.group === null ? "" : ` of ${groupName(chosen.group)}`}`, columns, rows: at });
}

function costs(run) {
  const { round, up, down, seconds } = run.rounds;
  if (!show("costs", round.length > 0)) return;
  const points = (column, unit = 1) => round.map((at, place) => [at, column[place] / unit]);
  const series = [
    { name: "sent by clients", index: 0, points: points(up, 1e6) },
    { name: "sent to clients", index: 1, points: points(down, 1e6) },
  ];
  lines("traffic", {
    label: "Total megabytes sent by round",
    xLabel: "Round",
    yLabel: "MB",
    series,
    format: (value) => `${number(value)} MB`,
    fromZero: true,
  });
  lines("seconds", {
    label: "Total seconds by round",
    xLabel: "Round",
    yLabel: "Seconds",
    series: [{ name: "seconds", index: 0, points: points(seconds) }],
    format: (value) => `${number(value, 3)} s`,
    fromZero: true,
  });
}

function failures(run) {
  const { count, reasons, first } = run.failures;
  setText(
    "failures-text",
    count
      ? `${number(count)} replies are missing or were rejected: ${reasons.map(([reason, times]) => `${reason} (${number(times)})`).join("; ")}.`
      : "None: every selected client replied.",
  );
  if (!show("failures-table", count > 0)) return;
  const columns = [
    { label: "Round", value: ([round]) => round, numeric: true },
    { label: "Client", value: ([, client]) => clientName(run, client), numeric: !run.names },
    { label: "Reason", value: ([, , reason]) => reason, wide: true },
  ];
  table("failures-table", {
    caption: first.length < count ? `The first ${number(first.length)} of ${number(count)}` : "All failures",
    columns,
    rows: first,
  });
}

function settings(run) {
  setText("folder", run.folder);
  const tables = Object.entries(run.config).map(([name, table]) => pairs(`[${name}]`, table));
  if (run.summary) tables.push(pairs("Summary", run.summary));
  byId("settings-body").replaceChildren(...tables);
}
