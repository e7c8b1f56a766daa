"""What the ranks reduced, through the columns of a record and back."""

from math import copysign

from mp_agent.records.columns import STEP_COLUMN_NAMES
from mp_agent.records.global_statistics import GlobalStatistics
from mp_agent.records.reduction import (
    REDUCED_COLUMNS,
    reduced_statistics,
    reduced_values,
)
from mp_agent.records.steps import step_values
from tests.subtests import each


def test_names_are_unique_and_those_of_no_other_column():
    assert len(set(REDUCED_COLUMNS)) == len(REDUCED_COLUMNS)
    assert not set(REDUCED_COLUMNS) & set(STEP_COLUMN_NAMES)


@each("value", [0.0, -0.0, 5e-324, -1.5, 1.7976931348623157e308, 2.0**53])
def test_every_finite_number_comes_back_to_the_bit(value):
    found = GlobalStatistics(
        sequence=2**53 - 1,
        step=-7,
        world_size=4,
        present_ranks=3,
        columns={"loss": value, "guard_skip_update": 0.5},
        gradients={"sum_squares": value, "nan_elements": 1.0},
        complete=True,
    )
    # As it goes through a ring: an array, of which what is NaN is left out.
    array = step_values(reduced_values(found), REDUCED_COLUMNS).tolist()
    there = {n: v for n, v in zip(REDUCED_COLUMNS, array, strict=True) if v == v}
    again = reduced_statistics(there)
    assert again == found
    assert again is not None
    assert copysign(1.0, again.columns["loss"]) == copysign(1.0, value)


def test_a_record_without_a_reduction_has_none():
    assert reduced_statistics({"loss": 1.0}) is None
    empty = GlobalStatistics(sequence=1, step=1, world_size=1, present_ranks=0)
    assert reduced_statistics(reduced_values(empty)) == empty
