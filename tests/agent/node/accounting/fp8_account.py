"""The account of a run whose layers are scaled by FP8, sample by sample."""

from collections.abc import Mapping
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.columns import FP8
from tests.agent.node.builders import make_run_view, merged_step

Rows = Mapping[str, Mapping[str, float]]


def new_account(**thresholds: float) -> Accumulator:
    return Accumulator(
        resolve(thresholds), progress=Progress(), counters=CounterStore(), window_seconds=120.0
    )


def add_sample(
    account: Accumulator, sequence: int, rows: Rows, *, complete: bool = True, judged: bool = True
) -> None:
    """Add a sampled step with rows of layers."""
    step = merged_step(sequence)
    account.fold_step(replace(step, complete=step.complete | {FP8.name}))
    values = [[one.get(name, nan) for name in FP8.names] for one in rows.values()]
    layers = MergedLayers(
        names=tuple(rows),
        family=FP8,
        values=np.array(values),
        sound=np.ones(len(rows), dtype=bool),
        complete=complete,
    )
    account.fold_layers(sequence, layers, step_judged=judged)


def read(account: Accumulator, name: str) -> Any:
    """Return what a gauge says of the run."""
    metric = BY_PROMETHEUS_NAME[name]
    assert metric.read is not None
    return metric.read(account.view(make_run_view(), 0.0))


def misscaled(account: Accumulator) -> float | None:
    found: float | None = read(account, "mp_agent_layers_fp8_misscaled")
    return found


def named(account: Accumulator) -> list[tuple[str, str]]:
    """The layers and reasons that the account names."""
    return list(read(account, "mp_agent_fp8_misscaled_layer_info"))
