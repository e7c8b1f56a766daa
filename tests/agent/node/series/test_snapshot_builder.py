import logging
import math
from dataclasses import replace
from typing import Any

import pytest

from mp_agent.catalog.metric import HistogramValue, Kind, Scope, Snapshot, gauge
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME, METRICS
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import CounterStore
from mp_agent.node.series.snapshot_builder import RunExport, SnapshotBuilder
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.health import LatestValues
from mp_agent.records.views import ExportAccount, LayerView, RankView
from tests.agent.node.builders import (
    NO_GRADIENTS,
    make_agent_view,
    make_export,
    make_identity,
    make_run_view,
    make_state,
    merged_step,
)


def layer(name: str, norm: float = 1.0, *, judged: bool = True) -> LayerView:
    return LayerView(
        name=name, values={**NO_GRADIENTS, "sum_squares": norm**2, "elements": 4.0}, judged=judged
    )


def export(run: str = "llama", **changes: Any) -> RunExport:
    step = merged_step(1, norm=2.0, elements=4.0, zero_elements=1.0, nan_elements=0.0)
    whole = make_export(
        run=run,
        view=make_run_view(
            identity=make_identity(run=run),
            conditions_fired={("MpAgentRunStalled", "critical"): 0},
            latest=LatestValues(step=step, judged=step),
        ),
        layers=[layer("w")],
        ranks=[
            RankView(identity=make_identity(rank), facts={}, state=make_state(), up=True, step=1)
            for rank in range(2)
        ],
        agent=make_agent_view(
            exports=(ExportAccount(exporter="otlp", failures=0, last_success_unix_seconds=None),)
        ),
    )
    return replace(whole, **changes)


def series(snapshot: Snapshot, name: str) -> dict[tuple[str, ...], float | HistogramValue]:
    (family,) = [f for f in snapshot if f.metric.prometheus_name == name]
    optional = len(family.metric.optional_labels)
    return {
        sample.labels[:-optional]
        if optional and not any(sample.labels[-optional:])
        else sample.labels: sample.value
        for sample in family.samples
    }


@pytest.fixture
def builder() -> SnapshotBuilder:
    return SnapshotBuilder(resolve({}), max_series=20_000)


def test_families_stand_in_the_catalogs_order(builder):
    assert tuple(family.metric for family in builder.build([export()], 0.0)) == METRICS


def test_every_counter_is_there_from_the_start_at_zero(builder):
    snapshot = builder.build([export()], 0.0)
    for metric in METRICS:
        # Layers of other families are layers of their own, of which there are none here.
        if metric.kind is Kind.COUNTER and metric.family == GRADIENTS.name:
            values = set(series(snapshot, metric.prometheus_name).values())
            assert values == (set() if metric.appears_when_counted else {0.0}), metric.name
    (duration,) = series(snapshot, "mp_agent_step_duration_seconds").values()
    assert isinstance(duration, HistogramValue)
    assert set(duration.cumulative_counts) == {0}


def test_each_bound_has_its_counter_from_the_start(builder):
    snapshot = builder.build([export()], 0.0)

    assert set(series(snapshot, "mp_agent_grad_norm_exceeded_steps_total")) == {
        ("llama", "high"),
        ("llama", "extreme"),
    }


def test_labels_fit_the_metric_and_values_are_finite(builder):
    for family in builder.build([export()], 0.0):
        for sample in family.samples:
            assert len(sample.labels) == len(family.metric.label_names), family.metric.name
            if not isinstance(sample.value, HistogramValue):
                assert math.isfinite(sample.value)


def test_a_node_without_rank_0_exports_no_run_and_layer_scope(builder):
    snapshot = builder.build([export(view=None, layers=[])], 0.0)

    scopes = {family.metric.scope for family in snapshot if family.samples}
    assert scopes == {Scope.RANK, Scope.AGENT}


def test_runs_stand_side_by_side(builder):
    snapshot = builder.build([export("a"), export("b")], 0.0)

    assert set(series(snapshot, "mp_agent_grad_norm")) == {("a",), ("b",)}


def test_of_a_faded_rank_only_its_being_gone_is_left(builder):
    snapshot = builder.build([export(faded_ranks=frozenset({1}))], 0.0)

    assert set(series(snapshot, "mp_agent_rank_up")) == {("llama", "0"), ("llama", "1")}
    assert len(series(snapshot, "mp_agent_rank_info")) == 2
    assert set(series(snapshot, "mp_agent_rank_step")) == {("llama", "0")}


def test_a_read_function_that_raises_loses_only_its_family(caplog):
    def read(run: Any) -> Any:
        return run.no_such_thing

    broken = gauge("mp_agent.broken", "{x}", help="x", read=read)
    builder = SnapshotBuilder(resolve({}), 20_000, metrics=(*METRICS, broken))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            snapshot = builder.build([export()], 0.0)

    assert series(snapshot, "mp_agent_broken") == {}
    assert series(snapshot, "mp_agent_grad_norm") == {("llama",): 2.0}
    assert builder.pop_dropped("llama") == 3
    assert len(caplog.records) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_reading_that_is_not_finite_is_left_out(value):
    odd = replace(BY_PROMETHEUS_NAME["mp_agent_loss"], name="mp_agent.odd", read=lambda run: value)
    builder = SnapshotBuilder(resolve({}), 20_000, metrics=(*METRICS, odd))

    assert series(builder.build([export()], 0.0), "mp_agent_odd") == {}


class TestMaxSeries:
    def build(self, layers: list[LayerView], room_for: int, counters: CounterStore):
        fixed = sum(
            self.count(f) for f in SnapshotBuilder(resolve({}), 10**6).build([export(layers=[])], 0)
        )
        builder = SnapshotBuilder(resolve({}), fixed + 4 * room_for)
        snapshot = builder.build([export(layers=layers, counters=counters)], 0.0)
        assert sum(map(self.count, snapshot)) <= fixed + 4 * room_for
        return builder, [labels[1] for labels in series(snapshot, "mp_agent_layer_grad_norm")]

    @staticmethod
    def count(family) -> int:
        """Count series as Prometheus does: each bucket, sum and count of a histogram is one."""
        return sum(
            len(s.value.bounds) + 2 if isinstance(s.value, HistogramValue) else 1
            for s in family.samples
        )

    def test_the_worst_layers_stay_the_rest_is_rolled_up_and_counted(self):
        layers = [layer(f"block.l{norm}", norm) for norm in (3, 1, 4, 2)]
        builder, kept = self.build(layers, 3, CounterStore())

        assert kept == ["block.l3", "block.l4", "block.*"]
        gave_way = 2 * len(layers)
        assert builder.pop_dropped("llama") == 2 * 4 + gave_way
        assert builder.pop_dropped("llama") == 0

    def test_metrics_that_give_way_do_so_before_any_layer(self):
        layers = [layer(f"block.l{norm}", norm) for norm in (3, 1, 4, 2)]
        layers = [replace(own, values={**own.values, "abs_min": 1e-9}) for own in layers]
        fixed = sum(
            self.count(f) for f in SnapshotBuilder(resolve({}), 10**6).build([export(layers=[])], 0)
        )
        for room, shown in ((6 * 4, 4), (6 * 4 - 1, 0), (4 * 4, 0)):
            builder = SnapshotBuilder(resolve({}), fixed + room)
            snapshot = builder.build([export(layers=layers)], 0.0)

            assert len(series(snapshot, "mp_agent_layer_grad_norm")) == 4
            assert len(series(snapshot, "mp_agent_layer_grad_abs_min")) == shown
            assert len(series(snapshot, "mp_agent_layer_grad_abs_mean")) == shown
            assert builder.pop_dropped("llama") == (0 if shown else 8)

    def test_two_runs_share_the_room_by_their_layers(self):
        layers = [layer(f"block.l{norm}", norm) for norm in range(8)]
        exports = [export("a", layers=layers), export("b", layers=layers)]
        builder = SnapshotBuilder(resolve({}), 10**6)
        fixed = sum(map(self.count, builder.build([replace(e, layers=[]) for e in exports], 0.0)))
        snapshot = SnapshotBuilder(resolve({}), fixed + 4 * 8).build(exports, 0.0)

        shown = [labels[0] for labels in series(snapshot, "mp_agent_layer_grad_norm")]
        assert (shown.count("a"), shown.count("b")) == (4, 4)

    def test_without_room_no_layer_is_exported(self):
        _, kept = self.build([layer("w")], 0, CounterStore())

        assert kept == []
