"""Statistics of gradients on an accelerator, with stock operations and without waiting for it.

Gradients are copied, batch by batch, into a scratch of R rows of W elements, each piece starting a
row of its own; what is left of its last row is zero. So the number of launches follows the number
of elements, not of tensors; a batch has pieces of one dtype, which one launch copies. Rows are
reduced, then folded into the groups that they belong to, in a fixed order: replicas get equal bits.
Counting what is not zero three times, before and after NaN and then Inf became zero, gives all
counts without a mask. Results stay on the device.
"""

from collections.abc import Sequence

import numpy as np
import torch

from mp_agent.probe.statistics.distribution import distribution_rows
from mp_agent.probe.statistics.packing import (
    Batch,
    Forms,
    PackedLayout,
    PieceForm,
    RawRows,
    RowStatistics,
    by_name,
    make_packed_layout,
)
from mp_agent.probe.statistics.pieces import (
    DIGEST_MASK,
    bounded_tensor,
    in_order,
    pieces,
    put_in_order,
    send,
    stored_values,
    wanted_columns,
)

ROW_ELEMENTS = 8192
SCRATCH_ROWS = 512
"""16 MiB of float32, which later passes find in the cache of a data-centre GPU, 32 of float64."""

WIDE_SHARE = 2
"""Rows are widened to float64 in so many parts: half of them need as much memory as all did."""

LAYOUTS_KEPT = 8
"""Totals and layers have one each; more where the set of gradients alternates between steps."""


class PackedStatistics:
    """Row-wise statistics on any device; implements `GradientStatistics`.

    Only a layout of gradients that it has not seen lately makes it send anything to the device,
    and that without waiting.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        row_elements: int = ROW_ELEMENTS,
        scratch_rows: int = SCRATCH_ROWS,
    ) -> None:
        self._device = device
        self._scratch_shape = (scratch_rows, row_elements)
        self._scratches: dict[torch.dtype, torch.Tensor] = {}
        self._layouts: dict[tuple[torch.dtype, Forms], PackedLayout] = {}
        self._layer_forms: Forms = ()

    @torch.no_grad()
    def totals(
        self, groups: Sequence[Sequence[torch.Tensor]], inverse_scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Return float64 [G, C]."""
        pieces_by_group = [self._pieces(group) for group in groups]
        flat = [piece for group in pieces_by_group for piece in group]
        forms = tuple(map(_forms, pieces_by_group))
        return self._table(forms, flat, inverse_scale, wanted_columns(layers=False))

    @torch.no_grad()
    def layers(
        self, tensors: Sequence[torch.Tensor | None], inverse_scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Return float64 [L, C], zeros for None."""
        found = [None if tensor is None else self._pieces((tensor,)) for tensor in tensors]
        known = self._layer_forms if len(self._layer_forms) == len(found) else ((),) * len(found)
        # What is None at this step alone keeps its place, so that the layout stays.
        forms = tuple(
            before if pieces is None else _forms(pieces)
            for pieces, before in zip(found, known, strict=True)
        )
        self._layer_forms = forms
        flat = [
            piece
            for pieces, form in zip(found, forms, strict=True)
            for piece in ([None] * len(form) if pieces is None else pieces)
        ]
        return self._table(forms, flat, inverse_scale, wanted_columns(layers=True))

    def distribution(
        self,
        tensors: Sequence[torch.Tensor | None],
        inverse_scale: float | torch.Tensor,
        loss_scale: float | torch.Tensor | None,
    ) -> torch.Tensor:
        """Return float64 [L, C] of `DISTRIBUTION`."""
        return distribution_rows(tensors, inverse_scale, loss_scale, self._device)

    @torch.no_grad()
    def digests(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of each tensor's bits, modulo 2^32; what pads a row adds nothing."""
        values = [stored_values(tensor) for tensor in tensors]
        total_N = torch.zeros(len(values), dtype=torch.float64, device=self._device)
        for dtype in (torch.float32, torch.float64):
            # Of the other kind none has a piece, so that its digest here is 0.
            own = [
                self._pieces((value,)) if (value.dtype is torch.float64) is _is_wide(dtype) else []
                for value in values
            ]
            if any(own):
                total_N += self._digests(own, dtype)
        return total_N

    def _digests(
        self, pieces_by_tensor: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype
    ) -> torch.Tensor:
        flat = [piece for found in pieces_by_tensor for piece in found]
        layout = self._layout(dtype, tuple(map(_forms, pieces_by_tensor)))
        sums = []
        for batch in layout.batches:
            bits_RW = self._filled(batch, flat, dtype).view(torch.int32)
            for part in self._parts(batch.rows):
                sums.append(bits_RW[part].sum(dim=1, dtype=torch.int64))
        digests_R = torch.cat(sums).bitwise_and_(DIGEST_MASK)
        for level in layout.fold_levels:
            digests_R = torch.nn.functional.pad(digests_R, (0, 1))[level].sum(dim=1)
        return digests_R.bitwise_and_(DIGEST_MASK).double()

    def _table(
        self,
        forms: Forms,
        flat: Sequence[torch.Tensor | None],
        inverse_scale: float | torch.Tensor,
        wanted: frozenset[str],
    ) -> torch.Tensor:
        """Return float64 [G, C] of pieces of these forms; one that is None has no elements."""
        with torch.autocast(self._device.type, enabled=False):
            any_double = any(form.dtype is torch.float64 for group in forms for form in group)
            dtype = torch.float64 if any_double else torch.float32
            layout = self._layout(dtype, forms)
            rows = self._row_statistics(flat, layout, dtype, wanted)
            if isinstance(inverse_scale, torch.Tensor):
                inverse_scale = inverse_scale.double()
            elements_G = self._elements(forms, flat, layout)
            results = by_name(rows.folded(layout), elements_G)
            return torch.stack(in_order(results, wanted, inverse_scale, bounded_tensor), dim=1)

    def _pieces(self, group: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        limit = self._scratch_shape[0] * self._scratch_shape[1]
        return [piece for grad in group for piece in pieces(stored_values(grad), limit)]

    def _elements(
        self, forms: Forms, flat: Sequence[torch.Tensor | None], layout: PackedLayout
    ) -> torch.Tensor:
        """Return float64 [G], those of the pieces that are there."""
        if all(piece is not None for piece in flat):
            return layout.elements_G
        pieces = iter(flat)
        counts = [
            float(sum(0 if (piece := next(pieces)) is None else piece.numel() for _ in group))
            for group in forms
        ]
        return send(np.array(counts, dtype=np.float64), self._device)

    def _layout(self, dtype: torch.dtype, forms: Forms) -> PackedLayout:
        layout = self._layouts.get((dtype, forms))
        if layout is None:
            if len(self._layouts) >= LAYOUTS_KEPT:
                self._layouts.clear()
            layout = make_packed_layout(forms, self._scratch(dtype))
            self._layouts[(dtype, forms)] = layout
        return layout

    def _row_statistics(
        self,
        flat: Sequence[torch.Tensor | None],
        layout: PackedLayout,
        dtype: torch.dtype,
        wanted: frozenset[str],
    ) -> RowStatistics:
        raw = RawRows.empty(layout.rows, dtype, self._device)
        start = 0
        for batch in layout.batches:
            self._reduce(batch, flat, raw.part(slice(start, start + batch.rows)), wanted)
            start += batch.rows
        return raw.statistics()

    def _reduce(
        self,
        batch: Batch,
        flat: Sequence[torch.Tensor | None],
        out: RawRows,
        wanted: frozenset[str],
    ) -> None:
        scratch_RW = self._filled(batch, flat, out.peaks_R.dtype)
        _norm(scratch_RW, 0, out.nonzero_R)
        _norm(scratch_RW.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=torch.inf), 0, out.numbers_R)
        _norm(scratch_RW.nan_to_num_(posinf=0.0, neginf=0.0), 0, out.finite_R)
        _norm(scratch_RW, torch.inf, out.peaks_R)
        for part in self._parts(batch.rows):
            wide_RW = self._widened(scratch_RW[part], torch.float64)
            _norm(wide_RW, 2, out.norms_R[part])
            if "abs_sum" in wanted:
                _norm(wide_RW, 1, out.abs_sums_R[part])
        if "abs_min" in wanted:
            ordered_RW = put_in_order(scratch_RW, scratch_RW.view(out.smallest_R.dtype))
            torch.amin(ordered_RW, dim=1, out=out.smallest_R)

    def _filled(
        self, batch: Batch, flat: Sequence[torch.Tensor | None], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the rows of the scratch, with the pieces of a batch in them, zeros for None."""
        targets, pieces, empty = [], [], list(batch.tails)
        for target, number in zip(batch.targets, batch.pieces, strict=True):
            if (piece := flat[number]) is None:
                empty.append(target)
            else:
                targets.append(target)
                pieces.append(piece)
        if targets:
            torch._foreach_copy_(targets, pieces)
        if empty:
            torch._foreach_zero_(empty)
        return self._scratch(dtype)[: batch.rows]

    def _scratch(self, dtype: torch.dtype) -> torch.Tensor:
        return self._memory(dtype, self._scratch_shape)

    def _parts(self, rows: int) -> list[slice]:
        """Return rows in parts that can be widened."""
        limit = -(-self._scratch_shape[0] // WIDE_SHARE)
        return [slice(at, min(at + limit, rows)) for at in range(0, rows, limit)]

    def _widened(self, rows_RW: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of 64 bits; of 32 bits a copy in memory that the next ones overwrite."""
        if rows_RW.itemsize == dtype.itemsize:
            return rows_RW
        rows, width = self._scratch_shape
        wide_RW = self._memory(torch.uint64, (-(-rows // WIDE_SHARE), width)).view(dtype)
        return wide_RW[: len(rows_RW)].copy_(rows_RW)

    def _memory(self, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
        if dtype not in self._scratches:
            with torch.inference_mode(False):  # else training outside it could not write to it
                self._scratches[dtype] = torch.empty(shape, dtype=dtype, device=self._device)
        return self._scratches[dtype]


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype is torch.float64


def _forms(pieces: Sequence[torch.Tensor]) -> tuple[PieceForm, ...]:
    return tuple(PieceForm(piece.dtype, piece.shape) for piece in pieces)


def _norm(matrix_RW: torch.Tensor, order: float, out_R: torch.Tensor) -> None:
    torch.linalg.vector_norm(matrix_RW, order, dim=1, out=out_R)
