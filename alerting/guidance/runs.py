"""Runbook texts: the run as a whole, and mp_agent itself."""

from mp_agent.alerting.guidance import panels
from mp_agent.alerting.guidance.record import Guidance

RUNS = {
    "MpAgentRunStalled": Guidance(
        harm="The job holds its machines and makes nothing. Warning: look when you can. Critical: "
        "half an hour is lost, and nothing says that it will go on; act.",
        query='mp_agent_standing_seconds{run="RUN"} > 600',
        reading="For how many seconds the run has made no step in its present phase. "
        "mp_agent_rank_phase_info tells where each rank stands.",
        causes=(
            "One rank hangs or is dead, and the others wait for it in a collective.",
            "Storage: a checkpoint that is being written, or data that does not arrive.",
            "An evaluation or a checkpoint that nobody has marked with mp_agent.phase.",
            "A network fault: NCCL waits until its timeout, by default ten minutes or more.",
        ),
        false_positives=(
            "A long pause that is no training step: mark it with mp_agent.phase.",
            "A step that takes far longer than ten of its predecessors, such as a recompilation.",
        ),
        samples=("dump_stacks", "mark_phases"),
        panels=(panels.STATE, panels.STEPS_PER_SECOND, panels.RANKS_BY_PHASE),
    ),
    "MpAgentRunFailed": Guidance(
        harm="The job is over; what was trained since the last checkpoint is lost. Its machines "
        "are free or idle until somebody starts it again.",
        query='last_over_time(mp_agent_run_end_info{run="RUN"}[1h])',
        reading="The label reason: failed is an exception, killed a signal that left no time for a "
        "word (out of memory, preemption), unknown neither.",
        causes=(
            "An exception on one rank, which ended the others through their collectives.",
            "Out of memory on a GPU (failed) or on the host (killed).",
            "Preemption, a time limit of the scheduler, a node that was drained.",
            "A GPU or network fault: NCCL errors on several ranks at the same second.",
        ),
        false_positives=(
            "A job that somebody cancelled on purpose.",
            "A script that leaves by os._exit or a signal when it has finished: end it normally, "
            "or call mp_agent.shutdown() before.",
        ),
        samples=("save_and_resume",),
        panels=(panels.END, panels.STATE, panels.RANKS_GONE),
    ),
    "MpAgentRunRestarting": Guidance(
        harm="The job holds its machines and gets no further than its last checkpoint; no attempt "
        "lasts long enough for MpAgentRunFailed. Act: it will not heal by itself.",
        query='increase(mp_agent_run_attempts_total{run="RUN"}[1h])',
        reading="How often the run was started in the last hour. mp_agent_run_info tells the "
        "attempt by its label.",
        causes=(
            "An error in the script or its data that comes back at the same step.",
            "A checkpoint that cannot be loaded, or a disk that is full.",
            "A broken GPU or network interface on one node, on which each attempt fails anew.",
            "Out of memory at the first large batch.",
        ),
        false_positives=(
            "An elastic job on machines that come and go every few minutes.",
            "Somebody who starts a script under the same name again and again: give each its run.",
        ),
        samples=("save_and_resume",),
        panels=(panels.STATE, panels.END),
    ),
    "MpAgentRunVanished": Guidance(
        harm="Nobody knows how the run is: it may be dead, or train unwatched. Find out within "
        "the hour; if it is dead, what was trained since the last checkpoint is lost.",
        query='last_over_time(mp_agent_run_active{run="RUN"}[2h])',
        reading="1: when last seen, the run was active. The labels instance, node and pod tell "
        "where.",
        causes=(
            "The node failed, or was reclaimed with everything on it.",
            "The pod was deleted or evicted, and the node agent with it.",
            "The node agent was killed alone, for its memory or by a clean-up, and the run goes "
            "on without it.",
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
        harm="The training is not touched, but what you see of it has gaps: lost records are "
        "missing from counters and norms, dropped series from dashboards.",
        query='{__name__=~"mp_agent_(probe_errors|setting_errors|records_dropped|series_dropped)'
        '_total", run="RUN"} > 0',
        reading="What was lost, and on which node. Errors of the probe are described once per kind "
        "in the rank's standard error and in the node agent's log.",
        causes=(
            "series_dropped: the model has more layers than max_series allows: raise it.",
            "records_dropped: the node agent had no CPU for so long that the ring was overwritten, "
            "or other nodes' rows came after merge_deadline_seconds.",
            "setting_errors: an MP_AGENT_ variable with a wrong value; in Kubernetes, a Service "
            "called mp-agent makes such variables.",
            "probe_errors: a model or wrapper that the probe does not know: please report it with "
            "the log.",
        ),
        false_positives=(
            "A burst of drops while a node is overloaded by a checkpoint: nothing to do if it "
            "does not come back.",
        ),
        samples=("check_agents",),
        panels=(panels.AGENT_ERRORS, panels.DROPPED_RECORDS, panels.DROPPED_SERIES),
    ),
}
