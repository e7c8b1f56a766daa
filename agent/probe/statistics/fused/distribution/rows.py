"""Rows of `DISTRIBUTION` by kernels that read each gradient once."""

from math import nan
from types import ModuleType

import torch

from mp_agent.probe.statistics.fused.distribution.boundaries import (
    BOUNDARIES,
    SUMS,
    boundary_table,
    span_table,
)
from mp_agent.probe.statistics.fused.tables import DeviceTables, scalar_on
from mp_agent.probe.statistics.sending import send
from mp_agent.records.columns import DISTRIBUTION


class DistributionRows:
    """Measures layers: a launch finds edges, one per dtype counts, and one folds.

    launches: the module of that name, which needs Triton.
    """

    def __init__(self, device: torch.device, launches: ModuleType) -> None:
        self._device = device
        self._launches = launches
        self._boundaries = send(boundary_table(), device)
        self._spans = send(span_table(), device)

    def measure(
        self,
        tables: DeviceTables,
        inverse_scale: float | torch.Tensor,
        loss_scale: float | torch.Tensor | None,
    ) -> torch.Tensor:
        """Return float64 [L, C], a row per group of the tables."""
        launches, device = self._launches, self._device
        inverse = scalar_on(device, inverse_scale)
        scale = scalar_on(device, nan if loss_scale is None else loss_scale)
        chunks, layers = len(tables.chunks), len(tables.groups)
        edges = torch.empty(BOUNDARIES, dtype=torch.int32, device=device)
        counts = torch.empty((chunks, BOUNDARIES), dtype=torch.int32, device=device)
        sums = torch.empty((chunks, SUMS), dtype=torch.float64, device=device)
        rows_LC = torch.empty((layers, len(DISTRIBUTION.names)), dtype=torch.float64, device=device)
        launches.launch_edges(self._boundaries, inverse, scale, edges)
        for kind, numbers in enumerate(tables.of_kind):
            if len(numbers):
                launches.launch_count(
                    tables.pointers, tables.chunks, numbers, edges, counts, sums, kind
                )
        if layers:
            launches.launch_fold(counts, sums, tables.groups, self._spans, inverse, scale, rows_LC)
        return rows_LC
