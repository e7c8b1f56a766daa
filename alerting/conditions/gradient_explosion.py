"""MpAgentGradientExplosion."""

from mp_agent.alerting import metrics
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples import Example, Track, Value, flat, ramp
from mp_agent.alerting.healthy import noisy
from mp_agent.alerting.predicates import Compare, Joined, Predicate, Seen, all_of, unless
from mp_agent.alerting.severity import Severity
from mp_agent.alerting.signals import Count, Limit, Number, Recorded, Series, Where, limit
from mp_agent.catalog.metric import Metric

_WINDOW = duration("explosion_window")
_HIGH, _EXTREME = limit("grad_norm_high"), limit("grad_norm_extreme")


def _steps(metric: Metric, bound: Limit, name: str) -> Recorded:
    count = Count(metric=metric, window=_WINDOW, where=(Where("bound", "=", bound),))
    return Recorded(f"run:mp_agent_{bound.threshold.name}_{name}:increase", count)


def _steps_above(bound: Limit) -> Recorded:
    return _steps(metrics.GRAD_NORM_EXCEEDED, bound, "steps")


def _all_clipped(bound: Limit) -> Predicate:
    return Compare(_steps(metrics.GRAD_NORM_UNCLIPPED, bound, "unclipped_steps"), "==", Number(0))


def _loss_calm() -> Joined:
    """Tell whether the loss stayed within its baseline; without one it is not calm."""
    return unless(
        Seen(Series(metric=metrics.LOSS_MEDIAN)),
        happened(Count(metric=metrics.LOSS_SPIKE_STEPS, window=_WINDOW)),
        happened(Count(metric=metrics.LOSS_NONFINITE_STEPS, window=_WINDOW)),
    )


def _tamed(bound: Limit) -> Joined:
    return all_of(_all_clipped(bound), _loss_calm())


def _single_clipped() -> Joined:
    return all_of(Compare(_steps_above(_EXTREME), "<", Number(2)), _all_clipped(_EXTREME))


_COUNT = "{value|count}"
_DESCRIPTION = (
    f"The gradient norm of run {{run}} was above <LIMIT> on {_COUNT} step(s) in "
    "the last <explosion_window>"
)
_CONTAINED = "; all of them were clipped, and the loss stayed within its baseline"


def _describe(bound: Limit, end: str = "") -> str:
    return f"{_DESCRIPTION}{end}.".replace("LIMIT", bound.threshold.name)


def _fires(bound: Limit, steps: int, end: str = "") -> str:
    return _describe(bound, end).replace("{run}", "demo").replace(_COUNT, str(steps))


def _above(
    high: tuple[Value, ...], extreme: tuple[Value, ...], *, clipped: bool = False
) -> tuple[Track, ...]:
    """Return the counters of steps above the bounds; clipped: what they are if all were."""
    unclipped = (
        ()
        if clipped
        else (
            Track(metrics.GRAD_NORM_UNCLIPPED, high, {"bound": _HIGH}),
            Track(metrics.GRAD_NORM_UNCLIPPED, extreme, {"bound": _EXTREME}),
        )
    )
    return (
        Track(metrics.GRAD_NORM_EXCEEDED, high, {"bound": _HIGH}),
        Track(metrics.GRAD_NORM_EXCEEDED, extreme, {"bound": _EXTREME}),
        *unclipped,
    )


_ONE = (*flat(0, 10), 1.0)
_EVERY = (*flat(0, 50), *ramp(60, 60, 11))
_SOARING = (
    Track(metrics.LOSS, (*noisy(2.0, 50), 9.0)),
    Track(metrics.LOSS_SPIKE_STEPS, (*flat(0, 50), *ramp(59, 60, 11))),
)
_SPIKE = {"MpAgentLossSpike": (Severity.WARNING,)}

_UNCLIPPED = Example(
    title="one unclipped step above the extreme limit",
    minutes=30,
    tracks=_above(_ONE, _ONE),
    fires={Severity.CRITICAL: _fires(_EXTREME, 1), Severity.WARNING: _fires(_HIGH, 1)},
    at=12,
    not_yet=(9, 20),
)

_BORN = Example(
    title="a run that exploded before its first scrape",
    minutes=12,
    tracks=_above((None, None, 7), (None, None, 3)),
    fires={Severity.CRITICAL: _fires(_EXTREME, 3), Severity.WARNING: _fires(_HIGH, 7)},
    at=3,
    not_yet=(1, 9),
)

_HIGH_ONLY = Example(
    title="a norm above the high limit",
    minutes=30,
    tracks=_above(_ONE, (0,)),
    fires={Severity.WARNING: _fires(_HIGH, 1)},
    at=12,
    not_yet=(10, 20),
)

_DIVERGING = Example(
    title="every step above the extreme limit clipped, and the loss soars nevertheless",
    minutes=60,
    tracks=(*_above(_EVERY, _EVERY, clipped=True), *_SOARING),
    also=_SPIKE,
    fires={Severity.CRITICAL: _fires(_EXTREME, 300), Severity.WARNING: _fires(_HIGH, 300)},
    at=58,
    not_yet=(49,),
)

_DIVERGING_HIGH = Example(
    title="every step above the high limit clipped, and the loss soars nevertheless",
    minutes=60,
    tracks=(*_above(_EVERY, (0,), clipped=True), *_SOARING),
    also=_SPIKE,
    fires={Severity.WARNING: _fires(_HIGH, 300)},
    at=58,
    not_yet=(49,),
)

_CONTAINED_EXTREME = Example(
    title="every step above the extreme limit clipped, the loss calm: one severity lower",
    minutes=60,
    tracks=_above(_EVERY, _EVERY, clipped=True),
    fires={
        Severity.WARNING: _fires(_HIGH, 300),
        Severity.INFO: _fires(_HIGH, 300, _CONTAINED),
    },
    at=58,
    not_yet=(49,),
)

_CONTAINED_HIGH = Example(
    title="every step above the high limit clipped, the loss calm: one severity lower",
    minutes=60,
    tracks=_above(_EVERY, (0,), clipped=True),
    fires={Severity.INFO: _fires(_HIGH, 300, _CONTAINED)},
    at=58,
    not_yet=(49, 50),
)

_NONFINITE = tuple(
    Track(metric, (*flat(0, 50), *ramp(1, 1, 11)))
    for metric in (metrics.LOSS_NONFINITE_STEPS, metrics.LOSS_NONFINITE_UNSKIPPED)
)

_CLIPPED_EXTREME_WITH_NAN = Example(
    title="every step above the extreme limit clipped, but some losses are NaN",
    minutes=60,
    tracks=(*_above(_EVERY, _EVERY, clipped=True), *_NONFINITE),
    fires={Severity.CRITICAL: _fires(_EXTREME, 300), Severity.WARNING: _fires(_HIGH, 300)},
    at=58,
    not_yet=(49,),
    also={"MpAgentLossNonFinite": (Severity.CRITICAL,)},
)

_CLIPPED_HIGH_WITH_NAN = Example(
    title="every step above the high limit clipped, but some losses are NaN",
    minutes=60,
    tracks=(*_above(_EVERY, (0,), clipped=True), *_NONFINITE),
    fires={Severity.WARNING: _fires(_HIGH, 300)},
    at=58,
    not_yet=(49,),
    also={"MpAgentLossNonFinite": (Severity.CRITICAL,)},
)

_YOUNG_EXTREME = Example(
    title="a run without a baseline, every step above the extreme limit and clipped",
    minutes=9,
    tracks=_above(ramp(0, 60, 10), ramp(0, 60, 10), clipped=True),
    without=(metrics.LOSS_MEDIAN,),
    fires={Severity.CRITICAL: _fires(_EXTREME, 300), Severity.WARNING: _fires(_HIGH, 300)},
    at=8,
)

_YOUNG_HIGH = Example(
    title="a run without a baseline, every step above the high limit and clipped",
    minutes=9,
    tracks=_above(ramp(0, 60, 10), (0,), clipped=True),
    without=(metrics.LOSS_MEDIAN,),
    fires={Severity.WARNING: _fires(_HIGH, 300)},
    at=8,
)

_SINGLE_CLIPPED_SPIKE = Example(
    title="a single clipped spike, even of a run without a baseline: never critical",
    minutes=12,
    tracks=_above((*flat(0, 3), 1), (*flat(0, 3), 1), clipped=True),
    without=(metrics.LOSS_MEDIAN,),
    fires={Severity.WARNING: _fires(_HIGH, 1)},
    at=5,
    not_yet=(11,),
)

_BELOW = Example(
    title="norms up to 99, scaled by 65536 in backward",
    minutes=30,
    tracks=(Track(metrics.GRAD_NORM, (99,)), Track(metrics.GRAD_NORM_WINDOW_MAX, (99,))),
)

_SKIPPED = Example(
    title="the finite rest of a skipped overflow step, which exceeds no bound",
    minutes=30,
    tracks=(
        Track(metrics.SKIPPED_STEPS, _ONE),
        Track(metrics.GRAD_FINITE, (*flat(1, 10), 0, 1)),
        Track(metrics.LOSS_SCALE, (*flat(65536, 10), 32768)),
        Track(metrics.LOSS_SCALE_DECREASES, _ONE),
    ),
)

_BEFORE_FAILED_SCRAPE = Example(
    title="an explosion, but not again when half an hour later a scrape fails",
    minutes=60,
    tracks=(
        *_above((*flat(4, 40), "stale", *flat(4, 20)), (*flat(4, 40), "stale", *flat(4, 20))),
        Track("up", (*flat(1, 40), 0, 1)),
    ),
    fires={Severity.CRITICAL: _fires(_EXTREME, 4), Severity.WARNING: _fires(_HIGH, 4)},
    at=3,
    not_yet=(39, 41, 42, 45, 46, 47),
)

GRADIENT_EXPLOSION = Condition(
    name="MpAgentGradientExplosion",
    summary="Gradients are exploding.",
    meaning="Single updates become large enough to wreck the weights; the loss jumps or diverges.",
    confirm="Plot mp_agent_grad_norm_window_max and mp_agent_loss; mp_agent_layer_grad_norm shows "
    "the layer.",
    remedies=(
        "Clip gradients after unscale_ and before step: max norm 1.0 is usual, 0.5 for large or "
        "unstable models, 5.0 for small stable ones.",
        "Lower the learning rate tenfold.",
        "Check that inputs are normalised and that residual branches have a normalisation.",
    ),
    why="Clipping bounds the length of a single update without changing its direction; a smaller "
    "learning rate and normalised values keep the norm from growing in the first place.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            when=unless(
                happened(_steps_above(_EXTREME)),
                _tamed(_EXTREME),
                _single_clipped(),
            ),
            description=_describe(_EXTREME),
            reason="It does not wait: a single such step can cost the weights.",
        ),
        Level(
            severity=Severity.WARNING,
            when=unless(
                happened(_steps_above(_HIGH)),
                unless(_tamed(_HIGH), happened(_steps_above(_EXTREME))),
            ),
            hold=duration("explosion_hold"),
            description=_describe(_HIGH),
            reason="Two evaluations must see it, as the documents have it; the counter keeps the "
            "step in sight for as long as explosion_window.",
        ),
        Level(
            severity=Severity.INFO,
            when=all_of(happened(_steps_above(_HIGH)), _tamed(_HIGH)),
            hold=duration("explosion_hold"),
            description=_describe(_HIGH, _CONTAINED),
            reason="As the warning, whose place it takes.",
        ),
    ),
    firing=(
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
        _BEFORE_FAILED_SCRAPE,
    ),
    quiet=(_BELOW, _SKIPPED),
)
