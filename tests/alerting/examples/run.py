"""Examples of alerts on a run: failed, stalled, restarting, vanished."""

from mp_agent.alerting.conditions.run import (
    _DESCRIPTION,
    _LONG,
    _RUN_STALLED_WINDOW,
    _description,
)
from mp_agent.alerting.durations import Duration
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import agent, ranks, run
from tests.alerting.examples.example import Example, Examples, Track, Value, flat, ramp


def _run_stalled_fires(window: Duration) -> str:
    return _description(window).replace("{run}", "demo")


def _stops_at(minute: int, steps_per_minute: float = 60) -> tuple[Track, ...]:
    steps = ramp(5000, steps_per_minute, minute + 1)
    return (Track(run.STEP, steps), Track(run.STEPS, steps))


def _usual_step(seconds: float) -> Track:
    return Track(ranks.STEP_USUAL, (seconds,))


def _in(phase: str) -> Track:
    """Return the phase, in place of the healthy run's."""
    return Track(run.PHASE, (1,), {"phase": phase})


_HUNG = Example(
    title="a run that hangs in backward",
    minutes=46,
    tracks=_stops_at(10),
    fires={
        Severity.CRITICAL: _run_stalled_fires(_LONG),
        Severity.WARNING: _run_stalled_fires(_RUN_STALLED_WINDOW),
    },
    at=45,
    not_yet=(19,),
)

_HUNG_BETWEEN = Example(
    title="a run that hangs before a backward",
    minutes=57,
    tracks=(*_stops_at(10), _in("forward")),
    without=(run.PHASE,),
    fires={
        Severity.CRITICAL: _run_stalled_fires(_LONG),
        Severity.WARNING: _run_stalled_fires(_RUN_STALLED_WINDOW),
    },
    at=56,
    not_yet=(54,),
)

_OTHER_JOB = {"instance": "node-7:9464"}

_NAMESAKES = Example(
    title="two jobs under one name, one of which hangs in backward",
    minutes=46,
    tracks=(
        Track(ranks.STANDING, (*flat(0, 11), *ramp(60, 60, 36)), _OTHER_JOB),
        Track(ranks.STEP_USUAL, (1,), _OTHER_JOB),
        Track(run.RUN_ACTIVE, (1,), _OTHER_JOB),
        Track(run.PHASE, (1,), {**_OTHER_JOB, "phase": "backward"}),
    ),
    fires={
        Severity.CRITICAL: _run_stalled_fires(_LONG),
        Severity.WARNING: _run_stalled_fires(_RUN_STALLED_WINDOW),
    },
    at=45,
    not_yet=(19,),
)

_HUNG_IN_FIRST_STEP = Example(
    title="a run that hangs in its first step",
    minutes=62,
    tracks=(Track(run.STEPS, (0,)),),
    without=(run.STEP, ranks.STEP_USUAL),
    fires={
        Severity.CRITICAL: _run_stalled_fires(_LONG),
        Severity.WARNING: _run_stalled_fires(_RUN_STALLED_WINDOW),
    },
    at=62,
    not_yet=(44,),
)

_HUNG_SLOW = Example(
    title="a run of four-minute steps that hangs",
    minutes=55,
    tracks=(*_stops_at(10, 0.25), _usual_step(240)),
    fires={
        Severity.CRITICAL: _run_stalled_fires(_LONG),
        Severity.WARNING: _run_stalled_fires(_RUN_STALLED_WINDOW),
    },
    at=54,
    not_yet=(49,),
)

_HUNG_AFTER_PAUSES = Example(
    title="a run that recovered from pauses of 75 minutes before, and now does not",
    minutes=10,
    tracks=(Track(ranks.STANDING, ramp(7000, 60, 11)), Track(ranks.PAUSE_LONGEST, (4500,))),
    fires={
        Severity.CRITICAL: _run_stalled_fires(_LONG),
        Severity.WARNING: _run_stalled_fires(_RUN_STALLED_WINDOW),
    },
    at=5,
    not_yet=(3,),
)

_HUNG_IN_START = Example(
    title="a start that hangs",
    minutes=10,
    tracks=(_in("starting"), Track(ranks.STANDING, ramp(3400, 60, 11))),
    without=(run.PHASE, run.STEP, ranks.STEP_USUAL),
    fires={Severity.CRITICAL: _run_stalled_fires(_LONG)},
    at=5,
    not_yet=(3,),
)

_HUNG_IN_CHECKPOINT = Example(
    title="a checkpoint that hangs",
    minutes=10,
    tracks=(_in("checkpoint"), Track(ranks.STANDING, ramp(10600, 60, 11))),
    without=(run.PHASE,),
    fires={Severity.CRITICAL: _run_stalled_fires(_LONG)},
    at=5,
    not_yet=(3,),
)

_HUNG_IN_EVALUATION = Example(
    title="an evaluation that hangs, after others that took two minutes",
    minutes=10,
    tracks=(
        _in("eval"),
        Track(ranks.STANDING, ramp(3400, 60, 11)),
        Track(ranks.PHASE_LONGEST, (120,)),
    ),
    without=(run.PHASE,),
    fires={Severity.CRITICAL: _run_stalled_fires(_LONG)},
    at=5,
    not_yet=(3,),
)

_SLOW_STEPS = Example(
    title="a run with steps of half an hour, which vary by noise",
    minutes=40,
    tracks=(
        Track(run.STEPS, tuple(float(5000 + minute // 33) for minute in range(41))),
        _usual_step(1800),
    ),
)

_EPOCHS = Example(
    title="a trainer that reports its epoch as the step",
    minutes=35,
    tracks=(Track(run.STEP, (3,)),),
)

_SLOW_FIRST_STEP = Example(
    title="a first step that takes forty minutes",
    minutes=43,
    tracks=(
        Track(run.STEPS, (*flat(0, 41), 1)),
        Track(run.STEP, (*flat(None, 41), 1)),
        Track(ranks.STEP_USUAL, (*flat(None, 41), 2400)),
    ),
)

_SLOWER_STEP = Example(
    title="a step of more than three hours, where one hour is usual",
    minutes=8,
    tracks=(Track(ranks.STANDING, ramp(10600, 60, 9)), _usual_step(3600)),
)

_UNMARKED_EVALUATION = Example(
    title="a first evaluation of 31 minutes that nothing marks, after rollouts of 14",
    minutes=60,
    tracks=(
        _in("forward"),
        *(
            Track(
                metric,
                (*ramp(5000, 60, 5), *flat(5240, 14), *ramp(5300, 60, 5), *flat(5540, 31), 5600),
            )
            for metric in (run.STEP, run.STEPS)
        ),
    ),
    without=(run.PHASE,),
)

_PREVIOUS_ATTEMPT = Example(
    title="the node agent of an earlier attempt, which lingers on another node",
    minutes=40,
    tracks=(
        Track(ranks.STANDING, ramp(0, 60, 41), _OTHER_JOB),
        Track(ranks.STEP_USUAL, (1,), _OTHER_JOB),
        Track(run.RUN_ACTIVE, (0,), _OTHER_JOB),
        Track(run.PHASE, (1,), {**_OTHER_JOB, "phase": "backward"}),
    ),
)

_ROLLOUTS = Example(
    title="rollouts of up to forty minutes between fast updates, after one of half an hour",
    minutes=10,
    tracks=(Track(ranks.STANDING, ramp(1800, 60, 11)), Track(ranks.PAUSE_LONGEST, (1800,))),
)

_EVALUATION = Example(
    title="nearly three hours of evaluation",
    minutes=15,
    tracks=(_in("eval"), Track(ranks.STANDING, ramp(9800, 60, 16))),
    without=(run.PHASE,),
)

_WHOLE_EVALUATION = Example(
    title="an evaluation of all data for two hours, after partial ones of half an hour",
    minutes=8,
    tracks=(
        _in("eval"),
        Track(ranks.STANDING, ramp(6700, 60, 9)),
        Track(ranks.PHASE_LONGEST, (1800,)),
    ),
    without=(run.PHASE,),
)

_EVALUATED_FIRST = Example(
    title="an evaluation of more than an hour before the first step",
    minutes=8,
    tracks=(_in("eval"), Track(ranks.STANDING, ramp(3400, 60, 9))),
    without=(run.PHASE, run.STEP, ranks.STEP_USUAL),
)

_STARTING_UP = Example(
    title="a start that takes nearly an hour",
    minutes=12,
    tracks=(_in("starting"), Track(ranks.STANDING, ramp(2850, 60, 13))),
    without=(run.PHASE, run.STEP, ranks.STEP_USUAL),
)

_AFTER_CHECKPOINT = Example(
    title="training that continues a minute after a long checkpoint",
    minutes=30,
    tracks=(
        Track(run.STEP, (*ramp(5000, 60, 11), *flat(5600, 11), *ramp(5660, 60, 9))),
        Track(run.STEPS, (*ramp(5000, 60, 11), *flat(5600, 11), *ramp(5660, 60, 9))),
        Track(ranks.STANDING, (*flat(0, 11), *ramp(0, 60, 10), *flat(0, 10))),
        Track(run.PHASE, (*flat(1, 11), "stale", *(None,) * 8, 1), {"phase": "backward"}),
        Track(run.PHASE, (*(None,) * 11, *flat(1, 9), "stale"), {"phase": "checkpoint"}),
    ),
)

_ENDED = Example(
    title="a run that ended and whose agent lingers",
    minutes=45,
    tracks=(
        *_stops_at(10),
        Track(run.RUN_ACTIVE, (*flat(1, 11), 0)),
        Track(run.RUN_END, (*(None,) * 11, 1), {"reason": "completed"}),
    ),
)

_GONE = Example(
    title="a run whose series end",
    minutes=45,
    ends=10,
    also={"MpAgentRunVanished": (Severity.WARNING,)},
)

_HEALTHY = Example(title="a healthy run", minutes=35)

_YOUNG = Example(
    title="a run observed for nine minutes, with steps of nearly a minute",
    minutes=9,
    tracks=(*_stops_at(0), _usual_step(55)),
)


def _end(minute: int, reason: str, seen_for: int = 2) -> Track:
    values: tuple[Value, ...] = (*(None,) * minute, *flat(1, seen_for), "stale")
    return Track(run.RUN_END, values, {"reason": reason})


_EXCEPTION = Example(
    title="an exception ends the run, which lingers for two minutes",
    minutes=26,
    tracks=(Track(run.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale")), _end(10, "failed")),
    ends=12,
    fires={Severity.CRITICAL: "Run demo ended without completing: failed."},
    labels={"reason": "failed"},
    at=25,
    not_yet=(10,),
)

_KILLED = Example(
    title="all ranks are killed",
    minutes=14,
    tracks=(Track(run.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale")), _end(10, "killed")),
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
        Track(run.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale", *flat(None, 7), 1)),
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
        Track(run.RUN_ACTIVE, (0, 0, "stale", None, *flat(1, 6), 0, 0, "stale")),
        _end(0, "completed"),
        _end(10, "failed"),
    ),
    ends=12,
    fires={Severity.CRITICAL: "Run demo ended without completing: failed."},
    labels={"reason": "failed"},
    at=13,
    not_yet=(10,),
)

_RUN_FAILED_COMPLETES = Example(
    title="a run that completes",
    minutes=22,
    tracks=(Track(run.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale")), _end(10, "completed")),
    ends=12,
)

_RESTARTED = Example(
    title="an attempt that fails, and a launcher that starts the next one a minute later",
    minutes=22,
    tracks=(Track(run.RUN_ACTIVE, (*flat(1, 10), 0, 1)), _end(10, "failed", 1)),
)

_RESTARTED_AND_DONE = Example(
    title="an attempt that fails, and a short next attempt that completes",
    minutes=22,
    tracks=(
        Track(run.RUN_ACTIVE, (*flat(1, 10), 0, 1, 0, 0, "stale")),
        _end(10, "failed", 1),
        _end(12, "completed"),
    ),
    ends=14,
)


def _run_restarting_fires(times: int) -> str:
    return _DESCRIPTION.replace("{run}", "demo").replace("{value|count}", str(times))


def _attempts(*values: Value) -> Track:
    return Track(run.ATTEMPTS, values)


_CRASH_LOOP = Example(
    title="a run that is restarted every two minutes",
    age_minutes=0,
    minutes=20,
    tracks=(_attempts(*(float(1 + minute // 2) for minute in range(21))),),
    fires={Severity.CRITICAL: _run_restarting_fires(8)},
    at=15,
    not_yet=(13,),
)

_WITHOUT_MEMORY = Example(
    title="a container that is restarted every two minutes together with its node agent",
    minutes=22,
    tracks=(
        _attempts(1),
        Track(agent.COUNTING, (30.0, 90.0) * 11, {"node_rank": "0"}),
    ),
    fires={Severity.CRITICAL: _run_restarting_fires(8)},
    at=17,
    not_yet=(15,),
)

_PREEMPTED = Example(
    title="five preemptions within an hour",
    minutes=60,
    tracks=(_attempts(*(float(1 + minute // 12) for minute in range(60))),),
)

_LONG_AGO = Example(
    title="a run of twenty attempts, none of them recent, seen by a Prometheus that starts empty",
    minutes=12,
    tracks=(_attempts(*flat(None, 2), 20),),
)


_ELSEWHERE = {"instance": "node-7:9464"}

_GONE_AT_TEN: tuple[Value, ...] = (*flat(1, 10), "stale")

_VANISHED = Example(
    title="node and agent die, and service discovery drops the target",
    minutes=46,
    tracks=(Track("up", _GONE_AT_TEN),),
    ends=10,
    fires={Severity.WARNING: "The series of run demo stopped, and no end of the run was reported."},
    at=16,
    not_yet=(11, 14, 45),
)

_DEAD_BUT_LISTED = Example(
    title="a node that dies and remains a target",
    minutes=24,
    tracks=(Track("up", (*flat(1, 10), 0)),),
    ends=10,
    fires={Severity.WARNING: "The series of run demo stopped, and no end of the run was reported."},
    at=24,
    not_yet=(19,),
)

_UNREACHABLE = Example(
    title="scrapes that fail for some minutes while the target is still listed",
    minutes=30,
    tracks=(
        Track("up", (*flat(1, 10), *flat(0, 9), 1)),
        Track(run.RUN_ACTIVE, (*flat(1, 10), "stale", *flat(None, 8), 1)),
    ),
)

_RUN_VANISHED_COMPLETES = Example(
    title="a run whose end was reported",
    minutes=46,
    tracks=(
        Track(run.RUN_ACTIVE, (*flat(1, 10), 0, 0, "stale")),
        Track(run.RUN_END, (*(None,) * 10, 1, 1, "stale"), {"reason": "completed"}),
        Track("up", (*flat(1, 12), "stale")),
    ),
    ends=12,
)

_GOES_ON_ELSEWHERE = Example(
    title="a run rescheduled to another node",
    minutes=46,
    tracks=(
        Track("up", _GONE_AT_TEN),
        Track(run.RUN_ACTIVE, (*(None,) * 11, 1), _ELSEWHERE),
        Track(run.STEP, (*(None,) * 11, *ramp(5600, 60, 36)), _ELSEWHERE),
        Track("up", (*(None,) * 11, 1), _ELSEWHERE),
    ),
    ends=10,
)

_ENDED_ELSEWHERE = Example(
    title="a run rescheduled to another node, where its end was reported",
    minutes=50,
    tracks=(
        Track("up", _GONE_AT_TEN),
        Track(run.RUN_ACTIVE, (*(None,) * 11, *flat(1, 5), 0, 0, "stale"), _ELSEWHERE),
        Track("up", (*(None,) * 11, *flat(1, 7), 0), _ELSEWHERE),
    ),
    ends=10,
)


_RULE = {"rule": "MP106"}

_FINDINGS = Example(
    title="a script that clips before unscale_ in two places",
    minutes=12,
    tracks=(Track(run.LINT_FINDINGS, (*flat(None, 5), 2), _RULE),),
    fires={
        Severity.INFO: "The code of run demo breaks rule MP106 of mp-agent check in 2 place(s)."
    },
    labels={"rule": "MP106"},
    at=6,
    not_yet=(4,),
)

_FIXED = Example(
    title="a rule without findings",
    minutes=12,
    tracks=(Track(run.LINT_FINDINGS, (0,), _RULE),),
)


EXAMPLES = {
    "MpAgentRunStalled": Examples(
        firing=(
            _HUNG,
            _HUNG_BETWEEN,
            _NAMESAKES,
            _HUNG_IN_FIRST_STEP,
            _HUNG_SLOW,
            _HUNG_AFTER_PAUSES,
            _HUNG_IN_START,
            _HUNG_IN_CHECKPOINT,
            _HUNG_IN_EVALUATION,
        ),
        quiet=(
            _SLOW_STEPS,
            _UNMARKED_EVALUATION,
            _PREVIOUS_ATTEMPT,
            _EPOCHS,
            _SLOW_FIRST_STEP,
            _SLOWER_STEP,
            _ROLLOUTS,
            _STARTING_UP,
            _EVALUATED_FIRST,
            _EVALUATION,
            _WHOLE_EVALUATION,
            _AFTER_CHECKPOINT,
            _ENDED,
            _GONE,
            _HEALTHY,
            _YOUNG,
        ),
    ),
    "MpAgentRunFailed": Examples(
        firing=(_EXCEPTION, _KILLED, _BROUGHT_BACK, _NAME_OF_COMPLETED),
        quiet=(_RUN_FAILED_COMPLETES, _RESTARTED, _RESTARTED_AND_DONE),
    ),
    "MpAgentRunRestarting": Examples(
        firing=(_CRASH_LOOP, _WITHOUT_MEMORY),
        quiet=(_PREEMPTED, _LONG_AGO),
    ),
    "MpAgentRunVanished": Examples(
        firing=(_VANISHED, _DEAD_BUT_LISTED),
        quiet=(_UNREACHABLE, _RUN_VANISHED_COMPLETES, _GOES_ON_ELSEWHERE, _ENDED_ELSEWHERE),
    ),
    "MpAgentPrecisionLint": Examples(
        firing=(_FINDINGS,),
        quiet=(_FIXED,),
    ),
}
