"""Examples of alerts on batches that repeat, are shared by ranks, or have a single row."""

from mp_agent.alerting.severity import Severity
from mp_agent.catalog.metrics import batches, run
from tests.alerting.examples.example import Example, Examples, Track, flat

_STUCK = Example(
    title="a batch that is taken from the beginning of the loader on every step",
    minutes=8,
    tracks=(
        Track(batches.REPEATED_STEPS, (*flat(0, 3), 50, 900, 0)),
        Track(batches.REPEATED, (*flat(None, 3), 1, 1, "stale"), {"ranks": "all", "step": "16"}),
    ),
    fires={
        Severity.WARNING: "The model of run demo got the same batch at every look over 900 steps. "
        "Seen: ranks all, step 16. Other batches were there; overfitting one batch on purpose "
        "looks the same."
    },
    at=4,
    not_yet=(2, 7),
)

_ALL_AT_ONCE = Example(
    title="a training on all data at once, which has no other batch",
    minutes=6,
    tracks=(Track(batches.REPEATED_STEPS, (0,)), Track(run.LOSS, (1.0, 0.9, 0.8, 0.7))),
)

_SHARED = Example(
    title="a DataLoader without a DistributedSampler on two ranks",
    minutes=8,
    tracks=(
        Track(batches.SHARED_STEPS, (*flat(0, 3), 18, 900, 0)),
        Track(batches.SHARED, (*flat(None, 3), 1, 1, "stale"), {"ranks": "0, 1", "step": "16"}),
    ),
    fires={
        Severity.WARNING: "Ranks of run demo that average their gradients had the same batches at "
        "every look over 900 steps. Seen: ranks 0, 1, step 16."
    },
    at=4,
    not_yet=(2, 7),
)

_TENSOR_PARALLEL = Example(
    title="ranks of tensor parallelism, which are to have the same data",
    minutes=6,
    tracks=(Track(batches.SHARED_STEPS, (0,)),),
)

_SINGLE = Example(
    title="a rank whose batches have one row, where the others have eight",
    minutes=8,
    tracks=(
        Track(batches.SINGLE_ROW_RANKS, (*flat(0, 3), 1, 1, 0)),
        Track(batches.SINGLE_ROW, (*flat(None, 3), 1, 1, "stale"), {"ranks": "3", "usual": "8"}),
    ),
    fires={
        Severity.WARNING: "The batches of 1 rank(s) of run demo have a single row. Seen: ranks 3, "
        "usual 8."
    },
    at=4,
    not_yet=(2, 7),
)

_LAST_OF_EPOCH = Example(
    title="a last batch of the epoch that has one row",
    minutes=6,
    tracks=(Track(batches.SINGLE_ROW_RANKS, (0,)),),
)

EXAMPLES = {
    "MpAgentSameBatch": Examples(firing=(_STUCK,), quiet=(_ALL_AT_ONCE,)),
    "MpAgentRanksShareBatches": Examples(firing=(_SHARED,), quiet=(_TENSOR_PARALLEL,)),
    "MpAgentSingleRowBatch": Examples(firing=(_SINGLE,), quiet=(_LAST_OF_EPOCH,)),
}
