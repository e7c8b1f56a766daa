"""Watched tensors of two ranks of DistributedDataParallel under torchrun, merged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mp_agent.node.merge.node_layers import RankLayers
from mp_agent.records.columns import TENSORS
from mp_agent.records.tensor_collections import index_of, ratio_of
from mp_agent.ring import locations
from tests.agent.node.nodes import merge_node_layers
from tests.agent.probe.instruments import tensor_reference as reference
from tests.agent.probe.rings import read_ring

pytestmark = pytest.mark.slow

RANKS = 2
ROOT = Path(__file__).parents[4]

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import mp_agent
from tests.agent.probe.scenarios.test_watched_tensors_of_ranks import inputs_of
from tests.gloo import end_process_group

mp_agent.init(node_agent="none", dir=sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for step in (1, 2, 3):
    inputs = inputs_of(rank)
    mp_agent.watch_tensor("inputs", inputs, dim=-1, reduction=True)
    if rank == 1:
        mp_agent.watch_tensor("of one rank", inputs)
    model(inputs.float()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
end_process_group()
"""


def inputs_of(rank: int) -> torch.Tensor:
    """Return [3 or 4, 4] of FP16; on rank 1 the third column is far larger than the others."""
    inputs = torch.randn(3 + rank, 4, generator=torch.Generator().manual_seed(rank))
    return (inputs * torch.tensor([1.0, 1.0, 1.0 + 4000.0 * rank, 1.0])).half()


def test_the_merge_is_exactly_that_of_the_tensors_of_both_ranks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*torchrun, str(script), str(tmp_path / "shm")],
        check=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / '.editable'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
        },
    )
    (run_dir,) = locations.find_runs(tmp_path / "shm")
    rings = dict(enumerate(map(read_ring, sorted(locations.find_rings(run_dir)))))
    assert len(rings) == RANKS
    tables = [
        RankLayers(rank, ring.schema, table.families)
        for rank, ring in rings.items()
        for table in ring.layers
        if table.sequence == 2
    ]
    merged = merge_node_layers([[table] for table in tables], RANKS, family=TENSORS.name)
    rows = {
        name: dict(zip(TENSORS.names, row, strict=True))
        for name, row in zip(merged.names, merged.values.tolist(), strict=True)
    }

    assert merged.complete
    both = reference.row(torch.cat([inputs_of(0), inputs_of(1)]), reduction=True)
    own = [reference.row(inputs_of(rank)) for rank in range(RANKS)]
    both["swallowed_sum"] = own[0]["swallowed_sum"] + own[1]["swallowed_sum"]
    ratio = rows["inputs"].pop("range_ratio")
    assert rows["inputs"] == pytest.approx(both, rel=1e-12)
    ranges = reference.ranges(reference.values_of(inputs_of(1)), -1)
    assert index_of(ratio) == 2
    assert ratio_of(ratio) == pytest.approx(ranges.max() / ranges.min(), rel=2.0**-31)
    assert rows["of one rank"]["elements"] == 16.0
