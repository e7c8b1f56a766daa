"""Statistics of a device are by fused kernels, or it is reported why not."""

import pytest
import torch

from mp_agent.probe import accelerator
from mp_agent.probe.optimizers.measurement import UNFUSED, Measurement
from mp_agent.probe.statistics import base
from mp_agent.probe.statistics.host.cpu import CpuStatistics
from mp_agent.probe.statistics.packed.statistics import PackedStatistics

CUDA = torch.device("cuda", 0)


def test_a_gpu_without_usable_kernels_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr(base, "launchable", lambda device: None)
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
    monkeypatch.setattr(base, "launchable", compiled.append)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: None)
    measures = Measurement(reported.append, fused_kernels=False)
    assert isinstance(measures._statistics_on(CUDA), PackedStatistics)
    assert (reported, compiled) == ([], [])


def test_a_processor_needs_no_kernels() -> None:
    reported: list[str] = []
    measures = Measurement(reported.append)
    assert isinstance(measures._statistics_on(torch.device("cpu")), CpuStatistics)
    assert reported == []
