"""The records of the guard's policies."""

import pytest

from mp_agent.catalog.guard import (
    POLICIES,
    POLICIES_BY_NAME,
    Action,
    default_policies,
    with_defaults,
)
from mp_agent.errors import CatalogError
from mp_agent.records.columns import STEP_COLUMN_NAMES
from tests.subtests import each


def test_every_action_has_a_column_and_every_column_of_the_guard_an_action():
    columns = [name for name in STEP_COLUMN_NAMES if name.startswith("guard_")]
    assert columns == [action.column for action in Action]


def test_names_of_policies_are_unique_and_defaults_are_valid():
    assert len(POLICIES_BY_NAME) == len(POLICIES)
    given = {policy.name: policy.defaults for policy in POLICIES}
    assert with_defaults(given) == given


def test_the_default_is_to_skip_what_is_not_finite_and_to_clip_spikes():
    assert list(default_policies()) == ["skip_nonfinite", "clip_spikes", "hold_learning_rate"]


@each(
    ("given", "message"),
    [
        ({"skip_all": {}}, "'skip_all' is unknown; known: skip_nonfinite, "),
        ({"clip_spikes": {"sigma": 1}}, "clip_spikes has no 'sigma'; it has: z, "),
        ({"clip_spikes": {"z": "high"}}, "clip_spikes.z is 'high': must be a finite number"),
        ({"clip_spikes": {"z": float("nan")}}, "clip_spikes.z is nan: must be a finite number"),
        ({"clip_spikes": {"factor": 0.5}}, "clip_spikes.factor is 0.5: must be at least 1"),
        ({"skip_spikes": {"warmup_steps": 2.5}}, "must be a whole number"),
        ({"widen_precision": {"dtype": "fp64"}}, "must be one of fp32, bf16"),
        ({"widen_precision": {"modules": 3}}, "must be a text"),
        ({"widen_precision": {"modules": "  "}}, "must be a text"),
        ({"clip_spikes": 5}, "clip_spikes is 5: must be a table of parameters"),
        ({"clip_spikes": [1]}, "clip_spikes is [1]: must be a table of parameters"),
        ({"clip_spikes": ""}, "clip_spikes is '': must be a table of parameters"),
        ({"skip_nonfinite": {"actions_max": 10**400}}, "must be a finite number"),
        ({"skip_nonfinite": {"actions_max": 1e300}}, "must be at most 10000"),
        ({"lower_learning_rate": {"rate_factor": 5}}, "rate_factor is 5: must be at most 1"),
        ({"raise_loss_scale": {"floor": 1e300}}, "raise_loss_scale.floor is 1e+300: must be at"),
        ({"reset_loss_scale": {"fall_factor": 1}}, "fall_factor is 1: must be at least 2"),
        ({"reset_loss_scale": {"calm_steps": 0}}, "calm_steps is 0: must be at least 1"),
        ({"request_stop": {"troubles": 60}}, "troubles is 60, request_stop.trouble_steps is 50.0"),
    ],
)
def test_what_is_wrong_is_named(given, message):
    with pytest.raises(CatalogError) as raised:
        with_defaults(given)
    assert message in str(raised.value)
