"""Several optimizers in one process, and replicas that part, from rows to what is exposed."""

from collections.abc import Mapping

import pytest

from mp_agent.catalog.metric import HistogramValue
from mp_agent.catalog.thresholds import resolve
from mp_agent.exporters.prometheus import render
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.series.snapshot_builder import SnapshotBuilder
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import Share
from tests.agent.node.builders import (
    gradient_row,
    make_export,
    make_record,
    make_run_view,
    rank_step,
)
from tests.agent.node.nodes import merge_nodes

GENERATOR = Share(group="g")
CRITIC = Share(group="d", optimizer="1")
MATRICES = Share(group="m")
REST = Share(group="m", optimizer="1", joint=True)


def gan_step(sequence: int, generator: Mapping[str, float], critic: Mapping[str, float] | None):
    """Return a step of a GAN; the critic is not always stepped."""
    rows = [gradient_row(elements=4.0, **generator)]
    rows.append(gradient_row(elements=8.0, **critic) if critic else rows[0] * float("nan"))
    record = make_record(sequence, {"skipped": 0.0}, rows)
    return merge_nodes([[rank_step(0, record, GENERATOR, CRITIC)]])


class Shown:
    """An account, and what it exposes."""

    def __init__(self) -> None:
        self.account = Accumulator(
            resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
        )

    def fold(self, *steps: MergedStep) -> dict[str, float]:
        for step in steps:
            self.account.fold_step(step)
        return self.series()

    def series(self) -> dict[str, float]:
        """Return what is exposed as text, by `name{labels}` without the run."""
        view = self.account.view(make_run_view(), 0.0)
        export = make_export(run="gan", view=view, counters=self.account.counters)
        snapshot = SnapshotBuilder(resolve({}), 20_000).build([export], 0.0)
        assert not any(
            isinstance(s.value, float) and s.value != s.value
            for family in snapshot
            for s in family.samples
            if not isinstance(s.value, HistogramValue)
        )
        text = render(snapshot)[0].decode()
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("mp_agent_"): float(value) for name, value in lines}


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_another_optimizer_has_its_own_series_next_to_those_of_the_first(shown: Shown):
    critic = {"sum_squares": 9.0, "abs_max": 2.0, "zero_elements": 2.0}
    series = shown.fold(gan_step(1, {"sum_squares": 4.0, "abs_max": 1.5}, critic))

    assert series['grad_norm{run="gan"}'] == 2.0
    assert series['grad_norm{optimizer="1",run="gan"}'] == 3.0
    assert series['grad_abs_max{optimizer="1",run="gan"}'] == 2.0
    assert series['grad_zero_ratio{run="gan"}'] == 0.0
    assert series['grad_zero_ratio{optimizer="1",run="gan"}'] == 0.25
    assert series['grad_finite{optimizer="1",run="gan"}'] == 1.0


def test_its_counters_are_its_own_and_stand_at_zero_from_its_first_step(shown: Shown):
    series = shown.fold(gan_step(1, {"sum_squares": 4.0}, {"sum_squares": 1.0}))
    assert series['grad_nan_elements_total{optimizer="1",run="gan"}'] == 0.0

    series = shown.fold(
        gan_step(2, {"sum_squares": 4.0}, {"nan_elements": 3.0}),
        gan_step(3, {"sum_squares": 4.0}, {"sum_squares": 150.0**2}),
    )
    assert series['grad_nan_elements_total{run="gan"}'] == 0.0
    assert series['grad_nan_elements_total{optimizer="1",run="gan"}'] == 3.0
    assert series['grad_nonfinite_steps_total{run="gan"}'] == 0.0
    assert series['grad_nonfinite_steps_total{optimizer="1",run="gan"}'] == 1.0
    assert series['nonfinite_updates_total{run="gan"}'] == 0.0
    exceeded = "grad_norm_exceeded_steps_total"
    assert series[f'{exceeded}{{bound="high",optimizer="1",run="gan"}}'] == 1.0
    assert series[f'{exceeded}{{bound="high",run="gan"}}'] == 0.0
    assert series['grad_norm{optimizer="1",run="gan"}'] == 150.0


def test_its_last_good_step_stays_when_it_is_not_stepped_or_not_finite(shown: Shown):
    series = shown.fold(
        gan_step(1, {"sum_squares": 4.0}, {"sum_squares": 9.0}),
        gan_step(2, {"sum_squares": 4.0}, {"sum_squares": 1.0, "inf_elements": 1.0}),
        gan_step(3, {"sum_squares": 16.0}, None),
    )

    assert series['grad_norm{run="gan"}'] == 4.0
    assert series['grad_norm{optimizer="1",run="gan"}'] == 3.0
    assert series['grad_finite{optimizer="1",run="gan"}'] == 0.0
    assert series['grad_finite{run="gan"}'] == 1.0


def test_one_optimizer_alone_has_no_such_label(shown: Shown):
    step = merge_nodes([[rank_step(0, make_record(1), GENERATOR)]])

    assert not any("optimizer" in name for name in shown.fold(step))


class TestOneModel:
    """Two optimizers train one model: the run is both together, and each has its own series."""

    @staticmethod
    def step(
        sequence: int, matrices: Mapping[str, float], rest: Mapping[str, float], **step: float
    ) -> MergedStep:
        rows = [gradient_row(**{"elements": 4.0, **matrices})]
        rows.append(gradient_row(**{"elements": 12.0, **rest}))
        record = make_record(sequence, {"skipped": 0.0, **step}, rows)
        return merge_nodes([[rank_step(0, record, MATRICES, REST)]])

    def test_norm_magnitude_and_zeros_are_over_all_parameters(self, shown: Shown):
        series = shown.fold(
            self.step(
                1,
                {"sum_squares": 9.0, "abs_max": 1.5, "zero_elements": 4.0},
                {"sum_squares": 16.0, "abs_max": 2.5},
            )
        )
        assert series['grad_norm{run="gan"}'] == 5.0
        assert series['grad_norm{optimizer="0",run="gan"}'] == 3.0
        assert series['grad_norm{optimizer="1",run="gan"}'] == 4.0
        assert series['grad_abs_max{run="gan"}'] == 2.5
        assert series['grad_abs_max{optimizer="0",run="gan"}'] == 1.5
        assert series['grad_zero_ratio{run="gan"}'] == 0.25
        assert series['grad_zero_ratio{optimizer="1",run="gan"}'] == 0.0

    def test_counts_are_the_run_s_and_each_optimizer_s(self, shown: Shown):
        series = shown.fold(
            self.step(1, {"sum_squares": 80.0**2}, {"sum_squares": 80.0**2}),
            self.step(2, {"sum_squares": 1.0}, {"sum_squares": 1.0, "nan_elements": 2.0}),
        )
        assert series['steps_total{run="gan"}'] == 2.0
        exceeded = "grad_norm_exceeded_steps_total"
        assert series[f'{exceeded}{{bound="high",run="gan"}}'] == 1.0
        assert series[f'{exceeded}{{bound="high",optimizer="1",run="gan"}}'] == 0.0
        for name in ("grad_nonfinite_steps_total", "nonfinite_updates_total"):
            assert series[f'{name}{{run="gan"}}'] == 1.0
            assert series[f'{name}{{optimizer="0",run="gan"}}'] == 0.0
            assert series[f'{name}{{optimizer="1",run="gan"}}'] == 1.0
        assert series['grad_finite{run="gan"}'] == 0.0
        assert series['grad_norm{run="gan"}'] == pytest.approx(80.0 * 2**0.5), "step 2 is partial"

    def test_an_update_that_a_scaler_skipped_is_none_of_either(self, shown: Shown):
        inf = {"inf_elements": 1.0}
        series = shown.fold(self.step(1, inf, {"sum_squares": 4.0}, skipped=1.0))
        for labels in ('run="gan"', 'optimizer="0",run="gan"', 'optimizer="1",run="gan"'):
            assert series[f"nonfinite_updates_total{{{labels}}}"] == 0.0
        assert series['skipped_steps_total{run="gan"}'] == 1.0

    def test_high_norms_that_were_clipped_count_as_clipped_for_both(self, shown: Shown):
        high = {"sum_squares": 200.0**2}
        series = shown.fold(self.step(1, high, high, clip_max_norm=1.0, clip_norm=283.0))
        for labels in ('bound="high"', 'bound="high",optimizer="0"', 'bound="high",optimizer="1"'):
            assert series[f'grad_norm_exceeded_steps_total{{{labels},run="gan"}}'] == 1.0
            assert series[f'grad_norm_unclipped_steps_total{{{labels},run="gan"}}'] == 0.0

    def test_a_part_without_gradients_is_absent_and_the_run_goes_on(self, shown: Shown):
        shown.fold(self.step(1, {"sum_squares": 9.0}, {"sum_squares": 16.0}))
        series = shown.fold(self.step(2, {"sum_squares": 9.0}, {"elements": 0.0}))
        assert series['grad_norm{run="gan"}'] == 3.0
        assert series['grad_norm{optimizer="1",run="gan"}'] == 4.0, "of the last step it had any"

    def test_the_norm_waits_for_both(self, shown: Shown):
        absent = {name: float("nan") for name in GRADIENT_COLUMN_NAMES}
        series = shown.fold(self.step(1, {"sum_squares": 9.0}, absent))
        assert 'grad_norm{run="gan"}' not in series
        assert series['grad_norm{optimizer="0",run="gan"}'] == 3.0

    def test_windows_remember_the_extremes_of_each(self, shown: Shown):
        series = shown.fold(
            self.step(1, {"sum_squares": 9.0}, {"sum_squares": 16.0}),
            self.step(2, {"sum_squares": 1.0}, {"sum_squares": 1.0}),
        )
        assert series['grad_norm_window_max{optimizer="0",run="gan"}'] == 3.0
        assert series['grad_norm_window_max{optimizer="1",run="gan"}'] == 4.0
        assert series['grad_norm_window_min{optimizer="1",run="gan"}'] == 1.0

    def test_an_optimizer_that_is_held_no_more_leaves_no_gauges_behind(self, shown: Shown):
        shown.fold(self.step(1, {"sum_squares": 9.0}, {"sum_squares": 16.0}))
        record = make_record(2, {"skipped": 0.0}, [gradient_row(sum_squares=1.0, elements=4.0)])
        series = shown.fold(merge_nodes([[rank_step(0, record, Share(group="new"))]]))
        assert series['grad_norm{run="gan"}'] == 1.0
        assert 'grad_norm{optimizer="0",run="gan"}' not in series
        assert 'grad_norm_window_max{optimizer="1",run="gan"}' not in series
        assert series['grad_nonfinite_steps_total{optimizer="1",run="gan"}'] == 0.0


def test_replicas_that_part_are_shown_with_the_ranks_and_counted(shown: Shown):
    def ddp_step(sequence: int, *norms: float) -> MergedStep:
        ranks = range(len(norms))
        shares = [Share(group="ddp", replica_index=r, replica_count=len(norms)) for r in ranks]
        rows = [gradient_row(sum_squares=norm, elements=1.0) for norm in norms]
        return merge_nodes(
            [[rank_step(r, make_record(sequence, gradients=[rows[r]]), shares[r]) for r in ranks]]
        )

    series = shown.fold(ddp_step(1, 1.0, 1.0, 1.0))
    assert series['replica_divergence{kind="gradients",run="gan"}'] == 0.0
    assert series['replica_divergence_steps_total{kind="gradients",run="gan"}'] == 0.0
    assert series['replica_divergence_steps_total{kind="weights",run="gan"}'] == 0.0

    series = shown.fold(ddp_step(2, 1.0, 2.0, 1.0))
    assert series['replica_divergence{kind="gradients",run="gan"}'] == 1.0
    assert series['replica_divergence_steps_total{kind="gradients",run="gan"}'] == 1.0
    assert (
        series['divergent_ranks_info{kind="gradients",ranks="1",run="gan",step="2",tensors=""}']
        == 1.0
    )

    series = shown.fold(ddp_step(3, 1.0, 1.0, 1.0))
    assert series['replica_divergence{kind="gradients",run="gan"}'] == 0.0
    assert not any(name.startswith("divergent_ranks_info") for name in series)


def test_where_there_is_nothing_to_compare_there_is_no_gauge(shown: Shown):
    series = shown.fold(merge_nodes([[rank_step(0, make_record(1), GENERATOR)]]))

    assert not any(name.startswith("replica_divergence{") for name in series)
