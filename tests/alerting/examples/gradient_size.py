"""Examples of alerts on the size of a run's gradients."""

from mp_agent.alerting.conditions.gradient_size import (
    _COUNT,
    CONTAINED,
    EXTREME,
    HIGH,
    _description,
    describe,
)
from mp_agent.alerting.expressions import Limit
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import distribution, gradient_layers, gradients, run, training
from mp_agent.catalog.thresholds import resolve
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
    not_yet=(9, 20),
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
    not_yet=(9,),
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


_LOW_BOUNDS = ("grad_norm_low", "grad_norm_very_low", "grad_norm_vanished")


def _vanishing_fires(bound: str, norm: str) -> str:
    return _description(bound).replace("{run}", "demo").replace("{value|number}", norm)


def _norms(healthy: int, norm: float, minutes: int = 46) -> tuple[Track, ...]:
    """Return the norms of a run at a step a second, small after so many healthy minutes."""
    counts = (*flat(0, healthy), *ramp(60, 60, 47 - healthy))
    thresholds = resolve({})
    return (
        Track(gradients.GRAD_NORM, (*flat(1.2, healthy), norm)),
        *(
            Track(gradient_layers.GRAD_NORM_BELOW, counts[: minutes + 1], {"limit": name})
            for name in _LOW_BOUNDS
            if norm < thresholds[name]
        ),
    )


_ALL_THREE = Example(
    title="gradients that vanish completely",
    minutes=46,
    tracks=_norms(10, 1e-7),
    fires={
        Severity.CRITICAL: _vanishing_fires("grad_norm_vanished", "1e-07"),
        Severity.WARNING: _vanishing_fires("grad_norm_very_low", "1e-07"),
        Severity.INFO: _vanishing_fires("grad_norm_low", "1e-07"),
    },
    at=45,
    not_yet=(10,),
)

_NOISY = Example(
    title="vanished gradients, and a loss that once looks as if it fell",
    minutes=46,
    tracks=(*_norms(10, 1e-7), Track(training.LOSS_FALL, (*flat(0.1, 38), 1.5))),
    fires=_ALL_THREE.fires,
    at=45,
    not_yet=(10,),
)

_VERY_LOW_ONLY = Example(
    title="gradients below a thousandth, with a constant loss",
    minutes=22,
    tracks=_norms(10, 0.0005, 22),
    fires={Severity.WARNING: _vanishing_fires("grad_norm_very_low", "0.0005")},
    at=21,
    not_yet=(18,),
)

_OF_TWO_OPTIMIZERS = Example(
    title="the first of two optimizers, while the second has large norms and overflows",
    minutes=15,
    tracks=(
        *_norms(10, 1e-7, 15)[:1],
        *_norms(10, 1e-7, 15)[3:],
        Track(gradients.GRAD_NORM, (1.2,), {"optimizer": "2"}),
        Track(gradients.GRAD_FINITE, (0,), {"optimizer": "2"}),
    ),
    fires={Severity.CRITICAL: _vanishing_fires("grad_norm_vanished", "1e-07")},
    at=13,
    not_yet=(9, 10),
)

_CONVERGING = Example(
    title="a converged run whose loss still falls: info at most",
    minutes=46,
    tracks=(*_norms(10, 1e-7), Track(training.LOSS_FALL, (2.5,))),
    fires={Severity.INFO: _vanishing_fires("grad_norm_low", "1e-07")},
    at=45,
    not_yet=(38,),
)

_TINY_UNITS = Example(
    title="a loss in tiny units, whose norm was never larger: info at most",
    minutes=46,
    tracks=(*_norms(0, 3e-7), Track(gradient_layers.GRAD_NORM_PEAK, (9e-7,))),
    fires={Severity.INFO: _vanishing_fires("grad_norm_low", "3e-07")},
    at=45,
    not_yet=(25,),
)

_AFTER_CLIPPED_INF = Example(
    title="zeros left by clipping after an Inf",
    minutes=46,
    tracks=(*_norms(10, 0), Track(gradients.GRAD_FINITE, (*flat(1, 10), 0))),
)

_FROZEN = Example(
    title="a run that hangs after a step with a tiny norm",
    minutes=40,
    tracks=(
        Track(gradients.GRAD_NORM, (1e-7,)),
        *(Track(gradient_layers.GRAD_NORM_BELOW, (1,), {"limit": name}) for name in _LOW_BOUNDS),
        Track(run.STEP, (5000,)),
        Track(run.STEPS, (5000,)),
    ),
    also={"MpAgentRunStalled": (Severity.CRITICAL, Severity.WARNING)},
)

_PARTIAL = Example(
    title="merged steps without one rank",
    minutes=40,
    tracks=(*_norms(0, 1e-7, 40), Track(run.COVERAGE, (0.75,))),
    also={"MpAgentCoverageLow": (Severity.WARNING,)},
)

_INTERRUPTED = Example(
    title="low norms with a healthy step now and then",
    minutes=40,
    tracks=(
        Track(gradients.GRAD_NORM, (0.0005,)),
        *(
            Track(gradient_layers.GRAD_NORM_BELOW, (*ramp(30, 60, 8), 10) * 4, {"limit": name})
            for name in _LOW_BOUNDS[:2]
        ),
    ),
)


_SOLVED = Example(
    title="a solved task, whose loss is 0.0 at its best",
    minutes=46,
    tracks=(*_norms(10, 1e-8), Track(training.LOSS_SOLVED, (1,))),
)


def _sustained(limit: str, *steps: Value) -> Track:
    """Return over how many steps samples have been beyond a limit, by the minute."""
    return Track(gradient_layers.SUSTAINED_STEPS, steps, {"limit": limit})


_FIRES = Example(
    title="gradients that shrink until the smallest are FP16's smallest number",
    minutes=20,
    tracks=(
        _sustained("fp16_floor", *flat(0, 5), *ramp(0, 60, 15)),
        Track(gradients.GRAD_ABS_MIN, (2.0**-40,)),
    ),
    fires={
        Severity.INFO: "The smallest gradients of run demo lie at FP16's smallest number, and some "
        "layers have far more zeros than at the start: what was smaller was lost."
    },
    at=15,
    not_yet=(9,),
)

_ODD_BATCH = Example(
    title="a few samples of odd batches",
    minutes=12,
    tracks=(_sustained("fp16_floor", *flat(0, 5), *ramp(0, 60, 5), 0),),
)


_IN_FORCE = {"scale": "in_force"}

_BOTH = Example(
    title="small gradients are lost while the largest are at the limit",
    minutes=25,
    tracks=(
        Track(distribution.GRAD_FP16_FLUSHED, (*flat(0, 5), 0.12), _IN_FORCE),
        _sustained("fp16_flushed", *flat(0, 5), *ramp(0, 60, 20)),
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
    tracks=(Track(distribution.GRAD_FP16_FLUSHED, (0.12,), _IN_FORCE),),
)

_HIGH_SCALE = Example(
    title="a scale at its upper limit that loses next to nothing",
    minutes=20,
    tracks=(Track(distribution.GRAD_FP16_FLUSHED, (0.01,), _IN_FORCE),),
)

_SHORT = Example(
    title="a few unusual samples",
    minutes=20,
    tracks=(
        Track(distribution.GRAD_FP16_FLUSHED, (*flat(0.12, 4), 0.01), _IN_FORCE),
        _sustained("fp16_flushed", 0, 60, 120, 180, 0),
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
            _OF_TWO_OPTIMIZERS,
            _CONVERGING,
            _NOISY,
            _TINY_UNITS,
        ),
        quiet=(_AFTER_CLIPPED_INF, _FROZEN, _PARTIAL, _INTERRUPTED, _SOLVED),
    ),
    "MpAgentGradientAtFloor": Examples(
        firing=(_FIRES,),
        quiet=(_ODD_BATCH,),
    ),
    "MpAgentHeadroomVanishing": Examples(
        firing=(_BOTH,),
        quiet=(_LOW_SCALE, _HIGH_SCALE, _SHORT),
    ),
}
