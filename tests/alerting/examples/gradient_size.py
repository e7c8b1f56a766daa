"""Examples of alerts on the size of a run's gradients."""

from mp_agent.alerting.conditions.gradient_size import (
    _COUNT,
    _FLOOR,
    _GRADIENT_VANISHING_HOLD,
    _LOW,
    _LOW_HOLD,
    _VANISHED,
    _VERY_LOW,
    _VERY_LOW_HOLD,
    CONTAINED,
    EXTREME,
    HIGH,
    _description,
    describe,
)
from mp_agent.alerting.durations import Duration
from mp_agent.alerting.expressions.terms import Limit
from mp_agent.alerting.severity import Severity
from mp_agent.catalog.metrics import distribution, gradient_layers, gradients, run, training
from mp_agent.catalog.metrics.gradient_layers import LAYERS_UNDERFLOWING
from mp_agent.catalog.metrics.gradients import GRAD_ABS_MIN
from mp_agent.catalog.metrics.run import STEP, STEPS
from mp_agent.catalog.metrics.training import LOSS_SCALE
from tests.alerting.examples.example import Example, Examples, Track, Value, flat, ramp
from tests.alerting.examples.healthy import noisy


def _explosion_fires(bound: Limit, steps: int, end: str = "") -> str:
    return describe(bound, end).replace("{run}", "demo").replace(_COUNT, str(steps))


def _above(
    high: tuple[Value, ...], extreme: tuple[Value, ...], *, clipped: bool = False
) -> tuple[Track, ...]:
    """Return the counters of steps above the bounds; clipped: what they are if all were."""
    unclipped = (
        ()
        if clipped
        else (
            Track(gradient_layers.GRAD_EXPLODED_UNCLIPPED, high, {"bound": HIGH}),
            Track(gradient_layers.GRAD_EXPLODED_UNCLIPPED, extreme, {"bound": EXTREME}),
        )
    )
    return (
        Track(gradient_layers.GRAD_EXPLODED, high, {"bound": HIGH}),
        Track(gradient_layers.GRAD_EXPLODED, extreme, {"bound": EXTREME}),
        *unclipped,
    )


_ONE = (*flat(0, 10), 1.0)

_EVERY = (*flat(0, 10), *ramp(60, 60, 11))

_SOARING = (
    Track(run.LOSS, (*noisy(2.0, 10), 9.0)),
    Track(training.LOSS_SPIKE_STEPS, (*flat(0, 10), *ramp(59, 60, 11))),
)

_SPIKE = {"MpAgentLossSpike": (Severity.WARNING,)}

_UNCLIPPED = Example(
    title="one unclipped step above the extreme limit",
    minutes=20,
    tracks=_above(_ONE, _ONE),
    fires={
        Severity.CRITICAL: _explosion_fires(EXTREME, 1),
        Severity.WARNING: _explosion_fires(HIGH, 1),
    },
    at=12,
    not_yet=(9, 20),
)

_BORN = Example(
    title="a run that exploded before its first scrape",
    age_minutes=0,
    minutes=12,
    tracks=_above((None, None, 7), (None, None, 3)),
    fires={
        Severity.CRITICAL: _explosion_fires(EXTREME, 3),
        Severity.WARNING: _explosion_fires(HIGH, 7),
    },
    at=3,
    not_yet=(1, 9),
)

_HIGH_ONLY = Example(
    title="a norm above the high limit",
    minutes=20,
    tracks=_above(_ONE, (0,)),
    fires={Severity.WARNING: _explosion_fires(HIGH, 1)},
    at=12,
    not_yet=(10, 20),
)

_DIVERGING = Example(
    title="every step above the extreme limit clipped, but the loss rises sharply",
    minutes=20,
    tracks=(*_above(_EVERY, _EVERY, clipped=True), *_SOARING),
    also=_SPIKE,
    fires={
        Severity.CRITICAL: _explosion_fires(EXTREME, 300),
        Severity.WARNING: _explosion_fires(HIGH, 300),
    },
    at=18,
    not_yet=(9,),
)

_DIVERGING_HIGH = Example(
    title="every step above the high limit clipped, but the loss rises sharply",
    minutes=20,
    tracks=(*_above(_EVERY, (0,), clipped=True), *_SOARING),
    also=_SPIKE,
    fires={Severity.WARNING: _explosion_fires(HIGH, 300)},
    at=18,
    not_yet=(9,),
)

_CONTAINED_EXTREME = Example(
    title="every step above the extreme limit clipped, with a stable loss: one severity lower",
    minutes=20,
    tracks=_above(_EVERY, _EVERY, clipped=True),
    fires={
        Severity.WARNING: _explosion_fires(HIGH, 300),
        Severity.INFO: _explosion_fires(HIGH, 300, CONTAINED),
    },
    at=18,
    not_yet=(9,),
)

_CONTAINED_HIGH = Example(
    title="every step above the high limit clipped, with a stable loss: one severity lower",
    minutes=20,
    tracks=_above(_EVERY, (0,), clipped=True),
    fires={Severity.INFO: _explosion_fires(HIGH, 300, CONTAINED)},
    at=18,
    not_yet=(9, 10),
)

_NONFINITE = tuple(
    Track(metric, (*flat(0, 10), *ramp(1, 1, 11)))
    for metric in (run.LOSS_NONFINITE_STEPS, training.LOSS_NONFINITE_UNSKIPPED)
)

_CLIPPED_EXTREME_WITH_NAN = Example(
    title="every step above the extreme limit clipped, but some losses are NaN",
    minutes=20,
    tracks=(*_above(_EVERY, _EVERY, clipped=True), *_NONFINITE),
    fires={
        Severity.CRITICAL: _explosion_fires(EXTREME, 300),
        Severity.WARNING: _explosion_fires(HIGH, 300),
    },
    at=18,
    not_yet=(9,),
    also={"MpAgentLossNonFinite": (Severity.CRITICAL,)},
)

_CLIPPED_HIGH_WITH_NAN = Example(
    title="every step above the high limit clipped, but some losses are NaN",
    minutes=20,
    tracks=(*_above(_EVERY, (0,), clipped=True), *_NONFINITE),
    fires={Severity.WARNING: _explosion_fires(HIGH, 300)},
    at=18,
    not_yet=(9,),
    also={"MpAgentLossNonFinite": (Severity.CRITICAL,)},
)

_YOUNG_EXTREME = Example(
    title="a run without a baseline, every step above the extreme limit and clipped",
    minutes=9,
    tracks=_above(ramp(0, 60, 10), ramp(0, 60, 10), clipped=True),
    without=(training.LOSS_MEDIAN,),
    fires={
        Severity.CRITICAL: _explosion_fires(EXTREME, 300),
        Severity.WARNING: _explosion_fires(HIGH, 300),
    },
    at=8,
)

_YOUNG_HIGH = Example(
    title="a run without a baseline, every step above the high limit and clipped",
    minutes=9,
    tracks=_above(ramp(0, 60, 10), (0,), clipped=True),
    without=(training.LOSS_MEDIAN,),
    fires={Severity.WARNING: _explosion_fires(HIGH, 300)},
    at=8,
)

_SINGLE_CLIPPED_SPIKE = Example(
    title="a single clipped spike, even of a run without a baseline: never critical",
    minutes=12,
    tracks=_above((*flat(0, 3), 1), (*flat(0, 3), 1), clipped=True),
    without=(training.LOSS_MEDIAN,),
    fires={Severity.WARNING: _explosion_fires(HIGH, 1)},
    at=5,
    not_yet=(11,),
)

_LOST = Example(
    title="clipped norms of a run whose loss rose permanently, so that its median followed",
    minutes=20,
    tracks=(
        *_above(_EVERY, _EVERY, clipped=True),
        Track(training.LOSS_LOST_STEPS, (*flat(0, 10), *ramp(60, 60, 11))),
    ),
    also={"MpAgentLossDiverging": (Severity.CRITICAL,)},
    fires={
        Severity.CRITICAL: _explosion_fires(EXTREME, 300),
        Severity.WARNING: _explosion_fires(HIGH, 300),
    },
    at=18,
    not_yet=(9,),
)

_LOST_HIGH = Example(
    title="clipped norms above the high limit of a run that has lost what it had learned",
    minutes=20,
    tracks=(
        *_above(_EVERY, (0,), clipped=True),
        Track(training.LOSS_LOST_STEPS, (*flat(0, 10), *ramp(60, 60, 11))),
    ),
    also={"MpAgentLossDiverging": (Severity.CRITICAL,)},
    fires={Severity.WARNING: _explosion_fires(HIGH, 300)},
    at=18,
    not_yet=(9,),
)

_LARGE_BY_NATURE = Example(
    title="norms of thousands since the first step, as with a summed loss",
    minutes=15,
    tracks=(
        Track(gradients.GRAD_NORM, (4000,)),
        Track(gradients.GRAD_NORM_WINDOW_MAX, (9000,)),
        *(
            Track(gradients.GRAD_NORM_EXCEEDED, ramp(0, 60, 16), {"bound": bound})
            for bound in (HIGH, EXTREME)
        ),
    ),
)

_EXPLOSION_BELOW = Example(
    title="norms up to 99, scaled by 65536 in backward",
    minutes=15,
    tracks=(Track(gradients.GRAD_NORM, (99,)), Track(gradients.GRAD_NORM_WINDOW_MAX, (99,))),
)

_SKIPPED = Example(
    title="the finite part of a skipped overflow step, which exceeds no bound",
    minutes=20,
    tracks=(
        Track(training.SKIPPED_STEPS, _ONE),
        Track(gradients.GRAD_FINITE, (*flat(1, 10), 0, 1)),
        Track(training.LOSS_SCALE, (*flat(65536, 10), 32768)),
        Track(training.LOSS_SCALE_DECREASES, _ONE),
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
    fires={
        Severity.CRITICAL: _explosion_fires(EXTREME, 4),
        Severity.WARNING: _explosion_fires(HIGH, 4),
    },
    at=3,
    not_yet=(39, 41, 42, 45, 46, 47),
)

_EXPLOSION_FIRING = (
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

_EXPLOSION_QUIET = (_EXPLOSION_BELOW, _SKIPPED, _LARGE_BY_NATURE)


def _gradient_vanishing_fires(bound: Limit, hold: Duration, norm: str) -> str:
    text = _description(bound, hold)
    return text.replace("{run}", "demo").replace("{value|number}", norm)


def _norms(*values: Value) -> tuple[Track, ...]:
    return (
        Track(gradients.GRAD_NORM, values),
        Track(gradients.GRAD_NORM_WINDOW_MAX, values),
        *_many_below(len(values) - 1),
    )


def _many_below(healthy: int = 0, steps: Value = 600) -> tuple[Track, ...]:
    """Return the counts of steps in a row below all limits, after so many healthy minutes."""
    counts = (*flat(0, healthy), steps)
    return tuple(
        Track(gradient_layers.GRAD_NORM_BELOW, counts, {"limit": bound.threshold.name})
        for bound in (_LOW, _VERY_LOW, _VANISHED)
    )


_ALL_THREE = Example(
    title="gradients that vanish completely",
    minutes=46,
    tracks=_norms(*flat(1.2, 10), 1e-7),
    fires={
        Severity.CRITICAL: _gradient_vanishing_fires(_VANISHED, _GRADIENT_VANISHING_HOLD, "1e-07"),
        Severity.WARNING: _gradient_vanishing_fires(_VERY_LOW, _VERY_LOW_HOLD, "1e-07"),
        Severity.INFO: _gradient_vanishing_fires(_LOW, _LOW_HOLD, "1e-07"),
    },
    at=45,
    not_yet=(11,),
)

_NOISY = Example(
    title="vanished gradients, and a loss that once looks as if it fell",
    minutes=46,
    tracks=(*_norms(*flat(1.2, 10), 1e-7), Track(run.LOSS, (*flat(2.0, 38), 1.0))),
    fires=_ALL_THREE.fires,
    at=45,
    not_yet=(11,),
)

_VERY_LOW_ONLY = Example(
    title="gradients below a thousandth, with a constant loss",
    minutes=22,
    tracks=_norms(*flat(1.2, 10), 0.0005),
    fires={Severity.WARNING: _gradient_vanishing_fires(_VERY_LOW, _VERY_LOW_HOLD, "0.0005")},
    at=21,
    not_yet=(19,),
)

_SLOW_STEPS = Example(
    title="steps of several minutes, so that the window is empty",
    minutes=46,
    tracks=(
        Track(gradients.GRAD_NORM, (0.005,)),
        *_many_below(steps=20),
        Track(run.STEP, tuple(float(5000 + minute // 4) for minute in range(47))),
        Track(run.STEPS, tuple(float(5000 + minute // 4) for minute in range(47))),
    ),
    without=(gradients.GRAD_NORM_WINDOW_MAX,),
    fires={Severity.INFO: _gradient_vanishing_fires(_LOW, _LOW_HOLD, "0.005")},
    at=45,
    not_yet=(25,),
)

_OF_TWO_OPTIMIZERS = Example(
    title="the first of two optimizers, while the second has large norms and overflows",
    minutes=15,
    tracks=(
        Track(gradients.GRAD_NORM, (*flat(1.2, 10), 1e-7)),
        *_many_below(10),
        Track(gradients.GRAD_NORM, (1.2,), {"optimizer": "2"}),
        Track(gradients.GRAD_FINITE, (0,), {"optimizer": "2"}),
    ),
    without=(gradients.GRAD_NORM_WINDOW_MAX,),
    fires={
        Severity.CRITICAL: _gradient_vanishing_fires(_VANISHED, _GRADIENT_VANISHING_HOLD, "1e-07")
    },
    at=13,
    not_yet=(9, 11),
)

_CONVERGING = Example(
    title="a converged run whose loss still falls: info at most",
    minutes=46,
    tracks=(
        *_norms(*flat(1.2, 10), 1e-7),
        Track(run.LOSS, noisy(2.0, 47, slope=-0.03)),
    ),
    fires={Severity.INFO: _gradient_vanishing_fires(_LOW, _LOW_HOLD, "1e-07")},
    at=45,
    not_yet=(39,),
)

_TINY_UNITS = Example(
    title="a loss in tiny units, whose norm was never larger: info at most",
    minutes=46,
    tracks=(*_norms(3e-7), Track(gradient_layers.GRAD_NORM_PEAK, (9e-7,))),
    fires={Severity.INFO: _gradient_vanishing_fires(_LOW, _LOW_HOLD, "3e-07")},
    at=45,
    not_yet=(25,),
)

_AFTER_CLIPPED_INF = Example(
    title="zeros left by clipping after an Inf",
    minutes=46,
    tracks=(*_norms(*flat(1.2, 10), 0), Track(gradients.GRAD_FINITE, (*flat(1, 10), 0))),
)

_FROZEN = Example(
    title="a run that hangs after a step with a tiny norm",
    minutes=40,
    tracks=(
        Track(gradients.GRAD_NORM, (1e-7,)),
        Track(gradients.GRAD_NORM_WINDOW_MAX, (1e-7,)),
        *_many_below(steps=1),
        Track(run.STEP, (5000,)),
        Track(run.STEPS, (5000,)),
    ),
    also={"MpAgentRunStalled": (Severity.CRITICAL, Severity.WARNING)},
)

_PARTIAL = Example(
    title="merged steps without one rank",
    minutes=40,
    tracks=(*_norms(1e-7), Track(run.COVERAGE, (0.75,))),
    also={"MpAgentCoverageLow": (Severity.WARNING,)},
)

_INTERRUPTED = Example(
    title="low norms with a healthy step every few minutes",
    minutes=40,
    tracks=(
        Track(gradients.GRAD_NORM, (0.0005,)),
        Track(gradients.GRAD_NORM_WINDOW_MAX, (0.0005, 0.0005, 0.0005, 0.4) * 10),
        *_many_below(),
    ),
)


_FIRES = Example(
    title="gradients that shrink until the smallest are FP16's smallest number",
    minutes=20,
    tracks=(
        Track(LOSS_SCALE, (65536,)),
        Track(GRAD_ABS_MIN, (*flat(3e-11, 4), _FLOOR / 65536)),
        Track(LAYERS_UNDERFLOWING, (*flat(0, 4), 0.02)),
    ),
    fires={
        Severity.INFO: "The smallest gradients of run demo lie at FP16's smallest number, and some "
        "layers have far more zeros than at the start: what was smaller was lost."
    },
    at=15,
    not_yet=(7,),
)

_NO_MORE_ZEROS = Example(
    title="smallest gradients at FP16's smallest number, and no more zeros than at the start",
    minutes=12,
    tracks=(
        Track(LOSS_SCALE, (65536,)),
        Track(GRAD_ABS_MIN, (_FLOOR / 65536,)),
        Track(LAYERS_UNDERFLOWING, (0,)),
    ),
)

_SPARSE = Example(
    title="more zeros, but smallest gradients well above FP16's smallest number: sparsity",
    minutes=12,
    tracks=(
        Track(LOSS_SCALE, (65536,)),
        Track(GRAD_ABS_MIN, (1e-9,)),
        Track(LAYERS_UNDERFLOWING, (0.02,)),
    ),
)

_GRADIENT_AT_FLOOR_BELOW = Example(
    title="smallest gradients below FP16's smallest number: those of layers that run in FP32",
    minutes=12,
    tracks=(
        Track(LOSS_SCALE, (65536,)),
        Track(GRAD_ABS_MIN, (1e-15,)),
        Track(LAYERS_UNDERFLOWING, (0.02,)),
    ),
)

_HUNG = Example(
    title="a run that hung after a single look at an odd batch",
    minutes=18,
    tracks=(
        Track(LOSS_SCALE, (65536,)),
        Track(GRAD_ABS_MIN, (_FLOOR / 65536,)),
        Track(LAYERS_UNDERFLOWING, (*flat(0, 9), 0.02)),
        Track(STEP, ramp(5000, 60, 10)),
        Track(STEPS, ramp(5000, 60, 10)),
    ),
)


_IN_FORCE = {"scale": "in_force"}

_BOTH = Example(
    title="small gradients are lost while the largest are at the limit",
    minutes=25,
    tracks=(
        Track(distribution.GRAD_FP16_FLUSHED, (*flat(0, 5), 0.12), _IN_FORCE),
        Track(gradients.GRAD_FP16_HEADROOM, (*flat(4, 5), 0.6)),
    ),
    fires={
        Severity.INFO: "No loss scale suits run demo any more: 12% of the gradients are lost "
        "below FP16's smallest number, and the next doubling of the scale overflows."
    },
    at=20,
    not_yet=(7,),
)

_LOW_SCALE = Example(
    title="a scale that can still grow",
    minutes=20,
    tracks=(
        Track(distribution.GRAD_FP16_FLUSHED, (0.12,), _IN_FORCE),
        Track(gradients.GRAD_FP16_HEADROOM, (6,)),
    ),
)

_HIGH_SCALE = Example(
    title="a scale at its upper limit that loses next to nothing",
    minutes=20,
    tracks=(
        Track(distribution.GRAD_FP16_FLUSHED, (0.01,), _IN_FORCE),
        Track(gradients.GRAD_FP16_HEADROOM, (0.6,)),
    ),
)

_SHORT = Example(
    title="a few unusual samples",
    minutes=20,
    tracks=(
        Track(distribution.GRAD_FP16_FLUSHED, (*flat(0.12, 4), 0.01), _IN_FORCE),
        Track(gradients.GRAD_FP16_HEADROOM, (0.6,)),
    ),
)


EXAMPLES = {
    "MpAgentGradientExplosion": Examples(
        firing=_EXPLOSION_FIRING,
        quiet=_EXPLOSION_QUIET,
    ),
    "MpAgentGradientVanishing": Examples(
        firing=(
            _ALL_THREE,
            _VERY_LOW_ONLY,
            _SLOW_STEPS,
            _OF_TWO_OPTIMIZERS,
            _CONVERGING,
            _NOISY,
            _TINY_UNITS,
        ),
        quiet=(_AFTER_CLIPPED_INF, _FROZEN, _PARTIAL, _INTERRUPTED),
    ),
    "MpAgentGradientAtFloor": Examples(
        firing=(_FIRES,),
        quiet=(_NO_MORE_ZEROS, _SPARSE, _GRADIENT_AT_FLOOR_BELOW, _HUNG),
    ),
    "MpAgentHeadroomVanishing": Examples(
        firing=(_BOTH,),
        quiet=(_LOW_SCALE, _HIGH_SCALE, _SHORT),
    ),
}
