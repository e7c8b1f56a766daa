"""Outputs of modules in the account of a run: metrics, and the first that is not finite."""

from dataclasses import replace
from math import nan, sqrt
from typing import Any

import numpy as np
import pytest

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.columns import ACTIVATIONS, GRADIENTS
from mp_agent.records.merged import MergedStep
from mp_agent.records.views import FirstNonfiniteGradient, FirstNonfiniteOutput, LayerView
from tests.agent.node.builders import make_run_view, merged_step

FINITE = {
    "elements": 4.0,
    "sum": 6.0,
    "sum_squares": 14.0,
    "abs_max": 3.0,
    "zero_elements": 1.0,
    "nan_elements": 0.0,
    "inf_elements": 0.0,
    "near_overflow_elements": 0.0,
}
"""Of 0, 1, 2 and 3."""


def nonfinite(call: float) -> dict[str, float]:
    return {**FINITE, "nan_elements": 1.0, "inf_elements": 2.0, "nonfinite_call": call}


@pytest.fixture
def account() -> Accumulator:
    return Accumulator(
        resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
    )


def sampled(sequence: int, row: dict[str, float], **values: float) -> MergedStep:
    step = merged_step(sequence, **values)
    families = {**step.families, ACTIVATIONS.name: row}
    return replace(step, families=families, complete=step.complete | {ACTIVATIONS.name})


def layers(**rows: dict[str, float]) -> MergedLayers:
    values = [[row.get(name, nan) for name in ACTIVATIONS.names] for row in rows.values()]
    return MergedLayers(
        names=tuple(rows),
        family=ACTIVATIONS,
        values=np.array(values),
        sound=np.ones(len(rows), dtype=bool),
        complete=True,
    )


def read(account: Accumulator, name: str) -> Any:
    metric = BY_PROMETHEUS_NAME[name]
    assert metric.read is not None
    return metric.read(account.view(make_run_view(), 0.0))


def read_layer(name: str, row: dict[str, float]) -> Any:
    metric = BY_PROMETHEUS_NAME[name]
    assert metric.read is not None
    view = LayerView(name="head", values=row, judged=True, family=ACTIVATIONS.name)
    return metric.read(view)


def test_the_runs_gauges_are_the_moments_of_the_last_sample(account):
    account.fold_step(sampled(1, FINITE))
    account.fold_step(merged_step(2))

    assert read(account, "mp_agent_activation_abs_max") == 3.0
    assert read(account, "mp_agent_activation_mean") == 1.5
    assert read(account, "mp_agent_activation_std") == pytest.approx(sqrt(1.25))
    assert read(account, "mp_agent_activation_zero_ratio") == 0.25


def test_moments_are_over_the_finite_elements():
    row = {**nonfinite(0.0), "elements": 7.0}
    assert read_layer("mp_agent_layer_activation_mean", row) == 1.5
    assert read_layer("mp_agent_layer_activation_std", row) == pytest.approx(sqrt(1.25))


@pytest.mark.parametrize(
    ("row", "mean", "deviation"),
    [
        ({"elements": 3.0, "nan_elements": 3.0, "inf_elements": 0.0}, None, None),
        ({"elements": 2.0, "sum": 1.7e308, "sum_squares": 1.7e308}, 8.5e307, None),
        ({"elements": 2.0, "sum": 2.0, "sum_squares": 2.0 - 1e-16}, 1.0, 0.0),
    ],
)
def test_what_has_no_moments_has_no_series(row, mean, deviation):
    assert read_layer("mp_agent_layer_activation_mean", row) == mean
    assert read_layer("mp_agent_layer_activation_std", row) == deviation


def test_elements_that_are_not_finite_or_close_to_it_are_counted(account):
    account.fold_step(sampled(1, nonfinite(0.0)))
    account.fold_step(sampled(2, {**FINITE, "near_overflow_elements": 5.0}))
    account.fold_step(merged_step(3))

    def total(name: str) -> float:
        return float(account.counters.total(BY_PROMETHEUS_NAME[name], ()))

    assert total("mp_agent_activation_nonfinite_elements_total") == 3.0
    assert total("mp_agent_activation_near_overflow_elements_total") == 5.0


def test_the_module_that_was_called_first_is_named_whatever_the_order_of_the_tree(account):
    account.fold_layers(7, layers(a=FINITE, b=nonfinite(4.0), c=nonfinite(2.0)), step_judged=True)

    assert read(account, "mp_agent_activation_first_nonfinite_info") == {("7", "c"): 1.0}


def test_the_first_sample_of_an_incident_counts_and_the_next_incident_is_another(account):
    for sequence, row in enumerate((FINITE, nonfinite(1.0), nonfinite(1.0), FINITE), 1):
        account.fold_layers(sequence, layers(a=row), step_judged=True)
    first = FirstNonfiniteOutput(step=2, layer="a")
    assert account.view(make_run_view(), 0.0).first_nonfinite_output == first

    account.fold_layers(5, layers(b=nonfinite(0.0)), step_judged=True)
    found = account.view(make_run_view(), 0.0).first_nonfinite_output
    assert found == FirstNonfiniteOutput(step=5, layer="b")


def test_it_names_the_layer_of_an_incident_that_began_in_this_forward(account):
    account.fold_step(sampled(3, nonfinite(0.0), loss_nonfinite=1.0, nan_elements=4.0))
    account.fold_layers(3, layers(a=nonfinite(0.0)), step_judged=True)

    found = account.view(make_run_view(), 0.0).first_nonfinite
    assert (found.phase, found.layer) == ("forward", "a")


def test_a_sample_after_the_incident_began_blames_no_layer_for_it(account):
    account.fold_step(merged_step(3, loss_nonfinite=1.0, nan_elements=4.0))
    account.fold_layers(4, layers(a=nonfinite(0.0)), step_judged=True)

    assert account.view(make_run_view(), 0.0).first_nonfinite.layer == ""


def gradients(**calls: float) -> dict[str, float]:
    """A row of finite outputs, with where in backward a gradient was not finite."""
    return {**FINITE, **{f"nonfinite_{name}_call": call for name, call in calls.items()}}


def test_the_module_in_which_a_gradient_stopped_being_finite_is_named(account):
    rows = {"a": gradients(gradient=3.0), "b": gradients(backward=3.0), "c": FINITE}
    account.fold_layers(7, layers(**rows), step_judged=True)

    metric = "mp_agent_activation_first_nonfinite_gradient_info"
    assert read(account, metric) == {("7", "b", "within"): 1.0}


def test_where_no_module_has_that_gradients_tensor_the_one_before_is_named(account):
    account.fold_layers(7, layers(a=gradients(gradient=3.0), b=FINITE), step_judged=True)

    metric = "mp_agent_activation_first_nonfinite_gradient_info"
    assert read(account, metric) == {("7", "a", "after"): 1.0}


def test_of_several_ranks_the_one_where_it_was_earlier_in_backward_counts(account):
    rows = {
        "a": gradients(gradient=5.0),
        "b": gradients(backward=5.0, gradient=2.0),
        "c": FINITE,
    }
    account.fold_layers(7, layers(**rows), step_judged=True)
    found = account.view(make_run_view(), 0.0).first_nonfinite_gradient
    assert found == FirstNonfiniteGradient(step=7, layer="b", place="after")


def test_what_was_not_finite_in_forward_did_not_arise_in_backward(account):
    rows = {"a": {**nonfinite(0.0), "nonfinite_gradient_call": 0.0}, "b": gradients(backward=0.0)}
    account.fold_layers(7, layers(**rows), step_judged=True)
    assert account.view(make_run_view(), 0.0).first_nonfinite_gradient is None

    account.fold_step(sampled(8, FINITE, loss_nonfinite=1.0, nan_elements=4.0))
    account.fold_layers(8, layers(a=gradients(gradient=0.0)), step_judged=True)
    assert account.view(make_run_view(), 0.0).first_nonfinite_gradient is None


def test_the_first_sample_with_non_finite_gradients_counts(account):
    for sequence, row in enumerate((FINITE, gradients(backward=1.0), gradients(backward=0.0)), 1):
        account.fold_layers(sequence, layers(a=row), step_judged=True)
    found = account.view(make_run_view(), 0.0).first_nonfinite_gradient
    assert found == FirstNonfiniteGradient(step=2, layer="a", place="within")


@pytest.mark.parametrize(
    ("weight", "named"),
    [("a.weight", "b"), ("b.weight", "b"), ("c.weight", "c.weight"), ("other", "b")],
)
def test_it_names_the_layer_of_an_incident_that_began_in_backward(account, weight, named):
    account.fold_step(sampled(3, FINITE, nan_elements=4.0))
    values = np.array([[1.0 if "nan" in name else nan for name in GRADIENTS.names]])
    of_weight = MergedLayers(
        names=(weight,), family=GRADIENTS, values=values, sound=np.ones(1, bool), complete=True
    )
    account.fold_layers(3, of_weight, step_judged=True)
    rows = {"a": gradients(gradient=3.0), "b": gradients(backward=3.0), "c": FINITE}
    account.fold_layers(3, layers(**rows), step_judged=True)

    found = account.view(make_run_view(), 0.0).first_nonfinite
    assert (found.phase, found.layer) == ("backward", named)
