"""Statistics of gradients in host memory, in chunks that stay in the processor's cache."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
import torch

from mp_agent.probe.statistics.distribution import distribution_rows
from mp_agent.probe.statistics.host_chunk import (
    CHUNK_ELEMENTS,
    PACK_ELEMENTS,
    TALLY_COLUMNS,
    ChunkMeter,
    RowMeter,
    Tally,
)
from mp_agent.probe.statistics.pieces import (
    DIGEST_MASK,
    bits_of,
    bounded_array,
    in_order,
    pieces,
    stored_values,
    wanted_columns,
)
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES

SMALL_ELEMENTS = 8 * 1024
"""Tensors up to this size share a pack: below it the calls cost more than the copy."""

ROWS_AT_LEAST = 3
"""So many tensors of one shape are measured as rows."""


class CpuStatistics:
    """Chunk-wise statistics with float64 totals; implements `GradientStatistics`."""

    def __init__(self) -> None:
        self._meters: dict[torch.dtype, ChunkMeter] = {}
        self._packs: dict[torch.dtype, torch.Tensor] = {}
        self._row_meters: dict[torch.dtype, RowMeter] = {}

    def totals(
        self, groups: Sequence[Sequence[torch.Tensor]], inverse_scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Return float64 [G, C]; small tensors of a group and dtype are measured together."""
        with _plain_arithmetic():
            wanted = wanted_columns(layers=False)
            tallies = [self._group_tally(group, wanted) for group in groups]
            return _table(tallies, wanted, inverse_scale)

    def layers(
        self, tensors: Sequence[torch.Tensor | None], inverse_scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Return float64 [L, C], zeros for None; small tensors of a shape are measured together."""
        with _plain_arithmetic():
            wanted = wanted_columns(layers=True)
            return _table(self._tensor_tallies(tensors, wanted), wanted, inverse_scale)

    def distribution(
        self,
        tensors: Sequence[torch.Tensor | None],
        inverse_scale: float | torch.Tensor,
        loss_scale: float | torch.Tensor | None,
    ) -> torch.Tensor:
        """Return float64 [L, C] of `DISTRIBUTION`, with stock operations."""
        return distribution_rows(tensors, inverse_scale, loss_scale, torch.device("cpu"))

    @torch.no_grad()
    def digests(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of each tensor's bits, modulo 2^32."""
        found = []
        for tensor in tensors:
            total = 0
            for piece in pieces(stored_values(tensor), CHUNK_ELEMENTS):
                total += int(bits_of(piece).sum(dtype=torch.int64).item())
            found.append(float(total & DIGEST_MASK))
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    def _tensor_tallies(
        self, gradients: Sequence[torch.Tensor | None], wanted: frozenset[str]
    ) -> list[Tally]:
        values = [None if gradient is None else stored_values(gradient) for gradient in gradients]
        alike: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
        for number, tensor in enumerate(values):
            if tensor is None or not 0 < tensor.numel() <= SMALL_ELEMENTS:
                continue
            if tensor.is_contiguous() and tensor.dim():
                alike.setdefault((tensor.dtype, tensor.shape), []).append(number)
        tallies: dict[int, Tally] = {}
        for (dtype, _), numbers in alike.items():
            if len(numbers) >= ROWS_AT_LEAST:
                tallies |= self._row_tallies(dtype, numbers, values, wanted)
        return [
            tallies.get(number) or self._tensor_tally(tensor, wanted)
            for number, tensor in enumerate(values)
        ]

    def _row_tallies(
        self,
        dtype: torch.dtype,
        numbers: Sequence[int],
        values: Sequence[torch.Tensor | None],
        wanted: frozenset[str],
    ) -> dict[int, Tally]:
        """Return by number the statistics of those tensors that were measured as rows."""
        tensors = [tensor for number in numbers if (tensor := values[number]) is not None]
        if dtype not in self._row_meters:
            self._row_meters[dtype] = RowMeter(dtype)
        measured = self._row_meters[dtype].measure(tensors, wanted)
        return {numbers[place]: tally for place, tally in measured if tally is not None}

    def _tensor_tally(self, values: torch.Tensor | None, wanted: frozenset[str]) -> Tally:
        tally = Tally(wanted)
        if values is not None:
            self._add(values, tally)
        return tally

    def _group_tally(self, gradients: Sequence[torch.Tensor], wanted: frozenset[str]) -> Tally:
        tally = Tally(wanted)
        small: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            values = stored_values(gradient)
            if 0 < values.numel() <= SMALL_ELEMENTS and values.is_contiguous():
                flat = values if values.dim() == 1 else values.ravel()
                small.setdefault(values.dtype, []).append(flat)
            else:
                self._add(values, tally)
        for dtype, tensors in small.items():
            self._meter(dtype).add(self._packed(dtype, tensors), tally)
        return tally

    def _packed(
        self, dtype: torch.dtype, tensors: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Yield the elements of one-dimensional tensors, many tensors to a pack."""
        if (pack := self._packs.get(dtype)) is None:
            with torch.inference_mode(False):  # else training outside it could not write to it
                pack = self._packs[dtype] = torch.empty(PACK_ELEMENTS, dtype=dtype, device="cpu")
        batch: list[torch.Tensor] = []
        filled = 0
        for tensor in tensors:
            if filled + tensor.numel() > PACK_ELEMENTS:
                yield torch.cat(batch, out=pack[:filled])
                batch, filled = [], 0
            batch.append(tensor)
            filled += tensor.numel()
        if filled:
            yield torch.cat(batch, out=pack[:filled])

    def _add(self, values: torch.Tensor, tally: Tally) -> None:
        self._meter(values.dtype).add(pieces(values, CHUNK_ELEMENTS), tally)

    def _meter(self, dtype: torch.dtype) -> ChunkMeter:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        if wide not in self._meters:
            self._meters[wide] = ChunkMeter(wide)
        return self._meters[wide]


def _plain_arithmetic() -> AbstractContextManager[object]:
    """Return a context without autograd and autocast; none is needed where both are off already."""
    if not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
        return nullcontext()
    context = ExitStack()
    context.enter_context(torch.no_grad())
    context.enter_context(torch.autocast("cpu", enabled=False))
    return context


def _table(
    tallies: Sequence[Tally], wanted: frozenset[str], inverse_scale: float | torch.Tensor
) -> torch.Tensor:
    """Return one row per tally; by way of numpy, which takes in Python's numbers faster."""
    inverse = float(inverse_scale)
    if not tallies:
        return torch.empty((0, len(GRADIENT_COLUMN_NAMES)), dtype=torch.float64)
    values = np.array([tally.values() for tally in tallies], dtype=np.float64).T
    results = dict(zip(TALLY_COLUMNS, values, strict=True))
    with np.errstate(over="ignore", under="ignore"):
        columns = in_order(results, wanted, inverse, bounded_array)
    return torch.from_numpy(np.stack(columns, axis=1))
