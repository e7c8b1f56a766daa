"""Examples of alerts on a rank whose losses are unlike those of all others."""

from mp_agent.alerting.severity import Severity
from mp_agent.catalog.metrics import ranks
from tests.alerting.examples.example import Example, Examples, Track, flat

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

_SCATTERED = Example(
    title="losses that scatter widely on all ranks",
    minutes=6,
    tracks=(Track(ranks.RANK_OUTLIER_STEPS, (0,)), Track(ranks.RANK_LEVEL_STEPS, (0,))),
)

EXAMPLES = {
    "MpAgentRankLossOutliers": Examples(firing=(_OUTLIERS,), quiet=(_SCATTERED,)),
    "MpAgentRankLossUnlike": Examples(firing=(_UNLIKE,), quiet=(_SCATTERED,)),
}
