"""Pieces cover a gradient once, without copying it, whatever its layout."""

import pytest
import torch

from mp_agent.probe.statistics.pieces import pieces
from tests.agent.probe.statistics.gradients import LAYOUTS

SMALL = [name for name, make in LAYOUTS.items() if make(torch.float32).numel() <= 2000]


@pytest.mark.parametrize("limit", [1, 7, 1000, 65_536])
def test_pieces_are_bounded_views_that_hold_every_element_once(
    limit: int, subtests: pytest.Subtests
) -> None:
    for layout in SMALL if limit < 1000 else LAYOUTS:
        with subtests.test(layout):
            assert_hold_every_element_once(LAYOUTS[layout](torch.float32), limit)


def assert_hold_every_element_once(values: torch.Tensor, limit: int) -> None:
    parts = list(pieces(values, limit))
    assert all(1 <= part.numel() <= limit for part in parts)
    assert all(part.data_ptr() >= values.data_ptr() for part in parts)
    assert all(
        part.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() for part in parts
    )
    elements = torch.cat([torch.zeros(0), *(part.reshape(-1) for part in parts)])
    assert torch.equal(elements.sort().values, values.reshape(-1).sort().values)


@pytest.mark.parametrize(
    "layout", ["matrix", "transposed", "transposed_around_one", "channels_last"]
)
def test_memory_without_gaps_is_one_flat_piece(layout: str) -> None:
    (piece,) = pieces(LAYOUTS[layout](torch.float32), 1_000_000)
    assert piece.dim() == 1
    assert piece.is_contiguous()
