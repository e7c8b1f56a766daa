"""MpAgentRankNonFinite."""

from mp_agent.alerting import metrics
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.conditions.nonfinite import NONFINITE_REMEDIES
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples import Example, Track, Value, flat
from mp_agent.alerting.predicates import Seen, all_of, unless
from mp_agent.alerting.severity import Severity
from mp_agent.alerting.signals import Count, Series, Where

_WINDOW = duration("incident_window")
_NAMED = (Where("rank", "!=", ""),)
_KEPT = ("rank", "step")
_INCIDENT = Series(metric=metrics.FIRST_NONFINITE, where=_NAMED, keep=_KEPT)
_KNOWN = Series(
    metric=metrics.FIRST_NONFINITE,
    over=("present_over_time", duration("birth_window")),
    before=(_WINDOW,),
    where=_NAMED,
    keep=_KEPT,
)
_LOSSES = Count(metric=metrics.LOSS_NONFINITE_STEPS, window=_WINDOW)
"""Of which there are some when the incident is news, and not only the Prometheus that sees it."""
_SEVERAL_RANKS = Series(metric=metrics.RUN_INFO, where=(Where("world_size", "!=", "1"),))


def _first(rank: str, values: tuple[Value, ...]) -> Track:
    labels = {"step": "5612", "rank": rank, "layer": "", "phase": "forward"}
    return Track(metrics.FIRST_NONFINITE, values, labels)


def _losses(*values: Value) -> Track:
    return Track(metrics.LOSS_NONFINITE_STEPS, values)


_FROM_TEN: tuple[Value, ...] = (*flat(None, 10), 1)

_ONE_RANK = Example(
    title="one rank's own loss is not finite, and half an hour later a loss that is no news of it",
    minutes=50,
    tracks=(_first("3", _FROM_TEN), _losses(*flat(0, 10), *flat(1, 30), 2)),
    fires={
        Severity.CRITICAL: "Rank 3 of run demo was the first with a NaN or Inf, at step 5612: its "
        "own, before gradients were mixed."
    },
    labels={"rank": "3", "step": "5612"},
    at=15,
    not_yet=(9, 25, 45),
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
        Severity.CRITICAL: "Rank 3 of run demo was the first with a NaN or Inf, at step 5612: its "
        "own, before gradients were mixed."
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
    title="a value born in backward, or on all ranks alike, which names none",
    minutes=20,
    tracks=(_first("", _FROM_TEN), _losses(*flat(0, 10), 1)),
)

_WORLD_OF_ONE = Example(
    title="a run of a single rank, of which nothing is learned by naming it",
    minutes=20,
    tracks=(
        _first("0", _FROM_TEN),
        _losses(*flat(0, 10), 1),
        Track(metrics.RUN_INFO, (1,), {"world_size": "1"}),
    ),
    without=(metrics.RUN_INFO,),
)

RANK_NONFINITE = Condition(
    name="MpAgentRankNonFinite",
    summary="One rank was the first with NaN or Inf values.",
    meaning="The value was born on that rank, by its data or its hardware: it reaches all others "
    "with the next reduction.",
    confirm="mp_agent_rank_loss_nonfinite_steps_total and mp_agent_rank_loss of that rank beside "
    "those of the others; mp_agent_rank_info tells the host and the GPU.",
    remedies=(
        "Look at the batch that the rank had at that step.",
        "Look at the rank's hardware (XID, ECC), and move the run off the node if it is that.",
        *NONFINITE_REMEDIES[:2],
    ),
    why="The model is the same on all ranks, so what differs is what the rank was fed and what it "
    "ran on.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            when=unless(
                all_of(Seen(_INCIDENT), Seen(_SEVERAL_RANKS), happened(_LOSSES)), Seen(_KNOWN)
            ),
            description="Rank {rank} of run {run} was the first with a NaN or Inf, at step {step}: "
            "its own, before gradients were mixed.",
            reason="It does not wait: a rank is only named by evidence.",
        ),
    ),
    firing=(_ONE_RANK, _AFTER_FAILED_SCRAPE),
    quiet=(_SEEN_LATE, _NOBODY, _WORLD_OF_ONE),
)
