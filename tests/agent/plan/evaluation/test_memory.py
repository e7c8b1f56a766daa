"""Peak memory, against sums by hand."""

import torch
from torch import nn

from mp_agent.plan.evaluation.api import LiveMemory, measure_peak
from mp_agent.plan.execution.training import workload_of
from mp_agent.plan.precision_plan import PrecisionPlan


def test_live_tensors_are_counted_until_they_are_freed():
    kept = torch.zeros(10)
    live = LiveMemory([kept])
    with live:
        first = kept + 1
        second = first.view(2, 5).t()
        assert live.live_bytes == 80
        del first
        assert live.live_bytes == 80
        del second
        assert live.live_bytes == 40
        kept.add_(1)
        third = torch.empty(0)
    assert (live.live_bytes, live.peak_bytes, third.numel()) == (40, 80, 0)


def test_the_peak_of_a_step_has_weights_gradients_and_both_moments():
    size = 4096
    model = nn.Linear(size, 1, bias=False)
    workload = workload_of(model, (torch.ones(1, size),), lambda m, batch: m(batch[0]).sum(), 1)
    peak, source = measure_peak(workload, PrecisionPlan(precision="fp32", device="cpu"), 1e-3)
    # Weight, gradient, both moments and the batch; the update needs a few tensors of that size.
    assert 5 * 4 * size <= peak <= 8 * 4 * size
    assert source.startswith("live tensors")
    half, _ = measure_peak(workload, PrecisionPlan(precision="bf16", device="cpu"), 1e-3)
    assert 5 * 2 * size <= half <= 9 * 2 * size
