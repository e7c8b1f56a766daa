"""Guidance on runs, their ranks and their agents."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.panels import Guidance

RANKS = {
    "MpAgentGradientsNotReduced": Guidance(
        harm="Every rank trains a model of its own, on its part of the data, at the cost of all "
        "ranks; a checkpoint holds one of the models. Stop the run and correct the loop.",
        query='mp_agent_replica_unreduced_steps{run="RUN"}',
        reading="The number of consecutive steps on which ranks that hold copies of one model had "
        "gradients of their own and weights that were not equal. A wrapper that says it reduces, "
        "while no two ranks have the same gradients, counts from the first step on.",
        causes=(
            "The loss is computed through model.module, or by a method of the inner model: the "
            "forward pass of DistributedDataParallel, which prepares the reduction, never runs.",
            "The last micro-batch runs under no_sync(), by an inverted condition or an off-by-one.",
            "A communication hook that returns its bucket without a collective.",
            "The script was started on several ranks without a wrapper or a reduction by hand.",
        ),
        false_positives=(
            "Local SGD or DiLoCo whose period is longer than unreduced_steps: raise it.",
            "Models of one seed that ranks train apart on purpose: declare them by "
            "mp_agent.declare(model).",
        ),
        samples=("compare_replicas", "save_and_resume"),
        panels=(panels.REPLICAS, panels.WHICH_DIFFER),
    ),
    "MpAgentReplicaDivergence": Guidance(
        harm="The ranks train different models while averaging their gradients: the result is "
        "neither model. Every step makes it worse; stop the run and keep the evidence.",
        query='last_over_time(mp_agent_divergent_ranks_info{run="RUN"}[1h])',
        reading="The ranks that differ from the others, since which step, and in what: reduced "
        "gradients, weights before the update, or state (frozen parameters and buffers); and the "
        "tensors, if not all differ. mp_agent_replica_divergence is 1 while they differ.",
        causes=(
            "Parameters that are excluded from the gradient reduction: unused in some ranks' "
            "forward pass, ignored by the wrapper, or added after wrapping.",
            "Buffers, such as codebooks, that follow each rank's own data without a reduction.",
            "Silent data corruption by hardware: one GPU computes or stores wrong values.",
            "Parameters that are changed outside the wrapped step on one rank only.",
            "Ranks that resumed from different checkpoints, or were initialized with different "
            "seeds.",
        ),
        false_positives=(
            "Models that differ between ranks by design, such as unwrapped parameters of an "
            "ensemble: wrap them, or give them distinct names.",
        ),
        samples=("compare_replicas", "save_and_resume"),
        panels=(panels.WHICH_DIFFER, panels.REPLICAS, panels.XID_ERRORS),
    ),
    "MpAgentRankNonFinite": Guidance(
        harm="The next reduction spreads the values of this rank to the gradients of all ranks. "
        "Without a scaler the weights of all ranks are lost: stop the run.",
        query='last_over_time(mp_agent_first_nonfinite_info{run="RUN",rank!=""}[1h])',
        reading="The step and the rank where it started, before any reduction. "
        "mp_agent_rank_loss_nonfinite_steps_total shows the ranks affected since then: a single "
        "rank indicates its data or its hardware, all ranks indicate the model. With "
        '`phase="backward"` the loss of the step was finite, and the rank\'s own gradients were '
        "not: `measure_local_gradients` looks at them before they are reduced.",
        causes=(
            "Corrupt samples in this rank's shard of the data.",
            "A failing GPU: check for XID errors, ECC errors and thermal throttling on its host.",
            "A very long or empty sample that only this rank has processed so far: a mean over no "
            "tokens, an attention mask that hides everything.",
            "A different software version on one node: driver, CUDA or library.",
        ),
        false_positives=(
            "A single overflowed forward pass in FP16 that GradScaler skipped; the alert fires "
            "only if the overflow persists.",
        ),
        samples=("check_batch", "find_the_operation"),
        panels=(panels.NONFINITE_RANKS, panels.XID_ERRORS, panels.FIRST_NONFINITE),
    ),
    "MpAgentRankStraggler": Guidance(
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
    "MpAgentRankStalled": Guidance(
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
    "MpAgentCoverageLow": Guidance(
        harm="Training may be healthy, but norms and counts cover only part of it, and conditions "
        "on norms are not evaluated in the meantime.",
        query='mp_agent_missing_rank_info{run="RUN"}',
        reading="The ranks that the merged numbers do not include. Ranks of a single host indicate "
        "a problem with its node agent, or with its connection to the root agent.",
        causes=(
            "A node agent that died or was never started: with node_agent = external, check its "
            "process or sidecar.",
            "The root agent is unreachable from that node: firewall, network policy, a closed "
            "port, a name that does not resolve.",
            "Agents of different versions, or without the run's token: their log says so.",
            "Ranks that have ended while the others continue, as elastic jobs allow.",
        ),
        false_positives=("The first minutes of a large run, while its nodes start one by one.",),
        samples=("check_agents",),
        panels=(panels.WHICH_ARE_MISSING, panels.COVERAGE, panels.RANKS_GONE),
    ),
}


RUNS = {
    "MpAgentRunStalled": Guidance(
        harm="The job occupies its machines without progress. Warning: investigate when possible. "
        "Critical: half an hour is lost, and there is no sign that the run will continue; act.",
        query='mp_agent_standing_seconds{run="RUN"} > 600',
        reading="The time in seconds without a step in the current phase; one series per target, "
        "since two jobs may train under one name. mp_agent_rank_phase_info shows the phase of each "
        "rank.",
        causes=(
            "One rank hangs or is dead, and the others wait for it in a collective.",
            "Storage: a checkpoint that is being written, or data that does not arrive.",
            "An evaluation or a checkpoint that is not marked with mp_agent.phase.",
            "A network fault: NCCL waits until its timeout, by default ten minutes or more.",
        ),
        false_positives=(
            "A pause of more than 45 minutes that is no training step, and more than twice any "
            "before: mark it with mp_agent.phase.",
            "A step that takes far longer than ten of its predecessors, such as a recompilation.",
        ),
        samples=("dump_stacks", "mark_phases"),
        panels=(panels.STATE, panels.STEPS_PER_SECOND, panels.RANKS_BY_PHASE),
    ),
    "MpAgentRunFailed": Guidance(
        harm="The job has ended; progress since the last checkpoint is lost. Its machines are free "
        "or idle until the job is restarted.",
        query='last_over_time(mp_agent_run_end_info{run="RUN"}[1h])',
        reading="The label reason: failed means an exception, killed a signal that ended the "
        "process before it could report (out of memory, preemption), unknown neither.",
        causes=(
            "An exception on one rank, which ended the others through their collectives.",
            "Out of memory on a GPU (failed) or on the host (killed).",
            "Preemption, a time limit of the scheduler, a node that was drained.",
            "A GPU or network fault: NCCL errors on several ranks in the same second.",
        ),
        false_positives=(
            "A job that was cancelled on purpose.",
            "A script that ends with os._exit or a signal when it has finished, as workers of Ray "
            "Train do: end it normally, or call mp_agent.shutdown() before.",
        ),
        samples=("save_and_resume",),
        panels=(panels.END, panels.STATE, panels.RANKS_GONE),
    ),
    "MpAgentPrecisionLint": Guidance(
        harm="Nothing is lost by the finding itself. Read it before the next start, and at once "
        "where the run already shows the alert that the rule names.",
        query='mp_agent_lint_findings{run="RUN"}',
        reading="Findings per rule. mp-agent check prints the lines, and the log of the root node "
        "agent has the first twenty.",
        causes=(
            "Code written for FP32 to which mixed precision was added later.",
            "Clipping, accumulation or a second optimizer added to a loop with a GradScaler.",
            "A model or its inputs cast to 16 bits by hand instead of by autocast.",
        ),
        false_positives=(
            "The code is right for a reason that the check cannot see: silence the line, or the "
            "rule in pyproject.toml; both count here as well.",
            "The line is never reached in this run.",
        ),
        samples=("clip_after_unscale", "stable_operations"),
        panels=(panels.CODE_FINDINGS,),
    ),
    "MpAgentRunRestarting": Guidance(
        harm="The job occupies its machines without getting beyond its last checkpoint; no attempt "
        "lasts long enough for MpAgentRunFailed. Act: it does not recover by itself.",
        query='increase(mp_agent_run_attempts_total{run="RUN"}[1h])',
        reading="The number of starts of the run in the last hour. mp_agent_run_info has the "
        "attempt as a label.",
        causes=(
            "An error in the script or its data that recurs at the same step.",
            "A checkpoint that cannot be loaded, or a full disk.",
            "A faulty GPU or network interface on one node, where each attempt fails again.",
            "Out of memory at the first large batch.",
        ),
        false_positives=(
            "An elastic job on machines that join and leave every few minutes.",
            "A script that is started repeatedly under the same name: give each run its own name.",
        ),
        samples=("save_and_resume",),
        panels=(panels.STATE, panels.END),
    ),
    "MpAgentRunVanished": Guidance(
        harm="The state of the run is unknown: it may be dead, or train unmonitored. Find out "
        "within the hour; if it is dead, progress since the last checkpoint is lost.",
        query='last_over_time(mp_agent_run_active{run="RUN"}[2h])',
        reading="1: the run was active when it was last seen. The labels instance, node and pod "
        "name the place.",
        causes=(
            "The node failed, or was reclaimed with everything on it.",
            "The pod was deleted or evicted, and the node agent with it.",
            "Only the node agent was killed, for its memory or by a cleanup, and the run continues "
            "without it.",
            "Service discovery no longer lists the target: labels, namespaces, file_sd files.",
        ),
        false_positives=(
            "A job that was deleted on purpose together with its pod, before its end was scraped: "
            "give the agent time to linger (termination grace of 120 s).",
        ),
        samples=("save_and_resume", "check_agents"),
        panels=(panels.STATE, panels.END),
    ),
    "MpAgentTelemetryDegraded": Guidance(
        harm="Training is not affected, but its telemetry has gaps: lost records are missing from "
        "counters and norms, dropped series from dashboards.",
        query='{__name__=~"mp_agent_(probe_errors|setting_errors|records_dropped|series_dropped)'
        '_total", run="RUN"} > 0',
        reading="What was lost, and on which node. Errors of the probe are described once per kind "
        "in the rank's standard error and in the node agent's log.",
        causes=(
            "series_dropped: the model has more layers than max_series allows: raise it.",
            "records_dropped: the node agent had no CPU for so long that the ring was overwritten, "
            "or other nodes' rows arrived after merge_deadline_seconds.",
            "setting_errors: an MP_AGENT_ variable with an invalid value; in Kubernetes, a Service "
            "named mp-agent creates such variables.",
            "probe_errors: a model or wrapper that the probe does not support: please report it "
            "with the log.",
        ),
        false_positives=(
            "A burst of drops while a checkpoint overloads the node: no action is needed if it "
            "does not recur.",
        ),
        samples=("check_agents",),
        panels=(panels.AGENT_ERRORS, panels.DROPPED_RECORDS, panels.DROPPED_SERIES),
    ),
}
