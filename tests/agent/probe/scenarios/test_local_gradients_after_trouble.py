"""With `after_trouble`, a rank whose every batch makes NaN is named in the stretch after trouble.

Its updates are skipped, by GradScaler or by the guard, so that the weights stay as they are.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mp_agent.records.columns import by_name
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import merge_rings, read_rings
from tests.agent.probe.watching import watched
from tests.gloo import process_group

pytestmark = pytest.mark.slow

RANKS, BROKEN_FROM = 2, 104
WINDOW = range(110, 156)
GUARD = {"skip_nonfinite": {"actions_max": 100}}
"""Enough for all steps: once it may skip no more, the NaN is in the weights of all ranks."""


@dataclass(frozen=True)
class Case:
    name: str
    sharded: bool = False
    scaler: bool = False
    """GradScaler skips the updates; the guard does otherwise."""
    steps: int = 115

    @property
    def measured(self) -> list[int]:
        return [step for step in WINDOW if step <= self.steps]


CASES = [
    Case("ddp_guard"),
    Case("ddp_scaler", scaler=True, steps=158),
    Case("fsdp2_scaler", sharded=True, scaler=True),
]


class _NanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, torch.nan)


def train(rank: int, directory: Path) -> None:
    with process_group(directory, rank, RANKS):
        for case in CASES:
            weights = {}
            for value in ("after_trouble", False):
                settings: dict[str, Any] = {} if case.scaler else {"guard": GUARD}
                with watched(
                    directory / case.name / str(value),
                    rank,
                    RANKS,
                    measure_local_gradients=value,
                    overhead_budget=1.0,
                    **settings,
                ):
                    weights[value], hooked = _weights_after_training(rank, case)
                assert hooked == (case.measured if value else [])
            for own, other in zip(*weights.values(), strict=True):
                np.testing.assert_array_equal(own.numpy(), other.numpy())


def _weights_after_training(rank: int, case: Case) -> tuple[list[torch.Tensor], list[int]]:
    """Return the weights, and the steps in whose backward there were hooks."""
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    if case.sharded:
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, enabled=case.scaler)
    hooked = []
    for step in range(1, case.steps + 1):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        outputs = model(torch.randn(6, 4, generator=generator))
        if rank == 1 and step >= BROKEN_FROM:
            outputs = _NanInBackward.apply(outputs)
        scaler.scale(outputs.square().mean()).backward()
        if any(each._post_accumulate_grad_hooks for each in _trained_tensors(model)):
            hooked.append(step)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    weights = [each.detach() for each in model.parameters()]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in weights]
    return [each.clone() for each in local], hooked


def _trained_tensors(model: nn.Module) -> list[torch.Tensor]:
    if not isinstance(model, FSDPModule):
        return list(model.parameters())
    group = model._get_fsdp_state()._fsdp_param_group
    return [] if group is None else [each._unsharded_param for each in group.fsdp_params]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(train, directory, ranks=RANKS)
    return directory


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_rank_is_named_on_all_steps_of_the_stretch_and_on_no_others(case, directory):
    place = directory / case.name / "after_trouble"
    rings = read_rings(place, RANKS)
    for ring in rings.values():
        measured = [
            record.sequence
            for record in ring.records
            if "local_grad_norm" in by_name(ring.schema.step_columns, record.values)
        ]
        assert measured == case.measured
    named = {step.sequence: step.nonfinite_gradient_ranks for step in merge_rings(rings)}
    assert named == {step: (1,) if step in WINDOW else () for step in range(1, case.steps + 1)}
