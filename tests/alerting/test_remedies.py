"""What an alert advises is chosen by what the run's own series say."""

import re

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.conditions.gradient_layers import GRADIENT_UNDERFLOW
from mp_agent.alerting.conditions.gradient_size import GRADIENT_EXPLOSION
from mp_agent.alerting.remedies import CLIPS, CLIPS_NOT, FP16, Remedy, fitting, remedy_template
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.metrics import gradients
from tests.every import for_every


def lookup(**series):
    return lambda name: series.get(name, [])


FP32 = lookup(mp_agent_run_info=[{"precision": "fp32"}])
CLIPPED = lookup(mp_agent_clip_max_norm=[{}])


def test_who_clips_already_is_not_advised_to_clip():
    advised = " ".join(fitting(GRADIENT_EXPLOSION.remedies, CLIPPED))
    assert "Clip gradients" not in advised and "clipped already" in advised
    assert "learning rate" in advised
    assert "Clip gradients" in " ".join(fitting(GRADIENT_EXPLOSION.remedies, lookup()))


def test_a_loss_scale_and_bf16_are_advised_to_fp16_alone():
    fp16 = lookup(mp_agent_run_info=[{"precision": "fp16"}])
    assert "BF16" in " ".join(fitting(GRADIENT_UNDERFLOW.remedies, fp16))
    for condition in CONDITIONS:
        if any(isinstance(remedy, Remedy) and remedy.fact is FP16 for remedy in condition.remedies):
            advised = " ".join(fitting(condition.remedies, FP32))
            assert advised and "BF16" not in advised and "loss scale" not in advised


def test_a_fact_and_its_contrary_never_both_hold():
    for found in (lookup(), CLIPPED):
        assert CLIPS.holds(found) is not CLIPS_NOT.holds(found)


def test_a_template_of_prometheus_asks_for_the_run_and_the_fact():
    text = remedy_template((Remedy("Do this.", FP16), "Do that."))
    assert re.fullmatch(r"\{\{ with printf .* \| query \}\}Do this\. \{\{ end \}\}Do that\.", text)
    assert 'precision=\\"fp16\\"' in text and "$labels.run" in text


@for_every(CONDITIONS, lambda condition: condition.name)
def test_every_run_gets_some_advice(condition):
    assert fitting(condition.remedies, lookup())
    level = condition.levels[0]
    assert condition.annotations(level, values_in_force())["remedy"].endswith(".")


def test_the_metrics_of_facts_are_in_the_catalog():
    assert gradients.CLIP_MAX_NORM.prometheus_name == "mp_agent_clip_max_norm"
