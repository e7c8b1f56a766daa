"""What each condition needs of a log, and which ones a log leaves blind."""

from collections.abc import Iterator, Mapping

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.backtest.log.training_log import Quantity, TrainingLog
from mp_agent.backtest.results import Blind
from mp_agent.node.accounting.gradients.gradient_norms import FIRST_STEPS
from mp_agent.node.accounting.training.loss import WARM_UP_STEPS

_Q = Quantity
_SCALE = frozenset((_Q.LOSS_SCALE,))
_NORM = frozenset((_Q.GRAD_NORM,))
_LOSS = frozenset((_Q.LOSS,))
_LAYERS = frozenset((_Q.LAYERS,))
_RANKS = frozenset((_Q.RANKS,))
_OPTIMIZER = frozenset((_Q.OPTIMIZER,))
_LIFE = frozenset((_Q.LIFE,))

NEEDS: Mapping[str, tuple[frozenset[Quantity], ...]] = {
    "MpAgentGradientExplosion": (_NORM,),
    "MpAgentGradientVanishing": (_NORM,),
    "MpAgentGradientUnderflow": (_LAYERS,),
    "MpAgentGradientAtFloor": (_SCALE | {_Q.SMALLEST},),
    "MpAgentLayerGradientDead": (_LAYERS,),
    "MpAgentLayerGradientExplosion": (_LAYERS,),
    "MpAgentLayersWithoutGradient": (_LAYERS,),
    "MpAgentNonFiniteUpdate": (_NORM,),
    "MpAgentGradientNonFinite": (_NORM,),
    "MpAgentClippingBeforeUnscale": (_NORM | _SCALE | {_Q.CLIPPING},),
    "MpAgentNothingTrained": (_LOSS, _NORM, frozenset((_Q.LEARNING_RATE,))),
    "MpAgentLossNonFinite": (_LOSS,),
    "MpAgentLossSpike": (_LOSS,),
    "MpAgentLossDiverging": (_LOSS,),
    "MpAgentLearningRateJump": (frozenset((_Q.LEARNING_RATE,)),),
    "MpAgentLossScaleLowAndFalling": (_SCALE,),
    "MpAgentLossScaleAtFloor": (_SCALE | {_Q.SKIPS},),
    "MpAgentLossScaleConsecutiveDecreases": (_SCALE,),
    "MpAgentLossScaleFarBelowInitial": (_SCALE,),
    "MpAgentLossScaleLow": (_SCALE,),
    "MpAgentOverflowRatioHigh": (frozenset((_Q.SKIPS,)),),
    "MpAgentRankNonFinite": (_RANKS,),
    "MpAgentRankStalled": (_RANKS | _LIFE,),
    "MpAgentRankStraggler": (_RANKS,),
    "MpAgentGradientsNotReduced": (frozenset((_Q.REPLICAS,)),),
    "MpAgentReplicaDivergence": (frozenset((_Q.REPLICAS,)),),
    "MpAgentRunStalled": (_LIFE,),
    "MpAgentRunFailed": (_LIFE,),
    "MpAgentRunRestarting": (_LIFE,),
    "MpAgentRunVanished": (_LIFE,),
    "MpAgentPrecisionLint": (frozenset((_Q.CODE,)),),
    "MpAgentCoverageLow": (_RANKS,),
    "MpAgentTelemetryDegraded": (frozenset((_Q.AGENT,)),),
    "MpAgentHeadroomVanishing": (frozenset((_Q.DISTRIBUTION,)),),
    "MpAgentSecondMomentStale": (_OPTIMIZER,),
    "MpAgentUpdatesLost": (_OPTIMIZER,),
    "MpAgentAdamEpsilonUnsafe": (_OPTIMIZER,),
    "MpAgentActivationNonFinite": (frozenset((_Q.ACTIVATIONS,)),),
    "MpAgentActivationNearOverflow": (frozenset((_Q.ACTIVATIONS,)),),
    "MpAgentAttentionLogitGrowth": (frozenset((_Q.LOGITS,)),),
    "MpAgentOutputLogitDivergence": (frozenset((_Q.LOGITS,)),),
    "MpAgentRouterCollapse": (frozenset((_Q.ROUTERS,)),),
    "MpAgentFp8Saturation": (frozenset((_Q.FP8,)),),
    "MpAgentTrainInferenceMismatch": (frozenset((_Q.LOGPROBS,)),),
    "MpAgentReductionSwallows": (frozenset((_Q.TENSORS,)),),
    "MpAgentDimensionImbalance": (frozenset((_Q.TENSORS,)),),
}
"""Condition → what it can be judged by: one of several sets is enough."""

_BASELINES: Mapping[str, tuple[str, int, str]] = {
    "MpAgentLossSpike": ("loss", WARM_UP_STEPS, "losses"),
    "MpAgentLossDiverging": ("loss", WARM_UP_STEPS, "losses"),
    "MpAgentGradientExplosion": ("grad_norm", FIRST_STEPS, "gradient norms"),
}
"""Condition → quantity that needs a past of so many points."""


def blind_spots(log: TrainingLog) -> Iterator[Blind]:
    """Yield the conditions that a log cannot show, in the catalog's order, with the reason.

    What Prometheus scraped was judged by all steps, however few scrapes there are.
    """
    held = log.held
    for condition in CONDITIONS:
        alternatives = NEEDS.get(condition.name, ())
        if alternatives and not any(needed <= held for needed in alternatives):
            lacking = min((needed - held for needed in alternatives), key=len)
            names = " and ".join(sorted(quantity.value for quantity in lacking))
            yield Blind(condition.name, f"the log does not hold {names}")
        elif condition.name in _BASELINES and not log.scrapes:
            quantity, needed_points, plural = _BASELINES[condition.name]
            points = sum(getattr(point, quantity) is not None for point in log.points)
            if points <= needed_points:
                yield Blind(
                    condition.name,
                    f"the log holds {points} {plural}; a usual level needs more than "
                    f"{needed_points}",
                )
