import logging
from typing import Any

import pytest

from mp_agent.catalog.metric import Metric, Scope, counter, histogram
from mp_agent.node.accounting import accumulator
from mp_agent.node.accounting.accumulator import CounterStore


def _itself(change: Any) -> Any:
    return change


def _raise(change: Any) -> Any:
    return change.no_such_thing


STEPS = counter(
    "mp_agent.x.steps",
    "{step}",
    help="x",
    count=_itself,
)
DURATION = histogram(
    "mp_agent.x.duration",
    "s",
    help="x",
    bounds=(1.0, 10.0),
    count=_itself,
)


@pytest.fixture
def only(monkeypatch):
    """Put metrics in place of the catalog's."""

    def replace(*metrics: Metric) -> None:
        monkeypatch.setitem(accumulator.COUNTED, Scope.RUN, metrics)

    return replace


def test_counts_add_up_and_begin_at_zero(only):
    only(STEPS)
    schema_index = CounterStore()
    assert schema_index.total(STEPS, ()) == 0.0
    for value in (1.0, None, 2.0):
        schema_index.count(Scope.RUN, (), value)

    assert schema_index.total(STEPS, ()) == 3.0


def test_a_labelled_reading_counts_each_label(only):
    only(STEPS)
    schema_index = CounterStore()
    schema_index.count(Scope.RUN, (), {("100",): 1.0, ("1000",): 0.0})
    schema_index.count(Scope.RUN, (), {("100",): 1.0, ("1000",): 1.0})

    assert [schema_index.total(STEPS, (bound,)) for bound in ("100", "1000")] == [2.0, 1.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_counter_never_falls_and_stays_finite(only, value):
    only(STEPS)
    schema_index = CounterStore()
    schema_index.count(Scope.RUN, (), 1.0)
    schema_index.count(Scope.RUN, (), value)

    assert schema_index.total(STEPS, ()) == 1.0


def test_histogram_buckets_are_cumulative_and_take_their_own_bound_in(only):
    only(DURATION)
    schema_index = CounterStore()
    for seconds in (0.5, 1.0, 7.0, 50.0):
        schema_index.count(Scope.RUN, (), seconds)
    value = schema_index.histogram(DURATION, ())

    assert value.bounds == (1.0, 10.0, float("inf"))
    assert value.cumulative_counts == (2, 3, 4)
    assert value.sum == 58.5


def test_a_count_function_that_raises_loses_only_its_own_addition(only, caplog):
    broken = counter(
        "mp_agent.broken",
        "{step}",
        help="x",
        count=_raise,
    )
    only(broken, STEPS)
    schema_index = CounterStore()
    with caplog.at_level(logging.ERROR):
        schema_index.count(Scope.RUN, (), 1.0)
        schema_index.count(Scope.RUN, (), 1.0)

    assert schema_index.total(STEPS, ()) == 2.0
    assert sum("mp_agent.broken" in record.getMessage() for record in caplog.records) == 1


def test_a_dump_restores_an_equal_store(only):
    only(STEPS, DURATION)
    schema_index = CounterStore()
    schema_index.count(Scope.RUN, ("layer\n",), 0.1)
    again = CounterStore(*schema_index.dump())

    assert again.dump() == schema_index.dump()
    assert again.total(STEPS, ("layer\n",)) == 0.1


def test_cells_of_other_bounds_start_at_zero():
    schema_index = CounterStore(histograms=[(DURATION.name, (), [1.0, 2.0])])

    assert schema_index.histogram(DURATION, ()).cumulative_counts == (0, 0, 0)
