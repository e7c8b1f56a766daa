"""Runs of which scrapes saw only some steps are matched within the distance of two scrapes."""

from dataclasses import replace

import pytest

from mp_agent.runs.divergence import (
    RunSeries,
    RunStep,
    aligned,
    compare_series,
    interval_steps,
)
from tests.agent.runs.series_of import run_of


def scraped(run: RunSeries, offset: int, distance: int) -> RunSeries:
    """Return a run as scrapes every `distance` steps saw it."""
    seen = {step: run.steps[step] for step in sorted(run.steps)[offset::distance]}
    return replace(run, steps=seen, scraped_steps=float(distance))


@pytest.mark.parametrize(
    ("distances", "interval"),
    [((0.0, 0.0), 1), ((1.0, 0.0), 1), ((2.5, 2.0), 3), ((0.0, 15.0), 15)],
)
def test_the_interval_is_that_of_the_run_that_was_seen_less(distances, interval):
    runs = [replace(run_of(2), scraped_steps=distance) for distance in distances]
    assert interval_steps(*runs) == interval


def test_a_run_of_which_every_step_is_known_stays_as_it_is():
    run = run_of(5)
    assert aligned(run, 1) is run


def test_an_interval_has_the_medians_and_all_marks_of_its_steps():
    steps = {
        3: RunStep({"loss": 5.0, "grad_norm": 1.0}),
        4: RunStep({"loss": 1.0}, frozenset({"skipped"})),
        5: RunStep({"loss": 2.0, "grad_norm": 3.0}),
        9: RunStep({}, frozenset({"loss_nonfinite"})),
    }
    run = replace(run_of(1), steps=steps)
    assert dict(aligned(run, 3).steps) == {
        3: RunStep({"loss": 2.0, "grad_norm": 2.0}, frozenset({"skipped"})),
        9: RunStep({}, frozenset({"loss_nonfinite"})),
    }


def test_runs_whose_scrapes_saw_different_steps_agree_and_part_where_they_do():
    def losing(step: int) -> float:
        return 2.0 if step < 600 else 2.5

    first = scraped(run_of(1000), 0, 10)
    second = scraped(run_of(1000), 7, 10)
    assert not first.steps.keys() & second.steps.keys()
    agreed = compare_series(first, second)
    assert agreed.departure is None
    assert "Steps are matched within 10" in agreed.notes[0]
    apart = compare_series(first, scraped(run_of(1000, loss=losing), 7, 10)).departure
    assert apart is not None
    assert (apart.quantity, apart.step) == ("loss", 600)


def test_a_scraped_run_is_compared_with_one_of_which_every_step_is_known():
    scrapes = scraped(run_of(300, loss=lambda step: 1.0 + (step >= 200)), 4, 7)
    apart = compare_series(run_of(300, loss=lambda step: 1.0), scrapes).departure
    assert apart is not None
    assert 200 - 7 <= apart.step <= 200 + 7
