"""Which thresholds relax which conditions, and in which direction."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import floor, log10

from mp_agent.alerting.site import Assignments
from mp_agent.alerting.values import Values, values_in_force
from mp_agent.catalog.thresholds import BY_NAME, DEFAULTS
from mp_agent.errors import SettingError

_DIGITS = 3
_WHOLE_UNITS = ("{step}", "{change}", "{sample}")
"""What is counted has no fractions."""


@dataclass(frozen=True, slots=True)
class Knob:
    """Thresholds that are moved together, by one factor, to make a condition less sensitive.

    raised: whether larger values are less sensitive.
    """

    names: tuple[str, ...]
    raised: bool = True

    def moved(self, limits: Mapping[str, float], factor: float) -> dict[str, float]:
        """Return the thresholds, less sensitive by a factor above 1, more below it."""
        return {name: self._moved(name, limits[name], factor) for name in self.names}

    def _moved(self, name: str, value: float, factor: float) -> float:
        moved = value * factor if self.raised else value / factor
        unit = BY_NAME[name].unit
        if unit in _WHOLE_UNITS:
            # Rounded to the side that was asked for; never to nothing.
            steps = -int(-moved // 1) if moved > value else int(moved)
            return float(max(steps, 1))
        rounded = _rounded(moved, up=moved > value)
        return min(rounded, 1.0) if unit == "1" else rounded


def _up(*names: str) -> Knob:
    return Knob(names)


def _down(*names: str) -> Knob:
    return Knob(names, raised=False)


KNOBS: Mapping[str, tuple[Knob, ...]] = {
    "MpAgentGradientExplosion": (
        _up("grad_norm_growth"),
        _up("grad_norm_high", "grad_norm_extreme"),
    ),
    "MpAgentGradientVanishing": (
        _down("grad_norm_low", "grad_norm_very_low", "grad_norm_vanished"),
        _down("grad_norm_fall"),
    ),
    "MpAgentGradientUnderflow": (
        _up("underflow_layers"),
        _up("layer_zero_rise"),
        _up("layer_flushed"),
    ),
    "MpAgentLayerGradientDead": (_down("layer_dead_abs_max"),),
    "MpAgentLayerGradientExplosion": (_up("layer_growth"),),
    "MpAgentLayersWithoutGradient": (_up("layers_without_gradient"),),
    "MpAgentHeadroomVanishing": (_up("fp16_flushed"), _down("fp16_headroom_bits")),
    "MpAgentSecondMomentStale": (_up("moment_rms_high"), _up("moment_rms_samples")),
    "MpAgentUpdatesLost": (_up("updates_lost"),),
    "MpAgentAttentionLogitGrowth": (_up("attention_logit_high"), _up("logit_growth")),
    "MpAgentOutputLogitDivergence": (_up("logsumexp_high"), _up("logit_growth")),
    "MpAgentRouterCollapse": (
        _up("router_load_high"),
        _down("router_entropy_low"),
        _up("router_collapse_samples"),
    ),
    "MpAgentFp8Saturation": (
        _up("fp8_range_used_high"),
        _down("fp8_range_used_low"),
        _up("fp8_scaling_samples"),
    ),
    "MpAgentAdamEpsilonUnsafe": (_up("adam_below_epsilon"),),
    "MpAgentGradientNonFinite": (_up("nonfinite_gradients"),),
    "MpAgentClippingBeforeUnscale": (_up("scaled_clip_steps"),),
    "MpAgentNothingTrained": (_up("untrained_steps", "constant_loss_steps"),),
    "MpAgentLossNonFinite": (_up("nonfinite_losses"),),
    "MpAgentLossSpike": (_up("loss_spike_deviations", "loss_spike_noisy_deviations"),),
    "MpAgentLossDiverging": (
        _up("loss_trend_deviations"),
        _up("loss_rising_steps"),
        _up("loss_lost_steps"),
    ),
    "MpAgentLearningRateJump": (_up("learning_rate_jump"),),
    "MpAgentLossScaleLowAndFalling": (
        _down("loss_scale_share_of_calibrated"),
        _up("loss_scale_net_decreases"),
        _down("loss_scale_low"),
    ),
    "MpAgentLossScaleAtFloor": (_down("loss_scale_floor"),),
    "MpAgentLossScaleConsecutiveDecreases": (_up("loss_scale_decreases_in_row"),),
    "MpAgentLossScaleFarBelowInitial": (
        _down("loss_scale_share_of_calibrated"),
        _down("loss_scale_share_of_initial"),
    ),
    "MpAgentLossScaleLow": (_down("loss_scale_very_low", "loss_scale_reduced"),),
    "MpAgentOverflowRatioHigh": (_up("overflow_warning", "overflow_critical", "overflow_rising"),),
    "MpAgentRankStraggler": (_up("straggler_ratio"),),
    "MpAgentGradientsNotReduced": (_up("unreduced_steps"),),
    "MpAgentTrainInferenceMismatch": (_up("logprob_k3_high", "logprob_k3_extreme"),),
    "MpAgentReductionSwallows": (_up("reduction_swallowed"),),
    "MpAgentDimensionImbalance": (_up("dimension_imbalance"),),
}
"""Condition → what may be moved, the most direct first; of several, the one that moves least."""

UNTUNABLE = frozenset(
    (
        "MpAgentGradientAtFloor",
        "MpAgentNonFiniteUpdate",
        "MpAgentRankNonFinite",
        "MpAgentRankStalled",
        "MpAgentReplicaDivergence",
        "MpAgentRunStalled",
        "MpAgentRunFailed",
        "MpAgentRunRestarting",
        "MpAgentRunVanished",
        "MpAgentCoverageLow",
        "MpAgentPrecisionLint",
        "MpAgentTelemetryDegraded",
        "MpAgentActivationNonFinite",
        "MpAgentActivationNearOverflow",
    )
)
"""Conditions that healthy runs do not have, or that are a matter of durations."""


@dataclass(slots=True)
class Proposal:
    """Changes of what is in force: thresholds, and levels that are to be another severity."""

    thresholds: dict[str, float]
    severities: dict[str, str]
    """`Condition.level` → severity, or `off`."""

    def with_thresholds(self, changes: Mapping[str, float]) -> "Proposal":
        """Return the proposal with more thresholds; the earlier ones give way."""
        return Proposal({**self.thresholds, **changes}, dict(self.severities))


def values_with(values: Values, proposal: Proposal) -> Values:
    """Return what is in force with a proposal. Raises SettingError where it contradicts itself."""
    chosen = Assignments()
    for name, severity in proposal.severities.items():
        chosen.set(name, severity)
    changed = {name: value for name, value in values.limits.items() if DEFAULTS[name] != value}
    severities = {
        name: {**values.severities.get(name, {}), **chosen.severities.get(name, {})}
        for name in (*values.severities, *chosen.severities)
    }
    seconds = {name: value / values.time_scale for name, value in values.seconds.items()}
    return values_in_force(
        {**changed, **proposal.thresholds},
        seconds,
        severities=severities,
        selectors=values.selectors,
        time_scale=values.time_scale,
    )


def can_be_had(values: Values, thresholds: Mapping[str, float]) -> bool:
    """Return whether thresholds fit to the others: the severe ones stay beyond the mild ones."""
    try:
        values_with(values, Proposal(dict(thresholds), {}))
    except SettingError:
        return False
    return True


def stricter(values: Values, factor: float, conditions: Iterable[str]) -> dict[str, float]:
    """Return the thresholds of conditions, all moved by a factor to the sensitive side.

    Those that cannot be moved so far without contradicting others stay.
    """
    changes: dict[str, float] = {}
    for condition in conditions:
        for knob in KNOBS.get(condition, ()):
            moved = {**changes, **knob.moved(values.limits, 1 / factor)}
            if can_be_had(values, moved):
                changes = moved
    return changes


def _rounded(value: float, *, up: bool) -> float:
    """Return a number with three digits, rounded to the side that was asked for."""
    unit = 10.0 ** (floor(log10(value)) - _DIGITS + 1)
    whole = floor(value / unit)
    close = abs(value - whole * unit) < 1e-9 * value
    return float(f"{(whole if close or not up else whole + 1) * unit:.6g}")
