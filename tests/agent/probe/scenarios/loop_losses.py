"""Training loops that clip nothing, or compute their loss wrongly, and healthy ones like them.

WRONG and HEALTHY are those of `loop_orders` with these.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mp_agent.records.columns import (
    BATCH_NORM_MOMENTUM,
    BETAS_SWAPPED,
    CLIPPED_APART,
    CLIPS_NOTHING,
    FP16_WITHOUT_LOSS_SCALE,
    LATE_CLIPPING,
    LOSS_IN_16_BITS,
    LOSS_INPUT_MISMATCH,
    TARGETS_BROADCAST,
)
from tests.agent.probe.scenarios.loop_orders import (
    HEALTHY,
    STEPS,
    WRONG,
    batch,
    classifier,
    healthy,
    loss_of,
    sgd,
    wrong,
)

__all__ = ["HEALTHY", "WRONG"]

Parameters = Iterable[nn.Parameter]


def _clip(parameters: Parameters) -> None:
    nn.utils.clip_grad_norm_(parameters, 1.0)


def clip_before_backward(
    clip: Callable[[Parameters], object], *, clips_after: bool = False
) -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        clip(model.parameters())
        loss.backward()
        if clips_after:
            clip(model.parameters())
        optimizer.step()


def clip_each(clip: Callable[[nn.Parameter], object], *, whole: bool = False) -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for parameter in model.parameters():
            clip(parameter)
        if whole:
            _clip(model.parameters())
        optimizer.step()


@wrong(CLIPPED_APART)
def clip_one_by_one() -> None:
    clip_each(lambda parameter: nn.utils.clip_grad_norm_(parameter, 1.0))


@healthy
def clip_one_by_one_and_all_together() -> None:
    clip_each(lambda parameter: nn.utils.clip_grad_norm_([parameter], 1.0), whole=True)


@healthy
def clip_values_one_by_one() -> None:
    clip_each(lambda parameter: nn.utils.clip_grad_value_(parameter, 1.0))


class ClippingSGD(torch.optim.SGD):
    """Clips each parameter by its own norm in its step, as BERT's Adam does."""

    def step(self, *closure: Any) -> Any:
        for parameter in self.param_groups[0]["params"]:
            nn.utils.clip_grad_norm_(parameter, 1.0)
        return super().step(*closure)


@healthy
def optimizer_that_clips_one_by_one() -> None:
    model = classifier()
    optimizer = ClippingSGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@healthy
def norms_of_each_parameter() -> None:
    clip_each(lambda parameter: nn.utils.clip_grad_norm_(parameter, math.inf))


@wrong(CLIPS_NOTHING)
def clips_norms_before_backward() -> None:
    clip_before_backward(_clip)


@healthy
def clips_before_backward_and_after_it() -> None:
    clip_before_backward(_clip, clips_after=True)


@wrong(CLIPS_NOTHING)
def clips_before_backward_and_asks_for_the_norm_after_it() -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        _clip(model.parameters())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()


@wrong(CLIPS_NOTHING)
def asks_for_the_norm_and_clips_before_backward() -> None:
    clip_before_backward(
        lambda parameters: [
            nn.utils.clip_grad_norm_(each, limit)
            for each in [list(parameters)]
            for limit in (math.inf, 1.0)
        ]
    )


@wrong(LATE_CLIPPING)
def clips_after_the_step_and_asks_for_the_norm() -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        for limit in (1.0, math.inf):
            nn.utils.clip_grad_norm_(model.parameters(), limit)


@healthy
def asks_for_the_norm_before_backward() -> None:
    clip_before_backward(lambda parameters: nn.utils.clip_grad_norm_(parameters, math.inf))


def clip_kept(keep: Callable[[Iterator[nn.Parameter]], Parameters]) -> None:
    model = classifier()
    parameters = keep(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with warnings.catch_warnings():  # torch warns of a generator that is empty, once
            warnings.simplefilter("ignore")
            _clip(parameters)
        optimizer.step()


@wrong(CLIPS_NOTHING)
def clips_an_iterator_that_is_used_up() -> None:
    clip_kept(lambda parameters: parameters)


@healthy
def clips_a_list() -> None:
    clip_kept(list)


@wrong(CLIPS_NOTHING)
def clips_another_model() -> None:
    model, other = classifier(), classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        _clip(other.parameters())
        optimizer.step()


@healthy
def clips_two_models_of_which_one_rests() -> None:
    model, resting = classifier(), classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for each in (resting, model):
            _clip(each.parameters())
        optimizer.step()


@healthy
def clips_only_now_and_then_nothing() -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step % 8 == 0:
            optimizer.zero_grad()
        _clip(model.parameters())
        optimizer.step()


def train_with(loss: Callable[[Tensor, Tensor], Tensor], outputs: int = 10) -> None:
    """Train on losses of outputs [32, `outputs`] and targets [32]."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, outputs))
    optimizer = sgd(model)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()


@wrong(LOSS_INPUT_MISMATCH)
def softmax_before_cross_entropy() -> None:
    train_with(lambda outputs, targets: F.cross_entropy(outputs.softmax(1), targets))


@wrong(LOSS_INPUT_MISMATCH)
def likelihood_of_probabilities() -> None:
    train_with(lambda outputs, targets: F.nll_loss(outputs.softmax(1), targets))


@healthy
def likelihood_of_logarithms() -> None:
    train_with(lambda outputs, targets: F.nll_loss(outputs.log_softmax(1), targets))


@wrong(TARGETS_BROADCAST)
def targets_without_the_dimension_of_outputs() -> None:
    train_with(lambda outputs, targets: ((outputs - targets) ** 2).mean(), outputs=1)


@wrong(TARGETS_BROADCAST)
def weights_without_the_dimension_of_losses() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        each = F.mse_loss(outputs, targets[:, None], reduction="none")
        return (each * (1.0 + targets)).mean()

    train_with(loss, outputs=1)


@healthy
def targets_of_the_shape_of_outputs() -> None:
    train_with(lambda outputs, targets: ((outputs.squeeze(1) - targets) ** 2).mean(), outputs=1)


def in_bf16(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10)).bfloat16()
    optimizer = sgd(model)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss(model(inputs.bfloat16()), targets).backward()
        optimizer.step()


@wrong(LOSS_IN_16_BITS)
def loss_in_bf16() -> None:
    in_bf16(F.cross_entropy)


@healthy
def loss_of_a_model_in_bf16_in_fp32() -> None:
    in_bf16(lambda outputs, targets: F.cross_entropy(outputs.float(), targets))


def under_fp16(
    backward: Callable[[torch.amp.GradScaler, Tensor], object], rate: float = 0.05
) -> None:
    """Train in FP16; a step of the scaler does what the optimizer's does where it scaled nothing.

    rate: of a loss as backward sees it.
    """
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = sgd(model, rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        if backward(scaler, loss) is scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def _scaled(scaler: torch.amp.GradScaler, loss: Tensor) -> torch.amp.GradScaler:
    scaler.scale(loss).backward()
    return scaler


@wrong(FP16_WITHOUT_LOSS_SCALE)
def fp16_without_a_scaler() -> None:
    under_fp16(lambda scaler, loss: loss.backward())


@wrong(FP16_WITHOUT_LOSS_SCALE)
def fp16_without_a_scaler_accumulated() -> None:
    under_fp16(lambda scaler, loss: (loss / 2).backward())


@healthy
def fp16_with_a_scaler() -> None:
    under_fp16(_scaled)


@healthy
def fp16_with_a_scaler_for_two_losses() -> None:
    def backward(scaler: torch.amp.GradScaler, loss: Tensor) -> torch.amp.GradScaler:
        torch.autograd.backward(scaler.scale([loss, 0.1 * loss.square()]))
        return scaler

    under_fp16(backward)


@healthy
def fp16_scaled_by_hand() -> None:
    under_fp16(lambda scaler, loss: (loss * 128.0).backward(), rate=0.05 / 128.0)


@healthy
def fp16_scaled_by_its_seed() -> None:
    under_fp16(lambda scaler, loss: loss.backward(torch.tensor(128.0)), rate=0.05 / 128.0)


@healthy
def fp16_of_another_model_that_is_not_trained() -> None:
    teacher = nn.Linear(16, 10)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            taught = teacher(torch.ones(32, 16)).float().softmax(1)
        return F.cross_entropy(outputs, targets) + F.cross_entropy(outputs, taught)

    train_with(loss)


def average(momentum: float | None, betas: tuple[float, float] = (0.9, 0.999)) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32, momentum=momentum))
    model.append(nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=betas)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@wrong(BATCH_NORM_MOMENTUM)
def momentum_of_tensorflow() -> None:
    average(0.99)


@wrong(BETAS_SWAPPED)
def betas_in_the_other_order() -> None:
    average(0.1, (0.999, 0.9))


def betas_from_step_8(first: tuple[float, float], later: tuple[float, float], steps: int) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=first)
    for step in range(steps):
        if step >= 8:
            optimizer.param_groups[0]["betas"] = later
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@wrong(BETAS_SWAPPED)
def betas_that_a_schedule_sets_in_the_other_order() -> None:
    betas_from_step_8((0.9, 0.999), (0.999, 0.9), 3 * STEPS)


@healthy
def betas_that_are_soon_corrected() -> None:
    betas_from_step_8((0.999, 0.9), (0.9, 0.999), STEPS)


@healthy
def betas_that_a_schedule_sets() -> None:
    betas_from_step_8((0.9, 0.999), (0.85, 0.999), 3 * STEPS)


@healthy
def averages_of_all_batches() -> None:
    average(None, (0.96, 0.95))


@healthy
def statistics_that_are_frozen() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32, momentum=0.99), nn.Linear(32, 10))
    model[1].eval()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
