// Draws the plots of a comparison on uPlot. Names from the model enter the page as text only.
const HEIGHT = 220;
const plotsData = JSON.parse(byId("plot-data").textContent);

const pixels = (size) => size * devicePixelRatio;

const drawing = (draw) => (plot) => {
  plot.ctx.save();
  draw(plot, plot.ctx, plot.bbox);
  plot.ctx.restore();
};

// Calls at whole numbers only; how many of them are named depends on the width.
const callSplits = (plot, axis, low, high, increment) => {
  const stride = Math.max(1, Math.round(increment));
  const splits = [];
  for (let at = Math.ceil(low / stride) * stride; at <= high; at += stride) splits.push(at);
  return splits;
};

const powersOfTen = ({ curves, limit }) => () => {
  const known = curves.flatMap(({ values }) => values).filter(isKnown).concat(limit);
  const first = Math.floor(Math.log10(Math.min(...known)) + 1e-9);
  const last = Math.ceil(Math.log10(Math.max(...known)) - 1e-9);
  return [10 ** first, 10 ** Math.max(last, first + 1)];
};

const drawLimit = (limit) => drawing((plot, ctx, bbox) => {
  const y = Math.floor(plot.valToPos(limit, "y", true)) + (devicePixelRatio % 2 ? 0.5 : 0);
  ctx.strokeStyle = ctx.fillStyle = color("soft");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([pixels(5), pixels(4)]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.font = `${pixels(11)}px system-ui, sans-serif`;
  ctx.textAlign = "right";
  ctx.textBaseline = "bottom";
  ctx.fillText("rounding of one operation", bbox.left + bbox.width - pixels(4), y - devicePixelRatio);
});

// NaN and Inf have no place on the axis: a cross at the top.
const drawMarks = (marks) => drawing((plot, ctx, bbox) => {
  const size = pixels(3), y = bbox.top + pixels(6);
  ctx.strokeStyle = color("bad");
  ctx.lineWidth = pixels(1.6);
  ctx.beginPath();
  for (const index of marks) {
    const x = plot.valToPos(index, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y + size);
    ctx.moveTo(x + size, y - size);
    ctx.lineTo(x - size, y + size);
  }
  ctx.stroke();
});

const seriesOf = (data, curve) => ({
  label: curve.label,
  stroke: () => color(curve.color),
  width: curve.points ? 0 : 1.6,
  paths: curve.points ? () => null : undefined,
  points: { show: curve.points || data.names.length < 60, size: curve.points ? 5 : 4 },
  spanGaps: false,
  value: (plot, value, series, index) => {
    if (isKnown(index) && series === 1 && data.marks.includes(index)) return "NaN or Inf";
    return isKnown(value) ? value.toExponential(2) : "–";
  },
});

const makePlot = (data) => {
  const box = byId(`plot-${data.id}`);
  return new uPlot({
    width: box.clientWidth, height: HEIGHT,
    cursor: { drag: { x: true, y: false }, sync: { key: data.id.replace(/-(for|back)ward$/, "") + data.title } },
    scales: { x: { time: false }, y: { distr: 3, log: 10, range: powersOfTen(data) } },
    axes: [
      { ...AXIS_COLORS, splits: callSplits, values: (plot, splits) => splits.map((at) => String(at + 1)) },
      {
        ...AXIS_COLORS, size: axisWidth, values: (plot, ticks) => ticks.map(tickText),
        splits: powersBetween(10, 6), filter: (plot, splits) => splits,
      },
    ],
    series: [
      { label: "call", value: (plot, value) => (isKnown(value) ? `${value + 1} ${data.names[value]}` : "–") },
      ...data.curves.map((curve) => seriesOf(data, curve)),
    ],
    hooks: { draw: [drawLimit(data.limit), drawMarks(data.marks)] },
  }, [data.names.map((name, index) => index), ...data.curves.map(({ values }) => values)], box);
};

const plots = plotsData.map(makePlot);
const fit = () => plots.forEach((plot) =>
  plot.setSize({ width: plot.root.parentElement.clientWidth, height: HEIGHT }));
addEventListener("resize", fit);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.redraw()));
