"""What can be said of an accelerator's runtime without one."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import DeviceConstants

CUDA = torch.device("cuda:0")

ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", RuntimeError)
"""Older torch raises the plain error, which cannot be told from others by its type."""


class TestErrors:
    @pytest.mark.parametrize(
        "message",
        [
            "CUDA error: device-side assert triggered",
            "CUDA error: an illegal memory access was encountered",
            "CUDA error: uncorrectable ECC error encountered",
            "CUDA error: unspecified launch failure",
        ],
    )
    def test_one_that_every_later_call_reports_is_sticky(self, message):
        assert accelerator.is_sticky_error(ACCELERATOR_ERROR(message))

    @pytest.mark.parametrize(
        "error",
        [
            ACCELERATOR_ERROR("CUDA error: invalid argument"),
            torch.OutOfMemoryError("CUDA out of memory"),
            RuntimeError("device-side assert"),
            ValueError("CUDA error: device-side assert triggered"),
        ],
    )
    def test_one_of_a_single_call_is_not(self, error):
        assert not accelerator.is_sticky_error(error)


class TestRegistering:
    @pytest.fixture
    def runtime(self, monkeypatch):
        """A runtime that gives the result that it is told to."""
        asked = []

        def register(address: int, size: int, flags: int) -> int:
            asked.append((address, size, flags))
            return int(runtime.result)

        runtime = SimpleNamespace(cudaHostRegister=register, result=0, asked=asked)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        return runtime

    def test_all_of_the_memory_is_registered(self, runtime):
        memory: Any = np.zeros(4096, dtype=np.uint8)
        assert accelerator.register_host_memory(memoryview(memory), CUDA)
        assert runtime.asked == [(memory.ctypes.data, 4096, 0)]

    def test_a_refusal_is_taken_back_from_the_runtime(self, runtime, monkeypatch):
        """Else the training's next kernel would raise it: the runtime keeps its last error."""
        cleared = []

        def zeros(*size, device):
            cleared.append(device)
            raise ACCELERATOR_ERROR("CUDA error: operation not supported")

        monkeypatch.setattr(torch, "zeros", zeros)
        runtime.result = 801
        assert not accelerator.register_host_memory(memoryview(bytearray(8)), CUDA)
        assert cleared == [CUDA]

    def test_the_processor_needs_none(self, runtime):
        assert not accelerator.register_host_memory(memoryview(bytearray(8)), torch.device("cpu"))
        assert runtime.asked == []


class TestConstants:
    def test_each_stream_gets_its_own(self, device):
        constants, values = DeviceConstants(), (3, 1, 2)
        one = constants.on(torch.device("cpu"), values)
        assert one.tolist() == [3, 1, 2]
        assert constants.on(torch.device("cpu"), values) is one
        device.stream = "other"
        assert constants.on(torch.device("cpu"), values) is not one

    def test_equal_constants_of_another_owner_are_sent_again(self, device):
        constants = DeviceConstants()
        first = constants.on(torch.device("cpu"), [1, 2])
        assert constants.on(torch.device("cpu"), [1, 2]) is not first
        for number in range(200):
            assert constants.on(torch.device("cpu"), [number]).tolist() == [number]
