"""Where pieces of gradients lie in the scratch, and how its rows fold into groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FOLD_WIDTH = 32
"""Rows folded at a time; a group of 32^n rows is folded in n levels."""

Shapes = tuple[tuple[torch.Size, ...], ...]
"""The shapes of the pieces of each group."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces that are in the scratch at the same time."""

    first_piece: int
    rows: int
    targets: tuple[torch.Tensor, ...]
    """Views of the scratch with the shapes of the pieces; no two share a row."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How pieces of certain shapes are measured with a certain scratch."""

    batches: tuple[Batch, ...]
    fold_levels: tuple[torch.Tensor, ...]
    """int64 [blocks, FOLD_WIDTH] on the device: which rows of the level before each block folds.

    One past the last row stands for no row. Every group has one block in the last level.
    """
    elements_G: torch.Tensor
    """float64 on the device."""

    @property
    def rows(self) -> int:
        """Rows of all batches together."""
        return sum(batch.rows for batch in self.batches)


def make_packed_layout(shapes: Shapes, scratch_RW: torch.Tensor) -> PackedLayout:
    """Return the layout of pieces in `scratch_RW`, each of which must fit into it.

    Sends the fold to the scratch's device without waiting.
    """
    width = scratch_RW.shape[1]
    rows_per_group = [sum(-(-shape.numel() // width) for shape in group) for group in shapes]
    elements = [float(sum(shape.numel() for shape in group)) for group in shapes]
    return PackedLayout(
        batches=_batches([shape for group in shapes for shape in group], scratch_RW),
        fold_levels=tuple(
            _send(torch.tensor(level, dtype=torch.int64, device="cpu"), scratch_RW.device).view(
                -1, FOLD_WIDTH
            )
            for level in fold_levels(rows_per_group)
        ),
        elements_G=_send(
            torch.tensor(elements, dtype=torch.float64, device="cpu"), scratch_RW.device
        ),
    )


def fold_levels(rows_per_group: Sequence[int]) -> list[list[list[int]]]:
    """Return, level by level, the blocks of row numbers that fold into one row of the next."""
    levels = []
    counts = list(rows_per_group)
    while True:
        levels.append(_blocks(counts))
        counts = [max(1, -(-count // FOLD_WIDTH)) for count in counts]
        if max(counts, default=1) == 1:
            return levels


def _blocks(counts: Sequence[int]) -> list[list[int]]:
    """Return blocks of the consecutive rows of each group, at least one block per group."""
    no_row = sum(counts)
    blocks = []
    start = 0
    for count in counts:
        rows = list(range(start, start + count))
        rows += [no_row] * (-count % FOLD_WIDTH if count else FOLD_WIDTH)
        blocks += [rows[at : at + FOLD_WIDTH] for at in range(0, len(rows), FOLD_WIDTH)]
        start += count
    return blocks


def _batches(shapes: Sequence[torch.Size], scratch_RW: torch.Tensor) -> tuple[Batch, ...]:
    """Lay pieces row after row, beginning a new batch when the scratch is full."""
    scratch_rows, width = scratch_RW.shape
    flat = scratch_RW.view(-1)
    batches = []
    targets: list[torch.Tensor] = []
    filled = 0
    for number, shape in enumerate(shapes):
        rows = -(-shape.numel() // width)
        if filled + rows > scratch_rows:
            batches.append(Batch(number - len(targets), filled, tuple(targets)))
            targets, filled = [], 0
        start = filled * width
        targets.append(flat[start : start + shape.numel()].view(shape))
        filled += rows
    if targets:
        batches.append(Batch(len(shapes) - len(targets), filled, tuple(targets)))
    return tuple(batches)


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on `device`; from pinned memory, since other copies wait for the device."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
