// The tables of layers and ranks: sorted by any column, their rows rebuilt at each update.
const ROWS_SHOWN = 200;

// Columns: key to sort by, title, text of a cell. `isText` aligns to the left and sorts ascending
// first; `look` returns a cell's class.
const COLUMNS = {
  layers: [
    { key: "layer", title: "Layer", text: (row) => row.layer, isText: true },
    {
      key: "grad_norm", title: "Norm", text: (row) => present(row.grad_norm, row.grad_norm_step, row.step),
      look: (row) => (isKnown(row.grad_norm) && row.grad_norm_step !== row.step ? "notable" : ""),
    },
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
    { key: "overhead_ratio", title: "Probe's share", text: (row) => percent(row.overhead_ratio, 2) },
  ],
};
const stateOf = (rank) => (rank.up ? "up" : rank.phase === "ended" ? "ended" : "gone");

const compare = (a, b) => (a === b ? 0 : a < b ? -1 : 1);

// Rows by a column; those that lack it come last, whatever the direction, and the layer in which
// NaN or Inf was first comes first: the norms are old then.
const sortedRows = (rows, key, direction) => {
  const known = rows.filter((row) => isKnown(row[key]));
  const unknown = rows.filter((row) => !isKnown(row[key]));
  const sorted = [...known.sort((a, b) => direction * compare(a[key], b[key])), ...unknown];
  return sorted.sort((a, b) => Number(b.first_nonfinite ?? false) - Number(a.first_nonfinite ?? false));
};

const newTable = (name, firstSort, onSort) => {
  const table = byId(name);
  let [sortKey, direction] = firstSort;

  const headCell = ({ key, title, isText }) => {
    const cell = { scope: "col", "data-key": key, class: isText ? "text" : "" };
    const button = element("button", { type: "button" }, title);
    button.addEventListener("click", () => {
      direction = sortKey === key ? -direction : isText ? 1 : -1;
      sortKey = key;
      onSort();
    });
    return element("th", cell, button);
  };

  // Built once, so that the focus stays on its button.
  const head = element("tr", {}, ...COLUMNS[name].map(headCell));
  table.replaceChildren(element("thead", {}, head), element("tbody"));

  const showOrder = () => {
    const order = direction > 0 ? "ascending" : "descending";
    for (const cell of head.cells)
      cell.setAttribute("aria-sort", cell.dataset.key === sortKey ? order : "none");
  };

  const bodyRow = (row) => element("tr", {}, ...COLUMNS[name].map(({ text, isText, look }) =>
    element("td", { class: `${isText ? "text" : ""} ${look ? look(row) : ""}`.trim() }, ...(isText ? breakable(text(row)) : [text(row)]))));

  return (rows) => {
    showOrder();
    const shown = sortedRows(rows, sortKey, direction).slice(0, ROWS_SHOWN);
    table.tBodies[0].replaceChildren(...shown.map(bodyRow));
  };
};
