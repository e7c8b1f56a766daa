"""Examples of MpAgentGradientVanishing."""

from mp_agent.alerting.conditions.gradient_size import (
    _GRADIENT_VANISHING_HOLD,
    _LOW,
    _LOW_HOLD,
    _VANISHED,
    _VERY_LOW,
    _VERY_LOW_HOLD,
    _description,
)
from mp_agent.alerting.durations import Duration
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.terms import Limit
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, Value, flat
from tests.alerting.examples.healthy import noisy


def _fires(bound: Limit, hold: Duration, norm: str) -> str:
    text = _description(bound, hold)
    return text.replace("{run}", "demo").replace("{value|number}", norm)


def _norms(*values: Value) -> tuple[Track, ...]:
    return (
        Track(metrics.GRAD_NORM, values),
        Track(metrics.GRAD_NORM_WINDOW_MAX, values),
        *_many_below(len(values) - 1),
    )


def _many_below(healthy: int = 0, steps: Value = 600) -> tuple[Track, ...]:
    """Return the counts of steps in a row below all limits, after so many healthy minutes."""
    counts = (*flat(0, healthy), steps)
    return tuple(
        Track(metrics.GRAD_NORM_BELOW, counts, {"limit": bound.threshold.name})
        for bound in (_LOW, _VERY_LOW, _VANISHED)
    )


_ALL_THREE = Example(
    title="gradients that vanish completely",
    minutes=46,
    tracks=_norms(*flat(1.2, 10), 1e-7),
    fires={
        Severity.CRITICAL: _fires(_VANISHED, _GRADIENT_VANISHING_HOLD, "1e-07"),
        Severity.WARNING: _fires(_VERY_LOW, _VERY_LOW_HOLD, "1e-07"),
        Severity.INFO: _fires(_LOW, _LOW_HOLD, "1e-07"),
    },
    at=45,
    not_yet=(11,),
)

_VERY_LOW_ONLY = Example(
    title="gradients below a thousandth, with a constant loss",
    minutes=22,
    tracks=_norms(*flat(1.2, 10), 0.0005),
    fires={Severity.WARNING: _fires(_VERY_LOW, _VERY_LOW_HOLD, "0.0005")},
    at=21,
    not_yet=(19,),
)

_SLOW_STEPS = Example(
    title="steps of several minutes, so that the window is empty",
    minutes=46,
    tracks=(
        Track(metrics.GRAD_NORM, (0.005,)),
        *_many_below(steps=20),
        Track(metrics.STEP, tuple(float(5000 + minute // 4) for minute in range(47))),
        Track(metrics.STEPS, tuple(float(5000 + minute // 4) for minute in range(47))),
    ),
    without=(metrics.GRAD_NORM_WINDOW_MAX,),
    fires={Severity.INFO: _fires(_LOW, _LOW_HOLD, "0.005")},
    at=45,
    not_yet=(25,),
)

_OF_TWO_OPTIMIZERS = Example(
    title="the first of two optimizers, while the second has large norms and overflows",
    minutes=15,
    tracks=(
        Track(metrics.GRAD_NORM, (*flat(1.2, 10), 1e-7)),
        *_many_below(10),
        Track(metrics.GRAD_NORM, (1.2,), {"optimizer": "2"}),
        Track(metrics.GRAD_FINITE, (0,), {"optimizer": "2"}),
    ),
    without=(metrics.GRAD_NORM_WINDOW_MAX,),
    fires={Severity.CRITICAL: _fires(_VANISHED, _GRADIENT_VANISHING_HOLD, "1e-07")},
    at=13,
    not_yet=(9, 11),
)

_CONVERGING = Example(
    title="a converged run whose loss still falls: info at most",
    minutes=46,
    tracks=(
        *_norms(*flat(1.2, 10), 1e-7),
        Track(metrics.LOSS, noisy(2.0, 47, slope=-0.03)),
    ),
    fires={Severity.INFO: _fires(_LOW, _LOW_HOLD, "1e-07")},
    at=45,
    not_yet=(39,),
)

_NOISY = Example(
    title="vanished gradients, and a loss that once looks as if it fell",
    minutes=46,
    tracks=(*_norms(*flat(1.2, 10), 1e-7), Track(metrics.LOSS, (*flat(2.0, 38), 1.0))),
    fires={
        Severity.CRITICAL: _fires(_VANISHED, _GRADIENT_VANISHING_HOLD, "1e-07"),
        Severity.WARNING: _fires(_VERY_LOW, _VERY_LOW_HOLD, "1e-07"),
        Severity.INFO: _fires(_LOW, _LOW_HOLD, "1e-07"),
    },
    at=45,
    not_yet=(11,),
)

_TINY_UNITS = Example(
    title="a loss in tiny units, whose norm was never larger: info at most",
    minutes=46,
    tracks=(*_norms(3e-7), Track(metrics.GRAD_NORM_PEAK, (9e-7,))),
    fires={Severity.INFO: _fires(_LOW, _LOW_HOLD, "3e-07")},
    at=45,
    not_yet=(25,),
)

_AFTER_CLIPPED_INF = Example(
    title="zeros left by clipping after an Inf",
    minutes=46,
    tracks=(*_norms(*flat(1.2, 10), 0), Track(metrics.GRAD_FINITE, (*flat(1, 10), 0))),
)

_FROZEN = Example(
    title="a run that hangs after a step with a tiny norm",
    minutes=40,
    tracks=(
        Track(metrics.GRAD_NORM, (1e-7,)),
        Track(metrics.GRAD_NORM_WINDOW_MAX, (1e-7,)),
        *_many_below(steps=1),
        Track(metrics.STEP, (5000,)),
        Track(metrics.STEPS, (5000,)),
    ),
    also={"MpAgentRunStalled": (Severity.CRITICAL, Severity.WARNING)},
)

_PARTIAL = Example(
    title="merged steps without one rank",
    minutes=40,
    tracks=(*_norms(1e-7), Track(metrics.COVERAGE, (0.75,))),
    also={"MpAgentCoverageLow": (Severity.WARNING,)},
)

_INTERRUPTED = Example(
    title="low norms with a healthy step every few minutes",
    minutes=40,
    tracks=(
        Track(metrics.GRAD_NORM, (0.0005,)),
        Track(metrics.GRAD_NORM_WINDOW_MAX, (0.0005, 0.0005, 0.0005, 0.4) * 10),
        *_many_below(),
    ),
)

EXAMPLES = {
    "MpAgentGradientVanishing": Examples(
        firing=(
            *(_ALL_THREE, _VERY_LOW_ONLY, _SLOW_STEPS, _OF_TWO_OPTIMIZERS),
            *(_CONVERGING, _NOISY, _TINY_UNITS),
        ),
        quiet=(_AFTER_CLIPPED_INF, _FROZEN, _PARTIAL, _INTERRUPTED),
    ),
}
