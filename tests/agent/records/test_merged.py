"""What a merged step says where nothing was observed."""

from math import inf

import numpy as np
import pytest

from mp_agent.records.columns import GRADIENTS
from mp_agent.records.columns.gradients import shows_reduction
from mp_agent.records.merged import OptimizerStep, RankValues
from tests.agent.node.builders import gradient_row, merged_step


def test_a_step_of_which_no_rank_says_that_it_was_skipped_was_not() -> None:
    step = merged_step(norm=2.0)
    assert "skipped" not in step.columns
    assert not step.skipped and not step.weights_kept and not step.flag("loss_nonfinite")
    assert step.counts(GRADIENTS) and step.gradients_judged


def test_a_skipped_step_kept_its_weights_and_its_gradients_do_not_count() -> None:
    step = merged_step(norm=2.0, skipped=1.0)
    assert step.skipped and step.weights_kept and not step.gradients_judged


def test_gradients_that_were_not_measured_have_no_norm() -> None:
    nothing = OptimizerStep(sequence=1, families={}, complete=frozenset())
    squares = {GRADIENTS.name: {"sum_squares": 9.0}}
    measured = OptimizerStep(sequence=1, families=squares, complete=frozenset())
    assert merged_step().grad_norm is nothing.grad_norm is None
    assert merged_step(norm=3.0).grad_norm == measured.grad_norm == 3.0


def test_values_of_ranks_are_a_mapping_of_those_that_are_finite() -> None:
    found = RankValues.finite(np.array([0.5, np.nan, 1.5, np.inf]))
    assert found == {0: 0.5, 2: 1.5} == RankValues.of({2: 1.5, 0: 0.5})
    assert repr(found) == "{0: 0.5, 2: 1.5}"
    assert (len(found), found[2], found.get(1), 3 in found) == (2, 1.5, None, False)
    assert RankValues.of(found) is found
    with pytest.raises(KeyError):
        found[4]


@pytest.mark.parametrize("largest", [1e155, 1.7e308])
def test_gradients_whose_squares_lie_beyond_float64_are_judged_as_others_are(largest: float):
    """Of tensors that no wrapper explains, each step asks: an error here would cost the step."""
    own = {"abs_max": largest, "elements": 4.0}
    assert shows_reduction(gradient_row(sum_squares=1e308, **own).tolist())
    assert not shows_reduction(gradient_row(sum_squares=inf, **own).tolist())
