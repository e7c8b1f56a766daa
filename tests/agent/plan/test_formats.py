"""The formats are what torch says they are, and names stand for candidates."""

import pytest
import torch

from mp_agent.errors import CompareError
from mp_agent.plan.precision_plan import (
    BF16,
    BY_NAME,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    FP64,
    TF32,
    candidates_of,
    reference_of,
)
from tests.subtests import each


@each(
    ("number_format", "dtype"),
    [
        (FP64, torch.float64),
        (FP32, torch.float32),
        (FP16, torch.float16),
        (BF16, torch.bfloat16),
        (FP8_E4M3, torch.float8_e4m3fn),
        (FP8_E5M2, torch.float8_e5m2),
    ],
)
def test_formats_are_those_of_torch(number_format, dtype):
    known = torch.finfo(dtype)
    assert number_format.largest == known.max
    assert number_format.smallest_normal == known.smallest_normal
    assert number_format.unit_roundoff == known.eps / 2


def test_tf32_has_the_range_of_fp32_and_the_fraction_of_fp16():
    assert TF32.significand_bits == FP16.significand_bits
    assert TF32.exponent_min == FP32.exponent_min
    assert TF32.largest == (2 - 2.0**-10) * 2.0**127


def test_a_dtype_of_torch_stands_for_both_ways_to_use_it():
    found = candidates_of([torch.float16, "bf16", torch.bfloat16])
    assert [one.name for one in found] == ["fp16-autocast", "fp16", "bf16", "bf16-autocast"]


@pytest.mark.parametrize("given", [["fp12"], "fp4", [torch.int8]])
def test_what_does_not_exist_is_named(given):
    with pytest.raises(CompareError, match=r"dtypes: (fp12|fp4|torch.int8) is none of fp16-auto"):
        candidates_of(given)


def test_nothing_to_compare_is_refused():
    with pytest.raises(CompareError, match="names no precision"):
        candidates_of([])
    with pytest.raises(CompareError, match="reference: fp16 is none of fp32, fp64"):
        reference_of("fp16")


def test_every_candidate_has_a_name_of_its_own_and_says_what_it_is():
    assert len(BY_NAME) == 9 and all(one.meaning for one in BY_NAME.values())
