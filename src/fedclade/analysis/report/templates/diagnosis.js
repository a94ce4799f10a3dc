// A diagnosis: its sentences, figures, groups, and what to do next.

const titled = (text) => text[0].toUpperCase() + text.slice(1);

function drawDiagnosis() {
  if (!show("diagnosis", data.diagnoses.length > 0)) return;
  const several = data.diagnoses.length > 1;
  // Figures are drawn into elements that exist.
  const body = byId("diagnosis-body");
  body.replaceChildren(
    ...data.diagnoses.flatMap((diagnosis, at) => [...(several ? [make("h3", {}, diagnosis.name)] : []), ...diagnosisParts(diagnosis, `diagnosis-${at}`)]),
  );
  data.diagnoses.forEach((diagnosis, at) => drawDiagnosisFigures(diagnosis, `diagnosis-${at}`));
}

function diagnosisParts(diagnosis, id) {
  const { headline, sentences, groups, commands, leaves, figures } = diagnosis;
  const text = [headline, ...sentences].filter(Boolean).map((sentence, at) => make("p", { class: at ? null : "headline" }, sentence));
  // On a page without runs the first sentence is the headline of the page.
  if (!data.runs.length && text.length && text[0].textContent === data.headline) text.shift();
  return [
    ...text,
    ...(commands.length ? [make("h3", {}, "What to do next"), ...commands.map(commandBlock)] : []),
    ...(groups.length ? [make("h3", {}, "Groups"), make("div", { id: `${id}-groups` })] : []),
    make("div", { class: "pair" }, figureElement(`${id}-chance`, "How much clients differ. A bar near 1 is chance.", figures.chance), figureElement(`${id}-map`, "Map of the clients: similar clients are close", figures.map)),
    figureElement(`${id}-pilots`, "Pilot runs on held-out training data: the gain over FedAvg, with two standard errors", figures.pilots),
    ...(leaves ? [make("details", {}, make("summary", {}, "What left a client"), make("p", {}, `${titled(leaves)}.`))] : []),
  ];
}

// The same elements as the macro `figure` of page.html.
// Those with a description are visible at once, so that the figures next to them have their width.
function figureElement(id, caption, figure) {
  return make(
    "figure",
    { id, hidden: !figure },
    make("figcaption", {}, caption),
    make("div", { class: "plot", id: `${id}-plot` }),
    make("ul", { class: "legend", id: `${id}-legend`, "aria-label": "Legend" }),
    make("details", { id: `${id}-details` }, make("summary", {}, "Show as a table"), make("div", { id: `${id}-table` })),
  );
}

// The command, and a button that copies it, or selects it where the browser does not allow that.
function commandBlock({ why, command }, at) {
  const code = make("code", { tabindex: "0" }, command);
  const button = make("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "Copied";
    } catch {
      window.getSelection().selectAllChildren(code);
      button.textContent = "Selected: press Ctrl+C";
    }
  });
  return make("div", { class: "command" }, make("p", {}, `${at + 1}. ${why}:`), make("pre", {}, code), button);
}

function drawDiagnosisFigures(diagnosis, id) {
  const { figures, evidence, pilots } = diagnosis;
  barRows(`${id}-chance`, figures.chance);
  if (figures.chance)
    table(`${id}-chance-table`, {
      caption: "What differs between clients",
      sortable: false,
      rows: evidence,
      columns: [
        { label: "What differs", value: (row) => row.name, header: true },
        { label: "Share of the variance", value: (row) => row.share, numeric: true, format: (value) => `${fixed(value)} %` },
        { label: "Times chance", value: (row) => row.times, numeric: true, format: (value) => fixed(value) },
        { label: "By chance alone", value: (row) => row.chance },
      ],
    });
  dots(`${id}-pilots`, figures.pilots);
  if (figures.pilots)
    table(`${id}-pilots-table`, {
      caption: "Pilot runs, the best first",
      sortable: false,
      rows: pilots,
      chosenRow: (row) => row.recommended,
      columns: [
        { label: "Method", value: (row) => row.name, header: true },
        { label: "Score", value: (row) => row.score, numeric: true },
        { label: "Gain over FedAvg", value: (row) => row.gain, numeric: true, format: (value, row) => (row.name === "fedavg" ? NONE : `${fixed(value)} ± ${fixed(row.half)}`) },
        { label: "Models", value: (row) => row.models, numeric: true },
        { label: "Rounds", value: (row) => row.rounds, numeric: true },
        { label: "Seeds", value: (row) => row.seeds, numeric: true },
      ],
    });
  diagnosisMap(diagnosis, `${id}-map`);
  if (diagnosis.groups.length) diagnosisGroups(diagnosis, `${id}-groups`);
}

function diagnosisMap(diagnosis, id) {
  const { map } = diagnosis.figures;
  if (!show(id, Boolean(map))) return;
  const axis = (values, { label }) => ({ label, domain: padded(extent(values), 0.08) });
  const points = map.id.map((_, at) => ({
    x: map.px[at],
    y: map.py[at],
    group: map.groups[at],
    name: map.names?.[at],
    text: `client ${map.clients[at]}${map.groups[at] < 0 ? "" : `, ${groupName(map.groups[at])}`}`,
  }));
  scatter(id, { label: map.label, x: axis(map.px, map.x), y: axis(map.py, map.y), points, run: diagnosis, height: 300 });
  show(`${id}-details`, false); // the table of the groups has the same clients
}

function diagnosisGroups(diagnosis, id) {
  const columns = [
    {
      label: "Group",
      value: (row) => row.group,
      header: true,
      cell: (row) => make("span", { class: "named" }, key(colorFor(diagnosis, row.group)), make("span", { class: "short" }, groupName(row.group))),
    },
    { label: "Size", value: (row) => row.clients, numeric: true },
    { label: "Clients in it", value: (row) => row.members, wide: true },
    ...(diagnosis.groups.some((row) => row.classes) ? [{ label: "Classes", value: (row) => row.classes, wide: true }] : []),
  ];
  table(id, { caption: "The groups", columns, rows: diagnosis.groups, most: 12 });
}
