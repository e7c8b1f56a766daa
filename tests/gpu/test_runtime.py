"""What only a real GPU shows: streams, captured graphs, memory that it writes to by itself."""

import os
import subprocess
import sys
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mp_agent.probe import accelerator
from mp_agent.probe.probe import Probe
from mp_agent.ring.reader import RingReader
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.probe.rings import make_identity, read_ring

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

STEPS = 12


@pytest.fixture
def watched(tmp_path):
    writer = RingWriter.create(tmp_path / "rings" / "rank0.ring", make_identity())
    probe = Probe(lambda: writer, Settings(layer_interval=5, overhead_budget=1.0))
    probe.attach()
    yield probe, writer
    probe.detach()
    writer.close()


@pytest.fixture
def group(tmp_path):
    """One rank: NCCL does not share a GPU between ranks."""
    method = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=method, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_of(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4)).cuda()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the sum of squares of the gradients of each step."""
    sums: list[float] = []
    for number in range(STEPS):
        torch.manual_seed(number)
        model(torch.randn(8, 16, device="cuda")).pow(2).mean().backward()
        gradients: list[Any] = [p.grad for p in model.parameters()]
        local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
        sums.append(sum(float(gradient.double().pow(2).sum()) for gradient in local))
        optimizer.step()
        optimizer.zero_grad()
    return sums


def assert_measured(probe: Probe, writer: RingWriter, sums: list[float]) -> None:
    probe.flush()
    contents = read_ring(writer.path, one_schema=False)
    assert contents.state.probe_errors == 0
    assert len(contents.records) == len(sums)
    observed = [contents.gradients(index)["sum_squares"] for index in range(len(sums))]
    assert observed == pytest.approx(sums, rel=1e-6)


def test_the_ring_can_be_registered(watched):
    """Else the tests of crashes would show what the fallback does."""
    _, writer = watched
    model = model_of()
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    assert writer.region.registered


def test_memory_that_is_refused_leaves_no_error_behind():
    memory = memoryview(bytearray(0))
    assert not accelerator.register_host_memory(memory, torch.device("cuda"))
    assert torch.ones(3, device="cuda").sum().item() == 3.0


def test_ddp_over_nccl(watched, group):
    probe, writer = watched
    model = DistributedDataParallel(model_of())
    assert_measured(probe, writer, train(model, torch.optim.AdamW(model.parameters())))


@pytest.mark.parametrize("offload", [False, True])
def test_fsdp2(watched, group, offload):
    probe, writer = watched
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    model = model_of()
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    assert_measured(probe, writer, train(model, torch.optim.AdamW(model.parameters())))


def test_a_side_stream(watched):
    probe, writer = watched
    model = model_of()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        sums = train(model, torch.optim.AdamW(model.parameters()))
    assert_measured(probe, writer, sums)


def test_two_optimizers_on_streams_that_do_not_wait_for_each_other(watched):
    probe, writer = watched
    model = model_of(4096)
    optimizers = [torch.optim.SGD(model[place].parameters(), 1e-3) for place in (0, 2)]
    streams = [torch.cuda.Stream() for _ in optimizers]
    sums: list[float] = []
    for number in range(STEPS):
        torch.manual_seed(number)
        model(torch.randn(8, 16, device="cuda")).pow(2).mean().backward()
        gradients: list[Any] = [p.grad for p in model.parameters()]
        sums.append(sum(float(gradient.double().pow(2).sum()) for gradient in gradients))
        torch.cuda.synchronize()
        for stream, optimizer in zip(streams, optimizers, strict=True):
            with torch.cuda.stream(stream):
                optimizer.step()
        torch.cuda.synchronize()
        model.zero_grad()
    probe.flush()
    contents = read_ring(writer.path, one_schema=False)
    assert contents.state.probe_errors == 0
    observed = [sum(record.gradients[:, 0]) for record in contents.records]
    assert observed == pytest.approx(sums, rel=1e-6)


def test_a_captured_step_is_counted_at_every_replay(watched):
    probe, writer = watched
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    inputs = torch.randn(8, 16, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(inputs).pow(2).mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = model(inputs).pow(2).mean()
        loss.backward()
        optimizer.step()
    losses = []
    for _ in range(STEPS):
        graph.replay()
        probe.observe(loss=loss)
        losses.append(loss.item())
    probe.flush()
    contents = read_ring(writer.path)
    assert contents.state.probe_errors == 0
    assert len(contents.records) == 3 + STEPS
    assert contents.column("loss")[3:] == pytest.approx(losses)
    assert all(isnan(contents.gradients(3 + index)["sum_squares"]) for index in range(STEPS))
    assert "gradients of steps in CUDA graphs" in contents.state.unsupported


CRASH = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
from mp_agent.probe.probe import Probe
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.probe.rings import make_identity

writer = RingWriter.create(Path(sys.argv[1]), make_identity())
probe = Probe(lambda: writer, Settings(layer_interval=1000))
probe.attach()
model = nn.Linear(16, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(12):
    if number == 11:
        # The host is ahead: the rank writes this step no more itself.
        torch.cuda._sleep(2_000_000_000)
    model(torch.ones(8, 16, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
if sys.argv[2] == "assert":
    torch.zeros(4, device="cuda")[torch.tensor([99], device="cuda")]
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        pass
os.kill(os.getpid(), signal.SIGABRT if sys.argv[2] == "abort" else signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["kill", "assert", "abort"])
def test_finished_steps_survive_the_end_of_the_process(tmp_path: Path, end: str) -> None:
    path = tmp_path / "rings" / "rank0.ring"
    path.parent.mkdir()
    # pytest alone knows where the package lies.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = (sys.executable, "-c", CRASH, str(path), end)
    done = subprocess.run(command, check=False, env=environment)
    assert done.returncode < 0
    reader = RingReader.open(path)
    assert reader.schema is not None
    steps, _ = reader.steps_after(0)
    recovered, tables = reader.recovered(steps[-1].sequence if steps else 0)
    assert [step.sequence for step in (*steps, *recovered)] == list(range(1, 13))
    assert tables[-1].sequence == 12


def test_a_host_that_is_many_steps_ahead_of_the_gpu_loses_none(tmp_path):
    """Of layers no more are due than there are slots, however far ahead it is."""
    writer = RingWriter.create(tmp_path / "rings" / "rank0.ring", make_identity())
    probe = Probe(lambda: writer, Settings(layer_interval=100, overhead_budget=1.0))
    probe.attach()
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    inputs = torch.randn(4096, 4096, device="cuda")
    for _ in range(30):
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    probe.flush()
    probe.detach()
    contents = read_ring(writer.path)
    writer.close()
    assert len(contents.records) == 30
    assert [table.sequence for table in contents.layers] == [1, 10, 20, 30]
    assert contents.state.records_dropped == 0
    timed = [seconds for seconds in contents.column("probe_device_seconds") if not isnan(seconds)]
    assert len(timed) == 30
    assert all(seconds > 0.0 for seconds in timed)


def test_a_timer_begins_when_the_device_comes_to_it():
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    timer = accelerator.start_timer(torch.device("cuda"))
    assert timer is not None
    timer.stop()
    assert not timer.has_begun()
    assert timer.seconds() is None
    torch.cuda.synchronize()
    assert timer.has_begun()
    seconds = timer.seconds()
    assert seconds is not None and seconds >= 0.0
