"""Alerts on runs that depart from their own first levels, or from good runs."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import Compare, Number, Series, limit
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import baseline, gradient_layers, training

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


UNLIKE_BASELINE = Condition(
    name="MpAgentUnlikeBaseline",
    summary="The run differs from the good runs of its baseline.",
    meaning="Something of the run is not what it was in good runs: what is trained, a format, the "
    "learning rate, the loss or gradients. No number need look odd by itself.",
    confirm="mp_agent_baseline_departure_info shows what differs, since which step, and both "
    "values. After the run, mp-agent compare RUN --baseline FILE lists the same of its record.",
    remedies=(
        "Begin with the difference of the first step: what differs later may follow from it. A "
        "parameter or a format that differs is certain; a quantity outside its band needs a look "
        "at what was changed since the good runs.",
        "If the change was on purpose, save a new baseline from runs that have it.",
    ),
    why="Bands hold what another seed, batch noise and another world size make of a good run. "
    "Judged only if the setting baseline names a file.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(Series(metric=baseline.BASELINE_DEPARTURES), ">", Number(0)),
            description="Run {run} differs from its baseline in {value|count} respect(s)."
            "{mp_agent_baseline_departure_info| Among them: "
            "|step layer quantity value expected}",
            reason="No delay: a quantity has to be outside its band for two windows or samples in "
            "a row.",
        ),
    ),
    quiet=(
        "a run like its baseline",
        "a run without a baseline",
    ),
    needs=((Quantity.BASELINE,),),
    guidance=Guidance(
        harm="Nothing breaks. The result may not be what was meant, and compute be wasted: look "
        "during working hours, early in a long run.",
        query='mp_agent_baseline_departure_info{run="RUN"}',
        reading="One series for each difference: the quantity, the layer if it is of one, the "
        "step on which it first differed, its value on that step, and what the good runs had.",
        causes=(
            "A layer that is frozen, or no longer frozen, or not in the optimizer.",
            "Another initialization, or a checkpoint that was not loaded.",
            "Dropout, augmentation or other data, which shift the loss.",
            "A loss that is divided, averaged or masked in another way.",
            "Another format of weights or of autocast, another learning rate or clip limit.",
        ),
        false_positives=(
            "A change on purpose: save a new baseline.",
            "A schedule that unfreezes layers later than the steps of the good runs' records.",
            "A resumed run whose steps are counted from 1 again: give mp_agent.observe the "
            "trainer's step.",
            "A baseline of one run, whose band does not show what a seed does: save it from two.",
        ),
        samples=("trained_parameters",),
        panels=(panels.LOSS, panels.GRADIENT_NORM, panels.LEARNING_RATE),
    ),
)
