"""What the fused statistics give to the kernels, and what they leave to stock operations."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mp_agent.probe.statistics.fused import statistics as fused
from mp_agent.probe.statistics.fused.statistics import FusedStatistics
from tests.agent.probe.statistics.distributions import assert_distribution
from tests.agent.probe.statistics.gradients import VALUES, normal

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "measure",
    [
        lambda statistics, gradient: statistics.layers([gradient], 1.0),
        lambda statistics, gradient: statistics.totals([[gradient]], 1.0),
        lambda statistics, gradient: statistics.distribution([gradient], 1.0, None),
    ],
    ids=["layers", "totals", "distribution"],
)
def test_a_copy_of_a_gradient_lives_until_the_kernels_were_launched(
    measure: Callable[[FusedStatistics, torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sparse gradient is coalesced: of that only the measurement knows."""
    copies: list[weakref.ref[torch.Tensor]] = []
    found: list[bool] = []

    def copied(gradient: torch.Tensor) -> torch.Tensor:
        copy = gradient.to_dense().clone()
        copies.append(weakref.ref(copy))
        return copy

    def launch(*_: object) -> None:
        gc.collect()
        found.extend(copy() is not None for copy in copies)

    monkeypatch.setattr(fused, "stored_values", copied)
    launches: Any = SimpleNamespace(
        COUNTS=6,
        SUMS=2,
        launch_measure=launch,
        launch_count=launch,
        launch_fold=lambda *_: None,
        launch_edges=lambda *_: None,
    )
    measure(FusedStatistics(CPU, launches, launches), VALUES["sparse_uncoalesced"]())
    assert found == [True]


def test_without_kernels_of_its_own_the_distribution_is_left_to_stock_operations() -> None:
    launches: Any = SimpleNamespace()  # none of them is asked for
    gradients = [normal(1000), None, normal(70, dtype=torch.bfloat16)]
    found = FusedStatistics(CPU, launches).distribution(gradients, 0.5, 8.0)
    assert_distribution(found, gradients, 0.5, 8.0)
