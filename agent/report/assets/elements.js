// Numbers as text, and text as elements. Names come from the job and may hold anything: they only
// ever enter the page as text.
const byId = (id) => document.getElementById(id);

const element = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

// A text with places where it may break: after the separators of names, never within a word or a number.
const SEPARATOR = /(?:(?<=[a-z_][._/:-])|(?<=[._/:-])(?=[a-z_]))(?<!\de-)/i;
const breakable = (text) => text.split(SEPARATOR).flatMap((part, at) => (at ? [element("wbr"), part] : [part]));

const isKnown = (value) => value !== null && value !== undefined;
const setText = (node, text) => {
  // A screen reader announces only changes.
  if (node.textContent !== text) node.replaceChildren(...breakable(text));
};

const number = (value, digits = 4) => {
  if (!isKnown(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en-US");
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
};
// A value of the last step; an older one with its step, or that it is NaN or Inf by now.
const present = (value, step, lastStep, since) => {
  if (isKnown(since)) return `NaN or Inf since step ${since}${isKnown(value) ? ` (last ${number(value)})` : ""}`;
  return isKnown(step) && step !== lastStep ? `${number(value)} (step ${step})` : number(value);
};
const percent = (value, digits = 4) => (isKnown(value) ? `${Number((100 * value).toPrecision(digits))} %` : "–");
const milliseconds = (value) => (isKnown(value) ? `${number(1000 * value, 3)} ms` : "–");
const ago = (seconds) => {
  if (seconds < 100) return `${Math.max(0, Math.round(seconds))} s ago`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
};

// An address from the job: a link where it is one of a page, else text.
const link = (address, text) =>
  /^https?:\/\//.test(address)
    ? element("a", { href: address, rel: "noopener noreferrer" }, ...breakable(text))
    : element("span", {}, ...breakable(address ? `${text}, ${address}` : text));

// Pairs of a name and a text as a list of terms; a null or empty text is omitted.
const LONG_TEXT = 20;
const fillFacts = (list, pairs) => {
  const shown = pairs.filter(([, text]) => text !== null && text !== "");
  list.replaceChildren(...shown.map(([name, text]) =>
    element("div", { class: text.length > LONG_TEXT ? "wide" : "" },
      element("dt", {}, name), element("dd", text.startsWith("NaN") ? { class: "bad" } : {}, ...breakable(text)))));
};
