"""Layers that are trained and never get a gradient, and those that look alike."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.health import LayersWithoutGradient
from tests.agent.node.builders import gradient_row, make_run_view, merged_step

SAMPLED = (1, 10, 20, 30, 40, 50, 60, 70)
_ROWS = (gradient_row(), gradient_row(elements=4.0, sum_squares=1.0, abs_max=0.5))


def table(layers: Mapping[str, bool], critic: Sequence[str] = ()) -> MergedLayers:
    """Return layers with or without a gradient; critic: those of another optimizer."""
    return MergedLayers(
        family=GRADIENTS,
        names=tuple(layers),
        values=np.array([_ROWS[has] for has in layers.values()]),
        sound=np.ones(len(layers), dtype=np.bool_),
        complete=True,
        optimizers=tuple("1" if name in critic else "" for name in layers) if critic else (),
    )


def account_of(*samples: MergedLayers, steps: int = 70, **values: float) -> Accumulator:
    """Return the account of some steps; the last sample stands for all that follow."""
    account = Accumulator(
        resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
    )
    left = list(samples)
    for sequence in range(1, steps + 1):
        account.fold_step(merged_step(sequence, **(values or {"norm": 1.0})))
        if sequence in SAMPLED and left:
            sample = left.pop(0) if len(left) > 1 else left[0]
            account.fold_layers(sequence, sample, step_judged=True)
    return account


def found(*samples: MergedLayers, steps: int = 70) -> LayersWithoutGradient | None:
    return account_of(*samples, steps=steps).view(make_run_view(), 0.0).without_gradient


def test_layers_that_never_have_a_gradient_are_named_with_their_share():
    sample = table({"a": False, "b": True, "c": False, "d": True, "e": False})

    assert found(sample) == LayersWithoutGradient(share=0.6, names=("a", "c", "e"))


def test_nothing_is_said_before_enough_steps_and_samples():
    sample = table({"a": False, "b": True})

    assert found(sample, steps=47) is None
    assert found(sample, steps=48) == LayersWithoutGradient(share=0.5, names=("a",))
    account = account_of(steps=70)
    assert account.view(make_run_view(), 0.0).without_gradient is None, "no layer was ever sampled"


def test_gradients_that_are_not_looked_at_are_not_missing():
    """Steps within backward; those that the budget leaves out after one without gradients are."""
    assert account_of(gradients_measured=0.0).view(make_run_view(), 0.0).without_gradient is None
    account = account_of(steps=1, gradients_measured=1.0)
    for sequence in range(2, 71):
        account.fold_step(merged_step(sequence, gradients_measured=float(sequence % 16 == 0)))
    seen = account.view(make_run_view(), 0.0).without_gradient
    assert seen == LayersWithoutGradient(share=1.0)


def test_a_layer_that_had_one_once_is_none_of_them():
    first, later = table({"a": True, "b": True}), table({"a": False, "b": True})

    assert found(first, later) == LayersWithoutGradient(share=0.0)


def test_idle_experts_are_none_of_them():
    idle = {f"block.0.experts.{index}.w": False for index in range(8)}

    assert found(table({"router": True, **idle})) == LayersWithoutGradient(share=0.0)


def test_neither_is_a_critic_that_waits():
    waits = table({"g": True, "d.0": False, "d.1": False}, critic=("d.0", "d.1"))
    trains_in_part = table({"g": True, "d.0": True, "d.1": False}, critic=("d.0", "d.1"))

    assert found(waits) == LayersWithoutGradient(share=0.0)
    assert found(trains_in_part) == LayersWithoutGradient(share=1 / 3, names=("d.1",))


@pytest.mark.parametrize("count", [11, 400])
def test_of_many_the_first_are_named(count):
    names = [f"layer{index}" for index in range(count)]
    without = found(table({**dict.fromkeys(names, False), "head": True}))

    assert without is not None
    assert without.share == pytest.approx(count / (count + 1))
    assert without.names == tuple(names[:10])


def test_an_optimizer_that_never_had_any_is_all_of_them():
    nothing = account_of(steps=64, loss=2.0)
    some = account_of(steps=64, loss=2.0)
    some.fold_step(merged_step(65, norm=1.0))

    assert nothing.view(make_run_view(), 0.0).without_gradient == LayersWithoutGradient(share=1.0)
    assert some.view(make_run_view(), 0.0).without_gradient is None


def test_a_layer_without_gradient_is_not_shown_with_a_norm_of_0():
    account = account_of(table({"a": False, "b": True}))

    assert set(account.layers[GRADIENTS.name]) == {"b"}
