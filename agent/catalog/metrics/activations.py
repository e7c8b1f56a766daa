"""Metrics of what modules return, and of attention and output logits."""

from collections.abc import Callable, Mapping
from math import isfinite, sqrt

from mp_agent.catalog.metric import Reading, counter, gauge, info, layer_counter, layer_gauge
from mp_agent.records.columns import ACTIVATIONS, ATTENTION, LOGITS
from mp_agent.records.merged import StepTransition
from mp_agent.records.views import LayerView, RunView

Row = Mapping[str, float]


def nonfinite_elements(row: Row) -> float:
    """Return the NaN and Inf elements of a row together."""
    return row.get("nan_elements", 0.0) + row.get("inf_elements", 0.0)


def mean(row: Row) -> float | None:
    """Return the mean of the finite elements; None without any."""
    elements = _finite_elements(row)
    return row["sum"] / elements if elements and "sum" in row else None


def standard_deviation(row: Row) -> float | None:
    """Return the standard deviation of the finite elements; None beyond float64, or without any.

    Of squares in float64: right to eight digits where it is at least 1/10 000 of the mean.
    """
    elements, center = _finite_elements(row), mean(row)
    if not elements or center is None or "sum_squares" not in row:
        return None
    variance = row["sum_squares"] / elements - center * center
    return sqrt(max(0.0, variance)) if isfinite(variance) else None


def zero_share(row: Row) -> float | None:
    """Return the share of the elements that are zero."""
    elements = row.get("elements", 0.0)
    return row.get("zero_elements", 0.0) / elements if elements else None


def _finite_elements(row: Row) -> float:
    return row.get("elements", 0.0) - nonfinite_elements(row)


def _of_run(read: Callable[[Row], float | None]) -> Callable[[RunView], Reading]:
    def read_run(run: RunView) -> Reading:
        row = run.latest.families.get(ACTIVATIONS.name)
        return None if row is None else read(row)

    return read_run


def _of_step(count: Callable[[Row], float]) -> Callable[[StepTransition], Reading]:
    def count_step(change: StepTransition) -> Reading:
        return count(change.step.families.get(ACTIVATIONS.name, {}))

    return count_step


def _first_nonfinite(run: RunView) -> Reading:
    first = run.first_nonfinite_output
    return None if first is None else {(str(first.step), first.layer): 1.0}


def _first_nonfinite_gradient(run: RunView) -> Reading:
    first = run.first_nonfinite_gradient
    return None if first is None else {(str(first.step), first.layer, first.place): 1.0}


ACTIVATION_NONFINITE = counter(
    "mp_agent.activation.nonfinite.elements",
    "{element}",
    help="NaN and Inf elements in outputs of modules, in the steps that were sampled.",
    count=_of_step(nonfinite_elements),
)
ACTIVATION_NEAR_OVERFLOW = counter(
    "mp_agent.activation.near_overflow.elements",
    "{element}",
    help="Finite elements of FP16 outputs of modules with a magnitude above the threshold "
    "fp16_near_overflow, in the steps that were sampled.",
    thresholds=("fp16_near_overflow",),
    count=_of_step(lambda row: row.get("near_overflow_elements", 0.0)),
)
FIRST_NONFINITE_OUTPUT = info(
    "mp_agent.activation.first_nonfinite.info",
    labels=("step", "layer"),
    help="The module that was the first of a forward pass to return NaN or Inf, at the first "
    "of the latest sampled steps in a row that had any.",
    read=_first_nonfinite,
)

ACTIVATION_METRICS = (
    gauge(
        "mp_agent.activation.abs_max",
        "{activation}",
        help="Largest finite magnitude in the outputs of all modules in the first forward pass of "
        "a sampled step.",
        read=_of_run(lambda row: row.get("abs_max")),
    ),
    gauge(
        "mp_agent.activation.mean",
        "{activation}",
        help="Mean of the finite elements in the outputs of all modules.",
        read=_of_run(mean),
    ),
    gauge(
        "mp_agent.activation.std",
        "{activation}",
        help="Standard deviation of the finite elements in the outputs of all modules.",
        read=_of_run(standard_deviation),
    ),
    gauge(
        "mp_agent.activation.zero",
        "1",
        help="Share of the elements in the outputs of all modules that are exactly zero.",
        read=_of_run(zero_share),
    ),
    ACTIVATION_NONFINITE,
    ACTIVATION_NEAR_OVERFLOW,
    FIRST_NONFINITE_OUTPUT,
    info(
        "mp_agent.activation.first_nonfinite_gradient.info",
        labels=("step", "layer", "place"),
        help="The module in which the first NaN or Inf of a backward pass arose (place within), or "
        "after which it arose in a function or the loss (place after), at the first of the latest "
        "sampled steps in a row that had any. Of several modules with the same input the first "
        "is named. None where the forward pass was not finite.",
        read=_first_nonfinite_gradient,
    ),
)


def _of_layer(read: Callable[[Row], float | None]) -> Callable[[LayerView], Reading]:
    def read_layer(layer: LayerView) -> Reading:
        return read(layer.values) if layer.judged else None

    return read_layer


ACTIVATION_LAYER_METRICS = (
    layer_gauge(
        "mp_agent.layer.activation.abs_max",
        "{activation}",
        family=ACTIVATIONS.name,
        help="Largest finite magnitude in the module's output, in the first forward pass of a "
        "sampled step.",
        read=_of_layer(lambda row: row.get("abs_max")),
    ),
    layer_gauge(
        "mp_agent.layer.activation.mean",
        "{activation}",
        family=ACTIVATIONS.name,
        help="Mean of the finite elements of the module's output.",
        gives_way=True,
        read=_of_layer(mean),
    ),
    layer_gauge(
        "mp_agent.layer.activation.std",
        "{activation}",
        family=ACTIVATIONS.name,
        help="Standard deviation of the finite elements of the module's output.",
        read=_of_layer(standard_deviation),
    ),
    layer_gauge(
        "mp_agent.layer.activation.zero",
        "1",
        family=ACTIVATIONS.name,
        help="Share of the elements of the module's output that are exactly zero.",
        gives_way=True,
        read=_of_layer(zero_share),
    ),
    layer_counter(
        "mp_agent.layer.activation.nonfinite.elements",
        "{element}",
        family=ACTIVATIONS.name,
        help="NaN and Inf elements in the module's output, in the steps that were sampled.",
        count=lambda layer: nonfinite_elements(layer.values),
    ),
)


def _largest_of_layer(layer: LayerView) -> Reading:
    return layer.values.get("logit_max") if layer.judged else None


ATTENTION_LOGIT_MAX = gauge(
    "mp_agent.attention.logit.max",
    "{logit}",
    help="Largest attention logit (scaled product of query and key, with the mask or bias "
    "added) of a few heads and positions of each attention module, in the first forward pass "
    "of a sampled step.",
    read=lambda run: run.latest.families.get(ATTENTION.name, {}).get("logit_max"),
)
ATTENTION_LOGIT_GROWTH = gauge(
    "mp_agent.attention.logit.growth",
    "{factor}",
    help="Median of the last three samples of that logit, divided by the median of the run's "
    "earlier half of samples, or by 1 where that is less. Absent before 8 samples.",
    read=lambda run: None if run.logits is None else run.logits.attention_growth,
)
ATTENTION_HIGH_LAYER = info(
    "mp_agent.attention.high_layer.info",
    labels=("layer",),
    thresholds=("attention_logit_high",),
    help="A module whose largest attention logit was above its limit in the latest sample; 10 "
    "at most, those with the largest.",
    read=lambda run: {(name,): 1.0 for name in run.logits.high_names} if run.logits else None,
)

ATTENTION_METRICS = (
    ATTENTION_LOGIT_MAX,
    ATTENTION_LOGIT_GROWTH,
    counter(
        "mp_agent.attention.nonfinite.logits",
        "{logit}",
        help="Attention logits that were NaN or Inf, of those looked at, in the steps that were "
        "sampled.",
        count=lambda change: change.step.families.get(ATTENTION.name, {}).get(
            "nonfinite_elements", 0.0
        ),
    ),
    ATTENTION_HIGH_LAYER,
)

ATTENTION_LAYER_METRICS = (
    layer_gauge(
        "mp_agent.layer.attention.logit.max",
        "{logit}",
        family=ATTENTION.name,
        help="Largest attention logit of a few heads and positions of the module, in the first "
        "forward pass of a sampled step.",
        read=_largest_of_layer,
    ),
)


def _of_logits(column: str) -> Callable[[RunView], Reading]:
    return lambda run: run.latest.families.get(LOGITS.name, {}).get(column)


def _mean(run: RunView) -> Reading:
    row = run.latest.families.get(LOGITS.name, {})
    rows = row.get("rows", 0.0) - row.get("nonfinite_rows", 0.0)
    return row["logsumexp_sum"] / rows if rows and "logsumexp_sum" in row else None


OUTPUT_LOGSUMEXP_SIZE = gauge(
    "mp_agent.output.logsumexp.size",
    "{logit}",
    help="Largest magnitude of a log-sum-exp of the rows of output logits looked at.",
    read=lambda run: None if run.logits is None else run.logits.logsumexp_size,
)
OUTPUT_LOGSUMEXP_GROWTH = gauge(
    "mp_agent.output.logsumexp.growth",
    "{factor}",
    help="Median of the last three samples of mp_agent_output_logsumexp_size, divided by the "
    "median of the run's earlier half of samples, or by 1 where that is less. Absent "
    "before 8 samples.",
    read=lambda run: None if run.logits is None else run.logits.logsumexp_growth,
)

OUTPUT_LOGIT_METRICS = (
    gauge(
        "mp_agent.output.logit.max",
        "{logit}",
        help="Largest finite logit of a few rows that cross_entropy was given, in the first "
        "forward pass of a sampled step.",
        read=_of_logits("logit_max"),
    ),
    gauge(
        "mp_agent.output.logsumexp.max",
        "{logit}",
        help="Largest log-sum-exp (log Z, by which softmax normalizes) of the rows of output "
        "logits looked at.",
        read=_of_logits("logsumexp_max"),
    ),
    gauge(
        "mp_agent.output.logsumexp.min",
        "{logit}",
        help="Smallest log-sum-exp of the rows of output logits looked at.",
        read=_of_logits("logsumexp_min"),
    ),
    gauge(
        "mp_agent.output.logsumexp.mean",
        "{logit}",
        help="Mean log-sum-exp of the rows of output logits looked at, where it is finite.",
        read=_mean,
    ),
    OUTPUT_LOGSUMEXP_SIZE,
    OUTPUT_LOGSUMEXP_GROWTH,
    counter(
        "mp_agent.output.nonfinite.rows",
        "{row}",
        help="Rows whose log-sum-exp was NaN or Inf, of those looked at, in the steps that were "
        "sampled.",
        count=lambda change: change.step.families.get(LOGITS.name, {}).get("nonfinite_rows", 0.0),
    ),
)
