"""Each target at its limit."""

import pytest

from mp_agent.plan.evaluation.model import (
    Outcome,
    loss_target,
    memory_target,
    speed_target,
    tensor_core_target,
)


@pytest.mark.parametrize(
    ("target", "outcome"),
    [
        (speed_target(2.0, 1.9, 2.1), Outcome.MISSED),
        (speed_target(2.01, 1.9, 2.1), Outcome.MET),
        (memory_target(0.3), Outcome.MISSED),
        (memory_target(0.31), Outcome.MET),
        (memory_target(-0.2), Outcome.MISSED),
        (loss_target(0.005, None), Outcome.MISSED),
        (loss_target(0.0049, 0.1), Outcome.MET),
        (loss_target(None, 0.0), Outcome.MISSED),
        (tensor_core_target(1.0), Outcome.NOT_MEASURED),
    ],
)
def test_a_target_is_met_beyond_its_limit_only(target, outcome):
    assert target.outcome is outcome


def test_what_was_measured_is_written():
    assert memory_target(-0.2).value == "-20 %"
    assert loss_target(None, 0.25).value.startswith("the loss is not finite (FP32 from weights")
