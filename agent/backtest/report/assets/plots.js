// Draws the curves of a backtest on uPlot, of each run once it is opened. Names enter as text only.
const HEIGHT = 170;
const data = JSON.parse(byId("plot-data").textContent);
const SPAN_COLORS = { critical: "bad", warning: "warn", info: "info" };
const pixels = (size) => size * devicePixelRatio;

const drawing = (draw) => (plot) => {
  plot.ctx.save();
  draw(plot, plot.ctx, plot.bbox);
  plot.ctx.restore();
};

const spanColor = (severity) => color(SPAN_COLORS[severity]);

// A band over each time that an alert held; a line where it began.
const drawSpans = (spans) => drawing((plot, ctx, bbox) => {
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const { severity, places } of spans) {
    for (const [first, last] of places) {
      const left = plot.valToPos(first, "x", true), right = plot.valToPos(last, "x", true);
      ctx.fillStyle = spanColor(severity);
      ctx.globalAlpha = 0.13;
      ctx.fillRect(left, bbox.top, Math.max(right - left, pixels(1)), bbox.height);
      ctx.globalAlpha = 0.9;
      ctx.fillRect(left, bbox.top, pixels(1.4), bbox.height);
    }
  }
});

const drawMarks = (places) => drawing((plot, ctx, bbox) => {
  const size = pixels(3), y = bbox.top + pixels(6);
  ctx.strokeStyle = color("bad");
  ctx.lineWidth = pixels(1.4);
  ctx.beginPath();
  for (const place of places) {
    const x = plot.valToPos(place, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y + size);
    ctx.moveTo(x + size, y - size);
    ctx.lineTo(x - size, y + size);
  }
  ctx.stroke();
});

const rangeOf = (log) => (plot, low, high) => {
  if (!isKnown(low)) return log ? [1, log] : [0, 1];
  if (!log) return uPlot.rangeNum(low, high, 0.1, true);
  const exponent = (value) => Math.log(value) / Math.log(log);
  const first = Math.floor(exponent(low) + 1e-9), last = Math.ceil(exponent(high) - 1e-9);
  return [log ** Math.max(first, -1022 / Math.log2(log)), log ** Math.max(last, first + 1)];
};

const splitsOf = (plot, axis, low, high, increment) => {
  const stride = Math.max(1, Math.round(increment)), splits = [];
  for (let at = Math.ceil(low / stride) * stride; at <= high; at += stride) splits.push(at);
  return splits;
};

const makeCurve = (box, run, curve, key) => {
  const { log, marks } = curve;
  const stepOf = (place) => (isKnown(run.step[place]) ? String(run.step[place]) : "");
  const ticks = { values: (plot, splits) => splits.map(tickText) };
  if (log) Object.assign(ticks, { splits: powersBetween(log, 4), filter: (plot, splits) => splits });
  return new uPlot({
    width: box.clientWidth, height: HEIGHT,
    cursor: { drag: { x: true, y: false }, sync: { key, scales: ["x", null] } },
    scales: { x: { time: false }, y: log ? { distr: 3, log, range: rangeOf(log) } : { range: rangeOf(log) } },
    axes: [
      { ...AXIS_COLORS, splits: splitsOf, values: (plot, splits) => splits.map(stepOf) },
      { ...AXIS_COLORS, size: axisWidth, ...ticks },
    ],
    series: [
      { label: "step", value: (plot, value) => stepOf(value) },
      {
        label: curve.title.toLowerCase(), stroke: () => color("series"), width: 1.4, spanGaps: true,
        points: { show: run.step.length < 60 }, value: (plot, value) => number(value),
      },
    ],
    hooks: { drawClear: [drawSpans(run.spans)], draw: [drawMarks(marks)] },
  }, [run.step.map((step, place) => place), curve.values], box);
};

const plots = [];
const open = (details) => {
  const box = details.querySelector(".plots");
  if (box.childElementCount) return;
  const index = Number(details.dataset.run), run = data[index];
  for (const curve of run.curves) {
    const holder = element("div", { class: "plot", role: "img", "aria-label": curve.description });
    box.append(element("figure", {},
      element("figcaption", {}, element("strong", {}, curve.title), ` ${curve.caption}`), holder));
    plots.push(makeCurve(holder, run, curve, `run-${index}`));
  }
};
document.querySelectorAll("details.run").forEach((details) => {
  if (details.open) open(details);
  details.addEventListener("toggle", () => details.open && open(details));
});
addEventListener("resize", () => plots.forEach((plot) =>
  plot.setSize({ width: plot.root.parentElement.clientWidth, height: plot.height })));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.redraw()));
