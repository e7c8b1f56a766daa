"""MpAgentRunFailed."""

from typing import Literal

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import Duration, duration
from mp_agent.alerting.examples.example import Example, Track, Value, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, Joined, Seen, any_of, unless
from mp_agent.alerting.expressions.signals import Number, Series, Where
from mp_agent.alerting.first_line.triage import Triage
from mp_agent.alerting.severity import Severity
from mp_agent.records.steps import EndReason

_NEWS, _WINDOW = duration("end_window"), duration("failed_window")
_COMPLETED = EndReason.COMPLETED.name.lower()


def _ended(operator: Literal["=", "!="], window: Duration, *keep: str) -> Seen:
    """Return whether the run ended, its reason compared so with completion."""
    where = (Where("reason", operator, _COMPLETED),)
    end = Series(metric=metrics.RUN_END, over=("last_over_time", window), where=where, keep=keep)
    return Seen(end)


def _failed(window: Duration) -> Joined:
    """Return whether the run failed, and neither goes on nor was completed in the same time."""
    return unless(
        _ended("!=", window, "reason"),
        Compare(Series(metric=metrics.RUN_ACTIVE), "==", Number(1)),
        _ended("=", window),
    )


def _end(minute: int, reason: str, seen_for: int = 2) -> Track:
    values: tuple[Value, ...] = (*(None,) * minute, *flat(1, seen_for), "stale")
    return Track(metrics.RUN_END, values, {"reason": reason})


_EXCEPTION = Example(
    title="an exception ends the run, which lingers for two minutes",
    minutes=26,
    tracks=(Track(metrics.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale")), _end(10, "failed")),
    ends=12,
    fires={Severity.CRITICAL: "Run demo ended without completing: failed."},
    labels={"reason": "failed"},
    at=25,
    not_yet=(10,),
)

_KILLED = Example(
    title="all ranks are killed",
    minutes=14,
    tracks=(Track(metrics.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale")), _end(10, "killed")),
    ends=12,
    fires={Severity.CRITICAL: "Run demo ended without completing: killed."},
    labels={"reason": "killed"},
    at=13,
    not_yet=(10,),
)

_BROUGHT_BACK = Example(
    title="a run that is restarted ten minutes after it failed",
    minutes=24,
    tracks=(
        Track(metrics.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale", *flat(None, 7), 1)),
        _end(10, "failed"),
    ),
    fires={Severity.CRITICAL: "Run demo ended without completing: failed."},
    labels={"reason": "failed"},
    at=19,
    not_yet=(10, 20, 24),
)

_NAME_OF_COMPLETED = Example(
    title="a run that fails under the name of one that completed an hour before",
    minutes=17,
    tracks=(
        Track(metrics.RUN_ACTIVE, (0, 0, "stale", None, *flat(1, 6), 0, 0, "stale")),
        _end(0, "completed"),
        _end(10, "failed"),
    ),
    ends=12,
    fires={Severity.CRITICAL: "Run demo ended without completing: failed."},
    labels={"reason": "failed"},
    at=13,
    not_yet=(10,),
)

_COMPLETES = Example(
    title="a run that completes",
    minutes=22,
    tracks=(Track(metrics.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale")), _end(10, "completed")),
    ends=12,
)

_RESTARTED = Example(
    title="an attempt that fails, and a launcher that starts the next one a minute later",
    minutes=22,
    tracks=(Track(metrics.RUN_ACTIVE, (*flat(1, 10), 0, 1)), _end(10, "failed", 1)),
)

_RESTARTED_AND_DONE = Example(
    title="an attempt that fails, and a short next attempt that completes",
    minutes=22,
    tracks=(
        Track(metrics.RUN_ACTIVE, (*flat(1, 10), 0, 1, 0, 0, "stale")),
        _end(10, "failed", 1),
        _end(12, "completed"),
    ),
    ends=14,
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
            when=any_of(_failed(_WINDOW), _failed(_NEWS)),
            hold=duration("restart_hold"),
            reason="A launcher that restarts the run within the delay has handled the failure; "
            "without a restart, the alert lasts for hours.",
            description="Run {run} ended without completing: {reason}.",
        ),
    ),
    firing=(_EXCEPTION, _KILLED, _BROUGHT_BACK, _NAME_OF_COMPLETED),
    quiet=(_COMPLETES, _RESTARTED, _RESTARTED_AND_DONE),
)
