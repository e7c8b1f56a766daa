"""Chunk tables on the device, kept as long as the forms of gradients stay, and their addresses."""

from dataclasses import dataclass

import numpy as np
import torch

from mp_agent.probe.statistics.fused.chunks import FormsByGroup, make_chunk_tables
from mp_agent.probe.statistics.packed.statistics import LAYOUTS_KEPT
from mp_agent.probe.statistics.sending import send


@dataclass(slots=True)
class DeviceTables:
    """What the kernels need to know of some groups of tensors.

    chunks, of_kind, groups: of `ChunkTables`. pointers: the addresses that were sent last.
    """

    chunks: torch.Tensor
    of_kind: tuple[torch.Tensor, ...]
    groups: torch.Tensor
    pointers: torch.Tensor
    addresses: list[int]


def scalar_on(device: torch.device, value: float | torch.Tensor) -> torch.Tensor:
    """Return a number as a float64 that the kernels read on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device, torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)


class KeptTables:
    """The tables of the latest sets of gradients, those of each stream by themselves.

    Optimizers on several streams need not wait for each other.
    """

    def __init__(self, device: torch.device, chunk_elements: int) -> None:
        self._device = device
        self._chunk_elements = chunk_elements
        self._tables: dict[tuple[int, FormsByGroup], DeviceTables | None] = {}

    def ready(self, groups: FormsByGroup, addresses: list[int]) -> DeviceTables | None:
        """Return tables of tensors at these addresses, 0 for one that is not there.

        Sends what has changed. None where the kernels cannot measure one of the tensors.
        """
        key = (self._stream(), groups)
        if key not in self._tables:
            if len(self._tables) >= LAYOUTS_KEPT:
                self._tables.clear()
            self._tables[key] = self._sent(groups, addresses)
        tables = self._tables[key]
        if tables is not None and tables.addresses != addresses:
            tables.pointers = self._pointers(addresses)
            tables.addresses = addresses
        return tables

    def _sent(self, groups: FormsByGroup, addresses: list[int]) -> DeviceTables | None:
        tables = make_chunk_tables(groups, self._chunk_elements)
        if tables is None:
            return None
        return DeviceTables(
            chunks=send(tables.chunks, self._device),
            of_kind=tuple(
                send(numbers.astype(np.int32), self._device) for numbers in tables.of_kind
            ),
            groups=send(tables.groups, self._device),
            pointers=self._pointers(addresses),
            addresses=addresses,
        )

    def _pointers(self, addresses: list[int]) -> torch.Tensor:
        return send(np.array(addresses, dtype=np.int64), self._device)

    def _stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        return torch.cuda.current_stream(self._device).cuda_stream
