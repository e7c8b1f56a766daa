"""Metrics of a run: its facts, steps, code and conditions."""

from collections.abc import Mapping
from urllib.parse import quote

from mp_agent.catalog.metric import Reading, counter, gauge, histogram, info, rank_counter
from mp_agent.records.merged import StepTransition
from mp_agent.records.steps import EndReason
from mp_agent.records.views import RunView

_INFO_FACTS = ("strategy", "precision", "scaler", "measuring_point")


def _run_info(run: RunView) -> Reading:
    strategy, precision, scaler, measuring_point = (run.facts.get(fact, "") for fact in _INFO_FACTS)
    labels = (
        str(run.identity.attempt),
        strategy,
        str(run.identity.world_size),
        str(run.nodes),
        precision,
        scaler,
        measuring_point,
        run.identity.torch_version,
    )
    return {labels: 1.0}


_FORMAT_FACTS = ("autocast", "parameter", "master", "gradient", "matmul")


def _formats_info(run: RunView) -> Reading:
    formats = tuple(run.facts.get(f"{kind}_format", "") for kind in _FORMAT_FACTS)
    return {(*formats, run.facts.get("fp8_library", "")): 1.0} if any(formats) else None


def _end_info(run: RunView) -> Reading:
    if run.end_reason is EndReason.RUNNING:
        return None
    return {(run.end_reason.name.lower(),): 1.0}


_MISSING_NAMED_AT_MOST = 64
"""Where most of a large run is missing, a series for each rank would only keep the root busy."""


def _missing_ranks(run: RunView) -> tuple[int, ...]:
    return () if run.latest.step is None else run.latest.step.missing_ranks


def _steps_made(change: StepTransition) -> Reading:
    """Return the steps since the one before, also those whose records were lost."""
    before = 0 if change.previous is None else change.previous.sequence
    return float(max(1, change.step.sequence - before))


def _first_nonfinite(run: RunView) -> Reading:
    first = run.first_nonfinite
    if first is None:
        return None
    return {(str(first.step), first.rank, first.layer, first.phase): 1.0}


def _step_seconds(change: StepTransition) -> Reading:
    return change.step.get("step_seconds")


RUN_INFO = info(
    "mp_agent.run.info",
    labels=(
        "attempt",
        "strategy",
        "world_size",
        "nodes",
        "precision",
        "scaler",
        "measuring_point",
        "torch_version",
    ),
    help="Static facts of the run; the value is always 1. strategy is what places parameters "
    "on ranks: a wrapper, several with +, or what the ranks turned out to hold: replicated, "
    "independent, mixed.",
    read=_run_info,
)
RUN_ACTIVE = gauge(
    "mp_agent.run.active",
    "",
    help="1 while the run is active, 0 after its end was detected.",
    read=lambda run: float(run.active),
)
RUN_END = info(
    "mp_agent.run.end.info",
    labels=("reason",),
    help="How the run ended: completed, failed, killed or unknown. Absent while it runs.",
    read=_end_info,
)
ATTEMPTS = counter(
    "mp_agent.run.attempts",
    "{attempt}",
    help="Attempts of the run that were started on the node of rank 0, including restarts.",
    read=lambda run: float(run.attempts),
)
PHASE = info(
    "mp_agent.phase.info",
    labels=("phase",),
    help="Phase of the rank that is furthest behind.",
    read=lambda run: {(run.phase_name,): 1.0},
)
STEP = gauge(
    "mp_agent.step",
    "{step}",
    help="Last step that all covered ranks completed, as numbered by the trainer if it "
    "reports a number.",
    read=lambda run: None if run.latest.step is None else float(run.latest.step.step),
)
ATTEMPT_STEP = gauge(
    "mp_agent.attempt.step",
    "{step}",
    help="Last step that all covered ranks completed, counted from 1 in each attempt.",
    read=lambda run: None if run.latest.step is None else float(run.latest.step.sequence),
)
STEPS = counter(
    "mp_agent.steps",
    "{step}",
    help="Optimizer steps, including skipped ones and those whose records were lost before "
    "they were read.",
    count=_steps_made,
)
LOSS = gauge(
    "mp_agent.loss",
    "{loss}",
    help="Loss of a step: the sum over its backward passes, averaged over ranks; the last "
    "finite one.",
    read=lambda run: run.latest.loss,
)
LOSS_NONFINITE_STEPS = counter(
    "mp_agent.loss.nonfinite.steps",
    "{step}",
    help="Steps on which the loss of at least one rank was NaN or Inf.",
    count=lambda change: float(change.step.flag("loss_nonfinite")),
)
COVERAGE = gauge(
    "mp_agent.coverage",
    "1",
    help="Share of the run's ranks that the merged metrics cover.",
    read=lambda run: 1.0 if run.latest.step is None else run.latest.step.coverage,
)
RANKS_MISSING = gauge(
    "mp_agent.ranks.missing",
    "{rank}",
    help="Ranks that the merged metrics do not cover.",
    read=lambda run: float(len(_missing_ranks(run))),
)
MISSING_RANK = info(
    "mp_agent.missing_rank.info",
    labels=("rank",),
    help="A rank that the merged metrics do not cover; the 64 lowest are named. "
    "mp_agent_ranks_missing counts all.",
    read=lambda run: {(str(rank),): 1.0 for rank in _missing_ranks(run)[:_MISSING_NAMED_AT_MOST]},
)
FIRST_NONFINITE = info(
    "mp_agent.first_nonfinite.info",
    labels=("step", "rank", "layer", "phase"),
    help="Location of the first non-finite value of an incident; a label is empty if no "
    "evidence from before the gradient reduction identifies it.",
    read=_first_nonfinite,
)

RUN_METRICS = (
    RUN_INFO,
    info(
        "mp_agent.formats.info",
        labels=(*_FORMAT_FACTS, "fp8_library"),
        help="Number formats of autocast (empty without), parameters, masters that Megatron-Core "
        "steps in their place (empty without), gradients and products of FP32 matrices (tf32 "
        "where it is allowed), and the library that casts layers to FP8 (torchao, "
        "transformer_engine; empty without); the value is always 1. Several are joined by a plus "
        "sign, formats of most elements first.",
        read=_formats_info,
    ),
    RUN_ACTIVE,
    RUN_END,
    ATTEMPTS,
    PHASE,
    STEP,
    ATTEMPT_STEP,
    STEPS,
    counter(
        "mp_agent.steps.measured",
        "{step}",
        help="Optimizer steps of which the gradients were measured. Left out are those beyond "
        "overhead_budget, in CUDA graphs, and of engines that show no gradients.",
        count=lambda change: float(change.step.flag("gradients_measured")),
    ),
    gauge(
        "mp_agent.measuring.interval",
        "{step}",
        help="Gradients are measured on every so many steps: more than 1 to stay within "
        "overhead_budget.",
        read=lambda run: (
            None if run.latest.step is None else run.latest.step.get("measuring_interval_steps")
        ),
    ),
    gauge(
        "mp_agent.layers.interval",
        "{step}",
        help="Layers are measured on every so many steps: more than layer_interval to stay within "
        "overhead_budget.",
        read=lambda run: (
            None if run.latest.step is None else run.latest.step.get("layer_interval_steps")
        ),
    ),
    gauge(
        "mp_agent.last_step.timestamp",
        "s",
        help="Unix time at which the last step was complete on all covered ranks.",
        read=lambda run: None if run.latest.step is None else run.latest.step.time_unix_seconds,
    ),
    histogram(
        "mp_agent.step.duration",
        "s",
        # None is an integer, which Prometheus and OTLP would write as different labels.
        bounds=tuple(0.0125 * 2**power for power in range(15)),
        help="Wall time from one step's end to the next on the slowest rank.",
        count=_step_seconds,
    ),
    LOSS,
    gauge(
        "mp_agent.nonfinite.since_step",
        "{step}",
        labels=("quantity",),
        help="First step from which on every loss, or all gradients that were measured, were NaN "
        "or Inf. Absent while they are finite. The gauges of loss, norm and layers keep their last "
        "finite values meanwhile.",
        read=lambda run: {
            (name,): float(step) for name, step in run.latest.nonfinite_since.items()
        },
    ),
    LOSS_NONFINITE_STEPS,
    gauge(
        "mp_agent.learning_rate",
        "{rate}",
        help="Learning rate of the optimizer's first parameter group.",
        read=lambda run: run.latest.learning_rate,
    ),
    counter(
        "mp_agent.tokens",
        "{token}",
        help="Tokens passed to observe(), summed over ranks.",
        count=lambda change: change.step.get("tokens") or 0.0,
    ),
    COVERAGE,
    RANKS_MISSING,
    MISSING_RANK,
    FIRST_NONFINITE,
)


def _findings(run: RunView) -> Reading:
    counts: Mapping[str, int] = {} if run.script is None else run.script.counts
    return {(rule,): float(count) for rule, count in counts.items()}


LINT_FINDINGS = gauge(
    "mp_agent.lint.findings",
    "{finding}",
    labels=("rule",),
    help="Mixed-precision mistakes that the rule finds in the main script and what it imports "
    "of its project; only with the setting check_script.",
    read=_findings,
)

CODE_METRICS = (
    LINT_FINDINGS,
    gauge(
        "mp_agent.lint.files",
        "{file}",
        help="Files of the main script's project that were checked for mistakes; "
        "0 if the check failed; absent without the setting check_script.",
        read=lambda run: None if run.script is None else float(run.script.files),
    ),
)


def _active(run: RunView) -> Reading:
    found = {(condition.name, condition.severity) for condition in run.conditions}
    return {pair: float(pair in found) for pair in run.conditions_fired}


def _since_step(run: RunView) -> Reading:
    steps: dict[tuple[str, ...], float | None] = {}
    for condition in sorted(run.conditions, key=lambda found: found.since_step):
        steps.setdefault((condition.name, condition.severity), float(condition.since_step))
    return steps


CONDITION_SINCE_STEP = gauge(
    "mp_agent.condition.since_step",
    "{step}",
    labels=("condition", "severity"),
    help="Step at which the condition started; absent while it is not active.",
    read=_since_step,
)

CONDITION_METRICS = (
    gauge(
        "mp_agent.condition.active",
        "",
        labels=("condition", "severity"),
        help="1 while the node agent detects the condition in the run, else 0.",
        read=_active,
    ),
    CONDITION_SINCE_STEP,
    counter(
        "mp_agent.condition.fired",
        "{condition}",
        labels=("condition", "severity"),
        help="Number of times that the condition started.",
        read=lambda run: {pair: float(count) for pair, count in run.conditions_fired.items()},
    ),
)


POSTMORTEMS = "/postmortem"
RUNBOOKS = "/runbooks"
"""Pages of a node agent, below its address."""


def postmortem_path(run: str) -> str:
    """Return where a run's newest post-mortem is; with `.json` after it, for programs."""
    return f"{POSTMORTEMS}/{quote(run, safe='')}"


PAGES = info(
    "mp_agent.pages.info",
    labels=("url",),
    help="Address of the node agent whose pages are about the run: the status page at /, its "
    "newest post-mortem at /postmortem/ and the run's name, the runbooks at /runbooks/; the value "
    "is always 1.",
    read=lambda run: {(run.pages_url,): 1.0} if run.pages_url else {},
)

TRACKER_METRICS = (
    PAGES,
    info(
        "mp_agent.tracker.info",
        labels=("tracker", "name", "url"),
        help="An experiment tracker that the run is sent to (the setting trackers), what the run "
        "is called there, and where it is seen: a page, or a file address on the root agent's "
        "node; the value is always 1.",
        read=lambda run: {(at.tracker, at.name, at.url): 1.0 for at in run.trackers},
    ),
)


STEP_PARTS = ("data", "forward", "backward", "optimizer", "other")
"""Values of the label `part`; the columns are `<part>_seconds`."""

_MEANING = (
    "data (loading, and what else the loop does from the end of the last step or pass to the "
    "model's forward), forward (including the loss), backward, optimizer (unscaling and clipping "
    "included), and other, which is the rest: evaluation, checkpoints, the probe. By the host's "
    "clock: on a GPU these are the times at which the host launches work, and waits for it. "
    "Without data and forward where the model's forward is not seen: other contains them."
)


def _of_run(change: StepTransition) -> Reading:
    return {(part,): change.step.get(f"{part}_seconds") for part in STEP_PARTS}


def _of_rank(values: Mapping[str, float]) -> Reading:
    return {(part,): values.get(f"{part}_seconds") for part in STEP_PARTS}


STEP_PART_METRICS = (
    counter(
        "mp_agent.step.part",
        "s",
        labels=("part",),
        help="Time of the parts of steps, each on the rank that takes longest for it: the parts "
        f"may add up to more than the step. They are {_MEANING}",
        count=_of_run,
        appears_when_counted=True,
    ),
)

RANK_STEP_PART_METRICS = (
    rank_counter(
        "mp_agent.rank.step.part",
        "s",
        labels=("part",),
        help="Time of the parts of the rank's steps, which add up to its steps: "
        f"{_MEANING} A rank that waits for another one in a collective spends that time in the "
        "part that contains the collective, as a rule backward.",
        count=_of_rank,
        appears_when_counted=True,
    ),
)
