"""What is plotted, number by number."""

import json

import pytest

from mp_agent.flight.report_page import LANES_MAX, plots_of
from mp_agent.report.content import Plot, Plots, Values
from tests.agent.flight.analyses import analysis_of, exploding
from tests.agent.flight.builders import calm, overflow
from tests.agent.node.builders import merged_step
from tests.subtests import each


def plots(*steps, **options) -> Plots:
    found = plots_of(analysis_of(*steps, **options))
    assert found is not None
    json.dumps(found.as_json(), allow_nan=False)
    return found


def plot(found: Plots, name: str) -> Plot:
    (match,) = [plot for plot in found.plots if plot.id == name]
    assert found.steps is not None
    assert len(drawn(match)) == len(found.places) == len(found.steps)
    return match


def drawn(plot: Plot) -> Values:
    (curve,) = plot.curves
    return curve.values


def test_an_overflow_storm_shows_every_plot_and_marks_its_skipped_steps():
    steps = [*calm(60, loss_scale=65536.0, learning_rate=1e-3)]
    steps += [overflow(61 + n, 2.0 ** (16 - n)) for n in range(20)]
    steps += calm(3, first=81, loss_scale=1.0, learning_rate=2e-3, abs_max=0.5)
    found = plots(*steps)
    names = ["loss", "grad-norm", "learning-rate", "loss-scale", "headroom"]
    assert [plot.id for plot in found.plots] == names
    scale = plot(found, "loss-scale")
    assert (scale.log, drawn(scale)[60:63]) == (2, [65536.0, 32768.0, 16384.0])
    assert scale.marks == dict.fromkeys(range(60, 80), "skipped")
    assert plot(found, "grad-norm").marks[60] == "3 NaN/Inf"
    assert drawn(plot(found, "grad-norm"))[60] is None, "a skipped step's norm does not count"
    assert found.marked == 61
    assert found.lanes[0].runs == [(1, 60, "fine"), (61, 80, "skipped"), (81, 83, "fine")]


def test_a_curve_does_not_cross_steps_that_are_missing():
    found = plots(*calm(3), *calm(2, first=7))
    assert found.places == [1, 2, 3, 4, 7, 8]
    assert drawn(plot(found, "loss"))[3] is None
    assert found.lanes[0].runs == [(1, 3, "fine"), (7, 8, "fine")]


@each("losses", [[], [None], [0.0], [5.0], [1e-300, 1e300], [3.0, 3.0], [None, 1.0], [-1.0]])
def test_any_losses_make_finite_data(losses):
    steps = [
        merged_step(n + 1, norm=0.0, **({} if loss is None else {"loss": loss}))
        for n, loss in enumerate(losses)
    ]
    if not steps:
        assert plots_of(analysis_of()) is None
        return
    found = plots(*steps)
    assert [v for v in drawn(plot(found, "loss")) if v is not None] == [
        loss for loss in losses if loss is not None
    ]
    assert drawn(plot(found, "grad-norm")) == [None] * len(steps), "0 has no logarithm"
    assert plot(found, "grad-norm").description == "Gradient norm: no value"


@pytest.mark.parametrize(("last", "base"), [(1999.0, None), (2000.0, 10), (-2000.0, None)])
def test_a_loss_of_a_wide_range_is_on_a_logarithmic_axis(last, base):
    found = plots(merged_step(1, norm=1.0, loss=2.0), merged_step(2, norm=1.0, loss=last))
    assert plot(found, "loss").log == base


def test_limits_far_from_the_norms_are_left_out():
    limits = [label for _, label in plot(plots(*calm(9, norm=30.0)), "grad-norm").limits]
    assert limits == ["high: 100"]
    limits = [label for _, label in plot(plots(*calm(9, norm=1e-9)), "grad-norm").limits]
    assert limits == []
    clipped = calm(9, clip_max_norm=2.0, clip_norm=1.0)
    assert (2.0, "clipped at 2") in plot(plots(*clipped), "grad-norm").limits


def test_lanes_show_whose_loss_was_lost_and_which_rank_was_missing():
    found = plots(*calm(5), ranks=2)
    assert [(lane.name, lane.runs) for lane in found.lanes] == [
        ("rank 0", [(1, 5, "fine")]),
        ("rank 1", [(1, 5, "absent")]),
    ]
    lost = merged_step(6, loss_nonfinite=1.0)
    assert plots(*calm(5), lost).lanes[0].runs[-1] == (6, 6, "lost")


def test_of_many_ranks_the_remarkable_ones_are_shown():
    found = plots(*calm(5), ranks=LANES_MAX + 8)
    assert len(found.lanes) == LANES_MAX
    assert found.lanes[0].name == "rank 1"


def test_the_first_bad_step_is_on_the_axis_even_where_no_step_was_kept():
    found = plots_of(exploding())
    assert found is not None and found.marked in found.places
