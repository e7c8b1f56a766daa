"""Alerts on runs that differ from the good runs of their baseline."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.expressions.terms import Compare, Number, Series
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.severity import Severity
from mp_agent.catalog.metrics import baseline

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

CONDITIONS = (UNLIKE_BASELINE,)
