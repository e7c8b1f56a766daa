"""Which modules are hooked, and under which names."""

from typing import Any

import pytest
import torch
from torch import nn

from mp_agent.probe.instruments.activation_modules import COMPILED, SCRIPTED, OutputModules


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_leaves_have_names_without_the_components_of_wrappers():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))

    assert OutputModules(Wrapper(model)).names == ("0", "1.0", "1.1")


def test_a_model_that_is_a_leaf_has_the_name_of_its_class():
    assert OutputModules(nn.Linear(2, 2)).names == ("Linear",)


def test_a_module_that_is_used_twice_is_hooked_once():
    shared = nn.Linear(2, 2)

    assert OutputModules(nn.ModuleDict({"a": shared, "b": shared})).names == ("a",)


def test_attention_is_whole_since_it_never_calls_its_projection():
    model = nn.TransformerEncoderLayer(8, 2, 16)

    names = OutputModules(model).names
    assert "self_attn" in names
    assert not any(name.startswith("self_attn.") for name in names)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_compiled_is_reported_and_left_alone(in_place):
    compiled: Any = nn.Linear(2, 2)
    if in_place:
        compiled.compile(backend="eager")
    else:
        compiled = torch.compile(compiled, backend="eager")
    found = OutputModules(nn.Sequential(nn.Linear(2, 2), compiled))

    assert found.names == ("0",)
    assert found.not_covered == (COMPILED,)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_is_scripted_is_reported_and_left_alone():
    found = OutputModules(nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.ReLU()))

    assert found.names == ("1",)
    assert found.not_covered == (SCRIPTED,)


def test_modules_are_not_kept_alive():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    found = OutputModules(model)
    del model[1]

    assert [place for place, _ in found.alive] == [0]
