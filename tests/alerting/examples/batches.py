"""Examples of alerts on batches that repeat or have a single row, and on odd losses of a rank."""

from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import batches, ranks, run
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

_DOUBLED = Example(
    title="an IterableDataset that two workers read from beginning to end",
    minutes=8,
    tracks=(Track(batches.DOUBLED_PAIRS, (*flat(0, 3), 3, 4, 0)),),
    fires={
        Severity.WARNING: "Of the last eight pairs of consecutive steps of run demo that were "
        "looked at, 4 had the same batch twice, delivered by several workers that read an "
        "IterableDataset."
    },
    at=4,
    not_yet=(2, 7),
)

_DIVIDED = Example(
    title="a stream that its workers divide",
    minutes=6,
    tracks=(Track(batches.DOUBLED_PAIRS, (0,)),),
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

_ODD = {"rank": "1", "loss": "8.3", "usual": "1.04", "highest": "1.2"}

_OUTLIERS = Example(
    title="a rank with corrupt records, whose losses are far above all others now and then",
    minutes=18,
    tracks=(
        Track(ranks.RANK_OUTLIER_STEPS, (*flat(0, 3), 40)),
        Track(ranks.RANK_OUTLIER, (*flat(None, 3), 1), _ODD),
    ),
    fires={
        Severity.WARNING: "Single losses of one rank of run demo were far above all losses of the "
        "others. Last seen: rank 1, loss 8.3, usual 1.04, highest 1.2."
    },
    at=5,
    not_yet=(2, 17),
)

_UNLIKE = Example(
    title="a rank whose labels are wrong",
    minutes=14,
    tracks=(
        Track(ranks.RANK_LEVEL_STEPS, (*flat(0, 3), 32, 32, 0)),
        Track(ranks.RANK_LEVEL, (*flat(None, 3), 1, 1, "stale"), _ODD),
    ),
    fires={
        Severity.WARNING: "For 32 steps the losses of one rank of run demo have been unlike those "
        "of all others. It is: rank 1, loss 8.3, usual 1.04, highest 1.2."
    },
    at=4,
    not_yet=(2, 12),
)

_UNLIKE_OUTLASTED = Example(
    title="a rank whose losses were unlike all others for some minutes, directly afterwards",
    minutes=7,
    tracks=(Track(ranks.RANK_LEVEL_STEPS, (*flat(0, 3), 32, 32, 0)),),
    fires={
        Severity.WARNING: "For 32 steps the losses of one rank of run demo have been unlike those "
        "of all others."
    },
    at=7,
)

_SCATTERED = Example(
    title="losses that scatter widely on all ranks",
    minutes=6,
    tracks=(Track(ranks.RANK_OUTLIER_STEPS, (0,)), Track(ranks.RANK_LEVEL_STEPS, (0,))),
)

EXAMPLES = {
    "MpAgentSameBatch": Examples(firing=(_STUCK,), quiet=(_ALL_AT_ONCE,)),
    "MpAgentWorkersRepeatBatches": Examples(firing=(_DOUBLED,), quiet=(_DIVIDED,)),
    "MpAgentRanksShareBatches": Examples(firing=(_SHARED,), quiet=(_TENSOR_PARALLEL,)),
    "MpAgentSingleRowBatch": Examples(firing=(_SINGLE,), quiet=(_LAST_OF_EPOCH,)),
    "MpAgentRankLossOutliers": Examples(firing=(_OUTLIERS,), quiet=(_SCATTERED,)),
    "MpAgentRankLossUnlike": Examples(firing=(_UNLIKE, _UNLIKE_OUTLASTED), quiet=(_SCATTERED,)),
}
