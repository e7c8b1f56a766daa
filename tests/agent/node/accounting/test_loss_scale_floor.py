import pytest

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.loss_scale import FloorSkips
from tests.agent.node.builders import merged_step

THRESHOLDS = resolve({})


def recent(*sequences: int, scale: float = 1.0) -> list[int]:
    """Take in steps that are skipped at a scale; return what is said after each."""
    skips, said = FloorSkips(), []
    for sequence in sequences:
        skips.fold(merged_step(sequence, skipped=1.0, loss_scale=scale), THRESHOLDS)
        said.append(skips.recent)
    return said


def test_skips_within_a_hundred_steps_add_up():
    assert recent(500, 540, 599) == [1, 2, 3]


def test_skips_further_apart_do_not():
    assert recent(500, 600, 700) == [1, 1, 1]
    assert recent(500, 599, 600, 699) == [1, 2, 2, 2]


@pytest.mark.parametrize("scale", [1.0001, 2.0, 65536.0])
def test_skips_above_the_floor_are_none(scale):
    assert recent(1, 2, 3, scale=scale) == [0, 0, 0]


def test_a_scale_that_was_halved_to_0_is_at_the_floor_and_a_negative_one_is_none():
    assert recent(1, 2, 3, scale=0.0) == [1, 2, 3]
    assert recent(1, 2, 3, scale=-1.0) == [0, 0, 0]


def test_a_clean_step_says_nothing_and_forgets_nothing():
    skips = FloorSkips()
    for sequence in (1, 2):
        skips.fold(merged_step(sequence, skipped=1.0, loss_scale=0.5), THRESHOLDS)
    skips.fold(merged_step(3, loss_scale=0.5), THRESHOLDS)
    assert skips.recent == 0

    skips.fold(merged_step(4, skipped=1.0, loss_scale=0.5), THRESHOLDS)
    assert skips.recent == 3


def test_without_a_scaler_there_are_none_and_memory_is_bounded():
    skips = FloorSkips()
    skips.fold(merged_step(1, skipped=1.0), THRESHOLDS)
    assert skips.recent == 0

    wide = {**THRESHOLDS, "floor_skip_steps": 1e9}
    for sequence in range(1, 2000):
        skips.fold(merged_step(sequence, skipped=1.0, loss_scale=1.0), wide)
    assert len(skips.sequences) <= 256
