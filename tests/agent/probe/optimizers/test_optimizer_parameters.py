"""Which optimizers hold given parameters, or the rest of a model."""

import torch
from torch import nn

from mp_agent.probe.optimizers.live_objects import walk
from mp_agent.probe.optimizers.parameter_names import (
    has_gradient,
    holders,
    trains_part_of,
)


class TestHolders:
    def test_come_in_the_order_of_the_parameters(self):
        models = [nn.Linear(2, 2) for _ in range(3)]
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(model.parameters()) for model in models
        ]
        wanted = [models[2].weight, models[0].bias]
        found = holders(walk().optimizers, wanted)
        assert [optimizers.index(each) for each in found] == [2, 0]
        assert holders([], wanted) == []

    def test_leave_out_an_optimizer_within_another(self):
        model = nn.Linear(2, 2)
        inner = torch.optim.SGD([model.bias])
        outer = torch.optim.SGD(model.parameters())
        assert holders([inner, outer], list(model.parameters())) == [outer]


def test_an_optimizer_trains_a_part_of_a_model_that_no_other_holds():
    model, other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    first, second, unrelated = (
        torch.optim.SGD(each.parameters()) for each in (model[0], model[1], other)
    )
    held = {id(parameter) for parameter in model[0].parameters()}
    optimizers = [first, second, unrelated]
    found = [trains_part_of(each, model, held) for each in optimizers]
    assert found == [False, True, False]
    assert not trains_part_of(second, None, held)
    assert not trains_part_of(torch.optim.SGD(model.parameters()), model, held)
    assert not has_gradient(second)
    model(torch.ones(1, 2)).sum().backward()
    assert has_gradient(second)
