"""Statistics of gradients by the fused kernels: one launch per dtype, and one that folds."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import torch

from mp_agent.probe.statistics.fused.chunks import (
    CHUNK_ELEMENTS,
    FormsByGroup,
    TensorForm,
    make_chunk_tables,
)
from mp_agent.probe.statistics.packed.statistics import LAYOUTS_KEPT, PackedStatistics
from mp_agent.probe.statistics.pieces import stored_values
from mp_agent.probe.statistics.sending import send
from mp_agent.probe.statistics.table import wanted_columns
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES


@dataclass(slots=True)
class _DeviceTables:
    """Chunk tables on the device, and the addresses that were sent last."""

    chunks: torch.Tensor
    of_kind: tuple[torch.Tensor, ...]
    groups: torch.Tensor
    addresses: list[int] = field(default_factory=list)
    pointers: torch.Tensor | None = None


class FusedStatistics:
    """Statistics by kernels that read each gradient once; implements `GradientStatistics`.

    What the kernels cannot measure (float64, 8 bits, very many runs) is measured with stock
    operations, together with all that is asked for in the same call. Buffers are not kept from
    call to call, and tables are kept per stream: optimizers on several streams need not wait for
    each other.
    """

    def __init__(
        self, device: torch.device, launches: ModuleType, *, chunk_elements: int = CHUNK_ELEMENTS
    ) -> None:
        self._device = device
        self._launches = launches
        self._chunk_elements = chunk_elements
        self._stock = PackedStatistics(device)
        self._tables: dict[tuple[int, FormsByGroup], _DeviceTables | None] = {}
        self._layer_forms: list[TensorForm | None] = []

    def totals(
        self, groups: Sequence[Sequence[torch.Tensor]], inverse_scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Return float64 [G, C]."""
        with torch.no_grad():
            values = [[stored_values(tensor) for tensor in group] for group in groups]
            forms = tuple(tuple(map(_form_of, group)) for group in values)
            addresses = [tensor.data_ptr() for group in values for tensor in group]
            wanted = wanted_columns(layers=False)
            table_GC = self._measure(forms, addresses, inverse_scale, wanted)
        return self._stock.totals(groups, inverse_scale) if table_GC is None else table_GC

    def layers(
        self, tensors: Sequence[torch.Tensor | None], inverse_scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Return float64 [L, C], zeros for None."""
        with torch.no_grad():
            values = [None if tensor is None else stored_values(tensor) for tensor in tensors]
            known = (
                self._layer_forms if len(self._layer_forms) == len(values) else [None] * len(values)
            )
            forms = [
                before if value is None else _form_of(value)
                for value, before in zip(values, known, strict=True)
            ]
            self._layer_forms = forms
            # A gradient that is None at this step alone has an address of 0 in the same tables.
            addresses = [
                0 if value is None else value.data_ptr()
                for value, form in zip(values, forms, strict=True)
                if form is not None
            ]
            groups = tuple(() if form is None else (form,) for form in forms)
            wanted = wanted_columns(layers=True)
            table_LC = self._measure(groups, addresses, inverse_scale, wanted)
        return self._stock.layers(tensors, inverse_scale) if table_LC is None else table_LC

    def digest(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the tensors' bits, modulo 2^48."""
        return self._stock.digest(tensors)

    def _measure(
        self,
        groups: FormsByGroup,
        addresses: list[int],
        inverse_scale: float | torch.Tensor,
        wanted: frozenset[str],
    ) -> torch.Tensor | None:
        """Return float64 [G, C]; None where the kernels cannot measure one of the tensors."""
        with self._on_device():
            tables = self._device_tables(groups)
            if tables is None:
                return None
            if tables.pointers is None or tables.addresses != addresses:
                tables.pointers = send(np.array(addresses, dtype=np.int64), self._device)
                tables.addresses = addresses
            return self._launch(tables, tables.pointers, self._scale(inverse_scale), wanted)

    def _launch(
        self,
        tables: _DeviceTables,
        pointers: torch.Tensor,
        inverse_scale: torch.Tensor,
        wanted: frozenset[str],
    ) -> torch.Tensor:
        launches, chunks, groups = self._launches, len(tables.chunks), len(tables.groups)
        smallest = "abs_min" in wanted
        squares = torch.empty(chunks, dtype=torch.float64, device=self._device)
        counts = torch.empty((chunks, launches.COUNTS), dtype=torch.int32, device=self._device)
        for kind, numbers in enumerate(tables.of_kind):
            if len(numbers):
                launches.launch_measure(
                    pointers, tables.chunks, numbers, squares, counts, kind, smallest
                )
        table_GC = torch.empty(
            (groups, len(GRADIENT_COLUMN_NAMES)), dtype=torch.float64, device=self._device
        )
        if groups:
            launches.launch_fold(squares, counts, tables.groups, inverse_scale, table_GC, smallest)
        return table_GC

    def _device_tables(self, groups: FormsByGroup) -> _DeviceTables | None:
        key = (self._stream(), groups)
        if key not in self._tables:
            if len(self._tables) >= LAYOUTS_KEPT:
                self._tables.clear()
            self._tables[key] = self._sent_tables(groups)
        return self._tables[key]

    def _sent_tables(self, groups: FormsByGroup) -> _DeviceTables | None:
        tables = make_chunk_tables(groups, self._chunk_elements)
        if tables is None:
            return None
        return _DeviceTables(
            chunks=send(tables.chunks, self._device),
            of_kind=tuple(
                send(numbers.astype(np.int32), self._device) for numbers in tables.of_kind
            ),
            groups=send(tables.groups, self._device),
        )

    def _scale(self, inverse_scale: float | torch.Tensor) -> torch.Tensor:
        if isinstance(inverse_scale, torch.Tensor):
            return inverse_scale.to(self._device, torch.float64, non_blocking=True)
        return torch.full((), inverse_scale, dtype=torch.float64, device=self._device)

    def _on_device(self) -> AbstractContextManager[object]:
        """Return a context in which kernels are launched on the gradients' device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        return torch.cuda.current_stream(self._device).cuda_stream


def _form_of(values: torch.Tensor) -> TensorForm:
    return TensorForm(values.dtype, tuple(values.shape), values.stride())
