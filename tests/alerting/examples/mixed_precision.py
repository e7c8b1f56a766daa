"""Examples of alerts on steps that a loss scaler skips."""

from collections.abc import Iterable

from mp_agent.alerting.conditions.mixed_precision import _description
from mp_agent.alerting.expressions import limit
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import training
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.loss_scale import OverflowShares
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext
from tests.agent.node.builders import merged_step
from tests.alerting.examples.example import Example, Examples, Track

_BOUNDS = ("overflow_warning", "overflow_critical", "overflow_rising")
_LATE = 5000


def _fires(bound: str, steps: int) -> str:
    return _description(bound).replace("{run}", "demo").replace("{value|count}", str(steps))


def _skipping(skipped: Iterable[bool], *, after: int = _LATE, steps: int = 60) -> tuple[Track, ...]:
    """Return what the node agent makes of steps that are skipped or not.

    after: steps of the attempt before the first. steps: so many a minute.
    """
    shares, context = OverflowShares(), AccountContext(resolve({}), 120.0, Progress())
    for sequence in range(max(after - 1000, 500), after):
        shares.observe(merged_step(sequence, skipped=0.0), context)
    total, excess = 0.0, dict.fromkeys(_BOUNDS, 0.0)
    totals, exceeded = [0.0], {bound: [0.0] for bound in _BOUNDS}
    for index, is_skipped in enumerate(skipped):
        shares.observe(merged_step(after + index, skipped=float(is_skipped)), context)
        total += is_skipped
        for bound in _BOUNDS:
            excess[bound] += bound in shares.exceeded
        if (index + 1) % steps == 0:
            totals.append(total)
            for bound in _BOUNDS:
                exceeded[bound].append(excess[bound])
    return (
        Track(training.SKIPPED_STEPS, tuple(totals)),
        *(
            Track(training.SKIPPED_EXCESS, tuple(exceeded[bound]), {"bound": limit(bound)})
            for bound in _BOUNDS
        ),
    )


def _every(step: int, steps: int) -> list[bool]:
    return [index % step == 0 for index in range(1, steps + 1)]


_TWO_IN_A_HUNDRED = Example(
    title="2 % of the steps overflow",
    minutes=32,
    tracks=_skipping(_every(50, 1920)),
    fires={Severity.WARNING: _fires("overflow_rising", 18)},
    at=31,
    not_yet=(7,),
)

_FIFTH = Example(
    title="every fifth step overflows",
    minutes=32,
    tracks=_skipping([*_every(2000, 600), *_every(5, 1320)]),
    fires={
        Severity.WARNING: _fires("overflow_rising", 180),
        Severity.CRITICAL: _fires("overflow_critical", 140),
    },
    at=30,
    not_yet=(9,),
)

_STORM = Example(
    title="a burst of overflows, until overflow_window has passed",
    minutes=34,
    tracks=_skipping([*_every(2, 240), *_every(2000, 1800)]),
    fires={
        Severity.WARNING: _fires("overflow_rising", 111),
        Severity.CRITICAL: _fires("overflow_critical", 20),
    },
    at=5,
    not_yet=(33,),
)

_SLOWLY_RISING = Example(
    title="a small share that rises from window to window of steps",
    minutes=64,
    tracks=_skipping([*_every(1000, 5000), *_every(400, 5000), *_every(150, 6000)], steps=250),
    fires={Severity.WARNING: _fires("overflow_rising", 12)},
    at=63,
    not_yet=(40,),
)

_HEALTHY = Example(
    title="GradScaler's healthy 1 in 2000",
    minutes=60,
    tracks=_skipping(_every(2000, 24_000), steps=400),
)

_FEW_STEPS = Example(
    title="two overflows among few steps",
    minutes=20,
    tracks=_skipping([index in (20, 24) for index in range(40)], after=790, steps=2),
)

_CALIBRATION = Example(
    title="calibration",
    minutes=20,
    tracks=_skipping([*_every(5, 450), *_every(2000, 750)], after=0),
)

_CALIBRATION_AGAIN = Example(
    title="calibration of the next attempt",
    minutes=20,
    tracks=_skipping([*_every(3, 100), *_every(2000, 1100)], after=0, steps=60),
)

_RISING_TOO_LOW = Example(
    title="a share that rises below 0.1 %",
    minutes=62,
    tracks=_skipping([*_every(10_000, 5000), *_every(4000, 5000), *_every(1100, 5500)], steps=250),
)

_FELL_BEFORE = Example(
    title="a share that fell and rises again",
    minutes=62,
    tracks=_skipping([*_every(500, 5000), *_every(1000, 5000), *_every(150, 5500)], steps=250),
)

_ALL_BUT_STEADY = Example(
    title="a scale close to overflow, with a random number of skips",
    minutes=62,
    tracks=_skipping([*_every(250, 5000), *_every(240, 5000), *_every(200, 5500)], steps=250),
)


EXAMPLES = {
    "MpAgentOverflowRatioHigh": Examples(
        firing=(_TWO_IN_A_HUNDRED, _FIFTH, _STORM, _SLOWLY_RISING),
        quiet=(
            _HEALTHY,
            _FEW_STEPS,
            _CALIBRATION,
            _CALIBRATION_AGAIN,
            _RISING_TOO_LOW,
            _FELL_BEFORE,
            _ALL_BUT_STEADY,
        ),
    ),
}
