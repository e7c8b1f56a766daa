"""Examples of alerts on activations: near overflow, growing logits, FP8 and routers."""

from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import activations, fp8, routers
from tests.alerting.examples.example import Example, Examples, Track, flat

_SOME = Example(
    title="some elements close to the largest number of FP16, on one sampled step",
    minutes=26,
    tracks=(Track(activations.ACTIVATION_NEAR_OVERFLOW, (*flat(0, 10), 7)),),
    fires={
        Severity.WARNING: "7 element(s) of FP16 outputs of run demo were above "
        "<fp16_near_overflow> on the steps that were sampled in the last <incident_window>."
    },
    at=15,
    not_yet=(9, 25),
)

_BFLOAT16 = Example(
    title="larger outputs in BF16 or FP32, which are not counted",
    minutes=15,
    tracks=(Track(activations.ACTIVATION_NEAR_OVERFLOW, (0,)),),
)

_ACTIVATION_NEAR_OVERFLOW_OFF = Example(
    title="a run that does not measure outputs",
    minutes=15,
    without=(activations.ACTIVATION_NEAR_OVERFLOW,),
)


_ATTENTION_LOGIT_GROWTH_NAMED = (
    "The largest attention logit of run demo is 160, more than <logit_growth> times what it was "
    "earlier in the run."
)

_ATTENTION_LOGIT_GROWTH_GROWN = Example(
    title="attention logits that grow to a multiple of what they were",
    minutes=46,
    tracks=(
        Track(activations.ATTENTION_LOGIT_MAX, (*flat(20, 10), *flat(160, 20), 20)),
        Track(activations.ATTENTION_LOGIT_GROWTH, (*flat(1.1, 10), *flat(8, 20), 1.1)),
        Track(
            activations.ATTENTION_HIGH_LAYER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "blocks.2.attn"},
        ),
    ),
    fires={Severity.WARNING: f"{_ATTENTION_LOGIT_GROWTH_NAMED} Largest in blocks.2.attn."},
    at=20,
    not_yet=(9, 45),
)

_ATTENTION_LOGIT_GROWTH_OUTLASTED = Example(
    title="attention logits that were large for some minutes, directly afterwards",
    minutes=36,
    tracks=(
        Track(activations.ATTENTION_LOGIT_MAX, (*flat(20, 10), *flat(160, 20), 20)),
        Track(activations.ATTENTION_LOGIT_GROWTH, (*flat(1.1, 10), *flat(8, 20), 1.1)),
    ),
    fires={Severity.WARNING: _ATTENTION_LOGIT_GROWTH_NAMED},
    at=35,
)

_ATTENTION_LOGIT_GROWTH_LARGE = Example(
    title="large attention logits that were so from the beginning",
    minutes=15,
    tracks=(
        Track(activations.ATTENTION_LOGIT_MAX, (300,)),
        Track(activations.ATTENTION_LOGIT_GROWTH, (1.05,)),
    ),
)

_ATTENTION_LOGIT_GROWTH_YOUNG = Example(
    title="attention logits that grow from almost nothing, as in every young run",
    minutes=15,
    tracks=(
        Track(activations.ATTENTION_LOGIT_MAX, (*flat(2, 5), 30)),
        Track(activations.ATTENTION_LOGIT_GROWTH, (*flat(1, 5), 15)),
    ),
)

_ATTENTION_LOGIT_GROWTH_OFF = Example(
    title="a run that does not measure attention",
    minutes=15,
    without=(activations.ATTENTION_LOGIT_MAX, activations.ATTENTION_LOGIT_GROWTH),
)


_OUTPUT_LOGIT_DIVERGENCE_NAMED = (
    "The log-sum-exp of the output logits of run demo has reached a magnitude of 240, more than "
    "<logit_growth> times what it was earlier in the run."
)

_OUTPUT_LOGIT_DIVERGENCE_GROWN = Example(
    title="output logits that drift far away from zero",
    minutes=46,
    tracks=(
        Track(activations.OUTPUT_LOGSUMEXP_SIZE, (*flat(11, 10), *flat(240, 20), 11)),
        Track(activations.OUTPUT_LOGSUMEXP_GROWTH, (*flat(1, 10), *flat(20, 20), 1)),
    ),
    fires={Severity.WARNING: _OUTPUT_LOGIT_DIVERGENCE_NAMED},
    at=20,
    not_yet=(9, 45),
)

_OUTPUT_LOGIT_DIVERGENCE_OUTLASTED = Example(
    title="output logits that were far away from zero for some minutes, directly afterwards",
    minutes=36,
    tracks=(
        Track(activations.OUTPUT_LOGSUMEXP_SIZE, (*flat(11, 10), *flat(240, 20), 11)),
        Track(activations.OUTPUT_LOGSUMEXP_GROWTH, (*flat(1, 10), *flat(20, 20), 1)),
    ),
    fires={Severity.WARNING: _OUTPUT_LOGIT_DIVERGENCE_NAMED},
    at=35,
)

_OUTPUT_LOGIT_DIVERGENCE_LARGE = Example(
    title="a large log-sum-exp that was so from the beginning",
    minutes=15,
    tracks=(
        Track(activations.OUTPUT_LOGSUMEXP_SIZE, (300,)),
        Track(activations.OUTPUT_LOGSUMEXP_GROWTH, (1.05,)),
    ),
)

_OUTPUT_LOGIT_DIVERGENCE_YOUNG = Example(
    title="a log-sum-exp that grows with what the model learns",
    minutes=15,
    tracks=(
        Track(activations.OUTPUT_LOGSUMEXP_SIZE, (*flat(6, 5), 25)),
        Track(activations.OUTPUT_LOGSUMEXP_GROWTH, (*flat(1, 5), 4)),
    ),
)

_OUTPUT_LOGIT_DIVERGENCE_OFF = Example(
    title="a run that does not measure output logits",
    minutes=15,
    without=(activations.OUTPUT_LOGSUMEXP_SIZE, activations.OUTPUT_LOGSUMEXP_GROWTH),
)


_ROUTER_COLLAPSE_NAMED = (
    "2 router(s) of run demo sent more than <router_load_high> times the even share to one expert, "
    "at an entropy below <router_entropy_low>, in the last <router_collapse_samples> samples."
)

_COLLAPSE = Example(
    title="routers that send most tokens to few experts",
    minutes=46,
    tracks=(
        Track(routers.ROUTERS_COLLAPSED, (*flat(0, 10), *flat(2, 20), 0)),
        Track(
            routers.COLLAPSED_ROUTER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "layers.3.mlp.gate"},
        ),
    ),
    fires={Severity.WARNING: f"{_ROUTER_COLLAPSE_NAMED} Among them: layers.3.mlp.gate."},
    at=29,
    not_yet=(9, 45),
)

_ROUTER_COLLAPSE_OUTLASTED = Example(
    title="collapsed routers for some minutes, directly afterwards",
    minutes=36,
    tracks=(Track(routers.ROUTERS_COLLAPSED, (*flat(0, 10), *flat(2, 20), 0)),),
    fires={Severity.WARNING: _ROUTER_COLLAPSE_NAMED},
    at=35,
)

_EVEN = Example(
    title="routers that use all their experts",
    minutes=15,
    tracks=(Track(routers.ROUTERS_COLLAPSED, (0,)),),
)

_ROUTER_COLLAPSE_OFF = Example(
    title="a run that does not measure routers",
    minutes=15,
    without=(routers.ROUTERS_COLLAPSED,),
)


_FP8_SATURATION_NAMED = (
    "In 2 layer(s) of run demo, a tensor used more than <fp8_range_used_high> times FP8's range, "
    "or less than <fp8_range_used_low> of it, in each of the last <fp8_scaling_samples> samples."
)

_OUTGROWN = Example(
    title="tensors that outgrow the amax that their scales are computed from",
    minutes=46,
    tracks=(
        Track(fp8.LAYERS_FP8_MISSCALED, (*flat(0, 10), *flat(2, 20), 0)),
        Track(
            fp8.FP8_MISSCALED_LAYER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "layers.3.mlp.fc1", "reason": "saturated"},
        ),
    ),
    fires={
        Severity.WARNING: f"{_FP8_SATURATION_NAMED} Among them: layer layers.3.mlp.fc1, "
        "reason saturated."
    },
    at=29,
    not_yet=(9, 45),
)

_FP8_SATURATION_OUTLASTED = Example(
    title="wrong scales for some minutes, directly afterwards",
    minutes=36,
    tracks=(Track(fp8.LAYERS_FP8_MISSCALED, (*flat(0, 10), *flat(2, 20), 0)),),
    fires={Severity.WARNING: _FP8_SATURATION_NAMED},
    at=35,
)

_FOLLOWING = Example(
    title="a single saturation, which the scale follows",
    minutes=15,
    tracks=(
        Track("mp_agent_fp8_range_used_max", (*flat(1, 5), 30, 1)),
        Track("mp_agent_fp8_saturated_ratio", (*flat(0, 5), 0.5, 0)),
        Track(fp8.LAYERS_FP8_MISSCALED, (0,)),
    ),
)

_DYNAMIC = Example(
    title="dynamic scaling, a model that is not in FP8, or nothing measured",
    minutes=15,
    without=(fp8.LAYERS_FP8_MISSCALED,),
)


_FLUSHED_NAMED = (
    "In 1 layer(s) of run demo, the cast to FP8 rounded more than <fp8_flushed> of the non-zero "
    "elements of the input or the weight to zero in each of the last <fp8_scaling_samples> samples."
)

_OUTLIERS = Example(
    title="outliers that leave zeros in place of the rest of an input; the alert lasts longer",
    minutes=46,
    tracks=(
        Track(fp8.LAYERS_FP8_FLUSHED, (*flat(0, 10), *flat(1, 20), 0)),
        Track(
            fp8.FP8_FLUSHED_LAYER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "layers.3.mlp.fc2", "operand": "input"},
        ),
    ),
    fires={
        Severity.WARNING: f"{_FLUSHED_NAMED} Among them: layer layers.3.mlp.fc2, operand input."
    },
    at=29,
    not_yet=(9, 45),
)

_FLUSHED_OUTLASTED = Example(
    title="zeros in place of an input for some minutes, directly afterwards",
    minutes=36,
    tracks=(Track(fp8.LAYERS_FP8_FLUSHED, (*flat(0, 10), *flat(1, 20), 0)),),
    fires={Severity.WARNING: _FLUSHED_NAMED},
    at=35,
)

_FEW_FLUSHED = Example(
    title="a few per cent of small elements that a cast rounds to zero",
    minutes=15,
    tracks=(
        Track(fp8.FP8_FLUSHED_MAX, (0.04,)),
        Track(fp8.LAYERS_FP8_FLUSHED, (0,)),
    ),
)

_NOT_CAST = Example(
    title="layers that do not cast to FP8, or nothing measured",
    minutes=15,
    without=(fp8.LAYERS_FP8_FLUSHED,),
)


EXAMPLES = {
    "MpAgentActivationNearOverflow": Examples(
        firing=(_SOME,),
        quiet=(_BFLOAT16, _ACTIVATION_NEAR_OVERFLOW_OFF),
    ),
    "MpAgentAttentionLogitGrowth": Examples(
        firing=(_ATTENTION_LOGIT_GROWTH_GROWN, _ATTENTION_LOGIT_GROWTH_OUTLASTED),
        quiet=(
            _ATTENTION_LOGIT_GROWTH_LARGE,
            _ATTENTION_LOGIT_GROWTH_YOUNG,
            _ATTENTION_LOGIT_GROWTH_OFF,
        ),
    ),
    "MpAgentOutputLogitDivergence": Examples(
        firing=(_OUTPUT_LOGIT_DIVERGENCE_GROWN, _OUTPUT_LOGIT_DIVERGENCE_OUTLASTED),
        quiet=(
            _OUTPUT_LOGIT_DIVERGENCE_LARGE,
            _OUTPUT_LOGIT_DIVERGENCE_YOUNG,
            _OUTPUT_LOGIT_DIVERGENCE_OFF,
        ),
    ),
    "MpAgentRouterCollapse": Examples(
        firing=(_COLLAPSE, _ROUTER_COLLAPSE_OUTLASTED),
        quiet=(_EVEN, _ROUTER_COLLAPSE_OFF),
    ),
    "MpAgentFp8Underflow": Examples(
        firing=(_OUTLIERS, _FLUSHED_OUTLASTED),
        quiet=(_FEW_FLUSHED, _NOT_CAST),
    ),
    "MpAgentFp8Saturation": Examples(
        firing=(_OUTGROWN, _FP8_SATURATION_OUTLASTED),
        quiet=(_FOLLOWING, _DYNAMIC),
    ),
}
