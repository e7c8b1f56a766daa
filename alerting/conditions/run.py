"""Alerts on a run: failed, stalled, restarting, vanished, or with a mistake in its code."""

from typing import Literal

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import (
    STANDING,
    active,
    at_target,
    in_phase,
    stopped,
)
from mp_agent.alerting.durations import Duration, duration
from mp_agent.alerting.expressions import (
    AtTarget,
    Compare,
    Count,
    Gone,
    Joined,
    Length,
    Number,
    Seen,
    Series,
    Unreachable,
    Where,
    all_of,
    any_of,
    limit,
    unless,
)
from mp_agent.alerting.first_line import NAN_WRITTEN, Triage
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import agent, ranks, run
from mp_agent.records.steps import EndReason, Phase

PRECISION_LINT = Condition(
    name="MpAgentPrecisionLint",
    summary="The code of the run breaks a rule of mp-agent check.",
    meaning="The main script, or a file of its project that it imports, does something by "
    "which mixed precision or a training loop is known to go wrong, or to waste time. The run may "
    "be healthy so far.",
    confirm="Run mp-agent check on the script: it shows the lines. mp-agent check --explain and "
    "the code of the rule say what is wrong and how to write it instead.",
    remedies=(
        "Fix the lines before the next start, or silence them with a comment "
        "# mp-agent: ignore if they are right.",
    ),
    why="The check needs no run: it sees a mistake before the first overflow shows it.",
    levels=(
        Level(
            severity=Severity.INFO,
            when=Compare(Series(metric=run.LINT_FINDINGS, keep=("rule",)), ">", Number(0)),
            description="The code of run {run} breaks rule {rule} of mp-agent check in "
            "{value|count} place(s).",
            reason="No delay: code does not change while it runs.",
        ),
    ),
    quiet=("a rule without findings",),
    needs=((Quantity.CODE,),),
    guidance=Guidance(
        harm="Nothing is lost by the finding itself. Read it before the next start, and at once "
        "where the run already shows the alert that the rule names.",
        query='mp_agent_lint_findings{run="RUN"}',
        reading="Findings per rule. mp-agent check prints the lines, and the log of the root node "
        "agent has the first twenty.",
        causes=(
            "Code written for FP32 to which mixed precision was added later.",
            "Clipping, accumulation or a second optimizer added to a loop with a GradScaler.",
            "A model or its inputs cast to 16 bits by hand instead of by autocast.",
            "A loop in which gradients are cleared, clipped or used in the wrong order.",
        ),
        false_positives=(
            "The code is right for a reason that the check cannot see: silence the line, or the "
            "rule in pyproject.toml; both count here as well.",
            "The line is never reached in this run.",
        ),
        samples=("clip_after_unscale", "stable_operations"),
        panels=(panels.CODE_FINDINGS,),
    ),
)


_NEWS, _RUN_FAILED_WINDOW = duration("end_window"), duration("failed_window")
_COMPLETED = EndReason.COMPLETED.name.lower()


def _ended(operator: Literal["=", "!="], window: Duration, *keep: str) -> Seen:
    """Return whether the run ended, its reason compared so with completion."""
    where = (Where("reason", operator, _COMPLETED),)
    end = Series(metric=run.RUN_END, over=("last_over_time", window), where=where, keep=keep)
    return Seen(end)


def _failed(window: Duration) -> Joined:
    """Return whether the run failed, and neither goes on nor was completed in the same time."""
    return unless(
        _ended("!=", window, "reason"),
        Compare(Series(metric=run.RUN_ACTIVE), "==", Number(1)),
        _ended("=", window),
    )


RUN_FAILED = Condition(
    name="MpAgentRunFailed",
    summary="A run ended without completing.",
    meaning="The job ended early: an exception, a signal or a killed process.",
    confirm="mp_agent_run_end_info contains the reason, the launcher's log the first traceback.",
    remedies=(
        "Read the traceback of the rank that failed first; the others fail because of it.",
        "If the reason is killed, check for the out-of-memory killer, preemption and node "
        "failures.",
        "Resume from the last checkpoint.",
    ),
    why="The first failure is the cause; a rank that dies breaks the collectives, and so ends "
    "all other ranks.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="as in the last checkpoint",
                now="read the first traceback, then resume from the last checkpoint",
            ),
            when=any_of(_failed(_RUN_FAILED_WINDOW), _failed(_NEWS)),
            hold=duration("restart_hold"),
            reason="A launcher that restarts the run within the delay has handled the failure; "
            "without a restart, the alert lasts for hours.",
            description="Run {run} ended without completing: {reason}.",
        ),
    ),
    quiet=(
        "a run that completes",
        "an attempt that fails, and a launcher that starts the next one a minute later",
        "an attempt that fails, and a short next attempt that completes",
    ),
    follows_from=("MpAgentRankStalled", "MpAgentRunStalled"),
    needs=((Quantity.LIFE,),),
    guidance=Guidance(
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
)


_RUN_RESTARTING_WINDOW = duration("restarts_window")
_MANY = limit("restarts")
_ATTEMPTS = Count(metric=run.ATTEMPTS, window=_RUN_RESTARTING_WINDOW)
_FRESH_AGENTS = Series(metric=agent.COUNTING, over=("resets", _RUN_RESTARTING_WINDOW))
"""A container that takes its node agent with it leaves nothing that could count its attempts."""

_DESCRIPTION = (
    "Run {run} was started more than <restarts> times within <restarts_window>; {value|count} "
    "starts were counted."
)


RUN_RESTARTING = Condition(
    name="MpAgentRunRestarting",
    summary="A run is restarted repeatedly.",
    meaning="Each attempt ends within minutes: the job occupies its machines without getting "
    "beyond its last checkpoint.",
    confirm="mp_agent_run_attempts_total rises; mp_agent_step returns to the same step repeatedly.",
    remedies=(
        "Read the first traceback of an attempt in the launcher's log: the attempts usually end "
        "for the same reason.",
        "Stop the job until the cause is fixed; restarts only waste compute.",
        "If attempts end only on one node, remove the node.",
    ),
    why="A launcher restarts after any failure; a deterministic failure recurs, and no single "
    "attempt lasts long enough to be reported as failed.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="as in the last checkpoint",
                now="stop the job, since no attempt gets beyond the failure",
            ),
            when=any_of(Compare(_ATTEMPTS, ">", _MANY), Compare(_FRESH_AGENTS, ">", _MANY)),
            description=_DESCRIPTION,
            reason="No delay: that many attempts within an hour are a restart loop.",
        ),
    ),
    quiet=(
        "five preemptions within an hour",
        "a run of twenty attempts, none of them recent, seen by a Prometheus that starts empty",
    ),
    needs=((Quantity.LIFE,),),
    guidance=Guidance(
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
)


_RUN_STALLED_WINDOW, _LONG = duration("stall_window"), duration("long_stall_window")
_BETWEEN = duration("between_steps_window")
_FIRST, _STARTING = duration("first_step_window"), duration("starting_limit")
_KNOWN, _LIMIT = duration("known_phase_limit"), duration("elsewhere_limit")
_TRAINING_OR_STARTING = "|".join(
    phase.name.lower()
    for phase in (Phase.STARTING, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.ENDED)
)


def _hung_in(limit: Duration, phase: Seen) -> Joined:
    """Return whether the run has been for longer than a limit in a phase outside training."""
    return all_of(Compare(STANDING, ">", Length(limit)), phase)


_OUTLASTS_ITS_LIKE = Compare(STANDING, ">", limit("phase_growth") * at_target(ranks.PHASE_LONGEST))
_ELSEWHERE = any_of(
    _hung_in(_STARTING, in_phase("=", Phase.STARTING.name.lower())),
    _hung_in(_LIMIT, in_phase("!~", _TRAINING_OR_STARTING)),
    # The series is there outside training alone.
    all_of(Compare(STANDING, ">", Length(_KNOWN)), _OUTLASTS_ITS_LIKE),
)


def _description(window: Duration) -> str:
    return f"Run {{run}} is active but has made no step for <{window.name}> or longer."


RUN_STALLED = Condition(
    name="MpAgentRunStalled",
    summary="A run is active but makes no steps.",
    meaning="The job occupies its machines without training: a rank hangs, usually in a "
    "collective that another rank never entered.",
    confirm="mp_agent_rank_phase_info and mp_agent_rank_step show the phase and step of each "
    "rank; py-spy shows the line of code.",
    remedies=(
        "Find the rank whose phase lags behind and check its log, its data loader and its GPU.",
        "If it was an evaluation or a checkpoint, mark it with mp_agent.phase.",
        "Restart from the last checkpoint if the rank is lost.",
    ),
    why="Ranks wait for each other in collectives, so a stuck or dead rank stops all of them; "
    "the lagging rank is the cause, the others wait.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="intact, but not saved since the last checkpoint",
                now="do not wait: dump the stacks with py-spy, then restart from the last "
                "checkpoint",
                updated=Triage(
                    weights=NAN_WRITTEN,
                    now="do not wait: dump the stacks with py-spy, then restart from {checkpoint}",
                ),
            ),
            when=AtTarget(
                all_of(
                    any_of(stopped(_LONG, between=_BETWEEN, first_step=_STARTING), _ELSEWHERE),
                    active(),
                )
            ),
            description=_description(_LONG),
            reason="No delay: the condition itself spans half an hour and ten usual steps; "
            "between_steps_window before the backward of a step, where a first evaluation or "
            "rollout that nothing marks looks alike; one hour during startup; three hours of "
            "evaluation or a checkpoint, or one if that is phase_growth times as long as any "
            "before.",
        ),
        Level(
            severity=Severity.WARNING,
            when=AtTarget(
                all_of(stopped(_RUN_STALLED_WINDOW, between=_BETWEEN, first_step=_FIRST), active())
            ),
            description=_description(_RUN_STALLED_WINDOW),
            reason="No delay: the condition itself spans ten minutes and ten usual steps, or "
            "between_steps_window before the backward of a step.",
        ),
    ),
    quiet=(
        "a run with steps of half an hour, which vary by noise",
        "a first evaluation of 31 minutes that nothing marks, after rollouts of 14",
        "the node agent of an earlier attempt, which lingers on another node",
        "a trainer that reports its epoch as the step",
        "a first step that takes forty minutes",
        "a step of more than three hours, where one hour is usual",
        "rollouts of up to forty minutes between fast updates, after one of half an hour",
        "a start that takes nearly an hour",
        "an evaluation of more than an hour before the first step",
        "nearly three hours of evaluation",
        "an evaluation of all data for two hours, after partial ones of half an hour",
        "training that continues a minute after a long checkpoint",
        "a run that ended and whose agent lingers",
        "a run whose series end",
        "a healthy run",
        "a run observed for nine minutes, with steps of nearly a minute",
    ),
    follows_from=("MpAgentRankStalled",),
    needs=((Quantity.LIFE,),),
    guidance=Guidance(
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
)


_RUN_VANISHED_WINDOW = duration("vanished_window")
_LAST_ACTIVE = Series(
    metric=run.RUN_ACTIVE, aggregate="min", over=("last_over_time", _RUN_VANISHED_WINDOW)
)
"""0 where the end of the run was seen at any target."""


RUN_VANISHED = Condition(
    name="MpAgentRunVanished",
    summary="A run's series stopped without a reported end.",
    meaning="The run's node agent ended together with the run, or alone and left the run "
    "unmonitored: node failure, eviction, or a killed container.",
    confirm="Check the node or pod of the last series, and the job in its scheduler.",
    remedies=(
        "Check the node's and the scheduler's events: preemption, out of memory, hardware.",
        "If the job is dead, resume it from its last checkpoint.",
        "Run the node agent as a sidecar, or start the job with mp-agent exec, so that the next "
        "end is reported.",
    ),
    why="A node agent outlives its job by linger_seconds unless its container or node dies with "
    "it, so series that stop while the run is active mean that more than the job has ended.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=unless(
                any_of(
                    Gone(run.RUN_ACTIVE, _RUN_VANISHED_WINDOW),
                    Unreachable(
                        run.RUN_ACTIVE, _RUN_VANISHED_WINDOW, duration("unreachable_window")
                    ),
                ),
                Seen(Series(metric=run.RUN_ACTIVE)),
                Compare(_LAST_ACTIVE, "==", Number(0)),
            ),
            hold=duration("vanished_hold"),
            reason="The delay covers the replacement of a pod and slow service discovery; a "
            "listed target that fails gets ten minutes.",
            description="The series of run {run} stopped, and no end of the run was reported.",
        ),
    ),
    quiet=(
        "scrapes that fail for some minutes while the target is still listed",
        "a run whose end was reported",
        "a run rescheduled to another node",
        "a run rescheduled to another node, where its end was reported",
    ),
    needs=((Quantity.LIFE,),),
    guidance=Guidance(
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
)


CONDITIONS = (
    RUN_STALLED,
    RUN_FAILED,
    RUN_RESTARTING,
    RUN_VANISHED,
    PRECISION_LINT,
)
