"""Statistics of a device are by fused kernels, or it is reported why not."""

from types import SimpleNamespace

import pytest
import torch

from mp_agent.probe import accelerator, statistics
from mp_agent.probe.statistics.fused import chunks
from mp_agent.probe.statistics.fused.build import DISTRIBUTION_KERNELS, GRADIENT_KERNELS, Kernels
from mp_agent.probe.statistics.fused.statistics import FusedStatistics
from mp_agent.probe.statistics.host import CpuStatistics
from mp_agent.probe.statistics.packed import PackedStatistics
from mp_agent.probe.step.measurement import UNFUSED, Measurement

CUDA = torch.device("cuda", 0)


def test_a_gpu_without_usable_kernels_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr(statistics, "launchable", lambda *_: None)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: None)
    measures = Measurement(reported.append)
    for _ in range(2):
        assert isinstance(measures._statistics_on(CUDA), PackedStatistics)
    assert reported == [UNFUSED]


def test_kernels_that_are_switched_off_are_neither_compiled_nor_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[str] = []
    compiled: list[torch.device] = []
    monkeypatch.setattr(statistics, "launchable", compiled.append)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: None)
    measures = Measurement(reported.append, fused_kernels=False)
    assert isinstance(measures._statistics_on(CUDA), PackedStatistics)
    assert (reported, compiled) == ([], [])


@pytest.mark.parametrize("distribution", [True, False])
def test_kernels_of_a_measured_distribution_are_compiled_along_with_the_others(
    monkeypatch: pytest.MonkeyPatch, distribution: bool
) -> None:
    compiled: list[Kernels] = []

    def launchable(device: torch.device, kernels: Kernels = GRADIENT_KERNELS) -> SimpleNamespace:
        compiled.append(kernels)
        return SimpleNamespace()

    monkeypatch.setattr(statistics, "launchable", launchable)
    monkeypatch.setattr(chunks, "send", lambda values, device: values)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: None)
    measures = Measurement(lambda feature: None, distribution=distribution)
    assert isinstance(measures._statistics_on(CUDA), FusedStatistics)
    assert compiled == [GRADIENT_KERNELS, *([DISTRIBUTION_KERNELS] if distribution else [])]


def test_a_processor_needs_no_kernels() -> None:
    reported: list[str] = []
    measures = Measurement(reported.append)
    assert isinstance(measures._statistics_on(torch.device("cpu")), CpuStatistics)
    assert reported == []
