"""Published architectures: every module is compared, with the numbers of plain runs."""

import pytest
import torch

from mp_agent.plan.comparison.api import compare
from tests.agent.plan.comparison.networks import made
from tests.agent.plan.comparison.plain_runs import plain_run, relative

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FP32_ROUNDING = torch.finfo(torch.float32).eps
"""An error relative to an FP32 gradient is not known any better: kernels may add up its terms in
another order from run to run."""

_NEEDS_AVX512 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this processor has no AVX-512, without which oneDNN computes no LSTM in BF16",
)
# oneDNN has no LSTM in FP16 under autocast; torch raises.
CASES = [
    ("gpt2", "fp16-autocast"),
    ("gpt2", "bf16"),
    ("llama", "bf16-autocast"),
    ("llama", "fp16"),
    ("vit", "fp16-autocast"),
    ("vit", "bf16"),
    ("resnet", "fp16-autocast"),
    ("resnet", "bf16"),
    pytest.param("rnn", "bf16-autocast", marks=_NEEDS_AVX512),
    ("rnn", "fp16"),
]


@pytest.fixture
def one_thread():
    """Have sums added up in one order: with more threads it depends on which is free."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("network", "dtype"), CASES)
def test_errors_are_those_of_plain_runs(network, dtype):
    model, batch, loss = made(network)
    reference = plain_run(model, batch, loss, "fp32")
    candidate = plain_run(model, batch, loss, dtype)
    report = compare(model, batch, loss, dtypes=[dtype], search_trials=0)
    (found,) = report.candidates
    assert found.failure == "" and not found.notes
    calls: dict[str, list[float]] = {}
    for call in found.calls:
        calls.setdefault(call.module, []).append(call.output.relative_l2)
    compared = 0
    for name, tensors in reference.items():
        if name.startswith("grad:"):
            continue
        assert len(calls[name]) == len(tensors), name
        for made_error, one, other in zip(calls[name], tensors, candidate[name], strict=True):
            if (network == "rnn" and name == "lstm") or name == "":
                continue  # Several tensors are compared together; the plain run keeps the first.
            if name.endswith("rotary_emb"):
                continue
            assert made_error == pytest.approx(relative(one, other), rel=1e-6, abs=1e-12), name
            compared += 1
    assert compared >= 5
    gradients = {one.name: one.gradient.relative_l2 for one in found.parameters}
    assert gradients
    for name, error in gradients.items():
        one, other = (run[f"grad:{name}"][0] for run in (reference, candidate))
        assert error == pytest.approx(relative(one, other), rel=1e-5, abs=FP32_ROUNDING), name


@pytest.mark.parametrize("network", ["gpt2", "llama", "vit", "resnet", "rnn"])
def test_own_errors_are_known_wherever_nothing_forbids_it(network):
    model, batch, loss = made(network)
    report = compare(model, batch, loss, dtypes=["bf16", "tf32", "fp8-e4m3"], search_trials=0)
    for candidate in report.candidates:
        assert candidate.failure == ""
        missing = {call.own_missing for call in candidate.calls if call.own is None}
        allowed = {"", "the output of downsample was changed in place"}
        assert all("changed in place" in reason for reason in missing - allowed), missing
        assert sum(call.own is not None for call in candidate.calls) >= 0.7 * len(candidate.calls)


def test_a_precision_that_torch_cannot_compute_is_reported_with_its_reason():
    model, batch, loss = made("rnn")
    report = compare(model, batch, loss, dtypes=["fp16-autocast", "tf32"], search_trials=4)
    failed, passed = report.candidates
    if not failed.failure:
        pytest.skip("this torch computes an LSTM in FP16 under autocast")
    assert "LSTM" in failed.failure and not failed.verdict.passed
    assert passed.failure == "" and passed.verdict.passed


def test_what_is_kept_in_fp32_makes_llama_pass_in_fp8():
    model, batch, loss = made("llama")
    report = compare(model, batch, loss, dtypes=["fp8-e4m3"], tolerance=0.006, search_trials=25)
    (found,) = report.candidates
    assert not found.verdict.passed
    assert found.keep is not None and found.keep.found and found.keep.verdict is not None
    assert found.keep.verdict.passed and found.keep.verdict.relative < 0.006
