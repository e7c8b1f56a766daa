"""Trainings that go wrong by causes known from the literature, each with a healthy twin."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.early_warning.model import Variant

STEPS = 300
BEGINS = 120
"""The step from which on what is planted at a step happens."""
_USUAL_RATE = 3e-3
_WARM_UP_STEPS = 50

OfStep = Callable[[int], float]


def warmed_up(step: int) -> float:
    """Return a learning rate that such a model trains well with."""
    return _USUAL_RATE * min(1.0, (step + 1) / _WARM_UP_STEPS)


def rising_to(peak: float) -> OfStep:
    """Return a warm-up that lasts as long as the training, to a rate that is too high."""
    return lambda step: peak * (step + 1) / STEPS


def _unchanged(step: int) -> float:
    return 1.0


def _doubling(every: int) -> OfStep:
    """Return a factor that doubles every so many steps, a thousand million-fold at most."""
    return lambda step: 2.0 ** min(30.0, max(0.0, (step - BEGINS) / every))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained. Functions are of the step, from 0."""

    variant: Variant = field(default_factory=Variant)
    rate: OfStep = warmed_up
    beta2: float = 0.95
    z_loss: float = 1e-4
    scaled: bool = False
    """Whether there is a GradScaler, as FP16 needs it."""
    clip_norm: float | None = 1.0
    loss_weight: OfStep = _unchanged
    """What the loss of all tokens is multiplied by before backward."""
    gradient_factor: OfStep = _unchanged
    """What the gradient of the last block's residual stream is multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What goes wrong, the training in which it does, and the same shape trained well."""

    name: str
    title: str
    faulty: Recipe
    healthy: Recipe
    source: str
    """Where it is described."""


_FP16 = Variant(stream_dtype=torch.float16)

CAUSES = (
    Cause(
        name="attention_logits",
        title="learning rate too high, without qk-norm",
        faulty=Recipe(variant=Variant(qk_norm=False), rate=rising_to(1.0)),
        healthy=Recipe(variant=Variant(qk_norm=False)),
        source="Wortsman et al., arXiv:2309.14322, section 3.1.1",
    ),
    Cause(
        name="output_logits",
        title="learning rate too high, no z-loss, logits in BF16",
        faulty=Recipe(
            variant=Variant(logits_dtype=torch.bfloat16), rate=rising_to(1.0), z_loss=0.0
        ),
        healthy=Recipe(variant=Variant(logits_dtype=torch.bfloat16)),
        source="Wortsman et al., arXiv:2309.14322, section 3.1.2",
    ),
    Cause(
        name="second_moment",
        title="beta2 = 0.999 while the weight of the data grows, without clipping",
        faulty=Recipe(
            rate=lambda step: 10 * warmed_up(step),
            beta2=0.999,
            clip_norm=None,
            loss_weight=_doubling(4),
        ),
        healthy=Recipe(rate=lambda step: 3 * warmed_up(step), clip_norm=None),
        source="Wortsman et al., arXiv:2304.13013, section 3",
    ),
    Cause(
        name="fp16_residual",
        title="residual stream that outgrows FP16",
        faulty=Recipe(
            variant=Variant(stream_dtype=torch.float16, branch_gain=5000.0),
            rate=lambda step: 2 * warmed_up(step),
            scaled=True,
        ),
        healthy=Recipe(variant=_FP16, scaled=True),
        source="Sun et al., arXiv:2402.17762; Dettmers et al., arXiv:2208.07339",
    ),
    Cause(
        name="scale_collapse",
        title="gradients that outgrow FP16, so that the loss scale collapses",
        faulty=Recipe(variant=_FP16, scaled=True, gradient_factor=_doubling(8)),
        healthy=Recipe(variant=_FP16, scaled=True, beta2=0.999),
        source="Zhang et al., arXiv:2205.01068, section 2.5",
    ),
)
BY_NAME = {cause.name: cause for cause in CAUSES}
