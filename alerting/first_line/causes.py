"""Which conditions follow from which: pages name the cause first, and tickets of effects are muted.

Kept apart from the records: what follows from what is one picture, in one place.
"""

from collections.abc import Iterable, Mapping

FOLLOWS_FROM: Mapping[str, tuple[str, ...]] = {
    "MpAgentRankStalled": (),
    "MpAgentRunStalled": ("MpAgentRankStalled",),
    "MpAgentRunFailed": ("MpAgentRankStalled", "MpAgentRunStalled"),
    "MpAgentRunRestarting": (),
    "MpAgentRankNonFinite": ("MpAgentGradientExplosion", "MpAgentLearningRateJump"),
    "MpAgentNonFiniteUpdate": (
        "MpAgentRankNonFinite",
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
    ),
    "MpAgentGradientNonFinite": (
        "MpAgentRankNonFinite",
        "MpAgentNonFiniteUpdate",
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
    ),
    "MpAgentLossNonFinite": (
        "MpAgentRankNonFinite",
        "MpAgentNonFiniteUpdate",
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
    ),
    "MpAgentGradientsNotReduced": (),
    "MpAgentReplicaDivergence": ("MpAgentGradientsNotReduced",),
    "MpAgentActivationNonFinite": (
        "MpAgentRankNonFinite",
        "MpAgentNonFiniteUpdate",
        "MpAgentActivationNearOverflow",
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
    ),
    "MpAgentGradientExplosion": (
        "MpAgentReplicaDivergence",
        "MpAgentClippingBeforeUnscale",
        "MpAgentLearningRateJump",
    ),
    "MpAgentLayerGradientExplosion": ("MpAgentLearningRateJump", "MpAgentGradientExplosion"),
    "MpAgentLossSpike": (
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
        "MpAgentReplicaDivergence",
        "MpAgentNonFiniteUpdate",
    ),
    "MpAgentLossDiverging": (
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
        "MpAgentReplicaDivergence",
        "MpAgentNonFiniteUpdate",
    ),
    "MpAgentLossScaleAtFloor": ("MpAgentGradientExplosion", "MpAgentLearningRateJump"),
    "MpAgentLossScaleFarBelowInitial": (
        "MpAgentLossScaleAtFloor",
        "MpAgentGradientExplosion",
        "MpAgentLearningRateJump",
    ),
    "MpAgentOverflowRatioHigh": (
        "MpAgentLossScaleAtFloor",
        "MpAgentGradientNonFinite",
        "MpAgentLossScaleFarBelowInitial",
    ),
    "MpAgentLossScaleLow": ("MpAgentLossScaleAtFloor", "MpAgentLossScaleFarBelowInitial"),
    "MpAgentLossScaleLowAndFalling": (
        "MpAgentLossScaleAtFloor",
        "MpAgentLossScaleFarBelowInitial",
    ),
    "MpAgentLossScaleConsecutiveDecreases": (
        "MpAgentLossScaleAtFloor",
        "MpAgentLossScaleFarBelowInitial",
    ),
    "MpAgentNothingTrained": ("MpAgentNonFiniteUpdate",),
    "MpAgentGradientVanishing": ("MpAgentNothingTrained",),
    "MpAgentGradientUnderflow": (
        "MpAgentNothingTrained",
        "MpAgentGradientVanishing",
        "MpAgentLossScaleAtFloor",
        "MpAgentLossScaleFarBelowInitial",
    ),
    "MpAgentLayersWithoutGradient": ("MpAgentNothingTrained",),
    "MpAgentLayerGradientDead": (
        "MpAgentGradientNonFinite",
        "MpAgentNothingTrained",
        "MpAgentGradientVanishing",
        "MpAgentGradientUnderflow",
    ),
    "MpAgentHeadroomVanishing": ("MpAgentGradientExplosion", "MpAgentGradientUnderflow"),
    "MpAgentSecondMomentStale": ("MpAgentLearningRateJump", "MpAgentGradientExplosion"),
    "MpAgentAttentionLogitGrowth": ("MpAgentLearningRateJump", "MpAgentSecondMomentStale"),
    "MpAgentOutputLogitDivergence": ("MpAgentLearningRateJump",),
    "MpAgentRouterCollapse": ("MpAgentLearningRateJump", "MpAgentGradientExplosion"),
    "MpAgentFp8Saturation": (
        "MpAgentLearningRateJump",
        "MpAgentGradientExplosion",
        "MpAgentActivationNonFinite",
        "MpAgentGradientNonFinite",
        "MpAgentGradientVanishing",
        "MpAgentNothingTrained",
    ),
    "MpAgentAdamEpsilonUnsafe": ("MpAgentGradientVanishing", "MpAgentNothingTrained"),
}
"""Condition to those that it can follow from, the likeliest first; a condition that is not named
follows from none."""

_WITHOUT_UPDATE = frozenset(("MpAgentRankNonFinite", "MpAgentActivationNonFinite"))


def causes_with_update(causes: Iterable[str]) -> list[str]:
    """Return the causes that changed the weights, whose steps are those to roll back to.

    The others say where a value was NaN or Inf first, not that an update had it.
    """
    return [name for name in causes if name not in _WITHOUT_UPDATE]
