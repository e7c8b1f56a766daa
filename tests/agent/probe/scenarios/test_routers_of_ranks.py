"""Routers on two ranks under DDP, merged: every rank has the tokens of its own batch."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mp_agent.node.merge.node_layers import RankLayers
from mp_agent.probe.probe import Probe
from mp_agent.records.columns import ROUTERS
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.node.nodes import merge_node_layers
from tests.agent.probe.instruments.test_routers_statistics import reference
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import make_identity, read_ring
from tests.agent.probe.scenarios.test_routers import Model
from tests.gloo import end_process_group

pytestmark = pytest.mark.slow

RANKS, SAMPLED = 2, 2


def make_model() -> Model:
    torch.manual_seed(0)
    model = Model()
    model.gate.requires_grad_(False)
    return model


def inputs_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5 + 8 * rank, 8, generator=generator)


def train(rank: int, directory: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS
    )
    model = DistributedDataParallel(make_model())
    writer = RingWriter.create(directory / f"rank{rank}.ring", make_identity(rank, RANKS))
    probe = Probe(lambda: writer, Settings(measure_routers=True))
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


def test_the_merge_adds_tokens_and_takes_the_largest_load(tmp_path):
    run_ranks(train, tmp_path, ranks=RANKS)
    rings = {
        rank: read_ring(tmp_path / f"rank{rank}.ring", one_schema=False) for rank in range(RANKS)
    }
    expected = []
    for rank in range(RANKS):
        logits = inputs_of(rank, SAMPLED) @ make_model().router.weight.detach().T
        expected.append(
            reference(logits.double().tolist(), logits.topk(2, dim=-1).indices.tolist())
        )

    tables = [
        RankLayers(rank, ring.schema, table.families)
        for rank, ring in rings.items()
        for table in ring.layers
        if table.sequence == SAMPLED
    ]
    for groups in ([tables], [[table] for table in tables]):
        merged = merge_node_layers(groups, RANKS, family=ROUTERS.name)
        assert merged.complete and merged.names == ("router",)
        row = dict(zip(ROUTERS.names, merged.values.tolist()[0], strict=True))
        for name in ("tokens", "entropy_sum", "entropy_tokens", "experts", "unused_experts"):
            total = sum(each[name] for each in expected)
            assert row[name] == pytest.approx(total, rel=1e-5), name
        for name in ("load_max", "logit_abs_max"):
            largest = max(each[name] for each in expected)
            assert row[name] == pytest.approx(largest, rel=1e-5), name
