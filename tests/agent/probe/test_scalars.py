"""Single numbers are taken without making anybody wait, or not at all."""

from math import copysign, inf

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mp_agent.probe import accelerator
from mp_agent.probe.scalars import ScalarSnapshot, add, reciprocal, scalar_of, snapshot_of, tighter
from tests.subtests import each


@each(
    ("value", "expected"),
    [
        (2, 2.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7.0),
        (torch.tensor(3.0, requires_grad=True), 3.0),
        (torch.tensor([[4]], dtype=torch.int32), 4.0),
        (torch.tensor(0.25, dtype=torch.bfloat16), 0.25),
    ],
)
def test_numbers_on_the_host_become_floats(value, expected):
    assert scalar_of(value) == expected
    assert type(scalar_of(value)) is float


@each(
    "value",
    [
        None,
        "1",
        [1.0],
        torch.ones(2),
        torch.ones(0),
        torch.tensor(1j),
    ],
)
def test_what_is_no_single_number_is_none(value):
    assert scalar_of(value) is None


def test_a_number_on_a_device_stays_there_without_its_graph(monkeypatch):
    monkeypatch.setattr(accelerator, "is_supported", lambda device: True)
    value = torch.ones((1, 1), device="meta", requires_grad=True) * 2
    scalar = scalar_of(value)
    assert isinstance(scalar, torch.Tensor)
    assert scalar.device.type == "meta"
    assert scalar.shape == ()
    assert not scalar.requires_grad


def test_a_number_on_an_unsupported_device_is_none():
    assert scalar_of(torch.ones((), device="meta")) is None
    assert snapshot_of(torch.ones((), device="meta")) is None


def test_a_snapshot_keeps_its_value_when_the_tensor_changes(device):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        value = torch.tensor(2.0, dtype=dtype)
        taken = snapshot_of(value)
        value.fill_(3.0)
        assert isinstance(taken, torch.Tensor) and taken.item() == 2.0


def test_a_snapshot_is_taken_again_only_after_a_change(device):
    snapshots, value = ScalarSnapshot(), torch.tensor(2.0)
    first = snapshots.of(value)
    assert snapshots.of(value) is first
    value.mul_(2.0)
    for original, expected in ((value, 4.0), (torch.tensor(8.0), 8.0)):
        taken = snapshots.of(original)
        assert isinstance(taken, torch.Tensor) and taken.item() == expected
    assert snapshots.of(3.0) == 3.0


def test_sums_and_reciprocals_are_in_double_precision():
    total = add(add(None, torch.tensor(1.0)), torch.tensor(2.0**-40))
    third = reciprocal(torch.tensor(3.0))
    assert isinstance(total, torch.Tensor) and isinstance(third, torch.Tensor)
    assert total.item() == 1.0 + 2.0**-40
    assert third.item() == 1 / 3
    assert reciprocal(4.0) == 0.25
    for zero in (0.0, -0.0):
        on_device = reciprocal(torch.tensor(zero))
        assert isinstance(on_device, torch.Tensor)
        assert reciprocal(zero) == on_device.item() == copysign(inf, zero)


class TestTighter:
    """Of two clippings, the one that shrinks more."""

    CASES = (
        ((1.0, 4.0), (1.0, 8.0), 1),
        ((2.0, 8.0), (1e-3, 1e-3), 0),
        ((inf, 5.0), (1.0, 2.0), 1),
    )

    @pytest.mark.parametrize(("one", "other", "chosen"), CASES)
    def test_of_floats(self, one, other, chosen):
        assert tighter(one, other) == (one, other)[chosen]

    @pytest.mark.parametrize(("one", "other", "chosen"), CASES)
    def test_of_norms_that_stay_on_their_device(self, one, other, chosen):
        on_device = [(limit, torch.tensor(norm)) for limit, norm in (one, other)]
        limit, norm = tighter(*on_device)
        assert isinstance(limit, torch.Tensor) and isinstance(norm, torch.Tensor)
        assert limit.dtype is norm.dtype is torch.float64
        assert (float(limit), float(norm)) == (one, other)[chosen]


def test_numbers_of_several_devices_are_added_where_the_first_one_is():
    with FakeTensorMode():
        one, other = (torch.ones((), device=f"cuda:{index}") for index in range(2))
        total = add(add(None, one), other)
        assert isinstance(total, torch.Tensor)
        assert (total.device, total.dtype) == (one.device, torch.float64)
        assert isinstance(add(2.0, other), torch.Tensor)


def test_clippings_on_several_devices_are_compared_where_the_first_one_is():
    with FakeTensorMode():
        one, other = (torch.ones((), device=f"cuda:{index}") for index in range(2))
        limit, norm = tighter((1.0, one), (1.0, other))
        assert isinstance(limit, torch.Tensor) and isinstance(norm, torch.Tensor)
        assert limit.device == norm.device == one.device
