"""MpAgentLossSpike."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.signals import Count
from mp_agent.alerting.remedies import CLIPS_NOT, Remedy
from mp_agent.alerting.severity import Severity

_STEPS = Count(metric=metrics.LOSS_SPIKE_STEPS, window=duration("loss_spike_window"))


def _fires(steps: int) -> str:
    return (
        f"The loss of run demo was far above its usual level on {steps} step(s) within the last "
        f"<loss_spike_window>."
    )


_SPIKE = Example(
    title="a loss that is far above its median for some steps",
    minutes=19,
    tracks=(
        Track(metrics.LOSS_SPIKE_STEPS, (*flat(0, 10), 12)),
        Track(metrics.LOSS, (*flat(2.0, 10), 7.0, 2.1)),
    ),
    fires={Severity.WARNING: _fires(12)},
    at=12,
    not_yet=(9, 18),
)

_BORN = Example(
    title="a spike before the first scrape",
    age_minutes=0,
    minutes=12,
    tracks=(Track(metrics.LOSS_SPIKE_STEPS, (None, None, 3)),),
    fires={Severity.WARNING: _fires(3)},
    at=2,
    not_yet=(1, 10),
)

_NONFINITE = Example(
    title="a NaN loss, which never enters the window and is no spike",
    minutes=20,
    tracks=(
        Track(metrics.LOSS_NONFINITE_STEPS, (*flat(0, 10), 1)),
        Track(metrics.SKIPPED_STEPS, (*flat(0, 10), 1)),
    ),
)

_ODD_BATCH = Example(
    title="a single batch with twice the loss, which is not counted",
    minutes=20,
    tracks=(Track(metrics.LOSS, (*flat(2.0, 10), 4.0, 2.0)),),
)

_OTHER_LEVEL = Example(
    title="a loss that fluctuates within its own deviations",
    minutes=20,
    tracks=(Track(metrics.LOSS, (1.0, 3.0) * 10),),
)

LOSS_SPIKE = Condition(
    name="MpAgentLossSpike",
    summary="The loss has spiked.",
    meaning="An update has set the model back, or the data contains something new; most spikes "
    "are temporary, some end in divergence.",
    confirm="Plot mp_agent_loss together with mp_agent_loss_spike_bound; a spike of the "
    "gradient norm before it indicates an update, one at the same step indicates the data.",
    remedies=(
        "Wait for some hundred steps: if the loss does not recover, resume from a checkpoint "
        "from before the spike, and skip its batches.",
        Remedy("Clip gradients, max norm 1.0 or less.", CLIPS_NOT),
        "Reduce the learning rate if spikes recur.",
        "Check the batches of those steps: duplicates, corrupt records, sequences of one token.",
    ),
    why="A spike comes from an update that is too large, or from an unusual batch; clipping and "
    "a smaller learning rate bound the update, and without the batch the spike does not recur.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_STEPS),
            description="The loss of run {run} was far above its usual level on {value|count} "
            "step(s) within the last <loss_spike_window>.",
            reason="No delay: two of three steps are sufficient evidence, and the counter keeps "
            "them visible for loss_spike_window.",
        ),
    ),
    firing=(_SPIKE, _BORN),
    quiet=(_NONFINITE, _ODD_BATCH, _OTHER_LEVEL),
)
