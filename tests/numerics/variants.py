"""The ways of splitting a model over four ranks; each trains it and returns the reference."""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import mp_agent
from tests.numerics.flat import Unit
from tests.numerics.models import Experts, ManualBlock, Model, Stage, TiedModel, batch, seeded
from tests.numerics.training import (
    STEPS,
    WORLD,
    Reference,
    loss_of,
    optimizer_of,
    reference_of,
    row_of,
    rows_of,
    train,
    watched,
)

Train = Callable[[Path, int], Reference]


@dataclass(frozen=True)
class Variant:
    name: str
    train: Train
    strategy: str
    unsupported: tuple[str, ...] = ()


VARIANTS: dict[str, Variant] = {}


def variant(strategy: str, *unsupported: str) -> Callable[[Train], Train]:
    def register(function: Train) -> Train:
        VARIANTS[function.__name__] = Variant(function.__name__, function, strategy, unsupported)
        return function

    return register


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
        clip = lambda step: clip_grad_norm_(model.parameters(), 1e9)  # noqa: E731
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
        clip = lambda step: clip_grad_norm_(model.parameters(), 1e-3)  # noqa: E731
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
        model = torch.compile(DistributedDataParallel(seeded(TiedModel)), backend="eager")
        optimizer = sgd(model.parameters())
        step = torch.compile(optimizer.step, backend="eager")
        train(model, optimizer, rank, step_optimizer=step)
    return reference


@variant("ddp")
def ddp_two_optimizers(place: Path, rank: int) -> Reference:
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
        reference.append({"": rows_of(parts[0]), "1": rows_of(parts[1])})
        clip_grad_norm_(whole.parameters(), 1e-3)
        for optimizer in optimizers:
            optimizer.step()
    del optimizers, whole, parts
    with watched(place, rank):
        inner = seeded(Model)
        model = DistributedDataParallel(inner)
        optimizers = [optimizer_of(part.values()) for part in split(inner)]
        for step in range(1, STEPS + 1):
            model.zero_grad()
            loss_of(model(batch(step, [rank]))).backward()
            clip_grad_norm_(model.parameters(), 1e-3)
            for optimizer in optimizers:
                optimizer.step()
    return reference


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
        wrapped = [DistributedDataParallel(seeded(Stage, seed=seed)) for seed in (2, 3)]
        play(*wrapped, [rank])
    return reference


@variant("mixed")
def experts(place: Path, rank: int) -> Reference:
    """Each rank holds an expert that the others lack; DDP leaves it alone."""
    return _experts(place, rank, same_name=False)


@variant("mixed")
def experts_of_equal_name(place: Path, rank: int) -> Reference:
    return _experts(place, rank, same_name=True)


@variant("ddp+declared")
def experts_declared(place: Path, rank: int) -> Reference:
    return _experts(
        place, rank, same_name=True, declare=lambda model: mp_agent.declare(model.expert)
    )


def _experts(
    place: Path, rank: int, *, same_name: bool, declare: Callable[[Experts], None] | None = None
) -> Reference:
    whole = seeded(Experts, numbers=list(range(WORLD)), same_name=False)
    optimizer = optimizer_of(whole.parameters())
    reference: Reference = []
    for step in range(1, STEPS + 1):
        whole.zero_grad()
        for share in range(WORLD):
            (loss_of(whole(batch(step, [share]), f"expert{share}")) / WORLD).backward()
        reference.append({"": rows_of(dict(whole.named_parameters()))})
        optimizer.step()
    del optimizer, whole
    with watched(place, rank):
        inner = seeded(Experts, numbers=[rank], same_name=same_name)
        own = "expert" if same_name else f"expert{rank}"
        ignored = [name for name, _ in inner.named_parameters() if name.startswith(own)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ignored)
        if declare is not None:
            declare(inner)
        model = DistributedDataParallel(inner)
        optimizer = optimizer_of(model.parameters())
        for step in range(1, STEPS + 1):
            model.zero_grad()
            loss_of(model(batch(step, [rank]), own)).backward()
            for parameter in inner.get_submodule(own).parameters():
                parameter.grad /= WORLD
            optimizer.step()
    if not same_name:
        return reference
    names = [f"expert{n}" for n in range(WORLD)]
    if declare is not None:
        return _renamed(reference, _expert_at_home)
    return [{"": _united(rows[""], names, "expert.")} for rows in reference]


def _expert_at_home(name: str) -> str:
    """`expert2.bias` stands as `expert.bias` of rank 2."""
    expert, _, rest = name.partition(".")
    return f"expert.{rest}@{expert[6:]}" if expert.startswith("expert") else name


def _renamed(reference: Reference, rename: Callable[[str], str]) -> Reference:
    return [
        {label: {rename(name): row for name, row in rows.items()} for label, rows in step.items()}
        for step in reference
    ]


def _united(rows, prefixes: list[str], name: str):
    """Layers that nobody can tell apart stand under one name: the norm of their union."""
    united = {}
    for layer, row in rows.items():
        prefix = next((p for p in prefixes if layer.startswith(f"{p}.")), None)
        key = layer if prefix is None else name + layer.removeprefix(f"{prefix}.")
        if key in united:
            total = united[key] + row
            total[1] = max(united[key][1], row[1])
            row = total
        united[key] = row
    return united


def _fsdp(place: Path, rank: int, mesh, **options: object) -> Reference:
    reference = reference_of(seeded(Model))
    with watched(place, rank):
        model = seeded(Model)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        train(model, optimizer_of(model.parameters()), rank)
    return reference


@variant("fsdp2")
def fsdp2(place: Path, rank: int) -> Reference:
    return _fsdp(place, rank, init_device_mesh("cpu", (WORLD,)), reshard_after_forward=True)


@variant("fsdp2")
def fsdp2_without_resharding(place: Path, rank: int) -> Reference:
    return _fsdp(place, rank, init_device_mesh("cpu", (WORLD,)), reshard_after_forward=False)


@variant("fsdp2")
def fsdp2_offloaded(place: Path, rank: int) -> Reference:
    mesh = init_device_mesh("cpu", (WORLD,))
    return _fsdp(place, rank, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


@variant("hsdp")
def hsdp(place: Path, rank: int) -> Reference:
    names = ("replicate", "shard")
    return _fsdp(place, rank, init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


@variant("fsdp2")
def fsdp2_accumulation_tied(place: Path, rank: int) -> Reference:
    reference = reference_of(seeded(TiedModel), micro_batches=2)
    with watched(place, rank):
        model = seeded(TiedModel)
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        optimizer = optimizer_of(model.parameters())
        for step in range(1, STEPS + 1):
            for micro_batch in range(2):
                model.set_requires_gradient_sync(micro_batch == 1)
                (loss_of(model(batch(step, [rank], micro_batch))) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return reference


@variant("fsdp2")
def fsdp2_mixed_precision(place: Path, rank: int) -> Reference:
    """Computes in bfloat16: the reference is an independent look at the gathered gradients."""
    reference: Reference = []
    with watched(place, rank):
        model = seeded(Model).float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (WORLD,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

        def look(step: int) -> None:
            reference.append({"": rows_of(dict(model.named_parameters()))})

        train(model, optimizer_of(model.parameters()), rank, before_step=look)
    return reference


def _tensor_parallel(model: Model, mesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@variant("tp")
def tensor_parallel(place: Path, rank: int) -> Reference:
    reference = reference_of(seeded(Model), shares=[0])
    with watched(place, rank):
        model = seeded(Model)
        _tensor_parallel(model, init_device_mesh("cpu", (WORLD,)))
        train(model, optimizer_of(model.parameters()), 0)
    return reference


@variant("tp", "gradients with a partial placement")
def partial_gradients(place: Path, rank: int) -> Reference:
    """A replicated scale whose gradient nobody has summed up yet, beside a sharded one."""
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(1)
    start = torch.randn(8, dtype=torch.float64), torch.ones(8, 2, dtype=torch.float64)
    inputs = torch.randn(8, 2, dtype=torch.float64)
    reference: Reference = []
    with watched(place, rank):
        model = nn.Module()
        model.scale = nn.Parameter(distribute_tensor(start[0][:2], mesh, [Replicate()]))
        model.shift = nn.Parameter(distribute_tensor(start[1], mesh, [Shard(0)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
        for _ in range(STEPS):
            optimizer.zero_grad()
            values = distribute_tensor(inputs, mesh, [Shard(0)])
            output = values * model.scale + model.shift
            (output * output).sum().redistribute(placements=[Replicate()]).backward()
            assert model.scale.grad.placements[0].is_partial()
            reference.append({"": {"shift": row_of(model.shift.grad)}})
            optimizer.step()
    return reference


@variant("fsdp2+tp")
def fsdp2_tensor_parallel(place: Path, rank: int) -> Reference:
    reference = reference_of(seeded(Model), shares=range(2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with watched(place, rank):
        model = seeded(Model)
        _tensor_parallel(model, mesh["tensor"])
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        train(model, optimizer_of(model.parameters()), rank // 2)
    return reference


def _pipeline(stage: nn.Module, rank: int, step: int, share: int, stages: list[list[int]]) -> None:
    """Forward and backward of one micro-batch through the stages, `stages[s][share]` by rank."""
    number = next(index for index, ranks in enumerate(stages) if rank in ranks)
    inputs = batch(step, [share])
    if number > 0:
        inputs = _received(stages[number - 1][share]).requires_grad_()
    output = stage(inputs)
    if number + 1 < len(stages):
        _send(output.detach(), stages[number + 1][share])
        output.backward(_received(stages[number + 1][share]))
    else:
        loss_of(output).backward()
    if number > 0:
        _send(inputs.grad, stages[number - 1][share])


def _send(values: torch.Tensor, rank: int) -> None:
    dist.send(torch.tensor(values.shape), rank)
    dist.send(values.contiguous(), rank)


def _received(rank: int) -> torch.Tensor:
    shape = torch.zeros(2, dtype=torch.int64)
    dist.recv(shape, rank)
    values = torch.zeros(tuple(shape.tolist()), dtype=torch.float64)
    dist.recv(values, rank)
    return values


@variant("ddp")
def pipeline_of_replicas(place: Path, rank: int) -> Reference:
    """Two stages with parameters of different names, each on two ranks under DDP."""
    reference = reference_of(seeded(Model), shares=range(2))
    stages = [[0, 1], [2, 3]]
    groups = [dist.new_group(ranks) for ranks in stages]
    number, share = divmod(rank, 2)
    with watched(place, rank):
        model = seeded(Model)
        if number == 0:
            model.blocks[1] = nn.Identity()
            model.head = nn.Identity()
        else:
            model.embed = nn.Identity()
            model.blocks[0] = nn.Identity()
        stage = DistributedDataParallel(model, process_group=groups[number])
        optimizer = optimizer_of(stage.parameters())
        for step in range(1, STEPS + 1):
            _pipeline(stage, rank, step, share, stages)
            optimizer.step()
            optimizer.zero_grad()
    return reference


@variant("ddp")
def pipeline_of_equal_names(place: Path, rank: int) -> Reference:
    """Stages whose parameters have the same names and shapes are told apart by their ranks."""
    reference = reference_of(_chain(2), shares=range(2))
    stages = [[0, 1], [2, 3]]
    groups = [dist.new_group(ranks) for ranks in stages]
    number, share = divmod(rank, 2)
    with watched(place, rank):
        stage = DistributedDataParallel(_chain(2)[number], process_group=groups[number])
        optimizer = optimizer_of(stage.parameters())
        for step in range(1, STEPS + 1):
            _pipeline(stage, rank, step, share, stages)
            optimizer.step()
            optimizer.zero_grad()
    homes = {"0": "0-1", "1": "2-3"}
    return _renamed(reference, lambda name: f"{name[2:]}@{homes[name[0]]}")


@variant("none")
def pipeline_of_plain_stages(place: Path, rank: int) -> Reference:
    """Nothing says that the stages are different: their gradients do."""
    reference = reference_of(_chain(WORLD), shares=[0])
    with watched(place, rank):
        stage = _chain(WORLD)[rank]
        optimizer = optimizer_of(stage.parameters())
        for step in range(1, STEPS + 1):
            _pipeline(stage, rank, step, 0, [[0], [1], [2], [3]])
            optimizer.step()
            optimizer.zero_grad()
    return [{"": _united(rows[""], list("0123"), "")} for rows in reference]


def _chain(stages: int) -> nn.Sequential:
    return nn.Sequential(*(seeded(Stage, seed=10 + number) for number in range(stages)))


@variant("none")
def replicas_by_hand(place: Path, rank: int) -> Reference:
    """No wrapper; the script reduces the gradients itself."""
    reference = reference_of(seeded(Model))
    with watched(place, rank):
        model = seeded(Model)

        def reduce(step: int) -> None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= WORLD

        train(model, optimizer_of(model.parameters()), rank, before_step=reduce)
    return reference


def _by_hand(
    place: Path, rank: int, describe: Callable[[Model, dist.ProcessGroup, dist.ProcessGroup], None]
) -> Reference:
    """Tensor parallelism over ranks (0, 1) and (2, 3), data parallelism over (0, 2) and (1, 3)."""
    reference = reference_of(seeded(Model), shares=range(2))
    tensor = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    data = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    with watched(place, rank):
        model = seeded(Model)
        model.blocks = nn.ModuleList(ManualBlock(block, tensor) for block in model.blocks)
        describe(model, tensor, data)

        def reduce(step: int) -> None:
            for parameter in model.parameters():
                if parameter is getattr(model, "copy", None):
                    parameter.grad = torch.ones_like(parameter)
                    continue
                dist.all_reduce(parameter.grad, group=data)
                parameter.grad /= 2

        train(model, optimizer_of(model.parameters()), rank // 2, before_step=reduce)
    return reference


@variant("dp+tp")
def megatron(place: Path, rank: int) -> Reference:
    """Attributes on the parameters, and the groups that Megatron would have made."""

    def describe(model: Model, tensor: dist.ProcessGroup, data: dist.ProcessGroup) -> None:
        for block in model.blocks:
            for parameter in block.split:
                parameter.tensor_model_parallel = True
                parameter.partition_dim = 1 if parameter is block.down.weight else 0
            block.norm.weight.sequence_parallel = True
        model.copy = nn.Parameter(torch.ones(5, dtype=torch.float64))
        model.copy.shared = True
        sys.modules["megatron.core.parallel_state"] = SimpleNamespace(
            get_tensor_model_parallel_group=lambda: tensor,
            get_data_parallel_group=lambda: data,
        )

    try:
        return _by_hand(place, rank, describe)
    finally:
        sys.modules.pop("megatron.core.parallel_state", None)


@variant("declared")
def declared(place: Path, rank: int) -> Reference:
    def describe(model: Model, tensor: dist.ProcessGroup, data: dist.ProcessGroup) -> None:
        mp_agent.declare(model, replicate=range(WORLD))
        for block in model.blocks:
            for parameter in block.split:
                mp_agent.declare(parameter, shard=tensor, replicate=data)

    return _by_hand(place, rank, describe)


def _flat(place: Path, rank: int, *, original: bool, hybrid: bool) -> Reference:
    """Gradients that come from nowhere, in the flat parameters of two units."""
    shards = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    copies = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    group, across = (shards, copies) if hybrid else (dist.group.WORLD, None)
    reference: Reference = []
    with watched(place, rank):
        model = seeded(Model)
        model.blocks[1] = inner = Unit(model.blocks[1], group, across, original=original)
        outer = Unit(model, group, across, original=original)
        optimizer = torch.optim.SGD(outer.parameters(), lr=1e-3)
        for step in range(1, STEPS + 1):
            rows = {}
            for prefix, unit in (("blocks.1.", inner), ("", outer)):
                torch.manual_seed(step)
                gradients = [torch.randn(shape, dtype=torch.float64) for shape in unit.shapes]
                gradients[0].view(-1)[0] = 0.0
                unit.set_gradients(gradients)
                for name, gradient in zip(unit.names, gradients, strict=True):
                    rows[prefix + name] = row_of(gradient)
            optimizer.step()
            reference.append({"": rows})
    return reference


@variant("fsdp1")
def fsdp1_flat(place: Path, rank: int) -> Reference:
    return _flat(place, rank, original=False, hybrid=False)


@variant("fsdp1")
def fsdp1_original_parameters(place: Path, rank: int) -> Reference:
    return _flat(place, rank, original=True, hybrid=False)


@variant("fsdp1")
def fsdp1_hybrid(place: Path, rank: int) -> Reference:
    return _flat(place, rank, original=False, hybrid=True)
