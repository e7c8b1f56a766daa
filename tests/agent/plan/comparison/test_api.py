"""The public function: its defaults, its result, and a reference in FP64."""

import json

import torch
from torch import nn

import mp_agent
from mp_agent.plan.comparison.api import SEARCH_TRIALS, TOLERANCE
from mp_agent.plan.formats import DEFAULT_NAMES
from tests.agent.plan.comparison.planted import batch, chain


def test_the_defaults_of_the_public_function_are_those_of_the_package():
    defaults = mp_agent.compare_precision.__kwdefaults__
    assert defaults is not None
    assert defaults["dtypes"] == DEFAULT_NAMES
    assert (defaults["tolerance"], defaults["search_trials"]) == (TOLERANCE, SEARCH_TRIALS)


def test_a_model_is_compared_with_fp64():
    report = mp_agent.compare_precision(
        chain(nn.Identity()),
        batch(),
        nn.CrossEntropyLoss(),
        dtypes=[torch.float16, "tf32"],
        reference=torch.float64,
        search_trials=0,
        progress=False,
    )
    assert report.reference == "fp64"
    assert [one.name for one in report.candidates] == ["fp16-autocast", "fp16", "tf32"]
    assert report.passed == ("fp16-autocast", "fp16", "tf32")
    # Even what is not rounded to TF32 has the error of FP32.
    errors = [call.own.relative_l2 for call in report.candidate("tf32").calls if call.own]
    assert all(error > 0 for error in errors[:2]) and max(errors) < 1e-3
    assert json.loads(report.as_json())["passed"] == list(report.passed)


def test_a_function_of_model_and_batch_is_a_loss():
    report = mp_agent.compare_precision(
        chain(nn.Identity()),
        {"x": batch()[0]},
        lambda model, given: model(given["x"]).square().mean(),
        dtypes=["bf16-autocast"],
        progress=False,
    )
    (found,) = report.candidates
    assert found.calls[-1].module == "(loss)" and found.reference_loss is not None
