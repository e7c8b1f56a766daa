"""What the guard did, as it is counted."""

import pytest

from mp_agent.catalog.metric import HistogramValue, Scope
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import CounterStore, labelled
from mp_agent.node.series.snapshot_builder import SnapshotBuilder
from mp_agent.records.merged import StepTransition
from tests.agent.node.builders import make_export, merged_step

ACTIONS = BY_PROMETHEUS_NAME["mp_agent_guard_actions_total"]
UPDATES = BY_PROMETHEUS_NAME["mp_agent_nonfinite_updates_total"]


def _change(**values: float) -> StepTransition:
    return StepTransition(step=merged_step(1, **values), previous=None, thresholds={})


@pytest.mark.parametrize(("value", "mode"), [(1.0, "done"), (0.5, "dry_run")])
def test_an_action_is_counted_with_its_mode(value, mode):
    assert ACTIONS.count is not None
    other = {"done": "dry_run", "dry_run": "done"}[mode]
    counted = ACTIONS.count(_change(guard_clip_gradients=value))
    assert counted == {("clip_gradients", mode): 1.0, ("clip_gradients", other): 0.0}


def test_what_a_guard_did_not_do_is_counted_as_0_and_without_one_there_is_nothing():
    assert ACTIONS.count is not None
    nothing = {("none_left", "done"): 0.0, ("none_left", "dry_run"): 0.0}
    assert ACTIONS.count(_change(guard_none_left=0.0)) == nothing
    assert ACTIONS.count(_change(loss=1.0)) == {}


def test_series_exist_from_the_first_guarded_step_on_and_in_later_attempts():
    counters = CounterStore()
    shown = SnapshotBuilder(thresholds=resolve({}), max_series=1_000)

    def series() -> dict[tuple[str, ...], float | HistogramValue]:
        export = make_export(counters=counters)
        family = next(f for f in shown.build([export], 0.0).families if f.metric is ACTIONS)
        return {sample.labels[1:]: sample.value for sample in family.samples}

    counters.count(Scope.RUN, (), _change(loss=1.0))
    assert series() == {}
    counters.count(Scope.RUN, (), _change(guard_skip_update=0.0))
    assert series() == {("skip_update", "done"): 0.0, ("skip_update", "dry_run"): 0.0}
    counters.count(Scope.RUN, (), _change(guard_skip_update=1.0))
    counters = CounterStore(*counters.dump())
    counters.count(Scope.RUN, (), _change(loss=1.0))
    assert series() == {("skip_update", "done"): 1.0, ("skip_update", "dry_run"): 0.0}


@pytest.mark.parametrize(
    ("values", "updates"),
    [({}, 1.0), ({"guard_skip_update": 1.0}, 0.0), ({"guard_skip_update": 0.5}, 1.0)],
)
def test_an_update_that_the_guard_skipped_has_not_damaged_the_weights(values, updates):
    assert UPDATES.count is not None
    reading = UPDATES.count(_change(sum_squares=1.0, elements=4.0, nan_elements=1.0, **values))
    assert dict(labelled(reading))[()] == updates
