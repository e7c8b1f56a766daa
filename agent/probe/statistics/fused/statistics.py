"""Statistics of gradients by the fused kernels: one launch per dtype, and one that folds."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import NamedTuple

import torch

from mp_agent.probe.statistics.distribution import distribution_rows
from mp_agent.probe.statistics.fused.chunks import (
    CHUNK_ELEMENTS,
    DeviceTables,
    DistributionRows,
    FormsByGroup,
    KeptTables,
    TensorForm,
    scalar_on,
)
from mp_agent.probe.statistics.packed import PackedStatistics
from mp_agent.probe.statistics.pieces import stored_values, wanted_columns
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES


class FusedStatistics:
    """Statistics by kernels that read each gradient once; implements `GradientStatistics`.

    What the kernels cannot measure (float64, 8 bits, very many runs) is measured with stock
    operations, together with all that is asked for in the same call. Buffers are not kept from
    call to call, and tables are kept per stream.
    """

    def __init__(
        self,
        device: torch.device,
        launches: ModuleType,
        distribution_launches: ModuleType | None = None,
        *,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        """distribution_launches: None leaves `distribution` to stock operations."""
        self._device = device
        self._launches = launches
        self._distribution = (
            None
            if distribution_launches is None
            else DistributionRows(device, distribution_launches)
        )
        self._stock = PackedStatistics(device)
        self._tables = KeptTables(device, chunk_elements)
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

    @torch.no_grad()
    def layers(
        self, tensors: Sequence[torch.Tensor | None], inverse_scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Return float64 [L, C], zeros for None."""
        layers = self._by_layer(tensors)
        table_LC = self._measure(
            layers.groups, layers.addresses, inverse_scale, wanted_columns(layers=True)
        )
        return self._stock.layers(tensors, inverse_scale) if table_LC is None else table_LC

    @torch.no_grad()
    def distribution(
        self,
        tensors: Sequence[torch.Tensor | None],
        inverse_scale: float | torch.Tensor,
        loss_scale: float | torch.Tensor | None,
    ) -> torch.Tensor:
        """Return float64 [L, C] of `DISTRIBUTION`."""
        if self._distribution is not None:
            layers = self._by_layer(tensors)
            with self._on_device():
                tables = self._tables.ready(layers.groups, layers.addresses)
                if tables is not None:
                    return self._distribution.measure(tables, inverse_scale, loss_scale)
        return distribution_rows(tensors, inverse_scale, loss_scale, self._device)

    def digests(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of each tensor's bits, modulo 2^32."""
        return self._stock.digests(tensors)

    def _by_layer(self, tensors: Sequence[torch.Tensor | None]) -> "_Layers":
        values = [None if tensor is None else stored_values(tensor) for tensor in tensors]
        known = self._layer_forms if len(self._layer_forms) == len(values) else [None] * len(values)
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
        return _Layers(values, tuple(() if form is None else (form,) for form in forms), addresses)

    def _measure(
        self,
        groups: FormsByGroup,
        addresses: list[int],
        inverse_scale: float | torch.Tensor,
        wanted: frozenset[str],
    ) -> torch.Tensor | None:
        """Return float64 [G, C]; None where the kernels cannot measure one of the tensors."""
        with self._on_device():
            tables = self._tables.ready(groups, addresses)
            if tables is None:
                return None
            return self._launch(tables, scalar_on(self._device, inverse_scale), wanted)

    def _launch(
        self,
        tables: DeviceTables,
        inverse_scale: torch.Tensor,
        wanted: frozenset[str],
    ) -> torch.Tensor:
        launches, chunks, groups = self._launches, len(tables.chunks), len(tables.groups)
        abs_sum = "abs_sum" in wanted
        sums = torch.empty((chunks, launches.SUMS), dtype=torch.float64, device=self._device)
        counts = torch.empty((chunks, launches.COUNTS), dtype=torch.int32, device=self._device)
        for kind, numbers in enumerate(tables.of_kind):
            if len(numbers):
                launches.launch_measure(
                    tables.pointers, tables.chunks, numbers, sums, counts, kind, abs_sum
                )
        table_GC = torch.empty(
            (groups, len(GRADIENT_COLUMN_NAMES)), dtype=torch.float64, device=self._device
        )
        if groups:
            launches.launch_fold(sums, counts, tables.groups, inverse_scale, table_GC, abs_sum)
        return table_GC

    def _on_device(self) -> AbstractContextManager[object]:
        """Return a context in which kernels are launched on the gradients' device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


class _Layers(NamedTuple):
    """One tensor per group; `values` may be all that keeps the memory at these addresses."""

    values: list[torch.Tensor | None]
    groups: FormsByGroup
    addresses: list[int]


def _form_of(values: torch.Tensor) -> TensorForm:
    return TensorForm(values.dtype, tuple(values.shape), values.stride())
