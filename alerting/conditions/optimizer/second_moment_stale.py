"""MpAgentSecondMomentStale."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.signals import Series
from mp_agent.alerting.severity import Severity

_STALE = Series(metric=metrics.LAYERS_MOMENT_STALE)
_NAMED = (
    "In 2 layer(s) of run demo, gradients were more than <moment_rms_high> times what Adam's "
    "second moment expects in the last <moment_rms_samples> samples."
)

_SHIFT = Example(
    title="gradients that grow faster than the second moment follows",
    minutes=46,
    tracks=(
        Track(metrics.LAYERS_MOMENT_STALE, (*flat(0, 10), *flat(2, 20), 0)),
        Track(
            metrics.MOMENT_STALE_LAYER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "embed.weight"},
        ),
    ),
    fires={Severity.WARNING: f"{_NAMED} Among them: embed.weight."},
    at=29,
    not_yet=(9, 45),
)

_OUTLASTED = Example(
    title="stale second moments for some minutes, directly afterwards",
    minutes=36,
    tracks=(Track(metrics.LAYERS_MOMENT_STALE, (*flat(0, 10), *flat(2, 20), 0)),),
    fires={Severity.WARNING: _NAMED},
    at=35,
)

_NONE = Example(
    title="second moments that follow the gradients",
    minutes=15,
    tracks=(Track(metrics.LAYERS_MOMENT_STALE, (0,)),),
)

SECOND_MOMENT_STALE = Condition(
    name="MpAgentSecondMomentStale",
    summary="Adam's second moments are out of date: updates are too large.",
    meaning="Adam divides each gradient by its usual size of the last 1/(1 - beta2) steps. "
    "Gradients that have grown since are divided by too little, and each update overshoots; a "
    "loss spike often follows within a few steps.",
    confirm="mp_agent_moment_rms_layer_max, and mp_agent_layer_moment_rms of the layers that "
    "mp_agent_moment_stale_layer_info names; mp_agent_update_relative rises with them. A single "
    "jump of the gradients is over after one sample at the default layer_interval: only a growth "
    "that goes on is reported, or a jump where layers are measured at least every 25 steps.",
    remedies=(
        "Lower beta2, for example from 0.999 to 0.95, so that the second moments follow sooner.",
        "Clip updates by this root (AdaFactor, StableAdamW), or clip gradients more tightly.",
        "Check what changed in the data at that step, and shuffle it better.",
    ),
    why="A smaller beta2 shortens the time for which the second moment is out of date; clipping "
    "bounds the update meanwhile. Judged only if the setting measure_updates is on.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_STALE),
            keep=duration("layer_keep"),
            description="In {value|count} layer(s) of run {run}, gradients were more than "
            "<moment_rms_high> times what Adam's second moment expects in the last "
            "<moment_rms_samples> samples.{mp_agent_moment_stale_layer_info| Among them: |layer}",
            reason="No delay: the condition already requires consecutive samples, and a loss "
            "spike can be a few steps away; the alert lasts beyond some samples.",
        ),
    ),
    firing=(_SHIFT, _OUTLASTED),
    quiet=(_NONE,),
)
