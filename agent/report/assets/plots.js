// Draws the plots of a report on uPlot, each once it is visible. Names enter the page as text only.
const HEIGHT = 190, LABEL_HEIGHT = 13, LANE_HEIGHT = 20, LANES_MARGIN = 67; // The margin holds the axis and the padding.
const LANE_COLORS = { fine: "delivered", skipped: "warn", lost: "bad", absent: "line" };
const LANE_TEXTS = { skipped: "skipped", lost: "loss NaN or Inf", absent: "not delivered" };
const groups = JSON.parse(byId("plot-data").textContent);
const drawn = [];

const pixels = (size) => size * devicePixelRatio;
// A line of one pixel between two pixels would be drawn pale over both.
const sharp = (place) => Math.floor(place) + (devicePixelRatio % 2 ? 0.5 : 0);

const drawing = (draw, beyond = 0) => (plot) => {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left - beyond, bbox.top - beyond, bbox.width + 2 * beyond, bbox.height + 2 * beyond);
  ctx.clip();
  ctx.lineWidth = devicePixelRatio;
  draw(ctx, bbox, (place) => plot.valToPos(place, "x", true), (value) => plot.valToPos(value, "y", true));
  ctx.restore();
};

const drawLine = (ctx, dashes, ...ends) => {
  ctx.setLineDash(dashes.map(pixels));
  ctx.beginPath();
  ctx.moveTo(...ends[0]);
  ctx.lineTo(...ends[1]);
  ctx.stroke();
};

const drawMarked = (place) => drawing((ctx, bbox, toX) => {
  if (!isKnown(place)) return;
  const x = sharp(toX(place));
  ctx.strokeStyle = color("bad");
  drawLine(ctx, [2, 3], [x, bbox.top], [x, bbox.top + bbox.height]);
});

const drawLimits = (limits) => drawing((ctx, bbox, toX, toY) => {
  ctx.strokeStyle = ctx.fillStyle = color("warn");
  ctx.font = `${pixels(11)}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  limits.forEach(([value, label], place) => {
    const y = sharp(toY(value));
    drawLine(ctx, [5, 4], [bbox.left, y], [bbox.left + bbox.width, y]);
    // Next to each other, since limits may be close to each other.
    // Below a line at the upper edge, where a text above it would be cut off.
    const isAbove = y - pixels(LABEL_HEIGHT) >= bbox.top;
    ctx.textBaseline = isAbove ? "bottom" : "top";
    ctx.fillText(label, bbox.left + pixels(4 + 110 * place), y + (isAbove ? -1 : 2) * devicePixelRatio);
  });
}, pixels(1));

// NaN, Inf and skipped steps have no place on the axis: a cross at the top.
const drawMarks = (places) => drawing((ctx, bbox, toX) => {
  const size = pixels(3), y = bbox.top + pixels(6);
  ctx.strokeStyle = color("bad");
  ctx.lineWidth = pixels(1.6);
  for (const x of places.map(toX)) {
    drawLine(ctx, [], [x - size, y - size], [x + size, y + size]);
    drawLine(ctx, [], [x + size, y - size], [x - size, y + size]);
  }
}, pixels(4));

// A band over each time that something held; a line where it began.
const drawSpans = (spans) => drawing((ctx, bbox, toX) => {
  for (const [first, last, name] of spans) {
    const left = toX(first);
    ctx.fillStyle = color(name);
    ctx.globalAlpha = 0.13;
    ctx.fillRect(left, bbox.top, Math.max(toX(last) - left, pixels(1)), bbox.height);
    ctx.globalAlpha = 0.9;
    ctx.fillRect(left, bbox.top, pixels(1.4), bbox.height);
  }
});

const drawLanes = (lanes) => drawing((ctx, bbox, toX) => {
  const half = Math.max(pixels(0.5), (toX(1) - toX(0)) / 2), height = bbox.height / lanes.length;
  lanes.forEach(({ runs }, lane) => runs.forEach(([first, last, kind]) => {
    ctx.fillStyle = color(LANE_COLORS[kind]);
    const left = toX(first) - half, top = bbox.top + lane * height + pixels(2);
    ctx.fillRect(left, top, toX(last) + half - left, height - pixels(4));
  }));
});

// Places at whole numbers only.
const wholeSplits = (plot, axis, low, high, increment) => {
  const stride = Math.max(1, Math.round(increment)), splits = [];
  for (let at = Math.ceil(low / stride) * stride; at <= high; at += stride) splits.push(at);
  return splits;
};

// The range of a plot holds its limits as well.
const rangeOf = ({ log, limits }) => (plot, low, high) => {
  const known = [low, high].filter(isKnown).concat(limits.map(([value]) => value));
  if (!known.length) return log ? [1, log] : [0, 1];
  const lowest = Math.min(...known), highest = Math.max(...known);
  if (!log) return uPlot.rangeNum(lowest, highest, 0.1, true);
  const exponent = (value) => Math.log(value) / Math.log(log);
  const first = Math.floor(exponent(lowest) + 1e-9), last = Math.ceil(exponent(highest) - 1e-9);
  return [log ** Math.max(first, -1022 / Math.log2(log)), log ** Math.max(last, first + 1)];
};

const stepText = ({ places, steps }) => (place) => {
  if (!isKnown(place) || !steps) return isKnown(place) ? String(place) : "";
  const index = places.indexOf(place);
  return index < 0 ? "" : String(steps[index]);
};

const make = (box, group, key, { height, scale, values, series, hooks }) => {
  // All axes of a group are as wide as the widest, so that steps lie below each other.
  const longest = Math.max(7, ...group.lanes.map(({ name }) => name.length));
  const text = stepText(group), empty = group.places.map(() => null);
  const name = (place, index) => [text(place), group.names?.[index]].filter(Boolean).join(" ");
  drawn.push(new uPlot({
    width: box.clientWidth, height,
    cursor: { drag: { x: true, y: false }, sync: { key, scales: ["x", null] } },
    scales: { x: { time: false }, y: scale },
    axes: [
      { ...AXIS_COLORS, splits: wholeSplits, values: (plot, splits) => splits.map(text) },
      { ...AXIS_COLORS, size: longest * CHARACTER_WIDTH + TICK_WIDTH, ...values },
    ],
    series: [
      { label: group.label, value: (plot, place, at, index) => name(place, index) },
      ...series.map(({ data, ...one }) => one),
    ],
    hooks,
  }, [group.places, ...series.map(({ data }) => data ?? empty)], box));
};

const makePlot = (box, group, key, plot) => {
  const { log, limits, marks } = plot;
  const values = { values: (plot, splits) => splits.map(tickText) };
  if (log) Object.assign(values, { splits: powersBetween(log, 5), filter: (plot, splits) => splits });
  const series = plot.curves.map((curve) => ({
    label: curve.label, data: curve.values, stroke: () => color(curve.color), spanGaps: group.joined,
    value: (plot, value) => number(value), width: 1.6,
    ...(curve.points ? { width: 0, paths: () => null, points: { show: true, size: 5 } } : {}),
  }));
  const remarks = {
    label: "×", points: { show: false }, value: (plot, value, at, index) => marks[index] ?? "–",
  };
  const places = Object.keys(marks).map((index) => group.places[index]);
  make(box, group, key, {
    height: HEIGHT, values,
    scale: { range: rangeOf(plot), ...(log ? { distr: 3, log } : {}) },
    series: places.length ? [...series, remarks] : series,
    hooks: {
      drawClear: [drawSpans(group.spans)],
      draw: [drawLimits(limits), drawMarked(group.marked), drawMarks(places)],
    },
  });
};

const laneRemarks = (lanes, place) => {
  const found = lanes.flatMap(({ name, runs }) => runs
    .filter(([first, last, kind]) => first <= place && place <= last && kind !== "fine")
    .map(([, , kind]) => `${name} ${LANE_TEXTS[kind]}`));
  return found.length ? found.join(", ") : "all delivered";
};

const makeLanes = (box, group, key) => {
  const { lanes, places } = group, count = lanes.length;
  make(box, group, key, {
    height: count * LANE_HEIGHT + LANES_MARGIN,
    scale: { range: () => [0, count] },
    values: {
      splits: () => lanes.map((lane, index) => count - index - 0.5), filter: (plot, splits) => splits,
      values: () => lanes.map(({ name }) => name), grid: { show: false }, ticks: { show: false },
    },
    series: [{
      label: "ranks", points: { show: false },
      value: (plot, value, at, index) => (isKnown(index) ? laneRemarks(lanes, places[index]) : "–"),
    }],
    hooks: { draw: [drawLanes(lanes), drawMarked(group.marked)] },
  });
};

const drawVisible = () => groups.forEach((group, at) => {
  const key = `plots-${at}`;
  const waiting = (id) => {
    const box = byId(`plot-${id}`), isHidden = box.closest("details:not([open])");
    return isHidden || box.childElementCount ? null : box;
  };
  for (const plot of group.plots) if (waiting(plot.id)) makePlot(waiting(plot.id), group, key, plot);
  if (group.lanes.length && waiting("lanes")) makeLanes(waiting("lanes"), group, key);
});
drawVisible();
// A list of details that is opened shows more of them; such an event does not bubble.
document.addEventListener("toggle", drawVisible, true);
addEventListener("resize", () => drawn.forEach((plot) => {
  const width = plot.root.parentElement.clientWidth;
  if (width) plot.setSize({ width, height: plot.height });
}));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((plot) => plot.redraw()));
