from collections.abc import Mapping
from dataclasses import replace
from math import log2
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from mp_agent.catalog.guard import DRY_RUN
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.columns import GRADIENTS
from tests.agent.node.builders import gradient_row, make_run_view, merged_step


@pytest.fixture
def account() -> Accumulator:
    return Accumulator(
        resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
    )


def total(account: Accumulator, name: str, *labels: str) -> float:
    return account.counters.total(BY_PROMETHEUS_NAME[name], labels)


def norm_extremes(account: Accumulator, time_unix_seconds: float) -> tuple[Any, Any]:
    view = account.view(make_run_view(), time_unix_seconds)
    return view.norm_extremes.get("", (None, None))


def fold_scales(account: Accumulator, *scales: float) -> None:
    for sequence, scale in enumerate(scales, 1):
        account.fold_step(merged_step(sequence, loss_scale=scale))


def layers(**columns_by_layer: dict[str, float]) -> MergedLayers:
    return MergedLayers(
        names=tuple(columns_by_layer),
        family=GRADIENTS,
        values=np.stack([gradient_row(**columns) for columns in columns_by_layer.values()]),
        sound=np.ones(len(columns_by_layer), dtype=bool),
        complete=True,
    )


def test_a_one_step_excursion_is_counted_against_every_bound(account):
    for sequence, norm in enumerate((1.0, 150.0, 5000.0, 99.0), 1):
        account.fold_step(merged_step(sequence, norm=norm, nan_elements=0.0))

    assert total(account, "mp_agent_grad_norm_exceeded_steps_total", "high") == 2
    assert total(account, "mp_agent_grad_norm_exceeded_steps_total", "extreme") == 1
    assert norm_extremes(account, 1005.0) == (5000.0, 1.0)


def test_steps_whose_records_were_lost_were_made_all_the_same(account):
    for sequence in (977, 978, 1500):
        account.fold_step(merged_step(sequence, norm=1.0))
    assert total(account, "mp_agent_steps_total") == 1500


def test_a_count_that_restarts_is_continued(account):
    for sequence in (1, 2, 1, 2):
        account.fold_step(merged_step(sequence, norm=1.0))
    assert total(account, "mp_agent_steps_total") == 4


def test_the_norm_of_a_skipped_step_enters_nothing(account):
    account.fold_step(merged_step(1, norm=2.0))
    account.fold_step(merged_step(2, norm=5000.0, skipped=1.0, inf_elements=4.0))

    assert account.progress.latest.judged is not None
    assert account.progress.latest.judged.sequence == 1
    assert norm_extremes(account, 1002.0) == (2.0, 2.0)
    assert total(account, "mp_agent_grad_norm_exceeded_steps_total", "extreme") == 0
    assert total(account, "mp_agent_skipped_steps_total") == 1
    assert total(account, "mp_agent_nonfinite_updates_total") == 0
    assert total(account, "mp_agent_steps_total") == 2


def test_the_scales_falls_in_a_row_start_over_with_a_rise(account):
    fold_scales(account, 64.0, 32.0, 32.0, 16.0)
    assert account.progress.loss_scale.consecutive_decreases == 2

    fold_scales(account, 32.0, 16.0)
    assert account.progress.loss_scale.consecutive_decreases == 1
    assert account.progress.loss_scale.initial == 64.0
    assert total(account, "mp_agent_loss_scale_decreases_total") == 3
    assert total(account, "mp_agent_loss_scale_increases_total") == 1


def test_gauges_keep_the_last_value_that_was_observed(account):
    account.fold_step(merged_step(1, loss=3.0, learning_rate=0.1))
    account.fold_step(merged_step(2, loss_nonfinite=1.0))

    assert account.progress.latest.loss == 3.0
    assert account.progress.latest.learning_rate == 0.1
    assert total(account, "mp_agent_loss_nonfinite_steps_total") == 1


def test_each_ranks_own_losses_are_counted_apart(account):
    account.fold_rank(2, {"loss_nonfinite": 1.0})
    account.fold_rank(0, {"loss_nonfinite": 0.0})

    assert total(account, "mp_agent_rank_loss_nonfinite_steps_total", "2") == 1
    assert total(account, "mp_agent_rank_loss_nonfinite_steps_total", "0") == 0


def test_nonfinite_elements_of_local_gradients_are_counted_where_they_are_measured(account):
    name = "mp_agent_rank_local_grad_nonfinite_elements_total"
    account.fold_rank(0, {"loss": 1.0})
    assert account.counters.later(BY_PROMETHEUS_NAME[name]) == []

    account.fold_rank(0, {"local_grad_nonfinite_elements": 0.0})
    account.fold_rank(2, {"local_grad_nonfinite_elements": 3.0})
    account.fold_rank(2, {"local_grad_nonfinite_elements": 4.0})
    assert total(account, name, "2") == 7
    assert sorted(account.counters.later(BY_PROMETHEUS_NAME[name])) == [("0",), ("2",)]


def test_the_parts_of_steps_are_counted_from_the_first_on_that_has_them(account):
    account.fold_step(merged_step(1, backward_seconds=0.5))
    account.fold_step(merged_step(2, data_seconds=1.0, backward_seconds=0.25, other_seconds=0.0))
    account.fold_rank(1, {"data_seconds": 2.0})
    account.fold_rank(1, {"data_seconds": 1.0, "forward_seconds": 0.5})

    run = BY_PROMETHEUS_NAME["mp_agent_step_part_seconds_total"]
    assert sorted(account.counters.later(run)) == [("backward",), ("data",), ("other",)]
    assert account.counters.total(run, ("backward",)) == 0.75
    assert account.counters.total(run, ("other",)) == 0.0
    of_rank = "mp_agent_rank_step_part_seconds_total"
    assert total(account, of_rank, "1", "data") == 3.0
    assert total(account, of_rank, "1", "forward") == 0.5
    assert len(account.counters.later(BY_PROMETHEUS_NAME[of_rank])) == 2


def test_a_layer_counts_its_elements_and_keeps_its_last_good_norm(account):
    account.fold_layers(1, layers(w={"sum_squares": 4.0}), step_judged=True)
    bad = layers(w={"sum_squares": 9.0, "nan_elements": 3.0})
    account.fold_layers(2, bad, step_judged=False)

    shown = account.layers[GRADIENTS.name]["w"]
    assert shown.judged
    assert shown.values["sum_squares"] == 4.0
    assert total(account, "mp_agent_layer_grad_nonfinite_elements_total", "w") == 3


def test_a_new_attempt_starts_its_gauges_but_keeps_its_counters(account):
    account.fold_step(merged_step(1, norm=2.0, loss=3.0, loss_scale=512.0))
    account.fold_step(merged_step(2, loss_scale=256.0))
    account.fold_layers(1, layers(w={}), step_judged=True)
    account.begin_attempt()

    assert account.progress.last is None
    assert account.progress.latest.loss is None
    assert account.progress.loss_scale.consecutive_decreases == 0
    assert account.progress.loss_scale.initial == 512.0
    assert norm_extremes(account, 1002.0) == (None, None)
    assert account.layers == {}
    assert total(account, "mp_agent_steps_total") == 2

    account.fold_step(merged_step(1, loss_scale=64.0))
    assert total(account, "mp_agent_loss_scale_decreases_total") == 1, "attempts do not compare"


def read(
    account: Accumulator, name: str, facts: Mapping[str, str] = MappingProxyType({})
) -> object:
    """Return what a run-scope gauge says."""
    view = account.view(make_run_view(facts=facts), 1_000.0)
    metric = BY_PROMETHEUS_NAME[name]
    assert metric.read is not None
    return metric.read(view)


@pytest.mark.parametrize("action", ["guard_clip_gradients", "guard_skip_update"])
@pytest.mark.parametrize(("mode", "unclipped"), [(1.0, 0), (DRY_RUN, 1)])
def test_what_the_guard_kept_from_the_weights_is_not_counted_as_unclipped(
    account, action, mode, unclipped
):
    for sequence in range(1, 5):
        account.fold_step(merged_step(sequence, norm=1.0, nan_elements=0.0))
    account.fold_step(merged_step(5, norm=1500.0, nan_elements=0.0, **{action: mode}))
    for name in ("grad_norm", "grad_exploded"):
        found = total(account, f"mp_agent_{name}_unclipped_steps_total", "extreme")
        assert found == unclipped, name


def test_what_clipping_shrank_is_not_counted_as_unclipped(account):
    account.fold_step(merged_step(1, norm=150.0, clip_max_norm=1.0, clip_norm=150.0))
    account.fold_step(merged_step(2, norm=150.0, clip_max_norm=1e9, clip_norm=150.0))
    account.fold_step(merged_step(3, norm=1500.0))
    account.fold_step(merged_step(4, norm=9000.0, skipped=1.0, inf_elements=1.0))

    assert total(account, "mp_agent_grad_norm_exceeded_steps_total", "high") == 3
    assert total(account, "mp_agent_grad_norm_unclipped_steps_total", "high") == 2
    assert total(account, "mp_agent_grad_norm_unclipped_steps_total", "extreme") == 1


def test_a_nonfinite_loss_counts_where_nothing_was_skipped(account):
    account.fold_step(merged_step(1, loss_nonfinite=1.0))
    account.fold_step(merged_step(2, loss_nonfinite=1.0, skipped=1.0))
    account.fold_step(merged_step(3, loss_nonfinite=1.0, guard_skip_update=1.0))
    account.fold_step(merged_step(4, loss=1.0))

    assert total(account, "mp_agent_loss_nonfinite_unskipped_steps_total") == 1
    assert total(account, "mp_agent_loss_nonfinite_repeated_steps_total") == 0


@pytest.mark.parametrize("skipped", ["skipped", "guard_skip_update"])
def test_a_nonfinite_loss_counts_on_skipped_steps_from_the_third_in_a_row_on(account, skipped):
    for sequence in range(1, 6):
        account.fold_step(merged_step(sequence, loss_nonfinite=1.0, **{skipped: 1.0}))
    account.fold_step(merged_step(6, skipped=1.0, inf_elements=1.0))
    for sequence in (7, 8):
        account.fold_step(merged_step(sequence, loss_nonfinite=1.0, skipped=1.0))

    assert total(account, "mp_agent_loss_nonfinite_repeated_steps_total") == 3
    assert total(account, "mp_agent_loss_nonfinite_unskipped_steps_total") == 0


def test_the_third_skip_at_the_floor_within_a_hundred_steps_is_a_stall(account):
    for sequence in (1, 50, 99, 100, 400):
        account.fold_step(merged_step(sequence, skipped=1.0, loss_scale=1.0))

    assert total(account, "mp_agent_loss_scale_floor_skips_total") == 5
    assert total(account, "mp_agent_loss_scale_floor_stalls_total") == 2


def test_a_spike_of_the_loss_is_counted_step_by_step(account):
    for sequence in range(1, 201):
        account.fold_step(merged_step(sequence, loss=2.0 + 0.01 * (sequence % 7)))
    for sequence in range(201, 206):
        account.fold_step(merged_step(sequence, loss=5.0))

    assert total(account, "mp_agent_loss_spike_steps_total") == 4


@pytest.mark.parametrize(
    ("abs_max", "scale", "bits"),
    [
        (1.0, 65504.0, 0.0),
        (0.5, 32752.0, 2.0),
        (2.0**-20, 1024.0, 10.0 + log2(65504)),
        (1e300, 1e300, log2(65504) - 600 * log2(10)),
        (0.0, 1024.0, None),
        (1.0, None, None),
    ],
)
def test_headroom_is_what_the_largest_scaled_gradient_leaves(account, abs_max, scale, bits):
    values = {} if scale is None else {"loss_scale": scale}
    account.fold_step(merged_step(1, norm=1.0, abs_max=abs_max, **values))

    expected = None if bits is None else pytest.approx(bits)
    assert read(account, "mp_agent_grad_fp16_headroom") == expected


def test_the_calibrated_scale_is_that_of_the_step_that_ends_calibration(account):
    account.fold_step(merged_step(499, loss_scale=65536.0))
    assert read(account, "mp_agent_loss_scale_calibrated") is None

    account.fold_step(merged_step(500, loss_scale=1024.0))
    account.fold_step(merged_step(501, loss_scale=64.0))
    assert read(account, "mp_agent_loss_scale_calibrated") == 1024.0

    account.begin_attempt()
    account.fold_step(merged_step(1, loss_scale=64.0))
    assert read(account, "mp_agent_loss_scale_calibrated") is None


def test_a_straggler_is_found_in_the_ranks_own_times(account):
    for sequence in range(1, 17):
        times = {0: 1.0, 1: 1.0, 2: 1.6, 3: 1.0}
        account.fold_step(replace(merged_step(sequence, step_seconds=2.0), compute_seconds=times))

    assert read(account, "mp_agent_straggler_slowdown") == pytest.approx(1.6)
    assert read(account, "mp_agent_straggler_delay_seconds") == pytest.approx(0.6)
    assert read(account, "mp_agent_straggler_info") == {("2",): 1.0}
    assert read(account, "mp_agent_step_usual_seconds") == 2.0


@pytest.mark.parametrize("changes", [{"skipped": 1.0}, {"present_ranks": frozenset()}])
def test_ranks_are_not_compared_on_skipped_steps_nor_where_a_rank_is_missing(account, changes):
    for sequence in range(1, 40):
        step = merged_step(sequence, skipped=changes.get("skipped", 0.0))
        present = changes.get("present_ranks", step.present_ranks)
        times = {0: 1.0, 1: 2.0}
        account.fold_step(replace(step, compute_seconds=times, present_ranks=present))

    assert read(account, "mp_agent_straggler_slowdown") is None


def test_dead_and_underflowing_layers_are_reported_for_the_run(account):
    assert read(account, "mp_agent_layers_dead") is None
    good = {"abs_max": 0.1, "elements": 1000.0}
    for sequence in range(5):
        account.fold_layers(sequence, layers(a=good, b=good), step_judged=True)
    bad = {"abs_max": 1e-12, "elements": 1000.0, "zero_elements": 900.0}
    for sequence in range(5, 8):
        account.fold_layers(sequence, layers(a=good, b=bad), step_judged=True)

    assert read(account, "mp_agent_layers_dead") == 1
    assert read(account, "mp_agent_dead_layer_info") == {("b",): 1.0}
    assert read(account, "mp_agent_layers_underflowing_ratio") == 0.5
    assert read(account, "mp_agent_underflowing_layer_info") == {("b",): 1.0}


@pytest.mark.parametrize(
    ("facts", "underflowing"),
    [
        ({"precision": "fp32", "scaler": ""}, False),
        ({"precision": "bf16"}, False),
        ({"precision": "bf16", "scaler": "gradscaler"}, True),
        ({"precision": "bf16", "fp8_library": "torchao"}, True),
        ({"precision": "fp16"}, True),
    ],
)
def test_where_the_format_rounds_nothing_to_0_zeros_are_no_underflow(account, facts, underflowing):
    """As of ReLUs that a variational autoencoder has learned to leave unused."""
    for sequence in range(6):
        zeros = 700.0 if sequence == 5 else 0.0
        values = {"abs_max": 30.0, "elements": 1000.0, "zero_elements": zeros}
        account.fold_layers(sequence, layers(w=values), step_judged=True)
    for name in ("mp_agent_layers_underflowing_ratio", "mp_agent_underflowing_layer_info"):
        assert (read(account, name, facts) is not None) is underflowing


def test_what_is_usual_for_a_layer_outlives_an_attempt_in_the_ledger_too(account):
    account.fold_layers(1, layers(w={"abs_max": 0.1, "elements": 1000.0}), step_judged=True)
    account.begin_attempt()

    assert account.progress.layers.memory.names == ["w"]
    assert account.progress.layers.memory.early_zero_shares == [[0.0]]


def test_a_successor_goes_on_where_the_account_stood(account):
    for sequence in range(1, 700):
        step = merged_step(sequence, loss=2.0, loss_scale=1.0, step_seconds=1.0)
        account.fold_step(replace(step, compute_seconds={0: 1.0, 1: 1.0, 2: 2.0}))
    account.fold_step(merged_step(700, loss=9.0, skipped=1.0, loss_scale=1.0))
    account.fold_step(merged_step(701, loss=9.0, loss_scale=1.0))
    adapter = TypeAdapter(Progress)
    progress = adapter.validate_json(adapter.dump_json(account.progress))
    successor = Accumulator(
        resolve({}),
        progress=progress,
        counters=CounterStore(*account.counters.dump()),
        window_seconds=120.0,
    )
    run = make_run_view()
    assert successor.view(run, 1_000.0) == account.view(run, 1_000.0)
    for each in (account, successor):
        each.fold_step(merged_step(702, loss=9.0, skipped=1.0, loss_scale=1.0))
        each.fold_step(merged_step(703, loss=9.0, skipped=0.0, loss_scale=1.0))
        each.fold_step(merged_step(704, loss=9.0, skipped=1.0, loss_scale=1.0))

    assert successor.counters.dump() == account.counters.dump()
    assert total(successor, "mp_agent_loss_scale_floor_stalls_total") == 1
    assert total(successor, "mp_agent_loss_spike_steps_total") == 1
