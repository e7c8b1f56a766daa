from dataclasses import asdict, replace

import numpy as np
import pytest

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.gradients import SecondMoments, Sustained
from mp_agent.node.accounting.layer_health import NAMED_AT_MOST
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext, LayerObservation
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.columns import GRADIENTS, OPTIMIZER, ColumnFamily
from mp_agent.records.health import StaleMoments
from mp_agent.records.views import LayerView
from tests.agent.node.builders import merged_step

CONTEXT = AccountContext(
    thresholds=resolve({"moment_rms_samples": 2}), window_seconds=120.0, progress=Progress()
)


def sample(family: ColumnFamily = OPTIMIZER, *views: LayerView) -> LayerObservation:
    nothing = MergedLayers(
        family=family,
        names=(),
        values=np.empty((0, len(family.columns))),
        sound=np.empty(0, dtype=np.bool_),
        complete=True,
    )
    return LayerObservation(sequence=1, step=1, layers=nothing, views=views)


def view(rms: float, name: str = "w", *, active: float = 256.0, judged: bool = True) -> LayerView:
    values = {"active_elements": active, "squared_ratio_sum": active * rms**2}
    return LayerView(name=name, values=values, judged=judged, family=OPTIMIZER.name)


def after(*samples: tuple[LayerView, ...]) -> StaleMoments | None:
    tracker = SecondMoments()
    for views in samples:
        tracker.observe_layers(sample(OPTIMIZER, *views), CONTEXT)
    return tracker.view(CONTEXT)


def test_nothing_is_known_before_the_first_sample():
    assert after() is None


def test_a_layer_is_stale_from_the_second_sample_in_a_row():
    once, twice = after((view(2.4),)), after((view(2.4),), (view(2.31),))
    assert once is not None
    assert twice is not None
    assert once.rms_max == pytest.approx(2.4)
    assert twice.rms_max == pytest.approx(2.31)
    assert once.stale == 0
    assert (twice.stale, twice.stale_names) == (1, ("w",))


def test_at_the_limit_itself_and_after_a_healthy_sample_it_is_not():
    at_limit = after((view(2.25),), (view(2.3 - 1e-9),))
    assert at_limit is not None
    assert at_limit.stale == 0
    found = after((view(9.0),), (view(1.0),), (view(9.0),))
    assert found is not None
    assert found.stale == 0


@pytest.mark.parametrize("odd", [view(9.0, active=255.0), view(9.0, judged=False)])
def test_small_layers_and_samples_that_do_not_count_are_left_out(odd):
    assert after((odd,), (odd,)) is None


def test_the_worst_layers_are_named_first():
    views = tuple(view(3.0 + index, f"layer{index}") for index in range(12))
    found = after(views, views)
    assert found is not None
    assert found.stale == 12
    assert found.stale_names == tuple(f"layer{11 - index}" for index in range(NAMED_AT_MOST))


def test_layers_of_other_families_are_passed_over():
    tracker = SecondMoments()
    tracker.observe_layers(sample(GRADIENTS, view(9.0)), CONTEXT)
    assert asdict(tracker) == asdict(SecondMoments())


@pytest.mark.parametrize(
    ("rates", "steps"),
    [
        ([1e-5, 2e-5, 3e-5, 3e-5, 3e-5], 10),
        ([3e-5, 2e-5, 1e-5, 1e-5, 0.0], 40),
        ([1e-5, 2e-5, 3e-5, 4e-5, 5e-5], 0),
        ([None] * 5, 40),
    ],
    ids=["after a warm-up", "a rate that falls", "a warm-up", "no rate"],
)
def test_updates_that_are_lost_count_while_the_learning_rate_does_not_rise(
    rates: list[float | None], steps: int
):
    tracker = Sustained()
    row = {"weight_sum_squares": 1.0, "lost_updates": 9.0, "rounded_elements": 10.0}
    lost = {OPTIMIZER.name: row}
    for place, rate in enumerate(rates, 1):
        columns = {} if rate is None else {"learning_rate": rate}
        step = merged_step(10 * place, **columns)
        counts = step.complete | {OPTIMIZER.name}
        tracker.observe(replace(step, families=lost, complete=counts), CONTEXT)
    assert tracker.steps["updates_lost"] == steps
