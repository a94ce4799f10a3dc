// The sections of one run.

function drawRun() {
  if (!show("run", data.runs.length > 0)) return;
  const run = chosenRun();
  choices(run);
  setText("run-title", `${data.compared ? `Run ${run.name}` : "Result"}${run.progress ? " so far" : ""}`);
  setText("run-headline", data.compared ? run.headline : "");
  setText("run-typical", typicalText(run));
  setText("run-progress", data.compared ? run.progress : ""); // of one run it is at the top
  tiles(run);
  learning(run);
  groupTable(run);
  related(run);
  fairness(run);
  costs(run);
  failures(run);
  settings(run);
}

// The page opens one run of the best setting: not its luckiest seed.
function typicalText(run) {
  const setting = data.compared?.find((row) => row.runs.includes(run.name));
  if (!setting || setting.runs.length < 2 || run.name !== data.opened) return "";
  return `One of the ${setting.runs.length} seeds of ${setting.label}: the one nearest to their mean.`;
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
  const { curves, metrics, groups } = run.figures;
  if (!show("learning", Boolean(curves || metrics || groups))) return;
  lines("learning-all", curves);
  lines("learning-metrics", metrics);
  lines("learning-groups", groups, { run });
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
          key(colorFor(run, row.group)),
          row.group < 0 ? groupName(row.group) : groupButton(row.group, `groups-choose-${row.group}`),
        ),
    },
    { label: "Size", value: (row) => row.clients, numeric: true },
    { label: "Examples", value: (row) => row.examples ?? null, numeric: true },
    { label: withUnit(`Mean ${data.metric.label.toLowerCase()}`), value: (row) => row.mean, numeric: true, format: shortMetric },
    { label: "Worst tenth", value: (row) => row.worst ?? null, numeric: true, format: shortMetric },
    { label: "Classes", value: (row) => labels(run, row.classes) || null, wide: true },
    { label: "Clients in it", value: members, wide: true },
  ];
  const used = columns.filter((column) => run.groups.some((row) => column.value(row) !== null));
  table("groups-table", { caption: "The groups", columns: used, rows: run.groups, most: 12, chosenRow: (row) => row.group === chosen.group });
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
  const { map, matrix, dendrogram } = run.figures;
  if (!show("similarity-plots", Boolean(map))) return;
  const points = map.id.map((client, at) => {
    const text = [`client ${clientName(run, client)}, ${groupName(map.groups[at])}`];
    if (map.value && map.value[at] !== null) text.push(`${data.metric.label.toLowerCase()} ${metricText(map.value[at])}`);
    const mix = mixOf(run, client);
    if (mix) text.push(`labels ${mix}`);
    return { x: map.px[at], y: map.py[at], group: map.groups[at], name: map.names?.[at], text: text.join("\n") };
  });
  const axis = (values, { label }) => ({ label, domain: padded(extent(values), 0.08) });
  scatter("map", { label: map.label, x: axis(map.px, map.x), y: axis(map.py, map.y), points, run });
  byId("map").querySelector("figcaption").textContent =
    `${map.label}. Similar clients are close. Drag to zoom; choose a client to highlight its group.`;
  show("map-details", false); // the table of all clients has the same groups
  drawMatrix(run, matrix);
  drawTree(run, dendrogram);
}

function fairness(run) {
  const clients = run.clients;
  if (!show("fairness", Boolean(clients))) return;
  const { label } = data.metric;
  const some = clients.id.length < clients.all ? ` (${number(clients.id.length)} of ${number(clients.all)}, evenly spaced)` : "";
  const figure = run.figures.distribution;
  if (figure?.kind === "dots") {
    dots("spread", figure);
    groupLegend("spread", run, figure.rows.map((row) => row.group));
  } else histogram("spread", figure, run);
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
  const { traffic, seconds } = run.figures;
  if (!show("costs", Boolean(traffic || seconds))) return;
  lines("traffic", traffic, { zoom: false });
  setText("no-traffic", traffic ? "" : "No model was sent: each client trains alone.");
  lines("seconds", seconds, { zoom: false });
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
