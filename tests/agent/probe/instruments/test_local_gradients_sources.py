"""Gradients of one rank under FSDP2: where they are found, and what of that stays untouched."""

import copy
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

from mp_agent.probe.instruments import local_gradient_sources
from mp_agent.probe.instruments.local_gradients import UNSEEN
from mp_agent.probe.optimizers.plan import LayerSlot
from mp_agent.records.columns import by_name
from tests.agent.probe.small_model import make_loss, make_model, sum_squares

fully_sharded = pytest.mark.xfail(
    torch.__version__.startswith("2.6."),
    reason="fully_shard of torch 2.6 does not run on a CPU",
    raises=(AttributeError, TypeError),
    strict=True,
)

NORM = "local_grad_norm"
UNDER_FSDP2 = "local gradients under fsdp2"


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: nn.Sequential) -> None:
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)


def copies_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the whole parameters that FSDP2 computes with."""
    found: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            found += [] if group is None else [each._unsharded_param for each in group.fsdp_params]
    return found


def halves(model: nn.Sequential) -> tuple[nn.Module, nn.Module]:
    layers = list(model)
    return nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])


def hooks_of(model: nn.Module) -> int:
    tensors = [*model.parameters(), *copies_of(model)]
    return sum(len(each._post_accumulate_grad_hooks or ()) for each in tensors)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        make_loss(model).backward()
        optimizer.step()


def last_of(watching) -> dict[str, float]:
    contents = watching.read()
    return by_name(contents.schema.step_columns, contents.records[-1].values)


def expected_norm(model: nn.Module) -> float:
    plain = copy.deepcopy(model)
    make_loss(plain).backward()
    return math.sqrt(sum_squares(plain))


@fully_sharded
@pytest.mark.usefixtures("group")
def test_hooks_are_on_the_gathered_parameters_alone_and_only_while_attached(watch):
    model = make_model()
    norm = expected_norm(model)
    shard(model)
    watching = watch(measure_local_gradients=True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert last_of(watching)[NORM] == pytest.approx(norm, rel=1e-6)
    assert hooks_of(model) == len(copies_of(model)) == 4
    watching.close()
    assert hooks_of(model) == 0


@fully_sharded
@pytest.mark.usefixtures("group")
def test_no_gathered_gradient_outlives_its_reduction(watch):
    model = make_model()
    shard(model)
    watch(measure_local_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    storages = []
    for each in copies_of(model):
        each.register_post_accumulate_grad_hook(
            lambda tensor: storages.append(StorageWeakRef(tensor.grad.untyped_storage()))
        )
    make_loss(model).backward()
    assert len(storages) == 4
    assert all(each.grad is None for each in copies_of(model))
    assert all(storage.expired() for storage in storages)


@fully_sharded
@pytest.mark.usefixtures("group")
def test_a_parameter_that_fsdp2_ignores_counts_too(watch):
    model = make_model()
    norm = expected_norm(model)
    ignored = cast(nn.Parameter, model[2].weight)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh, ignored_params={ignored})
    assert model[2].weight is ignored
    watching = watch(measure_local_gradients=True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert last_of(watching)[NORM] == pytest.approx(norm, rel=1e-6)


@fully_sharded
@pytest.mark.usefixtures("group")
def test_a_module_that_is_used_later_counts_from_then_on(watch):
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    mesh = init_device_mesh("cpu", (1,))
    plain = copy.deepcopy(model)
    for each in model:
        fully_shard(each, mesh=mesh)
    watching = watch(measure_local_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for used in (1, 1, 2):
        optimizer.zero_grad()
        for layers in (plain, model):
            layers.zero_grad()
            sum(layer(torch.ones(2, 3)).pow(2).sum() for layer in layers[:used]).backward()
        optimizer.step()
    assert last_of(watching)[NORM] == pytest.approx(sum_squares(plain) ** 0.5, rel=1e-6)


@fully_sharded
@pytest.mark.usefixtures("group")
def test_compiled_modules_are_measured_as_others_are_and_not_compiled_again(watch):
    model = make_model()
    norm = expected_norm(model)
    mesh = init_device_mesh("cpu", (1,))
    blocks = [cast(nn.Module, torch.compile(part, backend="aot_eager")) for part in halves(model)]
    for block in blocks:
        fully_shard(block, mesh=mesh)
    model = nn.Sequential(*blocks)
    watching = watch(measure_local_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch._dynamo.utils.counters.clear()
    train(model, optimizer, steps=1)
    assert hooks_of(model) == 0
    train(model, optimizer, steps=3)
    assert hooks_of(model) == 4
    assert last_of(watching)[NORM] == pytest.approx(norm, rel=1e-6)
    watching.close()
    train(model, optimizer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(blocks)


@fully_sharded
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("missing", "reported"),
    [
        ({"_get_fsdp_state"}, UNDER_FSDP2),
        ({"_fsdp_param_group", "_fsdp_param_groups"}, UNDER_FSDP2),
        ({"fsdp_params"}, UNDER_FSDP2),
        ({"sharded_param"}, UNDER_FSDP2),
        ({"unsharded_accumulated_grad"}, UNDER_FSDP2),
        ({"__weakref__"}, UNDER_FSDP2),
        ({"_unsharded_param"}, UNSEEN),
    ],
)
def test_where_fsdp2_is_built_otherwise_it_is_reported_and_nothing_is_claimed(
    missing, reported, watch, monkeypatch
):
    def get(thing, name, *default):
        return default[0] if name in missing else getattr(thing, name, *default)

    def has(thing, name):
        return name not in missing and hasattr(thing, name)

    monkeypatch.setattr(local_gradient_sources, "getattr", get, raising=False)
    monkeypatch.setattr(local_gradient_sources, "hasattr", has, raising=False)
    model = make_model()
    shard(model)
    watching = watch(measure_local_gradients=True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert NORM not in last_of(watching)
    assert hooks_of(model) == 0
    assert reported in watching.state().unsupported
    assert watching.state().probe_errors == 0


class FakeFSDPParam:
    def __init__(self, sharded: nn.Parameter, whole: nn.Parameter) -> None:
        self.sharded_param, self._unsharded_param = sharded, whole
        self.unsharded_accumulated_grad = None


@pytest.mark.parametrize(("device", "known"), [("cpu", True), ("meta", False)])
def test_a_copy_on_another_device_than_its_parameter_is_not_measured(device, known):
    parameter = nn.Parameter(torch.zeros(3))
    copied = FakeFSDPParam(parameter, nn.Parameter(torch.zeros(3, device=device)))
    state = SimpleNamespace(_fsdp_param_group=SimpleNamespace(fsdp_params=[copied]))
    module = SimpleNamespace(_get_fsdp_state=lambda: state)
    plan = SimpleNamespace(
        slots=[LayerSlot("weight", parameter)],
        reducers=SimpleNamespace(sharding=[module]),
        device=parameter.device,
    )
    found = local_gradient_sources.sources_of(cast(Any, plan))
    assert (found is not None) is known


def test_parts_of_flat_parameters_are_not_measured():
    flat = LayerSlot("weight", nn.Parameter(torch.zeros(3)), slice(0, 2))
    plan = SimpleNamespace(slots=[flat], reducers=SimpleNamespace(sharding=[]))
    assert local_gradient_sources.sources_of(cast(Any, plan)) is None
