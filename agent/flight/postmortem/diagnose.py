"""Diagnoses a case: its causes, before their consequences."""

from collections.abc import Mapping
from dataclasses import replace

from mp_agent.flight.postmortem.case import Case
from mp_agent.flight.postmortem.causes import DETECTORS
from mp_agent.flight.postmortem.diagnosis import POSSIBLE, Cause, Causes, Diagnosis

_ORIGINS = (Causes.NONFINITE_ON_ONE_RANK, Causes.NONFINITE_FORWARD, Causes.NONFINITE_BACKWARD)
_SCALE = (Causes.LOSS_SCALE_COLLAPSE, Causes.LOSS_SCALE_FALLING)
_EXPLOSION = Causes.GRADIENT_EXPLOSION
_RATE = Causes.LEARNING_RATE_JUMP
_GPU = Causes.GPU_ERROR
_BATCH = Causes.UNUSUAL_BATCH
_REPLICAS = Causes.REPLICA_DIVERGENCE

_FOLLOWS_FROM: Mapping[Causes, tuple[Causes, ...]] = {
    Causes.NONFINITE_ON_ONE_RANK: (_GPU, _RATE, _EXPLOSION),
    Causes.NONFINITE_FORWARD: (_RATE, _EXPLOSION),
    Causes.NONFINITE_BACKWARD: (_RATE, _EXPLOSION),
    Causes.NONFINITE_UPDATE: (_GPU, _RATE, _EXPLOSION, *_ORIGINS),
    Causes.REPLICA_DIVERGENCE: (Causes.NEVER_REDUCED, _GPU),
    Causes.UNUSUAL_BATCH: (_RATE,),
    Causes.GRADIENT_EXPLOSION: (_RATE, _BATCH, _REPLICAS),
    Causes.LOSS_SCALE_COLLAPSE: (_RATE, _EXPLOSION, Causes.NONFINITE_ON_ONE_RANK),
    Causes.LOSS_SCALE_FALLING: (_RATE, _EXPLOSION, Causes.NONFINITE_ON_ONE_RANK),
    Causes.LOSS_DIVERGING: (_RATE, _EXPLOSION, Causes.NEVER_REDUCED, _REPLICAS, *_ORIGINS, *_SCALE),
    Causes.GRADIENT_VANISHING: (Causes.ZERO_GRADIENTS, Causes.GRADIENT_UNDERFLOW, *_SCALE),
    Causes.GRADIENT_UNDERFLOW: (Causes.ZERO_GRADIENTS,),
    Causes.CONSTANT_LOSS: (
        Causes.LEARNING_RATE_ZERO,
        _RATE,
        _EXPLOSION,
        Causes.GRADIENT_VANISHING,
    ),
    Causes.RANK_KILLED: (_GPU,),
    Causes.RANK_FAILED: (_GPU, Causes.RANK_KILLED, *_ORIGINS),
    Causes.RANK_STALLED: (_GPU,),
}
"""The causes that each cause can follow from, if they appeared no later; likeliest first."""


def diagnose(case: Case) -> tuple[Diagnosis, ...]:
    """Return the diagnoses, most likely first, consequences last; none for a clean run."""
    found = [finding for look in DETECTORS for finding in look(case) if finding.score > 0]
    by_cause = {finding.cause: finding for finding in found}
    explained = [_explained(finding, by_cause) for finding in found]
    return tuple(sorted(explained, key=lambda f: (bool(f.follows), -f.score, f.sequence)))


def _explained(finding: Diagnosis, by_cause: Mapping[Cause, Diagnosis]) -> Diagnosis:
    for cause in _FOLLOWS_FROM.get(Causes(finding.cause), ()):
        earlier = by_cause.get(cause.value)
        if earlier and earlier.score >= POSSIBLE and earlier.sequence <= finding.sequence:
            return replace(finding, follows=cause.value.name)
    return finding
