"""The probe on a GPU: the same numbers, and no wait for the device on the way.

Without a GPU the loops run on the simulated device, which is never waited for.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from mp_agent.probe.probe import Probe
from mp_agent.records.columns import GRADIENT_POSITIONS
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.gradient_reference import reference_row
from tests.agent.probe.rings import RingContents, make_identity, read_ring
from tests.gpu.machine import Machine

STEPS = 12
RELATIVE_ERROR = 1e-6
NAN, INF = (GRADIENT_POSITIONS[name] for name in ("nan_elements", "inf_elements"))


class Job:
    """A small model trained on the device, and the statistics of its gradients, computed apart."""

    def __init__(
        self,
        machine: Machine,
        *,
        autocast: torch.dtype | None = None,
        scale: float = 0.0,
        fused: bool = True,
        clip: float = 0.0,
    ) -> None:
        torch.manual_seed(0)
        self.machine = machine
        layers = (nn.Linear(16, 300), nn.ReLU(), nn.Linear(300, 7))
        self.model = nn.Sequential(*layers).to(machine.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused)
        kind = machine.device.type
        self.scaler = torch.amp.GradScaler(kind, init_scale=scale or 1.0, enabled=scale > 0)
        self.inputs = torch.randn(STEPS + 1, 8, 16, device=machine.device)
        self.autocast, self.clip = autocast, clip
        self.gradients: list[list[torch.Tensor]] = []
        self.scales: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []

    def step(self, number: int) -> None:
        """Train one step; keeps copies of what the probe should see, without waiting."""
        enabled = self.autocast is not None
        with torch.autocast(self.machine.device.type, dtype=self.autocast, enabled=enabled):
            loss = self.model(self.inputs[number]).float().pow(2).mean()
        self.scaler.scale(loss).backward()
        gradients = [p.grad for p in self.model.parameters()]
        self.gradients.append([gradient.clone() for gradient in gradients if gradient is not None])
        if self.scaler.is_enabled():
            scale = self.scaler._get_scale_async()
            assert scale is not None
            self.scales.append(scale.clone())
        self.losses.append(loss.detach())
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.machine.simulated is not None:
            self.machine.finish()

    def expected_totals(self, index: int) -> list[float]:
        scale = self.scales[index].item() if self.scales else 1.0
        values = torch.cat([grad.flatten() for grad in self.gradients[index]]).double() / scale
        totals: list[float] = reference_row(values.cpu().numpy()).tolist()
        return totals


@pytest.fixture
def watched(tmp_path: Path, machine: Machine) -> Iterator[Callable[[Job], RingContents]]:
    """Train a job under the probe; any wait for the device is an error, from attaching on."""
    writer = RingWriter.create(tmp_path / "rings" / "rank0.ring", make_identity())
    probe = Probe(lambda: writer, Settings(layer_interval=5, overhead_budget=1.0))

    def train(job: Job, steps: int = STEPS) -> RingContents:
        machine.finish()
        with machine.waiting_is_an_error():
            probe.attach()
            for number in range(steps):
                job.step(number)
        probe.flush()
        return read_ring(writer.path, one_schema=False)

    yield train
    probe.detach()
    writer.close()


def assert_gradients(contents: RingContents, job: Job) -> None:
    for index in range(len(contents.records)):
        observed = list(contents.gradients(index).values())
        expected = job.expected_totals(index)
        np.testing.assert_allclose(observed[:6], expected[:6], rtol=RELATIVE_ERROR)


@pytest.mark.parametrize(
    ("autocast", "scale", "fused", "clip"),
    [
        (None, 0.0, False, 0.0),
        (None, 0.0, True, 0.1),
        (torch.bfloat16, 0.0, True, 0.1),
        (torch.float16, 2.0**10, True, 0.0),
        (torch.float16, 2.0**10, True, 0.1),
        (torch.float16, 2.0**30, True, 0.0),  # overflows and is skipped
    ],
)
def test_numbers_are_right_and_the_host_never_waited(
    watched, machine, autocast, scale, fused, clip
):
    """GradScaler itself waits for unfused optimizers, so they are not among these."""
    job = Job(machine, autocast=autocast, scale=scale, fused=fused, clip=clip)
    contents = watched(job)
    assert contents.state.probe_errors == 0
    assert contents.state.records_dropped == 0
    assert len(contents.records) == STEPS
    assert_gradients(contents, job)
    for index in range(STEPS):
        expected = job.expected_totals(index)
        assert contents.values(index)["loss"] == pytest.approx(job.losses[index].item())
        overflowed = expected[NAN] + expected[INF] > 0
        assert contents.values(index)["skipped"] == float(overflowed and scale > 0)
        if scale:
            assert contents.values(index)["loss_scale"] == job.scales[index].item()
        assert ("clip_norm" in contents.values(index)) == (clip > 0 and not overflowed)


def test_an_unfused_optimizer_under_a_scaler_is_measured_too(tmp_path, machine):
    job = Job(machine, autocast=torch.float16, scale=2.0**30, fused=False)
    writer = RingWriter.create(tmp_path / "rings" / "rank0.ring", make_identity())
    probe = Probe(lambda: writer, Settings())
    probe.attach()
    try:
        for number in range(STEPS):
            job.step(number)
        probe.flush()
    finally:
        probe.detach()
    contents = read_ring(writer.path)
    assert_gradients(contents, job)
    for index in range(STEPS):
        expected = job.expected_totals(index)
        assert contents.values(index)["skipped"] == float(expected[NAN] + expected[INF] > 0)


def test_layers_of_a_step_in_trouble_come_out_of_the_history(watched, machine):
    job = Job(machine)
    job.inputs[7, 0, 0] = float("nan")
    tables = {table.sequence: table for table in watched(job).layers}
    assert tables[8].gradients[:, NAN].sum() > 0


def test_weights_are_bit_identical_with_and_without(watched, machine):
    alone = Job(machine, autocast=torch.bfloat16, clip=0.1)
    for number in range(STEPS):
        alone.step(number)
    together = Job(machine, autocast=torch.bfloat16, clip=0.1)
    watched(together)
    for one, other in zip(alone.model.parameters(), together.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_change_of_plan_waits_for_nothing_either(watched, machine):
    class Growing(Job):
        def step(self, number: int) -> None:
            if number == 5:
                extra = nn.Parameter(torch.zeros(3, device=self.machine.device))
                self.optimizer.add_param_group({"params": [extra]})
            super().step(number)

    job = Growing(machine)
    contents = watched(job)
    assert [record.sequence for record in contents.records] == list(range(1, STEPS + 1))
    assert contents.state.records_dropped == 0
    assert_gradients(contents, job)


def test_gradients_that_come_and_go_wait_for_nothing_either(watched, machine):
    class Sparse(Job):
        """Another layer is left out at each step, as experts without a token are."""

        def step(self, number: int) -> None:
            frozen = self.model[0 if number % 2 else 2]
            for parameter in frozen.parameters():
                parameter.requires_grad_(False)
            loss = self.model(self.inputs[number]).pow(2).mean()
            loss.backward()
            found = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.gradients.append([gradient.clone() for gradient in found])
            self.optimizer.step()
            self.optimizer.zero_grad()
            for parameter in frozen.parameters():
                parameter.requires_grad_(True)
            if self.machine.simulated is not None:
                self.machine.finish()

    job = Sparse(machine)
    contents = watched(job)
    assert contents.state.probe_errors == 0
    assert_gradients(contents, job)


def test_the_scripts_default_device_changes_nothing(watched, machine):
    torch.set_default_device(machine.device)
    try:
        job = Job(machine)
        contents = watched(job)
    finally:
        torch.set_default_device(None)
    assert contents.state.probe_errors == 0
    assert len(contents.records) == STEPS
    assert_gradients(contents, job)


def test_two_optimizers_of_one_model_are_measured_together(watched, machine):
    class Two(Job):
        def __init__(self, machine: Machine) -> None:
            super().__init__(machine)
            self.optimizer = torch.optim.AdamW(self.model[0].parameters(), fused=True)
            self.other = torch.optim.SGD(self.model[2].parameters(), 1e-3)

        def step(self, number: int) -> None:
            self.model(self.inputs[number]).pow(2).mean().backward()
            gradients = [p.grad for p in self.model.parameters()]
            self.gradients.append([each.clone() for each in gradients if each is not None])
            self.optimizer.step()
            self.other.step()
            self.model.zero_grad()
            if self.machine.simulated is not None:
                self.machine.finish()

    job = Two(machine)
    contents = watched(job)
    assert contents.state.probe_errors == 0
    for index, record in enumerate(contents.records):
        assert np.nansum(record.gradients[:, 0]) == pytest.approx(
            job.expected_totals(index)[0], rel=RELATIVE_ERROR
        )
