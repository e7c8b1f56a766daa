"""What a loss scale is a sign of, in steps since its calibration."""

from collections.abc import Callable

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.loss_scale import LossScaleTracker
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext
from tests.agent.node.builders import merged_step

CONTEXT = AccountContext(resolve({}), 120.0, Progress())


def run(scale: Callable[[int], float], steps: int) -> tuple[list[int], dict[str, int]]:
    """Return the steps that lowered the scale again, and the low steps at the end."""
    tracker, again = LossScaleTracker(), list[int]()
    for step in range(1, steps + 1):
        tracker.observe(merged_step(step, loss_scale=scale(step)), CONTEXT)
        again += [step] if tracker.lowered_again else []
    return again, dict(tracker.view().low_steps)


def test_five_decreases_within_the_steps_are_one_too_many_and_so_is_each_further_one():
    again, _ = run(lambda step: 65536 * 0.5 ** max(0, (step - 1000) // 60), 1440)
    assert again == [1300, 1360, 1420]


def test_decreases_that_lie_farther_apart_are_not():
    assert run(lambda step: 65536 * 0.5 ** (step // 200), 3000)[0] == []


def test_an_increase_begins_the_count_again():
    scales = {600: 1, 610: 2, 620: 3, 630: 4, 640: 3, 650: 4, 660: 5, 670: 6}

    def scale(step: int) -> float:
        return 65536 * 0.5 ** next((n for at, n in reversed(scales.items()) if step >= at), 0)

    assert run(scale, 700)[0] == []


def test_a_collapse_counts_below_each_limit():
    _, low = run(lambda step: 65536.0 if step < 700 else 64.0, 800)
    assert low == dict.fromkeys(
        (
            "loss_scale_reduced",
            "loss_scale_very_low",
            "loss_scale_low",
            "loss_scale_share_of_initial",
        ),
        101,
    )


def test_what_calibration_left_low_is_neither_collapsed_nor_falling():
    _, low = run(lambda step: 65536.0 if step < 9 else 64.0, 800)
    assert low["loss_scale_low"] == low["loss_scale_share_of_initial"] == 0
    assert low["loss_scale_very_low"] == 301


def test_a_scale_that_has_been_halved_to_0_is_below_each_limit_for_good():
    _, low = run(lambda step: max(65536 * 0.5 ** max(0, step - 700), 1e-45) * (step < 870), 1000)
    assert low["loss_scale_share_of_initial"] == 1000 - 706
    assert run(lambda step: 0.0, 800)[1] == {}, "a trainer that logs 0 has no scaler"


def test_memory_is_bounded():
    tracker = LossScaleTracker()
    for step in range(1, 5000):
        tracker.observe(merged_step(step, loss_scale=1024.0 * (1 + step % 2)), CONTEXT)
    assert len(tracker.changes) <= 256
