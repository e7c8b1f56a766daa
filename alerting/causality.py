"""Which conditions follow from which: pages name the cause first, and tickets of effects are muted.

Kept apart from the records: what follows from what is one picture, in one place.
"""

from collections.abc import Iterator, Mapping

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.errors import CatalogError

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
    "MpAgentReplicaDivergence": (),
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
    "MpAgentLayerGradientDead": (
        "MpAgentNothingTrained",
        "MpAgentGradientVanishing",
        "MpAgentGradientUnderflow",
    ),
}
"""Condition to those that it can follow from, the likeliest first; a condition that is not named
follows from none."""


def _ordered() -> Iterator[str]:
    """Yield every condition after all that it can follow from, else as in the catalog."""
    names = [condition.name for condition in CONDITIONS]
    known = {*FOLLOWS_FROM, *(cause for causes in FOLLOWS_FROM.values() for cause in causes)}
    if unknown := known.difference(names):
        raise CatalogError(f"no condition is named {', '.join(sorted(unknown))}")
    waiting = list(dict.fromkeys((*FOLLOWS_FROM, *names)))
    while waiting:
        ready = (
            name for name in waiting if not set(FOLLOWS_FROM.get(name, ())).intersection(waiting)
        )
        found = next(ready, None)
        if found is None:
            raise CatalogError(f"these follow from each other: {', '.join(waiting)}")
        waiting.remove(found)
        yield found


CAUSES_FIRST = tuple(_ordered())
"""The names of all conditions: what can be the cause of another stands before it."""
