// The curves of the last steps, on uPlot: one axis of steps for all, with the limits of the alerts.
const CHART_HEIGHT = 220, LABELS_WIDTH = 44;
const WIDE = 1000; // Largest over smallest loss from which on its axis is logarithmic.
const LOWEST_LOSS_SCALE = 2 ** -4; // A scale far below the floor carries no more information.

// Each limit: name of a threshold, severity. A log axis always includes those of `reaches`.
const CHARTS = {
  "chart-loss": { column: "loss", label: "loss", floor: Number.MIN_VALUE, limits: [], reaches: [] },
  "chart-scale": {
    column: "loss_scale", label: "loss scale", log: 2, floor: LOWEST_LOSS_SCALE,
    limits: [["loss_scale_very_low", "warning"], ["loss_scale_low", "warning"], ["loss_scale_floor", "critical"]],
    reaches: ["loss_scale_floor", "loss_scale_very_low"],
  },
  "chart-norm": {
    column: "grad_norm", label: "gradient norm", log: 10, floor: Number.MIN_VALUE,
    limits: [
      ["grad_norm_high", "warning"], ["grad_norm_extreme", "critical"],
      ["grad_norm_low", "info"], ["grad_norm_very_low", "warning"], ["grad_norm_vanished", "critical"],
    ],
    reaches: ["grad_norm_very_low", "grad_norm_extreme"],
  },
};

// The ends of a log axis: powers that hold the data and the limits that are always shown.
const logRange = ({ log, floor, reaches }, thresholds) => (plot, low, high) => {
  const ends = reaches.map((name) => thresholds()[name]).filter(isKnown);
  const lowest = Math.max(floor, Math.min(low ?? Infinity, ...ends));
  const highest = Math.max(high ?? 0, ...ends, log * lowest);
  const exponent = (value) => Math.log(value) / Math.log(log);
  return [log ** Math.floor(exponent(lowest) + 1e-9), log ** Math.ceil(exponent(highest) - 1e-9)];
};

// The base of a chart's log axis; that of the loss only where the losses span decades.
const baseOf = ({ column, log }, values) => {
  if (column !== "loss") return log;
  let low = Infinity, high = 0;
  for (const value of values) if (isKnown(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  return low > 0 && high >= WIDE * low ? 10 : undefined;
};

const linearRange = (spikeBound) => (plot, low, high) => {
  if (!isKnown(low)) return [0, 1];
  return uPlot.rangeNum(low, Math.max(high, spikeBound() ?? high), 0.1, true);
};

const drawLimits = (limits) => (plot) => {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  for (const [value, text, severity] of limits()) {
    const y = plot.valToPos(value, "y", true);
    if (!(y >= bbox.top - 1 && y <= bbox.top + bbox.height + 1)) continue;
    ctx.strokeStyle = ctx.fillStyle = color(severity);
    ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    // Next to the curve, never over it.
    ctx.fillText(text, bbox.left + bbox.width + 4 * devicePixelRatio, y);
  }
  ctx.restore();
};

// A tick at the bottom for each step that GradScaler skipped.
const drawSkipped = (skipped) => (plot) => {
  const { ctx, bbox } = plot, steps = plot.data[0], height = 7 * devicePixelRatio;
  ctx.save();
  ctx.fillStyle = color("warning");
  skipped().forEach((isSkipped, at) => {
    const x = plot.valToPos(steps[at], "x", true);
    if (!isSkipped || x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.fillRect(x - devicePixelRatio / 2, bbox.top + bbox.height - height, devicePixelRatio, height);
  });
  ctx.restore();
};

// `source()` gives { history, thresholds, spikeBound } as they are at the moment.
const newCharts = (source) => {
  const charts = {}, bases = {};

  const limitsOf = (chart) => () => {
    const { thresholds, spikeBound } = source();
    if (chart.column === "loss") return isKnown(spikeBound) ? [[spikeBound, "spike", "warning"]] : [];
    const known = chart.limits.filter(([name]) => isKnown(thresholds[name]));
    return known.map(([name, severity]) => [thresholds[name], tickText(thresholds[name]), severity]);
  };

  const yScale = (chart) => (chart.log
    ? { distr: 3, log: chart.log, range: logRange(chart, () => source().thresholds) }
    : { range: linearRange(() => source().spikeBound) });

  // Without a pointer, the legend shows the last step.
  const showLast = (plot) => {
    if (!isKnown(plot.cursor.idx) && plot.data[0].length) plot.setLegend({ idx: plot.data[0].length - 1 }, false);
  };

  const make = (id) => {
    const chart = { ...CHARTS[id], log: bases[id] }, box = byId(id);
    const steps = { ...AXIS_COLORS, values: (plot, values) => values.map((value) => number(value)) };
    const values = { ...AXIS_COLORS, size: axisWidth, values: (plot, ticks) => ticks.map(tickText) };
    if (chart.log) Object.assign(values, { splits: powersBetween(chart.log, 7), filter: (plot, splits) => splits });
    return new uPlot({
      width: box.clientWidth, height: CHART_HEIGHT, padding: [null, LABELS_WIDTH, null, null],
      cursor: { drag: { x: true, y: false }, sync: { key: "steps", scales: ["x", null] } },
      scales: { x: { time: false }, y: yScale(chart) },
      axes: [steps, values],
      series: [
        { label: "step", value: (plot, value) => number(value) },
        {
          label: chart.label, stroke: () => color("curve"), width: 1.5, spanGaps: false,
          points: { show: false }, value: (plot, value) => number(value),
        },
      ],
      hooks: {
        draw: [drawLimits(limitsOf(chart)), drawSkipped(() => source().history?.skipped ?? [])],
        setCursor: [showLast],
      },
    }, [[], []], box);
  };

  // Whether the last step that had a value had NaN or Inf.
  const isBroken = (column, history) => {
    const broken = history[`${column === "grad_norm" ? "gradients" : column}_nonfinite`] ?? [];
    const last = history[column].findLastIndex((value, at) => isKnown(value) || broken[at]);
    return Boolean(broken[last]);
  };

  const describe = (id, history, seen) => {
    let low = Infinity, high = -Infinity;
    for (const value of seen) { low = Math.min(low, value); high = Math.max(high, value); }
    const steps = history.step, now = isBroken(CHARTS[id].column, history) ? "NaN or Inf" : number(seen.at(-1));
    return `${CHARTS[id].label} over steps ${steps[0]} to ${steps.at(-1)}: now ${now}, `
      + `smallest ${number(low)}, largest ${number(high)}`;
  };

  const show = () => {
    const { history } = source();
    for (const [id, chart] of Object.entries(CHARTS)) {
      const { column } = chart, log = baseOf(chart, history[column]);
      const values = history[column].map((value) => (log && !(value > 0) ? null : value));
      const seen = values.filter(isKnown), box = byId(id);
      box.parentElement.hidden = !seen.length;
      if (!seen.length) continue;
      if (charts[id] && bases[id] !== log) {
        charts[id].destroy();
        delete charts[id];
      }
      bases[id] = log;
      const caption = box.parentElement.querySelector("figcaption");
      setText(caption, `${caption.textContent.replace(/ \(log\d+\)$/, "")}${log ? ` (log${log})` : ""}`);
      const plot = (charts[id] ??= make(id)), { min, max } = plot.scales.x, before = plot.data[0];
      const isZoomed = before.length > 0 && (min > before[0] || max < before.at(-1));
      plot.setData([history.step, values], !isZoomed);
      if (isZoomed) plot.redraw();
      showLast(plot);
      box.setAttribute("aria-label", describe(id, history, seen));
    }
  };

  const each = (action) => Object.entries(charts).forEach(([id, plot]) => action(plot, byId(id)));
  return {
    show,
    clear: () => each((plot) => plot.setData([[], []])),
    fit: () => each((plot, box) => plot.setSize({ width: box.clientWidth, height: CHART_HEIGHT })),
    redraw: () => each((plot) => plot.redraw()),
  };
};
