"""Examples of MpAgentRankNonFinite."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, Value, flat


def _first(rank: str, values: tuple[Value, ...], phase: str = "forward") -> Track:
    labels = {"step": "5612", "rank": rank, "layer": "", "phase": phase}
    return Track(metrics.FIRST_NONFINITE, values, labels)


def _losses(*values: Value) -> Track:
    return Track(metrics.LOSS_NONFINITE_STEPS, values)


_FROM_TEN: tuple[Value, ...] = (*flat(None, 10), 1)

_ONE_RANK = Example(
    title="one rank's own loss is not finite, and half an hour later a loss that is not a new "
    "incident",
    minutes=50,
    tracks=(_first("3", _FROM_TEN), _losses(*flat(0, 10), *flat(1, 30), 2)),
    fires={
        Severity.CRITICAL: "Rank 3 of run demo had the first NaN or Inf, at step 5612, before "
        "the gradient reduction."
    },
    labels={"rank": "3", "step": "5612"},
    at=15,
    not_yet=(9, 25, 45),
)

_IN_BACKWARD = Example(
    title="one rank's own gradients are not finite, and then the loss of all",
    minutes=20,
    tracks=(
        _first("3", _FROM_TEN, "backward"),
        _losses(*flat(0, 11), 1),
    ),
    fires={
        Severity.CRITICAL: "Rank 3 of run demo had the first NaN or Inf, at step 5612, before "
        "the gradient reduction."
    },
    labels={"rank": "3", "step": "5612"},
    at=15,
    not_yet=(9,),
)

_AFTER_FAILED_SCRAPE = Example(
    title="an incident of half an hour ago, when a scrape fails",
    age_minutes=0,
    minutes=52,
    tracks=(
        _first("3", (*flat(1, 40), "stale", 1)),
        _losses(*flat(1, 40), "stale", 1),
        Track("up", (*flat(1, 40), 0, 1)),
    ),
    fires={
        Severity.CRITICAL: "Rank 3 of run demo had the first NaN or Inf, at step 5612, before "
        "the gradient reduction."
    },
    labels={"rank": "3", "step": "5612"},
    at=5,
    not_yet=(39, 41, 45, 52),
)

_SEEN_LATE = Example(
    title="an incident of hours ago, seen by a Prometheus that starts empty",
    minutes=15,
    tracks=(_first("3", (1,)), _losses(7)),
)

_NOBODY = Example(
    title="a value from the backward pass, or on all ranks, which names no rank",
    minutes=20,
    tracks=(_first("", _FROM_TEN), _losses(*flat(0, 10), 1)),
)

_WORLD_OF_ONE = Example(
    title="a run with a single rank, where naming it has no value",
    minutes=20,
    tracks=(
        _first("0", _FROM_TEN),
        _losses(*flat(0, 10), 1),
        Track(metrics.RUN_INFO, (1,), {"world_size": "1"}),
    ),
    without=(metrics.RUN_INFO,),
)

EXAMPLES = {
    "MpAgentRankNonFinite": Examples(
        firing=(_ONE_RANK, _IN_BACKWARD, _AFTER_FAILED_SCRAPE),
        quiet=(_SEEN_LATE, _NOBODY, _WORLD_OF_ONE),
    ),
}
