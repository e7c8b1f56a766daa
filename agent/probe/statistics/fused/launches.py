"""Launches the kernels; what is compiled depends on nothing but the few constants named here."""

import torch

from mp_agent.probe.statistics.fused import kernels
from mp_agent.probe.statistics.fused.kernels import COUNTS, SUMS
from mp_agent.probe.statistics.fused.kernels import FOLDED_COLUMNS as COLUMNS
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES

__all__ = [
    "COLUMNS",
    "COUNTS",
    "SUMS",
    "compile_all",
    "launch_fold",
    "launch_measure",
    "launch_once",
]


def _measure_options(kind: int, abs_sum: bool) -> dict[str, int | bool]:
    return {
        "KIND": kind,
        "ABS_SUM": abs_sum,
        "R": kernels.ROWS,
        "num_warps": kernels.WARPS,
        "enable_fp_fusion": False,
    }


def _fold_options(abs_sum: bool) -> dict[str, int | bool]:
    return {
        "ABS_SUM": abs_sum,
        "B": kernels.FOLD_BLOCK,
        "num_warps": kernels.FOLD_WARPS,
        "enable_fp_fusion": False,
    }


def launch_measure(
    pointers: torch.Tensor,
    chunks: torch.Tensor,
    chunk_numbers: torch.Tensor,
    sums: torch.Tensor,
    counts: torch.Tensor,
    kind: int,
    abs_sum: bool,
) -> None:
    """Launch `measure_chunks` for all chunks of one kind."""
    kernels.measure_chunks[(len(chunk_numbers),)](
        pointers, chunks, chunk_numbers, sums, counts, **_measure_options(kind, abs_sum)
    )


def launch_fold(
    sums: torch.Tensor,
    counts: torch.Tensor,
    groups: torch.Tensor,
    inverse_scale: torch.Tensor,
    table: torch.Tensor,
    abs_sum: bool,
) -> None:
    """Launch `fold_groups` for all groups."""
    kernels.fold_groups[(len(groups),)](
        sums, counts, groups, inverse_scale, table, **_fold_options(abs_sum)
    )


_MEASURE_TYPES = (torch.int64, torch.int64, torch.int32, torch.float64, torch.int32)
_FOLD_TYPES = (torch.float64, torch.int32, torch.int64, torch.float64, torch.float64)


def compile_all() -> None:
    """Compile every variant for the current device, of which only the model is asked."""
    for abs_sum in (False, True):
        for kind in kernels.KINDS:
            options = _measure_options(kind, abs_sum)
            kernels.measure_chunks.warmup(*_MEASURE_TYPES, grid=(1,), **options)
        kernels.fold_groups.warmup(*_FOLD_TYPES, grid=(1,), **_fold_options(abs_sum))


def launch_once(device: torch.device) -> None:
    """Launch every variant on no elements, which compiles and loads its kernel if needed."""
    measured = [torch.zeros(16, dtype=dtype, device=device) for dtype in _MEASURE_TYPES]
    pointers, chunks, chunk_numbers, sums, counts = measured
    groups = torch.zeros((1, 2), dtype=torch.int64, device=device)
    inverse_scale = torch.zeros((), dtype=torch.float64, device=device)
    table = torch.zeros((1, len(GRADIENT_COLUMN_NAMES)), dtype=torch.float64, device=device)
    for abs_sum in (False, True):
        for kind in kernels.KINDS:
            launch_measure(pointers, chunks, chunk_numbers[:1], sums, counts, kind, abs_sum)
        launch_fold(sums, counts, groups, inverse_scale, table, abs_sum)
