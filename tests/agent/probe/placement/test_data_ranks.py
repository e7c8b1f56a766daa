"""Which ranks are to have data of their own, by the wrappers that average their gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from mp_agent.records.schema import DATA_RANKS_FACT
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import read_ring
from tests.agent.probe.watching import watched
from tests.gloo import process_group

pytestmark = pytest.mark.slow

RANKS = 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())


def ddp() -> nn.Module:
    return DistributedDataParallel(make_model())


def fsdp2():
    return fully_shard(make_model())


def hsdp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    return fully_shard(make_model(), mesh=mesh)


def _tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(make_model(), mesh["tp"], plan), mesh


def fsdp2_over_tensor_parallelism():
    model, mesh = _tensor_parallel()
    return fully_shard(model, mesh=mesh["dp"])


def tensor_parallelism():
    return _tensor_parallel()[0]


def no_wrapper() -> nn.Module:
    return make_model()


def ddp_next_to_context_parallelism() -> nn.Module:
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    return DistributedDataParallel(make_model())


# The last one makes groups that stay for as long as the job.
EXPECTED: dict[Callable[[], Any], list[str]] = {
    ddp: ["0-3"] * RANKS,
    fsdp2: ["0-3"] * RANKS,
    hsdp: ["0-3"] * RANKS,
    fsdp2_over_tensor_parallelism: ["0,2", "1,3"] * 2,
    tensor_parallelism: [""] * RANKS,
    no_wrapper: [""] * RANKS,
    ddp_next_to_context_parallelism: [""] * RANKS,
}


def train(rank: int, directory: Path) -> None:
    with process_group(directory, rank, RANKS):
        for make in EXPECTED:
            with watched(directory, rank, RANKS, name=make.__name__):
                model = make()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(2):
                    model(torch.randn(4, 8)).sum().backward()
                    optimizer.step()


@pytest.fixture(scope="module")
def rings(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(train, directory, ranks=RANKS)
    return directory


@pytest.mark.parametrize("make", EXPECTED, ids=lambda make: make.__name__)
def test_only_ranks_along_axes_of_data_are_to_have_data_of_their_own(rings, make):
    schemas = [read_ring(rings / f"{make.__name__}{rank}.ring").schema for rank in range(RANKS)]
    assert [schema.fact(DATA_RANKS_FACT) for schema in schemas] == EXPECTED[make]
