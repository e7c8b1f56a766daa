"""The probe on a real GPU: the same numbers, and no wait for the device on the way."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from mp_agent.probe.probe import Probe
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.gradient_reference import reference_row
from tests.agent.probe.rings import RingContents, make_identity, read_ring

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

STEPS = 12
RELATIVE_ERROR = 1e-6


class Job:
    """A small model trained on the GPU, and the statistics of its gradients, computed apart."""

    def __init__(self, *, autocast: torch.dtype | None, scale: float, fused: bool, clip: float):
        torch.manual_seed(0)
        layers = (nn.Linear(16, 300), nn.ReLU(), nn.Linear(300, 7))
        self.model = nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=scale or 1.0, enabled=scale > 0)
        self.inputs = torch.randn(STEPS + 1, 8, 16, device="cuda")
        self.autocast, self.clip = autocast, clip
        self.gradients: list[list[torch.Tensor]] = []
        self.scales: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []

    def step(self, number: int) -> None:
        """Train one step; keeps copies of what the probe should see, without waiting."""
        with torch.autocast("cuda", dtype=self.autocast, enabled=self.autocast is not None):
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

    def expected_totals(self, index: int) -> list[float]:
        scale = self.scales[index].item() if self.scales else 1.0
        values = torch.cat([grad.flatten() for grad in self.gradients[index]]).double() / scale
        totals: list[float] = reference_row(values.cpu().numpy()).tolist()
        return totals


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[[Job], RingContents]]:
    """Train a job under the probe; any wait for the device after its first step is an error."""
    writer = RingWriter.create(tmp_path / "rings" / "rank0.ring", make_identity())
    probe = Probe(lambda: writer, Settings(layer_interval=5))

    def train(job: Job) -> RingContents:
        probe.attach()
        job.step(0)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number in range(1, STEPS):
                job.step(number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        probe.flush()
        return read_ring(writer.path)

    yield train
    probe.detach()
    writer.close()


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
def test_numbers_are_right_and_nobody_waited(watched, autocast, scale, fused, clip):
    """GradScaler itself waits for unfused optimizers, so they are not among these."""
    job = Job(autocast=autocast, scale=scale, fused=fused, clip=clip)
    contents = watched(job)
    assert contents.state.probe_errors == 0
    assert contents.state.records_dropped == 0
    assert len(contents.records) == STEPS
    for index in range(STEPS):
        expected = job.expected_totals(index)
        observed = list(contents.gradients(index).values())
        np.testing.assert_allclose(observed, expected, rtol=RELATIVE_ERROR)
        assert contents.values(index)["loss"] == pytest.approx(job.losses[index].item())
        overflowed = expected[3] + expected[4] > 0
        assert contents.values(index)["skipped"] == float(overflowed and scale > 0)
        if scale:
            assert contents.values(index)["loss_scale"] == job.scales[index].item()
        assert ("clip_norm" in contents.values(index)) == (clip > 0 and not overflowed)


def test_an_unfused_optimizer_under_a_scaler_is_measured_too(tmp_path):
    job = Job(autocast=torch.float16, scale=2.0**30, fused=False, clip=0.0)
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
    for index in range(STEPS):
        expected = job.expected_totals(index)
        observed = list(contents.gradients(index).values())
        np.testing.assert_allclose(observed, expected, rtol=RELATIVE_ERROR)
        assert contents.values(index)["skipped"] == float(expected[3] + expected[4] > 0)


def test_layers_of_a_step_in_trouble_come_out_of_the_history(watched):
    job = Job(autocast=None, scale=0.0, fused=True, clip=0.0)
    job.inputs[7, 0, 0] = float("nan")
    tables = {table.sequence: table for table in watched(job).layers}
    assert tables[8].gradients[:, 3].sum() > 0


def test_weights_are_bit_identical_with_and_without(watched):
    alone = Job(autocast=torch.bfloat16, scale=0.0, fused=True, clip=0.1)
    for number in range(STEPS):
        alone.step(number)
    together = Job(autocast=torch.bfloat16, scale=0.0, fused=True, clip=0.1)
    watched(together)
    for one, other in zip(alone.model.parameters(), together.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_captured_graph_is_left_alone(watched):
    job = Job(autocast=None, scale=0.0, fused=False, clip=0.0)
    job.optimizer = torch.optim.AdamW(job.model.parameters(), capturable=True)
    contents = watched(job)
    before = len(contents.records)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss = job.model(job.inputs[0]).pow(2).mean()
        loss.backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.optimizer.step()
    graph.replay()
    torch.cuda.synchronize()
    assert before == STEPS
