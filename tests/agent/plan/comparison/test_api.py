"""The public function: its defaults, its result, and a reference in FP64."""

import json

import torch
from torch import nn

import mp_agent
from mp_agent.plan.comparison.api import SEARCH_TRIALS, compare
from mp_agent.plan.comparison.model import TOLERANCE
from mp_agent.plan.precision_plan import DEFAULT_NAMES
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


def test_outputs_that_are_all_nan_are_said_to_be_so():
    class Lost(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.linear(x)
            # 65504 is FP16's largest number.
            return hidden * 1e30 - hidden * 1e30 if hidden.dtype == torch.float16 else hidden

    report = compare(Lost(), torch.randn(3, 4), lambda m, x: m(x).float().mean(), dtypes=["fp16"])
    verdict = report.candidates[0].verdict
    assert not verdict.passed
    assert "all of the model's outputs are NaN or Inf: there is nothing to compare" in (
        verdict.reasons
    )


def test_a_reference_that_is_all_nan_lets_nothing_pass():
    model = nn.Linear(4, 4)
    model.bias.data.fill_(float("nan"))
    report = compare(
        model, torch.randn(3, 4), lambda m, x: m(x).nan_to_num().mean(), dtypes=["bf16"]
    )
    verdict = report.candidates[0].verdict
    assert not verdict.passed and "outputs of the reference are NaN" in verdict.reasons[0]
