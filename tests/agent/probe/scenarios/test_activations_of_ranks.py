"""Outputs of modules on two ranks, merged: every rank has those of its part of the batch."""

from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mp_agent.node.accounting.incidents import first_nonfinite_gradient
from mp_agent.node.merge.node_layers import RankLayers
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.probe.instruments.activation_modules import output_row
from mp_agent.probe.probe import Probe
from mp_agent.records.columns import ACTIVATIONS
from mp_agent.records.views import FirstNonfiniteGradient
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.node.nodes import merge_node_layers, merge_nodes
from tests.agent.probe.fully_shard import strategies
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import make_identity, read_ring
from tests.gloo import end_process_group

pytestmark = pytest.mark.slow

RANKS, SAMPLED = 2, 2


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def inputs_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3 + rank, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank: int, wrapper: str, directory: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS
    )
    model: nn.Module = make_model()
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model[0])  # type: ignore[index]
        fully_shard(model)
    writer = RingWriter.create(directory / f"rank{rank}.ring", make_identity(rank, RANKS))
    probe = Probe(lambda: writer, Settings(measure_activations=True))
    probe.attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(1, SAMPLED + 2):
        model(inputs_of(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    probe.flush()
    probe.detach()
    writer.close()
    end_process_group()


@pytest.mark.parametrize("wrapper", strategies(["ddp", "fsdp2"]))
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_merge_is_exactly_that_of_the_outputs_of_all_ranks(wrapper, nodes, tmp_path):
    run_ranks(train, wrapper, tmp_path, ranks=RANKS)
    rings = {rank: read_ring(tmp_path / f"rank{rank}.ring") for rank in range(RANKS)}

    model = make_model()
    expected = {}
    with torch.no_grad():
        batch = [inputs_of(rank, SAMPLED) for rank in range(RANKS)]
        for name, module in model.named_children():
            batch = [module(part) for part in batch]
            expected[name] = output_row(torch.cat(batch), 0, inf).tolist()

    tables = [
        RankLayers(rank, ring.schema, table.families)
        for rank, ring in rings.items()
        for table in ring.layers
        if table.sequence == SAMPLED
    ]
    groups = [tables] if nodes == 1 else [[table] for table in tables]
    merged = merge_node_layers(groups, RANKS, family=ACTIVATIONS.name)
    assert merged.complete
    assert merged.names == tuple(expected)
    for row, wanted in zip(merged.values.tolist(), expected.values(), strict=True):
        assert row == pytest.approx(wanted, rel=1e-6, nan_ok=True)

    steps = [RankStep(rank, ring.schema, ring.records[SAMPLED - 1]) for rank, ring in rings.items()]
    together = merge_nodes([steps] if nodes == 1 else [[step] for step in steps], RANKS)
    assert together.counts(ACTIVATIONS)
    assert together.families[ACTIVATIONS.name]["elements"] == 7 * (8 + 8 + 2)
    alone = merge_nodes([steps[:1]], RANKS, absent=steps[1:])
    assert not alone.counts(ACTIVATIONS), "a rank is missing"


class _Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * inf


class _BadInBackward(nn.Module):
    def __init__(self, *, bad: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.bad = bad

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs @ self.weight
        return _Overflow.apply(outputs) if self.bad else outputs


def train_with_bad_backward(rank: int, directory: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS
    )
    layers = [_BadInBackward(bad=place == 1 and rank == 1) for place in range(3)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    writer = RingWriter.create(directory / f"rank{rank}.ring", make_identity(rank, RANKS))
    probe = Probe(lambda: writer, Settings(measure_activations=True))
    probe.attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(SAMPLED):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.zero_grad()
        optimizer.step()
    probe.flush()
    probe.detach()
    writer.close()
    end_process_group()


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_module_of_one_ranks_backward_is_known_for_the_run(nodes, tmp_path):
    run_ranks(train_with_bad_backward, tmp_path, ranks=RANKS)
    tables = [
        RankLayers(rank, ring.schema, table.families)
        for rank in range(RANKS)
        for ring in [read_ring(tmp_path / f"rank{rank}.ring")]
        for table in ring.layers
        if table.sequence == SAMPLED
    ]
    groups = [tables] if nodes == 1 else [[table] for table in tables]
    merged = merge_node_layers(groups, RANKS, family=ACTIVATIONS.name)
    found = first_nonfinite_gradient(SAMPLED, merged.views(step_judged=True))
    assert found == FirstNonfiniteGradient(step=SAMPLED, layer="1", place="within")
