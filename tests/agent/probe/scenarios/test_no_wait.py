"""Off the CPU the host never waits: on the meta device there is no value to wait for.

Whatever would make the host wait for a GPU (`item()`, `float()`, `bool()`, `tolist()`, a copy to
the host) raises there, and the probe counts what raises.
"""

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grad_norm_

from mp_agent.probe import accelerator
from mp_agent.probe.delivery import base
from mp_agent.probe.optimizers import plan
from mp_agent.probe.optimizers.roles import WatchedOptimizer
from mp_agent.probe.statistics.distribution import distribution_rows
from mp_agent.probe.step import measurement
from mp_agent.probe.step.loss_graph import LOOK_INTERVAL_STEPS
from mp_agent.records.columns import (
    DISTRIBUTION,
    FAMILIES,
    GRADIENT_COLUMN_NAMES,
    PADDING_IN_TARGETS,
    TARGETS_MISALIGNED,
    TARGETS_SEEN,
)
from mp_agent.records.columns.gradients import FEW_WEIGHTS, STATE, WEIGHTS
from mp_agent.records.steps import FloatArray
from tests.agent.probe.rings import read_ring

STEPS = 12


class Statistics:
    """Shaped like the real thing, which is tested by itself."""

    def layers(self, tensors, inverse_scale):
        return torch.zeros(
            len(tensors), len(GRADIENT_COLUMN_NAMES), dtype=torch.float64, device="meta"
        )

    totals = layers  # one row for each of the groups

    def distribution(self, tensors, inverse_scale, loss_scale):
        # The stock operations themselves, unlike the others made small by nothing but a fake.
        return distribution_rows(tensors, inverse_scale, loss_scale, torch.device("meta"))

    def digests(self, tensors):
        return torch.zeros(len(tensors), dtype=torch.float64, device="meta")


class Still(torch.optim.Optimizer):
    """Does nothing, on any device, and takes whatever a fused optimizer takes."""

    grad_scale: torch.Tensor
    found_inf: torch.Tensor

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1, device="meta")})

    def step(self, closure=None):
        pass


class FakeMailbox:
    """Lets everything arrive at the second `collect`, as ones."""

    def __init__(self, device: torch.device) -> None:
        self.sent: list[tuple[Callable[[FloatArray], None], int]] = []

    def __len__(self) -> int:
        return len(self.sent)

    def send(self, pool, payload, then, lose) -> bool:
        assert payload.device.type == "meta"
        self.sent.append((then, payload.numel()))
        return True

    def collect(self) -> None:
        while len(self.sent) > 1:
            then, size = self.sent.pop(0)
            then(np.ones(size))

    def abandon(self) -> None:
        assert not self.sent

    def drain(self, limit_seconds: float) -> None:
        self.sent, waiting = [], self.sent
        for then, size in waiting:
            then(np.ones(size))


def refuse_pageable_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let code of the probe fail where it copies from the host by itself: such a copy waits."""
    sending = {accelerator.__name__, "mp_agent.probe.statistics.pieces"}
    to, tensor = torch.Tensor.to, torch.tensor

    def is_probes_own() -> bool:
        caller = str(sys._getframe(2).f_globals.get("__name__"))
        return caller.startswith("mp_agent.") and caller not in sending

    def checked_to(values, *args, **kwargs):
        found = to(values, *args, **kwargs)
        if is_probes_own() and values.device != found.device:
            assert values.device.type != "cpu", "a copy from pageable memory"
        return found

    def checked_tensor(*args, **kwargs):
        made = tensor(*args, **kwargs)
        assert made.device.type == "cpu" or not is_probes_own(), "made on the host"
        return made

    monkeypatch.setattr(torch.Tensor, "to", checked_to)
    monkeypatch.setattr(torch, "tensor", checked_tensor)


@pytest.fixture
def device_watch(watch, monkeypatch):
    refuse_pageable_copies(monkeypatch)
    monkeypatch.setattr(base, "DeviceTransfers", FakeMailbox)
    monkeypatch.setattr(accelerator, "is_supported", lambda device: True)
    monkeypatch.setattr(accelerator, "copy_to_host", lambda target, values: None)
    monkeypatch.setattr(measurement, "for_device", lambda device, **_: Statistics())
    monkeypatch.setattr(plan, "_holds_nothing", is_lazy)  # here the meta device holds numbers
    return watch


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
def test_no_step_asks_the_device_for_a_value(device_watch, clips, micro_batches):
    watched = device_watch(layer_interval=3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to("meta")
    optimizer = Still(model.parameters())
    for _ in range(STEPS):
        for _ in range(micro_batches):
            model(torch.ones(2, 4, device="meta")).sum().backward()
        if clips:
            clip_grad_norm_(model.parameters(), 1.0)
        watched.probe.observe(tokens=10, step=7)
        optimizer.step()
        optimizer.zero_grad()
    assert len(watched.read().records) == STEPS - 1, "only the last is still on its way"
    watched.probe.flush()
    contents = watched.read()
    assert contents.state.probe_errors == 0
    assert len(contents.records) == STEPS
    values = contents.values(5)
    assert values["loss"] == 1.0
    assert values["learning_rate"] == 1.0
    assert values.get("clip_norm") == (1.0 if clips else None)
    assert contents.schema.fact("device") == "meta"
    assert len(contents.layers) == 4


def test_optimizers_of_one_model_that_are_clipped_apart_ask_for_none(device_watch):
    watched = device_watch(layer_interval=3)
    layers = [nn.Linear(4, 3).to("meta"), nn.Linear(3, 2).to("meta")]
    model = nn.Sequential(*layers)
    # Every other layer's, so that the rows have to be put in order.
    parts: list[list[torch.Tensor]] = [
        [layer.weight for layer in layers],
        [layer.bias for layer in layers],
    ]
    optimizers = [Still(part) for part in parts]
    for _ in range(STEPS):
        model(torch.ones(2, 4, device="meta")).sum().backward()
        for part, optimizer in zip(parts, optimizers, strict=True):
            clip_grad_norm_(part, 1.0)
            optimizer.found_inf = torch.zeros((), device="meta")
            optimizer.step()
        model.zero_grad()
    watched.probe.flush()
    contents = read_ring(watched.writer.path, one_schema=False)
    assert contents.state.probe_errors == 0
    assert len(contents.records) == STEPS
    assert [share.joint for share in contents.schema.shares] == [False, True]
    assert [layer.name for layer in contents.schema.layers] == [
        "0.weight", "0.bias", "1.weight", "1.bias",
    ]  # fmt: skip


def test_closures_weights_of_losses_and_counts_in_the_state_stay_on_the_device(device_watch):
    class Closing(Still):
        def step(self, closure=None):
            for _ in range(2):
                closure()

    watched = device_watch()
    model = nn.Linear(4, 3).to("meta")
    optimizer = Closing(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter]["step"] = torch.ones((), device="meta")

    def closure() -> None:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4, device="meta")).sum()
        loss.backward(torch.ones((), device="meta"))

    for _ in range(3):
        optimizer.step(closure)
        model.eval()
        model.train()
    watched.probe.flush()
    contents = watched.read()
    assert contents.state.probe_errors == 0
    assert contents.column("loss") == [1.0] * 3
    assert [record.step for record in contents.records] == [1, 2, 3]


def test_a_fused_optimizers_scale_and_skip_flag_stay_on_the_device(device_watch):
    watched = device_watch()
    model = nn.Linear(4, 3).to("meta")
    optimizer = Still(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 4, device="meta")).sum().backward()
        optimizer.grad_scale = torch.ones((), device="meta")
        optimizer.found_inf = torch.ones((), device="meta")
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
    watched.probe.flush()
    contents = watched.read()
    assert contents.state.probe_errors == 0
    assert contents.column("skipped") == [1.0] * 3


class Sampled(nn.Module):
    """Has all that is looked at in sampled steps; one of its modules computes on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8).requires_grad_(False)
        self.query, self.key = nn.Linear(8, 8).to("meta"), nn.Linear(8, 8).to("meta")
        self.gate = nn.Linear(8, 4).to("meta")
        self.head = nn.Linear(8, 5).to("meta")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs = torch.ones_like(self.embedding(tokens), device="meta")
        query, key = self.query(inputs)[None], self.key(inputs)[None]
        attended = F.scaled_dot_product_attention(query, key, key, is_causal=True)[0]
        outputs: torch.Tensor = self.head(attended) * self.gate(inputs).sum(-1, keepdim=True)
        return outputs


@pytest.mark.slow
@pytest.mark.parametrize("host_first", [False, True])
def test_what_is_sampled_is_not_waited_for_either(device_watch, nothing_compiled, host_first):
    watched = device_watch(
        layer_interval=2,
        measure_activations=True,
        measure_attention=True,
        measure_routers=True,
        routers={"*gate": 2},
        measure_fp8=True,
        measure_tensors=True,
        measure_local_gradients=True,
        measure_updates=True,
        measure_distribution=True,
    )
    model = Sampled()
    optimizer = Still([each for each in model.parameters() if each.requires_grad])
    there, here = torch.ones(6, device="meta"), torch.ones(6)
    for _ in range(STEPS):
        outputs = model(torch.tensor([0, 1, 2, 3, 0, 1]))
        for tensor in (here, there) if host_first else (there, here):
            watched.probe.watch_tensor(tensor.device.type, tensor, 0, True)
            watched.probe.watch_tensor("both", tensor, None, False)
        watched.probe.observe_logprobs(there, here, here)
        watched.probe.observe_logprobs(here, here)
        F.cross_entropy(outputs, torch.zeros(6, dtype=torch.int64, device="meta")).backward()
        optimizer.step()
        optimizer.zero_grad()
    watched.probe.flush()
    contents = read_ring(watched.writer.path, one_schema=False)
    assert contents.state.probe_errors == 0
    assert len(contents.records) == STEPS
    families = [each.families for each in contents.layers]
    families += [each.families for each in contents.records]
    # A process alone has no replicas to compare.
    compared = {WEIGHTS.name, FEW_WEIGHTS.name, STATE.name}
    everything = {each.name for each in FAMILIES} - compared
    assert {name for each in families for name in each} == everything


class Tokens(nn.Module):
    """Predicts each next token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4).to("meta"), nn.Linear(4, 9).to("meta")

    def forward(self, tokens_BT: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        heads = self.embedding(tokens_BT)[:, None]
        weights = (heads @ heads.transpose(-1, -2)).softmax(-1)
        logits: torch.Tensor = self.head((weights @ heads)[:, 0])
        return logits


@pytest.mark.parametrize("mask_device", ["cpu", "meta"])
def test_targets_and_tokens_are_compared_on_the_device(device_watch, nothing_compiled, mask_device):
    watched = device_watch()
    model = Tokens()
    optimizer = Still(model.parameters())
    for _ in range(LOOK_INTERVAL_STEPS + 1):
        tokens = torch.zeros(4, 16, dtype=torch.int64, device="meta")
        logits = model(tokens, attention_mask=torch.ones(4, 16, device=mask_device))
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    watched.probe.flush()
    contents = watched.read()
    assert contents.state.probe_errors == 0
    for column in (TARGETS_MISALIGNED, PADDING_IN_TARGETS, TARGETS_SEEN):
        assert not np.isnan(contents.column(column)[-1])


@pytest.mark.parametrize("scaled", [True, False])
def test_the_distribution_of_gradients_stays_on_the_device(device_watch, scaled):
    watched = device_watch(layer_interval=3, measure_distribution=True)
    model = nn.Linear(4, 3).to("meta")
    optimizer = Still(model.parameters())
    for _ in range(STEPS):
        model(torch.ones(2, 4, device="meta")).sum().backward()
        if scaled:
            optimizer.grad_scale = torch.ones((), device="meta")
        optimizer.step()
    watched.probe.flush()
    contents = watched.read()
    assert contents.state.probe_errors == 0
    assert contents.state.records_dropped == 0
    (rows_LC, *_) = [table.families["distribution"] for table in contents.layers]
    assert rows_LC.shape == (2, len(DISTRIBUTION.names))


def test_the_meta_device_does_catch_a_wait(device_watch, monkeypatch):
    """Else the tests above would prove nothing."""
    watched = device_watch()
    wait = torch.Tensor.item
    monkeypatch.setattr(WatchedOptimizer, "learning_rate", lambda _: wait(torch.ones(1).to("meta")))
    model = nn.Linear(4, 3).to("meta")
    model(torch.ones(2, 4, device="meta")).sum().backward()
    Still(model.parameters()).step()
    watched.probe.flush()
    assert watched.state().probe_errors > 0
