"""What can be said of an accelerator's runtime without one."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import DeviceConstants

CUDA = torch.device("cuda:0")

ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", RuntimeError)
"""Older torch raises the plain error, which cannot be told apart from others by its type."""


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
        "message",
        [
            "Triton Error [CUDA]: device-side assert triggered",
            "Triton Error [CUDA]: an illegal memory access was encountered",
            "Triton Error [HIP]:  Code: 719, Message: unspecified launch failure",
            "CUDA driver error: misaligned address",
            "HIP error: unspecified launch failure",
        ],
    )
    def test_so_it_is_whichever_library_made_the_call(self, message):
        """Triton, and torch where it calls the driver, raise the plain error."""
        assert accelerator.is_sticky_error(RuntimeError(message))

    @pytest.mark.parametrize(
        "error",
        [
            ACCELERATOR_ERROR("CUDA error: invalid argument"),
            torch.OutOfMemoryError("CUDA out of memory"),
            RuntimeError("Triton Error [CUDA]: out of memory"),
            RuntimeError("device-side assert"),
            ValueError("CUDA error: device-side assert triggered"),
        ],
    )
    def test_one_of_a_single_call_is_not(self, error):
        assert not accelerator.is_sticky_error(error)


class TestCapture:
    @pytest.fixture
    def asked(self, monkeypatch):
        """What torch answers, or raises."""
        answer: list[Any] = [False]

        def is_capturing() -> bool:
            if isinstance(answer[0], BaseException):
                raise answer[0]
            return bool(answer[0])

        monkeypatch.setattr(accelerator, "cuda_is_used", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
        return answer

    @pytest.mark.parametrize("capturing", [True, False])
    def test_torch_knows_of_it(self, asked, capturing):
        asked[0] = capturing
        assert accelerator.captures_graph() is capturing

    def test_a_device_that_has_failed_captures_nothing(self, asked):
        asked[0] = ACCELERATOR_ERROR("CUDA error: device-side assert triggered")
        assert not accelerator.captures_graph()

    def test_another_error_is_raised(self, asked):
        asked[0] = ACCELERATOR_ERROR("CUDA error: invalid argument")
        with pytest.raises(RuntimeError, match="invalid argument"):
            accelerator.captures_graph()


class TestPlaces:
    """The meta device stands for one from which nothing can be read at once."""

    def test_rows_of_the_host_go_to_the_device_of_the_others_and_never_back(self):
        mixed = [torch.ones(2), torch.ones(2, device="meta"), torch.ones(2)]
        assert [each.device.type for each in accelerator.on_one_device(mixed)] == ["meta"] * 3

    def test_rows_of_the_host_alone_stay_there(self):
        rows = [torch.ones(2), torch.zeros(2)]
        found = accelerator.on_one_device(rows)
        assert all(map(torch.equal, found, rows))

    def test_what_is_sent_to_a_gpu_goes_through_pinned_memory_of_its_own(self, monkeypatch):
        """Else the host waits, or sends what the script makes of its pinned tensor later."""
        values, pinned = torch.ones(2), []
        originals = torch.empty, torch.Tensor.to

        def empty(*size, pin_memory=False, **options):
            made = originals[0](*size, **options)
            pinned.extend([made] if pin_memory else [])
            return made

        def to(tensor, device, non_blocking=False):
            assert non_blocking and tensor is pinned[0]
            return originals[1](tensor, "meta")

        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.Tensor, "to", to)
        assert accelerator.sent(values, CUDA).device.type == "meta"
        assert pinned[0].tolist() == values.tolist()


class TestRegistering:
    @pytest.fixture
    def runtime(self, monkeypatch):
        """A runtime that gives a chosen result."""
        asked = []

        def register(address: int, size: int, flags: int) -> int:
            asked.append((address, size, flags, runtime.current))
            return int(runtime.result)

        @contextmanager
        def current(device):
            runtime.current = device
            yield
            runtime.current = None

        runtime = SimpleNamespace(cudaHostRegister=register, result=0, asked=asked, current=None)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "device", current)
        return runtime

    def test_all_of_the_memory_is_registered(self, runtime):
        memory: Any = np.zeros(4096, dtype=np.uint8)
        assert accelerator.register_host_memory(memoryview(memory), CUDA)
        assert runtime.asked == [(memory.ctypes.data, 4096, 0, CUDA)], "and no other GPU is used"

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


class TestRandomState:
    @pytest.fixture
    def on_gpu(self, monkeypatch) -> SimpleNamespace:
        """The generators of two GPUs, of which the second is the current one."""
        generators = [
            SimpleNamespace(initial_seed=lambda at=at: at, get_offset=lambda at=at: 4 * at)
            for at in range(2)
        ]
        monkeypatch.setattr(accelerator, "cuda_is_used", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "default_generators", generators)
        return generators[1]

    def test_differs_by_the_seed_and_by_what_was_drawn(self):
        states = []
        for seed, draws in ((7, 0), (7, 1), (7, 2), (8, 0)):
            torch.manual_seed(seed)
            torch.rand(draws)
            states.append(accelerator.random_state())
        assert len(set(states)) == len(states)
        torch.manual_seed(7)
        assert accelerator.random_state() == states[0]

    def test_is_also_that_of_the_current_gpu(self, on_gpu):
        before = accelerator.random_state()
        assert before[1:] == (1, 4)
        on_gpu.get_offset = lambda: 8
        assert accelerator.random_state() == (before[0], 1, 8)
