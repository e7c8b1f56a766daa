// Draws the plots of a post-mortem on uPlot. Names from the job enter the page as text only.
const HEIGHT = 190, LANE_HEIGHT = 20, LANES_MARGIN = 67; // The margin holds the axis and the padding.
const data = JSON.parse(byId("plot-data").textContent);
const LANE_COLORS = { fine: "delivered", skipped: "warn", lost: "bad", absent: "line" };
const LANE_TEXTS = { skipped: "skipped", lost: "loss NaN or Inf", absent: "not delivered" };

const pixels = (size) => size * devicePixelRatio;

const stepText = (sequence) => {
  const index = data.sequence.indexOf(sequence);
  return index < 0 ? "" : String(data.step[index]);
};

// All axes are as wide as the widest, so that steps lie below each other.
const nameWidth = Math.max(...data.lanes.map(({ name }) => name.length), 0) * CHARACTER_WIDTH + TICK_WIDTH;
const width = Math.max(AXIS_WIDTH, nameWidth, 7 * CHARACTER_WIDTH + TICK_WIDTH);

// Steps at whole numbers only.
const stepSplits = (plot, axis, low, high, increment) => {
  const stride = Math.max(1, Math.round(increment));
  const splits = [];
  for (let at = Math.ceil(low / stride) * stride; at <= high; at += stride) splits.push(at);
  return splits;
};

// The range of a curve holds its limits as well.
const rangeOf = ({ log, limits }) => (plot, low, high) => {
  const ends = limits.map(([value]) => value);
  const known = [low, high].filter(isKnown).concat(ends);
  if (!known.length) return log ? [1, log] : [0, 1];
  const lowest = Math.min(...known), highest = Math.max(...known);
  if (!log) return uPlot.rangeNum(lowest, highest, 0.1, true);
  const exponent = (value) => Math.log(value) / Math.log(log);
  const first = Math.floor(exponent(lowest) + 1e-9), last = Math.ceil(exponent(highest) - 1e-9);
  return [log ** Math.max(first, -1022 / Math.log2(log)), log ** Math.max(last, first + 1)];
};

const drawing = (draw) => (plot) => {
  plot.ctx.save();
  draw(plot, plot.ctx, plot.bbox);
  plot.ctx.restore();
};

// A line of one pixel between two pixels would be drawn pale over both.
const sharp = (place) => Math.floor(place) + (devicePixelRatio % 2 ? 0.5 : 0);

const drawBadStep = drawing((plot, ctx, bbox) => {
  if (!isKnown(data.bad)) return;
  const x = sharp(plot.valToPos(data.bad, "x", true));
  if (x < bbox.left || x > bbox.left + bbox.width) return;
  ctx.strokeStyle = color("bad");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([pixels(2), pixels(3)]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
});

const drawLimits = (limits) => drawing((plot, ctx, bbox) => {
  ctx.strokeStyle = ctx.fillStyle = color("warn");
  ctx.lineWidth = devicePixelRatio;
  ctx.font = `${pixels(11)}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "bottom";
  ctx.setLineDash([pixels(5), pixels(4)]);
  limits.forEach(([value, label], place) => {
    const y = sharp(plot.valToPos(value, "y", true));
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    // Next to each other, since limits may be close to each other.
    ctx.fillText(label, bbox.left + pixels(4 + 110 * place), y - devicePixelRatio);
  });
});

const drawMarks = (marks) => drawing((plot, ctx, bbox) => {
  const size = pixels(3), y = bbox.top + pixels(6);
  ctx.strokeStyle = color("bad");
  ctx.lineWidth = pixels(1.6);
  ctx.beginPath();
  for (const index of Object.keys(marks)) {
    const x = plot.valToPos(data.sequence[index], "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y + size);
    ctx.moveTo(x + size, y - size);
    ctx.lineTo(x - size, y + size);
  }
  ctx.stroke();
});

const drawLanes = drawing((plot, ctx, bbox) => {
  const half = Math.max(pixels(0.5), (plot.valToPos(1, "x", true) - plot.valToPos(0, "x", true)) / 2);
  const height = bbox.height / data.lanes.length;
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  data.lanes.forEach(({ runs }, lane) => {
    for (const [first, last, kind] of runs) {
      const left = plot.valToPos(first, "x", true) - half, right = plot.valToPos(last, "x", true) + half;
      ctx.fillStyle = color(LANE_COLORS[kind]);
      ctx.fillRect(left, bbox.top + lane * height + pixels(2), right - left, height - pixels(4));
    }
  });
});

const makePlot = (box, { height, scale, values, series, draw }) => new uPlot({
  width: box.clientWidth, height,
  cursor: { drag: { x: true, y: false }, sync: { key: "steps", scales: ["x", null] } },
  scales: { x: { time: false }, y: scale },
  axes: [
    { ...AXIS_COLORS, splits: stepSplits, values: (plot, splits) => splits.map(stepText) },
    { ...AXIS_COLORS, size: width, ...values },
  ],
  series: [{ label: "step", value: (plot, value) => stepText(value) }, ...series],
  hooks: { draw },
}, [data.sequence, ...series.map(({ points: _, ...one }) => one.data ?? data.sequence.map(() => null))], box);

const makeCurve = (curve) => {
  const { log, limits, marks } = curve;
  const ticks = { values: (plot, splits) => splits.map(tickText) };
  if (log) Object.assign(ticks, { splits: powersBetween(log, 5), filter: (plot, splits) => splits });
  const remarks = {
    label: "×", data: data.sequence.map(() => null), points: { show: false },
    value: (plot, value, series, index) => marks[index] ?? "–",
  };
  const line = {
    label: curve.label, data: curve.values, stroke: () => color("series"), width: 1.6,
    spanGaps: false, value: (plot, value) => number(value),
  };
  return makePlot(byId(`plot-${curve.id}`), {
    height: HEIGHT,
    scale: log ? { distr: 3, log, range: rangeOf(curve) } : { range: rangeOf(curve) },
    values: ticks,
    series: Object.keys(marks).length ? [line, remarks] : [line],
    draw: [drawLimits(limits), drawBadStep, drawMarks(marks)],
  });
};

const laneRemarks = (sequence) => {
  const found = data.lanes.flatMap(({ name, runs }) => runs
    .filter(([first, last, kind]) => first <= sequence && sequence <= last && kind !== "fine")
    .map(([, , kind]) => `${name} ${LANE_TEXTS[kind]}`));
  return found.length ? found.join(", ") : "all delivered";
};

const makeLanes = () => {
  const lanes = data.lanes.length;
  return makePlot(byId("plot-lanes"), {
    height: lanes * LANE_HEIGHT + LANES_MARGIN,
    scale: { range: () => [0, lanes] },
    values: {
      splits: () => data.lanes.map((lane, index) => lanes - index - 0.5),
      filter: (plot, splits) => splits,
      values: () => data.lanes.map(({ name }) => name),
      grid: { show: false }, ticks: { show: false },
    },
    series: [{
      label: "ranks", points: { show: false },
      value: (plot, value, series, index) => (isKnown(index) ? laneRemarks(data.sequence[index]) : "–"),
    }],
    draw: [drawLanes, drawBadStep],
  });
};

const plots = data.curves.map(makeCurve);
if (data.lanes.length) plots.push(makeLanes());
const fit = () => plots.forEach((plot) =>
  plot.setSize({ width: plot.root.parentElement.clientWidth, height: plot.height }));
addEventListener("resize", fit);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.redraw()));
