"""Runbook texts: single ranks."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.record import Guidance

RANKS = {
    "MpAgentReplicaDivergence": Guidance(
        harm="The ranks train different models while they average their gradients: the result is "
        "neither. Every step makes it worse; stop the run and keep the evidence.",
        query='last_over_time(mp_agent_divergent_ranks_info{run="RUN"}[1h])',
        reading="Which ranks differ from the others, since which step, and in what: gradients once "
        "they are reduced, or weights. mp_agent_replica_divergence is 1 while they do.",
        causes=(
            "A hardware fault that corrupts silently: one GPU computes or stores wrongly.",
            "Parameters that are changed outside the wrapped step on one rank only.",
            "Ranks that resumed from different checkpoints, or initialised with different seeds.",
            "Parameters that are left out of the gradient reduction: unused in some ranks' "
            "forward pass, or added after wrapping.",
        ),
        false_positives=(
            "Models that are meant to differ between ranks, such as plain parameters of an "
            "ensemble: wrap them, or give them names of their own.",
        ),
        samples=("compare_replicas", "save_and_resume"),
        panels=(panels.WHICH_DIFFER, panels.REPLICAS, panels.XID_ERRORS),
    ),
    "MpAgentRankNonFinite": Guidance(
        harm="What this rank has is in everybody's gradients one reduction later. Without a scaler "
        "the weights of all ranks are lost: stop the run.",
        query='last_over_time(mp_agent_first_nonfinite_info{run="RUN",rank!=""}[1h])',
        reading="The step and the rank on which it began, before anything was mixed. "
        "mp_agent_rank_loss_nonfinite_steps_total says who has it since: one rank alone points at "
        "its data or its hardware, all of them at the model.",
        causes=(
            "Broken samples in this rank's shard of the data.",
            "A failing GPU: look for XID errors, ECC errors and thermal throttling on its host.",
            "A sample that is long or empty, which only this rank met so far: a mean over no "
            "tokens, an attention mask that hides everything.",
            "Another software version on one node: driver, CUDA or library.",
        ),
        false_positives=(
            "A single overflowed forward pass in FP16 that GradScaler skipped; it fires only when "
            "that does not pass.",
        ),
        samples=("check_batch", "find_the_operation"),
        panels=(panels.NONFINITE_RANKS, panels.XID_ERRORS, panels.FIRST_NONFINITE),
    ),
    "MpAgentRankStraggler": Guidance(
        harm="All ranks wait for the slowest in every step, so one slow GPU slows the whole job by "
        "as much. Nothing is lost but time and money; look in working hours.",
        query='mp_agent_straggler_slowdown{run="RUN"} * on (run) group_right () '
        'mp_agent_straggler_info{run="RUN"}',
        reading="The slowest rank, and its time before its first collective by the median of all "
        "ranks. The time in the collective itself says nothing: there the fast ones wait.",
        causes=(
            "A GPU that is throttled by heat or power, or runs at other clocks.",
            "A data loader that is slower on this node: network storage, too few workers, CPU "
            "taken by something else.",
            "Work that is unevenly spread: longer sequences, more experts, an uneven pipeline.",
            "A rank that does more than the others: logging, checkpointing, evaluation on rank 0.",
        ),
        false_positives=(
            "Pipeline stages, and experts with more tokens, differ by design: raise the "
            "threshold for such runs.",
        ),
        samples=("balance_batches",),
        panels=(panels.SLOWDOWN, panels.SLOWEST_RANKS, panels.XID_ERRORS),
    ),
    "MpAgentRankStalled": Guidance(
        harm="The job stands: the other ranks wait in a collective for the ones that are named. It "
        "will not go on by itself until the process group's timeout ends it; act now.",
        query='mp_agent_lagging_rank_info{run="RUN"}',
        reading="The ranks that have not come as far as the furthest one, and where they stand; "
        "gone means that the process is, or that nothing is heard of its node. They are the cause, "
        "the others wait for them.",
        causes=(
            "The rank hangs in its data loader: dead worker, network storage, a lock.",
            "It died, or is stopped: out of memory, a debugger, a GPU that fell off the bus.",
            "It took another branch of the code, and entered no collective or another one.",
            "Something long that only this rank does, such as writing a checkpoint.",
        ),
        false_positives=(
            "Rank 0 evaluates or saves while the others wait: mark it with mp_agent.phase.",
            "A first step that compiles for many minutes on one rank.",
        ),
        samples=("dump_stacks", "mark_phases"),
        panels=(panels.LAGGING_RANKS, panels.RANKS_BY_PHASE, panels.XID_ERRORS),
    ),
    "MpAgentCoverageLow": Guidance(
        harm="The training may be well, but norms and counts are of a part of it only, and "
        "conditions on norms are not judged meanwhile: you are partly blind.",
        query='mp_agent_missing_rank_info{run="RUN"}',
        reading="The ranks that the merged numbers lack. Ranks of one host mean that its node "
        "agent, or its way to the root agent, is the problem.",
        causes=(
            "A node agent that died, or was never started: with node_agent = external, look for "
            "its process or sidecar.",
            "The root agent cannot be reached from that node: firewall, network policy, a port "
            "that is not open, a name that does not resolve.",
            "Agents of different versions, or without the run's token: their log says so.",
            "Ranks that are gone while the others go on, as elastic jobs allow.",
        ),
        false_positives=(
            "The first minutes of a large run, while the nodes come up one after the other.",
        ),
        samples=("check_agents",),
        panels=(panels.WHICH_ARE_MISSING, panels.COVERAGE, panels.RANKS_GONE),
    ),
}
