"""Runbook texts: the run as a whole, and mp_agent itself."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.record import Guidance

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
