"""Whether wrappers reduced the gradients before a step."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mp_agent.probe.placement import Reducers
from tests.agent.probe.fully_shard import fails_on_2_6


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


def reducers_of(model: nn.Module) -> Reducers:
    return Reducers(model.modules(), {id(each) for each in model.parameters()})


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def test_a_plain_model_has_none():
    assert reducers_of(nn.Linear(2, 2)).reduced() is None


@pytest.mark.slow
def test_a_wrapper_of_other_parameters_says_nothing(group):
    model = DistributedDataParallel(nn.Linear(2, 2))
    assert Reducers(model.modules(), {1}).reduced() is None


def test_ddp_reduces_unless_the_last_forward_was_under_no_sync(group):
    model = DistributedDataParallel(nn.Linear(2, 2))
    reducers = reducers_of(model)
    backward(model)
    assert reducers.reduced() is True
    with model.no_sync():
        backward(model)
    assert reducers.reduced() is False
    backward(model)
    assert reducers.reduced() is True


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "reduces"), [(allreduce_hook, True), (noop_hook, False)])
def test_ddp_reduces_as_its_hook_does(group, hook, reduces):
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, hook)
    backward(model)
    assert reducers_of(model).reduced() is reduces


@fails_on_2_6
def test_hybrid_shards_say_whether_replicas_share_their_gradients(group):
    model = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    sharded = fully_shard(model, mesh=mesh)
    reducers = reducers_of(model)
    backward(model)
    assert reducers.reduced() is True
    sharded.set_requires_all_reduce(False)
    backward(model)
    assert reducers.reduced() is False


@fails_on_2_6
def test_shards_have_no_gradients_but_reduced_ones(group):
    model = nn.Linear(2, 2)
    sharded = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    reducers = reducers_of(model)
    backward(model)
    sharded.set_requires_gradient_sync(False)
    before = [parameter.grad for parameter in model.parameters()]
    backward(model)
    assert reducers.reduced() is False
    assert all(
        parameter.grad is own for parameter, own in zip(model.parameters(), before, strict=True)
    )
    assert reducers.reduced_present() is True


def test_gradients_that_ddp_does_not_reduce_are_there(group):
    model = DistributedDataParallel(nn.Linear(2, 2))
    with model.no_sync():
        backward(model)
    assert reducers_of(model).reduced_present() is False


@pytest.mark.slow
def test_wrappers_are_not_kept_alive(group):
    model = DistributedDataParallel(nn.Linear(2, 2))
    reducers = reducers_of(model)
    backward(model)
    del model
    gc.collect()
    assert reducers.reduced() is None
