"""Watched tensors in the account of a run: metrics by name, bounded in number."""

from dataclasses import replace
from math import nan, sqrt
from typing import Any

import numpy as np
import pytest

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.instruments import NAMES_AT_MOST
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.columns import TENSORS
from mp_agent.records.tensor_collections import packed
from tests.agent.node.builders import make_run_view, merged_step
from tests.agent.probe.instruments.tensor_reference import bins

ROW = {
    "elements": 5.0,
    "nonfinite_elements": 1.0,
    "sum": 6.0,
    "sum_squares": 14.0,
    "abs_sum": 6.0,
    "abs_max": 3.0,
    "abs_min": 1.0,
    "swallowed_sum": 1.5,
    "reduction": 1.0,
    "range_ratio": packed(20_000.0, 3),
}
"""Of 0, 1, 2, 3 and NaN."""


@pytest.fixture
def account() -> Accumulator:
    return Accumulator(
        resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
    )


def tensors(rows: dict[str, dict[str, float]], *, complete: bool = True) -> MergedLayers:
    values = [[row.get(name, nan) for name in TENSORS.names] for row in rows.values()]
    return MergedLayers(
        names=tuple(rows),
        family=TENSORS,
        values=np.array(values),
        sound=np.ones(len(rows), dtype=bool),
        complete=complete,
    )


def read(account: Accumulator, name: str) -> Any:
    metric = BY_PROMETHEUS_NAME[name]
    assert metric.read is not None
    return metric.read(account.view(make_run_view(thresholds=resolve({})), 0.0))


def fold(account: Accumulator, sequence: int = 1, *, complete: bool = True, **rows: Any) -> None:
    account.fold_layers(sequence, tensors(rows, complete=complete), step_judged=complete)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("abs_max", 3.0),
        ("abs_min", 1.0),
        ("dynamic_range", 3.0),
        ("mean", 1.5),
        ("norm", sqrt(14.0)),
        ("elements", 5.0),
        ("nonfinite_elements", 1.0),
        ("swallowed_ratio", 0.25),
        ("reduction_swallowed_ratio", 0.25),
        ("slice_imbalance", pytest.approx(20_000.0)),
        ("worst_slice", 3),
    ],
)
def test_the_gauges_are_of_the_last_sample_by_name(account, name, value):
    fold(account, logits=ROW)
    account.fold_step(merged_step(2))

    assert read(account, f"mp_agent_tensor_{name}") == {("logits",): value}


def test_what_a_row_lacks_has_no_series(account):
    fold(account, ids={"elements": 3.0, "nonfinite_elements": 3.0, "abs_sum": 0.0, "sum": 0.0})

    for name in ("abs_max", "abs_min", "dynamic_range", "mean", "swallowed_ratio", "worst_slice"):
        assert read(account, f"mp_agent_tensor_{name}") == {("ids",): None}, name


def test_the_share_of_a_sum_that_is_none_is_not_judged(account):
    fold(account, logits={**ROW, "reduction": 0.0})

    assert read(account, "mp_agent_tensor_swallowed_ratio") == {("logits",): 0.25}
    assert read(account, "mp_agent_tensor_reduction_swallowed_ratio") == {("logits",): None}


def row_of(elements: np.ndarray) -> dict[str, float]:
    sizes = np.abs(elements[elements != 0.0])
    extremes = {"abs_max": float(sizes.max())} if sizes.size else {}
    return {"elements": float(elements.size), **extremes, **bins(sizes)}


_RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(
    "elements",
    [
        _RANDOM.normal(size=100_000),
        np.exp(_RANDOM.normal(0.0, 8.0, size=700)),
        np.concatenate([np.full(2, 1e-15), np.full(198, 3.0), np.zeros(1000)]),
        np.concatenate([np.full(1, 1e-15), np.full(199, 3.0)]),
        np.array([-3.0]),
        np.array([65504.0, 5.960464477539063e-08]),
        np.full(50, 7.0),
        np.array([2.0**-64, 2.0**30]),
    ],
)
def test_the_range_above_the_first_percentile_is_half_of_the_true_one_or_more(account, elements):
    fold(account, x=row_of(elements))
    sizes = np.abs(elements[elements != 0.0])
    true = sizes.max() / np.percentile(sizes, 1.0, method="inverted_cdf")

    found = read(account, "mp_agent_tensor_dynamic_range_p01")[("x",)]
    assert true / 2.0 <= found <= true
    assert found == true or len(set(sizes)) > 1, "of equal elements it is exact"


@pytest.mark.parametrize(
    ("elements", "found"),
    [
        (np.zeros(3), None),
        (np.array([1e-300, 1.0]), 2.0**63),
        (np.array([1e12, 1e20]), 1.0),
        (np.array([1e-300, 1e300]), None),
    ],
)
def test_beyond_the_bins_the_range_is_at_most_what_is_known(account, elements, found):
    fold(account, x=row_of(elements))

    assert read(account, "mp_agent_tensor_dynamic_range_p01") == {("x",): found}


def test_the_ranks_bins_merge_to_those_of_all_their_elements(account):
    parts = [_RANDOM.normal(size=500), np.exp(_RANDOM.normal(0.0, 20.0, size=99)), np.zeros(3)]
    rows = [[row_of(part).get(name, nan) for name in TENSORS.names] for part in parts]

    merged = TENSORS.merged(rows)
    assert {name: merged[name] for name in bins(np.ones(1))} == bins(
        np.abs(np.concatenate(parts)[np.concatenate(parts) != 0.0])
    )


def test_a_dynamic_range_beyond_float64_has_no_series(account):
    fold(account, x={**ROW, "abs_max": 1e308, "abs_min": 5e-324})

    assert read(account, "mp_agent_tensor_dynamic_range") == {("x",): None}


def test_the_most_imbalanced_tensor_is_named_with_its_slice(account):
    fold(account, logits={**ROW, "range_ratio": packed(9000.0, 1)}, inputs=ROW, ids={"elements": 1})

    assert read(account, "mp_agent_imbalanced_tensor_info") == {("inputs", "3"): 1.0}


def test_a_sample_without_some_ranks_does_not_replace_one_with_all(account):
    fold(account, 1, x=ROW)
    fold(account, 2, complete=False, x={**ROW, "abs_max": 2.0})
    assert read(account, "mp_agent_tensor_abs_max") == {("x",): 3.0}


def test_what_only_some_ranks_watch_is_shown_as_they_have_it(account):
    fold(account, 1, complete=False, x=ROW)
    fold(account, 2, complete=False, x={**ROW, "abs_max": 2.0})
    assert read(account, "mp_agent_tensor_abs_max") == {("x",): 2.0}


def test_names_beyond_the_limit_are_counted_and_have_no_series(account):
    names = [f"of rank {number}" for number in range(NAMES_AT_MOST + 5)]
    account.fold_layers(1, tensors(dict.fromkeys(names, ROW)), step_judged=True)

    assert len(read(account, "mp_agent_tensor_abs_max")) == NAMES_AT_MOST
    assert read(account, "mp_agent_tensors_watched") == NAMES_AT_MOST + 5


def test_calls_that_measured_nothing_are_counted(account):
    step = merged_step(1)
    account.fold_step(replace(step, columns={**step.columns, "unmeasured_tensors": 3.0}))
    account.fold_step(merged_step(2))

    name = "mp_agent_tensor_unmeasured_calls_total"
    assert account.counters.total(BY_PROMETHEUS_NAME[name], ()) == 3.0
