"""What ranks say of their own gradients under FSDP2 and HSDP: what each computes by itself.

The reference is a plain copy of the model on each rank, with the gathered weights of the step: its
gradients are those of the rank's own batches, and numpy adds their squares up in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.scenarios.own_gradients import (
    assert_equal_to_references,
    assert_rank_1_is_named,
)
from tests.agent.probe.watching import watched
from tests.gloo import process_group

pytestmark = pytest.mark.slow

STEPS, POISONED_STEP = 4, 3


@dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, ...] = (2,)
    """Of the mesh: ranks that shard; or ranks that copy, and ranks that shard."""
    tensor_parallel: bool = False
    """The last dimension of the mesh is one of tensor parallelism."""
    bfloat16: bool = False
    reshards: bool = True
    scale: float = 0.0
    micro_batches: int = 1
    syncs_all: bool = False
    says_last: bool = False
    """The script says which backward is the last, and FSDP2 waits only in that one."""
    poison: bool = False
    """Rank 1's backward makes NaN in a micro-batch of `POISONED_STEP`, the first of several."""
    checkpoints: bool | None = None
    """Checkpointing: reentrant, or not; None without."""

    @property
    def ranks(self) -> int:
        return int(np.prod(self.shape))


CASES = [
    Case("plain"),
    Case("scaled", scale=1024.0),
    Case("not_resharded", reshards=False),
    Case("bfloat16", bfloat16=True),
    Case("no_sync", micro_batches=3),
    Case("no_sync_not_resharded", micro_batches=3, reshards=False, says_last=True),
    Case("no_sync_bfloat16", micro_batches=3, bfloat16=True),
    Case("syncs_all", micro_batches=3, syncs_all=True),
    Case("nan", poison=True),
    Case("nan_bfloat16", poison=True, bfloat16=True),
    Case("nan_first_of_three", poison=True, micro_batches=3),
    Case("nan_first_of_three_bfloat16", poison=True, micro_batches=3, bfloat16=True),
    Case("nan_syncs_all", poison=True, micro_batches=3, syncs_all=True),
    Case("nan_scaled", poison=True, scale=1024.0),
    Case("checkpoints", checkpoints=False),
    Case("checkpoints_reentrant", checkpoints=True),
    Case("hsdp_of_two", shape=(2, 1), poison=True),
    Case("hsdp", shape=(2, 2), poison=True),
    Case("hsdp_no_sync_bfloat16", shape=(2, 2), poison=True, micro_batches=2, bfloat16=True),
    Case("tensor_parallel", shape=(2, 2), tensor_parallel=True),
]


class _NanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, torch.nan)


class Model(nn.Module):
    def __init__(self, checkpoints: bool | None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 40), nn.Linear(40, 3)
        self.unused = nn.Linear(2, 2)
        self.poisons, self._checkpoints = False, checkpoints

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._checkpoints is None:
            hidden = self.first(inputs)
        else:
            inputs = inputs.detach().requires_grad_()
            hidden = checkpoint(self.first, inputs, use_reentrant=self._checkpoints)
        hidden = hidden.relu()
        if self.poisons:
            hidden = _NanInBackward.apply(hidden)
        outputs: torch.Tensor = self.second(hidden)
        return outputs


def train(rank: int, ranks: int, directory: Path) -> None:
    with process_group(directory, rank, ranks):
        for case in CASES:
            if case.ranks == ranks:
                _train_case(rank, case, directory / case.name)


def _train_case(rank: int, case: Case, directory: Path) -> None:
    with watched(directory, rank, case.ranks, measure_local_gradients=True):
        weights, expected = _weights_after_training(rank, case)
    unwatched, _ = _weights_after_training(rank, case)
    for own, other in zip(weights, unwatched, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy())
    np.save(directory / f"expected{rank}.npy", np.array(expected))


def _weights_after_training(
    rank: int, case: Case
) -> tuple[list[torch.Tensor], list[tuple[float, float]]]:
    """Return the gathered weights, and what was to be measured of each step."""
    model = _sharded(case)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=case.scale or 1.0, enabled=case.scale > 0)
    expected = []
    for step in range(1, STEPS + 1):
        expected.append(_expected(rank, case, model, step))
        for part in range(case.micro_batches):
            last = part == case.micro_batches - 1
            model.set_requires_gradient_sync(last or case.syncs_all)
            model.set_is_last_backward(last or not case.says_last)
            loss = _loss(model, case, rank, step, part)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if case.poison:
            for weight in model.parameters():
                _local(weight.data).nan_to_num_(nan=0.1)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [_whole(weight) for weight in model.parameters()], expected


def _sharded(case: Case) -> Model:
    torch.manual_seed(3)
    model = Model(case.checkpoints)
    names = ("copies", "shards") if not case.tensor_parallel else ("shards", "tp")
    mesh = init_device_mesh("cpu", case.shape, mesh_dim_names=names[-len(case.shape) :])
    if case.tensor_parallel:
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["shards"]
    policy = MixedPrecisionPolicy()
    if case.bfloat16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for each in (model.first, model.second, model):
        fully_shard(each, mesh=mesh, reshard_after_forward=case.reshards, mp_policy=policy)
    return model


def _loss(model: Model, case: Case, rank: int, step: int, part: int) -> torch.Tensor:
    model.poisons = case.poison and (rank, step, part) == (1, POISONED_STEP, 0)
    # Ranks that split the same tensors work on the same data.
    seed = rank // case.shape[-1] if case.tensor_parallel else rank
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + part)
    loss: torch.Tensor = model(torch.randn(6, 5, generator=generator)).float().square().mean()
    return loss


def _expected(rank: int, case: Case, model: Model, step: int) -> tuple[float, float]:
    """Return norm and number of non-finite elements of the gradients of a rank alone."""
    parts = []
    for part in range(case.micro_batches):
        alone = Model(case.checkpoints)
        for plain, sharded in zip(alone.parameters(), model.parameters(), strict=True):
            plain.data = _whole(sharded)
        if case.bfloat16:
            alone.to(torch.bfloat16)
            alone.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
        (_loss(alone, case, rank, step, part) * (case.scale or 1.0)).backward()
        own = [
            _part_of_rank(name, weight.grad, rank, case).double().numpy().ravel()
            for name, weight in alone.named_parameters()
            if weight.grad is not None
        ]
        parts.append(np.concatenate(own) / (case.scale or 1.0))
    values = parts[-1] if case.syncs_all else np.sum(parts, axis=0)
    squares = np.square(values[np.isfinite(values)])
    counted: Sequence[np.ndarray] = parts if case.syncs_all else [values]
    nonfinite = sum(float(np.sum(~np.isfinite(each))) for each in counted)
    return float(np.sqrt(np.sum(squares))), nonfinite


def _part_of_rank(name: str, gradient: torch.Tensor, rank: int, case: Case) -> torch.Tensor:
    if not case.tensor_parallel or name == "second.bias":
        return gradient
    dimension = 1 if name == "second.weight" else 0
    return gradient.chunk(case.shape[-1], dim=dimension)[rank % case.shape[-1]]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    for case in CASES:
        (directory / case.name).mkdir()
    for ranks in (2, 4):
        run_ranks(train, ranks, directory, ranks=ranks)
    return directory


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_norm_and_counts_of_each_rank_are_those_of_its_own_batches(case, directory):
    assert_equal_to_references(directory / case.name, case.ranks, STEPS)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nan_from_the_backward_of_one_rank_names_that_rank(case, nodes, directory):
    assert_rank_1_is_named(
        directory / case.name,
        case.ranks,
        nodes=nodes,
        steps=STEPS,
        poisoned_step=POISONED_STEP if case.poison else None,
    )
