"""Alerts on a rank whose losses are unlike those of all others."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions.terms import Count, Series
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.severity import Severity
from mp_agent.catalog.metrics import ranks

_OUTLIERS = Count(metric=ranks.RANK_OUTLIER_STEPS, window=duration("incident_window"))

RANK_LOSS_OUTLIERS = Condition(
    name="MpAgentRankLossOutliers",
    summary="A rank has single losses far above all others.",
    meaning="Some batches of one rank are unlike all other data: their gradients are averaged into "
    "every update all the same.",
    confirm="mp_agent_rank_loss_outlier_info has the rank and its losses; plot mp_agent_rank_loss.",
    remedies=(
        "Check the samples of that rank at those steps: corrupt records, wrong labels, sequences "
        "of one token.",
        "Check its shard: read it with the checksum of its source.",
        "Skip its batches above a limit until the data is corrected.",
    ),
    why="All ranks train the same weights, so that losses of one rank alone come from its data or "
    "its hardware.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_OUTLIERS),
            description="Single losses of one rank of run {run} were far above all losses of the "
            "others.{mp_agent_rank_loss_outlier_info| Last seen: |rank loss usual highest}",
            reason="No delay: three losses among 64, and none of another rank's, are no chance.",
        ),
    ),
    quiet=("losses that scatter widely on all ranks",),
    needs=((Quantity.RANKS,),),
    guidance=Guidance(
        harm="Bad batches of one rank disturb every update that they are part of. Investigate "
        "within the hour.",
        query='increase(mp_agent_rank_loss_outlier_steps_total{run="RUN"}[15m])',
        reading="Steps at which three or more of the last 64 losses of a rank were at least four "
        "times as far from the usual loss as the highest one of all other ranks, and twice the "
        "usual loss.",
        causes=(
            "A shard with corrupt records, or with wrong labels.",
            "A worker or a file system that returns damaged data on that node.",
            "A device that computes wrong values now and then.",
        ),
        false_positives=("Ranks that have different tasks or sources of data on purpose.",),
        samples=("check_batch",),
        panels=(panels.RANK_LOSSES, panels.LOSS),
    ),
)


RANK_LOSS_UNLIKE = Condition(
    name="MpAgentRankLossUnlike",
    summary="The losses of a rank are unlike those of all others.",
    meaning="One rank trains on other data, or with other labels, than the rest; the average "
    "gradient follows both.",
    confirm="mp_agent_rank_loss_level_info has the rank, its usual loss and that of the others; "
    "plot mp_agent_rank_loss.",
    remedies=(
        "Check the shard of that rank: its labels, its tokenizer, its preprocessing, padding.",
        "Shuffle the samples over all ranks.",
        "Compute the loss of one batch on this rank and another one: if they differ, check the "
        "device.",
    ),
    why="All ranks train the same weights; of samples that are dealt out at random their losses "
    "have one level.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(Series(metric=ranks.RANK_LEVEL_STEPS)),
            keep=duration("rank_keep"),
            description="For {value|count} steps the losses of one rank of run {run} have been "
            "unlike those of all others."
            "{mp_agent_rank_loss_level_info| It is: |rank loss usual highest}",
            reason="No delay: three quarters of 32 losses are twice, or half, those of the others.",
        ),
    ),
    quiet=("losses that scatter widely on all ranks",),
    needs=((Quantity.RANKS,),),
    guidance=Guidance(
        harm="A part of each update comes from data unlike the rest. Investigate within the day, "
        "and at once where labels may be wrong.",
        query='mp_agent_rank_loss_level_steps{run="RUN"} > 0',
        reading="Three quarters of the rank's last 32 losses are above twice the upper quartiles "
        "of all other ranks, or below half of their lower ones.",
        causes=(
            "A shard with wrong labels, another tokenizer, or damaged records.",
            "A rank that masks its labels, pads or normalizes otherwise.",
            "Samples that are dealt out by source or length instead of at random.",
        ),
        false_positives=("Ranks that have different tasks or sources of data on purpose.",),
        samples=("check_batch",),
        panels=(panels.RANK_LOSSES, panels.LOSS),
    ),
)


CONDITIONS = (RANK_LOSS_OUTLIERS, RANK_LOSS_UNLIKE)
