"""Names, wrappers and optimizers are found among the live objects."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from mp_agent.probe.optimizers import live_objects


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight  # tied


def names(optimizer: torch.optim.Optimizer) -> list[str]:
    modules = live_objects.walk().modules
    root = live_objects.root_module(modules, live_objects.optimizer_parameters(optimizer))
    return [named.name for named in live_objects.named_parameters(optimizer, root, modules)]


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
        assert names(torch.optim.SGD(model.blocks[1].first.parameters())) == [
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
        wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
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

    def test_of_twins_are_those_of_the_one_whose_parameters_come_first(self):
        second, first = nn.Linear(2, 1), nn.Linear(2, 1)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()])
        live = live_objects.walk().modules
        held = live_objects.optimizer_parameters(optimizer)
        assert live_objects.root_module(live, held) is first

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


@pytest.mark.parametrize(
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
    assert live_objects.strip_wrappers(full) == short


def test_the_walk_passes_by_half_made_modules_and_hostile_objects():
    class Hostile:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    unfinished = nn.Linear.__new__(nn.Linear)
    hostile = [Hostile()]
    live = live_objects.walk()
    assert not any(module is unfinished for module in live.modules)
    del hostile


@pytest.mark.parametrize("young", [False, True])
def test_the_walk_keeps_nothing_alive(young):
    gc.disable()
    try:
        gone = nn.Linear(2, 2)
        kept = weakref.ref(gone)
        live = live_objects.walk(young=young)
        assert any(each is gone for each in live.modules)
        del live, gone
        assert kept() is None
    finally:
        gc.enable()


def test_the_walk_finds_what_was_frozen_and_leaves_it_frozen():
    gc.collect()
    model = Model()
    gone = nn.Linear(2, 2)
    kept = weakref.ref(gone)
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        later = Block()
        live = live_objects.walk()
        found = list(map(id, live.modules))
        assert len(found) == len(set(found))
        assert {id(each) for each in (*model.modules(), *later.modules())} <= set(found)
        assert gc.get_freeze_count() == frozen
        del live, gone
        assert kept() is None
    finally:
        gc.unfreeze()


class TestHolders:
    def test_come_in_the_order_of_the_parameters(self):
        models = [nn.Linear(2, 2) for _ in range(3)]
        optimizers = [torch.optim.SGD(model.parameters()) for model in models]
        wanted = [models[2].weight, models[0].bias]
        found = live_objects.holders(live_objects.walk().optimizers, wanted)
        assert [optimizers.index(each) for each in found] == [2, 0]
        assert live_objects.holders([], wanted) == []

    def test_leave_out_an_optimizer_within_another(self):
        model = nn.Linear(2, 2)
        inner = torch.optim.SGD([model.bias])
        outer = torch.optim.SGD(model.parameters())
        assert live_objects.holders([inner, outer], list(model.parameters())) == [outer]


def test_an_optimizer_trains_a_part_of_a_model_that_no_other_holds():
    model, other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    first, second, stranger = (
        torch.optim.SGD(each.parameters()) for each in (model[0], model[1], other)
    )
    held = {id(parameter) for parameter in model[0].parameters()}
    optimizers = [first, second, stranger]
    found = [live_objects.trains_part_of(each, model, held) for each in optimizers]
    assert found == [False, True, False]
    assert not live_objects.trains_part_of(second, None, held)
    assert not live_objects.trains_part_of(torch.optim.SGD(model.parameters()), model, held)
    assert not live_objects.has_gradient(second)
    model(torch.ones(1, 2)).sum().backward()
    assert live_objects.has_gradient(second)
