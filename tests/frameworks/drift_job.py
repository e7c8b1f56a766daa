"""`torchrun -m tests.frameworks.drift_job DIRECTORY`: ranks that drift, on purpose and not."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.agent.probe.watching import watched
from tests.gloo import end_process_group

STEPS = 12
PERIOD = 3
FLIPPED_STEP = 7

SCENARIOS: dict[str, Callable[[Accelerator], None]] = {}


def scenario(train: Callable[[Accelerator], None]) -> Callable[[Accelerator], None]:
    SCENARIOS[train.__name__] = train
    return train


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    before_step: Callable[[int], None] = lambda step: None,
    after_step: Callable[[int], None] = lambda step: None,
    no_sync: bool = False,
) -> None:
    """Train on data of this rank's own."""
    for step in range(1, STEPS + 1):
        data = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        wrapper: Any = model
        with wrapper.no_sync() if no_sync else nullcontext():
            backward(model(torch.randn(8, 6, generator=data)).pow(2).mean())
        before_step(step)
        optimizer.step()
        after_step(step)
        optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


@torch.no_grad()
def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter)
        parameter.div_(dist.get_world_size())


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())


def every_period(model: nn.Module) -> Callable[[int], None]:
    return lambda step: average(model) if step % PERIOD == 0 else None


def flip_a_bit(model: nn.Module) -> Callable[[int], None]:
    def flip(step: int) -> None:
        if step == FLIPPED_STEP and dist.get_rank() == 1:
            weights = next(model.parameters()).detach().view(-1)[:1]
            weights.view(torch.int32).bitwise_xor_(1 << 20)

    return flip


@scenario
def accelerate_local_sgd(accelerator: Accelerator) -> None:
    model = make_model()
    model, optimizer = accelerator.prepare(model, sgd(model))
    with LocalSGD(
        accelerator=accelerator, model=model, local_sgd_steps=PERIOD, enabled=True
    ) as local_sgd:
        train(
            model,
            optimizer,
            backward=accelerator.backward,
            after_step=lambda step: local_sgd.step(),
        )


@scenario
def no_sync_and_an_outer_loop(accelerator: Accelerator) -> None:
    model = DistributedDataParallel(make_model())
    train(model, sgd(model), no_sync=True, after_step=every_period(model))


@scenario
def plain_models_and_an_outer_loop(accelerator: Accelerator) -> None:
    model = make_model()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    outer = torch.optim.SGD(start, lr=0.7, momentum=0.9, nesterov=True)

    def outer_step(step: int) -> None:
        if step % PERIOD:
            return
        for old, parameter in zip(start, model.parameters(), strict=True):
            old.grad = old - parameter.detach()
            dist.all_reduce(old.grad)
            old.grad /= dist.get_world_size()
        outer.step()
        for old, parameter in zip(start, model.parameters(), strict=True):
            parameter.detach().copy_(old)

    train(model, sgd(model), after_step=outer_step)


@scenario
def plain_models_averaged_after_a_warm_up(accelerator: Accelerator) -> None:
    model = make_model()
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=4)
    train(
        model,
        sgd(model),
        before_step=lambda step: average_gradients(model) if step <= 4 else None,
        after_step=lambda step: averager.average_parameters(model.parameters()),
    )


@scenario
def post_local_sgd(accelerator: Accelerator) -> None:
    model = DistributedDataParallel(make_model())
    state = PostLocalSGDState(None, None, 4, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=4)
    train(model, PostLocalSGDOptimizer(optim=sgd(model), averager=averager))


def keep_local(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def reduce_by_hand(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    mean: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda done: done.value()[0] / dist.get_world_size()
    )
    return mean


@scenario
def a_hook_that_keeps_gradients_local(accelerator: Accelerator) -> None:
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(None, keep_local)
    train(model, sgd(model), after_step=every_period(model))


@scenario
def flipped_under_ddp(accelerator: Accelerator) -> None:
    model = DistributedDataParallel(make_model())
    train(model, sgd(model), after_step=flip_a_bit(model))


@scenario
def flipped_under_a_hook_of_ones_own(accelerator: Accelerator) -> None:
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(None, reduce_by_hand)
    train(model, sgd(model), after_step=flip_a_bit(model))


@scenario
def flipped_in_plain_models(accelerator: Accelerator) -> None:
    model = make_model()
    train(
        model,
        sgd(model),
        before_step=lambda step: average_gradients(model),
        after_step=flip_a_bit(model),
    )


@scenario
def one_step_without_a_reduction(accelerator: Accelerator) -> None:
    """A mistake: the last micro-batch of a step was under no_sync, and nothing averages weights."""
    model = DistributedDataParallel(make_model())
    optimizer = sgd(model)
    for step in range(1, STEPS + 1):
        data = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        with model.no_sync() if step == FLIPPED_STEP else nullcontext():
            model(torch.randn(8, 6, generator=data)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    for name, train_it in SCENARIOS.items():
        place = directory / name
        place.mkdir(exist_ok=True)
        dist.barrier()
        with watched(place, dist.get_rank(), dist.get_world_size()):
            train_it(accelerator)
    dist.barrier()
    end_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
