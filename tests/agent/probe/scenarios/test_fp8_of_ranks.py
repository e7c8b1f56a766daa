"""FP8 operands on two ranks, merged: every rank has the inputs of its own batch."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mp_agent.node.merge.node_layers import RankLayers
from mp_agent.probe.probe import Probe
from mp_agent.records.columns import FP8
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.node.nodes import merge_node_layers
from tests.agent.probe.instruments.fp8_reference import by_cast
from tests.agent.probe.instruments.fp8_scaled_layers import ScaledLinear
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import make_identity, read_ring
from tests.gloo import end_process_group

pytestmark = pytest.mark.slow

RANKS, SAMPLED, SIZE = 2, 10, 8


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    linear = nn.Linear(SIZE, SIZE)
    with torch.no_grad():
        linear.weight[0] *= 1e-5  # as a tensor of its own nothing of it would be flushed
    return nn.Sequential(linear, ScaledLinear(SIZE))


def inputs_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    sizes = torch.logspace(-9, rank, SIZE)
    return torch.randn(5 + 8 * rank, SIZE, generator=generator) * sizes


def train(rank: int, directory: Path, *, sharded: bool = False) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS
    )
    plain = make_model()
    if sharded:
        fully_shard(plain[0], reshard_after_forward=True)
    model = plain if sharded else DistributedDataParallel(plain)
    writer = RingWriter.create(directory / f"rank{rank}.ring", make_identity(rank, RANKS))
    probe = Probe(lambda: writer, Settings(measure_fp8=True))
    probe.attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(1, SAMPLED + 2):
        # The second layer's scales stay 1: only what rank 1 is given is beyond 448.
        model(inputs_of(rank, step) * (1.0 if rank == 0 else 1e4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    probe.flush()
    probe.detach()
    writer.close()
    end_process_group()


def train_sharded(rank: int, directory: Path) -> None:
    train(rank, directory, sharded=True)


def test_the_whole_weight_counts_of_a_layer_that_fsdp2_shards_by_itself(tmp_path):
    run_ranks(train_sharded, tmp_path, ranks=RANKS)
    whole = by_cast(next(make_model().parameters()), "weight")
    for rank in range(RANKS):
        (table,) = (
            table
            for table in read_ring(tmp_path / f"rank{rank}.ring", one_schema=False).layers
            if table.sequence == SAMPLED
        )
        row = dict(zip(FP8.names, table.families[FP8.name][-2].tolist(), strict=True))
        assert (row["weight_elements"], row["weight_flushed_elements"]) == whole[1:]


def test_the_merge_adds_elements_of_each_ranks_own_scale_and_takes_the_largest_range(tmp_path):
    run_ranks(train, tmp_path, ranks=RANKS)
    rings = {
        rank: read_ring(tmp_path / f"rank{rank}.ring", one_schema=False) for rank in range(RANKS)
    }
    inputs = [by_cast(inputs_of(rank, SAMPLED), "input") for rank in range(RANKS)]
    weights = by_cast(next(make_model().parameters()), "weight")
    with torch.no_grad():
        given = [
            make_model()[0](inputs_of(rank, SAMPLED) * (1e4 if rank else 1.0))
            for rank in range(RANKS)
        ]
    amax = [float(each.abs().max()) for each in given]
    assert amax[0] < 448.0 < amax[1]

    tables = [
        RankLayers(rank, ring.schema, table.families)
        for rank, ring in rings.items()
        for table in ring.layers
        if table.sequence == SAMPLED
    ]
    for groups in ([tables], [[table] for table in tables]):
        merged = merge_node_layers(groups, RANKS, family=FP8.name)
        assert merged.complete and merged.names == ("0", "1")
        linear, scaled = (dict(zip(FP8.names, row, strict=True)) for row in merged.values.tolist())
        assert linear["tensors"] == 3.0 * RANKS
        assert linear["input_elements"] == sum(each[1] for each in inputs)
        assert linear["input_flushed_elements"] == sum(each[2] for each in inputs) > 0.0
        assert linear["weight_elements"] == RANKS * weights[1]
        assert scaled["amax_max"] == pytest.approx(amax[1], rel=1e-5)
        assert scaled["range_used_max"] == pytest.approx(amax[1] / 448.0, rel=1e-5)
        assert scaled["scaled_tensors"] == 3.0 * RANKS
        assert scaled["saturated_tensors"] == 1.0
