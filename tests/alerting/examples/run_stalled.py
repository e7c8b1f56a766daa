"""Examples of MpAgentRunStalled."""

from mp_agent.alerting.conditions.run import (
    _LONG,
    _RUN_STALLED_WINDOW,
    _description,
)
from mp_agent.alerting.durations import Duration
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp


def _fires(window: Duration) -> str:
    return _description(window).replace("{run}", "demo")


def _stops_at(minute: int, steps_per_minute: float = 60) -> tuple[Track, ...]:
    steps = ramp(5000, steps_per_minute, minute + 1)
    return (Track(metrics.STEP, steps), Track(metrics.STEPS, steps))


def _usual_step(seconds: float) -> Track:
    return Track(metrics.STEP_USUAL, (seconds,))


def _in(phase: str) -> Track:
    """Return the phase, in place of the healthy run's."""
    return Track(metrics.PHASE, (1,), {"phase": phase})


_HUNG = Example(
    title="a run that hangs in backward",
    minutes=46,
    tracks=_stops_at(10),
    fires={Severity.CRITICAL: _fires(_LONG), Severity.WARNING: _fires(_RUN_STALLED_WINDOW)},
    at=45,
    not_yet=(19,),
)

_HUNG_BETWEEN = Example(
    title="a run that hangs before a backward",
    minutes=57,
    tracks=(*_stops_at(10), _in("forward")),
    without=(metrics.PHASE,),
    fires={Severity.CRITICAL: _fires(_LONG), Severity.WARNING: _fires(_RUN_STALLED_WINDOW)},
    at=56,
    not_yet=(54,),
)

_OTHER_JOB = {"instance": "node-7:9464"}

_NAMESAKES = Example(
    title="two jobs under one name, one of which hangs in backward",
    minutes=46,
    tracks=(
        Track(metrics.STANDING, (*flat(0, 11), *ramp(60, 60, 36)), _OTHER_JOB),
        Track(metrics.STEP_USUAL, (1,), _OTHER_JOB),
        Track(metrics.RUN_ACTIVE, (1,), _OTHER_JOB),
        Track(metrics.PHASE, (1,), {**_OTHER_JOB, "phase": "backward"}),
    ),
    fires={Severity.CRITICAL: _fires(_LONG), Severity.WARNING: _fires(_RUN_STALLED_WINDOW)},
    at=45,
    not_yet=(19,),
)

_HUNG_IN_FIRST_STEP = Example(
    title="a run that hangs in its first step",
    minutes=62,
    tracks=(Track(metrics.STEPS, (0,)),),
    without=(metrics.STEP, metrics.STEP_USUAL),
    fires={Severity.CRITICAL: _fires(_LONG), Severity.WARNING: _fires(_RUN_STALLED_WINDOW)},
    at=62,
    not_yet=(44,),
)

_HUNG_SLOW = Example(
    title="a run of four-minute steps that hangs",
    minutes=55,
    tracks=(*_stops_at(10, 0.25), _usual_step(240)),
    fires={Severity.CRITICAL: _fires(_LONG), Severity.WARNING: _fires(_RUN_STALLED_WINDOW)},
    at=54,
    not_yet=(49,),
)

_HUNG_AFTER_PAUSES = Example(
    title="a run that recovered from pauses of 75 minutes before, and now does not",
    minutes=10,
    tracks=(Track(metrics.STANDING, ramp(7000, 60, 11)), Track(metrics.PAUSE_LONGEST, (4500,))),
    fires={Severity.CRITICAL: _fires(_LONG), Severity.WARNING: _fires(_RUN_STALLED_WINDOW)},
    at=5,
    not_yet=(3,),
)

_HUNG_IN_START = Example(
    title="a start that hangs",
    minutes=10,
    tracks=(_in("starting"), Track(metrics.STANDING, ramp(3400, 60, 11))),
    without=(metrics.PHASE, metrics.STEP, metrics.STEP_USUAL),
    fires={Severity.CRITICAL: _fires(_LONG)},
    at=5,
    not_yet=(3,),
)

_HUNG_IN_CHECKPOINT = Example(
    title="a checkpoint that hangs",
    minutes=10,
    tracks=(_in("checkpoint"), Track(metrics.STANDING, ramp(10600, 60, 11))),
    without=(metrics.PHASE,),
    fires={Severity.CRITICAL: _fires(_LONG)},
    at=5,
    not_yet=(3,),
)

_HUNG_IN_EVALUATION = Example(
    title="an evaluation that hangs, after others that took two minutes",
    minutes=10,
    tracks=(
        _in("eval"),
        Track(metrics.STANDING, ramp(3400, 60, 11)),
        Track(metrics.PHASE_LONGEST, (120,)),
    ),
    without=(metrics.PHASE,),
    fires={Severity.CRITICAL: _fires(_LONG)},
    at=5,
    not_yet=(3,),
)

_SLOW_STEPS = Example(
    title="a run with steps of half an hour, which vary by noise",
    minutes=40,
    tracks=(
        Track(metrics.STEPS, tuple(float(5000 + minute // 33) for minute in range(41))),
        _usual_step(1800),
    ),
)

_EPOCHS = Example(
    title="a trainer that reports its epoch as the step",
    minutes=35,
    tracks=(Track(metrics.STEP, (3,)),),
)

_SLOW_FIRST_STEP = Example(
    title="a first step that takes forty minutes",
    minutes=43,
    tracks=(
        Track(metrics.STEPS, (*flat(0, 41), 1)),
        Track(metrics.STEP, (*flat(None, 41), 1)),
        Track(metrics.STEP_USUAL, (*flat(None, 41), 2400)),
    ),
)

_SLOWER_STEP = Example(
    title="a step of more than three hours, where one hour is usual",
    minutes=8,
    tracks=(Track(metrics.STANDING, ramp(10600, 60, 9)), _usual_step(3600)),
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
            for metric in (metrics.STEP, metrics.STEPS)
        ),
    ),
    without=(metrics.PHASE,),
)

_PREVIOUS_ATTEMPT = Example(
    title="the node agent of an earlier attempt, which lingers on another node",
    minutes=40,
    tracks=(
        Track(metrics.STANDING, ramp(0, 60, 41), _OTHER_JOB),
        Track(metrics.STEP_USUAL, (1,), _OTHER_JOB),
        Track(metrics.RUN_ACTIVE, (0,), _OTHER_JOB),
        Track(metrics.PHASE, (1,), {**_OTHER_JOB, "phase": "backward"}),
    ),
)

_ROLLOUTS = Example(
    title="rollouts of up to forty minutes between fast updates, after one of half an hour",
    minutes=10,
    tracks=(Track(metrics.STANDING, ramp(1800, 60, 11)), Track(metrics.PAUSE_LONGEST, (1800,))),
)

_EVALUATION = Example(
    title="nearly three hours of evaluation",
    minutes=15,
    tracks=(_in("eval"), Track(metrics.STANDING, ramp(9800, 60, 16))),
    without=(metrics.PHASE,),
)

_WHOLE_EVALUATION = Example(
    title="an evaluation of all data for two hours, after partial ones of half an hour",
    minutes=8,
    tracks=(
        _in("eval"),
        Track(metrics.STANDING, ramp(6700, 60, 9)),
        Track(metrics.PHASE_LONGEST, (1800,)),
    ),
    without=(metrics.PHASE,),
)

_EVALUATED_FIRST = Example(
    title="an evaluation of more than an hour before the first step",
    minutes=8,
    tracks=(_in("eval"), Track(metrics.STANDING, ramp(3400, 60, 9))),
    without=(metrics.PHASE, metrics.STEP, metrics.STEP_USUAL),
)

_STARTING_UP = Example(
    title="a start that takes nearly an hour",
    minutes=12,
    tracks=(_in("starting"), Track(metrics.STANDING, ramp(2850, 60, 13))),
    without=(metrics.PHASE, metrics.STEP, metrics.STEP_USUAL),
)

_AFTER_CHECKPOINT = Example(
    title="training that continues a minute after a long checkpoint",
    minutes=30,
    tracks=(
        Track(metrics.STEP, (*ramp(5000, 60, 11), *flat(5600, 11), *ramp(5660, 60, 9))),
        Track(metrics.STEPS, (*ramp(5000, 60, 11), *flat(5600, 11), *ramp(5660, 60, 9))),
        Track(metrics.STANDING, (*flat(0, 11), *ramp(0, 60, 10), *flat(0, 10))),
        Track(metrics.PHASE, (*flat(1, 11), "stale", *(None,) * 8, 1), {"phase": "backward"}),
        Track(metrics.PHASE, (*(None,) * 11, *flat(1, 9), "stale"), {"phase": "checkpoint"}),
    ),
)

_ENDED = Example(
    title="a run that ended and whose agent lingers",
    minutes=45,
    tracks=(
        *_stops_at(10),
        Track(metrics.RUN_ACTIVE, (*flat(1, 11), 0)),
        Track(metrics.RUN_END, (*(None,) * 11, 1), {"reason": "completed"}),
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
}
