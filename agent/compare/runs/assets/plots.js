// Draws the curves of two runs on uPlot. Names of runs enter the page as text only.
const HEIGHT = 200;
const data = JSON.parse(byId("plot-data").textContent);

const line = (plot, ctx, from, to) => {
  ctx.lineWidth = devicePixelRatio;
  ctx.beginPath();
  ctx.moveTo(...from);
  ctx.lineTo(...to);
  ctx.stroke();
};

const drawing = (draw) => (plot) => {
  plot.ctx.save();
  draw(plot, plot.ctx, plot.bbox);
  plot.ctx.restore();
};

const drawDeparture = drawing((plot, ctx, bbox) => {
  if (!isKnown(data.departure)) return;
  const x = Math.floor(plot.valToPos(data.departure, "x", true)) + 0.5;
  if (x < bbox.left || x > bbox.left + bbox.width) return;
  ctx.strokeStyle = color("bad");
  ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
  line(plot, ctx, [x, bbox.top], [x, bbox.top + bbox.height]);
});

const drawLimit = (limit) => drawing((plot, ctx, bbox) => {
  if (!isKnown(limit)) return;
  const y = Math.floor(plot.valToPos(limit, "y", true)) + 0.5;
  ctx.strokeStyle = color("warn");
  ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
  line(plot, ctx, [bbox.left, y], [bbox.left + bbox.width, y]);
});

const powersOfTen = ({ curves, limit }) => () => {
  const known = curves.flatMap(({ values }) => values).filter(isKnown).concat(limit ?? []);
  const first = Math.floor(Math.log10(Math.min(...known)) + 1e-9);
  const last = Math.ceil(Math.log10(Math.max(...known)) - 1e-9);
  return [10 ** first, 10 ** Math.max(last, first + 1)];
};

const makePlot = (one) => {
  const box = byId(`plot-${one.id}`);
  const values = { ...AXIS_COLORS, size: axisWidth, values: (plot, ticks) => ticks.map(tickText) };
  if (one.log) Object.assign(values, { splits: powersBetween(10, 5), filter: (plot, splits) => splits });
  return new uPlot({
    width: box.clientWidth, height: HEIGHT,
    cursor: { drag: { x: true, y: false }, sync: { key: "steps", scales: ["x", null] } },
    scales: { x: { time: false }, y: one.log ? { distr: 3, log: 10, range: powersOfTen(one) } : {} },
    axes: [{ ...AXIS_COLORS, values: (plot, ticks) => ticks.map((tick) => number(tick)) }, values],
    series: [
      { label: "step", value: (plot, value) => number(value) },
      ...one.curves.map((curve) => ({
        label: curve.label, stroke: () => color(curve.color), width: 1.6, spanGaps: false,
        points: { show: data.step.length < 60, size: 4 }, value: (plot, value) => number(value),
      })),
    ],
    hooks: { draw: [drawLimit(one.limit), drawDeparture] },
  }, [data.step, ...one.curves.map((curve) => curve.values)], box);
};

const plots = data.plots.map(makePlot);
const fit = () => plots.forEach((plot) =>
  plot.setSize({ width: plot.root.parentElement.clientWidth, height: HEIGHT }));
addEventListener("resize", fit);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.redraw()));
