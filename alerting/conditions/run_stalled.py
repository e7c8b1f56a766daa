"""MpAgentRunStalled."""

from mp_agent.alerting import metrics
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import active, stopped
from mp_agent.alerting.durations import Duration, duration
from mp_agent.alerting.examples import Example, Track, flat, ramp
from mp_agent.alerting.predicates import Joined, all_of, any_of
from mp_agent.alerting.severity import Severity

_WINDOW, _LONG, _SLOW = (
    duration(name) for name in ("stall_window", "long_stall_window", "slow_stall_window")
)


def _stalled(window: Duration) -> Joined:
    return all_of(any_of(stopped(window), stopped(_SLOW)), active())


def _description(window: Duration) -> str:
    return f"Run {{run}} is active but has made no step for <{window.name}> or longer."


def _fires(window: Duration) -> str:
    return _description(window).replace("{run}", "demo")


def _stops_at(minute: int, steps_per_minute: float = 60) -> tuple[Track, ...]:
    steps = ramp(5000, steps_per_minute, minute + 1)
    return (Track(metrics.STEP, steps), Track(metrics.STEPS, steps))


def _usual_step(seconds: float) -> Track:
    return Track(metrics.STEP_USUAL, (seconds,))


_HUNG = Example(
    title="a run that hangs",
    minutes=46,
    tracks=_stops_at(10),
    fires={Severity.CRITICAL: _fires(_LONG), Severity.WARNING: _fires(_WINDOW)},
    at=45,
    not_yet=(19,),
)

_HUNG_IN_FIRST_STEP = Example(
    title="a run that hangs in its first step",
    minutes=16,
    tracks=(Track(metrics.STEPS, (0,)),),
    without=(metrics.STEP, metrics.STEP_USUAL),
    fires={Severity.WARNING: _fires(_WINDOW)},
    at=15,
    not_yet=(9,),
)

_HUNG_SLOW = Example(
    title="a run of four-minute steps that hangs",
    minutes=141,
    tracks=(*_stops_at(10, 0.25), _usual_step(240)),
    fires={Severity.CRITICAL: _fires(_LONG), Severity.WARNING: _fires(_WINDOW)},
    at=140,
    not_yet=(60,),
)

_SLOW_STEPS = Example(
    title="a run of twelve-minute steps",
    minutes=125,
    tracks=(
        Track(metrics.STEP, tuple(float(5000 + minute // 12) for minute in range(126))),
        Track(metrics.STEPS, tuple(float(5000 + minute // 12) for minute in range(126))),
        _usual_step(720),
    ),
)

_SLOWER_STEP = Example(
    title="a step of more than two hours where one hour is usual",
    minutes=125,
    tracks=(*_stops_at(0), _usual_step(3600)),
)

_EVALUATION = Example(
    title="more than two hours of evaluation",
    minutes=135,
    tracks=(
        *_stops_at(10),
        Track(metrics.PHASE, (*flat(1, 11), "stale"), {"phase": "forward"}),
        Track(metrics.PHASE, (*(None,) * 11, 1), {"phase": "eval"}),
    ),
)

_AFTER_CHECKPOINT = Example(
    title="training that goes on a minute after a long checkpoint",
    minutes=30,
    tracks=(
        Track(metrics.STEP, (*ramp(5000, 60, 11), *flat(5600, 11), *ramp(5660, 60, 9))),
        Track(metrics.STEPS, (*ramp(5000, 60, 11), *flat(5600, 11), *ramp(5660, 60, 9))),
        Track(metrics.PHASE, (*flat(1, 11), "stale", *(None,) * 8, 1), {"phase": "forward"}),
        Track(metrics.PHASE, (*(None,) * 11, *flat(1, 9), "stale"), {"phase": "checkpoint"}),
    ),
)

_ENDED = Example(
    title="a run that ended and lingers",
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
    title="a run seen for nine minutes, with steps of nearly a minute",
    minutes=9,
    tracks=(*_stops_at(0), _usual_step(55)),
)

RUN_STALLED = Condition(
    name="MpAgentRunStalled",
    summary="A run is active but makes no steps.",
    meaning="The job holds its machines without training: a rank hangs, mostly in a collective "
    "that another rank never entered.",
    confirm="mp_agent_rank_phase_info and mp_agent_rank_step show where each rank stands; py-spy "
    "shows the line.",
    remedies=(
        "Find the rank whose phase lags the others' and look at its log, its data loader and its "
        "GPU.",
        "Mark evaluation and checkpoints with mp_agent.phase if it was one of those.",
        "Restart from the last checkpoint if the rank is lost.",
    ),
    why="Ranks wait for each other in collectives, so one that is stuck or gone stops all; the one "
    "that lags is the cause, the others wait.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            when=_stalled(_LONG),
            description=_description(_LONG),
            reason="It does not wait: the condition spans half an hour, and ten usual steps.",
        ),
        Level(
            severity=Severity.WARNING,
            when=_stalled(_WINDOW),
            description=_description(_WINDOW),
            reason="It does not wait: the condition spans ten minutes, and ten usual steps.",
        ),
    ),
    firing=(_HUNG, _HUNG_IN_FIRST_STEP, _HUNG_SLOW),
    quiet=(
        _SLOW_STEPS,
        _SLOWER_STEP,
        _EVALUATION,
        _AFTER_CHECKPOINT,
        _ENDED,
        _GONE,
        _HEALTHY,
        _YOUNG,
    ),
)
