"""Scales and amax as Transformer Engine keeps them, from objects of the same shape."""

from math import inf, isnan, nan
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mp_agent.probe.instruments.fp8_operands import (
    backward_row,
    backward_scale,
    forward_row,
    has_delayed_scaling,
)
from mp_agent.records.columns import FP8
from tests.agent.probe.instruments.fp8_scaled_layers import (
    E4M3_MAX,
    E5M2_MAX,
    ScaledLinear,
    record,
    state,
    update,
)
from tests.subtests import each


def named(row: torch.Tensor | None) -> dict[str, float]:
    assert row is not None
    pairs = zip(FP8.names, row.tolist(), strict=True)
    return {name: value for name, value in pairs if not isnan(value)}


def layer(scale: list[float], amax: list[float]) -> ScaledLinear:
    made = ScaledLinear()
    scaling = state(len(scale), 4)
    scaling.scale = torch.tensor(scale)
    record(scaling, *amax)
    made.fp8_meta["scaling_fwd"] = scaling
    return made


def test_a_forward_pass_is_judged_by_the_scale_that_it_cast_with():
    row = named(forward_row(layer([2.0, 64.0, 8.0], [300.0, 3.5, 0.0])))
    assert row == {
        "tensors": 2.0,  # the third was not cast
        "scaled_tensors": 2.0,
        "saturated_tensors": 1.0,  # 600 is beyond 448
        "range_used_max": 600.0 / E4M3_MAX,
        "range_used_min": 224.0 / E4M3_MAX,
        "scale_min": 2.0,
        "scale_max": 64.0,
        "amax_max": 300.0,
    }


@each("amax", [1.0, 3.0, 0.1, 1e-30, 1e30, 447.9999])
def test_an_amax_that_its_own_scale_was_computed_from_is_not_saturated(amax):
    made = layer([1.0], [amax])
    update(made.fp8_meta["scaling_fwd"], E4M3_MAX)
    record(made.fp8_meta["scaling_fwd"], amax)
    row = named(forward_row(made))
    assert row["saturated_tensors"] == 0.0
    assert row["range_used_max"] == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("amax", [nan, inf])
def test_what_is_not_finite_counts_as_saturated_and_as_nothing_else(amax):
    row = named(forward_row(layer([1.0, 1.0], [amax, 112.0])))
    assert (row["scaled_tensors"], row["saturated_tensors"]) == (2.0, 1.0)
    assert row["range_used_max"] == row["range_used_min"] == 0.25
    alone = named(forward_row(layer([1.0], [amax])))
    assert alone == {"tensors": 1.0, "scaled_tensors": 1.0, "saturated_tensors": 1.0}


def test_a_layer_that_has_cast_nothing_has_no_row_that_counts():
    assert named(forward_row(layer([1.0], [0.0]))) == {
        "tensors": 0.0,
        "scaled_tensors": 0.0,
        "saturated_tensors": 0.0,
    }


@pytest.mark.parametrize("updated", [False, True])
def test_a_backward_pass_is_judged_by_the_scale_from_before_it(updated):
    made = ScaledLinear()
    scaling = made.fp8_meta["scaling_bwd"]
    scaling.scale.fill_(2.0)
    record(scaling, 9.0, 9.0)
    update(scaling, E5M2_MAX)  # an earlier pass
    scaling.scale.fill_(2.0)
    kept = backward_scale(made)
    record(scaling, 40000.0, 0.5)
    if updated:
        update(scaling, E5M2_MAX)
    assert kept is not None
    row = named(backward_row(made, kept))
    assert (row["saturated_tensors"], row["scaled_tensors"]) == (1.0, 2.0)
    assert row["range_used_max"] == 80000.0 / E5M2_MAX
    assert row["range_used_min"] == 1.0 / E5M2_MAX


def test_a_history_of_one_row_does_not_give_the_amax_of_gradients():
    made = ScaledLinear(length=1)
    kept = backward_scale(made)
    assert kept is not None and backward_row(made, kept) is None
    record(made.fp8_meta["scaling_fwd"], 1.0, 1.0, 1.0)
    assert named(forward_row(made))["tensors"] == 3.0


@each(
    "found",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(scale=torch.ones(3)),  # scaled by what each tensor has now
        SimpleNamespace(scale=torch.ones(3), amax_history=torch.ones(3)),
        SimpleNamespace(scale=torch.ones(2), amax_history=torch.ones(4, 3)),
        SimpleNamespace(scale=torch.ones(0), amax_history=torch.ones(4, 0)),
        SimpleNamespace(scale=1.0, amax_history=[1.0]),
    ],
)
def test_a_state_of_another_shape_is_not_read(found):
    made = ScaledLinear()
    made.fp8_meta["scaling_fwd"] = made.fp8_meta["scaling_bwd"] = found
    assert forward_row(made) is None and backward_scale(made) is None


def test_the_format_is_known_where_the_state_does_not_say_it():
    made = layer([1.0], [224.0])
    del made.fp8_meta["fp8_max_fwd"]
    assert named(forward_row(made))["range_used_max"] == 0.5


def test_other_modules_have_no_such_state():
    assert has_delayed_scaling(ScaledLinear())
    assert not has_delayed_scaling(nn.Linear(2, 2))
    assert forward_row(nn.Linear(2, 2)) is None
