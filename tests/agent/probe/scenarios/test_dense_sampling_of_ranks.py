"""After a NaN on one rank, all ranks sample the same steps more densely, and merges are whole."""

import copy
from math import nan
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mp_agent.node.merge.node_layers import RankLayers
from mp_agent.probe.probe import Probe
from mp_agent.records.columns import ACTIVATIONS, GRADIENTS
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.node.nodes import merge_node_layers
from tests.agent.probe.fully_shard import strategies
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import make_identity, read_ring
from tests.gloo import end_process_group

pytestmark = pytest.mark.slow

RANKS, STEPS, TROUBLED = 2, 170, 107
DENSE = list(range(115, 165, 5))


def train(rank: int, wrapper: str, directory: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS
    )
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    path = directory / f"rank{rank}.ring"
    writer = RingWriter.create(path, make_identity(rank, RANKS), layer_capacity=32)
    settings = Settings(layer_interval=1000, measure_activations=True, overhead_budget=1.0)
    probe = Probe(lambda: writer, settings)
    probe.attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    healthy = copy.deepcopy(model.state_dict())
    for step in range(1, STEPS + 1):
        loss = model(torch.ones(3, 4)).square().mean()
        (loss * (nan if (step, rank) == (TROUBLED, 1) else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(healthy)
    probe.flush()
    probe.detach()
    writer.close()
    end_process_group()


@pytest.mark.parametrize("wrapper", strategies(["ddp", "fsdp2"]))
def test_all_ranks_sample_the_same_steps(wrapper, tmp_path):
    run_ranks(train, wrapper, tmp_path, ranks=RANKS)
    rings = {rank: read_ring(tmp_path / f"rank{rank}.ring") for rank in range(RANKS)}
    for family in (GRADIENTS.name, ACTIVATIONS.name):
        for ring in rings.values():
            sampled = [table.sequence for table in ring.layers if family in table.families]
            assert [step for step in sampled if step > TROUBLED + 1] == DENSE
    for sequence in DENSE:
        tables = [
            RankLayers(rank, ring.schema, table.families)
            for rank, ring in rings.items()
            for table in ring.layers
            if table.sequence == sequence
        ]
        for family in (GRADIENTS.name, ACTIVATIONS.name):
            assert merge_node_layers([tables], RANKS, family=family).complete
