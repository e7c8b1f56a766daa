"""Names of parameters: the optimizer's own, those of the module tree, or numbers."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mp_agent.probe.optimizers.live_objects import walk
from mp_agent.probe.optimizers.parameter_names import (
    named_parameters,
    optimizer_parameters,
    root_module,
    strip_wrappers,
)
from mp_agent.probe.optimizers.plan import make_plan
from tests.agent.probe.optimizers.small_trees import Model
from tests.subtests import each


def names(optimizer: torch.optim.Optimizer) -> list[str]:
    modules = walk().modules
    root = root_module(modules, optimizer_parameters(optimizer))
    return [named.name for named in named_parameters(optimizer, root, modules)]


def plain_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


class TestNames:
    def test_are_those_of_the_module_tree_in_module_order(self):
        model = Model()
        reversed_parameters = list(model.parameters())[::-1]
        assert names(torch.optim.SGD(reversed_parameters)) == plain_names(model)

    def test_count_tied_parameters_once(self):
        model = Model()
        found = names(torch.optim.SGD(model.parameters()))
        assert found[0] == "embed.weight"
        assert "head.weight" not in found

    def test_leave_out_what_is_not_optimized(self):
        model = Model()
        assert names(torch.optim.SGD(model.get_submodule("blocks.1.first").parameters())) == [
            "blocks.1.first.weight",
            "blocks.1.first.bias",
        ]

    def test_come_from_the_tree_that_holds_the_parameters_not_from_a_copy(self):
        model = Model()
        average = copy.deepcopy(model)
        holder = nn.ModuleDict({"unrelated": average})
        assert names(torch.optim.SGD(model.parameters())) == plain_names(model)
        del holder

    def test_are_the_optimizers_own_where_it_was_given_some(self):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD([(f"own.{n}", p) for n, p in model.named_parameters()])
        assert names(optimizer) == ["own.weight", "own.bias"]

    def test_of_compiled_and_wrapped_models_have_no_wrapper_in_them(self):
        model = Model()
        compiled: Any = torch.compile(model, backend="eager")
        wrapped = nn.DataParallel(compiled)
        assert names(torch.optim.SGD(wrapped.parameters())) == plain_names(model)

    def test_of_several_models_under_one_optimizer_begin_with_the_class_of_the_others(self):
        actor, twins = Model(), [nn.DataParallel(nn.Linear(2, 1)) for _ in range(2)]
        parameters = [p for model in (*twins, actor) for p in model.parameters()]
        assert names(torch.optim.SGD(parameters)) == [
            *plain_names(actor),
            "Linear.weight",
            "Linear.bias",
            "Linear2.weight",
            "Linear2.bias",
        ]

    def test_of_parameters_outside_any_module_are_numbered(self):
        loose = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        assert names(torch.optim.SGD(loose)) == ["parameter0", "parameter1"]

    def test_stay_unique_where_stripping_makes_them_equal(self):
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(1))
        model.module = nn.Module()
        model.module.weight = nn.Parameter(torch.ones(1))
        assert names(torch.optim.SGD(model.parameters())) == ["weight", "module.weight"]

    def test_given_twice_by_the_user_are_kept_apart(self):
        parameters = [nn.Parameter(torch.ones(1)) for _ in range(3)]
        optimizer = torch.optim.SGD([("same", parameter) for parameter in parameters])
        assert names(optimizer) == ["same", "same'", "same''"]


@each(
    ("full", "short"),
    [
        ("module.layer.weight", "layer.weight"),
        ("_orig_mod.module.layer.weight", "layer.weight"),
        ("blocks.0._fsdp_wrapped_module.weight", "blocks.0.weight"),
        ("blocks.0._checkpoint_wrapped_module._orig_mod.weight", "blocks.0.weight"),
        ("_forward_module.module.layer.weight", "layer.weight"),
        ("modules.weight", "modules.weight"),
        ("module", "module"),
    ],
)
def test_wrapper_components_are_stripped_anywhere(full, short):
    assert strip_wrappers(full) == short


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        ([f"relation_{a}{b}" for a in "abcdefgh" for b in "abcdefgh"], 64),
        ([f"block{number}" for number in range(100)], 1),
        ([f"relation_{a}{b}" for a in "abcdefghi" for b in "abcdefghi"], 1),
    ],
)
def test_of_tensors_that_nothing_explains_few_groups_are_judged(names: list[str], groups: int):
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in names})
    optimizer = torch.optim.SGD(model.parameters())
    plan = make_plan(optimizer, walk(), model, 2, "")
    assert len(plan.layers) == len(names)
    assert len(plan.shares) == groups
