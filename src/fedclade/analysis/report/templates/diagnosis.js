// A diagnosis: its sentences first, then its other entries as lists and tables.

const isList = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isTable = (value) => Array.isArray(value) && value.length > 0 && value.every(isList);
const titled = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

function drawDiagnosis() {
  if (!show("diagnosis", data.diagnoses.length > 0)) return;
  const several = data.diagnoses.length > 1;
  byId("diagnosis-body").replaceChildren(
    ...data.diagnoses.flatMap(({ name, diagnosis }, at) => [
      ...(several ? [make("h3", {}, name)] : []),
      ...diagnosisParts(diagnosis, `diagnosis-${at}`),
    ]),
  );
}

function diagnosisParts({ headline, sentences, group, kinds, ...rest }, id) {
  const text = [headline, ...(sentences ?? [])]
    .filter(Boolean)
    .map((sentence, at) => make("p", { class: at ? null : "headline" }, String(sentence)));
  // On a page without runs the first sentence is the headline of the page.
  if (!data.runs.length && text.length && text[0].textContent === data.headline) text.shift();
  const entries = Object.entries(rest);
  const prose = entries
    .filter(([, value]) => isProse(value))
    .map(([name, value]) => make("p", {}, make("strong", {}, `${titled(name)}: `), value));
  const short = entries.filter(([, value]) => !isList(value) && !isTable(value) && !isProse(value));
  const lists = entries.filter(([, value]) => isList(value)).map(([name, value]) => nested(name, value, `${id}-${name}`));
  const tables = entries.filter(([, value]) => isTable(value)).map(([name, rows]) => rowsOf(name, rows, `${id}-${name}`));
  if (Array.isArray(group) && !rest.members?.length) tables.push(rowsOf("clients of each group", sizes(group), `${id}-group`));
  const columns = [listed("Summary", short), ...lists.map((list) => list.plain)].filter(Boolean);
  return [...text, ...prose, make("div", { class: "tables" }, ...columns), ...lists.flatMap((list) => list.rows), ...tables.flat()];
}

const isProse = (value) => typeof value === "string" && value.length > 60;
const brief = (value) => (typeof value === "number" ? number(value, 3) : valueText(value));

function listed(name, entries) {
  return entries.length ? pairs(titled(name), Object.fromEntries(entries.map(([key, value]) => [titled(key), brief(value)]))) : null;
}

// Lists inside a list become the rows of a table.
function nested(name, value, id) {
  const isRow = ([, item]) => isList(item) && Object.keys(item).length > 0;
  const rows = Object.entries(value)
    .filter(isRow)
    .map(([key, item]) => ({ [name]: titled(key), ...item }));
  const plain = Object.entries(value).filter((entry) => !isRow(entry));
  return { plain: listed(name, plain), rows: rows.length ? rowsOf(name, rows, id) : [] };
}

function sizes(groups) {
  const count = new Map();
  for (const group of groups) count.set(group, (count.get(group) ?? 0) + 1);
  return [...count.entries()].sort(([a], [b]) => a - b).map(([group, clients]) => ({ group, clients }));
}

function rowsOf(name, rows, id) {
  const keys = [...new Set(rows.flatMap(Object.keys))];
  const columns = keys.map((key) => ({
    label: titled(key),
    value: (row) => row[key] ?? null,
    numeric: rows.every((row) => typeof (row[key] ?? 0) === "number"),
    wide: rows.some((row) => valueText(row[key]).length > 40),
    format: brief,
  }));
  return tableParts(id, { caption: titled(name), columns, rows });
}
