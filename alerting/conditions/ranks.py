"""Alerts on ranks that differ: replicas that part, ranks that lag or stall."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import active, at_target, happened, standing, stopped
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import (
    AtTarget,
    Compare,
    Count,
    Number,
    Series,
    all_of,
    any_of,
    limit,
    unless,
)
from mp_agent.alerting.first_line import NAN_WRITTEN, ROLL_BACK, Triage
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.remedies import GoBack
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import gradient_layers, ranks

_GRADIENTS_NOT_REDUCED_STEPS = Series(metric=gradient_layers.REPLICA_UNREDUCED_STEPS)


GRADIENTS_NOT_REDUCED = Condition(
    name="MpAgentGradientsNotReduced",
    summary="Gradients were not reduced, or not all of them.",
    meaning="Every rank steps with gradients of its own, or adds its own to reduced ones, so that "
    "as many models are trained as there are ranks; a checkpoint contains one of them.",
    confirm="mp_agent_replica_unreduced_steps is the number of steps since the ranks last had "
    "equal weights; mp_agent_rank_loss of the ranks part.",
    remedies=(
        "Call the wrapper itself for every loss of a step: loss = model(batch), not "
        "model.module(batch), which bypasses DistributedDataParallel and its reduction.",
        "Leave no_sync() before the forward pass of the last micro-batch: its backward reduces "
        "what all of them have added up, and what is added later is not reduced.",
        "Without a wrapper, wrap the model in DistributedDataParallel, or average the gradients "
        "over all ranks before optimizer.step().",
        "Under tensor parallelism, give all ranks of a group the same batch.",
        GoBack("Resume from a checkpoint, so that all ranks load the same weights."),
        "For local SGD with a longer period, raise unreduced_steps above it; ranks that train "
        "models of their own on purpose are declared so: mp_agent.declare(model).",
    ),
    why="Nothing fails when a reduction is left out: each loss falls, only more slowly and to a "
    "worse model than the batch size of all ranks together would give.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(weights="damaged, since ranks hold different ones", now=ROLL_BACK),
            when=Compare(_GRADIENTS_NOT_REDUCED_STEPS, ">", Number(0)),
            counts_steps=True,
            description="Ranks that hold copies of the model of run {run} have updated them with "
            "different gradients for {value|count} consecutive steps: these were not reduced, or "
            "others were added to reduced ones. Each rank, or each group of some ranks, trains a "
            "model of its own.",
            reason="No delay: the condition already requires unreduced_steps consecutive steps, or "
            "gradients that a wrapper says are the same and of which no two ranks' are.",
        ),
    ),
    quiet=("local SGD, which averages the weights now and then",),
    needs=((Quantity.REPLICAS,),),
    knobs=(less_above("unreduced_steps"),),
    guidance=Guidance(
        harm="Every rank trains a model of its own, on its part of the data, at the cost of all "
        "ranks; a checkpoint holds one of the models. Stop the run and correct the loop.",
        query='mp_agent_replica_unreduced_steps{run="RUN"}',
        reading="The number of consecutive steps on which ranks that hold copies of one model had "
        "gradients of their own and weights that were not equal; steps between two measured ones "
        "count, too. A wrapper that says it reduces, while no two ranks have the same gradients, "
        "counts from the first step on.",
        causes=(
            "A loss is computed through model.module, or by a method of the inner model: without "
            "the forward pass of DistributedDataParallel, which prepares the reduction, its "
            "gradients stay those of the rank. Those of a second loss are added to reduced ones.",
            "The last micro-batch runs under no_sync(), by an inverted condition or an off-by-one: "
            "its gradients are not reduced, whether or not those of earlier ones were.",
            "A communication hook that returns its bucket without a collective.",
            "The script was started on several ranks without a wrapper or a reduction by hand.",
            "The process group of a reduction by hand has a part of the ranks, such as a node's.",
            "Under FSDP2 with tensor parallelism, ranks that split the same tensors get different "
            "batches: the norms that all of them hold have different gradients.",
        ),
        false_positives=(
            "Local SGD or DiLoCo whose period is longer than unreduced_steps: raise it.",
            "Models of one seed that ranks train apart on purpose: declare them by "
            "mp_agent.declare(model).",
        ),
        samples=("compare_replicas", "save_and_resume"),
        panels=(panels.REPLICAS, panels.WHICH_DIFFER),
    ),
)


_RANK_STALLED_WINDOW = duration("rank_stall_window")
_LAGGING = at_target(ranks.RANKS_LAGGING)


RANK_STALLED = Condition(
    name="MpAgentRankStalled",
    summary="Some ranks are stuck, and all others wait for them.",
    meaning="The job occupies its machines without training: some ranks have entered a "
    "collective that the others never enter.",
    confirm="mp_agent_lagging_rank_info names the ranks that are behind and their phase; py-spy "
    "dump on one of them shows the line of code.",
    remedies=(
        "Check those ranks' logs, data loaders and GPUs; the others only wait.",
        "If a rank is gone, check for the out-of-memory killer, preemption and node failures.",
        "Restart from the last checkpoint, without the node if it is faulty.",
    ),
    why="A collective completes when the last rank has entered it, so the ranks that are behind "
    "are the cause, and the others wait.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="intact, but not saved since the last checkpoint",
                now="do not wait: restart from the last checkpoint, without the node of the ranks "
                "that are behind",
                updated=Triage(
                    weights=NAN_WRITTEN,
                    now="do not wait: restart from {checkpoint}, without the node of the ranks "
                    "that are behind",
                ),
            ),
            when=AtTarget(
                all_of(Compare(_LAGGING, ">", Number(0)), stopped(_RANK_STALLED_WINDOW), active())
            ),
            description="{value|count} rank(s) of run {run} are behind the others, and no step "
            "was made for <rank_stall_window>.{mp_agent_lagging_rank_info| Behind: |rank phase}",
            reason="No delay: the condition itself spans five minutes and ten usual steps.",
        ),
    ),
    quiet=(
        "a hang of all ranks, none of which can be named",
        "ranks in different phases while steps are made",
        "steps of four minutes, in which ranks reach the collective one by one",
        "rank 0 evaluates while the others wait for it",
        "rollouts of one rank, for which the others wait, no longer than an earlier one",
        "a run that ended, some ranks earlier than others",
        "ranks that start one by one",
    ),
    needs=((Quantity.RANKS, Quantity.LIFE),),
    guidance=Guidance(
        harm="The job makes no progress: the other ranks wait in a collective for the named ones. "
        "It does not continue until the process group's timeout ends it; act now.",
        query='mp_agent_lagging_rank_info{run="RUN"}',
        reading="The ranks that are behind the furthest one, and their phase; gone means that the "
        "process has ended, or that its node does not report. They are the cause; the others wait "
        "for them.",
        causes=(
            "The rank hangs in its data loader: dead worker, network storage, a lock.",
            "It died, or is stopped: out of memory, a debugger, a GPU that fell off the bus.",
            "It took a different branch of the code, and entered no collective or another one.",
            "A long operation on this rank only, such as writing a checkpoint.",
        ),
        false_positives=(
            "Rank 0 evaluates or saves while the others wait: mark it with mp_agent.phase.",
            "A first step that compiles for many minutes on one rank.",
        ),
        samples=("dump_stacks", "mark_phases"),
        panels=(panels.LAGGING_RANKS, panels.RANKS_BY_PHASE, panels.XID_ERRORS),
    ),
)


_HOLD = duration("straggler_hold")
_SLOWDOWN = Series(metric=ranks.STRAGGLER_SLOWDOWN)
_COST = Series(metric=ranks.STRAGGLER_DELAY)
_MATTERS = limit("straggler_share") * Series(metric=ranks.STEP_USUAL)


RANK_STRAGGLER = Condition(
    name="MpAgentRankStraggler",
    summary="A rank slows down the others.",
    meaning="All ranks train at the speed of the slowest: its delay in each step delays the "
    "whole job.",
    confirm="Plot mp_agent_rank_compute_seconds by rank; mp_agent_straggler_info names the "
    "slowest, mp_agent_rank_info its host and GPU, and mp_agent_rank_step_part_seconds_total "
    "(with measure_step_parts) whether it is slow in data, forward or optimizer.",
    remedies=(
        "Check the rank's GPU: clocks, temperature, power limit, other processes on it, ECC.",
        "Check its data loader: workers, storage, longer sequences than on other ranks.",
        "Replace the node; if the rank is still slow, its share of the work is the cause, "
        "otherwise the machine.",
    ),
    why="Before its first collective a rank waits for no other rank, so a longer time there is "
    "due to its own device, data or share of the work.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=unless(
                all_of(
                    Compare(_SLOWDOWN, ">", limit("straggler_ratio")),
                    Compare(_COST, ">", _MATTERS),
                ),
                standing(_HOLD),
            ),
            hold=_HOLD,
            keep=duration("rank_keep"),
            description="A rank of run {run} takes {value|number} times as long as the median of "
            "all before its first collective.{mp_agent_straggler_info| It is rank |rank}",
            reason="Jitter is temporary; a rank that crosses the limit repeatedly raises one "
            "alert.",
        ),
    ),
    quiet=(
        "an occasional slow minute",
        "ranks that differ by a quarter",
        "three milliseconds instead of two, in steps of a second",
        "ranks whose first collective cannot be determined",
        "a run that hung after a slow minute",
    ),
    needs=((Quantity.RANKS,),),
    knobs=(less_above("straggler_ratio"),),
    guidance=Guidance(
        harm="All ranks wait for the slowest one in every step, so one slow GPU slows down the "
        "whole job. It costs time and money, not data; investigate during working hours.",
        query='mp_agent_straggler_slowdown{run="RUN"} * on (run) group_right () '
        'mp_agent_straggler_info{run="RUN"}',
        reading="The slowest rank, and its time before its first collective divided by the median "
        "of all ranks. The time within the collective is no indication: the fast ranks wait there. "
        "With measure_step_parts, mp_agent_rank_step_part_seconds_total says in which part of its "
        "steps it is slow: data "
        "is its input pipeline, forward and optimizer its machine or its share of the work, other "
        "what it does besides. On a GPU these are host times, and data also contains what the loop "
        "waits for between steps, such as loss.item().",
        causes=(
            "A GPU that is throttled by temperature or power, or runs at lower clocks.",
            "A data loader that is slower on this node: network storage, too few workers, CPU "
            "used by other processes.",
            "Unevenly distributed work: longer sequences, more experts, an unbalanced pipeline.",
            "A rank with additional work: logging, checkpointing, evaluation on rank 0.",
        ),
        false_positives=(
            "Pipeline stages, and experts with more tokens, differ by design: raise the "
            "threshold for such runs.",
        ),
        samples=("balance_batches",),
        panels=(
            panels.SLOWDOWN,
            panels.SLOWEST_RANKS,
            panels.SLOW_PARTS,
            panels.XID_ERRORS,
        ),
    ),
)


_REPLICA_DIVERGENCE_WINDOW = duration("incident_window")
_DIVERGED = Series(metric=gradient_layers.REPLICA_DIVERGENCE)
_REPLICA_DIVERGENCE_STEPS = Count(
    metric=gradient_layers.REPLICA_DIVERGENCE_STEPS, window=_REPLICA_DIVERGENCE_WINDOW
)
_UNEXPLAINED = Series(metric=gradient_layers.REPLICA_UNEXPLAINED)


REPLICA_DIVERGENCE = Condition(
    name="MpAgentReplicaDivergence",
    summary="Replicas are not equal.",
    meaning="Ranks train different models: each averages gradients of weights that it does not "
    "have, and a checkpoint contains only one of the models.",
    confirm="mp_agent_divergent_ranks_info names the ranks that differ from the majority, and "
    "the step, and the tensors; mp_agent_replica_divergence_steps_total shows since when.",
    remedies=(
        GoBack(
            "Stop, and resume from a checkpoint from before the ranks parted, so that all load the "
            "same weights. Weights are compared now and then: they parted after the last "
            "comparison that found them equal, up to 32 steps before the one that is named, or "
            "up to some hundred if only some tensors differ."
        ),
        "If it is always the same rank or node, remove it and test its memory and GPU (XID, ECC).",
        "Where only some tensors differ, add or unfreeze layers before DistributedDataParallel is "
        "made, or make it again: it reduces what required gradients then.",
        "Check for rank-specific operations: a seed instead of broadcast weights, updates under "
        "no_sync, a learning rate, weight decay or clipping of its own, parameters or buffers that "
        "are changed outside the optimizer, parameters that the wrapper ignores.",
    ),
    why="Data-parallel training only averages gradients and never compares weights: a flipped "
    "bit on one rank persists, and the difference grows with every update.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="damaged, since ranks hold different ones",
                now=f"{ROLL_BACK}; the ranks may have parted before it was seen",
            ),
            when=any_of(Compare(_DIVERGED, ">", Number(0)), happened(_REPLICA_DIVERGENCE_STEPS)),
            description="Replicas of run {run} are not equal.{mp_agent_divergent_ranks_info| "
            "Last seen: |kind step ranks tensors}"
            "{mp_agent_divergent_rates_info| Learning rates of the ranks: |lowest highest}",
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
    quiet=(
        "replicas that agree on every comparison",
        "a run without replicas",
    ),
    follows_from=("MpAgentGradientsNotReduced",),
    needs=((Quantity.REPLICAS,),),
    guidance=Guidance(
        harm="The ranks train different models while averaging their gradients: the result is "
        "neither model. Every step makes it worse; stop the run and keep the evidence.",
        query='last_over_time(mp_agent_divergent_ranks_info{run="RUN"}[1h])',
        reading="The ranks that differ from the others, since which step, and in what: reduced "
        "gradients, weights before the update, or state (frozen parameters and buffers); and the "
        "tensors, if not all differ. mp_agent_replica_divergence is 1 while they differ.",
        causes=(
            "Parameters that are excluded from the gradient reduction: unused in some ranks' "
            "forward pass, ignored by the wrapper, or added or unfrozen after wrapping.",
            "Buffers, such as codebooks, that follow each rank's own data without a reduction.",
            "Silent data corruption by hardware: one GPU computes or stores wrong values.",
            "Parameters that are changed outside the wrapped step on one rank only.",
            "A rank with another learning rate, weight decay or clip limit, such as one whose "
            "schedule follows its own loss.",
            "Ranks that resumed from different checkpoints, or were initialized with different "
            "seeds.",
            "Tensor-parallel ranks that get different batches, or different dropout before what "
            "they hold as copies.",
        ),
        false_positives=(
            "Models that differ between ranks by design, such as unwrapped parameters of an "
            "ensemble: wrap them, or give them distinct names.",
        ),
        samples=("compare_replicas", "save_and_resume"),
        panels=(panels.WHICH_DIFFER, panels.REPLICAS, panels.XID_ERRORS),
    ),
)


CONDITIONS = (
    RANK_STALLED,
    RANK_STRAGGLER,
    GRADIENTS_NOT_REDUCED,
    REPLICA_DIVERGENCE,
)
