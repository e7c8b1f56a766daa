"""Torch's pipeline schedules: loss and norm against the whole model in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import merge_rings, read_ring
from tests.agent.probe.small_model import gradient_of
from tests.agent.probe.watching import watched
from tests.gloo import end_process_group

pytestmark = pytest.mark.slow

STEPS, SIZE, BATCH, MICRO_BATCHES = 3, 6, 8, 4
STAGES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
}
"""Per rank."""


def make_stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(count)]


def batch_of(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    inputs, target = torch.randn(2, BATCH, SIZE, generator=generator)
    return inputs, target


def train(
    rank: int, directory: Path, name: str, scale_grads: bool, replicas: int, scaled: bool
) -> None:
    ranks = 2 * replicas
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks
    )
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("data", "pipeline"))
    place, replica = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    count = 2 * STAGES[name]
    held = [place, count - 1 - place] if "ZBV" in name else list(range(place, count, 2))
    modules: list[nn.Module] = [make_stages(count)[index] for index in held]
    if replicas > 1:
        group = mesh["data"].get_group()
        modules = [DistributedDataParallel(each, process_group=group) for each in modules]
    group = mesh["pipeline"].get_group()
    stages = [
        PipelineStage(module, index, count, torch.device("cpu"), group=group)
        for module, index in zip(modules, held, strict=True)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(output, target)
        return scaler.scale(loss) if scaled else loss

    with watched(directory, rank, ranks):
        schedule: Any = getattr(schedules, name)(
            stages[0] if len(stages) == 1 else stages,
            MICRO_BATCHES,
            loss_fn=loss_of,
            scale_grads=scale_grads,
        )
        optimizer = torch.optim.SGD([p for each in modules for p in each.parameters()], lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, target = batch_of(step, replica)
            schedule.step(*([inputs] if 0 in held else []), target=target)
            if scaled:
                for parameter in (p for each in modules for p in each.parameters()):
                    gradient_of(parameter).div_(2.0**10)  # the first stage has scaled nothing
            optimizer.step()
    end_process_group()


def reference(scale_grads: bool, replicas: int, count: int) -> list[tuple[float, float]]:
    """Loss and norm of each step of the whole model."""
    model = nn.Sequential(*make_stages(count)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for replica in range(replicas):
            inputs, target = batch_of(step, replica)
            parts = zip(inputs.double().chunk(4), target.double().chunk(4), strict=True)
            losses = [nn.functional.mse_loss(model(x), y) for x, y in parts]
            total = total + sum(losses) / (MICRO_BATCHES if scale_grads else 1) / replicas
        total.backward()
        squares = sum(float(gradient_of(each).square().sum()) for each in model.parameters())
        found.append((total.item(), squares**0.5))
        optimizer.step()
    return found


@pytest.mark.parametrize(
    ("name", "scale_grads", "replicas", "scaled"),
    [
        *((name, True, 1, False) for name in STAGES),
        ("Schedule1F1B", False, 1, False),
        ("Schedule1F1B", True, 1, True),
        ("ScheduleInterleavedZeroBubble", False, 1, False),
        ("Schedule1F1B", True, 2, False),
    ],
)
def test_loss_and_norm_are_those_of_the_whole_model(tmp_path, name, scale_grads, replicas, scaled):
    run_ranks(train, tmp_path, name, scale_grads, replicas, scaled, ranks=2 * replicas)
    rings = {rank: read_ring(tmp_path / f"rank{rank}.ring") for rank in range(2 * replicas)}
    merged = merge_rings(rings)
    seen = [(step.get("loss"), (step.get("sum_squares") or 0.0) ** 0.5) for step in merged]
    expected = reference(scale_grads, replicas, 2 * STAGES[name])
    assert [loss for loss, _ in seen] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    if not scaled:
        assert [norm for _, norm in seen] == pytest.approx([norm for _, norm in expected], rel=1e-5)
    assert all(ring.state.unsupported == () for ring in rings.values())
