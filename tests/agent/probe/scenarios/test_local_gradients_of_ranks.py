"""What two ranks say of their own gradients under DDP: what each computes without DDP.

The reference is a copy of the model on each rank that no wrapper knows: its gradients are those of
the rank's own batches, and numpy adds their squares up in float64.
"""

import contextlib
import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import read_ring
from tests.agent.probe.scenarios.own_gradients import (
    assert_equal_to_references,
    assert_rank_1_is_named,
)
from tests.agent.probe.watching import watched
from tests.gloo import process_group

pytestmark = pytest.mark.slow

RANKS, STEPS, POISONED_STEP = 2, 4, 3
COLUMNS = ("local_grad_norm", "local_grad_nonfinite_elements", "local_grad_nonfinite_backward")


@dataclass(frozen=True)
class Case:
    name: str
    views: bool = False
    """Gradients are views of DDP's buckets, and reduced there during backward."""
    scale: float = 0.0
    micro_batches: int = 1
    syncs_all: bool = False
    """Every micro-batch reduces, for want of `no_sync`."""
    poison: bool = False
    """Rank 1's backward makes NaN in a micro-batch of `POISONED_STEP`, the first of several."""
    checkpoints: bool = False


CASES = [
    Case("plain"),
    Case("views", views=True),
    Case("scaled", scale=1024.0),
    Case("scaled_views", scale=1024.0, views=True),
    Case("no_sync", micro_batches=3),
    Case("no_sync_views", micro_batches=3, views=True),
    Case("nan", poison=True),
    Case("nan_views", poison=True, views=True),
    Case("nan_first_of_three", poison=True, micro_batches=3),
    Case("nan_syncs_all", poison=True, micro_batches=3, syncs_all=True),
    Case("nan_scaled", poison=True, scale=1024.0),
    Case("checkpoints", checkpoints=True),
    Case("checkpoints_views", checkpoints=True, views=True),
]


class _NanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, torch.nan)


class Model(nn.Module):
    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 40), nn.Linear(40, 3)
        self.poisons, self._checkpoints = False, checkpoints

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._checkpoints:
            hidden = checkpoint(self.first, inputs.requires_grad_(), use_reentrant=True)
            outputs: torch.Tensor = checkpoint(self.second, hidden.relu(), use_reentrant=True)
            return outputs
        hidden = self.first(inputs).relu()
        if self.poisons:
            hidden = _NanInBackward.apply(hidden)
        outputs = self.second(hidden)
        return outputs


def train(rank: int, directory: Path) -> None:
    with process_group(directory, rank, RANKS):
        for case in CASES:
            _train_case(rank, case, directory / case.name)


def _train_case(rank: int, case: Case, directory: Path) -> None:
    with watched(directory, rank, RANKS, measure_local_gradients=True):
        weights, expected, hooks = _weights_after_training(rank, case)
    assert hooks == len(weights)
    with watched(directory / "off", rank, RANKS):
        without, _, hooks = _weights_after_training(rank, case)
    assert hooks == 0
    unwatched, _, _ = _weights_after_training(rank, case)
    for each in (without, unwatched):
        for own, other in zip(weights, each, strict=True):
            np.testing.assert_array_equal(own.numpy(), other.numpy())
    np.save(directory / f"expected{rank}.npy", np.array(expected))


def _weights_after_training(
    rank: int, case: Case
) -> tuple[list[torch.Tensor], list[tuple[float, float]], int]:
    """Return the weights, what was to be measured of each step, and the number of hooks."""
    torch.manual_seed(3)
    own = Model(checkpoints=case.checkpoints)
    model = DistributedDataParallel(
        own,
        gradient_as_bucket_view=case.views,
        static_graph=case.checkpoints,
        bucket_cap_mb=1e-4,  # several buckets
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=case.scale or 1.0, enabled=case.scale > 0)
    expected = []
    for step in range(1, STEPS + 1):
        alone = copy.deepcopy(own)
        scale = scaler.get_scale()
        for part in range(case.micro_batches):
            poisons = case.poison and (rank, step, part) == (1, POISONED_STEP, 0)
            last = part == case.micro_batches - 1
            if case.syncs_all and part:
                # What DDP has put in place is what the next micro-batch adds to.
                for reduced, copied in zip(own.parameters(), alone.parameters(), strict=True):
                    copied.grad = None if reduced.grad is None else reduced.grad.clone()
            with model.no_sync() if not (last or case.syncs_all) else contextlib.nullcontext():
                for each, backward in ((alone, False), (model, True)):
                    own.poisons = alone.poisons = poisons
                    with torch.autocast("cpu", torch.float16, enabled=case.scale > 0):
                        loss = each(_inputs(rank, step, part)).float().square().mean()
                    if backward:
                        scaler.scale(loss).backward()
                    else:
                        (loss * scale).backward()
        expected.append(_expected(alone, scale))
        scaler.step(optimizer)
        scaler.update()
        if case.poison and not case.scale:
            for weight in model.parameters():
                weight.data.nan_to_num_(nan=0.1)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    hooks = sum(len(each._post_accumulate_grad_hooks or ()) for each in own.parameters())
    return [each.detach().clone() for each in own.parameters()], expected, hooks


def _inputs(rank: int, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + part)
    return torch.randn(6, 5, generator=generator)


def _expected(alone: nn.Module, scale: float) -> tuple[float, float]:
    """Return norm and number of non-finite elements of the gradients of a rank alone."""
    gradients = [each.grad for each in alone.parameters() if each.grad is not None]
    values = np.concatenate([each.double().numpy().ravel() for each in gradients])
    values /= scale
    finite = np.isfinite(values)
    return float(np.sqrt(np.sum(np.square(values[finite])))), float(np.sum(~finite))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    for case in CASES:
        (directory / case.name / "off").mkdir(parents=True)
    run_ranks(train, directory, ranks=RANKS)
    return directory


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_norm_and_counts_of_each_rank_are_those_of_its_own_batches(case, directory):
    assert_equal_to_references(directory / case.name, RANKS, STEPS)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nan_from_the_backward_of_one_rank_names_that_rank(case, nodes, directory):
    assert_rank_1_is_named(
        directory / case.name,
        RANKS,
        nodes=nodes,
        steps=STEPS,
        poisoned_step=POISONED_STEP if case.poison else None,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_off_by_default_there_are_no_such_columns(case, directory):
    ring = read_ring(directory / case.name / "off" / "rank0.ring")
    assert set(COLUMNS).isdisjoint(ring.schema.step_columns)
