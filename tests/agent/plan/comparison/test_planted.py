"""A planted mistake is named first, and keeping its module in FP32 is found to be the remedy."""

import pytest
from torch import nn

from mp_agent.plan.comparison.api import compare
from mp_agent.plan.comparison.model import ErrorRole, OriginKind
from tests.agent.plan.comparison.planted import (
    DifferenceOfMeans,
    NaiveSoftmax,
    Overflowing,
    Softmax,
    TinyEpsilon,
    batch,
    chain,
)
from tests.subtests import each

PLANTED = [
    (Overflowing, "fp16", OriginKind.OVERFLOW),
    (Overflowing, "fp16-autocast", OriginKind.OVERFLOW),
    (NaiveSoftmax, "fp16", OriginKind.OVERFLOW),
    (Softmax, "fp16", OriginKind.UNDERFLOW),
    (DifferenceOfMeans, "fp16", OriginKind.ROUNDING),
    (DifferenceOfMeans, "bf16", OriginKind.ROUNDING),
    (TinyEpsilon, "fp16", OriginKind.OVERFLOW),
]


def compared(module, dtype, **options):
    report = compare(chain(module), batch(), nn.CrossEntropyLoss(), dtypes=[dtype], **options)
    return report.candidates[0]


@each(("module", "dtype", "kind"), PLANTED)
def test_it_is_named_first(module, dtype, kind):
    found = compared(module(), dtype, search_trials=0)
    assert (found.origins[0].module, found.origins[0].kind) == ("planted", kind)
    (call,) = [one for one in found.calls if one.module == "planted"]
    assert call.role is ErrorRole.BEGINS or kind is OriginKind.UNDERFLOW


@pytest.mark.parametrize(
    ("module", "dtype"), [(Overflowing, "fp16-autocast"), (TinyEpsilon, "fp16")]
)
def test_what_has_to_stay_in_fp32_is_found_and_proved(module, dtype):
    found = compared(module(), dtype)
    assert not found.verdict.passed
    assert found.keep is not None and found.keep.found and found.keep.minimal
    assert found.keep.kept == ("planted",)
    assert found.keep.verdict is not None and found.keep.verdict.passed
    assert not any(call.output.nonfinite_ratio for call in found.keep.calls)


def test_errors_are_handed_on_behind_the_place_where_they_begin():
    found = compared(Overflowing(), "fp16", search_trials=0)
    roles = {call.module: call.role for call in found.calls}
    assert roles["planted"] is ErrorRole.BEGINS
    assert roles["middle"] is roles["act"] is roles["last"] is ErrorRole.HANDED_ON


def test_a_batch_beyond_the_range_of_the_format_is_named_itself():
    inputs, target = batch()
    report = compare(
        chain(nn.Identity()),
        (inputs * 1e6, target),
        nn.CrossEntropyLoss(),
        dtypes=["fp16"],
        search_trials=0,
    )
    assert report.candidates[0].origins[0].module == "(inputs)"


def test_a_sound_model_has_no_origin_that_overflows():
    found = compared(nn.Identity(), "fp16")
    assert found.verdict.passed and found.keep is None
    assert not any(origin.severity == float("inf") for origin in found.origins)
    assert {origin.kind for origin in found.origins} <= {OriginKind.ROUNDING}


def test_gradients_that_overflow_by_the_loss_scale_are_named():
    found = compared(nn.Identity(), "fp16-autocast", loss_scale=2.0**24, search_trials=0)
    assert found.origins[0].kind is OriginKind.GRADIENT_OVERFLOW
    assert not found.verdict.passed and "gradients of parameters" in found.verdict.reasons[0]


def test_gradients_that_underflow_are_saved_by_a_loss_scale():
    def lost(**options):
        report = compare(
            chain(nn.Identity()),
            batch()[0],
            lambda model, inputs: model(inputs).float().sum() * 1e-7,
            dtypes=["fp16-autocast"],
            **options,
        )
        return [one.gradient.underflow_ratio for one in report.candidates[0].parameters]

    assert max(lost()) > 0.5
    assert max(lost(loss_scale=2.0**16)) < 0.05
