"""A step that lacks nodes is completed by what the ranks have reduced, never added to."""

from dataclasses import replace

import pytest

from mp_agent.node.merge.run_steps import completed
from mp_agent.records.global_statistics import GlobalStatistics
from tests.agent.node.builders import merged_step

PARTIAL = replace(
    merged_step(3, loss=1.0, sum_squares=1.0, elements=4.0, tokens=10.0),
    world_size=4,
    present_ranks=frozenset({0, 1}),
    complete=frozenset({"optimizer"}),
)
FOUND = GlobalStatistics(
    sequence=3,
    step=30,
    world_size=4,
    present_ranks=4,
    columns={"loss": 2.5, "tokens": 40.0},
    gradients={"sum_squares": 4.0, "elements": 8.0},
    complete=True,
)


def test_columns_gradients_and_presence_are_those_of_all_ranks():
    step = completed(PARTIAL, FOUND)
    assert step.columns == {"loss": 2.5, "tokens": 40.0}
    assert step.gradients == {"sum_squares": 4.0, "elements": 8.0}
    assert (step.grad_norm, step.step, step.coverage) == (2.0, 30, 1.0)
    assert step.complete == {"optimizer", "gradients"}
    assert step.missing_ranks == ()


def test_gradients_that_are_not_whole_are_not_judged():
    assert completed(PARTIAL, replace(FOUND, complete=False)).complete == {"optimizer"}


def test_gradients_that_were_left_out_are_absent():
    step = completed(PARTIAL, replace(FOUND, gradients={}, complete=False))
    assert "gradients" not in step.families
    assert not step.gradients_judged


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (replace(PARTIAL, present_ranks=frozenset(range(4))), FOUND),
        (PARTIAL, replace(FOUND, present_ranks=3)),
        (PARTIAL, replace(FOUND, world_size=2, present_ranks=2)),
    ],
    ids=["all rows are there", "a rank lacks in the reduction", "a group of other ranks"],
)
def test_otherwise_the_step_is_that_of_the_rows(step, found):
    assert completed(step, found) is step
