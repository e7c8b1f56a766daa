"""When a loss scale is set back to the one that held, by itself and under GradScaler's rule."""

from typing import NamedTuple

import pytest
import torch

from mp_agent.catalog.guard import with_defaults
from mp_agent.probe.guard.loss_scales import ScaleReset

CALM, CPU = 10, torch.device("cpu")


def _reset(**values: float) -> ScaleReset:
    given = {"calm_steps": CALM, **values}
    return ScaleReset(with_defaults({"reset_loss_scale": given})["reset_loss_scale"], CPU)


class _Course(NamedTuple):
    """What became of a training: its scales after each update, resets and refused ones by step."""

    scales: list[float]
    resets: dict[int, float]
    refused: list[int]


def _run(reset: ScaleReset, limits: list[float], scale: float, growth: int = 2000) -> _Course:
    """Run GradScaler's rule on updates of which each overflows above its limit."""
    course, grown = _Course([], {}, []), 0
    for step, limit in enumerate(limits):
        overflows = scale > limit
        found, level, refused = reset.observe(
            torch.tensor(scale, dtype=torch.float64), torch.tensor(overflows)
        )
        grown = 0 if overflows else grown + 1
        scale = scale / 2 if overflows else scale * (2.0 if grown == growth else 1.0)
        grown %= growth
        if found:
            scale = course.resets[step] = float(level)
        if refused:
            course.refused.append(step)
        course.scales.append(scale)
    return course


def test_after_a_collapse_and_calm_steps_the_scale_is_set_back_to_the_one_that_held():
    limits = [2.0**20] * CALM + [1.0] * 12 + [2.0**20] * 50
    course = _run(_reset(), limits, 2.0**16)
    assert course.scales[CALM + 11] == 2.0**4
    assert course.resets == {CALM + 12 + CALM - 1: 2.0**16}
    assert course.scales[-1] == 2.0**16


@pytest.mark.parametrize(("overflows", "resets"), [(3, 0), (4, 1)])
def test_a_fall_counts_from_the_factor_on(overflows, resets):
    limits = [2.0**20] * CALM + [1.0] * overflows + [2.0**20] * 50
    assert len(_run(_reset(), limits, 2.0**16).resets) == resets


@pytest.mark.parametrize("troubled_every", [2, CALM])
def test_nothing_is_set_back_while_there_is_trouble(troubled_every):
    reset = _reset()
    for _ in range(CALM):
        reset.observe(torch.tensor(2.0**16), torch.tensor(False))
    for step in range(10 * CALM):
        trouble = torch.tensor(step % troubled_every == 0)
        assert not reset.observe(torch.tensor(2.0**4), trouble)[0]


def test_a_scale_that_has_never_held_is_not_set_back_to():
    limits = [1.0] * 12 + [2.0**20] * 100
    assert _run(_reset(), limits, 2.0**16).resets == {}


def test_a_scale_that_the_model_needs_to_fall_slowly_is_followed_down():
    limits = [2.0**level for level in range(16, 0, -1) for _ in range(2 * CALM)]
    course = _run(_reset(), limits, 2.0**16)
    assert course.resets == {}
    assert course.scales[-1] == 2.0


def test_a_reset_that_overflows_is_forgotten_for_what_holds_and_is_not_tried_again():
    """Gradients have grown for good in the collapse: 2^16 does not hold any more, 2^9 does."""
    limits = [2.0**20] * CALM + [1.0] * 12 + [2.0**9] * 100 * CALM
    course = _run(_reset(), limits, 2.0**16)
    assert len(course.resets) == 1
    assert set(course.scales[-50 * CALM :]) == {2.0**9}


def test_a_reset_that_overflows_after_a_while_again_and_again_is_made_once():
    """The level holds for almost `calm_steps` each time, and so never counts as one that held."""
    reset, resets, scale, since = _reset(), 0, 2.0**16, 0
    for _ in range(CALM):
        reset.observe(torch.tensor(scale), torch.tensor(False))
    for _ in range(100 * CALM):
        since += 1
        trouble = scale > 2.0**4 and since >= CALM - 1
        is_reset, level, _ = reset.observe(torch.tensor(scale), torch.tensor(trouble))
        if trouble:
            scale, since = scale / 2, 0
        if is_reset:
            scale, since, resets = float(level), 0, resets + 1
    assert (resets, scale) == (1, 2.0**4)


def test_what_grows_by_itself_is_remembered_as_it_grows():
    limits = [2.0**20] * 8 * CALM + [1.0] * 10 + [2.0**20] * 2 * CALM
    course = _run(_reset(), limits, 2.0**12, growth=2 * CALM)
    assert list(course.resets.values()) == [2.0**15]


def test_a_scale_that_grows_within_every_calm_time_is_remembered_by_its_lowest():
    limits = [2.0**20] * 2 * CALM + [1.0] * 12 + [2.0**20] * CALM
    course = _run(_reset(), limits, 2.0**12, growth=4)
    assert list(course.resets.values()) == [2.0**14]


def test_collapses_beyond_the_limit_are_refused_once_each_and_followed_down():
    one = [1.0] * 6 + [2.0**20] * 2 * CALM
    course = _run(_reset(actions_max=2, window_steps=10_000), [2.0**20] * CALM + 4 * one, 2.0**16)
    assert len(course.resets) == 2
    assert len(course.refused) == 2
    assert course.scales[-1] == 2.0**4


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-149, 3.0e38, 3.4028234663852886e38])
def test_the_ends_of_fp32_are_scales_like_others(scale):
    reset = _reset()
    far = scale * 2.0**-20 if scale > 1.0 else scale * 2.0**20
    for level in (max(scale, far), min(scale, far)):
        for _ in range(CALM):
            found = reset.observe(torch.tensor(level, dtype=torch.float64), torch.tensor(False))
    assert bool(found[0])
    assert float(found[1]) == max(scale, far)
