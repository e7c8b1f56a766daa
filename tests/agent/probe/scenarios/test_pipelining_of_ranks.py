"""Torch's pipeline schedules: loss and norm against the whole model in one process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import merge_rings, read_rings
from tests.agent.probe.small_model import gradient_of
from tests.agent.probe.watching import watched
from tests.gloo import process_group

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


@dataclass(frozen=True)
class Case:
    schedule: str
    scale_grads: bool = True
    replicas: int = 1
    scaled: bool = False

    @property
    def name(self) -> str:
        return f"{self.schedule}-{self.scale_grads}-{self.replicas}-{self.scaled}"

    @property
    def ranks(self) -> int:
        return 2 * self.replicas


CASES = [
    *(Case(name) for name in STAGES),
    Case("Schedule1F1B", scale_grads=False),
    Case("Schedule1F1B", scaled=True),
    Case("ScheduleInterleavedZeroBubble", scale_grads=False),
    Case("Schedule1F1B", replicas=2),
]


def train(rank: int, ranks: int, directory: Path) -> None:
    """Train the cases of so many ranks; called on each."""
    with process_group(directory, rank, ranks):
        for case in CASES:
            if case.ranks == ranks:
                _train_case(rank, case, directory / case.name)


def _train_case(rank: int, case: Case, directory: Path) -> None:
    mesh = init_device_mesh("cpu", (case.replicas, 2), mesh_dim_names=("data", "pipeline"))
    place, replica = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    count = 2 * STAGES[case.schedule]
    held = [place, count - 1 - place] if "ZBV" in case.schedule else list(range(place, count, 2))
    modules: list[nn.Module] = [make_stages(count)[index] for index in held]
    if case.replicas > 1:
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
        return scaler.scale(loss) if case.scaled else loss

    with watched(directory, rank, case.ranks):
        schedule: Any = getattr(schedules, case.schedule)(
            stages[0] if len(stages) == 1 else stages,
            MICRO_BATCHES,
            loss_fn=loss_of,
            scale_grads=case.scale_grads,
        )
        optimizer = torch.optim.SGD([p for each in modules for p in each.parameters()], lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, target = batch_of(step, replica)
            schedule.step(*([inputs] if 0 in held else []), target=target)
            if case.scaled:
                for parameter in (p for each in modules for p in each.parameters()):
                    gradient_of(parameter).div_(2.0**10)  # the first stage has scaled nothing
            optimizer.step()


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


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stages")
    for ranks in (2, 4):
        run_ranks(train, ranks, directory, ranks=ranks)
    return directory


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_norm_are_those_of_the_whole_model(directory, case):
    rings = read_rings(directory / case.name, case.ranks)
    seen = [
        (step.get("loss"), (step.get("sum_squares") or 0.0) ** 0.5) for step in merge_rings(rings)
    ]
    expected = reference(case.scale_grads, case.replicas, 2 * STAGES[case.schedule])
    assert [loss for loss, _ in seen] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    if not case.scaled:
        assert [norm for _, norm in seen] == pytest.approx([norm for _, norm in expected], rel=1e-5)
    assert all(ring.state.unsupported == () for ring in rings.values())
