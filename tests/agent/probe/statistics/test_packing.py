"""Every row of the scratch belongs to one piece, and every row is folded into its own group."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_agent.probe.statistics.packing import PieceForm, fold_levels, make_packed_layout

ROWS, WIDTH = 8, 16


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=20), st.randoms(use_true_random=False))
def test_folding_brings_every_row_into_its_own_group_once(
    rows_per_group: list[int], chance: Random
) -> None:
    numbers = list(range(sum(rows_per_group)))
    chance.shuffle(numbers)
    starts = [sum(rows_per_group[:group]) for group in range(len(rows_per_group))]
    groups = [
        numbers[start : start + count] for start, count in zip(starts, rows_per_group, strict=True)
    ]
    partials = [{number} for number in range(len(numbers))]
    for level in fold_levels(groups):
        rows = [*partials, set[int]()]
        assert all(len(block) == len(level[0]) for block in level)
        folded = [[rows[number] for number in block] for block in level]
        partials = [set().union(*block) for block in folded]
        assert [sum(map(len, block)) for block in folded] == [len(part) for part in partials]
    assert partials == [set(group) for group in groups]


DTYPES = (torch.float32, torch.bfloat16)


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, ROWS * WIDTH)), max_size=6),
        max_size=5,
    )
)
def test_no_two_pieces_of_a_batch_share_a_row(
    sizes: list[list[tuple[torch.dtype, int]]],
) -> None:
    scratch = torch.zeros(ROWS, WIDTH)
    forms = tuple(
        tuple(PieceForm(dtype, torch.Size([size])) for dtype, size in group) for group in sizes
    )
    layout = make_packed_layout(forms, scratch)
    assert layout.elements_G.tolist() == [float(sum(n for _, n in group)) for group in sizes]
    pieces = [piece for group in sizes for piece in group]
    for batch in layout.batches:
        assert len({pieces[number][0] for number in batch.pieces}) == 1
        scratch.fill_(-1.0)
        for piece, target in zip(batch.pieces, batch.targets, strict=True):
            assert target.numel() == pieces[piece][1]
            assert (target == -1.0).all()
            target.fill_(piece + 1)
        for tail in batch.tails:
            assert (tail == -1.0).all()
            tail.zero_()
        filled_rows = scratch[: batch.rows]
        assert ((filled_rows == filled_rows[:, :1]) | (filled_rows == 0)).all()
        assert (filled_rows[:, 0] >= 1).all()
        assert (scratch[batch.rows :] == -1.0).all()
    numbers = sorted(number for batch in layout.batches for number in batch.pieces)
    assert numbers == list(range(len(pieces)))


def test_small_pieces_fill_what_large_ones_leave() -> None:
    sizes = [5 * WIDTH, 3 * WIDTH] * 6
    forms = tuple((PieceForm(torch.float32, torch.Size([size])),) for size in sizes)
    layout = make_packed_layout(forms, torch.zeros(ROWS, WIDTH))
    assert [batch.rows for batch in layout.batches] == [ROWS] * 6
