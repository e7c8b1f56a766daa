"""MpAgentFp8Saturation."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.signals import Series
from mp_agent.alerting.severity import Severity

_MISSCALED = Series(metric=metrics.LAYERS_FP8_MISSCALED)
_NAMED = (
    "In 2 layer(s) of run demo, a tensor used more than <fp8_range_used_high> times FP8's range, "
    "or less than <fp8_range_used_low> of it, in each of the last <fp8_scaling_samples> samples."
)

_OUTGROWN = Example(
    title="tensors that outgrow the amax that their scales are computed from",
    minutes=46,
    tracks=(
        Track(metrics.LAYERS_FP8_MISSCALED, (*flat(0, 10), *flat(2, 20), 0)),
        Track(
            metrics.FP8_MISSCALED_LAYER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "layers.3.mlp.fc1", "reason": "saturated"},
        ),
    ),
    fires={Severity.WARNING: f"{_NAMED} Among them: layer layers.3.mlp.fc1, reason saturated."},
    at=29,
    not_yet=(9, 45),
)

_OUTLASTED = Example(
    title="wrong scales for some minutes, directly afterwards",
    minutes=36,
    tracks=(Track(metrics.LAYERS_FP8_MISSCALED, (*flat(0, 10), *flat(2, 20), 0)),),
    fires={Severity.WARNING: _NAMED},
    at=35,
)

_FOLLOWING = Example(
    title="a single saturation, which the scale follows",
    minutes=15,
    tracks=(
        Track("mp_agent_fp8_range_used_max", (*flat(1, 5), 30, 1)),
        Track("mp_agent_fp8_saturated_ratio", (*flat(0, 5), 0.5, 0)),
        Track(metrics.LAYERS_FP8_MISSCALED, (0,)),
    ),
)

_DYNAMIC = Example(
    title="dynamic scaling, a model that is not in FP8, or nothing measured",
    minutes=15,
    without=(metrics.LAYERS_FP8_MISSCALED,),
)

FP8_SATURATION = Condition(
    name="MpAgentFp8Saturation",
    summary="FP8 scales from earlier steps do not fit their tensors.",
    meaning="Delayed scaling casts a tensor with the amax of earlier steps. Beyond FP8's largest "
    "number (448 in E4M3, 57344 in E5M2) elements are cut off: the largest activations or "
    "gradients are too small by that factor. Far below it, most of the range is unused, and "
    "small elements become zero.",
    confirm="mp_agent_layer_fp8_range_used_max of the layers that "
    "mp_agent_fp8_misscaled_layer_info names with the reason saturated, and "
    "mp_agent_layer_fp8_range_used_min of those with the reason unused.",
    remedies=(
        'Compute scales from the largest of a longer history (amax_compute_algo="max", '
        "amax_history_len=1024), with a margin of a few binades.",
        "Check that every step enters and leaves autocast once, so that scales are updated, and "
        "that amax is reduced over all ranks.",
        "Scale by what each tensor has now (current or block scaling), or keep the layer in BF16.",
    ),
    why="The largest of a long history bears what the latest value does not, and each step of "
    "margin halves the scale. An amax at FP8's largest number is what scales aim at, and one "
    "beyond it is followed by the next pass, so that neither is judged alone. Judged only if the "
    "setting measure_fp8 is on, of layers with delayed scaling.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_MISSCALED),
            keep=duration("layer_keep"),
            description="In {value|count} layer(s) of run {run}, a tensor used more than "
            "<fp8_range_used_high> times FP8's range, or less than <fp8_range_used_low> of it, in "
            "each of the last <fp8_scaling_samples> samples."
            "{mp_agent_fp8_misscaled_layer_info| Among them: |layer reason}",
            reason="No delay: the condition already requires consecutive samples; the alert lasts "
            "beyond some samples.",
        ),
    ),
    firing=(_OUTGROWN, _OUTLASTED),
    quiet=(_FOLLOWING, _DYNAMIC),
)
