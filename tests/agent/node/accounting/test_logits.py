"""Logits in the account of a run: their growth against the run's past, and the modules above."""

from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.instruments import SAMPLES_AT_LEAST, SAMPLES_KEPT, LogitHistory
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.columns import ATTENTION, LOGITS
from mp_agent.records.merged import MergedStep
from tests.agent.node.builders import make_run_view, merged_step


@pytest.fixture
def account() -> Accumulator:
    return Accumulator(
        resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
    )


def sampled(sequence: int, logit: float, low: float = -1.0, high: float = 3.0) -> MergedStep:
    step = merged_step(sequence)
    families = {
        **step.families,
        ATTENTION.name: {"elements": 9.0, "nonfinite_elements": 1.0, "logit_max": logit},
        LOGITS.name: {
            "rows": 5.0,
            "nonfinite_rows": 1.0,
            "logit_max": high,
            "logsumexp_max": high,
            "logsumexp_min": low,
            "logsumexp_sum": 6.0,
        },
    }
    complete = step.complete | {ATTENTION.name, LOGITS.name}
    return replace(step, families=families, complete=complete)


def read(account: Accumulator, name: str) -> Any:
    metric = BY_PROMETHEUS_NAME[name]
    assert metric.read is not None
    return metric.read(account.view(make_run_view(), 0.0))


def test_the_runs_gauges_are_of_the_last_sample(account):
    account.fold_step(sampled(1, 40.0, low=-7.0))
    account.fold_step(merged_step(2))

    assert read(account, "mp_agent_attention_logit_max") == 40.0
    assert read(account, "mp_agent_output_logit_max") == 3.0
    assert read(account, "mp_agent_output_logsumexp_max") == 3.0
    assert read(account, "mp_agent_output_logsumexp_min") == -7.0
    assert read(account, "mp_agent_output_logsumexp_size") == 7.0
    assert read(account, "mp_agent_output_logsumexp_mean") == 1.5, "over 4 finite rows"
    for name in ("attention_nonfinite_logits", "output_nonfinite_rows"):
        metric = BY_PROMETHEUS_NAME[f"mp_agent_{name}_total"]
        assert account.counters.total(metric, ()) == 1.0


def test_without_samples_there_is_no_series(account):
    account.fold_step(merged_step(1))
    for metric in BY_PROMETHEUS_NAME.values():
        if metric.read and metric.name.startswith(("mp_agent.attention", "mp_agent.output")):
            assert not read(account, metric.prometheus_name), metric.name


def test_growth_is_of_the_last_three_over_the_earlier_half(account):
    for sequence in range(1, 11):
        account.fold_step(sampled(sequence, 20.0, low=-5.0))
    for sequence in range(11, 14):
        account.fold_step(sampled(sequence, 80.0, low=-40.0))
    assert read(account, "mp_agent_attention_logit_growth") == 4.0
    assert read(account, "mp_agent_output_logsumexp_growth") == 8.0


def test_one_odd_sample_is_no_growth(account):
    for sequence in range(1, 11):
        account.fold_step(sampled(sequence, 500.0 if sequence == 10 else 20.0))
    assert read(account, "mp_agent_attention_logit_growth") == 1.0


def test_a_young_run_has_no_past():
    past = LogitHistory()
    for sample in range(SAMPLES_AT_LEAST):
        assert past.growth is None
        past.add(float(sample))
    assert past.growth == 4.0, "the median of 5, 6 and 7, over that of 0, 1, 2 and 3"


@pytest.mark.parametrize(("value", "growth"), [(-50.0, -50.0), (0.0, 0.0), (1.7e308, 1.0)])
def test_growth_is_finite(value, growth):
    past = LogitHistory()
    for _ in range(SAMPLES_AT_LEAST):
        past.add(value)
    assert past.growth == growth


def test_the_past_reaches_back_to_the_first_sample_in_bounded_memory():
    past = LogitHistory()
    for sample in range(10_000):
        past.add(float(sample))
        assert len(past.kept) < SAMPLES_KEPT
    assert past.kept[0] == 0.0
    steps = np.diff(past.kept)
    assert set(steps) == {float(past.every)}, "evenly spread"
    assert past.growth == pytest.approx(9998 / 2500, rel=0.1)


def test_modules_above_the_limit_are_named_the_largest_first(account):
    rows = {"a": 150.0, "b": 99.0, "c": 300.0, "d": nan}
    values = np.array([[9.0, 0.0, logit] for logit in rows.values()])
    layers = MergedLayers(
        names=tuple(rows),
        family=ATTENTION,
        values=values,
        sound=np.ones(len(rows), dtype=bool),
        complete=True,
    )
    account.fold_step(sampled(1, 300.0))
    account.fold_layers(1, layers, step_judged=True)
    named = read(account, "mp_agent_attention_high_layer_info")
    assert list(named) == [("c",), ("a",)]
