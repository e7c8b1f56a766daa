"""Hooks on what comes late or ends: classes made after attaching, FSDP1's clipping, teardown."""

import importlib
import inspect
import sys
import time
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from mp_agent.probe.hooks.patches import Patches, Wrapper


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


class TestScalerClassesMadeLater:
    def train(self, scaler: torch.amp.GradScaler) -> float:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters())
        loss = model(torch.ones(1, 4)).pow(2).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(loss.item())

    def test_are_seen_once(self, watch):
        watched = watch()

        class Scaler(torch.amp.GradScaler):
            def scale(self, outputs):
                return super().scale(outputs)

            def unscale_(self, optimizer):
                super().unscale_(optimizer)

        loss = self.train(Scaler("cpu", init_scale=8.0))
        contents = watched.read()
        assert contents.values(0)["loss"] == loss
        assert contents.values(0)["loss_scale"] == 8.0
        assert contents.schema.fact("measuring_point") == "unscale"

    def test_are_seen_by_every_probe_and_left_alone_afterwards(self, watch):
        first, second = watch(), watch()

        class Scaler(torch.amp.GradScaler):
            def scale(self, outputs):
                return super().scale(outputs)

        second.probe.detach()
        first.probe.detach()
        assert "__init_subclass__" not in vars(torch.amp.GradScaler)
        self.train(Scaler("cpu"))
        assert first.state().started_sequence == 0

    def test_keep_a_hook_of_their_own_on_subclasses(self, watch):
        watch()
        made = []

        class Scaler(torch.amp.GradScaler):
            def __init_subclass__(cls, **kwargs):
                super().__init_subclass__(**kwargs)
                made.append(cls)

        class Other(Scaler):
            pass

        assert made == [Other]

    def test_of_fsdp_is_seen_though_it_is_imported_afterwards(self, watch):
        watched = watch()
        sys.modules.pop("torch.distributed.fsdp.sharded_grad_scaler", None)
        module = importlib.import_module("torch.distributed.fsdp.sharded_grad_scaler")
        watched.probe.connect()
        scaler = module.ShardedGradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones((), requires_grad=True))
        assert vars(module.ShardedGradScaler)["scale"].__wrapped__ is not None


def test_the_clipping_of_fsdp1_is_looked_behind(watch, monkeypatch):
    """As far as that goes without a GPU: the method is FSDP's, what it does is ours."""

    def clip(self, max_norm, norm_type=2.0):
        for parameter in self.parameters():
            parameter.grad.zero_()
        return torch.tensor(7.0)

    monkeypatch.setattr(FullyShardedDataParallel, "clip_grad_norm_", clip)
    watched = watch()
    model = nn.ParameterDict({"weight": torch.ones(4)})
    optimizer = torch.optim.SGD(model.parameters())
    (model["weight"] * 3).sum().backward()
    clip_of_fsdp: Any = FullyShardedDataParallel.clip_grad_norm_
    assert clip_of_fsdp(model, 2.0).item() == 7.0
    optimizer.step()
    contents = watched.read()
    assert contents.gradients(0)["sum_squares"] == 36.0
    assert (contents.values(0)["clip_max_norm"], contents.values(0)["clip_norm"]) == (2.0, 7.0)


class TestTeardown:
    def end(self, watch, monkeypatch, tmp_path, *, trains: bool) -> list[float]:
        pauses: list[float] = []
        monkeypatch.setattr(time, "sleep", pauses.append)
        method = f"file://{tmp_path}/rendezvous"
        dist.init_process_group("gloo", init_method=method, rank=0, world_size=1)
        try:
            watched = watch(ranks_in_run=2)
            model = DistributedDataParallel(make_model())
            if trains:
                optimizer = torch.optim.SGD(model.parameters())
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
            del watched
        finally:
            distributed_c10d.destroy_process_group()
        assert not dist.is_initialized()
        return pauses

    def test_of_gloo_is_given_time_after_ddp_has_trained(self, watch, monkeypatch, tmp_path):
        assert self.end(watch, monkeypatch, tmp_path, trains=True) == [0.1]

    def test_is_not_delayed_otherwise(self, watch, monkeypatch, tmp_path):
        assert self.end(watch, monkeypatch, tmp_path, trains=False) == []

    def test_of_nothing_raises_what_torch_raises(self, watch):
        with pytest.raises(AssertionError):
            dist.destroy_process_group()
        watched = watch()
        with pytest.raises(AssertionError):
            dist.destroy_process_group()
        assert watched.state().probe_errors == 0


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    """Return the code of what was put in place, below what keeps torch.compile from tracing it."""
    while (below := getattr(function, "_torchdynamo_orig_callable", None)) is not None:
        function = below
    return getattr(function, "__code__", None)


def test_whatever_is_replaced_takes_its_arguments_by_the_names_that_it_had(watch, monkeypatch):
    """A script may call `scaler.step(optimizer=optimizer)`."""
    replaced: dict[str, tuple[Callable[..., Any], CodeType | None]] = {}
    replace, replace_inside = Patches.replace, Patches.replace_inside

    def noted(name: str, wrap: Wrapper) -> Wrapper:
        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            replacement = wrap(original)
            replaced[name] = original, _code_of(replacement)
            return replacement

        return wrapped

    monkeypatch.setattr(
        Patches,
        "replace",
        lambda self, owner, name, wrap: replace(
            self, owner, name, noted(f"{owner.__name__}.{name}", wrap)
        ),
    )
    monkeypatch.setattr(
        Patches,
        "replace_inside",
        lambda self, function, wrap: replace_inside(self, function, noted(function.__name__, wrap)),
    )
    watch(guard=True)

    odd = {}
    for name, (original, code) in replaced.items():
        assert code is not None, name
        taken = set(code.co_varnames[1 : code.co_argcount])  # the first one is given by place
        odd[name] = taken - set(inspect.signature(original).parameters)
    assert {"GradScaler.step", "Module.load_state_dict", "clip_grad_norm_"} <= set(odd)
    assert {name: names for name, names in odd.items() if names} == {}


def test_a_scaler_is_seen_whose_arguments_are_given_by_name(watch):
    watched = watch()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = model(torch.ones(1, 4)).pow(2).sum()
    scaler.scale(outputs=loss).backward()
    scaler.unscale_(optimizer=optimizer)
    scaler.step(optimizer=optimizer)
    scaler.update()

    assert watched.read().values(0)["loss"] == loss.item()
    assert watched.read().values(0)["loss_scale"] == 8.0
