"""Which layers of a model FP8 may multiply, and who casts them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mp_agent.probe.instruments.fp8 import COMPILED, Fp8Layers, _casts_whole_tensors, fp8_library
from tests.agent.probe.instruments.fp8_scaled_layers import ScaledLinear


class Float8Linear(nn.Linear):
    """As torchao's is called."""


def test_linear_layers_and_those_with_delayed_scaling_are_found_in_order():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), ScaledLinear(), nn.Conv1d(1, 1, 1))
    found = Fp8Layers(model)
    assert found.names == ("0", "2")
    assert [module for _, module in found.alive] == [model[0], model[2]]
    assert found.is_of(model) and not found.is_of(model[0])
    assert found.not_covered == ()


def test_a_layer_used_twice_is_one():
    layer = nn.Linear(2, 2)
    assert Fp8Layers(nn.Sequential(layer, layer)).names == ("0",)


def test_the_model_itself_is_named_by_its_class():
    assert Fp8Layers(nn.Linear(2, 2)).names == ("Linear",)


def test_what_is_compiled_or_scripted_is_reported():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    model[1].compile()
    found = Fp8Layers(model)
    assert (found.names, found.not_covered) == (("0",), (COMPILED,))
    scripted = Fp8Layers(torch.jit.script(nn.Sequential(nn.Linear(2, 2))))
    assert (scripted.names, scripted.not_covered) == ((), ())


def test_the_library_is_known_by_its_layers(monkeypatch):
    assert fp8_library(None) == fp8_library(nn.Sequential(nn.Linear(2, 2))) == ""
    assert fp8_library(nn.Sequential(Float8Linear(2, 2))) == "", "a class of one's own"
    monkeypatch.setattr(Float8Linear, "__module__", "torchao.float8.float8_linear")
    model = nn.Sequential(Float8Linear(2, 2))
    assert fp8_library(model) == "torchao"
    model.append(ScaledLinear())
    assert fp8_library(model) == "torchao+transformer_engine"


@pytest.mark.parametrize(
    ("module", "granularity", "casts"),
    [
        ("torchao.float8.float8_linear", "ScalingGranularity.TENSORWISE", True),
        ("torchao.float8.float8_linear", "ScalingGranularity.AXISWISE", False),
        ("torchao.float8.float8_linear", None, False),
        ("my.layers", "ScalingGranularity.TENSORWISE", False),
    ],
)
def test_only_a_cast_of_whole_tensors_is_judged_by_their_amax(module, granularity, casts):
    cast = SimpleNamespace(scaling_granularity=granularity)
    layer = type("Float8Linear", (nn.Linear,), {"__module__": module})(2, 2)
    layer.config = SimpleNamespace(cast_config_input=cast, cast_config_weight=cast)
    assert _casts_whole_tensors(layer) is casts
