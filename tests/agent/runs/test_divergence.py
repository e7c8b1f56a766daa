"""Runs part where a difference begins that lasts, and not before."""

import random
from math import inf, nan

import pytest

from mp_agent.errors import CompareError
from mp_agent.runs.divergence import (
    compare_series,
    first_lasting,
    limit_of,
    relative_difference,
)
from mp_agent.runs.report import verdict
from tests.agent.runs.series_of import run_of
from tests.subtests import each


def drifting(begin, slope=0.01):
    return lambda step: 2.0 + 0.01 * (step % 3) + max(0, step - begin) * slope * 2


def test_equal_runs_never_part():
    found = compare_series(run_of(), run_of(name="b"))
    assert found.departure is None and found.layers == ()
    assert verdict(found) == "The runs agree from step 1 to 100."


def test_the_step_is_named_at_which_the_loss_leaves():
    found = compare_series(run_of(), run_of(name="b", loss=drifting(60, 0.05)))
    assert found.departure is not None
    assert (found.departure.quantity, found.departure.step) == ("loss", 61)
    assert "The runs part at step 61: loss 2.01 against 2.11" in verdict(found)


def test_noise_between_two_precisions_is_not_a_departure():
    generator = random.Random(1)
    noisy = {step: 2.0 * (1 + generator.gauss(0, 2e-3)) for step in range(1, 101)}
    found = compare_series(run_of(loss=lambda step: 2.0), run_of(loss=noisy.__getitem__))
    assert found.departure is None


def test_a_single_outlier_is_not_a_departure():
    found = compare_series(run_of(), run_of(loss=lambda step: 5.0 if step == 40 else 2.0))
    assert found.departure is None


def test_a_loss_that_one_run_alone_loses_is_a_departure_at_once():
    found = compare_series(
        run_of(), run_of(loss=lambda s: None if s == 50 else 2.0, marks={50: "loss_nonfinite"})
    )
    assert found.departure is not None
    assert (found.departure.quantity, found.departure.step) == ("loss_nonfinite", 50)
    assert "loss NaN or Inf in the second run alone" in verdict(found)


def test_what_both_runs_have_is_no_departure():
    both = run_of(marks={30: "skipped"})
    assert compare_series(both, both).departure is None


def test_runs_that_differ_from_the_first_step_on_are_reported_as_such():
    found = compare_series(run_of(), run_of(loss=lambda step: 4.0))
    assert found.departure is not None and found.departure.step == 1


def test_only_steps_that_both_have_are_compared():
    found = compare_series(run_of(50), run_of(50, first=40))
    assert found.steps == tuple(range(40, 51))
    with pytest.raises(
        CompareError, match="no step in common: /runs/a has 1 to 50, /runs/b has 60"
    ):
        compare_series(run_of(50), run_of(10, name="b", first=60))
    with pytest.raises(CompareError, match="/runs/a has none"):
        compare_series(run_of(0), run_of(1))


def test_the_layer_that_leaves_first_comes_first():
    def layers(step, factor):
        return {"early": 1.0, "late": 1.0 * (factor if step >= 60 else 1), "lost": 1.0}

    one = {step: layers(step, 1.0) for step in range(0, 100, 10)}
    other = {step: layers(step, 3.0) for step in range(0, 100, 10)}
    other[30] = {**other[30], "lost": nan}
    found = compare_series(run_of(layers=one), run_of(layers=other))
    assert [(layer.layer, layer.step) for layer in found.layers] == [("lost", 30), ("late", 60)]
    assert found.layers[0].difference == inf


def test_different_learning_rates_and_facts_are_noted():
    found = compare_series(run_of(precision="fp32"), run_of(precision="bf16"))
    assert "precision: fp32 against bf16" in found.notes
    found = compare_series(run_of(trained_ratio="0.01198"), run_of(trained_ratio="0.88"))
    assert "1.2 % of the weights are trained against 88 %" in found.notes


@each(
    ("first", "second", "expected"),
    [
        (1.0, 2.0, 0.5),
        (2.0, 1.0, 0.5),
        (0.0, -0.0, 0.0),
        (0.0, 5e-324, 1.0),
        (1.7e308, -1.7e308, 2.0),
        (5e-324, 1e-323, 0.5),
        (None, 1.0, None),
        (nan, 1.0, None),
        (inf, inf, None),
    ],
)
def test_relative_differences_at_the_edges(first, second, expected):
    assert relative_difference(first, second) == expected


def test_a_difference_has_to_last():
    assert first_lasting([0, 2, 2, 0, 2, 2, 2], 1.0, 3) == 4
    assert first_lasting([0, 2, None, 2, 2], 1.0, 3) == 1
    assert first_lasting([0, 0, 2, 2], 1.0, 5) == 2
    assert first_lasting([0, 0, 0, 2], 1.0, 5) is None
    assert first_lasting([], 1.0, 5) is None


def test_a_limit_is_between_one_and_ten_floors():
    assert limit_of([], 0.01) == 0.01
    assert limit_of([1e-6] * 50, 0.01) == 0.01
    assert limit_of([0.5] * 50, 0.01) == pytest.approx(0.1)
    assert 0.01 < limit_of([0.01, 0.02, 0.03, 0.02] * 20, 0.01) < 0.1
