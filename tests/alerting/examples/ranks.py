"""Examples of alerts on ranks that differ: replicas that part, ranks that lag or stall."""

from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import gradient_layers, ranks, run
from tests.alerting.examples.example import Example, Examples, Track, Value, flat, ramp


def _stops_at(minute: int) -> tuple[Track, ...]:
    steps = ramp(5000, 60, minute + 1)
    return (Track(run.STEP, steps), Track(run.STEPS, steps))


def _lagging(rank: str, phase: str) -> Track:
    return Track(ranks.LAGGING_RANK, (*flat(None, 11), 1), {"rank": rank, "phase": phase})


_FROM_ELEVEN: tuple[Value, ...] = (*flat(0, 11), 2)

_LATE = Example(
    title="two ranks that never enter the collective in which the others wait",
    minutes=19,
    tracks=(
        *_stops_at(10),
        Track(ranks.RANKS_LAGGING, _FROM_ELEVEN),
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
    tracks=(Track(ranks.RANKS_LAGGING, (0, 1, 3, 1) * 5),),
)

_SLOW_STEPS = Example(
    title="steps of four minutes, in which ranks reach the collective one by one",
    minutes=19,
    tracks=(
        *_stops_at(10),
        Track(ranks.STEP_USUAL, (240,)),
        Track(ranks.RANKS_LAGGING, _FROM_ELEVEN),
    ),
)

_EVALUATION = Example(
    title="rank 0 evaluates while the others wait for it",
    minutes=25,
    tracks=(
        *_stops_at(10),
        Track(ranks.RANKS_LAGGING, _FROM_ELEVEN),
        Track(run.PHASE, (*flat(1, 11), "stale"), {"phase": "backward"}),
        Track(run.PHASE, (*flat(None, 11), 1), {"phase": "eval"}),
    ),
)

_ENDED = Example(
    title="a run that ended, some ranks earlier than others",
    minutes=25,
    tracks=(
        *_stops_at(10),
        Track(ranks.RANKS_LAGGING, _FROM_ELEVEN),
        Track(run.RUN_ACTIVE, (*flat(1, 12), 0)),
        Track(run.RUN_END, (*flat(None, 12), 1), {"reason": "completed"}),
    ),
)

_IN_FIRST_STEP = Example(
    title="a rank that never enters the very first collective",
    minutes=9,
    tracks=(Track(run.STEPS, (0,)), Track(ranks.RANKS_LAGGING, (1,))),
    without=(run.STEP, ranks.STEP_USUAL),
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
        Track(ranks.RANKS_LAGGING, (1,)),
        Track(ranks.STANDING, ramp(7000, 60, 9)),
        Track(ranks.PAUSE_LONGEST, (4500,)),
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
        Track(ranks.RANKS_LAGGING, (1,)),
        Track(ranks.STANDING, ramp(100, 60, 9)),
        Track(ranks.PAUSE_LONGEST, (400,)),
    ),
)

_YOUNG = Example(
    title="ranks that start one by one",
    minutes=4,
    tracks=(
        *_stops_at(0),
        Track(ranks.RANKS_LAGGING, (2,)),
    ),
)


_SLOW_RANK = Example(
    title="a rank at 1.6 times the median for half an hour; the alert lasts longer",
    minutes=51,
    tracks=(
        Track(ranks.STRAGGLER_SLOWDOWN, (*flat(1.05, 10), *flat(1.6, 31), 1.05)),
        Track(ranks.STRAGGLER_DELAY, (*flat(0.03, 10), *flat(0.4, 31), 0.03)),
        Track(ranks.STRAGGLER, (1,), {"rank": "5"}),
    ),
    fires={
        Severity.WARNING: "A rank of run demo takes 1.6 times as long as the median of all before "
        "its first collective. It is rank 5."
    },
    at=43,
    not_yet=(14, 50),
)

_BRIEF = Example(
    title="an occasional slow minute",
    minutes=20,
    tracks=(
        Track(ranks.STRAGGLER_SLOWDOWN, (1.1, 1.1, 1.8, 1.1) * 5),
        Track(ranks.STRAGGLER_DELAY, (0.1, 0.1, 0.5, 0.1) * 5),
    ),
)

_WITHIN = Example(
    title="ranks that differ by a quarter",
    minutes=20,
    tracks=(
        Track(ranks.STRAGGLER_SLOWDOWN, (1.25,)),
        Track(ranks.STRAGGLER_DELAY, (0.2,)),
    ),
)

_CHEAP = Example(
    title="three milliseconds instead of two, in steps of a second",
    minutes=20,
    tracks=(
        Track(ranks.STRAGGLER_SLOWDOWN, (1.5,)),
        Track(ranks.STRAGGLER_DELAY, (0.001,)),
    ),
)

_UNKNOWN = Example(
    title="ranks whose first collective cannot be determined",
    minutes=15,
    without=(ranks.STRAGGLER_SLOWDOWN, ranks.STRAGGLER_DELAY),
)

_HUNG = Example(
    title="a run that hung after a slow minute",
    minutes=18,
    tracks=(
        Track(ranks.STRAGGLER_SLOWDOWN, (*flat(1.05, 9), 1.6)),
        Track(ranks.STRAGGLER_DELAY, (*flat(0.03, 9), 0.4)),
        Track(run.STEP, ramp(5000, 60, 10)),
        Track(run.STEPS, ramp(5000, 60, 10)),
    ),
)


_NEVER = Example(
    title="a loss that is computed past the wrapper",
    minutes=20,
    tracks=(Track(gradient_layers.REPLICA_UNREDUCED_STEPS, (*flat(0, 5), *ramp(60, 60, 8), 0)),),
    fires={
        Severity.CRITICAL: "Ranks that hold copies of the model of run demo have updated them with "
        "different gradients for 360 consecutive steps: these were not reduced, or others were "
        "added to reduced ones. Each rank, or each group of some ranks, trains a model of its own."
    },
    at=10,
    not_yet=(4, 14),
)

_AVERAGED = Example(
    title="local SGD, which averages the weights now and then",
    minutes=12,
    tracks=(Track(gradient_layers.REPLICA_UNREDUCED_STEPS, (0,)),),
)


_WEIGHTS = {"kind": "weights"}

_LABELS = {"kind": "weights", "step": "5600", "ranks": "3", "tensors": "norm.weight"}

_RATES = {"lowest": "1e-05", "highest": "0.0001"}

_APART = Example(
    title="weights that are compared periodically, and stay unequal for half an hour",
    minutes=53,
    tracks=(
        Track(gradient_layers.REPLICA_DIVERGENCE, (*flat(0, 10), *flat(1, 30), 0), _WEIGHTS),
        Track(gradient_layers.REPLICA_DIVERGENCE_STEPS, (*flat(0, 10), 1), _WEIGHTS),
        Track(gradient_layers.DIVERGENT_RANKS, (*flat(None, 10), *flat(1, 30), "stale"), _LABELS),
        Track(gradient_layers.DIVERGENT_RATES, (*flat(None, 10), *flat(1, 30), "stale"), _RATES),
    ),
    fires={
        Severity.CRITICAL: "Replicas of run demo are not equal. Last seen: kind weights, step "
        "5600, ranks 3, tensors norm.weight. Learning rates of the ranks: lowest 1e-05, highest "
        "0.0001."
    },
    at=35,
    not_yet=(9, 52),
)

_FOR_A_STEP = Example(
    title="gradients that differed on some steps between two scrapes",
    minutes=26,
    tracks=(
        Track(gradient_layers.REPLICA_DIVERGENCE_STEPS, (*flat(0, 10), *ramp(1, 1, 2)),
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
        Track(gradient_layers.REPLICA_UNEXPLAINED, (*flat(0, 5), *flat(1, 10), 0)),
        Track(
            gradient_layers.LOCAL_STATE,
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
    without=(gradient_layers.REPLICA_DIVERGENCE,),
)


EXAMPLES = {
    "MpAgentRankStalled": Examples(
        firing=(_LATE, _IN_FIRST_STEP, _AFTER_PAUSES),
        quiet=(_ALL_ALIKE, _IN_STEP, _SLOW_STEPS, _EVALUATION, _ROLLOUTS, _ENDED, _YOUNG),
    ),
    "MpAgentRankStraggler": Examples(
        firing=(_SLOW_RANK,),
        quiet=(_BRIEF, _WITHIN, _CHEAP, _UNKNOWN, _HUNG),
    ),
    "MpAgentGradientsNotReduced": Examples(
        firing=(_NEVER,),
        quiet=(_AVERAGED,),
    ),
    "MpAgentReplicaDivergence": Examples(
        firing=(_APART, _FOR_A_STEP, _STATE),
        quiet=(_EQUAL, _NOTHING_TO_COMPARE),
    ),
}
