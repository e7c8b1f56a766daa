"""Examples of alerts on watched tensors, and on a trainer that differs from its sampler."""

from mp_agent.alerting.conditions.tensors import (
    _EXTREME,
    _HIGH,
    _described,
)
from mp_agent.alerting.expressions import Limit
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import reinforcement, tensors
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp


def _track(bound: Limit, *steps: float) -> Track:
    return Track(reinforcement.LOGPROB_MISMATCH_STEPS, (*flat(0, 10), *steps), {"bound": bound})


_DIFFERENT = Example(
    title="a rollout engine in another precision",
    minutes=16,
    tracks=(_track(_HIGH, 1, 2, 3, 4), _track(_EXTREME, 0)),
    fires={Severity.WARNING: _described(_HIGH, "demo", "4")},
    at=15,
    not_yet=(11,),
)

_OTHER_WEIGHTS = Example(
    title="a rollout engine that has not received the weights",
    minutes=16,
    tracks=(_track(_HIGH, 1, 2, 3, 4), _track(_EXTREME, 1, 2, 3, 4)),
    fires={Severity.CRITICAL: _described(_EXTREME, "demo", "4")},
    at=15,
    not_yet=(11,),
)

_ONCE = Example(
    title="two steps whose rollouts began before the last update",
    minutes=20,
    tracks=(_track(_HIGH, 1, 2), _track(_EXTREME, 1, 2)),
)

_OFF = Example(
    title="a run without reinforcement learning",
    minutes=15,
    without=(reinforcement.LOGPROB_MISMATCH_STEPS,),
)


def _lasting(tensor: str, limit: str) -> Track:
    """Return over how many steps a tensor has been beyond a limit, from minute 5 on."""
    steps = (*flat(0, 5), *ramp(0, 60, 15))
    return Track(tensors.TENSOR_SUSTAINED_STEPS, steps, {"tensor": tensor, "limit": limit})


_REDUCTION_SWALLOWS_TENSOR = {"tensor": "token losses"}

_LONG_SUM = Example(
    title="a mean over a long sequence in FP16, from a longer batch on",
    minutes=20,
    tracks=(
        Track(
            tensors.TENSOR_REDUCTION_SWALLOWED, (*flat(0.001, 5), 0.34), _REDUCTION_SWALLOWS_TENSOR
        ),
        _lasting("token losses", "reduction_swallowed"),
    ),
    fires={
        Severity.WARNING: "A sum of tensor token losses of run demo in its own dtype loses 34% of "
        "the terms: they are smaller than half the spacing of the format at the sum."
    },
    labels=_REDUCTION_SWALLOWS_TENSOR,
    at=15,
    not_yet=(6,),
)

_ROUNDING = Example(
    title="a short sum that loses less than a hundredth",
    minutes=20,
    tracks=(Track(tensors.TENSOR_REDUCTION_SWALLOWED, (0.008,), _REDUCTION_SWALLOWS_TENSOR),),
)

_NO_REDUCTION = Example(
    title="large logits in BF16 that are watched, and that nothing sums",
    minutes=20,
    tracks=(Track(tensors.TENSOR_SWALLOWED, (0.9,), {"tensor": "logits"}),),
    without=(tensors.TENSOR_REDUCTION_SWALLOWED,),
)


_DIMENSION_IMBALANCE_TENSOR = {"tensor": "inputs"}

_RAW_FEATURE = Example(
    title="a feature that is not standardized among others that are",
    minutes=20,
    tracks=(
        Track(tensors.TENSOR_SLICE_IMBALANCE, (*flat(8, 5), 52000), _DIMENSION_IMBALANCE_TENSOR),
        _lasting("inputs", "dimension_imbalance"),
        Track(
            tensors.IMBALANCED_TENSOR,
            (*flat(None, 5), 1),
            {**_DIMENSION_IMBALANCE_TENSOR, "slice": "3"},
        ),
    ),
    fires={
        Severity.WARNING: "In tensor inputs of run demo, the largest range of a slice along the "
        "watched dimension is 5.2e+04 times the smallest. Worst of all is tensor inputs, slice 3."
    },
    labels=_DIMENSION_IMBALANCE_TENSOR,
    at=15,
    not_yet=(6,),
)

_STANDARDIZED = Example(
    title="features of similar ranges",
    minutes=20,
    tracks=(Track(tensors.TENSOR_SLICE_IMBALANCE, (40,), _DIMENSION_IMBALANCE_TENSOR),),
)

_NOT_WATCHED = Example(
    title="a script that watches no tensor",
    minutes=20,
    without=(tensors.TENSOR_SLICE_IMBALANCE,),
)


_CERTAIN = Example(
    title="a policy that repeats itself from step 30 on",
    minutes=30,
    tracks=(
        Track(reinforcement.POLICY_ENTROPY, (*flat(0.6, 10), 0.01)),
        Track(reinforcement.POLICY_COLLAPSED_STEPS, (*flat(0, 10), *ramp(0, 2, 20))),
    ),
    fires={
        Severity.WARNING: "Of the highest entropy of the policy of run demo, less than "
        "<policy_entropy_fallen> has remained for 20 steps."
    },
    at=20,
    not_yet=(16,),
)

_DECIDES = Example(
    title="a policy that learns to decide, and keeps a tenth of its entropy",
    minutes=30,
    tracks=(Track(reinforcement.POLICY_COLLAPSED_STEPS, (0,)),),
)

_NO_POLICY = Example(
    title="a run without reinforcement learning",
    minutes=15,
    without=(reinforcement.POLICY_COLLAPSED_STEPS,),
)


EXAMPLES = {
    "MpAgentPolicyEntropyCollapsed": Examples(
        firing=(_CERTAIN,),
        quiet=(_DECIDES, _NO_POLICY),
    ),
    "MpAgentTrainInferenceMismatch": Examples(
        firing=(_DIFFERENT, _OTHER_WEIGHTS),
        quiet=(_ONCE, _OFF),
    ),
    "MpAgentReductionSwallows": Examples(
        firing=(_LONG_SUM,),
        quiet=(_ROUNDING, _NO_REDUCTION),
    ),
    "MpAgentDimensionImbalance": Examples(
        firing=(_RAW_FEATURE,),
        quiet=(_STANDARDIZED, _NOT_WATCHED),
    ),
}
