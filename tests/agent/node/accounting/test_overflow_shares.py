"""The share of skipped steps, over the last steps after calibration."""

from collections.abc import Iterable

import pytest

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.loss_scale import OverflowShares
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext
from tests.agent.node.builders import merged_step

CONTEXT = AccountContext(resolve({}), 120.0, Progress())


def first_exceeded(skipped: Iterable[int], steps: int) -> dict[str, int]:
    """Return on which step each bound was exceeded first; skipped: the steps that were skipped."""
    shares, found, left_out = OverflowShares(), dict[str, int](), set(skipped)
    for step in range(1, steps + 1):
        shares.observe(merged_step(step, skipped=float(step in left_out)), CONTEXT)
        for bound in shares.exceeded:
            found.setdefault(bound, step)
    return found


def test_one_overflow_in_sixty_steps_is_too_many_as_soon_as_there_is_a_share():
    assert first_exceeded(range(60, 2000, 60), 2000) == {"overflow_warning": 840}


def test_every_fifth_step_is_critical_after_a_healthy_past():
    found = first_exceeded(range(3000, 4000, 5), 4000)
    assert found["overflow_warning"] < 3060 and 3400 < found["overflow_critical"] < 3520


@pytest.mark.parametrize("every", [2000, 400])
def test_a_steady_share_below_the_limits_exceeds_none(every):
    assert first_exceeded(range(every, 40_000, every), 40_000) == {}


def test_skips_of_the_calibration_do_not_count():
    assert first_exceeded(range(1, 500), 3000) == {}


def exceeded_at_scales(scales: Iterable[float]) -> int | None:
    """Return the first step that exceeds the critical bound, where all are skipped."""
    shares = OverflowShares()
    for step, scale in enumerate(scales, start=1):
        shares.observe(merged_step(step, skipped=1.0, loss_scale=scale), CONTEXT)
        if "overflow_critical" in shares.exceeded:
            return step
    return None


def test_skips_that_never_lower_the_scale_are_no_calibration():
    """As those of a scaler that is made in each step, or whose update is never called."""
    assert exceeded_at_scales([2.0**26] * 300) == 19
    # One that waits for two overflows before it lowers its scale.
    assert exceeded_at_scales(2.0 ** (100 - step // 2) for step in range(200)) is None


def test_a_share_that_rises_from_window_to_window_is_found_below_one_per_cent():
    skipped = [*range(600, 5500, 1000), *range(5500, 10_500, 400), *range(10_500, 16_000, 150)]
    assert first_exceeded(skipped, 16_000).keys() == {"overflow_rising"}


def test_memory_is_bounded():
    shares = OverflowShares()
    for step in range(1, 40_000):
        shares.observe(merged_step(step, skipped=0.0), CONTEXT)
    assert len(shares.blocks) == 150


def test_steps_that_a_log_leaves_out_count_as_steps_that_were_not_skipped():
    shares, found = OverflowShares(), list[str]()
    for step in range(500, 20_000, 30):
        shares.observe(merged_step(step, skipped=float(step % 600 == 500)), CONTEXT)
        found += shares.exceeded
    assert found == [] and sum(shares.blocks[-100:]) in (16, 17)
