"""The formats of a run, as its ring's schema has them."""

import pytest
import torch
from torch import nn

from mp_agent.probe.recording.run_facts import format_name


def _facts(watched) -> dict[str, str]:
    return {name: value for name, value in watched.read().schema.facts if name.endswith("_format")}


def test_a_plain_run_is_in_fp32(watch):
    watched, model = watch(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert _facts(watched) == {
        "autocast_format": "",
        "parameter_format": "fp32",
        "master_format": "",
        "gradient_format": "fp32",
        "matmul_format": "fp32",
    }


def test_autocast_and_mixed_parameters_are_distinguished_by_size(watch):
    watched = watch()
    model = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(1, 8)).float().sum()
    loss.backward()
    optimizer.step()
    facts = _facts(watched)
    assert facts["autocast_format"] == "bf16"
    assert facts["parameter_format"] == facts["gradient_format"] == "bf16+fp32"


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float16, "fp16"), (torch.float8_e4m3fn, "float8_e4m3fn")]
)
def test_formats_without_a_short_name_keep_torchs(dtype, name):
    assert format_name(dtype) == name


def test_tf32_is_reported_where_it_is_allowed(watch):
    watched, model = watch(), nn.Linear(2, 2)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    finally:
        torch.set_float32_matmul_precision(before)
    assert _facts(watched)["matmul_format"] == "tf32"


def _zero_epsilon(watched) -> str:
    facts = dict(watched.read().schema.facts)
    name = facts.get("zero_epsilon_optimizer", "")
    return f"{name} {facts['zero_epsilon']}" if name else ""


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-4)
    optimizer.step()


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "RMSprop", "Adagrad"])
def test_an_epsilon_that_fp16_state_rounds_to_zero_is_named_at_the_first_step(watch, kind):
    watched, model = watch(), nn.Linear(4, 4).half()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    epsilon = optimizer.param_groups[0]["eps"]
    _step(model, optimizer)
    assert _zero_epsilon(watched) == f"{kind} {epsilon:g}"
    assert not all(bool(each.isfinite().all()) for each in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.float16, {"eps": 1e-4}),
        (torch.float16, {"fused": True}),
    ],
)
def test_an_epsilon_that_the_division_keeps_is_not(watch, dtype, settings):
    watched, model = watch(), nn.Linear(4, 4).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **settings)
    _step(model, optimizer)
    assert _zero_epsilon(watched) == ""
    assert all(bool(each.isfinite().all()) for each in model.parameters())


def test_fp32_copies_of_fp16_weights_are_judged_as_such(watch):
    watched, model = watch(), nn.Linear(4, 4).half()
    copies = [nn.Parameter(each.detach().float()) for each in model.parameters()]
    optimizer = torch.optim.AdamW(copies, lr=1e-3)
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-4)
    optimizer.step()
    assert _zero_epsilon(watched) == ""
