"""What is measured of torchao's layers is what torchao's own cast does, emulated on the CPU."""

from typing import Any

import pytest
import torch
from torch import nn

from mp_agent.probe.probe import Probe
from mp_agent.records.columns import FP8
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.probe.rings import make_identity, read_ring

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_compiled")]

SIZE = 32


def converted_model() -> nn.Sequential:
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    first = nn.Linear(SIZE, SIZE)
    with torch.no_grad():
        first.weight[:, ::4] *= 1e-6
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(SIZE, 16))
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))
    return model


def flushed(tensor: torch.Tensor, dtype: torch.dtype) -> float:
    """Return how many elements torchao's own scale and cast turn into zero."""
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    cast = to_fp8_saturated(tensor * tensor_to_scale(tensor, dtype), dtype)
    return float(((cast.float() == 0.0) & (tensor != 0.0)).sum())


def test_a_converted_layer_loses_what_torchao_casts_to_zero(tmp_path):
    model = converted_model()
    first, middle, last = model.children()
    sizes = torch.logspace(-9, 1, SIZE)
    gradients: list[Any] = []
    ring = tmp_path / "rank0.ring"
    writer = RingWriter.create(ring, make_identity())
    probe = Probe(lambda: writer, Settings(measure_fp8=True))
    probe.attach()
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            inputs = torch.randn(16, SIZE) * sizes
            outputs = first(inputs)
            outputs.retain_grad()
            gradients.append(outputs)
            last(middle(outputs)).mul(torch.logspace(-20, 0, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        probe.flush()
    finally:
        probe.detach()
        writer.close()
    contents = read_ring(ring, one_schema=False)
    assert dict(contents.schema.facts)["fp8_library"] == "torchao"
    table = next(each for each in contents.layers if each.sequence == 2)
    names = [layer.name for layer in contents.schema.layers]
    row = dict(zip(FP8.names, table.families[FP8.name][names.index("0")].tolist(), strict=True))
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert row["input_flushed_elements"] == flushed(inputs, e4m3) > 0.0
    assert row["weight_flushed_elements"] == flushed(next(first.parameters()).detach(), e4m3) > 0.0
    assert row["gradient_flushed_elements"] == flushed(gradients[-1].grad, e5m2)
    assert row["gradient_elements"] == float((gradients[-1].grad != 0.0).sum())
