"""Statistics of gradients in host memory, in chunks that stay in the processor's cache."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
import torch

from mp_agent.probe.statistics.chunk import CHUNK_ELEMENTS, TALLY_COLUMNS, ChunkMeter, Tally
from mp_agent.probe.statistics.digest import DIGEST_BITS, DIGEST_MASK, digest_dtype
from mp_agent.probe.statistics.pieces import pieces, stored_values
from mp_agent.probe.statistics.table import bounded_array, in_order, wanted_columns
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES

PACK_ELEMENTS = 32 * 1024 - 1
"""Below 32 Ki elements torch does not split an operation: no waiting for other threads to wake."""

SMALL_ELEMENTS = 8 * 1024
"""Tensors up to this size share a pack: below it the calls cost more than the copy."""


class CpuStatistics:
    """Chunk-wise statistics with float64 totals; implements `GradientStatistics`."""

    def __init__(self) -> None:
        self._meters: dict[torch.dtype, ChunkMeter] = {}
        self._packs: dict[torch.dtype, torch.Tensor] = {}

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
        """Return float64 [L, C], zeros for None."""
        with _plain_arithmetic():
            wanted = wanted_columns(layers=True)
            tallies = [self._tensor_tally(tensor, wanted) for tensor in tensors]
            return _table(tallies, wanted, inverse_scale)

    @torch.no_grad()
    def digest(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the tensors' bits, modulo 2^48."""
        values = [stored_values(tensor) for tensor in tensors]
        wide = digest_dtype(values)
        total = 0
        for tensor in values:
            for piece in pieces(tensor, CHUNK_ELEMENTS):
                bits = piece.to(wide).view(DIGEST_BITS[wide])
                total += int(bits.sum(dtype=torch.int64).item())
        return torch.tensor(total & DIGEST_MASK, dtype=torch.float64, device="cpu")

    def _tensor_tally(self, gradient: torch.Tensor | None, wanted: frozenset[str]) -> Tally:
        tally = Tally(wanted)
        if gradient is not None:
            self._add(stored_values(gradient), tally)
        return tally

    def _group_tally(self, gradients: Sequence[torch.Tensor], wanted: frozenset[str]) -> Tally:
        tally = Tally(wanted)
        small: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            values = stored_values(gradient)
            if values.numel() <= SMALL_ELEMENTS and values.is_contiguous():
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
        pack = self._pack(dtype)
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

    def _pack(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._packs:
            with torch.inference_mode(False):  # else training outside it could not write to it
                self._packs[dtype] = torch.empty(PACK_ELEMENTS, dtype=dtype, device="cpu")
        return self._packs[dtype]

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
