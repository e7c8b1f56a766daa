"""A plan travels as JSON, and one that cannot be used is refused by its field."""

import json

import pytest

from mp_agent.errors import AdviceError
from mp_agent.plan.precision_plan import PrecisionPlan, plan_of_json
from tests.subtests import each

PLAN = PrecisionPlan(
    precision="fp16-autocast",
    device="cuda",
    loss_scale=65536.0,
    keep_fp32=("head", "(loss)"),
    clip_norm=1.5,
    settings={"thresholds": {"grad_norm_high": 500.0}},
)


def test_a_plan_is_read_as_it_was_written():
    assert plan_of_json(PLAN.as_json()) == PLAN
    assert plan_of_json(json.dumps({"plan": PLAN.as_dict()})) == PLAN


@each(
    ("change", "message"),
    [
        ({"precision": "fp17"}, "precision has value 'fp17'"),
        ({"clip_norm": 10**400}, "clip_norm has value 10000"),
        ({"precision": None}, "precision has value None"),
        ({"device": "tpu"}, "device has value 'tpu'"),
        ({"loss_scale": -1}, "loss_scale has value -1"),
        ({"loss_scale": "big"}, "loss_scale has value 'big'"),
        ({"precision": "bf16-autocast"}, "loss_scale has value 65536.0, which is not for bf16"),
        ({"adam_epsilon": None}, "adam_epsilon has value None"),
        ({"clip_norm": 0}, "clip_norm has value 0"),
        ({"clip_norm": True}, "clip_norm has value True"),
        ({"keep_fp32": "head"}, "keep_fp32 has value 'head'"),
        ({"keep_fp32": [3]}, "keep_fp32 has value"),
        ({"precision": "tf32", "loss_scale": None}, "keep_fp32 has value"),
        ({"settings": []}, "settings has value"),
        ({"version": 2}, "version has value 2"),
        ({"colour": "red"}, "colour has value 'red'"),
    ],
)
def test_a_wrong_field_is_named(change, message):
    with pytest.raises(AdviceError) as caught:
        plan_of_json(json.dumps({**PLAN.as_dict(), **change}))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}'])
def test_another_document_is_no_plan(text):
    with pytest.raises(AdviceError, match="plan: "):
        plan_of_json(text)
