import numpy as np
import pytest

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accumulate import Accumulator, Progress
from mp_agent.node.counters import CounterBook
from mp_agent.node.merge_layers import MergedLayers
from mp_agent.node.window import ValueWindow
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES
from tests.agent.node.builders import gradient_row, merged_step


@pytest.fixture
def account() -> Accumulator:
    return Accumulator(
        resolve({}), progress=Progress(), counters=CounterBook(), norms=ValueWindow(120.0)
    )


def total(account: Accumulator, name: str, *labels: str) -> float:
    return account.counters.total(BY_PROMETHEUS_NAME[name], labels)


def fold_scales(account: Accumulator, *scales: float) -> None:
    for sequence, scale in enumerate(scales, 1):
        account.fold_step(merged_step(sequence, loss_scale=scale))


def layers(**columns_by_layer: dict[str, float]) -> MergedLayers:
    return MergedLayers(
        names=tuple(columns_by_layer),
        columns=GRADIENT_COLUMN_NAMES,
        values=np.stack([gradient_row(**columns) for columns in columns_by_layer.values()]),
        sound=np.ones(len(columns_by_layer), dtype=bool),
        complete=True,
    )


def test_a_one_step_excursion_is_counted_against_every_bound(account):
    for sequence, norm in enumerate((1.0, 150.0, 5000.0, 99.0), 1):
        account.fold_step(merged_step(sequence, norm=norm, nan_elements=0.0))

    assert total(account, "mp_agent_grad_norm_exceeded_steps_total", "100") == 2
    assert total(account, "mp_agent_grad_norm_exceeded_steps_total", "1000") == 1
    assert account.norms.extremes(1005.0) == (5000.0, 1.0)


def test_the_norm_of_a_skipped_step_enters_nothing(account):
    account.fold_step(merged_step(1, norm=2.0))
    account.fold_step(merged_step(2, norm=5000.0, skipped=1.0, inf_elements=4.0))

    assert account.progress.judged is not None
    assert account.progress.judged.sequence == 1
    assert account.norms.extremes(1002.0) == (2.0, 2.0)
    assert total(account, "mp_agent_grad_norm_exceeded_steps_total", "1000") == 0
    assert total(account, "mp_agent_skipped_steps_total") == 1
    assert total(account, "mp_agent_nonfinite_updates_total") == 0
    assert total(account, "mp_agent_steps_total") == 2


def test_the_scales_falls_in_a_row_start_over_with_a_rise(account):
    fold_scales(account, 64.0, 32.0, 32.0, 16.0)
    assert account.progress.loss_scale_consecutive_decreases == 2

    fold_scales(account, 32.0, 16.0)
    assert account.progress.loss_scale_consecutive_decreases == 1
    assert account.progress.loss_scale_initial == 64.0
    assert total(account, "mp_agent_loss_scale_decreases_total") == 3
    assert total(account, "mp_agent_loss_scale_increases_total") == 1


def test_gauges_keep_the_last_value_that_was_observed(account):
    account.fold_step(merged_step(1, loss=3.0, learning_rate=0.1))
    account.fold_step(merged_step(2, loss_nonfinite=1.0))

    assert account.progress.loss == 3.0
    assert account.progress.learning_rate == 0.1
    assert total(account, "mp_agent_loss_nonfinite_steps_total") == 1


def test_each_ranks_own_losses_are_counted_apart(account):
    account.fold_rank(2, {"loss_nonfinite": 1.0})
    account.fold_rank(0, {"loss_nonfinite": 0.0})

    assert total(account, "mp_agent_rank_loss_nonfinite_steps_total", "2") == 1
    assert total(account, "mp_agent_rank_loss_nonfinite_steps_total", "0") == 0


def test_a_layer_counts_its_elements_and_keeps_its_last_good_norm(account):
    account.fold_layers(1, layers(w={"sum_squares": 4.0}), step_judged=True)
    bad = layers(w={"sum_squares": 9.0, "nan_elements": 3.0})
    account.fold_layers(2, bad, step_judged=False)

    assert account.layers["w"].judged
    assert account.layers["w"].values["sum_squares"] == 4.0
    assert total(account, "mp_agent_layer_grad_nonfinite_elements_total", "w") == 3


def test_a_new_attempt_starts_its_gauges_but_keeps_its_counters(account):
    account.fold_step(merged_step(1, norm=2.0, loss=3.0, loss_scale=512.0))
    account.fold_step(merged_step(2, loss_scale=256.0))
    account.fold_layers(1, layers(w={}), step_judged=True)
    account.begin_attempt()

    assert account.progress.last is None
    assert account.progress.loss is None
    assert account.progress.loss_scale_consecutive_decreases == 0
    assert account.progress.loss_scale_initial == 512.0
    assert account.norms.extremes(1002.0) is None
    assert account.layers == {}
    assert total(account, "mp_agent_steps_total") == 2

    account.fold_step(merged_step(1, loss_scale=64.0))
    assert total(account, "mp_agent_loss_scale_decreases_total") == 1, "attempts do not compare"
