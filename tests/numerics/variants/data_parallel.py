"""Copies of the whole model: DDP in its many ways, and a script that reduces by itself."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from tests.numerics.models import Model, Stage, TiedModel, batch, seeded
from tests.numerics.registry import variant
from tests.numerics.training import (
    STEPS,
    WORLD,
    Reference,
    loss_of,
    optimizer_of,
    reference_of,
    rows_of,
    train,
    watched,
)


@variant("ddp")
def ddp(place: Path, rank: int) -> Reference:
    reference = reference_of(seeded(Model))
    with watched(place, rank):
        model = DistributedDataParallel(seeded(Model))
        train(model, optimizer_of(model.parameters()), rank)
    return reference


@variant("ddp")
def ddp_accumulation(place: Path, rank: int) -> Reference:
    reference = reference_of(seeded(Model), micro_batches=3)
    with watched(place, rank):
        model = DistributedDataParallel(seeded(Model))
        optimizer = optimizer_of(model.parameters())
        for step in range(1, STEPS + 1):
            for micro_batch in range(3):
                last = micro_batch == 2
                with contextlib.nullcontext() if last else model.no_sync():
                    (loss_of(model(batch(step, [rank], micro_batch))) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    return reference


@variant("ddp")
def ddp_tied(place: Path, rank: int) -> Reference:
    reference = reference_of(seeded(TiedModel))
    with watched(place, rank):
        model = DistributedDataParallel(seeded(TiedModel))
        train(model, optimizer_of(model.parameters()), rank)
    return reference


@variant("ddp")
def ddp_zero(place: Path, rank: int) -> Reference:
    reference = reference_of(seeded(Model))
    with watched(place, rank):
        model = DistributedDataParallel(seeded(Model))
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2
        )

        def clip(step: int) -> None:
            clip_grad_norm_(model.parameters(), 1e9)

        train(model, optimizer, rank, before_step=clip)
    return reference


@variant("ddp")
def ddp_frozen_and_unused(place: Path, rank: int) -> Reference:
    def make() -> Model:
        model = seeded(Model)
        model.embed.requires_grad_(False)
        model.unused = nn.Linear(3, 3).double()
        return model

    reference = reference_of(make(), clip_norm=1e-3)
    with watched(place, rank):
        model = DistributedDataParallel(make(), find_unused_parameters=True)

        def clip(step: int) -> None:
            clip_grad_norm_(model.parameters(), 1e-3)

        train(model, optimizer_of(model.parameters()), rank, before_step=clip)
    return reference


@variant("ddp")
def ddp_groups_added_later(place: Path, rank: int) -> Reference:
    def held(model: Model) -> Callable[[int], dict[str, nn.Parameter]]:
        named = dict(model.named_parameters())
        later = {name for name in named if name.startswith("head")}
        return lambda step: {n: p for n, p in named.items() if step > 2 or n not in later}

    whole = seeded(Model)
    reference = reference_of(whole, parameters_at=held(whole))
    with watched(place, rank):
        inner = seeded(Model)
        model, parameters = DistributedDataParallel(inner), held(inner)
        optimizer = optimizer_of(parameters(1).values())

        def grow(step: int) -> None:
            if step == 3:
                optimizer.add_param_group({"params": [inner.head.weight]})

        for step in range(1, STEPS + 1):
            model.zero_grad()
            loss_of(model(batch(step, [rank]))).backward()
            grow(step)
            optimizer.step()
    return reference


@variant("ddp")
def ddp_compiled(place: Path, rank: int) -> Reference:
    sgd = partial(torch.optim.SGD, lr=1e-2)  # a compiled AdamW does not round alike
    reference = reference_of(seeded(TiedModel), make_optimizer=sgd)
    with watched(place, rank):
        wrapped = DistributedDataParallel(seeded(TiedModel))
        model: Any = torch.compile(wrapped, backend="eager")
        optimizer = sgd(model.parameters())
        step = torch.compile(optimizer.step, backend="eager")
        train(model, optimizer, rank, step_optimizer=step)
    return reference


def _two_optimizers(place: Path, rank: int, wrapped: Callable[[nn.Module], nn.Module]) -> Reference:
    """Matrices and vectors of one model, as with Muon and AdamW; clipped together."""

    def split(model: nn.Module) -> list[dict[str, nn.Parameter]]:
        named = dict(model.named_parameters())
        return [
            {n: p for n, p in named.items() if p.ndim > 1},
            {n: p for n, p in named.items() if p.ndim == 1},
        ]

    whole = seeded(Model)
    parts = split(whole)
    optimizers = [optimizer_of(part.values()) for part in parts]
    reference: Reference = []
    for step in range(1, STEPS + 1):
        whole.zero_grad()
        loss_of(whole(batch(step, range(WORLD)))).backward()
        rows = [rows_of(part) for part in parts]
        reference.append({"": {**rows[0], **rows[1]}, "0": rows[0], "1": rows[1]})
        clip_grad_norm_(whole.parameters(), 1e-3)
        for optimizer in optimizers:
            optimizer.step()
    del optimizers, whole, parts
    with watched(place, rank):
        inner = seeded(Model)
        model = wrapped(inner)
        optimizers = [optimizer_of(part.values()) for part in split(inner)]
        for step in range(1, STEPS + 1):
            model.zero_grad()
            loss_of(model(batch(step, [rank]))).backward()
            clip_grad_norm_(model.parameters(), 1e-3)
            for optimizer in optimizers:
                optimizer.step()
    return reference


@variant("ddp")
def ddp_two_optimizers(place: Path, rank: int) -> Reference:
    return _two_optimizers(place, rank, DistributedDataParallel)


@variant("fsdp2")
def fsdp2_two_optimizers(place: Path, rank: int) -> Reference:
    def sharded(model: nn.Module) -> nn.Module:
        fully_shard(model)
        return model

    return _two_optimizers(place, rank, sharded)


@variant("ddp")
def ddp_gan(place: Path, rank: int) -> Reference:
    """Two models, two optimizers, each with a loss and a step of its own."""

    def play(first: nn.Module, second: nn.Module, shares: list[int]) -> Reference:
        optimizers = [optimizer_of(first.parameters()), optimizer_of(second.parameters())]
        inner = [getattr(each, "module", each) for each in (first, second)]
        seen: Reference = []
        for step in range(1, STEPS + 1):
            optimizers[0].zero_grad()
            loss_of(first(second(batch(step, shares)).detach())).backward()
            rows = {"": rows_of(dict(inner[0].named_parameters()))}
            optimizers[0].step()
            optimizers[1].zero_grad()
            for parameter in first.parameters():
                parameter.requires_grad_(False)
            loss_of(first(second(batch(step, shares, 1))) - 1.0).backward()
            for parameter in first.parameters():
                parameter.requires_grad_(True)
            rows["1"] = rows_of(dict(inner[1].named_parameters()))
            optimizers[1].step()
            seen.append(rows)
        return seen

    reference = play(seeded(Stage, seed=2), seeded(Stage, seed=3), list(range(WORLD)))
    del reference[0]["1"]  # nothing showed yet that there would be a second one
    for step in reference[1:]:
        step["1"] = {f"{name}@optimizer1": row for name, row in step["1"].items()}
    with watched(place, rank):
        first, second = (DistributedDataParallel(seeded(Stage, seed=seed)) for seed in (2, 3))
        play(first, second, [rank])
    return reference


@variant("none")
def replicas_by_hand(place: Path, rank: int) -> Reference:
    """No wrapper; the script reduces the gradients itself."""
    reference = reference_of(seeded(Model))
    with watched(place, rank):
        model = seeded(Model)

        def reduce(step: int) -> None:
            for parameter in model.parameters():
                gradient = parameter.grad
                assert gradient is not None
                dist.all_reduce(gradient)
                gradient.div_(WORLD)

        train(model, optimizer_of(model.parameters()), rank, before_step=reduce)
    return reference
