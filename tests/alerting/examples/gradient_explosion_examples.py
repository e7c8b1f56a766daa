"""Parts of examples that several alerts share."""

from mp_agent.alerting.conditions.gradient_size import (
    _COUNT,
    CONTAINED,
    EXTREME,
    HIGH,
    describe,
)
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.terms import Limit
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Track, Value, flat, ramp
from tests.alerting.examples.healthy import noisy


def _fires(bound: Limit, steps: int, end: str = "") -> str:
    return describe(bound, end).replace("{run}", "demo").replace(_COUNT, str(steps))


def _above(
    high: tuple[Value, ...], extreme: tuple[Value, ...], *, clipped: bool = False
) -> tuple[Track, ...]:
    """Return the counters of steps above the bounds; clipped: what they are if all were."""
    unclipped = (
        ()
        if clipped
        else (
            Track(metrics.GRAD_EXPLODED_UNCLIPPED, high, {"bound": HIGH}),
            Track(metrics.GRAD_EXPLODED_UNCLIPPED, extreme, {"bound": EXTREME}),
        )
    )
    return (
        Track(metrics.GRAD_EXPLODED, high, {"bound": HIGH}),
        Track(metrics.GRAD_EXPLODED, extreme, {"bound": EXTREME}),
        *unclipped,
    )


_ONE = (*flat(0, 10), 1.0)

_EVERY = (*flat(0, 10), *ramp(60, 60, 11))

_SOARING = (
    Track(metrics.LOSS, (*noisy(2.0, 10), 9.0)),
    Track(metrics.LOSS_SPIKE_STEPS, (*flat(0, 10), *ramp(59, 60, 11))),
)

_SPIKE = {"MpAgentLossSpike": (Severity.WARNING,)}

_UNCLIPPED = Example(
    title="one unclipped step above the extreme limit",
    minutes=20,
    tracks=_above(_ONE, _ONE),
    fires={Severity.CRITICAL: _fires(EXTREME, 1), Severity.WARNING: _fires(HIGH, 1)},
    at=12,
    not_yet=(9, 20),
)

_BORN = Example(
    title="a run that exploded before its first scrape",
    age_minutes=0,
    minutes=12,
    tracks=_above((None, None, 7), (None, None, 3)),
    fires={Severity.CRITICAL: _fires(EXTREME, 3), Severity.WARNING: _fires(HIGH, 7)},
    at=3,
    not_yet=(1, 9),
)

_HIGH_ONLY = Example(
    title="a norm above the high limit",
    minutes=20,
    tracks=_above(_ONE, (0,)),
    fires={Severity.WARNING: _fires(HIGH, 1)},
    at=12,
    not_yet=(10, 20),
)

_DIVERGING = Example(
    title="every step above the extreme limit clipped, but the loss rises sharply",
    minutes=20,
    tracks=(*_above(_EVERY, _EVERY, clipped=True), *_SOARING),
    also=_SPIKE,
    fires={Severity.CRITICAL: _fires(EXTREME, 300), Severity.WARNING: _fires(HIGH, 300)},
    at=18,
    not_yet=(9,),
)

_DIVERGING_HIGH = Example(
    title="every step above the high limit clipped, but the loss rises sharply",
    minutes=20,
    tracks=(*_above(_EVERY, (0,), clipped=True), *_SOARING),
    also=_SPIKE,
    fires={Severity.WARNING: _fires(HIGH, 300)},
    at=18,
    not_yet=(9,),
)

_CONTAINED_EXTREME = Example(
    title="every step above the extreme limit clipped, with a stable loss: one severity lower",
    minutes=20,
    tracks=_above(_EVERY, _EVERY, clipped=True),
    fires={
        Severity.WARNING: _fires(HIGH, 300),
        Severity.INFO: _fires(HIGH, 300, CONTAINED),
    },
    at=18,
    not_yet=(9,),
)

_CONTAINED_HIGH = Example(
    title="every step above the high limit clipped, with a stable loss: one severity lower",
    minutes=20,
    tracks=_above(_EVERY, (0,), clipped=True),
    fires={Severity.INFO: _fires(HIGH, 300, CONTAINED)},
    at=18,
    not_yet=(9, 10),
)

_NONFINITE = tuple(
    Track(metric, (*flat(0, 10), *ramp(1, 1, 11)))
    for metric in (metrics.LOSS_NONFINITE_STEPS, metrics.LOSS_NONFINITE_UNSKIPPED)
)

_CLIPPED_EXTREME_WITH_NAN = Example(
    title="every step above the extreme limit clipped, but some losses are NaN",
    minutes=20,
    tracks=(*_above(_EVERY, _EVERY, clipped=True), *_NONFINITE),
    fires={Severity.CRITICAL: _fires(EXTREME, 300), Severity.WARNING: _fires(HIGH, 300)},
    at=18,
    not_yet=(9,),
    also={"MpAgentLossNonFinite": (Severity.CRITICAL,)},
)

_CLIPPED_HIGH_WITH_NAN = Example(
    title="every step above the high limit clipped, but some losses are NaN",
    minutes=20,
    tracks=(*_above(_EVERY, (0,), clipped=True), *_NONFINITE),
    fires={Severity.WARNING: _fires(HIGH, 300)},
    at=18,
    not_yet=(9,),
    also={"MpAgentLossNonFinite": (Severity.CRITICAL,)},
)

_YOUNG_EXTREME = Example(
    title="a run without a baseline, every step above the extreme limit and clipped",
    minutes=9,
    tracks=_above(ramp(0, 60, 10), ramp(0, 60, 10), clipped=True),
    without=(metrics.LOSS_MEDIAN,),
    fires={Severity.CRITICAL: _fires(EXTREME, 300), Severity.WARNING: _fires(HIGH, 300)},
    at=8,
)

_YOUNG_HIGH = Example(
    title="a run without a baseline, every step above the high limit and clipped",
    minutes=9,
    tracks=_above(ramp(0, 60, 10), (0,), clipped=True),
    without=(metrics.LOSS_MEDIAN,),
    fires={Severity.WARNING: _fires(HIGH, 300)},
    at=8,
)

_SINGLE_CLIPPED_SPIKE = Example(
    title="a single clipped spike, even of a run without a baseline: never critical",
    minutes=12,
    tracks=_above((*flat(0, 3), 1), (*flat(0, 3), 1), clipped=True),
    without=(metrics.LOSS_MEDIAN,),
    fires={Severity.WARNING: _fires(HIGH, 1)},
    at=5,
    not_yet=(11,),
)

_LOST = Example(
    title="clipped norms of a run whose loss rose permanently, so that its median followed",
    minutes=20,
    tracks=(
        *_above(_EVERY, _EVERY, clipped=True),
        Track(metrics.LOSS_LOST_STEPS, (*flat(0, 10), *ramp(60, 60, 11))),
    ),
    also={"MpAgentLossDiverging": (Severity.CRITICAL,)},
    fires={Severity.CRITICAL: _fires(EXTREME, 300), Severity.WARNING: _fires(HIGH, 300)},
    at=18,
    not_yet=(9,),
)

_LOST_HIGH = Example(
    title="clipped norms above the high limit of a run that has lost what it had learned",
    minutes=20,
    tracks=(
        *_above(_EVERY, (0,), clipped=True),
        Track(metrics.LOSS_LOST_STEPS, (*flat(0, 10), *ramp(60, 60, 11))),
    ),
    also={"MpAgentLossDiverging": (Severity.CRITICAL,)},
    fires={Severity.WARNING: _fires(HIGH, 300)},
    at=18,
    not_yet=(9,),
)

_LARGE_BY_NATURE = Example(
    title="norms of thousands since the first step, as with a summed loss",
    minutes=15,
    tracks=(
        Track(metrics.GRAD_NORM, (4000,)),
        Track(metrics.GRAD_NORM_WINDOW_MAX, (9000,)),
        *(
            Track(metrics.GRAD_NORM_EXCEEDED, ramp(0, 60, 16), {"bound": bound})
            for bound in (HIGH, EXTREME)
        ),
    ),
)

_BELOW = Example(
    title="norms up to 99, scaled by 65536 in backward",
    minutes=15,
    tracks=(Track(metrics.GRAD_NORM, (99,)), Track(metrics.GRAD_NORM_WINDOW_MAX, (99,))),
)

_SKIPPED = Example(
    title="the finite part of a skipped overflow step, which exceeds no bound",
    minutes=20,
    tracks=(
        Track(metrics.SKIPPED_STEPS, _ONE),
        Track(metrics.GRAD_FINITE, (*flat(1, 10), 0, 1)),
        Track(metrics.LOSS_SCALE, (*flat(65536, 10), 32768)),
        Track(metrics.LOSS_SCALE_DECREASES, _ONE),
    ),
)

_BEFORE_FAILED_SCRAPE = Example(
    title="an explosion, but not again when half an hour later a scrape fails",
    age_minutes=0,
    minutes=60,
    tracks=(
        *_above((*flat(4, 40), "stale", *flat(4, 20)), (*flat(4, 40), "stale", *flat(4, 20))),
        Track("up", (*flat(1, 40), 0, 1)),
    ),
    fires={Severity.CRITICAL: _fires(EXTREME, 4), Severity.WARNING: _fires(HIGH, 4)},
    at=3,
    not_yet=(39, 41, 42, 45, 46, 47),
)

FIRING = (
    _UNCLIPPED,
    _BORN,
    _HIGH_ONLY,
    _DIVERGING,
    _DIVERGING_HIGH,
    _CONTAINED_EXTREME,
    _CONTAINED_HIGH,
    _CLIPPED_EXTREME_WITH_NAN,
    _CLIPPED_HIGH_WITH_NAN,
    _YOUNG_EXTREME,
    _YOUNG_HIGH,
    _SINGLE_CLIPPED_SPIKE,
    _LOST,
    _LOST_HIGH,
    _BEFORE_FAILED_SCRAPE,
)

QUIET = (_BELOW, _SKIPPED, _LARGE_BY_NATURE)
