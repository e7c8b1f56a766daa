"""Metrics of ranks, and of what they wait for."""

from mp_agent.catalog.metric import (
    Reading,
    counter,
    gauge,
    info,
    rank_counter,
    rank_gauge,
    rank_info,
)
from mp_agent.records.health import OddRank
from mp_agent.records.views import RankView


def _rank_info(rank: RankView) -> Reading:
    labels = (
        rank.identity.host,
        str(rank.identity.local_rank),
        rank.facts.get("device", ""),
        rank.facts.get("gpu_uuid", ""),
    )
    return {labels: 1.0}


def _overhead(rank: RankView) -> Reading:
    if rank.values is None:
        return None
    columns = {"host": "host_overhead_ratio", "device": "device_overhead_ratio"}
    return {(resource,): rank.values.get(column) for resource, column in columns.items()}


RANK_METRICS = (
    rank_gauge(
        "mp_agent.rank.up",
        "",
        help="1 while the rank's process is alive, 0 after it has ended.",
        read=lambda rank: float(rank.up),
    ),
    rank_gauge(
        "mp_agent.rank.step",
        "{step}",
        help="Last step that this rank completed.",
        read=lambda rank: None if rank.step is None else float(rank.step),
    ),
    rank_gauge(
        "mp_agent.rank.last_step.timestamp",
        "s",
        help="Unix time at which the rank completed its last step.",
        read=lambda rank: rank.step_time_unix_seconds,
    ),
    rank_gauge(
        "mp_agent.rank.compute",
        "s",
        help="Time of the last step before the rank's first collective; absent if the first "
        "collective cannot be determined.",
        read=lambda rank: None if rank.values is None else rank.values.get("compute_seconds"),
    ),
    rank_gauge(
        "mp_agent.overhead",
        "1",
        labels=("resource",),
        help="Share of the time of recent steps that the rank's probe took, on the host and on "
        "the device. Host time is left out while the host is ahead of the device.",
        read=_overhead,
    ),
    rank_counter(
        "mp_agent.probe.device",
        "s",
        help="Device time that measuring gradients has taken on the rank.",
        count=lambda values: values.get("probe_device_seconds", 0.0),
    ),
    rank_gauge(
        "mp_agent.rank.loss",
        "{loss}",
        help="The rank's own loss on its last step; absent when it was not finite.",
        read=lambda rank: None if rank.values is None else rank.values.get("loss"),
    ),
    rank_counter(
        "mp_agent.rank.loss.nonfinite.steps",
        "{step}",
        help="Steps on which the rank's own loss was NaN or Inf.",
        count=lambda values: values.get("loss_nonfinite", 0.0),
    ),
    rank_info(
        "mp_agent.rank.phase.info",
        labels=("phase",),
        help="Current phase of the rank.",
        read=lambda rank: {(rank.state.phase_name,): 1.0},
    ),
    rank_info(
        "mp_agent.rank.info",
        labels=("host", "local_rank", "device", "gpu_uuid"),
        help="Where the rank runs; the value is always 1.",
        read=_rank_info,
    ),
)


_NAMED_AT_MOST = 16


STEP_USUAL = gauge(
    "mp_agent.step.usual",
    "s",
    help="Median time of the last 64 steps.",
    read=lambda run: run.usual_step_seconds,
)
STANDING = gauge(
    "mp_agent.standing",
    "s",
    help="Time since the run last completed a step, or changed between training and "
    "evaluation, a checkpoint or another phase.",
    read=lambda run: run.standing_seconds,
)
PAUSE_LONGEST = gauge(
    "mp_agent.pause.longest",
    "s",
    help="Longest time in training without a completed step from which the run recovered, "
    "halved every 12 hours: the duration of its rollouts and unmarked evaluations.",
    read=lambda run: run.longest_pause_seconds,
)
PHASE_LONGEST = gauge(
    "mp_agent.phase.longest",
    "s",
    help="Longest completed stay in the run's current phase outside training, after the "
    "first step, halved every 12 hours; absent in training.",
    read=lambda run: run.longest_phase_seconds,
)
STRAGGLER_SLOWDOWN = gauge(
    "mp_agent.straggler.slowdown",
    "{factor}",
    help="Time before the first collective of the slowest rank, divided by the median of "
    "all ranks; medians over 16 steps, the smallest of the last four.",
    read=lambda run: None if run.straggler is None else run.straggler.slowdown,
)
STRAGGLER_DELAY = gauge(
    "mp_agent.straggler.delay",
    "s",
    help="Time before the first collective of the slowest rank, less the median of all ranks: "
    "what it costs per step.",
    read=lambda run: None if run.straggler is None else run.straggler.delay_seconds,
)
STRAGGLER = info(
    "mp_agent.straggler.info",
    labels=("rank",),
    help="The rank that takes longest before the first collective.",
    read=lambda run: None if run.straggler is None else {(str(run.straggler.rank),): 1.0},
)
RANKS_LAGGING = gauge(
    "mp_agent.ranks.lagging",
    "{rank}",
    help="Ranks that are behind the furthest one while no step is made; 0 while steps are "
    "made, and while a rank starts, evaluates or saves a checkpoint.",
    read=lambda run: float(len(run.laggards)),
)
LAGGING_RANK = info(
    "mp_agent.lagging_rank.info",
    labels=("rank", "phase"),
    help="A rank that is behind the furthest one while no step is made, and its phase; 16 "
    "ranks at most. gone: its process has ended, or its node does not report.",
    read=lambda run: {(str(rank.rank), rank.phase): 1.0 for rank in run.laggards[:_NAMED_AT_MOST]},
)

WAITING_METRICS = (
    STEP_USUAL,
    STANDING,
    PAUSE_LONGEST,
    PHASE_LONGEST,
    STRAGGLER_SLOWDOWN,
    STRAGGLER_DELAY,
    STRAGGLER,
    RANKS_LAGGING,
    LAGGING_RANK,
)


def _odd(found: OddRank | None) -> Reading:
    if found is None:
        return None
    numbers = (found.loss, found.usual, found.highest)
    return {(str(found.rank), *(f"{number:.4g}" for number in numbers)): 1.0}


RANK_OUTLIER_STEPS = counter(
    "mp_agent.rank_loss.outlier.steps",
    "{step}",
    help="Steps at which three or more of the last 64 losses of one rank were far above all losses "
    "that the other ranks had within them.",
    count=lambda change: float(change.loss_outliers),
)
RANK_OUTLIER = info(
    "mp_agent.rank_loss_outlier.info",
    labels=("rank", "loss", "usual", "highest"),
    help="A rank with losses far above all others', its highest loss, the usual loss, and the "
    "highest of all other ranks.",
    read=lambda run: _odd(run.loss_outliers),
)
RANK_LEVEL_STEPS = gauge(
    "mp_agent.rank_loss.level.steps",
    "{step}",
    help="Losses of one rank, of the last 32, by which its level is twice as high as that of all "
    "other ranks, or half as high; else 0.",
    read=lambda run: 0.0 if run.loss_level is None else float(run.loss_level.steps),
)
RANK_LEVEL = info(
    "mp_agent.rank_loss_level.info",
    labels=("rank", "loss", "usual", "highest"),
    help="A rank whose losses are unlike all others', its usual loss, that of the others, and "
    "their upper quartile.",
    read=lambda run: _odd(run.loss_level),
)

RANK_LOSS_METRICS = (RANK_OUTLIER_STEPS, RANK_OUTLIER, RANK_LEVEL_STEPS, RANK_LEVEL)
