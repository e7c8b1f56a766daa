"""Attention and output logits on two ranks, merged: every rank has those of its own batch."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mp_agent.node.merge.node_layers import RankLayers
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.probe.probe import Probe
from mp_agent.records.columns import ATTENTION, LOGITS
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.node.nodes import merge_node_layers, merge_nodes
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import make_identity, read_ring
from tests.gloo import end_process_group

pytestmark = pytest.mark.slow

RANKS, SAMPLED = 2, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        attended = self.attention(inputs, inputs, inputs, need_weights=False)[0]
        out: torch.Tensor = self.head(attended).flatten(0, 1)
        return out


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def inputs_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(1 + rank, 4, 8, generator=generator)


def train(rank: int, without_loss: int, directory: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS
    )
    model = DistributedDataParallel(make_model())
    writer = RingWriter.create(directory / f"rank{rank}.ring", make_identity(rank, RANKS))
    probe = Probe(lambda: writer, Settings(measure_attention=True))
    probe.attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(1, SAMPLED + 2):
        logits = model(inputs_of(rank, step))
        target = torch.zeros(len(logits), dtype=torch.long)
        if rank == without_loss:
            loss = logits.square().mean()
        else:
            loss = nn.functional.cross_entropy(logits, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    probe.flush()
    probe.detach()
    writer.close()
    end_process_group()


@pytest.mark.parametrize(("nodes", "without_loss"), [(1, -1), (2, 0)])
def test_the_merge_is_that_of_the_batches_of_all_ranks(nodes, without_loss, tmp_path):
    run_ranks(train, without_loss, tmp_path, ranks=RANKS)
    rings = {
        rank: read_ring(tmp_path / f"rank{rank}.ring", one_schema=False) for rank in range(RANKS)
    }

    model = make_model().double()
    largest, sums = [], []
    with torch.no_grad():
        for rank in range(RANKS):
            inputs = inputs_of(rank, SAMPLED).double()
            own = model.attention
            joint = nn.functional.linear(inputs, own.in_proj_weight, own.in_proj_bias)
            query, key, _ = (
                part.unflatten(-1, (2, 4)).transpose(1, 2) for part in joint.chunk(3, dim=-1)
            )
            largest.append(float((query @ key.mT / 2).max()))
            if rank != without_loss:
                sums += model(inputs).logsumexp(1).tolist()

    tables = [
        RankLayers(rank, ring.schema, table.families)
        for rank, ring in rings.items()
        for table in ring.layers
        if table.sequence == SAMPLED
    ]
    groups = [tables] if nodes == 1 else [[table] for table in tables]
    merged = merge_node_layers(groups, RANKS, family=ATTENTION.name)
    assert merged.complete and merged.names == ("attention",)
    assert merged.values.tolist()[0] == pytest.approx([96.0, 0.0, max(largest)], rel=1e-5)

    steps = [RankStep(rank, ring.schema, ring.records[SAMPLED - 1]) for rank, ring in rings.items()]
    together = merge_nodes([steps] if nodes == 1 else [[step] for step in steps], RANKS)
    assert together.counts(ATTENTION) and together.counts(LOGITS)
    row = together.families[LOGITS.name]
    assert row["rows"] == len(sums)
    assert row["logsumexp_max"] == pytest.approx(max(sums), rel=1e-5)
    assert row["logsumexp_min"] == pytest.approx(min(sums), rel=1e-5)
    assert row["logsumexp_sum"] == pytest.approx(sum(sums), rel=1e-5)
