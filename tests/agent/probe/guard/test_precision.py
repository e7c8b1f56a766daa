"""Modules that compute in a wider format for a while."""

import torch
from torch import nn

from mp_agent.catalog.guard import POLICIES_BY_NAME
from mp_agent.probe.guard.precision import PrecisionSwitch
from tests.agent.probe.guard.test_learning_rate import BAD, CALM
from tests.agent.probe.small_model import make_model


def _switch(*, dry_run: bool = False, **values: float | str) -> PrecisionSwitch:
    defaults = POLICIES_BY_NAME["widen_precision"].defaults
    given = {**defaults, "troubles": 1.0, "hold_steps": 2.0, **values}
    return PrecisionSwitch(given, dry_run=dry_run)


def _dtypes(model: nn.Sequential) -> list[torch.dtype]:
    """What each module returns under autocast to BF16."""
    seen: list[torch.dtype] = []
    hooks = [m.register_forward_hook(lambda *a: seen.append(a[2].dtype)) for m in model]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(1, 4))
    for hook in hooks:
        hook.remove()
    return seen


def test_named_modules_compute_in_fp32_until_it_has_been_calm():
    model, switch = make_model(), _switch(modules="2")
    assert _dtypes(model) == [torch.bfloat16] * 3
    assert switch.observe(BAD, model)
    assert _dtypes(model) == [torch.bfloat16, torch.bfloat16, torch.float32]
    switch.observe(CALM, model)
    assert _dtypes(model)[2] == torch.float32
    switch.observe(CALM, model)
    assert _dtypes(model) == [torch.bfloat16] * 3
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_whole_model_is_switched_by_a_star_and_named_as_without_wrappers():
    model, switch = make_model(), _switch()
    assert switch.observe(BAD, model)
    assert _dtypes(model) == [torch.float32] * 3
    wrapped = nn.ModuleDict({"module": make_model()})
    assert _switch(modules="0 2").observe(BAD, wrapped)
    assert [name for name, m in wrapped.named_modules() if "forward" in vars(m)] == [
        "module.0",
        "module.2",
    ]


def test_modules_can_compute_under_autocast_to_bf16():
    model, switch = make_model(), _switch(dtype="bf16", modules="0")
    assert switch.observe(BAD, model)
    with torch.autocast("cpu", dtype=torch.float16):
        assert model(torch.ones(1, 4)).dtype == torch.float16
        assert model[0](torch.ones(1, 4)).dtype == torch.bfloat16
    assert model(torch.ones(1, 4)).dtype == torch.float32


def test_modules_with_narrow_weights_compute_as_before():
    model = make_model().to(torch.bfloat16)
    expected = model(torch.ones(1, 4, dtype=torch.bfloat16))
    assert _switch().observe(BAD, model)
    assert torch.equal(model(torch.ones(1, 4, dtype=torch.bfloat16)), expected)


def test_a_name_that_no_module_has_is_no_action():
    assert not _switch(modules="head").observe(BAD, make_model())


def test_a_dry_run_switches_nothing():
    model = make_model()
    assert _switch(dry_run=True).observe(BAD, model)
    assert not any("forward" in vars(module) for module in model.modules())
