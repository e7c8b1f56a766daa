from math import inf, isnan, nan

import pytest

from mp_agent.records.columns import STEP_COLUMN_NAMES
from mp_agent.records.steps import step_values


def values(scalars: dict[str, float]) -> dict[str, float]:
    pairs = zip(STEP_COLUMN_NAMES, step_values(scalars).tolist(), strict=True)
    return {name: value for name, value in pairs if not isnan(value)}


def test_what_was_not_observed_is_absent() -> None:
    assert values({"learning_rate": 0.5}) == {"learning_rate": 0.5}


@pytest.mark.parametrize("loss", [nan, inf, -inf])
def test_a_loss_that_is_not_finite_sets_its_flag_alone(loss: float) -> None:
    assert values({"loss": loss}) == {"loss_nonfinite": 1.0}
    assert values({"loss": -0.0}) == {"loss": 0.0, "loss_nonfinite": 0.0}


def test_any_number_of_skipped_parts_is_a_skipped_step() -> None:
    assert values({"skipped": 2.0}) == {"skipped": 1.0}
    assert values({"skipped": 0.0}) == {"skipped": 0.0}


def test_other_columns_may_be_asked_for() -> None:
    assert step_values({"loss": 2.0}, ("a", "loss")).tolist()[1] == 2.0
