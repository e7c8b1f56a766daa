"""What Megatron's optimizers step in place of the model's parameters; whole runs: see numerics."""

from typing import Any

import torch
from torch import nn

from mp_agent.probe.placement.megatron import MasterOrigin, origin_of, origins_by_master


def test_a_master_stands_for_the_parameter_that_names_it():
    layer: Any = nn.Linear(2, 2)
    layer.weight.main_param = layer.weight.detach().clone().float()
    layer.bias.main_param = layer.bias.detach().clone().float()
    layer.bias.main_param_sharded = True
    masters = origins_by_master([layer])
    assert masters == {
        id(layer.weight.main_param): MasterOrigin(layer.weight, sliced=False),
        id(layer.bias.main_param): MasterOrigin(layer.bias, sliced=True),
    }
    assert origin_of(layer.bias.main_param, masters) == MasterOrigin(layer.bias, sliced=True)


def test_a_flat_view_is_a_slice_of_its_parameter():
    weight = nn.Parameter(torch.ones(4, 2))
    assert origin_of(weight.view(-1)[2:5], {}) == MasterOrigin(weight, sliced=True)


def test_what_nothing_names_stands_for_nothing_known():
    weight = nn.Parameter(torch.ones(4, 2))
    assert origin_of(weight, {}) is None
    assert origin_of(weight.detach().clone().view(-1), {}) is None
    assert origin_of(weight.detach().view(-1)[2:5], {}) is None  # autograd knows no base of it
    assert origin_of(weight.view(2, 4), {}) is None  # not flat: no slice


def test_parameters_whose_master_is_elsewhere_are_passed_over():
    layer: Any = nn.Linear(2, 2)
    layer.weight.main_param = None  # the fused optimizer holds it
    layer.register_parameter("absent", None)
    assert origins_by_master([layer]) == {}
