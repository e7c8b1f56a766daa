"""What the gauges of the optimizer and of the gradients' distribution read from the columns."""

from math import log2
from statistics import fmean, pstdev

import pytest

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.records.columns import DISTRIBUTION, EXPONENTS, OPTIMIZER
from mp_agent.records.health import LatestValues
from mp_agent.records.merged import MergedStep
from mp_agent.records.views import LayerView
from tests.agent.distribution_reference import distribution_reference
from tests.agent.node.builders import make_run_view
from tests.agent.update_reference import update_reference
from tests.subtests import each

GRADIENT = [1e-3, -2e-3, 5e-4, 0.0, 1e-9, -3e-12, 0.25, 2.0**-40, 0.4]
SCALE = 65536.0
RUN = make_run_view(
    latest=LatestValues(
        families={
            OPTIMIZER.name: {
                **update_reference(
                    [2.0, 1.0, 2.0],
                    [2.0, 1.0, 1.0],
                    [1.0, 1.0, 0.0],
                    moment=[0.25, 0.25, 0.0],
                    weight_bytes=2,
                    learning_rate=0.1,
                    epsilon=1e-8,
                    moment_format="float16",
                )
            },
            DISTRIBUTION.name: distribution_reference(GRADIENT, SCALE),
        },
        judged=MergedStep(
            sequence=1,
            step=1,
            time_unix_seconds=0.0,
            columns={"loss_scale": SCALE},
            world_size=1,
            present_ranks=frozenset((0,)),
            families={"gradients": {"abs_max": 0.4, "abs_min": 3e-12}},
        ),
    )
)
EMPTY = make_run_view()


def read(name: str, run: object = RUN) -> object:
    metric = BY_PROMETHEUS_NAME[name]
    assert metric.read is not None
    return metric.read(run)


@each(
    ("name", "expected"),
    [
        ("mp_agent_weight_norm", 3.0),
        ("mp_agent_update_relative", (1.0 / 6.0) ** 0.5),
        ("mp_agent_updates_lost_ratio", 1.0),
        ("mp_agent_adam_below_epsilon_ratio", 0.0),
        ("mp_agent_adam_epsilon_lost_ratio", 1.0),
        ("mp_agent_moment_rms", 2.0),
        ("mp_agent_learning_rate_max", 0.1),
        ("mp_agent_learning_rate_min", 0.1),
        ("mp_agent_grad_mean", fmean(GRADIENT)),
        ("mp_agent_grad_deviation", pstdev(GRADIENT)),
        ("mp_agent_grad_fp16_subnormal_ratio", 2 / 8),
        ("mp_agent_grad_fp16_near_overflow_ratio", 0.0),
        ("mp_agent_grad_fp16_overflow_at_double_ratio", 0.0),
        ("mp_agent_grad_fp16_headroom_low", log2(3e-12 * SCALE * 2.0**24)),
        # One more doubling fits into FP16, two do not.
        ("mp_agent_loss_scale_best", 65536.0),
    ],
)
def test_a_gauge_reads_its_columns_and_nothing_where_there_are_none(name, expected):
    assert read(name) == pytest.approx(expected, rel=1e-12)
    assert read(name, EMPTY) is None


def test_losses_in_fp16_are_reported_at_three_scales():
    found = read("mp_agent_grad_fp16_flushed_ratio")
    shares = {
        name: distribution_reference(GRADIENT, SCALE * factor)["flushed_elements"] / 8
        for name, factor in (("half", 0.5), ("in_force", 1.0), ("double", 2.0))
    }
    assert found == {(name,): share for name, share in shares.items()}
    assert shares["half"] > 0.0


def test_the_histogram_has_every_element_but_zeros_once():
    found = read("mp_agent_grad_exponent_elements")
    assert isinstance(found, dict)
    assert sum(found.values()) == 8.0
    bounds = [float(bound) for (bound,) in found]
    assert bounds == pytest.approx([2.0 ** (exponent + 4) for exponent in EXPONENTS], rel=1e-4)


@pytest.mark.parametrize("judged", [True, False])
def test_a_layer_reads_its_own_family_while_it_counts(judged):
    for family, values in RUN.latest.families.items():
        layer = LayerView(name="w", values=values, judged=judged, family=family)
        for metric in BY_PROMETHEUS_NAME.values():
            if metric.scope.name == "LAYER" and metric.family == family and metric.read:
                assert (metric.read(layer) is not None) == judged, metric.name
