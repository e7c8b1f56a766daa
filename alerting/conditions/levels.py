"""Alerts on levels of the loss and the gradient norm that change early in a run."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions.terms import Compare, Series, limit
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.severity import Severity
from mp_agent.catalog.metrics import gradient_layers, training

LOSS_RELAPSED = Condition(
    name="MpAgentLossRelapsed",
    summary="The loss is back at its initial level.",
    meaning="Within a few steps the model has lost what it had learned, or it trains on something "
    "else now.",
    confirm="Plot mp_agent_loss and mp_agent_loss_best from the first step on, with "
    "mp_agent_learning_rate and mp_agent_grad_norm.",
    remedies=(
        "Find out what the step before the jump did: an update of that size, weights that were "
        "loaded or reset, another dataset.",
        "Resume from a checkpoint from before the jump; with a smaller learning rate and clipping "
        "if the gradient norm jumped as well.",
        "Nothing, if the run has moved on to other data or another task on purpose.",
    ),
    why="A loss that stays at the level of untrained weights says that these are as good as "
    "untrained for the present data.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(Series(metric=training.LOSS_RELAPSED_STEPS)),
            keep=duration("diverging_keep"),
            counts_steps=True,
            description="The loss of run {run} has been back at its initial level for "
            "{value|count} steps, after it had fallen to half of it or less.",
            reason="No delay: all of four blocks of eight losses are at that level.",
        ),
    ),
    quiet=("a loss that rises slowly",),
    follows_from=(
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
        "MpAgentNonFiniteUpdate",
    ),
    needs=((Quantity.LOSS,),),
    usual=Quantity.LOSS,
    guidance=Guidance(
        harm="What was trained so far may be gone. Look at once, before the next checkpoint "
        "overwrites a good one.",
        query='mp_agent_loss_relapsed_steps{run="RUN"} > 0',
        reading="The number of steps since the loss came back to nine tenths of the way from its "
        "best level to that of the first eight steps, within at most 24 steps. Not judged while "
        "other models are trained in turn, nor after a restart of the learning rate.",
        causes=(
            "An update that was far too large, such as after a jump of the learning rate.",
            "Weights that were initialized again, or loaded from a wrong checkpoint.",
            "Batches whose labels or tokens no longer fit the inputs.",
        ),
        false_positives=("Another task or dataset, on which the model knows nothing yet.",),
        samples=("smaller_learning_rate",),
        panels=(panels.LOSS, panels.LEARNING_RATE, panels.GRADIENT_NORM),
    ),
)


GRADIENT_NORM_GROWN = Condition(
    name="MpAgentGradientNormGrown",
    summary="The usual gradient norm has grown many times over.",
    meaning="Updates are larger than those that the learning rate was chosen for, or clipping "
    "takes more and more of them away.",
    confirm="Plot mp_agent_grad_norm_usual from the first step on, with mp_agent_learning_rate "
    "and mp_agent_loss; mp_agent_layer_grad_norm identifies the layers.",
    remedies=(
        "Look for what changed as the norm began to grow: a factor on the loss, its reduction, "
        "the scale of inputs, the batch size, layers that were unfrozen.",
        "Reduce the learning rate, or clip gradients, until that is known.",
        "Check the layers with the largest growth for weights or activations that grow as well.",
    ),
    why="At one learning rate the norm of a run that learns stays within a few times its usual "
    "level.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(
                Series(metric=gradient_layers.NORM_GROWTH), ">=", limit("grad_norm_usual_growth")
            ),
            keep=duration("diverging_keep"),
            description="The usual gradient norm of run {run} is {value|number} times as large as "
            "its lowest, and the learning rate is not."
            "{mp_agent_grad_norm_growth_info| It has grown: |lowest usual}",
            reason="No delay: the medians of two blocks of 16 steps are that large.",
        ),
    ),
    quiet=("a norm that grows as the learning rate does",),
    follows_from=("MpAgentReplicaDivergence",),
    needs=((Quantity.GRAD_NORM,),),
    usual=Quantity.GRAD_NORM,
    knobs=(less_above("grad_norm_usual_growth"),),
    guidance=Guidance(
        harm="The run may be about to diverge, or steps with another loss than intended. "
        "Investigate within the hour.",
        query='mp_agent_grad_norm_usual_growth{run="RUN"} > 0',
        reading="The lower of the last two medians of 16 norms, divided by the lowest median of "
        "64 so far. It is 0 while the norm is not three times as large as at first, after the "
        "learning rate has doubled, and where several models are trained in turn.",
        causes=(
            "A loss that is summed instead of averaged, or multiplied by a factor, from a step on.",
            "Weights that grow without bound, for want of weight decay or normalization.",
            "Inputs that are no longer normalized.",
        ),
        false_positives=("Layers that are unfrozen, or a loss term that is added, on purpose.",),
        samples=("smaller_learning_rate",),
        panels=(panels.GRADIENT_NORM, panels.CLIPPING, panels.LOSS),
    ),
)
