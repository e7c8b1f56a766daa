"""Examples of MpAgentRankStalled."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, Value, flat, ramp


def _stops_at(minute: int) -> tuple[Track, ...]:
    steps = ramp(5000, 60, minute + 1)
    return (Track(metrics.STEP, steps), Track(metrics.STEPS, steps))


def _lagging(rank: str, phase: str) -> Track:
    return Track(metrics.LAGGING_RANK, (*flat(None, 11), 1), {"rank": rank, "phase": phase})


_FROM_ELEVEN: tuple[Value, ...] = (*flat(0, 11), 2)

_LATE = Example(
    title="two ranks that never enter the collective in which the others wait",
    minutes=19,
    tracks=(
        *_stops_at(10),
        Track(metrics.RANKS_LAGGING, _FROM_ELEVEN),
        _lagging("3", "forward"),
        _lagging("5", "gone"),
    ),
    fires={
        Severity.CRITICAL: "2 rank(s) of run demo are behind the others, and no step was made "
        "for <rank_stall_window>. Behind: rank 3, phase forward; rank 5, phase gone."
    },
    at=18,
    not_yet=(13,),
)

_ALL_ALIKE = Example(
    title="a hang of all ranks, none of which can be named", minutes=19, tracks=_stops_at(10)
)

_IN_STEP = Example(
    title="ranks in different phases while steps are made",
    minutes=20,
    tracks=(Track(metrics.RANKS_LAGGING, (0, 1, 3, 1) * 5),),
)

_SLOW_STEPS = Example(
    title="steps of four minutes, in which ranks reach the collective one by one",
    minutes=19,
    tracks=(
        *_stops_at(10),
        Track(metrics.STEP_USUAL, (240,)),
        Track(metrics.RANKS_LAGGING, _FROM_ELEVEN),
    ),
)

_EVALUATION = Example(
    title="rank 0 evaluates while the others wait for it",
    minutes=25,
    tracks=(
        *_stops_at(10),
        Track(metrics.RANKS_LAGGING, _FROM_ELEVEN),
        Track(metrics.PHASE, (*flat(1, 11), "stale"), {"phase": "backward"}),
        Track(metrics.PHASE, (*flat(None, 11), 1), {"phase": "eval"}),
    ),
)

_ENDED = Example(
    title="a run that ended, some ranks earlier than others",
    minutes=25,
    tracks=(
        *_stops_at(10),
        Track(metrics.RANKS_LAGGING, _FROM_ELEVEN),
        Track(metrics.RUN_ACTIVE, (*flat(1, 12), 0)),
        Track(metrics.RUN_END, (*flat(None, 12), 1), {"reason": "completed"}),
    ),
)

_IN_FIRST_STEP = Example(
    title="a rank that never enters the very first collective",
    minutes=9,
    tracks=(Track(metrics.STEPS, (0,)), Track(metrics.RANKS_LAGGING, (1,))),
    without=(metrics.STEP, metrics.STEP_USUAL),
    fires={
        Severity.CRITICAL: "1 rank(s) of run demo are behind the others, and no step was made "
        "for <rank_stall_window>."
    },
    at=6,
    not_yet=(4,),
)

_AFTER_PAUSES = Example(
    title="a rank that recovered from pauses of 75 minutes before, and now does not",
    minutes=8,
    tracks=(
        Track(metrics.RANKS_LAGGING, (1,)),
        Track(metrics.STANDING, ramp(7000, 60, 9)),
        Track(metrics.PAUSE_LONGEST, (4500,)),
    ),
    fires={
        Severity.CRITICAL: "1 rank(s) of run demo are behind the others, and no step was made "
        "for <rank_stall_window>."
    },
    at=5,
    not_yet=(3,),
    also={"MpAgentRunStalled": (Severity.CRITICAL, Severity.WARNING)},
)

_ROLLOUTS = Example(
    title="rollouts of one rank, for which the others wait, no longer than an earlier one",
    minutes=8,
    tracks=(
        Track(metrics.RANKS_LAGGING, (1,)),
        Track(metrics.STANDING, ramp(100, 60, 9)),
        Track(metrics.PAUSE_LONGEST, (400,)),
    ),
)

_YOUNG = Example(
    title="ranks that start one by one",
    minutes=4,
    tracks=(
        *_stops_at(0),
        Track(metrics.RANKS_LAGGING, (2,)),
    ),
)

EXAMPLES = {
    "MpAgentRankStalled": Examples(
        firing=(_LATE, _IN_FIRST_STEP, _AFTER_PAUSES),
        quiet=(_ALL_ALIKE, _IN_STEP, _SLOW_STEPS, _EVALUATION, _ROLLOUTS, _ENDED, _YOUNG),
    ),
}
