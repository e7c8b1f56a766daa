"""Examples of MpAgentReplicaDivergence."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp

_WEIGHTS = {"kind": "weights"}

_LABELS = {"kind": "weights", "step": "5600", "ranks": "3", "tensors": "norm.weight"}

_APART = Example(
    title="weights that are compared periodically, and stay unequal for half an hour",
    minutes=53,
    tracks=(
        Track(metrics.REPLICA_DIVERGENCE, (*flat(0, 10), *flat(1, 30), 0), _WEIGHTS),
        Track(metrics.REPLICA_DIVERGENCE_STEPS, (*flat(0, 10), 1), _WEIGHTS),
        Track(metrics.DIVERGENT_RANKS, (*flat(None, 10), *flat(1, 30), "stale"), _LABELS),
    ),
    fires={
        Severity.CRITICAL: "Replicas of run demo are not equal. Last seen: kind weights, step "
        "5600, ranks 3, tensors norm.weight."
    },
    at=35,
    not_yet=(9, 52),
)

_FOR_A_STEP = Example(
    title="gradients that differed on some steps between two scrapes",
    minutes=26,
    tracks=(
        Track(metrics.REPLICA_DIVERGENCE_STEPS, (*flat(0, 10), *ramp(1, 1, 2)),
              {"kind": "gradients"}),
    ),
    fires={Severity.CRITICAL: "Replicas of run demo are not equal."},
    at=15,
    not_yet=(9, 25),
)  # fmt: skip

_STATE = Example(
    title="a codebook that follows the data of each rank",
    minutes=20,
    tracks=(
        Track(metrics.REPLICA_UNEXPLAINED, (*flat(0, 5), *flat(1, 10), 0)),
        Track(
            metrics.LOCAL_STATE,
            (*flat(None, 5), *flat(1, 10), "stale"),
            {"why": "unknown", "tensors": "codes"},
        ),
    ),
    fires={
        Severity.WARNING: "Ranks of run demo train the same weights, but 1 frozen parameters or "
        "buffers differ. Seen: why unknown, tensors codes."
    },
    at=10,
    not_yet=(4, 17),
)

_EQUAL = Example(title="replicas that agree on every comparison", minutes=20)

_NOTHING_TO_COMPARE = Example(
    title="a run without replicas",
    minutes=15,
    without=(metrics.REPLICA_DIVERGENCE,),
)

EXAMPLES = {
    "MpAgentReplicaDivergence": Examples(
        firing=(_APART, _FOR_A_STEP, _STATE),
        quiet=(_EQUAL, _NOTHING_TO_COMPARE),
    ),
}
