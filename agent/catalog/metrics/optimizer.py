"""Metrics of updates and of the optimizer's state."""

from collections.abc import Callable, Mapping
from math import sqrt

from mp_agent.catalog.metric import Reading, gauge, info, layer_gauge
from mp_agent.records.columns import OPTIMIZER
from mp_agent.records.schema import CUT_OFF, PARTED, TRAINED_RATIO, UNCHANGED, UNHELD
from mp_agent.records.views import LayerView, RunView

Columns = Mapping[str, float]
Quantity = Callable[[Columns], float | None]


def weight_norm(values: Columns) -> float | None:
    """Return the L2 norm of the weights."""
    squares = values.get("weight_sum_squares")
    return None if squares is None else sqrt(squares)


def relative_update(values: Columns) -> float | None:
    """Return the norm of the update divided by that of the weights; None where these are zero."""
    squares = values.get("compared_sum_squares", 0.0)
    return sqrt(values.get("update_sum_squares", 0.0) / squares) if squares > 0.0 else None


def lost_updates(values: Columns) -> float | None:
    """Return the share of the updates of 16-bit weights that rounding swallowed."""
    return share(values, "lost_updates", "rounded_elements")


def below_epsilon(values: Columns) -> float | None:
    """Return the share of the active elements with a second moment whose root is below epsilon."""
    return share(values, "below_epsilon_elements", "active_elements")


def moment_rms(values: Columns) -> float | None:
    """Return the root of the mean of g²/v over the active elements; None where v is not of g."""
    active = values.get("active_elements", 0.0)
    total = values.get("squared_ratio_sum", -1.0)
    return sqrt(total / active) if total >= 0.0 and active > 0.0 else None


def share(values: Columns, part: str, whole: str) -> float | None:
    """Return one column divided by another; None where there is nothing to divide by."""
    elements = values.get(whole, 0.0)
    return values.get(part, 0.0) / elements if elements > 0.0 else None


def _of_layer(quantity: Quantity) -> Callable[[LayerView], Reading]:
    return lambda layer: quantity(layer.values) if layer.judged else None


UPDATE_LAYER_METRICS = (
    layer_gauge(
        "mp_agent.layer.weight.norm",
        "{norm}",
        family=OPTIMIZER.name,
        help="L2 norm of the layer's weights after the optimizer's step.",
        read=_of_layer(weight_norm),
    ),
    layer_gauge(
        "mp_agent.layer.update.relative",
        "{factor}",
        family=OPTIMIZER.name,
        help="L2 norm of what the step added to the layer's weights, divided by their norm before; "
        "absent while they are all zero.",
        read=_of_layer(relative_update),
    ),
    layer_gauge(
        "mp_agent.layer.updates.lost",
        "1",
        family=OPTIMIZER.name,
        gives_way=True,
        help="Share of the layer's updates that were rounded away; absent for weights of more "
        "than 16 bits.",
        read=_of_layer(lost_updates),
    ),
    layer_gauge(
        "mp_agent.layer.moment.rms",
        "{factor}",
        family=OPTIMIZER.name,
        help="Root of the mean of the layer's squared gradient divided by Adam's second moment.",
        read=_of_layer(moment_rms),
    ),
    layer_gauge(
        "mp_agent.layer.learning_rate",
        "{rate}",
        family=OPTIMIZER.name,
        gives_way=True,
        help="Learning rate of the layer's parameter group.",
        read=_of_layer(lambda values: values.get("learning_rate")),
    ),
)


def _named(fact: str) -> Callable[[RunView], Reading]:
    return lambda run: {(names,): 1.0} if (names := run.facts.get(fact)) else None


def _trained_ratio(run: RunView) -> Reading:
    try:
        return float(run.facts[TRAINED_RATIO])
    except (KeyError, ValueError):
        return None


def _of_run(quantity: Quantity) -> Callable[[RunView], Reading]:
    return lambda run: quantity(run.latest.families.get(OPTIMIZER.name, {}))


def _zero_epsilon(run: RunView) -> Reading:
    name = run.facts.get("zero_epsilon_optimizer")
    return {(name, "fp16", run.facts["zero_epsilon"]): 1.0} if name else None


UPDATES_LOST = gauge(
    "mp_agent.updates.lost",
    "1",
    help="Share of the weights in formats of at most 16 bits that were to change, since their "
    "gradient or its moving average is not zero, and did not: the update was rounded "
    "away. Absent when the optimizer steps no weights in these formats.",
    read=_of_run(lost_updates),
)
ADAM_BELOW_EPSILON = gauge(
    "mp_agent.adam.below_epsilon",
    "1",
    help="Share of the elements that have gradients for which the root of Adam's second "
    "moment, corrected for its bias, is below epsilon, which then sets the size of their "
    "updates.",
    read=_of_run(below_epsilon),
)
ADAM_EPSILON_LOST = gauge(
    "mp_agent.adam.epsilon_lost",
    "1",
    help="Share of the elements whose second moment is kept in a format whose smallest "
    "number is above epsilon, such as FP16 (5.96e-8) for an epsilon of 1e-8.",
    read=_of_run(
        lambda values: share(values, "lost_epsilon_elements", "moment_elements"),
    ),
)
ZERO_EPSILON = info(
    "mp_agent.zero_epsilon.info",
    labels=("optimizer", "format", "epsilon"),
    help="An optimizer whose state is in FP16, which rounds its epsilon to 0, so that a second "
    "moment that underflows makes it divide by 0; known from the first step on. Judged by the "
    "format of the weights, which torch's optimizers give to their state.",
    read=_zero_epsilon,
)
LAYERS_MOMENT_STALE = gauge(
    "mp_agent.layers.moment_stale",
    "{layer}",
    thresholds=("moment_rms_high", "moment_rms_samples"),
    help="Layers whose mp_agent_layer_moment_rms was above its limit in several consecutive "
    "samples.",
    read=lambda run: None if run.moments is None else float(run.moments.stale),
)
MOMENT_STALE_LAYER = info(
    "mp_agent.moment_stale_layer.info",
    labels=("layer",),
    help="A layer whose mp_agent_layer_moment_rms is above its limit; 10 at most, those with "
    "the largest values.",
    read=lambda run: {(name,): 1.0 for name in run.moments.stale_names} if run.moments else None,
)

PARAMETERS_UNHELD = gauge(
    "mp_agent.parameters.unheld",
    "{parameter}",
    help="Parameters of modules in training mode that get gradients and that no optimizer holds, "
    "nor anything else changes, as two looks have found them: at steps 1, 10 and 34, and then at "
    "least 32 steps apart.",
    read=lambda run: run.trained.unheld,
)
UNHELD_PARAMETERS_INFO = info(
    "mp_agent.unheld_parameters.info",
    labels=("parameters",),
    help="Names of parameters that get gradients and that no optimizer holds: the first ones, and "
    "how many more there are.",
    read=_named(UNHELD),
)
PARAMETERS_UNCHANGED = gauge(
    "mp_agent.parameters.unchanged",
    "{parameter}",
    help="Parameters that are as they were at the look before, nine or more steps ago, although "
    "the optimizer has stepped, and gradients and learning rate were to change each of the "
    "elements by more than the spacing of its format. A look is at 32 elements of up to 24 "
    "parameters, of 128 at first.",
    read=lambda run: run.trained.unchanged,
)
UNCHANGED_PARAMETERS_INFO = info(
    "mp_agent.unchanged_parameters.info",
    labels=("parameters",),
    help="Names of parameters that did not change: the first ones, and how many more there are.",
    read=_named(UNCHANGED),
)
PARAMETERS_CUT_OFF = gauge(
    "mp_agent.parameters.cut_off",
    "{parameter}",
    help="Parameters that an optimizer holds, without gradient, of modules that ran in training "
    "mode before all modules that get gradients, where the first of these got a tensor of the "
    "shape that they returned, without gradient. Three looks have found them, the first ones at "
    "steps 2, 11 and 43; not in compiled models.",
    read=lambda run: run.trained.cut_off,
)
CUT_OFF_PARAMETERS_INFO = info(
    "mp_agent.cut_off_parameters.info",
    labels=("parameters",),
    help="Names of parameters that are cut off: the first ones, and how many more there are.",
    read=_named(CUT_OFF),
)
PARAMETERS_PARTED = gauge(
    "mp_agent.parameters.parted",
    "{parameter}",
    help="Parameters of the model that were one at an earlier look, and are two that get gradients "
    "of their own; also the input and output embeddings where the configuration of a Transformers "
    "model says that they are one. Looked at on steps 1, 10 and 34, and then at least 32 steps "
    "apart.",
    read=lambda run: run.trained.parted,
)
PARTED_PARAMETERS_INFO = info(
    "mp_agent.parted_parameters.info",
    labels=("parameters",),
    help="Names of parameters that were to be one: the first ones, and how many more there are.",
    read=_named(PARTED),
)
RESUMED_WITHOUT_STATE = gauge(
    "mp_agent.resumed_without_state.steps",
    "{step}",
    help="Steps that a schedule of the learning rate, or a framework's trainer, has counted before "
    "the attempt's first one, where the optimizer keeps state and began without any; or steps in a "
    "row, 32 or more, that each began so. Shown for 1000 steps; else absent.",
    read=lambda run: run.trained.resumed_without_state,
)
SCHEDULE_BEHIND = gauge(
    "mp_agent.schedule_behind.steps",
    "{step}",
    help="Steps that the optimizer's state has counted before the attempt's first one, and a "
    "schedule of the learning rate that is stepped after each step has not. Shown for 1000 steps; "
    "else absent.",
    read=lambda run: run.trained.schedule_behind,
)
NOTHING_LOADED = gauge(
    "mp_agent.unmatched_tensors",
    "{tensor}",
    help="Tensors that load_state_dict(strict=False) was given for the model, or most of it, none "
    "of which has a name of it. Shown for 1000 steps if nothing else was loaded; else absent.",
    read=lambda run: run.trained.nothing_loaded,
)
UPDATES_ROUNDED = gauge(
    "mp_agent.updates.rounded",
    "1",
    help="Share of the elements in formats of at most 16 bits, of a few of each parameter, that "
    "are as they were nine or more steps before although they have gradients and a learning rate; "
    "absent while the learning rate rises or has decayed, and where the optimizer steps FP32 "
    "copies.",
    read=lambda run: run.trained.rounded_ratio,
)
UPDATES_ROUNDING_LOSS = gauge(
    "mp_agent.updates.rounding_loss",
    "1",
    thresholds=("updates_lost",),
    help="Share of the elements in formats of at most 16 bits that rounding kept from changing "
    "over nine or more steps, of those that the updates were to change in that time, which about "
    "as many do with stochastic rounding or a compensated sum: estimated by a few of each "
    "parameter, which count for all of it, and the smaller one of two comparisons in a row. Absent "
    "where too few were to change, while the learning rate rises or has decayed, and where the "
    "optimizer steps FP32 copies.",
    read=lambda run: run.trained.rounding_loss,
)

PARAMETER_METRICS = (
    PARAMETERS_UNHELD,
    UNHELD_PARAMETERS_INFO,
    PARAMETERS_UNCHANGED,
    UNCHANGED_PARAMETERS_INFO,
    PARAMETERS_CUT_OFF,
    CUT_OFF_PARAMETERS_INFO,
    PARAMETERS_PARTED,
    PARTED_PARAMETERS_INFO,
    RESUMED_WITHOUT_STATE,
    SCHEDULE_BEHIND,
    NOTHING_LOADED,
    UPDATES_ROUNDED,
    UPDATES_ROUNDING_LOSS,
    gauge(
        "mp_agent.parameters.trained",
        "1",
        help="Share of the elements of the run's model that are in an optimizer and require "
        "gradients.",
        read=_trained_ratio,
    ),
)

UPDATE_METRICS = (
    gauge(
        "mp_agent.weight.norm",
        "{norm}",
        help="L2 norm of all weights after the optimizer's step.",
        read=_of_run(weight_norm),
    ),
    gauge(
        "mp_agent.update.relative",
        "{factor}",
        help="L2 norm of what the optimizer's step added to the weights, divided by the norm that "
        "they had before; about 1e-3 in most healthy runs.",
        read=_of_run(relative_update),
    ),
    UPDATES_LOST,
    ADAM_BELOW_EPSILON,
    ADAM_EPSILON_LOST,
    ZERO_EPSILON,
    gauge(
        "mp_agent.moment.rms",
        "{factor}",
        help="Root of the mean, over all elements that have gradients, of the squared gradient "
        "divided by Adam's second moment. Near 1 while the moments are up to date; far above 1 "
        "gradients have grown faster than the moments follow, and updates are too large.",
        read=_of_run(moment_rms),
    ),
    gauge(
        "mp_agent.moment.rms.layer_max",
        "{factor}",
        help="Largest root of the mean, over the elements of a layer, of the squared gradient "
        "divided by Adam's second moment; of layers with at least 256 elements that have "
        "gradients.",
        read=lambda run: None if run.moments is None else run.moments.rms_max,
    ),
    LAYERS_MOMENT_STALE,
    MOMENT_STALE_LAYER,
    gauge(
        "mp_agent.learning_rate.max",
        "{rate}",
        help="Largest learning rate of a parameter group, at the latest sampled "
        "step; mp_agent_learning_rate is that of the first group.",
        read=_of_run(lambda values: values.get("learning_rate")),
    ),
    gauge(
        "mp_agent.learning_rate.min",
        "{rate}",
        help="Smallest learning rate of a parameter group, at the latest sampled step.",
        read=_of_run(lambda values: values.get("learning_rate_min")),
    ),
)
