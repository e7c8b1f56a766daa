"""Training loops that are wrong in their order or mode, and healthy ones that look like them."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mp_agent.records.columns import (
    AUTOCAST_FP32_SHARE,
    BACKWARDS_DISCARDED,
    CLIPPED_BY_SHARD,
    GRADIENTS_ADD_UP,
    LATE_CLIPPING,
    LEFT_IN_EVALUATION,
    OPTIMIZER_NEVER_STEPS,
    STEP_REPEATED,
    STEP_SCALED,
)
from tests.agent.probe.watching import watched
from tests.gloo import process_group

STEPS = 56
Loop = Callable[[], object]
WRONG: dict[str, tuple[Loop, str]] = {}
HEALTHY: dict[str, Loop] = {}


def wrong(column: str) -> Callable[[Loop], Loop]:
    """Register a loop that is wrong from its first step on, and the column that shows it."""

    def add(loop: Loop) -> Loop:
        WRONG[loop.__name__] = loop, column
        return loop

    return add


def healthy(loop: Loop) -> Loop:
    """Register a loop that is as it should be."""
    HEALTHY[loop.__name__] = loop
    return loop


def batch(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs [32, 16], and classes [32] that depend on them."""
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * 100 + part))
    return inputs, (inputs.sum(1) > 0).long()


def classifier() -> nn.Sequential:
    """Return a model that depends on its mode."""
    return nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
    )


def sgd(model: nn.Module, rate: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=rate)


def loss_of(model: nn.Module, step: int, part: int = 0) -> Tensor:
    inputs, classes = batch(step, part)
    return cross_entropy(model(inputs), classes)


def gradient_of(tensor: Tensor) -> Tensor:
    gradient = tensor.grad
    assert gradient is not None
    return gradient


def train(clear: Callable[[nn.Module, torch.optim.Optimizer], object]) -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        clear(model, optimizer)
        loss_of(model, step).backward()
        optimizer.step()


@wrong(GRADIENTS_ADD_UP)
def nothing_clears() -> None:
    train(lambda model, optimizer: None)


@wrong(GRADIENTS_ADD_UP)
def another_optimizer_clears() -> None:
    other = sgd(classifier())
    train(lambda model, optimizer: other.zero_grad())


@wrong(GRADIENTS_ADD_UP)
def the_model_clears_its_own_and_not_those_of_the_loss() -> None:
    model, loss = classifier(), nn.Linear(10, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.01)
    for step in range(STEPS):
        model.zero_grad(set_to_none=step % 2 == 0)
        loss_of(nn.Sequential(model, loss), step).backward()
        optimizer.step()


@wrong(GRADIENTS_ADD_UP)
def nothing_clears_in_a_closure() -> None:
    lbfgs(clears=False)


@healthy
def a_closure_clears() -> None:
    lbfgs(clears=True)


def lbfgs(*, clears: bool) -> None:
    model = classifier()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            if clears:
                optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)


@healthy
def lbfgs_searches_along_a_line() -> None:
    model = classifier()
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=3)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)


def scaled(*, clears: bool, overflows: bool = False) -> None:
    model = classifier()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10)
    for step in range(STEPS):
        if clears:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, step)
        scaler.scale(loss * math.inf if overflows and step % 3 == 0 else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@wrong(GRADIENTS_ADD_UP)
def nothing_clears_scaled_gradients() -> None:
    scaled(clears=False)


@healthy
def a_scaler_skips_steps() -> None:
    scaled(clears=True, overflows=True)


def _none(model: nn.Module, optimizer: object) -> None:
    for each in model.parameters():
        each.grad = None


def _zeros(model: nn.Module, optimizer: object, *, detached: bool = False) -> None:
    for each in model.parameters():
        if each.grad is not None:
            (each.grad.data if detached else each.grad).zero_()


def _foreach(model: nn.Module, optimizer: object) -> None:
    if found := [each.grad for each in model.parameters() if each.grad is not None]:
        torch._foreach_zero_(found)


_CLEARINGS: dict[str, Callable[..., object]] = {
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "zero_grad_to_zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "zero_grad_of_the_model": lambda model, optimizer: model.zero_grad(),
    "gradients_set_to_none": _none,
    "gradients_zeroed_by_hand": _zeros,
    "gradient_data_zeroed_by_hand": partial(_zeros, detached=True),
    "gradients_zeroed_together": _foreach,
}
for name, clear in _CLEARINGS.items():
    HEALTHY[name] = partial(train, clear)


def accumulate(*, clears_each: bool, to_none: bool = True) -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        for part in range(4):
            if clears_each or part == 0:
                optimizer.zero_grad(set_to_none=to_none)
            (loss_of(model, step, part) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@healthy
def accumulation() -> None:
    accumulate(clears_each=False)


@wrong(BACKWARDS_DISCARDED)
def every_part_clears() -> None:
    accumulate(clears_each=True)


@wrong(BACKWARDS_DISCARDED)
def every_part_zeroes() -> None:
    accumulate(clears_each=True, to_none=False)


@healthy
def every_third_batch_is_left_out() -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step % 3:
            optimizer.step()


def clip_late(clip: Callable[[Iterator[nn.Parameter]], object]) -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        clip(model.parameters())


@wrong(LATE_CLIPPING)
def clips_norms_after_the_step() -> None:
    clip_late(lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0))


@wrong(LATE_CLIPPING)
def clips_values_after_the_step() -> None:
    clip_late(lambda parameters: nn.utils.clip_grad_value_(parameters, 1.0))


@healthy
def asks_for_the_norm_after_the_step() -> None:
    clip_late(lambda parameters: nn.utils.clip_grad_norm_(parameters, math.inf))


def repeat(
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    between: Callable[[nn.Module, torch.optim.Optimizer, int], object] = lambda *_: None,
    times: int = 2,
) -> None:
    """Step several times after each backward; between: what is done before each further step."""
    model = classifier()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        for again in range(1, times):
            between(model, optimizer, 100 * step + again)
            optimizer.step()


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters())


@wrong(STEP_REPEATED)
def steps_twice() -> None:
    repeat(sgd)


@wrong(STEP_REPEATED)
def steps_three_times_with_adam() -> None:
    repeat(adam, times=3)


@wrong(STEP_REPEATED)
def steps_after_the_scaler_has() -> None:
    model = classifier()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.step()


@wrong(STEP_REPEATED)
def the_critic_steps_twice() -> None:
    gan("turns", critic_steps=2)


@healthy
def steps_again_after_another_backward() -> None:
    repeat(sgd, lambda model, optimizer, step: loss_of(model, step).backward())


@healthy
def steps_again_with_cleared_gradients() -> None:
    repeat(sgd, lambda model, optimizer, step: optimizer.zero_grad())


@healthy
def steps_again_with_changed_gradients() -> None:
    repeat(adam, lambda model, optimizer, step: [gradient_of(p).neg_() for p in model.parameters()])


@healthy
def steps_again_with_gradients_that_no_backward_made() -> None:
    """The new tensors may well get the `id` of those that are gone."""

    def replace(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        parameters = list(model.parameters())
        found = torch.autograd.grad(loss_of(model, step), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = None
            parameter.grad = gradient.clone()

    repeat(adam, replace)


@healthy
def steps_repeated_now_and_then() -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for _ in range(3 if step % 20 == 0 else 1):
            optimizer.step()


def step_copies(copy: Callable[[Tensor, Tensor], object]) -> None:
    """Step FP32 copies of the weights, whose gradients are kept and written over."""
    model = classifier()
    copies = [each.detach().clone().requires_grad_() for each in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.05)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, step).backward()
        for copied, each in zip(copies, model.parameters(), strict=True):
            copied.grad = torch.zeros_like(copied) if copied.grad is None else copied.grad
            copy(copied.grad, gradient_of(each))
        optimizer.step()
        with torch.no_grad():
            for copied, each in zip(copies, model.parameters(), strict=True):
                each.copy_(copied)


@healthy
def copies_whose_gradients_are_written() -> None:
    step_copies(lambda own, gradient: own.copy_(gradient))


@healthy
def copies_whose_gradient_data_are_written() -> None:
    step_copies(lambda own, gradient: own.data.copy_(gradient))


class Wrapped(torch.optim.Optimizer):
    """Steps the optimizer that it was given, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.inner.step()


@healthy
def an_optimizer_within_an_optimizer() -> None:
    repeat(lambda model: Wrapped(sgd(model)), times=1)


@wrong(STEP_REPEATED)
def an_optimizer_within_an_optimizer_steps_twice() -> None:
    repeat(lambda model: Wrapped(sgd(model)))


@healthy
def weights_move_without_gradients() -> None:
    """Zeroth order: two forwards at perturbed weights, and no backward."""
    model = classifier()
    optimizer = sgd(model)
    for _ in range(STEPS):
        with torch.no_grad():
            for each in model.parameters():
                each.add_(1e-3 * torch.randn_like(each))
        optimizer.step()


def gan(
    order: str, *, clears: bool = True, eval_at: int | None = None, critic_steps: int = 1
) -> None:
    """Train a GAN whose generator's backward makes gradients of the critic as well."""
    generator, critic = classifier(), nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
    of_generator, of_critic = (
        torch.optim.Adam(model.parameters()) for model in (generator, critic)
    )
    for step in range(STEPS):
        fake, real = generator(batch(step)[0]), torch.randn(32, 10)
        if order == "interleaved":
            of_generator.zero_grad()
            critic(fake).mean().backward()
        if clears:
            of_critic.zero_grad()
        (critic(real) - critic(fake.detach())).mean().backward()
        if order == "interleaved":
            of_generator.step()
        for _ in range(critic_steps):
            of_critic.step()
        if order != "interleaved" and (order != "many" or step % 5 == 0):
            of_generator.zero_grad()
            critic(generator(batch(step)[0])).mean().backward()
            of_generator.step()
        if step == eval_at:
            generator.eval()


@healthy
def gan_by_turns() -> None:
    gan("turns")


@healthy
def gan_with_many_steps_of_its_critic() -> None:
    gan("many")


@healthy
def gan_with_interleaved_steps() -> None:
    gan("interleaved")


def under_scaler(
    step: Callable[[torch.amp.GradScaler, torch.optim.Optimizer], object],
    scaler: torch.amp.GradScaler | None = None,
    parts: int = 1,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> None:
    """Scale the loss of each part, and step as asked for."""
    model = classifier()
    # Steps with gradients that are so many times too large would end in NaN.
    own = (optimizer or (lambda model: torch.optim.Adam(model.parameters(), lr=1e-3)))(model)
    scaler = scaler or torch.amp.GradScaler("cpu")
    for number in range(STEPS):
        own.zero_grad()
        for part in range(parts):
            inputs, classes = batch(number, part)
            scaler.scale(cross_entropy(model(inputs), classes) / parts).backward()
        step(scaler, own)
        scaler.update()


def _clip(optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)


def _unscale_by_hand(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *, data: bool
) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        assert parameter.grad is not None
        gradient = parameter.grad.data if data else parameter.grad
        gradient.div_(scaler.get_scale())


@wrong(STEP_SCALED)
def scaler_that_does_not_step() -> None:
    under_scaler(
        lambda scaler, optimizer: (optimizer.step(), scaler._check_inf_per_device(optimizer))
    )


@wrong(STEP_SCALED)
def scaler_that_does_not_step_after_clipping() -> None:
    def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        _clip(optimizer)
        optimizer.step()
        scaler._check_inf_per_device(optimizer)

    under_scaler(step, parts=2)


@wrong(STEP_SCALED)
def scaler_that_steps_one_of_two_optimizers() -> None:
    encoder, head = nn.Linear(16, 16), nn.Linear(16, 10)
    of_encoder, of_head = (torch.optim.Adam(part.parameters()) for part in (encoder, head))
    scaler = torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        of_encoder.zero_grad()
        of_head.zero_grad()
        inputs, classes = batch(step)
        scaler.scale(cross_entropy(head(encoder(inputs)), classes)).backward()
        scaler.step(of_encoder)
        of_head.step()
        scaler.update()


@healthy
def scaler_that_steps() -> None:
    under_scaler(lambda scaler, optimizer: scaler.step(optimizer), parts=2)


@healthy
def scaler_that_unscales_before_clipping() -> None:
    def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        scaler.unscale_(optimizer)
        _clip(optimizer)
        scaler.step(optimizer)

    under_scaler(step)


@healthy
def step_of_gradients_that_the_scaler_has_unscaled() -> None:
    def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        scaler.unscale_(optimizer)
        optimizer.step()

    under_scaler(step)


@healthy
def scaler_that_is_off() -> None:
    under_scaler(
        lambda scaler, optimizer: optimizer.step(), torch.amp.GradScaler("cpu", enabled=False)
    )


@healthy
def scale_of_1() -> None:
    under_scaler(
        lambda scaler, optimizer: (optimizer.step(), scaler._check_inf_per_device(optimizer)),
        torch.amp.GradScaler("cpu", init_scale=1.0),
    )


@healthy
def gradients_unscaled_by_hand() -> None:
    def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        _unscale_by_hand(scaler, optimizer, data=False)
        _clip(optimizer)
        optimizer.step()
        scaler._check_inf_per_device(optimizer)

    under_scaler(step)


@healthy
def gradients_unscaled_by_hand_through_data() -> None:
    def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        _unscale_by_hand(scaler, optimizer, data=True)
        optimizer.step()
        scaler._check_inf_per_device(optimizer)

    under_scaler(step)


class _Wrapper(torch.optim.Optimizer):
    """Leaves the step to another optimizer, as a library's wrapper does."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = torch.optim.Adam(model.parameters())
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step()


@healthy
def scaler_that_steps_a_wrapper() -> None:
    under_scaler(lambda scaler, optimizer: scaler.step(optimizer), optimizer=_Wrapper)


@healthy
def only_one_of_two_models_with_a_scaler() -> None:
    models = nn.Linear(16, 10), nn.Linear(16, 10)
    scaled, plain = (torch.optim.Adam(model.parameters()) for model in models)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        inputs, classes = batch(step)
        scaled.zero_grad()
        scaler.scale(cross_entropy(models[0](inputs), classes)).backward()
        scaler.step(scaled)
        scaler.update()
        plain.zero_grad()
        cross_entropy(models[1](inputs), classes).backward()
        plain.step()


@healthy
def critic_without_the_generators_scaler() -> None:
    generator, critic = nn.Linear(16, 16), nn.Linear(16, 1)
    of_generator, of_critic = (torch.optim.Adam(part.parameters()) for part in (generator, critic))
    scaler = torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        inputs, _ = batch(step)
        of_generator.zero_grad()
        scaler.scale(-critic(generator(inputs)).mean()).backward()
        scaler.step(of_generator)
        scaler.update()
        for parameter in critic.parameters():
            gradient_of(parameter).zero_()
        (critic(generator(inputs).detach()).mean() - critic(inputs).mean()).backward()
        of_critic.step()


@wrong(OPTIMIZER_NEVER_STEPS)
def gan_whose_critic_never_steps() -> None:
    gan("turns", critic_steps=0)


def encoder_and_head(
    clear: Callable[[torch.optim.Optimizer, nn.Module], object],
    step_head: Callable[[int, torch.optim.Optimizer, nn.Module], object],
    of_head: Callable[[nn.Module], torch.optim.Optimizer] = lambda head: sgd(nn.Sequential(head)),
) -> None:
    """Step the encoder by an optimizer of its own; the head, which has another, as asked for."""
    encoder, head = nn.Linear(16, 16), nn.Linear(16, 10)
    of_encoder, own = sgd(nn.Sequential(encoder)), of_head(head)
    for step in range(STEPS):
        of_encoder.zero_grad()
        clear(own, head)
        inputs, classes = batch(step)
        cross_entropy(head(encoder(inputs)), classes).backward()
        of_encoder.step()
        step_head(step, own, head)


def by_optimizer(optimizer: torch.optim.Optimizer, part: nn.Module) -> None:
    optimizer.zero_grad()


def by_module(optimizer: torch.optim.Optimizer, part: nn.Module) -> None:
    part.zero_grad()


def to_zeros(optimizer: torch.optim.Optimizer, part: nn.Module) -> None:
    optimizer.zero_grad(set_to_none=False)


def not_at_all(step: int, optimizer: torch.optim.Optimizer, part: nn.Module) -> None:
    pass


@wrong(OPTIMIZER_NEVER_STEPS)
def head_never_steps() -> None:
    encoder_and_head(by_optimizer, not_at_all)


@wrong(OPTIMIZER_NEVER_STEPS)
def head_that_its_module_clears_never_steps() -> None:
    encoder_and_head(by_module, not_at_all)


@wrong(OPTIMIZER_NEVER_STEPS)
def head_whose_gradients_become_zeros_never_steps() -> None:
    encoder_and_head(to_zeros, not_at_all)


@wrong(OPTIMIZER_NEVER_STEPS)
def head_of_nan_never_steps() -> None:
    def of_head(head: nn.Module) -> torch.optim.Optimizer:
        nn.init.constant_(next(head.parameters()), math.nan)
        return sgd(nn.Sequential(head))

    encoder_and_head(by_optimizer, not_at_all, of_head)


@healthy
def head_that_stops_for_good() -> None:
    """It has stepped: that it does not any more may be meant."""

    def step_head(step: int, optimizer: torch.optim.Optimizer, part: nn.Module) -> None:
        if step < 3:
            optimizer.step()

    encoder_and_head(by_optimizer, step_head)


@healthy
def head_that_begins_later() -> None:
    def step_head(step: int, optimizer: torch.optim.Optimizer, part: nn.Module) -> None:
        if step >= 20:
            optimizer.step()

    encoder_and_head(by_optimizer, step_head)


@healthy
def head_that_steps_once_in_a_while() -> None:
    def step_head(step: int, optimizer: torch.optim.Optimizer, part: nn.Module) -> None:
        if step in (0, 40):
            optimizer.step()

    encoder_and_head(by_optimizer, step_head)


@healthy
def head_that_is_stepped_by_hand() -> None:
    def step_head(step: int, optimizer: torch.optim.Optimizer, part: nn.Module) -> None:
        for parameter in part.parameters():
            parameter.data -= 0.05 * gradient_of(parameter)

    encoder_and_head(by_optimizer, step_head)


class Outer(torch.optim.Optimizer):
    """An optimizer of several steps, whose own `step` is never called."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__(head.parameters(), {"lr": 0.05})
        self.inner = torch.optim.SGD(self.param_groups)


@healthy
def head_whose_optimizer_wraps_the_one_that_steps() -> None:
    def step_head(step: int, optimizer: torch.optim.Optimizer, part: nn.Module) -> None:
        assert isinstance(optimizer, Outer)
        optimizer.inner.step()

    encoder_and_head(by_optimizer, step_head, Outer)


@healthy
def head_that_is_frozen() -> None:
    def frozen(head: nn.Module) -> torch.optim.Optimizer:
        return sgd(nn.Sequential(head.requires_grad_(False)))

    encoder_and_head(by_optimizer, not_at_all, frozen)


@wrong(GRADIENTS_ADD_UP)
def gan_whose_critic_is_not_cleared() -> None:
    gan("turns", clears=False)


@wrong(LEFT_IN_EVALUATION)
def gan_whose_generator_stays_in_evaluation() -> None:
    gan("turns", eval_at=5)


@healthy
def examples_against_the_model() -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        inputs, classes = batch(step)
        model.eval()
        for _ in range(2):
            inputs.requires_grad_()
            cross_entropy(model(inputs), classes).backward()
            inputs = (inputs + 0.1 * gradient_of(inputs).sign()).detach()
        model.train()
        optimizer.zero_grad()
        cross_entropy(model(inputs), classes).backward()
        optimizer.step()


@healthy
def sharpness_aware() -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        loss_of(model, step).backward()
        moves = [0.05 * gradient_of(each) for each in model.parameters()]
        with torch.no_grad():
            for each, move in zip(model.parameters(), moves, strict=True):
                each.add_(move)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.no_grad():
            for each, move in zip(model.parameters(), moves, strict=True):
                each.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


def by_example(put, *, clips=False):
    """Clip the gradients of each part, and step with their sum, as private training does."""
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        sums = [torch.zeros_like(each) for each in model.parameters()]
        for part in range(3):
            optimizer.zero_grad()
            loss_of(model, step, part).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for total, each in zip(sums, model.parameters(), strict=True):
                total.add_(gradient_of(each))
        for total, each in zip(sums, model.parameters(), strict=True):
            put(each, total)
        optimizer.step()


@healthy
def sums_of_clipped_parts():
    by_example(lambda parameter, total: gradient_of(parameter).copy_(total), clips=True)


@healthy
def sums_in_the_gradients():
    by_example(lambda parameter, total: gradient_of(parameter).copy_(total))


@healthy
def sums_in_the_data_of_gradients():
    by_example(lambda parameter, total: setattr(parameter.grad, "data", total))


@healthy
def sums_in_the_place_of_gradients():
    by_example(lambda parameter, total: setattr(parameter, "grad", total))


@healthy
def gradients_of_tasks_before_their_sum() -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        for part in range(2):
            optimizer.zero_grad()
            loss_of(model, step, part).backward()
        optimizer.zero_grad()
        (loss_of(model, step) + loss_of(model, step, 1)).backward()
        optimizer.step()


def learn_to_learn(*, by_weights: bool) -> None:
    """Train from weights that are restored after some inner steps: FOMAML, or Reptile."""
    model = classifier()
    optimizer, inner = sgd(model), sgd(model, 0.01)
    for step in range(STEPS):
        before = [each.detach().clone() for each in model.parameters()]
        for part in range(3):
            inner.zero_grad()
            loss_of(model, step, part).backward()
            if by_weights:
                inner.step()
            else:
                for each in model.parameters():
                    each.data.sub_(0.01 * gradient_of(each))
        if not by_weights:
            optimizer.zero_grad()
            loss_of(model, step, 3).backward()
        for each, old in zip(model.parameters(), before, strict=True):
            if by_weights:
                each.grad = old - each.detach()
            each.data.copy_(old)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@healthy
def reptile() -> None:
    learn_to_learn(by_weights=True)


@healthy
def maml_of_first_order() -> None:
    learn_to_learn(by_weights=False)


def two_optimizers(kind: str) -> None:
    model = classifier()
    parts = (model[:2], model[4]) if kind in ("parts", "one of them") else (model, model)
    first, second = sgd(parts[0]), torch.optim.Adam(parts[1].parameters())
    for step in range(STEPS):
        first.zero_grad()
        if kind != "one of them":
            second.zero_grad()
        loss_of(model, step).backward()
        for turn, optimizer in enumerate((first, second)):
            if kind != "turns" or step % 2 == turn:
                optimizer.step()


@healthy
def two_optimizers_of_the_same() -> None:
    two_optimizers("same")


@healthy
def two_optimizers_by_turns() -> None:
    two_optimizers("turns")


@healthy
def two_optimizers_of_parts() -> None:
    two_optimizers("parts")


@wrong(GRADIENTS_ADD_UP)
def two_optimizers_of_which_one_is_cleared() -> None:
    two_optimizers("one of them")


def evaluate(back: Callable[[nn.Module], object], model: nn.Module | None = None) -> None:
    model = model or classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if step % 10 == 5:
            model.eval()
            with torch.no_grad():
                loss_of(model, 10**6)
            back(model)


@wrong(LEFT_IN_EVALUATION)
def stays_in_evaluation() -> None:
    evaluate(lambda model: None)


@healthy
def returns_to_training() -> None:
    evaluate(lambda model: model.train())


@healthy
def returns_to_training_by_attribute() -> None:
    def back(model: nn.Module) -> None:
        for each in model.modules():
            each.training = True

    evaluate(back)


@healthy
def returns_to_training_but_for_the_statistics() -> None:
    def back(model: nn.Module) -> None:
        model.train()
        model.get_submodule("1").eval()

    evaluate(back)


@healthy
def nothing_depends_on_the_mode() -> None:
    evaluate(
        lambda model: None,
        nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Dropout(0.0), nn.Linear(32, 10)),
    )


@wrong(LEFT_IN_EVALUATION)
def evaluation_mode_from_the_start() -> None:
    evaluate(lambda model: None, classifier().eval())


@wrong(LEFT_IN_EVALUATION)
def never_in_training_mode() -> None:
    """As what `from_pretrained` returns, and no mode is ever set."""
    train_classifier(classifier().eval())


def evaluate_within_a_module(model: nn.Module) -> None:
    """Train and evaluate as Lightning does, which restores the mode of each module."""
    outer = nn.Sequential(model)
    modes = [(each, each.training) for each in outer.modules()]

    def back(model: nn.Module) -> None:
        for each, mode in modes:
            each.training = mode

    evaluate(back, outer)


@wrong(LEFT_IN_EVALUATION)
def evaluation_mode_within_a_module_in_training_mode() -> None:
    evaluate_within_a_module(classifier().eval())


@healthy
def training_mode_within_a_module() -> None:
    evaluate_within_a_module(classifier())


@healthy
def statistics_that_stay_within_a_module() -> None:
    evaluate_within_a_module(
        nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 10)).eval()
    )


@healthy
def statistics_that_stay_from_the_start() -> None:
    train_classifier(nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 10)).eval())


@healthy
def a_head_on_a_model_in_evaluation_mode() -> None:
    model = classifier().eval()
    model[:4].requires_grad_(requires_grad=False)
    train_classifier(model, model[4])


def train_classifier(model: nn.Sequential, trained: nn.Module | None = None) -> None:
    optimizer = sgd(nn.Sequential(trained or model))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@healthy
def the_rest_is_frozen_in_a_second_stage() -> None:
    model = classifier()
    for trained in (model, model[4]):
        optimizer = sgd(trained)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        model.eval()
        model[:4].requires_grad_(requires_grad=False)


def under_autocast(call: Callable[[nn.Module, Tensor], Tensor], *, inside: bool = True) -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        inputs, classes = batch(step)
        optimizer.zero_grad()
        outputs = None if inside else call(model, inputs)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = call(model, inputs) if outputs is None else outputs
            loss = cross_entropy(outputs, classes)
        loss.backward()
        optimizer.step()


@healthy
def model_under_autocast():
    under_autocast(lambda model, inputs: model(inputs))


@healthy
def head_outside_of_autocast():
    def call(model, inputs):
        hidden = model[:4](inputs)
        with torch.autocast("cpu", enabled=False):
            return model[4](hidden.float())

    under_autocast(call)


@wrong(AUTOCAST_FP32_SHARE)
def only_the_loss_under_autocast():
    under_autocast(lambda model, inputs: model(inputs), inside=False)


@wrong(AUTOCAST_FP32_SHARE)
def autocast_disabled_within():
    def call(model, inputs):
        with torch.autocast("cpu", enabled=False):
            return model(inputs)

    under_autocast(call)


@healthy
def only_evaluation_under_autocast() -> None:
    model = classifier()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            loss_of(model, step)


RANKS = 2
OF_RANKS: dict[str, set[str]] = {
    "cleared": set(),
    "cleared views": set(),
    "evaluated": set(),
    "never cleared": {GRADIENTS_ADD_UP},
    "never cleared views": {GRADIENTS_ADD_UP},
    "cleared each": {BACKWARDS_DISCARDED},
    "stays in evaluation": {LEFT_IN_EVALUATION},
    "clipped shards": {CLIPPED_BY_SHARD},
    "clipped flat shards": {CLIPPED_BY_SHARD},
    "clipped shards by all ranks": set(),
    "clipped shards by hand": set(),
    "clipped DTensors": set(),
}
"""What is wrong with each way in which ranks train under DDP, of two micro-batches per step.

Or with shards, of which the norm is that of each rank or of all.
"""


def train_ranks(rank: int, directory: Path) -> None:
    """Train in each of these ways, with a ring of its own."""
    with process_group(directory, rank, RANKS, timeout_seconds=120):
        for kind in OF_RANKS:
            with watched(directory, rank, RANKS, name=kind, layer_interval=100):
                _train_as_rank(kind, rank)


def _train_as_rank(kind: str, rank: int) -> None:
    if kind.startswith("clipped"):
        _train_shards(kind, rank)
        return
    model = DistributedDataParallel(classifier(), gradient_as_bucket_view=kind.endswith("views"))
    optimizer = sgd(model)
    for step in range(STEPS):
        for part in range(2):
            if "never" not in kind and (part == 0 or kind.endswith("each")):
                optimizer.zero_grad()
            accumulates = part == 0 and "each" not in kind
            with model.no_sync() if accumulates else nullcontext():
                loss_of(model, step, part + 2 * rank).backward()
        optimizer.step()
        if step % 10 == 5 and "evaluat" in kind:
            model.module.eval()
            with torch.no_grad():
                loss_of(model.module, 10**6)
            model.train("stays" not in kind)


def _train_shards(kind: str, rank: int) -> None:
    whole = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    if kind.endswith("DTensors"):
        fully_shard(whole, mesh=init_device_mesh("cpu", (RANKS,)))
        model: nn.Module = whole
    else:
        model = FullyShardedDataParallel(
            whole, device_id=torch.device("cpu"), use_orig_params="flat" not in kind
        )
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        parameters = list(model.parameters())
        if isinstance(model, FullyShardedDataParallel) and kind.endswith("by all ranks"):
            model.clip_grad_norm_(1.0)
        elif kind.endswith("by hand"):
            gradients = [each.grad for each in parameters if each.grad is not None]
            squares = nn.utils.get_total_norm(gradients).square()
            dist.all_reduce(squares)
            nn.utils.clip_grads_with_norm_(parameters, 1.0, squares.sqrt())
        else:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
