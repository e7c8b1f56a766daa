"""Layers whose FP8 scales do not fit, in the account of a run: after some samples in a row."""

import pytest

from mp_agent.node.accounting.accumulator import Accumulator
from mp_agent.node.accounting.instruments import NAMED_AT_MOST
from tests.agent.node.accounting.fp8_account import (
    add_sample,
    misscaled,
    named,
    new_account,
    read,
)
from tests.agent.node.builders import merged_step

INFO = "mp_agent_fp8_misscaled_layer_info"


@pytest.fixture
def account() -> Accumulator:
    return new_account()


def row(smallest: float, largest: float) -> dict[str, float]:
    return {
        "tensors": 3.0,
        "scaled_tensors": 3.0,
        "saturated_tensors": float(largest > 1.0),
        "range_used_max": largest,
        "range_used_min": smallest,
    }


def test_a_layer_counts_after_three_samples_beyond_a_limit(account):
    rows = {
        "healthy": row(0.5, 1.0),
        "at the limits": row(6.1e-5, 4.0),
        "saturated": row(0.5, 5.0),
        "unused": row(1e-8, 1.0),
        "both": row(1e-6, 1e6),
    }
    found = []
    for sequence in range(1, 5):
        add_sample(account, sequence, rows)
        found.append(misscaled(account))
    assert found == [0.0, 0.0, 3.0, 3.0]
    assert named(account) == [
        ("both", "saturated"),
        ("saturated", "saturated"),
        ("unused", "unused"),
        ("both", "unused"),
    ]


@pytest.mark.parametrize("between", [row(0.5, 1.0), row(1e-8, 1.0), {"tensors": 3.0}])
def test_a_sample_within_the_limit_starts_the_count_again(account, between):
    for sequence, found in enumerate([row(0.5, 9.0)] * 2 + [between] + [row(0.5, 9.0)] * 2, 1):
        add_sample(account, sequence, {"a": found, "b": row(0.5, 1.0)})
        assert misscaled(account) == 0.0
    add_sample(account, 6, {"a": row(0.5, 9.0), "b": row(0.5, 1.0)})
    assert named(account) == [("a", "saturated")]


@pytest.mark.parametrize("lacking", ["complete", "judged"])
def test_a_sample_that_does_not_count_leaves_all_as_it_was(account, lacking):
    for sequence in range(1, 4):
        add_sample(account, sequence, {"a": row(0.5, 9.0)})
    add_sample(account, 4, {"a": row(0.5, 1.0)}, **{lacking: False})
    assert misscaled(account) == 1.0


def test_layers_without_delayed_scaling_never_count(account):
    """Of dynamic scaling, or of a model that is not in FP8, only the flushed elements are known."""
    operands = {"tensors": 3.0, "input_elements": 100.0, "input_flushed_elements": 99.0}
    for sequence in range(1, 10):
        add_sample(account, sequence, {"a": operands})
    assert misscaled(account) is None
    assert not read(account, INFO)


def test_a_layer_whose_amax_is_not_finite_has_no_range_that_could_count(account):
    nonfinite = {"tensors": 1.0, "scaled_tensors": 1.0, "saturated_tensors": 1.0}
    for sequence in range(1, 10):
        add_sample(account, sequence, {"a": nonfinite, "b": row(0.5, 1.0)})
    assert misscaled(account) == 0.0


def test_without_samples_there_is_no_series(account):
    account.fold_step(merged_step(1))
    assert misscaled(account) is None and not read(account, INFO)


def test_only_the_furthest_are_named_but_all_are_counted(account):
    rows = {f"layer {place}": row(0.5, 10.0 + place) for place in range(30)}
    for sequence in range(1, 4):
        add_sample(account, sequence, rows)
    assert misscaled(account) == 30.0
    names = [name for name, _ in named(account)]
    assert names == [f"layer {place}" for place in range(29, 29 - NAMED_AT_MOST, -1)]


def test_the_next_attempt_starts_over(account):
    for sequence in range(1, 4):
        add_sample(account, sequence, {"a": row(0.5, 9.0)})
    assert account.progress.next_attempt().fp8.saturated == {}


def cast(input_flushed: float, weight_flushed: float = 0.0, cast_tensors: float = 2.0):
    return {
        "tensors": 2.0,
        "cast_tensors": cast_tensors,
        "input_elements": 100.0,
        "input_flushed_elements": input_flushed,
        "weight_elements": 100.0,
        "weight_flushed_elements": weight_flushed,
    }


def test_a_layer_that_loses_most_of_an_operand_counts_after_three_samples(account):
    rows = {"healthy": cast(4.0), "input": cast(83.0), "weight": cast(0.0, 51.0)}
    found = []
    for sequence in range(1, 5):
        add_sample(account, sequence, rows)
        found.append(read(account, "mp_agent_layers_fp8_flushed"))
    assert found == [0.0, 0.0, 2.0, 2.0]
    assert list(read(account, "mp_agent_fp8_flushed_layer_info")) == [
        ("input", "input"),
        ("weight", "weight"),
    ]
    assert read(account, "mp_agent_fp8_flushed_layer_max_ratio") == 0.83


def test_a_sample_below_the_limit_ends_the_count(account):
    for sequence, share in enumerate([83.0, 83.0, 50.0, 83.0, 83.0], 1):
        add_sample(account, sequence, {"a": cast(share)})
        assert read(account, "mp_agent_layers_fp8_flushed") == 0.0


def test_a_layer_that_is_not_cast_is_not_judged_by_what_a_cast_would_lose(account):
    for sequence in range(1, 10):
        add_sample(account, sequence, {"a": cast(99.0, cast_tensors=0.0)})
    assert read(account, "mp_agent_layers_fp8_flushed") is None
