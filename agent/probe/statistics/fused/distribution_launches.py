"""Launches the kernels; what is compiled depends on nothing but the kind of elements."""

import torch

from mp_agent.probe.statistics.distribution import (
    BOUNDARIES,
    COLUMNS,
    SUMS,
    boundary_table,
    span_table,
)
from mp_agent.probe.statistics.fused import distribution_kernels as kernels
from mp_agent.probe.statistics.fused.kernels import CHUNK_FIELDS, KINDS
from mp_agent.records.columns import DISTRIBUTION

__all__ = ["COLUMNS", "compile_all", "launch_count", "launch_edges", "launch_fold", "launch_once"]

_EDGES_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
_FOLD_OPTIONS = {
    "B": kernels.FOLD_BLOCK,
    "num_warps": kernels.FOLD_WARPS,
    "enable_fp_fusion": False,
}


def _count_options(kind: int) -> dict[str, int | bool]:
    return {
        "KIND": kind,
        "R": kernels.ROWS,
        "num_warps": kernels.WARPS,
        "enable_fp_fusion": False,
    }


def launch_edges(
    boundaries: torch.Tensor,
    inverse_scale: torch.Tensor,
    loss_scale: torch.Tensor,
    edges: torch.Tensor,
) -> None:
    """Launch `find_edges`."""
    kernels.find_edges[(1,)](boundaries, inverse_scale, loss_scale, edges, **_EDGES_OPTIONS)


def launch_count(
    pointers: torch.Tensor,
    chunks: torch.Tensor,
    chunk_numbers: torch.Tensor,
    edges: torch.Tensor,
    counts: torch.Tensor,
    sums: torch.Tensor,
    kind: int,
) -> None:
    """Launch `count_chunks` for all chunks of one kind."""
    kernels.count_chunks[(len(chunk_numbers),)](
        pointers, chunks, chunk_numbers, edges, counts, sums, **_count_options(kind)
    )


def launch_fold(
    counts: torch.Tensor,
    sums: torch.Tensor,
    layers: torch.Tensor,
    spans: torch.Tensor,
    inverse_scale: torch.Tensor,
    loss_scale: torch.Tensor,
    table: torch.Tensor,
) -> None:
    """Launch `fold_layers` for all layers."""
    kernels.fold_layers[(len(layers),)](
        counts, sums, layers, spans, inverse_scale, loss_scale, table, **_FOLD_OPTIONS
    )


_EDGES_TYPES = (torch.float64, torch.float64, torch.float64, torch.int32)
_COUNT_TYPES = (
    *(torch.int64, torch.int64, torch.int32),
    *(torch.int32, torch.int32, torch.float64),
)
_FOLD_TYPES = (
    *(torch.int32, torch.float64, torch.int64, torch.int32),
    *(torch.float64, torch.float64, torch.float64),
)


def compile_all() -> None:
    """Compile every variant for the current device, of which only the model is asked."""
    kernels.find_edges.warmup(*_EDGES_TYPES, grid=(1,), **_EDGES_OPTIONS)
    for kind in KINDS:
        kernels.count_chunks.warmup(*_COUNT_TYPES, grid=(1,), **_count_options(kind))
    kernels.fold_layers.warmup(*_FOLD_TYPES, grid=(1,), **_FOLD_OPTIONS)


def launch_once(device: torch.device) -> None:
    """Launch every variant on no elements, which compiles and loads its kernel if needed."""
    table = torch.zeros(boundary_table().shape, dtype=torch.float64, device=device)
    spans = torch.zeros(span_table().shape, dtype=torch.int32, device=device)
    scale = torch.zeros((), dtype=torch.float64, device=device)
    edges = torch.zeros(BOUNDARIES, dtype=torch.int32, device=device)
    pointers = torch.zeros(1, dtype=torch.int64, device=device)
    chunks = torch.zeros((1, CHUNK_FIELDS), dtype=torch.int64, device=device)
    numbers = torch.zeros(1, dtype=torch.int32, device=device)
    counts = torch.zeros((1, BOUNDARIES), dtype=torch.int32, device=device)
    sums = torch.zeros((1, SUMS), dtype=torch.float64, device=device)
    layers = torch.zeros((1, 2), dtype=torch.int64, device=device)
    rows = torch.zeros((1, len(DISTRIBUTION.names)), dtype=torch.float64, device=device)
    launch_edges(table, scale, scale, edges)
    for kind in KINDS:
        launch_count(pointers, chunks, numbers, edges, counts, sums, kind)
    launch_fold(counts, sums, layers, spans, scale, scale, rows)
