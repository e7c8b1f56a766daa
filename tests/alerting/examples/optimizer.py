"""Examples of alerts on what the optimizer makes of gradients."""

from mp_agent.alerting.values import Severity
from mp_agent.catalog.metric import Metric
from mp_agent.catalog.metrics import gradient_layers, optimizer
from tests.alerting.examples.example import Example, Examples, Track, Value, flat, ramp

_NAMED = (
    "In 2 layer(s) of run demo, gradients were more than <moment_rms_high> times what Adam's "
    "second moment expects in the last <moment_rms_samples> samples."
)

_SHIFT = Example(
    title="gradients that grow faster than the second moment follows",
    minutes=46,
    tracks=(
        Track(optimizer.LAYERS_MOMENT_STALE, (*flat(0, 10), *flat(2, 20), 0)),
        Track(
            optimizer.MOMENT_STALE_LAYER,
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
    tracks=(Track(optimizer.LAYERS_MOMENT_STALE, (*flat(0, 10), *flat(2, 20), 0)),),
    fires={Severity.WARNING: _NAMED},
    at=35,
)

_NONE = Example(
    title="second moments that follow the gradients",
    minutes=15,
    tracks=(Track(optimizer.LAYERS_MOMENT_STALE, (0,)),),
)


def _sampled(
    metric: Metric, limit: str, shares: tuple[Value, ...], *steps: Value
) -> tuple[Track, ...]:
    """Return a share by the minute, and over how many steps it has been too large."""
    return (
        Track(metric, shares),
        Track(gradient_layers.SUSTAINED_STEPS, steps, {"limit": limit}),
    )


_LASTING = (*flat(0, 5), *ramp(0, 60, 15))


_MOST = Example(
    title="most updates of BF16 weights are rounded away",
    minutes=20,
    tracks=_sampled(
        optimizer.UPDATES_LOST, "updates_lost", (*flat(0.2, 5), 0.8), *flat(0, 5), *ramp(0, 4, 15)
    ),
    fires={
        Severity.WARNING: "80% of what the optimizer was to change in the 16-bit weights of run "
        "demo is lost in rounding: the updates are smaller than half the spacing of the format."
    },
    at=15,
    not_yet=(6,),
)

_COMPARED = Example(
    title="weights that are compared, most of whose changes are rounded away",
    minutes=10,
    tracks=(Track(optimizer.UPDATES_ROUNDING_LOSS, (*flat(0.3, 4), 0.7)),),
    fires={
        Severity.WARNING: "70% of what the optimizer was to change in the 16-bit weights of run "
        "demo is lost in rounding: the updates are smaller than half the spacing of the format."
    },
    at=7,
    not_yet=(3,),
)

_STOCHASTIC = Example(
    title="stochastic rounding, or a compensated sum, of updates that are small",
    minutes=20,
    tracks=(
        Track(optimizer.UPDATES_ROUNDED, (0.75,)),
        Track(optimizer.UPDATES_ROUNDING_LOSS, (0.0,)),
        *_sampled(optimizer.UPDATES_LOST, "updates_lost", (0.8,), *_LASTING),
    ),
)

_UPDATES_LOST_SOME = Example(
    title="BF16 weights with stochastic data: half of the updates arrive",
    minutes=20,
    tracks=(Track(optimizer.UPDATES_LOST, (0.45,)),),
)

_SHORT = Example(
    title="a warm-up that begins with tiny learning rates",
    minutes=20,
    tracks=_sampled(
        optimizer.UPDATES_LOST, "updates_lost", (*flat(0.9, 4), 0.3), *ramp(0, 4, 4), 0
    ),
)


_TEXT = (
    "Adam's epsilon does not suit the second moments of run demo: it is either above the root of "
    "most of them, or below the smallest number of their format."
)

_SMALL_MOMENTS = Example(
    title="second moments whose root is below epsilon in most elements",
    minutes=20,
    tracks=_sampled(
        optimizer.ADAM_BELOW_EPSILON, "adam_below_epsilon", (*flat(0.1, 5), 0.7), *_LASTING
    ),
    fires={Severity.WARNING: _TEXT},
    at=15,
    not_yet=(6,),
)

_FP16_STATE = Example(
    title="state in FP16 with an epsilon of 1e-8",
    minutes=20,
    tracks=(Track(optimizer.ADAM_EPSILON_LOST, (1,)),),
    fires={Severity.WARNING: _TEXT},
    at=10,
)

_ZERO_EPSILON = {"optimizer": "AdamW", "format": "fp16", "epsilon": "1e-08"}

_FP16_WEIGHTS = Example(
    title="a model cast by half() and an epsilon of 1e-8, from the first step on",
    minutes=8,
    tracks=(Track(optimizer.ZERO_EPSILON, (None, 1), _ZERO_EPSILON),),
    fires={
        Severity.CRITICAL: "AdamW of run demo keeps its state in fp16, which rounds its epsilon of "
        "1e-08 to 0: where a second moment rounds to 0 too, the update is NaN or Inf. Keep weights "
        "and state in FP32, or set eps to 1e-4 or more."
    },
    labels=_ZERO_EPSILON,
    at=1,
    not_yet=(0,),
)

_FP32_STATE = Example(
    title="an epsilon of 1e-8 with state in FP32",
    minutes=8,
    tracks=(Track(optimizer.ADAM_EPSILON_LOST, (0,)),),
)

_ADAM_EPSILON_UNSAFE_SOME = Example(
    title="a minority of elements with tiny second moments, such as of rare tokens",
    minutes=20,
    tracks=(Track(optimizer.ADAM_BELOW_EPSILON, (0.4,)),),
)

_ONE_LOOK = Example(
    title="tiny gradients in the first samples",
    minutes=20,
    tracks=_sampled(
        optimizer.ADAM_BELOW_EPSILON,
        "adam_below_epsilon",
        (*flat(0.9, 4), 0.02),
        0,
        60,
        120,
        180,
        0,
    ),
)


_HEAD = Example(
    title="a head that was replaced after the optimizer was made",
    minutes=10,
    tracks=(
        Track(optimizer.PARAMETERS_UNHELD, (0, 2)),
        Track(optimizer.UNHELD_PARAMETERS_INFO, (None, 1), {"parameters": "fc.weight, fc.bias"}),
    ),
    fires={
        Severity.WARNING: "2 parameter(s) of run demo get gradients, are in no optimizer, and keep "
        "their values. Among them: fc.weight, fc.bias."
    },
    at=4,
    not_yet=(0,),
)

_ALL_HELD = Example(
    title="a run whose optimizers hold all parameters that get gradients",
    minutes=10,
    tracks=(Track(optimizer.PARAMETERS_UNHELD, (0,)),),
)

_DETACHED = Example(
    title="a detach behind the first two layers",
    minutes=10,
    tracks=(
        Track(optimizer.PARAMETERS_CUT_OFF, (0, 2)),
        Track(optimizer.CUT_OFF_PARAMETERS_INFO, (None, 1), {"parameters": "0.weight, 1.weight"}),
    ),
    fires={
        Severity.WARNING: "2 parameter(s) of run demo get no gradient: their layers ran, and the "
        "first layer with a gradient got such a tensor as they return, which requires none. Among "
        "them: 0.weight, 1.weight."
    },
    at=4,
    not_yet=(0,),
)

_UNUSED_HEAD = Example(
    title="a head that the loss does not use, which comes after the layers with gradients",
    minutes=10,
    tracks=(Track(optimizer.PARAMETERS_CUT_OFF, (0,)),),
)

_PARTED = Example(
    title="an output layer that a checkpoint has given a weight of its own",
    minutes=10,
    tracks=(
        Track(optimizer.PARAMETERS_PARTED, (0, 2)),
        Track(
            optimizer.PARTED_PARAMETERS_INFO, (None, 1), {"parameters": "wte.weight, head.weight"}
        ),
    ),
    fires={
        Severity.WARNING: "2 parameters of run demo get gradients of their own, and were one at an "
        "earlier step, or are one by the model's configuration. Among them: wte.weight, "
        "head.weight."
    },
    at=4,
    not_yet=(0,),
)

_TIED = Example(
    title="a model whose weights are tied, or whose configuration ties none",
    minutes=10,
    tracks=(Track(optimizer.PARAMETERS_PARTED, (0,)),),
)

_RESUMED = Example(
    title="a checkpoint of the weights and the schedule, without the optimizer",
    minutes=10,
    tracks=(Track(optimizer.RESUMED_WITHOUT_STATE, (None, 5000)),),
    fires={
        Severity.WARNING: "Run demo goes on after 5000 steps, and its optimizer, which keeps "
        "state, began without any."
    },
    at=4,
    not_yet=(0,),
)

_NOT_LOST = Example(
    title="a run that resumes with the state of its optimizer, or begins at step 1",
    minutes=10,
    tracks=(Track(optimizer.RESUMED_WITHOUT_STATE, (None, 1)),),
)

_BEGUN_AGAIN = Example(
    title="a checkpoint of the weights and the optimizer, without the schedule",
    minutes=10,
    tracks=(Track(optimizer.SCHEDULE_BEHIND, (None, 5000)),),
    fires={
        Severity.WARNING: "The optimizer of run demo goes on with the state of 5000 steps that its "
        "schedule of the learning rate has not counted."
    },
    at=4,
    not_yet=(0,),
)

_GOES_ON = Example(
    title="a schedule that goes on, or a run that begins at step 1",
    minutes=10,
    tracks=(Track(optimizer.SCHEDULE_BEHIND, (None, 1)),),
)

_NOTHING_LOADED = Example(
    title="a checkpoint whose names have a prefix that those of the model have not",
    minutes=10,
    tracks=(Track(optimizer.NOTHING_LOADED, (None, 148)),),
    fires={
        Severity.WARNING: "148 tensors were loaded into the model of run demo with strict=False, "
        "and none of them has a name of the model."
    },
    at=4,
    not_yet=(0,),
)

_PART_LOADED = Example(
    title="a checkpoint of which a part fits",
    minutes=10,
    tracks=(Track(optimizer.NOTHING_LOADED, (None,)),),
)

_UPDATED_COPY = Example(
    title="a step that updates a copy of two weights",
    minutes=10,
    tracks=(
        Track(optimizer.PARAMETERS_UNCHANGED, (0, 2)),
        Track(
            optimizer.UNCHANGED_PARAMETERS_INFO,
            (None, 1),
            {"parameters": "conv1.weight, conv2.weight"},
        ),
    ),
    fires={
        Severity.CRITICAL: "2 parameter(s) of run demo did not change over nine or more steps, "
        "although gradients and learning rate were to change them by more than the spacing of "
        "their format. Among them: conv1.weight, conv2.weight."
    },
    at=4,
    not_yet=(0,),
)

_ROUNDED = Example(
    title="BF16 weights whose every update is rounded away",
    minutes=10,
    tracks=(
        Track(optimizer.PARAMETERS_UNCHANGED, (0,)),
        Track(optimizer.UPDATES_ROUNDED, (0.4, 1)),
    ),
    fires={
        Severity.WARNING: "100% of the elements of 16-bit weights in run demo that were looked at "
        "did not change over nine or more steps: each update is below half the spacing of the "
        "format."
    },
    at=4,
    not_yet=(0,),
)

_CHANGED = Example(
    title="weights that change, and 16-bit weights of which some do",
    minutes=10,
    tracks=(
        Track(optimizer.PARAMETERS_UNCHANGED, (0,)),
        Track(optimizer.UPDATES_ROUNDED, (0.9,)),
    ),
)

_NOT_COMPARED = Example(
    title="a learning rate of 0, skipped steps and a frozen model, of which nothing is compared",
    minutes=10,
    tracks=(Track(optimizer.PARAMETERS_UNHELD, (0,)),),
)


EXAMPLES = {
    "MpAgentParametersWithoutOptimizer": Examples(firing=(_HEAD,), quiet=(_ALL_HELD,)),
    "MpAgentLayersCutOff": Examples(firing=(_DETACHED,), quiet=(_UNUSED_HEAD,)),
    "MpAgentTiedWeightsParted": Examples(firing=(_PARTED,), quiet=(_TIED,)),
    "MpAgentNothingLoaded": Examples(firing=(_NOTHING_LOADED,), quiet=(_PART_LOADED,)),
    "MpAgentOptimizerStateLost": Examples(firing=(_RESUMED,), quiet=(_NOT_LOST,)),
    "MpAgentScheduleBegunAgain": Examples(firing=(_BEGUN_AGAIN,), quiet=(_GOES_ON,)),
    "MpAgentWeightsUnchanged": Examples(
        firing=(_UPDATED_COPY, _ROUNDED), quiet=(_CHANGED, _NOT_COMPARED)
    ),
    "MpAgentSecondMomentStale": Examples(
        firing=(_SHIFT, _OUTLASTED),
        quiet=(_NONE,),
    ),
    "MpAgentUpdatesLost": Examples(
        firing=(_MOST, _COMPARED),
        quiet=(_UPDATES_LOST_SOME, _STOCHASTIC, _SHORT),
    ),
    "MpAgentAdamEpsilonUnsafe": Examples(
        firing=(_SMALL_MOMENTS, _FP16_STATE, _FP16_WEIGHTS),
        quiet=(_ADAM_EPSILON_UNSAFE_SOME, _ONE_LOOK, _FP32_STATE),
    ),
}
