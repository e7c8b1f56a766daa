"""Every row of the scratch belongs to one piece, and every row is folded into its own group."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_agent.probe.statistics.packing import fold_levels, make_packed_layout

ROWS, WIDTH = 8, 16


@settings(deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=20))
def test_folding_brings_every_row_into_its_own_group_once(rows_per_group: list[int]) -> None:
    partials = [{number} for number in range(sum(rows_per_group))]
    for level in fold_levels(rows_per_group):
        rows = [*partials, set[int]()]
        assert all(len(block) == len(level[0]) for block in level)
        folded = [[rows[number] for number in block] for block in level]
        partials = [set().union(*block) for block in folded]
        assert [sum(map(len, block)) for block in folded] == [len(part) for part in partials]
    starts = [sum(rows_per_group[:group]) for group in range(len(rows_per_group))]
    assert partials == [
        set(range(start, start + count))
        for start, count in zip(starts, rows_per_group, strict=True)
    ]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, ROWS * WIDTH), max_size=6), max_size=5))
def test_no_two_pieces_of_a_batch_share_a_row(sizes: list[list[int]]) -> None:
    scratch = torch.zeros(ROWS, WIDTH)
    shapes = tuple(tuple(torch.Size([size]) for size in group) for group in sizes)
    layout = make_packed_layout(shapes, scratch)
    assert layout.elements_G.tolist() == [float(sum(group)) for group in sizes]
    numbers = [size for group in sizes for size in group]
    for batch in layout.batches:
        scratch.zero_()
        for number, target in enumerate(batch.targets, start=1):
            assert target.numel() == numbers[batch.first_piece + number - 1]
            target.add_(number)
        filled_rows = scratch[: batch.rows]
        assert (filled_rows.max(dim=1).values == filled_rows[:, 0]).all()
        assert (filled_rows[:, 0] >= 1).all()
        assert scratch[batch.rows :].abs().sum() == 0
        assert scratch.max() <= len(batch.targets)
    assert sum(len(batch.targets) for batch in layout.batches) == len(numbers)
