"""Series budgets of two families of columns, of which this test declares the second."""

import pytest

from mp_agent.catalog.metric import Kind, Metric, Scope, Snapshot
from mp_agent.catalog.metrics import METRICS
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.series.layer_budget import LayerBudget
from mp_agent.node.series.snapshot_builder import (
    LayerMetrics,
    RunExport,
    SnapshotBuilder,
    giving_way,
)
from mp_agent.records.columns import (
    FAMILIES,
    GRADIENTS,
    LOGITS,
    LOGPROBS,
    TENSORS,
    Column,
    ColumnFamily,
)
from mp_agent.records.columns.column import Algebra
from mp_agent.records.columns.gradients import FEW_WEIGHTS, STATE
from mp_agent.records.columns.gradients import WEIGHTS as COMPARED
from mp_agent.records.views import LayerView
from tests.agent.node.builders import NO_GRADIENTS, make_export, make_run_view

WEIGHTS = ColumnFamily(
    name="weights",
    row="elements of parameters",
    columns=(
        Column("abs_max", Algebra.MIN, "of another algebra than that of the gradients"),
        Column("elements", Algebra.SUM, "elements looked at"),
    ),
    key="abs_max",
    required=("abs_max", "elements"),
    size="elements",
)
BOTH = (*FAMILIES, WEIGHTS)


def metric(name: str, **changes: object) -> Metric:
    facts = {"kind": Kind.GAUGE, "read": lambda layer: layer.values["abs_max"], **changes}
    return Metric(
        name=f"mp_agent.layer.weight.{name}",
        unit="{thing}",
        scope=Scope.LAYER,
        help="Of this test.",
        family=WEIGHTS.name,
        **facts,  # type: ignore[arg-type]
    )


LARGEST = metric("abs_max")
SMALLEST = metric("abs_min", gives_way=True)
LOOKS = metric("looks", kind=Kind.COUNTER, read=None, count=lambda layer: 1.0)
ALL = (*METRICS, LARGEST, SMALLEST, LOOKS)

OWN = ("grad_norm", "grad_abs_min", "grad_abs_mean")
PROMETHEUS = {name: f"mp_agent_layer_{name}" for name in OWN} | {
    "largest": LARGEST.prometheus_name,
    "smallest": SMALLEST.prometheus_name,
    "looks": LOOKS.prometheus_name,
    "nonfinite": "mp_agent_layer_grad_nonfinite_elements_total",
}
LAYERS = 40
GRADIENT_SERIES, WEIGHT_SERIES = 6, 3
"""Of each layer, when nothing gives way."""


def export(layers: int = LAYERS) -> RunExport:
    gradients = {**NO_GRADIENTS, "sum_squares": 1.0, "abs_max": 1.0, "abs_min": 0.5, "elements": 4}
    views = [
        LayerView(name=f"blocks.{i}.w", values=gradients, judged=True) for i in range(layers)
    ] + [
        LayerView(
            name=f"blocks.{i}.w",
            values={"abs_max": float(i + 1), "elements": 4.0},
            judged=True,
            family=WEIGHTS.name,
        )
        for i in range(layers)
    ]
    return make_export(view=make_run_view(), layers=views, layer_budget=LayerBudget(families=BOTH))


def builder(max_series: int) -> SnapshotBuilder:
    return SnapshotBuilder(resolve({}), max_series, metrics=ALL, families=BOTH)


def counts(snapshot: Snapshot) -> dict[str, int]:
    """Return how many series of the layers there are, by the names of `PROMETHEUS`."""
    found = {family.metric.prometheus_name: len(family.samples) for family in snapshot}
    return {name: found[own] for name, own in PROMETHEUS.items()}


def layer_series(snapshot: Snapshot) -> int:
    return sum(len(f.samples) for f in snapshot if f.metric.scope is Scope.LAYER)


@pytest.fixture(scope="module")
def others() -> int:
    """Series of everything but the layers."""
    snapshot = builder(10**6).build([export(0)], 0.0)
    return sum(
        len(f.samples) * (len(f.metric.bounds) + 3 if f.metric.kind is Kind.HISTOGRAM else 1)
        for f in snapshot
    )


@pytest.mark.parametrize(
    ("per_layer", "gone"),
    [
        (9, set()),
        (8, {"smallest"}),
        (6, {"smallest", "grad_abs_min", "grad_abs_mean"}),
        (5, {"smallest", "grad_abs_min", "grad_abs_mean", "largest"}),
    ],
)
def test_the_last_family_gives_way_first(others, per_layer, gone):
    exact = builder(others + per_layer * LAYERS)
    snapshot = exact.build([export()], 0.0)
    found = counts(snapshot)

    assert {name for name, number in found.items() if not number} == gone
    assert {number for name, number in found.items() if name not in gone} == {LAYERS}
    assert exact.pop_dropped("llama") == len(gone) * LAYERS
    assert layer_series(snapshot) == per_layer * LAYERS


def test_counters_stay_and_layers_are_rolled_up_once_nothing_is_left_to_give_way(others):
    tight = builder(others + 5 * LAYERS - 1)
    snapshot = tight.build([export()], 0.0)
    found = counts(snapshot)

    assert not any(found[name] for name in ("smallest", "largest", "grad_abs_min", "grad_abs_mean"))
    assert 0 < found["looks"] == found["nonfinite"] == found["grad_norm"] < LAYERS
    assert layer_series(snapshot) < 5 * LAYERS
    shown = found["looks"]
    assert tight.pop_dropped("llama") >= 4 * LAYERS + 5 * (LAYERS - shown)


def test_what_gave_way_comes_back_with_space_only(others):
    room = builder(others + 9 * LAYERS)
    needed = {layers: counts(room.build([export(layers)], 0.0)) for layers in (LAYERS, LAYERS + 1)}
    assert needed[LAYERS]["smallest"] == LAYERS
    assert needed[LAYERS + 1]["smallest"] == 0

    assert counts(room.build([export(LAYERS)], 0.0))["smallest"] == 0
    fewer = int(LAYERS / 1.2)
    assert counts(room.build([export(fewer)], 0.0))["smallest"] == fewer


def test_a_roll_up_unites_each_family_by_its_own_columns():
    budget = LayerBudget(families=BOTH)
    views = list(export().layers)
    shown, _ = budget.govern(views, export().counters, (), 10)

    for name in {view.name for view in shown}:
        own = {view.family: view.values for view in shown if view.name == name}
        assert own.keys() == {GRADIENTS.name, WEIGHTS.name}
    names = [view.name for view in shown if view.family == WEIGHTS.name]
    (rolled_up,) = [v for v in shown if v.family == WEIGHTS.name and v.name.endswith("*")]
    hidden = [v for v in views if v.family == WEIGHTS.name and v.name not in names]
    assert rolled_up.values["abs_max"] == min(view.values["abs_max"] for view in hidden)
    assert rolled_up.values["elements"] == 4.0 * len(hidden)


def test_with_one_family_only_what_says_so_gives_way():
    (nothing, first) = giving_way(tuple(m for m in METRICS if m.scope is Scope.LAYER), (GRADIENTS,))
    assert nothing == frozenset()
    assert {m.prometheus_name for m in first} == {
        m.prometheus_name for m in METRICS if m.gives_way and m.family == GRADIENTS.name
    }


def test_every_layer_metric_is_of_a_declared_family():
    names = {family.name for family in FAMILIES}
    assert {m.family for m in METRICS if m.scope is Scope.LAYER} <= names
    of_the_run_alone = {
        each.name for each in (LOGITS, LOGPROBS, STATE, FEW_WEIGHTS, TENSORS, COMPARED)
    }
    assert {m.family for m in LayerMetrics(METRICS, FAMILIES).all} == names - of_the_run_alone
