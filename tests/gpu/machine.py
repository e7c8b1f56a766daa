"""The device that these tests run on: a GPU, or where there is none a simulated one."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mp_agent.probe.statistics import GradientStatistics, for_device
from mp_agent.probe.statistics.packed import PackedStatistics
from tests.agent.probe.simulated_device import SimulatedDevice, install


class Machine:
    """A device, and how to wait for it and to forbid waiting for it."""

    def __init__(self, simulated: SimulatedDevice | None) -> None:
        self.simulated = simulated
        self.device = torch.device("cpu" if simulated is not None else "cuda")

    @classmethod
    def of(cls, monkeypatch: pytest.MonkeyPatch) -> "Machine":
        """Return the GPU; without one, a simulated device in the place of the processor."""
        return cls(None if torch.cuda.is_available() else install(monkeypatch))

    def statistics(self) -> GradientStatistics:
        """Return what measures gradients there."""
        return PackedStatistics(self.device) if self.simulated else for_device(self.device)

    def finish(self) -> None:
        """Let the device finish what it was given."""
        if self.simulated is None:
            torch.cuda.synchronize()
        else:
            self.simulated.run()

    @contextmanager
    def waiting_is_an_error(self) -> Iterator[None]:
        """Raise where the host would wait for the GPU; the simulated one is never waited for."""
        if self.simulated is not None:
            yield
            return
        try:
            with warnings.catch_warnings():
                # torch says once that the mode is a prototype, raised after the mode is set.
                warnings.simplefilter("ignore", UserWarning)
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the same layout on `device`; `to` would make gaps and overlaps dense."""
    if tensor.layout is not torch.strided:
        return tensor.to(device)
    if tensor.is_conj():
        return placed(tensor.conj(), device).conj()
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return memory.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
