"""What the guard did, as it is counted."""

import pytest

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.node.accounting.counters import labelled
from mp_agent.records.merged import StepTransition
from tests.agent.node.builders import merged_step

ACTIONS = BY_PROMETHEUS_NAME["mp_agent_guard_actions_total"]
UPDATES = BY_PROMETHEUS_NAME["mp_agent_nonfinite_updates_total"]


def _change(**values: float) -> StepTransition:
    return StepTransition(step=merged_step(1, **values), previous=None, thresholds={})


@pytest.mark.parametrize(("value", "mode"), [(1.0, "done"), (0.5, "dry_run")])
def test_an_action_is_counted_with_its_mode(value, mode):
    assert ACTIONS.count is not None
    assert ACTIONS.count(_change(guard_clip_gradients=value)) == {("clip_gradients", mode): 1.0}
    assert ACTIONS.count(_change()) == {}


@pytest.mark.parametrize(
    ("values", "updates"),
    [({}, 1.0), ({"guard_skip_update": 1.0}, 0.0), ({"guard_skip_update": 0.5}, 1.0)],
)
def test_an_update_that_the_guard_skipped_has_not_damaged_the_weights(values, updates):
    assert UPDATES.count is not None
    reading = UPDATES.count(_change(sum_squares=1.0, elements=4.0, nan_elements=1.0, **values))
    assert dict(labelled(reading))[()] == updates
