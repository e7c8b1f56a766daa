"""What a script names on two ranks under torchrun, by DDP and by FSDP2, as an agent exports it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mp_agent.node.run.run import Run
from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests.agent.node.shown import shown
from tests.agent.probe.fully_shard import strategies

pytestmark = [pytest.mark.slow, pytest.mark.long]

RANKS = 2
ROOT = Path(__file__).parents[4]
LOSS_SCALE = 2.0**18

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import mp_agent
from tests.agent.probe.scenarios.test_tensor_collections_of_ranks import (
    LOSS_SCALE, batch_of, loss_of, make_model
)
from tests.gloo import end_process_group

split, place = sys.argv[1:]
mp_agent.collection("attention", include="attn")
mp_agent.init(node_agent="none", dir=place, measure_distribution=True)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = make_model()
model = DistributedDataParallel(model) if split == "ddp" else fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)
mp_agent.collection("attn or head", include=["attn", "^head"])
mp_agent.collection("gates", include="gate")
for step in (1, 2, 3):
    mp_agent.watch_tensor("inputs", batch_of(rank))
    scaler.scale(loss_of(model, batch_of(rank))).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
end_process_group()
"""


class Model(nn.Module):
    """Of sizes that two ranks cannot halve; one parameter has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.attn_unused = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [N, 1] of [N, 5]."""
        outputs: torch.Tensor = self.head(self.attn(inputs))
        return outputs


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch_of(rank: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(rank)) * 3.0


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


def gradients() -> dict[str, torch.Tensor]:
    """Return those of one process that has both batches, in float64."""
    model = make_model().double()
    loss_of(model, torch.cat([batch_of(rank) for rank in range(RANKS)]).double()).backward()
    return {n: p.grad.reshape(-1) for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("split", strategies(["ddp", "fsdp2"]))
def test_a_collection_is_of_all_ranks_elements_each_counted_once(split, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*torchrun, str(script), split, str(tmp_path / "shm")],
        check=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / '.editable'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
        },
    )
    (run_dir,) = locations.find_runs(tmp_path / "shm")
    run = Run(run_dir, Settings(dir=tmp_path / "shm"))
    try:
        run.poll(0.0)
        values = shown(run)
    finally:
        run.close()

    assert values["steps_total"] == 3
    inputs = torch.cat([batch_of(rank) for rank in range(RANKS)])
    assert values["tensor_abs_max{inputs}"] == float(inputs.abs().max())
    own = gradients()
    members = {
        "attention": [own[name] for name in own if "attn" in name],
        "attn or head": list(own.values()),
    }
    for name, parts in members.items():
        elements = torch.cat(parts).numpy()
        sizes = np.abs(elements[elements != 0.0])
        expected = {
            "layers": len(parts),
            "grad_norm": np.sqrt(np.square(elements).sum()),
            "grad_abs_max": sizes.max(),
            "grad_abs_min": sizes.min(),
            "grad_nonfinite_elements": 0.0,
            "grad_mean": elements.mean(),
            "grad_deviation": elements.std(),
            "grad_fp16_near_overflow_ratio": (sizes * LOSS_SCALE > 60000.0).mean(),
        }
        assert 0.0 < expected["grad_fp16_near_overflow_ratio"] < 1.0
        for metric, value in expected.items():
            found = values[f"collection_{metric}{{{name}}}"]
            assert found == pytest.approx(value, rel=1e-4), (name, metric)
    assert values["collection_layers{gates}"] == 0.0
    assert "collection_grad_norm{gates}" not in values
    (unsupported,) = [key for key in values if key.startswith("unsupported_info")]
    assert "collection 'gates', which matches no parameter" in unsupported
    assert not any("attn" in key for key in values if key.startswith("run_info"))
