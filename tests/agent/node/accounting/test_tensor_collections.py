"""Collections in the account of a run: the union of their layers, against NumPy in float64."""

import logging
from collections.abc import Mapping
from math import inf, nan
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.columns import DISTRIBUTION, GRADIENTS, ColumnFamily
from mp_agent.records.tensor_collections import TensorCollection
from tests.agent.distribution_reference import distribution_reference
from tests.agent.gradient_reference import reference_columns
from tests.agent.node.builders import make_run_view

LOSS_SCALE = 1024.0
ATTENTION = TensorCollection("attention", ("attn",))
EVERYTHING = TensorCollection("everything", (".",))

Gradients = Mapping[str, npt.NDArray[np.float64]]


@pytest.fixture
def account() -> Accumulator:
    return Accumulator(
        resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
    )


def table(family: ColumnFamily, gradients: Gradients, *, complete: bool = True) -> MergedLayers:
    rows = []
    for elements in gradients.values():
        found: Mapping[str, float] = reference_columns(elements)
        if family is DISTRIBUTION:
            found = distribution_reference(elements.tolist(), LOSS_SCALE)
        rows.append([found[name] for name in family.names])
    return MergedLayers(
        names=tuple(gradients),
        family=family,
        values=np.array(rows),
        sound=np.array([bool(np.isfinite(elements).all()) for elements in gradients.values()]),
        complete=complete,
    )


def fold(
    account: Accumulator,
    gradients: Gradients,
    *collections: TensorCollection,
    sequence: int = 1,
    judged: bool = True,
    complete: bool = True,
    families: tuple[ColumnFamily, ...] = (GRADIENTS, DISTRIBUTION),
) -> None:
    for family in families:
        account.fold_layers(
            sequence,
            table(family, gradients, complete=complete),
            step_judged=judged,
            collections=collections,
        )


def read(account: Accumulator, name: str) -> Any:
    metric = BY_PROMETHEUS_NAME[f"mp_agent_collection_{name}"]
    assert metric.read is not None
    return metric.read(account.view(make_run_view(), 0.0))


def expected(elements: npt.NDArray[np.float64]) -> dict[str, float | None]:
    """What a collection of these elements has to show, with nothing of the product's."""
    sizes = np.abs(elements[elements != 0.0])
    return {
        "grad_norm": float(np.sqrt(np.square(elements).sum())),
        "grad_abs_max": float(np.abs(elements).max()),
        "grad_abs_min": float(sizes.min()) if sizes.size else None,
        "grad_nonfinite_elements": 0.0,
        "grad_mean": float(elements.mean()),
        "grad_deviation": float(elements.std()),
        "grad_fp16_near_overflow_ratio": float((sizes * LOSS_SCALE > 60000.0).mean())
        if sizes.size
        else None,
    }


_RANDOM = np.random.default_rng(0)

CASES: dict[str, list[npt.NDArray[np.float64]]] = {
    "of different sizes and scales": [
        _RANDOM.normal(size=1000),
        _RANDOM.normal(3.0, 50.0, size=17),
        _RANDOM.normal(0.0, 1e-6, size=400),
    ],
    "one element": [np.array([-3.5])],
    "zeros of both signs": [np.array([0.0, -0.0]), np.array([0.0])],
    "some of it zero": [np.zeros(5), np.array([0.5, -1.0])],
    "at FP16's limits": [np.array([65504.0, 65520.0, 60000.0, 60001.0]) / LOSS_SCALE, np.ones(3)],
    "subnormal and huge": [np.array([5e-324, 1e-310]), np.array([1e150, -1e-150])],
    "with a layer that has no gradient": [np.array([2.0, -1.0]), np.empty(0)],
}


@pytest.mark.parametrize("name", CASES)
def test_a_collection_shows_what_its_elements_have_together(account, name):
    parts = CASES[name]
    gradients = {f"h.{number}.attn.weight": part for number, part in enumerate(parts)}
    fold(account, {"mlp.weight": np.array([1e6, 7.0]), **gradients}, ATTENTION)

    for metric, value in expected(np.concatenate(parts)).items():
        found = read(account, metric)[("attention",)]
        assert found == (None if value is None else pytest.approx(value, rel=1e-9, abs=1e-320)), (
            metric
        )
    assert read(account, "layers") == {("attention",): len(parts)}


def test_a_layer_may_be_in_several_collections(account):
    gradients = {"attn": np.array([3.0]), "mlp": np.array([4.0])}
    fold(account, gradients, ATTENTION, EVERYTHING)

    assert read(account, "grad_norm") == {("attention",): 3.0, ("everything",): 5.0}
    assert read(account, "layers") == {("attention",): 1.0, ("everything",): 2.0}


def test_a_step_that_does_not_count_leaves_all_but_the_non_finite_elements(account):
    fold(account, {"attn": np.array([3.0]), "mlp": np.array([4.0])}, ATTENTION, EVERYTHING)
    bad = {"attn": np.array([1.0]), "mlp": np.array([nan, inf, -inf])}
    fold(account, bad, ATTENTION, EVERYTHING, sequence=2, judged=False)

    assert read(account, "grad_norm") == {("attention",): 3.0, ("everything",): 5.0}
    assert read(account, "grad_mean") == {("attention",): 3.0, ("everything",): 3.5}
    elements = {("attention",): 0.0, ("everything",): 3.0}
    assert read(account, "grad_nonfinite_elements") == elements


def test_a_step_without_some_ranks_leaves_the_values_as_they_are(account):
    fold(account, {"attn": np.array([3.0])}, ATTENTION)
    fold(account, {"attn": np.array([1.0])}, ATTENTION, sequence=2, complete=False)

    assert read(account, "grad_norm") == {("attention",): 3.0}


def test_a_collection_with_a_layer_that_does_not_count_does_not_count(account):
    gradients = {"attn": np.array([3.0]), "attn.of_a_skipped_optimizer": np.array([nan])}
    fold(account, gradients, ATTENTION)

    assert read(account, "grad_norm") == {("attention",): None}


def test_without_the_distribution_there_is_no_mean(account):
    fold(account, {"attn": np.array([3.0])}, ATTENTION, families=(GRADIENTS,))

    assert read(account, "grad_norm") == {("attention",): 3.0}
    for name in ("grad_mean", "grad_deviation", "grad_fp16_near_overflow_ratio"):
        assert read(account, name) == {("attention",): None}, name


def test_a_collection_without_layers_is_said_once_and_shown_as_0(account, caplog):
    nothing = TensorCollection("router", ("gate",))
    with caplog.at_level(logging.WARNING, logger="mp_agent.node"):
        for sequence in (1, 2, 3):
            fold(account, {"attn": np.array([3.0])}, ATTENTION, nothing, sequence=sequence)

    assert read(account, "layers") == {("attention",): 1.0, ("router",): 0.0}
    assert read(account, "grad_norm") == {("attention",): 3.0, ("router",): None}
    assert read(account, "grad_nonfinite_elements") == {("attention",): 0.0, ("router",): None}
    what = "collection 'router', which matches no parameter"
    assert [record.getMessage() for record in caplog.records] == [
        f"mp_agent does not measure this: {what}"
    ]
    assert account.progress.collections.unmatched == (what,)


def test_the_next_attempt_starts_over(account):
    fold(account, {"attn": np.array([3.0])}, ATTENTION)
    account.begin_attempt()

    assert read(account, "grad_norm") == {}


def test_what_is_defined_no_more_is_shown_no_more(account):
    gradients = {"attn": np.array([3.0]), "mlp": np.array([4.0])}
    fold(account, gradients, ATTENTION, EVERYTHING)
    fold(account, gradients, EVERYTHING, sequence=2)

    assert read(account, "grad_norm") == {("everything",): 5.0}
