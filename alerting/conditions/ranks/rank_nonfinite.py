"""MpAgentRankNonFinite."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.conditions.nonfinite import NONFINITE_REMEDIES
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, Value, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Seen, all_of, unless
from mp_agent.alerting.expressions.signals import Count, Series, Where
from mp_agent.alerting.first_line.triage import NAN_WRITTEN, NO_NAN_COUNTED, ROLL_BACK, Triage
from mp_agent.alerting.severity import Severity

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
"""Of which there are some when the incident is news, and not only the Prometheus that sees it. A
value that arose in backward is in the weights, and in the loss of the next step."""
_SEVERAL_RANKS = Series(metric=metrics.RUN_INFO, where=(Where("world_size", "!=", "1"),))


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

RANK_NONFINITE = Condition(
    name="MpAgentRankNonFinite",
    summary="One rank had the first NaN or Inf values.",
    meaning="The value originated on that rank, from its data or its hardware; the next "
    "reduction spreads it to all others.",
    confirm="Compare mp_agent_rank_loss_nonfinite_steps_total and mp_agent_rank_loss of that "
    "rank with those of the others, and, with measure_local_gradients, "
    "mp_agent_rank_local_grad_nonfinite_elements_total; mp_agent_rank_info names the host and the "
    "GPU.",
    remedies=(
        "Check the rank's batch at that step.",
        "Check the rank's hardware (XID, ECC), and move the run off the node if it is faulty.",
        *NONFINITE_REMEDIES[:2],
    ),
    why="The model is the same on all ranks, so the difference is in the rank's data or hardware.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights=NO_NAN_COUNTED,
                now="save a checkpoint, and check the batch and the GPU of rank {rank}",
                updated=Triage(
                    weights=NAN_WRITTEN,
                    now=f"{ROLL_BACK}, without the GPU of rank {{rank}} if it reports errors",
                ),
            ),
            when=unless(
                all_of(Seen(_INCIDENT), Seen(_SEVERAL_RANKS), happened(_LOSSES)), Seen(_KNOWN)
            ),
            description="Rank {rank} of run {run} had the first NaN or Inf, at step {step}, "
            "before the gradient reduction.",
            reason="No delay: a rank is named only on evidence.",
        ),
    ),
    firing=(_ONE_RANK, _IN_BACKWARD, _AFTER_FAILED_SCRAPE),
    quiet=(_SEEN_LATE, _NOBODY, _WORLD_OF_ONE),
)
