// Tables that can be sorted by any column, and that show long lists in parts.

const PAGE_ROWS = 100;

/* columns: [{ label, value(row), numeric, format(value, row), wide: text that may wrap, header: this cell is the row's header, cell(row): an element instead of text }]. */
function tableParts(id, { caption, columns, rows, sortable = true, chosenRow = () => false, first = null, most: shown = PAGE_ROWS }) {
  const sort = chosen.sort[id] ?? first;
  const sorted = sort && sortable ? bySort(rows, columns[sort.column], sort.rising) : rows;
  const most = chosen.rows[id] ?? shown;
  const head = make("tr", {}, ...columns.map((column, at) => heading(id, column, at, sort, sortable)));
  const body = sorted
    .slice(0, most)
    .map((row) => make("tr", { class: chosenRow(row) ? "chosen" : null }, ...columns.map((column) => cell(column, row))));
  const drawn = make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...body));
  const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption, id: `${id}-scroll` }, drawn);
  const hint = make("p", { class: "hint", hidden: true, "aria-hidden": "true" }, "More columns: scroll the table sideways →");
  watchWidth(scroll, hint);
  const parts = [hint, scroll];
  if (sorted.length > most) {
    const more = () => change({ rows: { ...chosen.rows, [id]: most + 5 * PAGE_ROWS } });
    parts.push(
      make(
        "p",
        { class: "more" },
        `${number(most)} of ${number(sorted.length)} rows. `,
        make("button", { type: "button", id: `${id}-more`, onclick: more }, "Show more"),
      ),
    );
  }
  return parts;
}

// The hint is there as long as columns are hidden at the right. A folded table has a width when it is unfolded.
const widths = new ResizeObserver((entries) => entries.forEach(({ target }) => target.dispatchEvent(new Event("scroll"))));
function watchWidth(scroll, hint) {
  scroll.addEventListener("scroll", () => {
    hint.hidden = scroll.scrollLeft + scroll.clientWidth >= scroll.scrollWidth - 2;
  });
  widths.observe(scroll);
}

const table = (id, options) => byId(id).replaceChildren(...tableParts(id, options));

// Empty values are last in both directions; equal values keep their order.
function bySort(rows, { value }, rising) {
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  return [...rows].sort((left, right) => {
    const [a, b] = [value(left), value(right)];
    if (a === null || b === null || a === undefined || b === undefined)
      return (a ?? null) === (b ?? null) ? 0 : (a ?? null) === null ? 1 : -1;
    return rising ? compare(a, b) : compare(b, a);
  });
}

function heading(id, column, at, sort, sortable) {
  const kind = [column.numeric && "number", column.label.length > 16 && "long"].filter(Boolean).join(" ") || null;
  if (!sortable) return make("th", { scope: "col", class: kind }, make("span", {}, column.label));
  const isSorted = sort?.column === at;
  // The first click sorts numbers descending and names ascending.
  const rising = isSorted ? !sort.rising : !column.numeric;
  const onclick = () => change({ sort: { ...chosen.sort, [id]: { column: at, rising } } });
  const state = isSorted ? (sort.rising ? "ascending" : "descending") : "none";
  return make(
    "th",
    { scope: "col", class: kind, "aria-sort": state },
    make("button", { type: "button", id: `${id}-sort-${at}`, onclick, title: "Sort by this column" }, column.label),
  );
}

function cell(column, row) {
  const value = column.value(row);
  const inside = column.cell
    ? column.cell(row)
    : column.format
      ? column.format(value, row)
      : typeof value === "number"
        ? number(value)
        : (value ?? NONE);
  const kind = column.numeric ? "number" : column.wide ? "wide" : null;
  return column.header ? make("th", { scope: "row", class: kind }, inside) : make("td", { class: kind }, inside);
}

// A dictionary as two columns; any JSON value as text.
function pairs(caption, dictionary) {
  const rows = Object.entries(dictionary).map(([name, value]) =>
    make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, valueText(value))),
  );
  return make("table", {}, make("caption", {}, caption), make("tbody", {}, ...rows));
}

function valueText(value) {
  if (value === null || value === undefined) return NONE;
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : number(value, 5);
  if (Array.isArray(value)) return value.length ? value.map(valueText).join(", ") : "none";
  if (typeof value === "object")
    return (
      Object.entries(value)
        .map(([name, item]) => `${name}: ${valueText(item)}`)
        .join("; ") || "none"
    );
  return String(value);
}
