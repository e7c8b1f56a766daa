// The axes of plots on uPlot: their colours, widths and ticks.
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// As short as a tick can be: 1e7 for ten million, 0.001 as it is.
const tickText = (value) => {
  const size = Math.abs(value);
  if (!size || (size < 1e6 && size >= 1e-3)) return number(value, 3);
  return String(Number(value.toPrecision(3)).toExponential()).replace("e+", "e");
};

// An axis is as wide as its longest tick asks for.
const AXIS_WIDTH = 52, CHARACTER_WIDTH = 7, TICK_WIDTH = 20;
const axisWidth = (plot, texts) => Math.max(
  AXIS_WIDTH, TICK_WIDTH + CHARACTER_WIDTH * Math.max(0, ...(texts ?? []).map((text) => text.length)),
);

// About `count` powers of a base, however many there are between two ends.
const powersBetween = (base, count) => (plot, axis, low, high) => {
  const exponent = (value) => Math.log(value) / Math.log(base);
  const first = Math.ceil(exponent(low) - 1e-9), last = Math.floor(exponent(high) + 1e-9);
  const stride = Math.max(1, Math.ceil((last - first) / count));
  const powers = [];
  for (let at = first; at <= last; at += stride) powers.push(base ** at);
  return powers;
};

const AXIS_COLORS = {
  stroke: () => color("soft"),
  grid: { stroke: () => color("grid"), width: 1 },
  ticks: { stroke: () => color("grid") },
};
