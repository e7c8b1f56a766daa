"""Flags of several optimizers become one."""

import pytest
import torch

from mp_agent.probe.optimizers.loop_order import any_of

SET, NOT_SET = torch.tensor(1.0), torch.tensor(0.0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], None),
        ([None, 0.0], None),
        ([1.0, 0.0, None], 1.0),
        ([1.0, NOT_SET], 1.0),
        ([NOT_SET, SET, 0.0], 1.0),
        ([NOT_SET, None], 0.0),
    ],
)
def test_no_flag_that_is_not_set_hides_one_that_is(flags, expected):
    found = any_of(flags)
    assert found == expected if expected is not None else found is None
    assert any_of(reversed(flags)) == found
