"""Trainings that go wrong by causes known from the literature, each with a healthy twin."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.early_warning.images import ImageTask
from benchmarks.early_warning.language import RecurrentTask, TransformerTask, Variant
from benchmarks.early_warning.policy import PolicyTask
from benchmarks.early_warning.tasks import (
    BEGINS,
    STEPS,
    OfStep,
    Task,
    doubling,
    from_then_on,
    unchanged,
)

_WARM_UP_STEPS = 30


def warmed_up(peak: float) -> OfStep:
    """Return a learning rate that rises for 30 steps, and stays."""
    return lambda step: peak * min(1.0, (step + 1) / _WARM_UP_STEPS)


def rising(rate: float, peak: float) -> OfStep:
    """Return a usual rate that then rises on to one that is too high, by a factor per step."""
    usual, rest = warmed_up(rate), STEPS - _WARM_UP_STEPS
    return lambda step: usual(step) * (peak / rate) ** (max(0, step - _WARM_UP_STEPS) / rest)


def jumping(rate: float, factor: float) -> OfStep:
    """Return a usual rate that is multiplied at step `BEGINS`."""
    usual = warmed_up(rate)
    return lambda step: usual(step) * (factor if step >= BEGINS else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained; its name says which training it is."""

    name: str
    task: Callable[[int], Task]
    """Makes the model and its data from a seed."""
    rate: OfStep
    beta2: float = 0.95
    epsilon: float = 1e-8
    scaled: bool = False
    """Whether there is a GradScaler, as FP16 needs it."""
    clip_norm: float | None = 1.0
    loss_weight: OfStep = unchanged
    """What the loss of all tokens is multiplied by before backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What goes wrong, the training in which it does, and the same shape trained well."""

    title: str
    model: str
    """Kind of model, and precision."""
    faulty: Recipe
    healthy: Recipe
    source: str
    """Where it is described."""
    held_out: bool = False
    """Whether no one had seen what the conditions make of it when they were set."""

    @property
    def name(self) -> str:
        """The name of what goes wrong."""
        return self.faulty.name


def _transformer(**variant: Any) -> Callable[[int], Task]:
    return partial(TransformerTask, variant=Variant(**variant))


_RATE = warmed_up(2e-3)
_FP16: dict[str, Any] = {"stream_dtype": torch.float16}
_HEALTHY = Recipe(name="healthy", task=_transformer(), rate=_RATE)
_HEALTHY_FP16 = Recipe(name="healthy_fp16", task=_transformer(**_FP16), rate=_RATE, scaled=True)
_HEALTHY_GRU = Recipe(name="healthy_gru", task=RecurrentTask, rate=_RATE)
_HEALTHY_POLICY = Recipe(name="healthy_policy", task=PolicyTask, rate=warmed_up(1e-3))

_TUNED = (
    Cause(
        title="learning rate too high, without qk-norm",
        model="transformer, FP32",
        faulty=Recipe(
            name="attention_logits", task=_transformer(qk_norm=False), rate=rising(2e-3, 0.5)
        ),
        healthy=_HEALTHY,
        source="Wortsman et al., arXiv:2309.14322, section 3.1.1",
    ),
    Cause(
        title="learning rate too high, no z-loss, logits in BF16",
        model="transformer, logits in BF16",
        faulty=Recipe(
            name="output_logits",
            task=_transformer(logits_dtype=torch.bfloat16, z_loss=0.0),
            rate=rising(2e-3, 0.5),
        ),
        healthy=_HEALTHY,
        source="Wortsman et al., arXiv:2309.14322, section 3.1.2",
    ),
    Cause(
        title="beta2 = 0.999 while the weight of the data grows, without clipping",
        model="transformer, FP32",
        faulty=Recipe(
            name="second_moment",
            task=_transformer(),
            rate=warmed_up(2e-2),
            beta2=0.999,
            clip_norm=None,
            loss_weight=doubling(4),
        ),
        healthy=_HEALTHY,
        source="Wortsman et al., arXiv:2304.13013, section 3",
    ),
    Cause(
        title="residual stream that outgrows FP16",
        model="transformer, stream in FP16",
        faulty=Recipe(
            name="fp16_residual",
            task=partial(TransformerTask, variant=Variant(**_FP16), gain=doubling(4, begins=50)),
            rate=_RATE,
            scaled=True,
        ),
        healthy=_HEALTHY_FP16,
        source="Sun et al., arXiv:2402.17762; Dettmers et al., arXiv:2208.07339",
    ),
    Cause(
        title="gradients that outgrow FP16, so that the loss scale collapses",
        model="transformer, stream in FP16",
        faulty=Recipe(
            name="scale_collapse",
            task=partial(
                TransformerTask,
                variant=Variant(**_FP16),
                gradient_factor=doubling(1, begins=25, times=100.0),
            ),
            rate=_RATE,
            scaled=True,
        ),
        healthy=_HEALTHY_FP16,
        source="Zhang et al., arXiv:2205.01068, section 2.5",
    ),
    Cause(
        title="experts without a loss that balances them, router logits too large",
        model="mixture of 8 experts, BF16 autocast",
        faulty=Recipe(
            name="router_collapse",
            task=_transformer(balance=-1.0, autocast=True, router_gain=8.0),
            rate=warmed_up(1.5e-2),
        ),
        healthy=Recipe(
            name="healthy_experts", task=_transformer(balance=0.01, autocast=True), rate=_RATE
        ),
        source="Fedus et al., arXiv:2101.03961, section 2.2; Zoph et al., arXiv:2202.08906",
    ),
    Cause(
        title="learning rate thirty times too high from a step on",
        model="GRU, FP32",
        faulty=Recipe(name="rate_jump", task=RecurrentTask, rate=jumping(2e-3, 30.0)),
        healthy=_HEALTHY_GRU,
        source="Goyal et al., arXiv:1706.02677, section 2.2",
    ),
    Cause(
        title="weights in BF16, whose updates are lost in rounding",
        model="CNN, BF16",
        faulty=Recipe(
            name="bf16_weights",
            task=partial(ImageTask, dtype=torch.bfloat16),
            rate=warmed_up(1e-4),
        ),
        healthy=Recipe(name="healthy_slow_cnn", task=ImageTask, rate=warmed_up(1e-4)),
        source="Zamirai et al., arXiv:2010.06192, section 3",
    ),
    Cause(
        title="sampler that no longer gets the trainer's weights",
        model="policy, sampler in BF16",
        faulty=Recipe(
            name="stale_sampler",
            task=partial(PolicyTask, synchronized=from_then_on(0.0, before=1.0)),
            rate=warmed_up(1e-3),
        ),
        healthy=_HEALTHY_POLICY,
        source="Yao et al., Your efficient RL framework secretly brings you off-policy training",
    ),
)
_HELD_OUT = (
    Cause(
        title="half of the sequences drawn by no rule from a step on",
        model="transformer, BF16 autocast",
        faulty=Recipe(
            name="bad_shard",
            task=partial(
                TransformerTask, variant=Variant(autocast=True), bad_share=from_then_on(0.5)
            ),
            rate=_RATE,
        ),
        healthy=Recipe(name="healthy_bf16", task=_transformer(autocast=True), rate=_RATE),
        source="Chowdhery et al., arXiv:2204.02311, section 5.1",
        held_out=True,
    ),
    Cause(
        title="norm after the branches, without a warm-up",
        model="transformer, FP32",
        faulty=Recipe(
            name="no_warm_up",
            task=_transformer(post_norm=True, qk_norm=False),
            rate=lambda step: 2e-2,
        ),
        healthy=_HEALTHY,
        source="Xiong et al., arXiv:2002.04745",
        held_out=True,
    ),
    Cause(
        title="recurrent weights that amplify, rate too high, without clipping",
        model="GRU, FP32",
        faulty=Recipe(
            name="exploding_states",
            task=partial(RecurrentTask, recurrent_gain=1.5),
            rate=rising(2e-3, 0.5),
            clip_norm=None,
        ),
        healthy=_HEALTHY_GRU,
        source="Pascanu et al., arXiv:1211.5063",
        held_out=True,
    ),
    Cause(
        title="variance as E[x²] − E[x]² in FP16, of images that become brighter",
        model="CNN, FP16 autocast",
        faulty=Recipe(
            name="fp16_variance",
            task=partial(ImageTask, autocast=torch.float16, half_norm=True, brightness=doubling(6)),
            rate=_RATE,
            scaled=True,
        ),
        healthy=Recipe(
            name="healthy_fp16_cnn",
            task=partial(ImageTask, autocast=torch.float16),
            rate=_RATE,
            scaled=True,
        ),
        source="Micikevicius et al., arXiv:1710.03740, section 3.3",
        held_out=True,
    ),
    Cause(
        title="policy that decides too early: advantages too large, no entropy bonus",
        model="policy, sampler in BF16",
        faulty=Recipe(
            name="early_policy",
            task=partial(PolicyTask, entropy_bonus=0.0, advantage_gain=10.0),
            rate=warmed_up(1e-2),
        ),
        healthy=_HEALTHY_POLICY,
        source="Mnih et al., arXiv:1602.01783, section 4",
    ),
    Cause(
        title="Adam of weights in FP16, in which its epsilon of 1e-8 is 0",
        model="GRU, embedding in FP16",
        faulty=Recipe(
            name="fp16_epsilon",
            task=partial(RecurrentTask, embedding_dtype=torch.float16),
            rate=_RATE,
        ),
        healthy=_HEALTHY_GRU,
        source="chainer issue 6299",
        held_out=True,
    ),
)
CAUSES = (*_TUNED, *_HELD_OUT)
BY_NAME = {cause.name: cause for cause in CAUSES}
