"""Alerts on steps that a loss scaler skips."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import calibrated, restarted
from mp_agent.alerting.durations import Duration, duration
from mp_agent.alerting.expressions.terms import (
    Arithmetic,
    Compare,
    Count,
    Joined,
    Limit,
    Predicate,
    Recorded,
    Signal,
    all_of,
    any_of,
    limit,
    unless,
)
from mp_agent.alerting.first_line import UPDATED, Triage
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.severity import Severity
from mp_agent.catalog.metric import Metric
from mp_agent.catalog.metrics import run, training

OVERFLOW_REMEDIES = (
    "Reduce the learning rate tenfold and check that the inputs are normalized.",
    "Check the initialization (Xavier weights, zero biases) and add LayerNorm to residual "
    "branches.",
    "Find the layer that overflows and run it in FP32, or train in BF16; a lower initial scale "
    "only shortens calibration.",
)
WHY_OVERFLOW_ENDS = (
    "GradScaler halves the scale whenever a scaled gradient overflows FP16; if that continues, "
    "no scale is suitable, and the values themselves must shrink."
)
OVERFLOW_CAUSES = (
    "The gradients have grown: check for a rising gradient norm in the hours before.",
    "A layer's activations grow towards 65 504: mostly the last residual blocks, an attention "
    "score without scaling, or a loss that is summed instead of averaged.",
    "The learning rate is too high, or its warm-up has just ended.",
    "Inputs that are not normalized, in some batches or on some ranks.",
)


_WINDOW, _LONG = duration("overflow_window"), duration("overflow_long_window")


def _count(metric: Metric, windows_ago: int = 0, *, window: Duration = _WINDOW) -> Count:
    return Count(metric=metric, window=window, before=(_WINDOW,) * windows_ago)


def _ratio(windows_ago: int = 0) -> Arithmetic:
    """Skipped steps per attempted step of the window that ended so many windows ago."""
    return _count(training.SKIPPED_STEPS, windows_ago) / _count(run.STEPS, windows_ago)


_SHARE = Recorded("run:mp_agent_skipped_steps_per_step:ratio_increase", _ratio())
_LONG_SKIPS = _count(training.SKIPPED_STEPS, window=_LONG)
_LONG_SHARE = _LONG_SKIPS / _count(run.STEPS, window=_LONG)
_RISE = (_SHARE - _ratio(2)) * _count(run.STEPS)
"""Skips beyond those that the share of two windows ago would make: a few are chance."""

_RISING = all_of(
    Compare(_SHARE, ">", limit("overflow_rising")),
    Compare(_SHARE, ">", _ratio(1)),
    Compare(_ratio(1), ">", _ratio(2)),
    Compare(_RISE, ">=", limit("overflow_skips")),
)


def _judged(claim: Predicate) -> Joined:
    """Hold `claim` only after calibration, and not for the few skips of a run of slow steps."""
    enough = Compare(_count(training.SKIPPED_STEPS), ">=", limit("overflow_skips"))
    return unless(all_of(claim, enough, calibrated(_WINDOW)), restarted())


def _above(share: Limit, *others: Predicate) -> Joined:
    """Return whether the share is above a limit, over as many steps as it takes to say so."""
    return any_of(
        _judged(any_of(_over(_SHARE, share), *others) if others else _over(_SHARE, share)),
        all_of(
            _over(_LONG_SHARE, share),
            Compare(_LONG_SKIPS, ">=", limit("overflow_skips")),
            Compare(_count(run.STEPS), "<", limit("overflow_steps")),
            calibrated(_LONG),
        ),
    )


def _over(share: Signal, bound: Limit) -> Compare:
    return Compare(share, ">", bound)


_DESCRIPTION = (
    "Run {run} skips {value|percent} of its steps because gradients overflow, in the last "
    "<overflow_window>, or <overflow_long_window> if steps are slow; the healthy value is 0.05%."
)


OVERFLOW_RATIO_HIGH = Condition(
    name="MpAgentOverflowRatioHigh",
    summary="Too many steps are skipped because gradients overflow FP16.",
    meaning="Each skipped step is compute without learning, and a high or rising share precedes "
    "a collapse of the loss scale.",
    confirm="Divide the increase of mp_agent_skipped_steps_total by that of mp_agent_steps_total.",
    remedies=OVERFLOW_REMEDIES,
    why=WHY_OVERFLOW_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="intact, since skipped steps do not change them",
                now="save a checkpoint, before the loss scale collapses",
                updated=UPDATED,
            ),
            when=_above(limit("overflow_critical")),
            description=_DESCRIPTION,
            reason="No delay: the share covers 15 minutes, or enough slow steps to be "
            "statistically significant.",
        ),
        Level(
            severity=Severity.WARNING,
            when=_above(limit("overflow_warning"), _RISING),
            description=_DESCRIPTION,
            reason="No delay: the share covers 15 minutes, or enough slow steps to be "
            "statistically significant.",
        ),
    ),
    quiet=(
        "GradScaler's healthy 1 in 2000",
        "one overflow among the few steps of a slow run in the window",
        "calibration",
        "calibration after a resume at step 90 000 under a new node agent",
        "calibration after a resume at an earlier step under the same node agent",
        "calibration of the next attempt, which counts its steps from 1 and makes few of them",
        "a share that rises below 0.1 %",
        "a share that fell and rises again",
        "a share that rose and falls again",
        "a scale close to overflow, with a random number of skips",
        "a small share of a run that was first scraped half an hour ago, at step 5000",
    ),
    follows_from=(
        "MpAgentLossScaleAtFloor",
        "MpAgentGradientNonFinite",
        "MpAgentLossScaleFarBelowInitial",
    ),
    needs=((Quantity.SKIPS,),),
    knobs=(less_above("overflow_warning", "overflow_critical", "overflow_rising"),),
    guidance=Guidance(
        harm="Every skipped step is compute without learning. Critical: more than a tenth is lost, "
        "and the scale is about to collapse. Warning: investigate within hours.",
        query='increase(mp_agent_skipped_steps_total{run="RUN"}[15m]) '
        '/ (increase(mp_agent_steps_total{run="RUN"}[15m]) > 0)',
        reading="The share of skipped steps in the last 15 minutes. The healthy value is 0.0005: "
        "one in 2000, because GradScaler doubles the scale until it overflows.",
        causes=(
            "A growth_interval far below 2000, so that the scaler increases the scale too often.",
            *OVERFLOW_CAUSES,
        ),
        false_positives=(
            "A scaler that is tuned to stay close to overflow (growth_interval of some hundred): "
            "raise overflow_rising and overflow_warning.",
        ),
        samples=("overflowing_layer", "clip_after_unscale"),
        panels=(panels.SKIPPED, panels.LOSS_SCALE, panels.GRADIENT_NORM),
    ),
)


CONDITIONS = (OVERFLOW_RATIO_HIGH,)
