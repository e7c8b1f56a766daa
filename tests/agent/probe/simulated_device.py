"""A simulated device: the processor, as far behind the host as the test says.

Tensors on the processor count as on a device: nothing may read them, and copies to the host are
made when the device gets to them. As on a device, a copy brings what the tensor held when the copy
was queued.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from time import monotonic, sleep
from types import SimpleNamespace

import pytest
import torch

from mp_agent.probe import accelerator
from mp_agent.probe.delivery import transfers
from mp_agent.probe.statistics.packed import PackedStatistics
from mp_agent.probe.step import measurement

ASSERTED = "CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"


class SimulatedDevice:
    """Executes queued copies on request, and while the host waits for them."""

    def __init__(self) -> None:
        self.stream: Hashable = "default"
        self.capturing = False
        self.waits: list[tuple[Hashable, Hashable]] = []
        """Which stream waited for which."""
        self.seconds_per_measurement: float | None = None
        """Device time that measuring takes."""
        self.is_behind = False
        """Whether it has not come to what is measured when the host ends the step."""
        self.stuck = False
        """Whether it does nothing while the host waits."""
        self.refuses = False
        """Whether it refuses to write into the ring."""
        self.torn = False
        """Whether the last word of each copy arrives later than the rest."""
        self._queue: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._failed = False

    @property
    def queued(self) -> int:
        return len(self._queue)

    def run(self, copies: int | None = None) -> None:
        """Execute so many copies, or all."""
        while self._queue and (copies is None or copies > 0):
            target, values = self._queue.popleft()
            if self.torn:
                target[:-1].copy_(values[:-1])
                self._queue.appendleft((target[-1:], values[-1:]))
                self.torn = False
                return
            target.copy_(values)
            copies = None if copies is None else copies - 1

    def fail(self) -> None:
        """Let an earlier kernel fail: nothing is executed any more, every call raises."""
        self._failed = True
        self._queue.clear()

    def wait(self, seconds: float) -> None:
        """Go on while the host waits."""
        if self._queue and not self.stuck:
            self.run(1)
        else:
            sleep(seconds)

    def check(self) -> None:
        if self._failed:
            # Older torch raises the plain error.
            raise getattr(torch, "AcceleratorError", RuntimeError)(ASSERTED)

    def is_capturing(self) -> bool:
        self.check()
        return self.capturing

    def copy_to_host(self, target: torch.Tensor, values: torch.Tensor) -> None:
        self.check()
        self._queue.append((target, values.detach().clone()))


class SimulatedStatistics(PackedStatistics):
    """Raises what the device reports."""

    def __init__(self, device: SimulatedDevice, place: torch.device) -> None:
        super().__init__(place, row_elements=64, scratch_rows=64)
        self._simulated = device

    def totals(
        self, groups: Sequence[Sequence[torch.Tensor]], inverse_scale: float | torch.Tensor
    ) -> torch.Tensor:
        self._simulated.check()
        return super().totals(groups, inverse_scale)

    def layers(
        self, tensors: Sequence[torch.Tensor | None], inverse_scale: float | torch.Tensor
    ) -> torch.Tensor:
        self._simulated.check()
        return super().layers(tensors, inverse_scale)

    def distribution(
        self,
        tensors: Sequence[torch.Tensor | None],
        inverse_scale: float | torch.Tensor,
        loss_scale: float | torch.Tensor | None,
    ) -> torch.Tensor:
        self._simulated.check()
        return super().distribution(tensors, inverse_scale, loss_scale)

    def digests(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        self._simulated.check()
        return super().digests(tensors)


class SimulatedTimer:
    """Stands for `accelerator.DeviceTimer`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def stop(self) -> None:
        pass

    def has_begun(self) -> bool:
        return not self._device.is_behind

    def seconds(self) -> float | None:
        return self._device.seconds_per_measurement


def install(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """Put a simulated device in the place of the processor."""
    device = SimulatedDevice()

    def statistics(place: torch.device, **_: bool) -> SimulatedStatistics:
        device.check()
        return SimulatedStatistics(device, place)

    def wait_for_stream(place: torch.device, stream: Hashable) -> None:
        device.check()
        device.waits.append((device.stream, stream))

    def start_timer(place: torch.device) -> SimulatedTimer:
        device.check()
        return SimulatedTimer(device)

    monkeypatch.setattr(accelerator, "is_on_host", lambda place: False)
    monkeypatch.setattr(accelerator, "copy_to_host", device.copy_to_host)
    monkeypatch.setattr(
        accelerator, "register_host_memory", lambda memory, place: not device.refuses
    )
    monkeypatch.setattr(transfers._Refusal, "seen", False)
    monkeypatch.setattr(accelerator, "current_stream", lambda place: device.stream)
    monkeypatch.setattr(accelerator, "wait_for_stream", wait_for_stream)
    monkeypatch.setattr(accelerator, "start_timer", start_timer)
    monkeypatch.setattr(accelerator, "cuda_is_used", lambda: True)
    monkeypatch.setattr(accelerator, "computing_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", device.is_capturing)
    monkeypatch.setattr(measurement, "for_device", statistics)
    monkeypatch.setattr(transfers, "time", SimpleNamespace(monotonic=monotonic, sleep=device.wait))
    return device
