"""Which module tree parameters belong to."""

import torch
from torch import nn

from mp_agent.probe.optimizers.live_objects import walk
from mp_agent.probe.optimizers.parameter_names import optimizer_parameters, root_module


def test_of_twins_the_one_whose_parameters_come_first_is_the_root():
    second, first = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()])
    live = walk().modules
    held = optimizer_parameters(optimizer)
    assert root_module(live, held) is first
