"""A run whose measuring costs more than it may, on a simulated device."""

from math import isnan

import pytest

from mp_agent.probe.step import layer_schedule
from tests.agent.probe.scenarios.test_device import Loop, sums_of


@pytest.fixture
def contents(watch, device, monkeypatch):
    """120 steps of which measuring takes longer than the step, on the device."""
    monkeypatch.setattr(layer_schedule, "WINDOW_STEPS", 10)
    device.seconds_per_measurement = 100.0
    watched, loop = watch(overhead_budget=0.5), Loop()
    for _ in range(120):
        loop.step(device)
    watched.probe.flush()
    return watched.read(), loop


def test_every_step_is_counted_and_says_whether_it_was_measured(contents):
    ring, loop = contents
    assert [record.sequence for record in ring.records] == list(range(1, 121))
    assert ring.state.records_dropped == 0
    measured = ring.column("gradients_measured")
    assert set(measured) == {0.0, 1.0}
    for index, (flag, observed) in enumerate(zip(measured, sums_of(ring), strict=True)):
        if flag:
            assert observed == pytest.approx(loop.sums[index], rel=1e-6)
        else:
            assert isnan(observed)


def test_the_intervals_in_force_and_the_cost_are_recorded(contents):
    ring, _ = contents
    strides = ring.column("measuring_interval_steps")
    assert strides[0] == 1.0
    assert strides[-1] > 1.0
    assert strides == sorted(strides)
    assert max(ring.column("layer_interval_steps")) == 1600.0
    timed = [value for value in ring.column("probe_device_seconds") if not isnan(value)]
    assert timed == [100.0] * int(sum(ring.column("gradients_measured")))
    ratios = [value for value in ring.column("device_overhead_ratio") if not isnan(value)]
    assert len(ratios) == 110, "none before the end of the first window"
    assert ratios[0] > 1.0


def test_the_loss_of_steps_that_are_not_measured_is_recorded_all_the_same(contents):
    ring, _ = contents
    assert not any(isnan(loss) for loss in ring.column("loss"))


@pytest.mark.parametrize("behind", [True, False])
def test_the_hosts_time_costs_nothing_while_the_device_is_behind(
    watch, device, monkeypatch, behind
):
    """The host waits then wherever it launches something, in the probe as anywhere else."""
    monkeypatch.setattr(layer_schedule, "WINDOW_STEPS", 10)
    device.is_behind = behind
    watched, loop = watch(overhead_budget=1e-9), Loop()
    for _ in range(60):
        loop.step(device)
    watched.probe.flush()
    ring = watched.read()
    ratios = [value for value in ring.column("host_overhead_ratio") if not isnan(value)]
    assert len(ratios) == 50
    assert all(ratio == 0.0 for ratio in ratios) == behind
    assert (max(ring.column("layer_interval_steps")) > 100.0) != behind
    assert ring.state.probe_seconds > 0.0
