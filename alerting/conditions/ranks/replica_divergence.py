"""MpAgentReplicaDivergence."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat, ramp
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, any_of
from mp_agent.alerting.expressions.signals import Count, Number, Series
from mp_agent.alerting.first_line.triage import Triage
from mp_agent.alerting.severity import Severity

_WINDOW = duration("incident_window")
_DIVERGED = Series(metric=metrics.REPLICA_DIVERGENCE)
_STEPS = Count(metric=metrics.REPLICA_DIVERGENCE_STEPS, window=_WINDOW)
_WEIGHTS = {"kind": "weights"}
_LABELS = {"kind": "weights", "step": "5600", "ranks": "3", "tensors": "norm.weight"}
_UNEXPLAINED = Series(metric=metrics.REPLICA_UNEXPLAINED)

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

REPLICA_DIVERGENCE = Condition(
    name="MpAgentReplicaDivergence",
    summary="Replicas are not equal.",
    meaning="Ranks train different models: each averages gradients of weights that it does not "
    "have, and a checkpoint contains only one of the models.",
    confirm="mp_agent_divergent_ranks_info names the ranks that differ from the majority, and "
    "the step, and the tensors; mp_agent_replica_divergence_steps_total shows since when.",
    remedies=(
        "Stop, and resume from a checkpoint from before the ranks parted, so that all load the "
        "same weights. Weights are compared now and then: they parted after the last comparison "
        "that found them equal, up to some hundred steps before the one that is named.",
        "If it is always the same rank or node, remove it and test its memory and GPU (XID, ECC).",
        "Check for rank-specific operations: a seed instead of broadcast weights, updates under "
        "no_sync, parameters or buffers that are changed outside the optimizer, parameters that "
        "the wrapper ignores.",
    ),
    why="Data-parallel training only averages gradients and never compares weights: a flipped "
    "bit on one rank persists, and the difference grows with every update.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="damaged, since ranks hold different ones",
                now="stop, and resume from a checkpoint from before the ranks parted, earlier than "
                "{first}",
            ),
            when=any_of(Compare(_DIVERGED, ">", Number(0)), happened(_STEPS)),
            description="Replicas of run {run} are not equal.{mp_agent_divergent_ranks_info| "
            "Last seen: |kind step ranks tensors}",
            reason="No delay: the comparison is exact.",
        ),
        Level(
            severity=Severity.WARNING,
            when=Compare(_UNEXPLAINED, ">", Number(0)),
            description="Ranks of run {run} train the same weights, but {value|count} frozen "
            "parameters or buffers differ.{mp_agent_local_state_info| Seen: |why tensors}",
            reason="No delay: the comparison is exact.",
        ),
    ),
    firing=(_APART, _FOR_A_STEP, _STATE),
    quiet=(_EQUAL, _NOTHING_TO_COMPARE),
)
