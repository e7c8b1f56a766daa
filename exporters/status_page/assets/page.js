"use strict";
(() => {
  const PERIOD_MS = 2000, LAYERS_SHOWN = 200;
  const byId = (id) => document.getElementById(id);
  const state = { run: null, history: null, charts: {}, sort: { layers: ["grad_norm", -1], ranks: ["rank", 1] }, last: null, failedSince: null, timer: 0 };

  // Text only ever enters the page as text: names come from the job and may hold anything.
  const el = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  };
  const number = (value, digits = 4) => {
    if (value === null || value === undefined) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en-US");
    return size >= 1e6 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
  };
  const percent = (value) => (value === null || value === undefined ? "–" : `${Number((100 * value).toPrecision(4))} %`);
  const milliseconds = (value) => (value === null || value === undefined ? "–" : `${number(1000 * value, 3)} ms`);
  const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString();

  const facts = (list, pairs) => {
    list.replaceChildren(...pairs.filter(([, value]) => value !== "").map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  };

  // ---- header ----
  const showRuns = (runs) => {
    byId("run-choice").hidden = runs.length < 2;
    const select = byId("runs");
    const names = runs.map((run) => run.run);
    if (JSON.stringify([...select.options].map((option) => option.value)) !== JSON.stringify(names))
      select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    if (!names.includes(state.run)) { state.run = names[0] ?? null; state.history = null; }
    if (state.run !== null) select.value = state.run;
  };
  const showHeader = (run) => {
    byId("run-name").textContent = run ? run.run : "mp_agent";
    document.title = run ? `${run.run} – mp_agent` : "mp_agent";
    const verdict = byId("verdict"), text = run ? run.verdict : "No run has shown itself yet.";
    if (verdict.textContent !== text) verdict.textContent = text;
    verdict.dataset.worst = !run || !run.is_root ? "" : run.conditions.length ? run.conditions[0].severity
      : run.summary.active || run.summary.end_reason === "completed" ? "none" : "critical";
  };
  const showNow = (summary) => {
    const known = summary ?? {};
    const first = known.first_nonfinite;
    facts(byId("facts"), !summary ? [["Run scope", "at the root agent"]] : [
      ["Step", number(known.step)], ["Phase", known.phase], ["Loss", number(known.loss)],
      ["Loss scale", number(known.loss_scale)], ["Gradient norm", number(known.grad_norm)],
      ["Largest gradient", number(known.grad_abs_max)], ["Clip coefficient", number(known.clip_coefficient)],
      ["Learning rate", number(known.learning_rate)], ["Coverage", percent(known.coverage)],
      ["Missing ranks", known.missing_ranks.join(", ")],
      ["First non-finite", first ? [`step ${first.step}`, first.phase, first.rank && `rank ${first.rank}`, first.layer].filter(Boolean).join(", ") : ""],
      ["Attempt", String(known.attempt)], ["Ranks", `${known.world_size} on ${known.nodes} node${known.nodes === 1 ? "" : "s"}`],
      ["Strategy", known.facts.strategy ?? ""], ["Precision", known.facts.precision ?? ""],
      ["Measured at", known.facts.measuring_point ?? ""], ["torch", known.torch_version],
    ]);
  };
  const showConditions = (run) => {
    const items = (run ? run.conditions : []).map((condition) => el("li", { class: condition.severity },
      el("p", {}, el("span", { class: "badge" }, condition.severity), " ", el("strong", {}, condition.name), ` since step ${condition.since_step}`,
        [condition.rank && `, rank ${condition.rank}`, condition.layer && `, ${condition.layer}`].filter(Boolean).join("")),
      el("p", {}, condition.description || condition.summary),
      el("p", {}, el("strong", {}, "What to do: "), condition.remedy)));
    if (!items.length) items.push(el("li", { class: "quiet" }, run && !run.is_root ? "Judged by the root agent." : "None."));
    byId("conditions").replaceChildren(...items);
  };

  // ---- curves ----
  // Below FP16's smallest number a loss scale says nothing more: `floor` ends that axis.
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const lines = (limits) => (u) => {
    const { ctx, bbox } = u;
    ctx.save(); ctx.setLineDash([6, 4]); ctx.lineWidth = devicePixelRatio;
    for (const [value, paint] of limits()) {
      const y = u.valToPos(value, "y", true);
      if (!(y >= bbox.top && y <= bbox.top + bbox.height)) continue;
      ctx.strokeStyle = color(paint); ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
    }
    ctx.restore();
  };
  const CHARTS = {
    "chart-loss": { column: "loss", label: "loss", limits: () => [] },
    "chart-scale": { column: "loss_scale", label: "loss scale", log: 2, floor: 2 ** -24, limits: () => [[1024, "--info"], [limit("loss_scale_low"), "--warning"], [limit("loss_scale_floor"), "--critical"]] },
    "chart-norm": { column: "grad_norm", label: "gradient norm", log: 10, limits: () => [[limit("grad_norm_high"), "--warning"], [limit("grad_norm_extreme"), "--critical"], [limit("grad_norm_low"), "--warning"], [limit("grad_norm_vanished"), "--critical"]] },
  };
  const limit = (name) => (state.last ? state.last.thresholds[name] : undefined);
  const makeChart = (id) => {
    const { column, label, log, limits, floor } = CHARTS[id], box = byId(id);
    const axis = { stroke: () => color("--soft"), grid: { stroke: () => color("--grid"), width: 1 }, ticks: { stroke: () => color("--grid") } };
    const options = {
      width: Math.max(box.clientWidth, 260), height: 220, cursor: { drag: { x: true, y: false } },
      scales: { x: { time: false }, y: !log ? {} : floor ? { distr: 3, log, range: (u, low, high) => (low === null ? [1, 2] : [Math.max(low, floor), Math.max(2 * high, 2 * floor)]) } : { distr: 3, log } },
      axes: [{ ...axis, values: (u, values) => values.map((value) => number(value)) }, { ...axis, size: 64, values: (u, values) => values.map((value) => (value === null ? "" : number(value, 3))) }],
      series: [{ label: "step" }, { label, stroke: () => color("--curve"), width: 1.5, spanGaps: false, points: { show: false }, value: (u, value) => number(value) }],
      hooks: { draw: [lines(limits)] },
    };
    return { plot: new uPlot(options, [[], []], box), column, box, log };
  };
  const showCurves = () => {
    const history = state.history;
    byId("curves").hidden = !history || !history.step.length;
    if (byId("curves").hidden) return;
    for (const id of Object.keys(CHARTS)) {
      const chart = (state.charts[id] ??= makeChart(id));
      const values = history[chart.column].map((value) => (chart.log && !(value > 0) ? null : value));
      const zoomed = chart.plot.scales.x.min > chart.plot.data[0][0] || chart.plot.scales.x.max < chart.plot.data[0].at(-1);
      chart.plot.setData([history.step, values], !zoomed);
      if (zoomed) chart.plot.redraw();
      const seen = values.filter((value) => value !== null);
      chart.box.parentElement.hidden = !seen.length;
      // A loop: a thousand arguments are fine, more might not be.
      let low = Infinity, high = -Infinity;
      for (const value of seen) { low = Math.min(low, value); high = Math.max(high, value); }
      chart.box.setAttribute("aria-label", `${CHARTS[id].label} over steps ${history.step[0]} to ${history.step.at(-1)}: now ${number(seen.at(-1))}, smallest ${number(low)}, largest ${number(high)}`);
    }
  };
  const resize = () => { for (const chart of Object.values(state.charts)) chart.plot.setSize({ width: Math.max(chart.box.clientWidth, 260), height: 220 }); };

  // ---- tables ----
  const sparkline = (counts) => {
    const space = "http://www.w3.org/2000/svg", most = Math.max(...counts, 1);
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("class", "spark"); svg.setAttribute("width", 2 * counts.length); svg.setAttribute("height", 18); svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", "histogram of exponents");
    counts.forEach((count, at) => {
      const bar = document.createElementNS(space, "rect"), height = count ? Math.max(1, 18 * Math.log1p(count) / Math.log1p(most)) : 0;
      for (const [name, value] of Object.entries({ x: 2 * at, y: 18 - height, width: 1.6, height })) bar.setAttribute(name, value);
      svg.append(bar);
    });
    return svg;
  };
  const TABLES = {
    layers: [
      ["layer", "Layer", (row) => row.layer, "text"], ["grad_norm", "Norm", (row) => number(row.grad_norm)],
      ["grad_abs_max", "Largest", (row) => number(row.grad_abs_max)], ["zero_ratio", "Zeros", (row) => percent(row.zero_ratio)],
      ["nonfinite_elements", "Non-finite", (row) => number(row.nonfinite_elements), (row) => (row.nonfinite_elements ? "bad" : "")],
      ["elements", "Elements", (row) => number(row.elements)],
    ],
    ranks: [
      ["rank", "Rank", (row) => String(row.rank)], ["host", "Host", (row) => row.host, "text"], ["device", "Device", (row) => row.device, "text"],
      ["up", "State", (row) => (row.up ? "up" : row.phase === "ended" ? "ended" : "gone"), (row) => (row.up || row.phase === "ended" ? "" : "notable")], ["phase", "Phase", (row) => row.phase, "text"],
      ["step", "Step", (row) => number(row.step)], ["lag", "Lag", (row) => number(row.lag), (row) => (row.lag > 1 ? "notable" : "")],
      ["compute_seconds", "Before first collective", (row) => milliseconds(row.compute_seconds)], ["loss", "Loss", (row) => number(row.loss)],
    ],
  };
  const EXPONENTS = ["exponent_counts", "Exponents", (row) => (row.exponent_counts ? sparkline(row.exponent_counts) : "–")];
  const compare = (a, b) => (a === b ? 0 : a === null || a === undefined ? 1 : b === null || b === undefined ? -1 : a < b ? -1 : 1);
  const showTable = (name, rows) => {
    const columns = [...TABLES[name]];
    if (name === "layers" && rows.some((row) => row.exponent_counts)) columns.push(EXPONENTS);
    const [by, direction] = state.sort[name], table = byId(name);
    if (table.dataset.columns !== String(columns.length)) {
      table.dataset.columns = columns.length;
      const head = el("tr", {}, ...columns.map(([key, title, , kind]) => {
        const button = el("button", { type: "button" }, title);
        button.addEventListener("click", () => {
          const [now, way] = state.sort[name];
          state.sort[name] = [key, now === key ? -way : key === "layer" || key === "host" || key === "rank" ? 1 : -1];
          show();
        });
        return el("th", { scope: "col", "data-key": key, class: kind === "text" ? "text" : "" }, button);
      }));
      table.replaceChildren(el("thead", {}, head), el("tbody"));
    }
    for (const th of table.tHead.rows[0].cells)
      th.setAttribute("aria-sort", th.dataset.key === by ? (direction > 0 ? "ascending" : "descending") : "none");
    const known = rows.filter((row) => row[by] !== null && row[by] !== undefined), unknown = rows.filter((row) => row[by] === null || row[by] === undefined);
    const sorted = [...known.sort((a, b) => direction * compare(a[by], b[by])), ...unknown];
    table.tBodies[0].replaceChildren(...sorted.slice(0, LAYERS_SHOWN).map((row) => el("tr", {}, ...columns.map(([, , text, kind]) =>
      el("td", { class: typeof kind === "function" ? kind(row) : kind ?? "" }, text(row))))));
    return sorted.length;
  };
  const showLayers = (layers, omitted) => {
    const wanted = byId("layer-filter").value.toLowerCase();
    const count = showTable("layers", layers.filter((row) => row.layer.toLowerCase().includes(wanted)));
    const more = byId("layers-more");
    more.hidden = count <= LAYERS_SHOWN && !omitted;
    more.textContent = `${Math.min(count, LAYERS_SHOWN)} of ${count + omitted} layers, in this order; sort or filter to see others.`
      + (omitted ? ` ${omitted} with smaller norms are left out.` : "");
  };

  // ---- life ----
  const show = () => {
    const answer = state.last;
    if (!answer) return;
    showRuns(answer.runs);
    const run = answer.runs.find((candidate) => candidate.run === state.run);
    showHeader(run); showNow(run ? run.summary : null); showConditions(run); showCurves();
    showLayers(run ? run.layers : [], run ? run.layers_omitted : 0); showTable("ranks", run ? run.ranks : []);
    if (run) {
      const agent = run.agent;
      facts(byId("agent"), [
        ["Version", agent.version], ["Node", String(run.node_rank)], ["Probe time", `${number(agent.probe_seconds, 3)} s`],
        ["Probe errors", number(agent.probe_errors)], ["Setting errors", number(agent.setting_errors)], ["Records dropped", number(agent.records_dropped)],
        ["Series dropped", number(agent.series_dropped)], ["Last scrape took", milliseconds(agent.scrape_duration_seconds)], ["Not measured", agent.unsupported.join(", ")],
      ]);
      byId("version").textContent = agent.version;
    }
    const updated = byId("updated");
    updated.textContent = clock(answer.time_unix_seconds);
    updated.setAttribute("datetime", new Date(1000 * answer.time_unix_seconds).toISOString());
  };
  const ask = async (path) => {
    const answer = await fetch(path, { signal: AbortSignal.timeout(10000), cache: "no-store" });
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  };
  const update = async () => {
    try {
      state.last = await ask("api/v1/snapshot");
      showRuns(state.last.runs);
      if (state.run !== null) state.history = await ask(`api/v1/history?run=${encodeURIComponent(state.run)}`);
      state.failedSince = null;
    } catch (error) {
      state.failedSince ??= Date.now();
    }
    const stale = byId("stale");
    stale.hidden = state.failedSince === null;
    if (state.failedSince !== null) {
      const text = `The node agent has not answered since ${new Date(state.failedSince).toLocaleTimeString()}. What you see is the last it said.`;
      if (stale.textContent !== text) stale.textContent = text;
    }
    show();
    clearTimeout(state.timer);
    state.timer = setTimeout(update, document.hidden ? 5 * PERIOD_MS : PERIOD_MS);
  };
  byId("runs").addEventListener("change", (event) => { state.run = event.target.value; state.history = null; for (const chart of Object.values(state.charts)) chart.plot.setData([[], []]); update(); });
  byId("layer-filter").addEventListener("input", show);
  addEventListener("resize", resize);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const chart of Object.values(state.charts)) chart.plot.redraw(); });
  update();
})();
