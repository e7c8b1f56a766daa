// The tables of layers and ranks: sorted by any column, built anew at each update.
const ROWS_SHOWN = 200;
const SVG = "http://www.w3.org/2000/svg";
const BAR_WIDTH = 2, BARS_HEIGHT = 18;

// Columns: key to sort by, title, text of a cell. `isText` aligns to the left and sorts upwards
// first; `look` gives a cell's class.
const COLUMNS = {
  layers: [
    { key: "layer", title: "Layer", text: (row) => row.layer, isText: true },
    { key: "grad_norm", title: "Norm", text: (row) => number(row.grad_norm) },
    { key: "grad_abs_max", title: "Largest", text: (row) => number(row.grad_abs_max) },
    { key: "zero_ratio", title: "Zeros", text: (row) => percent(row.zero_ratio) },
    {
      key: "nonfinite_elements", title: "Non-finite", text: (row) => number(row.nonfinite_elements),
      look: (row) => (row.nonfinite_elements ? "bad" : ""),
    },
    { key: "elements", title: "Elements", text: (row) => number(row.elements) },
  ],
  ranks: [
    { key: "rank", title: "Rank", text: (row) => String(row.rank), isText: true },
    { key: "host", title: "Host", text: (row) => row.host, isText: true },
    { key: "device", title: "Device", text: (row) => row.device, isText: true },
    {
      key: "up", title: "State", text: (row) => stateOf(row), isText: true,
      look: (row) => (stateOf(row) === "gone" ? "notable" : ""),
    },
    { key: "phase", title: "Phase", text: (row) => row.phase, isText: true },
    { key: "step", title: "Step", text: (row) => number(row.step) },
    {
      key: "lag", title: "Lag", text: (row) => number(row.lag),
      look: (row) => (row.lag > 1 ? "notable" : ""),
    },
    {
      key: "compute_seconds", title: "Before first collective",
      text: (row) => milliseconds(row.compute_seconds),
    },
    { key: "loss", title: "Loss", text: (row) => number(row.loss) },
  ],
};
// Stands in the table of layers once a layer brings its histogram.
const EXPONENTS = {
  key: "exponent_counts", title: "Exponents", isUnsorted: true,
  text: (row) => (row.exponent_counts ? sparkline(row.exponent_counts) : "–"),
};

const stateOf = (rank) => (rank.up ? "up" : rank.phase === "ended" ? "ended" : "gone");

const sparkline = (counts) => {
  const most = Math.max(...counts, 1);
  const svg = document.createElementNS(SVG, "svg");
  const attributes = {
    class: "spark", width: BAR_WIDTH * counts.length, height: BARS_HEIGHT,
    role: "img", "aria-label": "histogram of exponents",
  };
  for (const [name, value] of Object.entries(attributes)) svg.setAttribute(name, value);
  counts.forEach((count, at) => {
    const height = count ? Math.max(1, (BARS_HEIGHT * Math.log1p(count)) / Math.log1p(most)) : 0;
    const bar = document.createElementNS(SVG, "rect");
    const place = { x: BAR_WIDTH * at, y: BARS_HEIGHT - height, width: BAR_WIDTH - 0.4, height };
    for (const [name, value] of Object.entries(place)) bar.setAttribute(name, value);
    svg.append(bar);
  });
  return svg;
};

const compare = (a, b) => (a === b ? 0 : a < b ? -1 : 1);

// Rows by a column; those that lack it come last, whatever the direction.
const sortedRows = (rows, key, direction) => {
  const known = rows.filter((row) => isKnown(row[key]));
  const unknown = rows.filter((row) => !isKnown(row[key]));
  return [...known.sort((a, b) => direction * compare(a[key], b[key])), ...unknown];
};

const newTable = (name, firstSort, onSort) => {
  const table = byId(name);
  let [sortKey, direction] = firstSort;

  const headCell = ({ key, title, isText, isUnsorted }) => {
    const cell = { scope: "col", "data-key": key, class: isText ? "text" : "" };
    if (isUnsorted) return element("th", cell, title);
    const button = element("button", { type: "button" }, title);
    button.addEventListener("click", () => {
      direction = sortKey === key ? -direction : isText ? 1 : -1;
      sortKey = key;
      onSort();
    });
    return element("th", cell, button);
  };

  // The head stays as it is while its columns do, so that the focus does.
  const showHead = (columns) => {
    const keys = columns.map((column) => column.key).join(" ");
    if (table.dataset.columns !== keys) {
      table.dataset.columns = keys;
      const head = element("tr", {}, ...columns.map(headCell));
      table.replaceChildren(element("thead", {}, head), element("tbody"));
    }
    const order = direction > 0 ? "ascending" : "descending";
    for (const cell of table.tHead.rows[0].cells)
      if (cell.firstElementChild)
        cell.setAttribute("aria-sort", cell.dataset.key === sortKey ? order : "none");
  };

  const bodyRow = (columns) => (row) => element("tr", {}, ...columns.map(({ text, isText, look }) =>
    element("td", { class: `${isText ? "text" : ""} ${look ? look(row) : ""}`.trim() }, text(row))));

  return (rows) => {
    const hasExponents = rows.some((row) => row.exponent_counts);
    const columns = hasExponents ? [...COLUMNS[name], EXPONENTS] : COLUMNS[name];
    showHead(columns);
    const shown = sortedRows(rows, sortKey, direction).slice(0, ROWS_SHOWN);
    table.tBodies[0].replaceChildren(...shown.map(bodyRow(columns)));
  };
};
