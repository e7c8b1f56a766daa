// Shows the report of a run, and polls for updates.
const PERIOD_MS = 2000;
const HIDDEN_PERIOD_MS = 10000;
const TIMEOUT_MS = 10000;

const state = { run: null, answer: null, history: null, failedSince: null, timer: 0 };

const runShown = () => state.answer?.runs.find((candidate) => candidate.run === state.run);

const charts = newCharts(() => ({
  history: state.history,
  thresholds: state.answer?.thresholds ?? {},
  spikeBound: runShown()?.summary?.loss_spike_bound,
}));
const tables = {
  layers: newTable("layers", ["grad_norm", -1], () => show()),
  ranks: newTable("ranks", ["rank", 1], () => show()),
};

const chooseRun = (runs) => {
  const names = runs.map((run) => run.run), select = byId("runs");
  byId("run-choice").hidden = names.length < 2;
  const offered = [...select.options].map((option) => option.value);
  if (JSON.stringify(offered) !== JSON.stringify(names))
    select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  if (!names.includes(state.run)) { state.run = names[0] ?? null; state.history = null; }
  if (state.run !== null) select.value = state.run;
};

// At which edges of a box something is scrolled out of sight.
const showScrolled = () => {
  for (const box of document.querySelectorAll(".scroll")) {
    const { scrollLeft, scrollTop, scrollWidth, scrollHeight, clientWidth, clientHeight } = box;
    const hidden = {
      left: scrollLeft > 1, right: scrollWidth - clientWidth - scrollLeft > 1,
      above: scrollTop > 1, below: scrollHeight - clientHeight - scrollTop > 1,
    };
    const frame = box.parentElement, { offsetWidth, offsetHeight } = box.querySelector("th");
    frame.dataset.more = Object.keys(hidden).filter((edge) => hidden[edge]).join(" ");
    frame.style.setProperty("--head-width", `${offsetWidth}px`);
    frame.style.setProperty("--head-height", `${offsetHeight}px`);
  }
};

const severityOf = (run) => {
  if (!run?.is_root) return "";
  if (run.conditions.length) return run.conditions[0].severity;
  return run.summary.active || run.summary.end_reason === "completed" ? "none" : "critical";
};

const showHeader = (run) => {
  setText(byId("run-name"), run ? run.run : "mp_agent");
  document.title = run ? `${run.run} – mp_agent` : "mp_agent";
  const verdict = byId("verdict");
  setText(verdict, run ? run.verdict : "No run has been seen yet.");
  verdict.dataset.worst = severityOf(run);
};

const firstNonfinite = (first) => {
  if (!first) return null;
  const rank = first.rank && `rank ${first.rank}`;
  return [`step ${first.step}`, first.phase, rank, first.layer].filter(Boolean).join(", ");
};

const RANKS_SHOWN = 16;
const listed = (ranks) => ranks.slice(0, RANKS_SHOWN).join(", ")
  + (ranks.length > RANKS_SHOWN ? ` and ${ranks.length - RANKS_SHOWN} more` : "");

const showNow = (run) => {
  const now = run?.summary;
  if (!now) {
    fillFacts(byId("facts"), run ? [["Run as a whole", "reported by the root agent"]] : []);
    return;
  }
  const norms = now.gradients_nonfinite_since_step;
  const kept = (name, since) => present(now[name], now[`${name}_step`], now.step, since);
  const optional = (text) => (text === "–" ? null : text);
  const lastStep = now.last_step_time_unix_seconds;
  fillFacts(byId("facts"), [
    ["Step", number(now.step)],
    ["Last step", isKnown(lastStep) ? ago(state.answer.time_unix_seconds - lastStep) : "–"],
    ["Phase", now.phase],
    ["Loss", kept("loss", now.loss_nonfinite_since_step)],
    ["Loss scale", optional(kept("loss_scale"))],
    ["Gradient norm", kept("grad_norm", norms)],
    ["Largest gradient", kept("grad_abs_max", norms)],
    ["Clip coefficient", isKnown(now.clip_coefficient) ? kept("clip_coefficient", norms) : null],
    ["Learning rate", optional(kept("learning_rate"))],
    ["Coverage", percent(now.coverage)],
    ["Missing ranks", listed(now.missing_ranks)],
    ["First non-finite", firstNonfinite(now.first_nonfinite)],
    ["Attempt", String(now.attempt)],
    ["Ranks", `${now.world_size} on ${now.nodes} node${now.nodes === 1 ? "" : "s"}`],
    ["Strategy", now.facts.strategy ?? null],
    ["Precision", now.facts.precision ?? null],
    ["Measured at", now.facts.measuring_point ?? null],
    ["torch", now.torch_version],
  ]);
};

const showTrackers = (run) => {
  const trackers = run?.summary?.trackers ?? [], list = byId("trackers"), text = JSON.stringify(trackers);
  // A link that is replaced loses the keyboard's focus.
  if (list.dataset.shown === text) return;
  list.dataset.shown = text;
  list.hidden = !trackers.length;
  list.replaceChildren(...trackers.map((at) => element("li", {}, `In ${at.tracker}: `, link(at.url, at.name))));
};

// Below the page's own address, so that they work behind a proxy too.
const below = (path, ...text) => element("a", { href: path.replace(/^\//, "") }, ...text);
// A name of several words without a space: wider than a small screen, it breaks between them.
const joined = (name) => name.split(/(?=[A-Z])/).flatMap((word) => [element("wbr"), word]);

const conditionItem = (condition, pages) => {
  const where = [condition.rank && `, rank ${condition.rank}`, condition.layer && `, ${condition.layer}`];
  return element("li", { class: condition.severity },
    element("p", {},
      element("span", { class: "badge" }, condition.severity), " ",
      element("strong", {}, below(`${pages.runbooks}/${condition.name}`, ...joined(condition.name))),
      ...breakable(` since step ${condition.since_step}${where.filter(Boolean).join("")}`)),
    element("p", {}, ...breakable(condition.description || condition.summary)),
    element("p", {}, element("strong", {}, "What to do: "), ...breakable(condition.remedy)));
};

// What is known of the run as a whole, so once for all its critical conditions.
const showPostmortem = (run) => {
  const found = new Set((run?.conditions ?? []).map((condition) => condition.postmortem).filter(Boolean));
  const text = [...found].join(" "), shown = byId("postmortem"), key = text && `${run.run} ${text}`;
  // A link that is replaced loses the keyboard's focus.
  if (shown.dataset.shown === key) return;
  shown.dataset.shown = key;
  shown.hidden = !text;
  shown.replaceChildren(...(text
    ? [element("strong", {}, "Post-mortem: "), ...breakable(text), " ", below(run.pages.postmortem, "Report")] : []));
};

const showConditions = (run) => {
  const items = (run?.conditions ?? []).map((condition) => conditionItem(condition, run.pages));
  const none = run && !run.is_root ? "Judged by the root agent." : "None.";
  byId("conditions").replaceChildren(...(items.length ? items : [element("li", { class: "quiet" }, none)]));
};

const showCurves = () => {
  const hasSteps = Boolean(state.history?.step.length);
  byId("curves").hidden = !hasSteps;
  if (hasSteps) charts.show();
};

// On which steps layers are measured, and why on fewer than was set.
const measuredEvery = (now) => {
  const steps = now?.layer_interval_steps, shortest = now?.layer_interval_shortest_steps;
  if (!isKnown(steps)) return { text: "", isStretched: false };
  const isStretched = steps > shortest, every = now.measuring_interval_steps ?? 1;
  const why = isStretched ? ` instead of ${number(shortest)}, since measuring took more of the step time than overhead_budget allows` : "";
  const totals = every > 1 ? ` Gradients are measured on every ${number(every)} steps, for the same reason.` : "";
  return { text: `Measured on every ${number(steps)} steps${why}; more often at the start and after trouble.${totals}`, isStretched };
};

const showLayers = (run) => {
  const layers = run?.layers ?? [], omitted = run?.layers_omitted ?? 0;
  const wanted = byId("layer-filter").value.toLowerCase();
  const found = layers.filter((row) => row.layer.toLowerCase().includes(wanted));
  tables.layers(found);
  byId("layers-section").hidden = !layers.length;
  const interval = byId("layers-interval"), { text, isStretched } = measuredEvery(run?.summary);
  interval.classList.toggle("notable", isStretched);
  setText(interval, text);
  const more = byId("layers-more");
  more.hidden = found.length <= ROWS_SHOWN && !omitted && found.length > 0;
  const shown = Math.min(found.length, ROWS_SHOWN);
  const left = omitted ? ` ${number(omitted)} with smaller norms are not among them.` : "";
  setText(more, `${shown} of ${number(layers.length)} layers are shown; sort or filter to see others.${left}`);
};

// Of the rank whose probe takes most; nothing in its first steps.
const overheadOf = (ranks) => {
  const known = ranks.map((rank) => rank.overhead_ratio).filter(isKnown);
  return known.length ? percent(Math.max(...known), 2) : null;
};

const showAgent = (run) => {
  const agent = run?.agent;
  if (!agent) return;
  const lastPush = agent.last_push_time_unix_seconds, isPushing = isKnown(lastPush) || agent.push_failures > 0;
  fillFacts(byId("agent"), [
    ["Version", agent.version],
    ["Node", String(run.node_rank)],
    ["Nodes known", isKnown(agent.nodes_known) ? number(agent.nodes_known) : null],
    ["Probe, share of a step", overheadOf(run.ranks)],
    ["Probe time, all steps", `${number(agent.probe_seconds, 3)} s`],
    ["Probe errors", number(agent.probe_errors)],
    ["Setting errors", number(agent.setting_errors)],
    ["Records dropped", number(agent.records_dropped)],
    ["Series dropped", number(agent.series_dropped)],
    ["Last scrape took", isKnown(agent.scrape_duration_seconds) ? milliseconds(agent.scrape_duration_seconds) : "not scraped yet"],
    ["Last push to the root", isKnown(lastPush) ? ago(state.answer.time_unix_seconds - lastPush) : null],
    ["Failed pushes", isPushing ? number(agent.push_failures) : null],
    ["Reports given up", isPushing ? number(agent.reports_dropped) : null],
    ["Flight records", number(agent.flight_records)],
    ["Not written", agent.flight_errors ? number(agent.flight_errors) : null],
    ["Not measured", agent.unsupported.join(", ")],
  ]);
  setText(byId("version"), agent.version);
};

const show = () => {
  if (!state.answer) return;
  chooseRun(state.answer.runs);
  const run = runShown();
  showHeader(run);
  showNow(run);
  showTrackers(run);
  showPostmortem(run);
  showConditions(run);
  showCurves();
  showLayers(run);
  tables.ranks(run?.ranks ?? []);
  showAgent(run);
  showScrolled();
  const updated = new Date(1000 * state.answer.time_unix_seconds);
  setText(byId("updated"), updated.toLocaleTimeString());
  byId("updated").setAttribute("datetime", updated.toISOString());
};

const showStale = () => {
  const stale = byId("stale");
  stale.hidden = state.failedSince === null;
  if (stale.hidden) return;
  const since = new Date(state.failedSince).toLocaleTimeString();
  setText(stale, `The node agent has not answered since ${since}. This page shows its last report.`);
};

const ask = async (path) => {
  const answer = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
};

const update = async () => {
  clearTimeout(state.timer);
  try {
    state.answer = await ask("api/v1/snapshot");
    chooseRun(state.answer.runs);
    const run = state.run;
    const history = run === null ? null : await ask(`api/v1/history?run=${encodeURIComponent(run)}`);
    if (run === state.run) state.history = history;
    state.failedSince = null;
  } catch {
    state.failedSince ??= Date.now();
  }
  showStale();
  show();
  clearTimeout(state.timer);
  state.timer = setTimeout(update, document.hidden ? HIDDEN_PERIOD_MS : PERIOD_MS);
};

byId("runs").addEventListener("change", (event) => {
  state.run = event.target.value;
  state.history = null;
  charts.clear();
  update();
});
byId("layer-filter").addEventListener("input", show);
addEventListener("resize", () => { charts.fit(); showScrolled(); });
for (const box of document.querySelectorAll(".scroll")) box.addEventListener("scroll", showScrolled);
addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts.redraw);
update();
