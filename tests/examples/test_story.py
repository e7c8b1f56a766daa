import pytest

from examples.demo.alerts import MetricsAlone
from examples.demo.reading import Reading, parse
from examples.demo.story import Story


def reading(**extra: str) -> Reading:
    """A healthy run's metrics at step 40, with lines put in place of those of the same name."""
    lines = {
        "step": 'mp_agent_step{run="demo"} 40',
        "exceeded": 'mp_agent_grad_norm_exceeded_steps_total{run="demo",bound="high"} 0',
        "exploded": 'mp_agent_grad_exploded_steps_total{run="demo",bound="high"} 0',
        "bound": 'mp_agent_grad_norm_bound{run="demo",bound="high"} 100',
        "nonfinite": 'mp_agent_loss_nonfinite_steps_total{run="demo"} 0',
        "floor": 'mp_agent_loss_scale_floor_skips_total{run="demo"} 0',
        "first": 'mp_agent_layer_grad_norm{run="demo",layer="head.weight"} 3',
        "second": 'mp_agent_layer_grad_norm{run="demo",layer="blocks.0.weight"} 5',
        **extra,
    }
    return parse("\n".join(lines.values()) + "\n")


EXPLODED = reading(
    step='mp_agent_step{run="demo"} 44',
    exceeded='mp_agent_grad_norm_exceeded_steps_total{run="demo",bound="high"} 2',
    exploded='mp_agent_grad_exploded_steps_total{run="demo",bound="high"} 2',
)
LOST = reading(
    step='mp_agent_step{run="demo"} 60',
    nonfinite='mp_agent_loss_nonfinite_steps_total{run="demo"} 9',
    incident='mp_agent_first_nonfinite_info{run="demo",step="51",rank="1",layer="",'
    'phase="forward"} 1',
    floor='mp_agent_loss_scale_floor_skips_total{run="demo"} 4',
)


def test_a_healthy_run_has_no_story():
    story = Story()
    story.add(reading())
    assert story.first is None


def test_what_comes_first_is_named_with_its_step_and_layer():
    story = Story()
    for seen in (reading(), EXPLODED, LOST):
        story.add(seen)
    first = story.first
    assert first is not None
    assert (first.what, first.step, first.layer) == (
        "gradient norm above 100",
        44,
        "blocks.0.weight",
    )


def test_a_non_finite_loss_is_reported_with_the_step_and_rank_that_the_agent_names():
    story = Story()
    story.add(LOST)
    first = story.first
    assert first is not None
    assert (first.what, first.step, first.where) == ("loss NaN or Inf", 51, "rank 1, forward")


def test_a_name_that_the_catalog_does_not_hold_is_refused():
    with pytest.raises(KeyError):
        reading().value("mp_agent_no_such_metric")


def test_without_servers_the_same_conditions_are_reported_once_each():
    source = MetricsAlone()
    assert not source.firing("demo", reading())
    assert [alert.name for alert in source.firing("demo", EXPLODED)] == ["MpAgentGradientExplosion"]
    names = [alert.name for alert in source.firing("demo", LOST)]
    assert names == ["MpAgentGradientExplosion", "MpAgentLossNonFinite", "MpAgentLossScaleAtFloor"]
    assert all(alert.annotations["remedy"] for alert in source.firing("demo", None))
