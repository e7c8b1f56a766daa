"""Modules that compute in a wider format for a while."""

from copy import deepcopy
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import nn

from mp_agent.catalog.guard import POLICIES_BY_NAME
from mp_agent.probe.guard.slow_policies import PrecisionSwitch
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


def _switched(model: nn.Module) -> list[str]:
    """The names of the modules that compute in another way than their class does."""
    plain = (nn.Linear, nn.Tanh, nn.Sequential, nn.ModuleDict)
    return [name for name, module in model.named_modules() if type(module) not in plain]


def test_named_modules_compute_in_fp32_until_it_has_been_calm():
    model, switch = make_model(), _switch(modules="2")
    assert _dtypes(model) == [torch.bfloat16] * 3
    assert switch.observe(BAD, model)
    assert _dtypes(model) == [torch.bfloat16, torch.bfloat16, torch.float32]
    switch.observe(CALM, model)
    assert _dtypes(model)[2] == torch.float32
    switch.observe(CALM, model)
    assert _dtypes(model) == [torch.bfloat16] * 3
    assert not _switched(model)


def test_the_whole_model_is_switched_by_a_star_and_named_as_without_wrappers():
    model, switch = make_model(), _switch()
    assert switch.observe(BAD, model)
    assert _dtypes(model) == [torch.float32] * 3
    wrapped = nn.ModuleDict({"module": make_model()})
    assert _switch(modules="0 2").observe(BAD, wrapped)
    assert _switched(wrapped) == ["module.0", "module.2"]


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
    assert not _switched(model)


@pytest.mark.parametrize("way", ["copied", "saved"])
def test_copies_of_a_switched_model_compute_by_themselves_and_as_before(way):
    model = make_model()
    assert _switch(modules="2").observe(BAD, model)
    copied = deepcopy(model)
    if way == "saved":
        torch.save(model, stream := BytesIO())
        stream.seek(0)
        copied = torch.load(stream, weights_only=False)
    for parameter in copied.parameters():
        nn.init.zeros_(parameter)
    assert not _switched(copied)
    assert _switched(model) == ["2"]
    assert _dtypes(copied) == [torch.bfloat16] * 3
    assert not copied(torch.ones(1, 4)).any()
    assert model(torch.ones(1, 4)).any()


@pytest.mark.parametrize("modules", ["*", "2"])
def test_a_compiled_model_is_switched_and_switched_back(modules):
    model, switch = make_model(), _switch(modules=modules)
    compiled: Any = torch.compile(model, backend="eager")

    def dtype() -> torch.dtype:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found: torch.dtype = compiled(torch.ones(1, 4)).dtype
        return found

    assert dtype() == torch.bfloat16
    assert switch.observe(BAD, compiled if modules == "*" else model)
    assert dtype() == torch.float32
    switch.switch_back()
    assert dtype() == torch.bfloat16


def test_a_scripted_model_is_left_alone():
    assert not _switch().observe(BAD, torch.jit.script(make_model()))
