"""Routers in the account of a run: the worst of the last sample, and those that have collapsed."""

from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.columns import ROUTERS
from tests.agent.node.builders import make_run_view, merged_step


@pytest.fixture
def account() -> Accumulator:
    return Accumulator(
        resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
    )


def row(load: float, entropy: float | None, unused: float = 0.0) -> dict[str, float]:
    found = {"tokens": 100.0, "load_max": load, "experts": 8.0, "unused_experts": unused}
    if entropy is None:
        return found
    return {
        **found,
        "nonfinite_tokens": 20.0,
        "entropy_tokens": 80.0,
        "entropy_sum": 80.0 * entropy,
        "logit_abs_max": 5.0,
    }


def sample(
    account: Accumulator, sequence: int, rows: dict[str, dict[str, float]], *, complete: bool = True
) -> None:
    step = merged_step(sequence)
    of_run = {**row(4.0, 0.5), "limited_choices": 200.0, "dropped_choices": 50.0}
    account.fold_step(
        replace(
            step,
            families={**step.families, ROUTERS.name: of_run},
            complete=step.complete | {ROUTERS.name},
        )
    )
    values = [[one.get(name, nan) for name in ROUTERS.names] for one in rows.values()]
    layers = MergedLayers(
        names=tuple(rows),
        family=ROUTERS,
        values=np.array(values),
        sound=np.ones(len(rows), dtype=bool),
        complete=complete,
    )
    account.fold_layers(sequence, layers, step_judged=True)


def read(account: Accumulator, name: str) -> Any:
    metric = BY_PROMETHEUS_NAME[name]
    assert metric.read is not None
    return metric.read(account.view(make_run_view(), 0.0))


def test_the_runs_gauges_are_of_the_worst_router_of_the_last_sample(account):
    sample(account, 1, {"a": row(1.5, 0.9, unused=1.0), "b": row(4.0, 0.4, unused=2.0)})
    account.fold_step(merged_step(2))

    assert read(account, "mp_agent_router_load_max") == 4.0
    assert read(account, "mp_agent_router_entropy_min_ratio") == pytest.approx(0.4)
    assert read(account, "mp_agent_router_unused_experts_ratio") == 0.25
    assert read(account, "mp_agent_router_logit_abs_max") == 5.0
    assert read(account, "mp_agent_router_dropped_ratio") == 0.25
    assert read(account, "mp_agent_routers_collapsed") == 0.0
    for name, total in (("tokens", 100.0), ("nonfinite_tokens", 20.0)):
        metric = BY_PROMETHEUS_NAME[f"mp_agent_router_{name}_total"]
        assert account.counters.total(metric, ()) == total


def test_without_samples_there_is_no_series(account):
    account.fold_step(merged_step(1))
    for metric in BY_PROMETHEUS_NAME.values():
        if metric.read and metric.name.startswith(("mp_agent.router", "mp_agent.collapsed_router")):
            assert not read(account, metric.prometheus_name), metric.name


def test_what_no_router_shows_has_no_series(account):
    sample(account, 1, {"a": row(1.5, None)})
    assert read(account, "mp_agent_router_entropy_min_ratio") is None
    assert read(account, "mp_agent_router_unused_experts_ratio") == 0.0


def test_a_router_collapses_after_some_samples_beyond_both_limits(account):
    rows = {
        "uneven": row(7.0, 0.6),
        "decided": row(1.1, 0.1),
        "blind": row(7.0, None),
        "worst": row(5.0, 0.0),
        "bad": row(3.5, 0.2),
    }
    found = []
    for sequence in range(1, 5):
        sample(account, sequence, rows)
        found.append(read(account, "mp_agent_routers_collapsed"))
    assert found == [0.0, 0.0, 2.0, 2.0]
    assert list(read(account, "mp_agent_collapsed_router_info")) == [("worst",), ("bad",)]

    sample(account, 5, {**rows, "worst": row(5.0, 0.5)})
    assert list(read(account, "mp_agent_collapsed_router_info")) == [("bad",)]


def test_a_sample_that_lacks_ranks_leaves_all_as_it_was(account):
    for sequence in range(1, 4):
        sample(account, sequence, {"a": row(5.0, 0.0)})
    sample(account, 4, {"a": row(1.0, 1.0)}, complete=False)
    assert read(account, "mp_agent_routers_collapsed") == 1.0
