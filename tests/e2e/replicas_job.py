"""`torchrun -m tests.e2e.replicas_job DIRECTORY`: ranks that hold copies, parts, or neither."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.agent.probe.watching import watched
from tests.gloo import end_process_group

STEPS = 12
LONG_STEPS = 150
PLAIN_STEPS = 900
PERIOD = 8
UNFROZEN_AT_STEP = OTHER_RATE_AT_STEP = 107
SELDOM_SAMPLED = (
    "a_layer_is_unfrozen_in_mid_run",
    "a_layer_is_unfrozen_and_wrapped_again",
    "one_rank_has_another_rate_under_ddp",
    "one_rank_has_another_rate_without_a_wrapper",
)
SELDOM_MEASURED = ("plain_copies_train_apart", "plain_copies_are_averaged")
WIDTH = 16

SCENARIOS: dict[str, Callable[[], list[float]]] = {}
"""Each trains, and returns what the norm of the run's gradients is at every step, if anything."""


def scenario(train: Callable[[], list[float]]) -> Callable[[], list[float]]:
    SCENARIOS[train.__name__] = train
    return train


class Router(nn.Module):
    """A small network with two norms and a router, and four experts that every rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.norm1(torch.tanh(self.first(x)))
        chosen = torch.softmax(self.router(hidden), dim=-1).sum(dim=-1, keepdim=True)
        gate = torch.softmax(self.router(hidden), dim=-1).pow(2).sum(dim=-1, keepdim=True)
        return self.last(self.norm2(hidden * gate * chosen))


def seeded(kind: Callable[[], nn.Module] = Router, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return kind()


def batches(steps: int) -> Iterator[torch.Tensor]:
    """Yield data of this rank's own."""
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        yield torch.randn(8, WIDTH, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> Any:
    return (model(x) - x[:, :1].sin()).square().mean()


def mean_norm(gradients: list[torch.Tensor]) -> float:
    """Return the norm of the mean over all ranks of these gradients, in float64."""
    squares = 0.0
    for gradient in gradients:
        whole = gradient.detach().double().clone()
        dist.all_reduce(whole)
        squares += float((whole / dist.get_world_size()).square().sum())
    return float(squares**0.5)


def lowest_norm(gradients: list[torch.Tensor]) -> float:
    """Return the norm of rank 0's gradients, in float64."""
    squares = torch.tensor([sum(float(g.double().square().sum()) for g in gradients)])
    dist.broadcast(squares, 0)
    return sqrt(float(squares))


def gradients_of(model: nn.Module, *, without: str = "") -> list[torch.Tensor]:
    return [
        parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not (without and without in name)
    ]


def reduce_gradients(model: nn.Module, *, without: str = "") -> None:
    for gradient in gradients_of(model, without=without):
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())


@torch.no_grad()
def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter)
        parameter.div_(dist.get_world_size())


class ReducingOptimizer(torch.optim.Optimizer):
    """As distributed Muon: every gradient is reduced within `step`, into memory of its own."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                update = parameter.grad.clone()
                dist.all_reduce(update)
                parameter.add_(update / update.norm().clamp(min=1e-9), alpha=-group["lr"])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


@scenario
def gradients_reduced_within_step() -> list[float]:
    model, norms = seeded(), []
    optimizer = ReducingOptimizer(model.parameters())
    for x in batches(STEPS):
        loss_of(model, x).backward()
        norms.append(lowest_norm(gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@scenario
def inner_steps_of_diloco() -> list[float]:
    model, norms = seeded(), []
    start = [parameter.detach().clone() for parameter in model.parameters()]
    outer = torch.optim.SGD(start, lr=0.7, momentum=0.9, nesterov=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, x in enumerate(batches(LONG_STEPS), 1):
        loss_of(model, x).backward()
        norms.append(lowest_norm(gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
        if step % PERIOD == 0:
            for old, parameter in zip(start, model.parameters(), strict=True):
                old.grad = old - parameter.detach()
                dist.all_reduce(old.grad)
                old.grad /= dist.get_world_size()
            outer.step()
            for old, parameter in zip(start, model.parameters(), strict=True):
                parameter.detach().copy_(old)
    return norms


@scenario
def local_adam_moves_a_bias_alike_at_first() -> list[float]:
    model, norms = seeded(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, x in enumerate(batches(LONG_STEPS), 1):
        loss_of(model, x).backward()
        if step == 1:
            model.last.bias.grad.abs_()
        norms.append(lowest_norm(gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
        if step % PERIOD == 0:
            average(model)
    return norms


@scenario
def one_router_is_not_reduced() -> list[float]:
    model, norms = seeded(), []
    optimizer = sgd(model)
    for x in batches(STEPS):
        loss_of(model, x).backward()
        reduce_gradients(model, without="router")
        norms.append(lowest_norm(gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@scenario
def ddp_ignores_two_norms() -> list[float]:
    inner, norms = seeded(), []
    ignored = [name for name, _ in inner.named_parameters() if "norm" in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ignored)
    model = DistributedDataParallel(inner)
    optimizer = sgd(model)
    for x in batches(STEPS):
        loss_of(model, x).backward()
        norms.append(lowest_norm(gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@scenario
def the_last_micro_batch_under_no_sync() -> list[float]:
    model, norms = DistributedDataParallel(seeded()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for x in batches(LONG_STEPS):
        for number, part in enumerate(x.chunk(2)):
            with model.no_sync() if number == 1 else nullcontext():
                (loss_of(model, part) / 2).backward()
        norms.append(lowest_norm(gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@scenario
def the_first_micro_batch_under_no_sync() -> list[float]:
    model, norms = DistributedDataParallel(seeded()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for x in batches(LONG_STEPS):
        for number, part in enumerate(x.chunk(2)):
            with model.no_sync() if number == 0 else nullcontext():
                (loss_of(model, part) / 2).backward()
        norms.append(lowest_norm(gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _with_a_second_loss(*, bypasses: bool) -> list[float]:
    model, norms = DistributedDataParallel(seeded()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for x in batches(STEPS):
        loss_of(model, x).backward()
        (loss_of(model.module if bypasses else model, x.flip(0) + 0.1) / 4).backward()
        norms.append(lowest_norm(gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@scenario
def a_second_loss_bypasses_the_wrapper() -> list[float]:
    return _with_a_second_loss(bypasses=True)


@scenario
def a_second_loss_through_the_wrapper() -> list[float]:
    return _with_a_second_loss(bypasses=False)


def _of_plain_copies(period: int | None) -> list[float]:
    """Train copies without a wrapper; period: of averaging, None without any."""
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, x in enumerate(batches(PLAIN_STEPS), 1):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if period is not None and step % period == 0:
            average(model)
    return []


@scenario
def plain_copies_train_apart() -> list[float]:
    return _of_plain_copies(None)


@scenario
def plain_copies_are_averaged() -> list[float]:
    return _of_plain_copies(PERIOD)


@scenario
def the_wrapper_is_bypassed() -> list[float]:
    model, norms = DistributedDataParallel(seeded()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for x in batches(STEPS):
        loss_of(model.module, x).backward()
        norms.append(lowest_norm(gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@scenario
def local_sgd_under_ddp() -> list[float]:
    model = DistributedDataParallel(seeded())
    optimizer = sgd(model)
    for step, x in enumerate(batches(LONG_STEPS), 1):
        with model.no_sync():
            loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % PERIOD == 0:
            average(model)
    return []


@scenario
def each_rank_updates_its_part_under_ddp() -> list[float]:
    model = DistributedDataParallel(seeded())
    optimizer, world_size = sgd(model), dist.get_world_size()
    for x in batches(STEPS):
        loss_of(model, x).backward()
        for place, parameter in enumerate(model.parameters()):
            if place % world_size != dist.get_rank():
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for place, parameter in enumerate(model.parameters()):
            dist.broadcast(parameter.detach(), place % world_size)
    return []


@scenario
def the_first_pass_of_sam_is_local() -> list[float]:
    model = DistributedDataParallel(seeded())
    optimizer = sgd(model)
    for x in batches(LONG_STEPS):
        with model.no_sync():
            loss_of(model, x).backward()
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=0.05)
        optimizer.zero_grad()
        loss_of(model, x).backward()
        with torch.no_grad():
            for parameter, before in zip(model.parameters(), kept, strict=True):
                parameter.copy_(before)
        optimizer.step()
        optimizer.zero_grad()
    return []


class Codebook(nn.Module):
    """Vectors that follow the data that this rank sees."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, 1)
        self.register_buffer("codes", torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.encoder(x)
        codes = self.codes
        nearest = torch.cdist(hidden.detach(), codes).argmin(dim=1)
        with torch.no_grad():
            for place in nearest.unique():
                codes[place].lerp_(hidden[nearest == place].mean(dim=0), 0.1)
        return self.decoder(hidden + (codes[nearest] - hidden).detach())


class Normalised(nn.Module):
    """A network with statistics of each rank's own data."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        )
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x * self.scale)


def train_ddp(
    inner: nn.Module, *, after: Callable[[int, nn.Module], None], **wrapping: Any
) -> None:
    model = DistributedDataParallel(inner, **wrapping)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step, x in enumerate(batches(STEPS), 1):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step, inner)


@scenario
def a_codebook_follows_each_ranks_data() -> list[float]:
    train_ddp(seeded(Codebook), after=lambda step, model: None, broadcast_buffers=False)
    return []


@scenario
def a_plain_codebook_follows_each_ranks_data() -> list[float]:
    model = seeded(Codebook)
    optimizer = sgd(model)
    for x in batches(STEPS):
        loss_of(model, x).backward()
        reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return []


@scenario
def statistics_of_batch_norm_are_local() -> list[float]:
    train_ddp(seeded(Normalised), after=lambda step, model: None, broadcast_buffers=False)
    return []


@scenario
def a_frozen_parameter_changes_on_one_rank() -> list[float]:
    inner = seeded()
    inner.router.weight.requires_grad_(False)

    def change(step: int, model: Any) -> None:
        if step == 5 and dist.get_rank() == 1:
            model.router.weight.data[0, 0] += 1.0

    train_ddp(inner, after=change)
    return []


@scenario
def an_ensemble() -> list[float]:
    return trained_apart(sgd)


@scenario
def an_ensemble_with_a_bias_that_adam_moves_alike_at_first() -> list[float]:
    return trained_apart(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))


def trained_apart(optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> list[float]:
    model, norms = seeded(seed=10 + dist.get_rank()), []
    nn.init.zeros_(model.last.bias)
    optimizer = optimizer_of(model)
    for step, x in enumerate(batches(STEPS), 1):
        loss_of(model, x).backward()
        if step == 1:
            model.last.bias.grad.abs_()
        squares = torch.tensor([sum(float(g.double().square().sum()) for g in gradients_of(model))])
        dist.all_reduce(squares)
        norms.append(float(squares) ** 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return norms


class Experts(nn.Module):
    """An expert of each rank's own, made from the seed that all ranks have, and a common part."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, 1)])

    def forward(self, x: torch.Tensor) -> Any:
        hidden: torch.Tensor = self.experts[0](torch.tanh(self.common(x)))
        return hidden


@scenario
def experts_from_one_seed() -> list[float]:
    model, norms = seeded(Experts), []
    optimizer = sgd(model)
    for x in batches(STEPS):
        loss_of(model, x).backward()
        reduce_gradients(model, without="experts")
        own = [float(p.grad.double().square().sum()) for p in model.experts.parameters()]
        squares = torch.tensor([sum(own)])
        dist.all_reduce(squares)
        common = lowest_norm(gradients_of(model, without="experts"))
        norms.append((float(squares) + common**2) ** 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return norms


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        whole = gradient.clone()
        dist.all_reduce(whole)
        return whole


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        whole = x.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class TensorParallel(nn.Module):
    """Two matrices that each rank has a part of, between norms that every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out_norm = nn.LayerNorm(WIDTH)
        torch.manual_seed(50 + dist.get_rank())
        self.columns = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rows = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = _Copied.apply(self.norm(x))
        whole = _Reduced.apply(self.rows(torch.tanh(self.columns(hidden))))
        return self.out_norm(whole + x)


@scenario
def one_rank_clips_the_norms() -> list[float]:
    model, norms = seeded(TensorParallel), []
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        x = torch.randn(8, WIDTH, generator=generator)
        (model(x) - x.sin()).square().mean().backward()
        replicated = gradients_of(model, without="s.")  # neither columns nor rows
        parts = [g for g in gradients_of(model) if all(g is not other for other in replicated)]
        squares = torch.tensor([sum(float(g.double().square().sum()) for g in parts)])
        dist.all_reduce(squares)
        norms.append((float(squares) + lowest_norm(replicated) ** 2) ** 0.5)
        if dist.get_rank() == 1:
            nn.utils.clip_grad_norm_([*model.norm.parameters(), *model.out_norm.parameters()], 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return norms


@scenario
def a_layer_is_added_after_wrapping() -> list[float]:
    inner = nn.Sequential(seeded())
    model = DistributedDataParallel(inner)
    inner.append(seeded(lambda: nn.Linear(1, 1)))
    return _trained_by_sgd(model)


@scenario
def a_layer_is_unfrozen_after_wrapping() -> list[float]:
    inner = seeded()
    inner.first.requires_grad_(False)
    model = DistributedDataParallel(inner)
    inner.first.requires_grad_(True)
    return _trained_by_sgd(model)


def _unfrozen_later(*, wraps_again: bool) -> list[float]:
    inner = seeded()
    inner.first.requires_grad_(False)
    model, optimizer = DistributedDataParallel(inner), sgd(inner)
    for step, x in enumerate(batches(LONG_STEPS), 1):
        if step == UNFROZEN_AT_STEP:
            inner.first.requires_grad_(True)
            if wraps_again:
                model = DistributedDataParallel(inner)
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


@scenario
def a_layer_is_unfrozen_in_mid_run() -> list[float]:
    return _unfrozen_later(wraps_again=False)


@scenario
def a_layer_is_unfrozen_and_wrapped_again() -> list[float]:
    return _unfrozen_later(wraps_again=True)


def _with_another_rate(*, wrapped: bool) -> list[float]:
    inner = seeded()
    model = DistributedDataParallel(inner) if wrapped else inner
    optimizer = sgd(inner)
    for step, x in enumerate(batches(LONG_STEPS), 1):
        if step == OTHER_RATE_AT_STEP and dist.get_rank() == 1:
            optimizer.param_groups[0]["lr"] /= 2
        loss_of(model, x).backward()
        if not wrapped:
            reduce_gradients(inner)
        optimizer.step()
        optimizer.zero_grad()
    return []


@scenario
def one_rank_has_another_rate_under_ddp() -> list[float]:
    return _with_another_rate(wrapped=True)


@scenario
def one_rank_has_another_rate_without_a_wrapper() -> list[float]:
    return _with_another_rate(wrapped=False)


def _trained_by_sgd(model: nn.Module) -> list[float]:
    optimizer, norms = sgd(model), []
    for x in batches(STEPS):
        loss_of(model, x).backward()
        norms.append(lowest_norm(gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, train in SCENARIOS.items():
        place = directory / name
        place.mkdir(exist_ok=True)
        dist.barrier()
        settings: dict[str, Any] = {"layer_interval": 100} if name in SELDOM_SAMPLED else {}
        if name in SELDOM_MEASURED:
            settings |= {"layer_interval": 100, "overhead_budget": 1e-6}
        with watched(place, dist.get_rank(), dist.get_world_size(), **settings):
            norms = train()
        if dist.get_rank() == 0:
            torch.save(norms, place / "norms.pt")
    dist.barrier()
    end_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
