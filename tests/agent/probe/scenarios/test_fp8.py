"""The rows of FP8 operands; what holds for every family is in `test_families`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mp_agent.records.columns import FP8
from tests.agent.probe.instruments.fp8_reference import by_cast
from tests.agent.probe.instruments.fp8_scaled_layers import E5M2_MAX, ScaledLinear
from tests.agent.probe.scenarios import training

SIZE = 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.last = nn.Linear(SIZE, 1)
        self.outputs: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        middle = self.first(inputs)
        middle.retain_grad()
        self.outputs.append(middle)
        outputs: torch.Tensor = self.last(middle.relu())
        return outputs


def inputs_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    sizes = torch.logspace(-9, 1, SIZE)
    return torch.randn(32, SIZE, generator=generator) * sizes


train = partial(training.train, inputs_of=inputs_of)


def expected(operand: str, tensor: torch.Tensor) -> dict[str, float]:
    _, nonzero, flushed = by_cast(tensor, operand)
    return {f"{operand}_elements": nonzero, f"{operand}_flushed_elements": flushed}


def test_the_row_of_a_layer_is_that_of_its_operands(watch):
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        model.first.weight[0, :4] = 1e-9
    watched = watch(measure_fp8=True)
    train(model, 20)
    found = watched.read().rows(FP8)
    assert set(found) == {2, 10, 20}
    for step, rows in found.items():
        gradient = model.outputs[step - 1].grad
        assert gradient is not None
        row = {
            "tensors": 3.0,
            "nonfinite_elements": 0.0,
            **expected("input", inputs_of(step)),
            **expected("weight", model.first.weight),
            **expected("gradient", gradient),
        }
        assert rows["first"] == row
        assert row["input_flushed_elements"] > 0.0
        assert row["weight_flushed_elements"] >= 4.0
        middle = model.outputs[step - 1].detach().relu()
        assert rows["last"].items() >= expected("input", middle).items()


def test_elements_that_are_not_finite_are_counted_and_left_out(watch):
    model = Model()
    watched = watch(measure_fp8=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(1, 11):
        inputs = inputs_of(step)
        inputs[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    row = watched.read().rows(FP8)[10]["first"]
    assert row["nonfinite_elements"] >= 3.0
    assert row.items() >= expected("input", inputs).items()


def test_with_checkpointing_gradients_of_outputs_are_seen_where_the_graph_has_them(watch):
    class Checkpointed(Model):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = checkpoint(super().forward, inputs, use_reentrant=False)
            return found

    model = Checkpointed()
    watched = watch(measure_fp8=True)
    train(model, 10)
    row = watched.read().rows(FP8)[10]["first"]
    assert row.items() >= expected("input", inputs_of(10)).items()
    assert row["tensors"] == 3.0


def scaled_run(watch: Callable[..., Any], passes: int) -> tuple[dict[str, float], ScaledLinear]:
    """A layer whose inputs and gradients grow hundredfold in the sampled step."""
    model = ScaledLinear(SIZE)
    watched = watch(measure_fp8=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(1, 11):
        factor = 100.0 if step == 10 else 1.0
        for _ in range(passes):
            (model(torch.full((2, SIZE), 3.0 * factor)) * factor).sum().backward()
            model.leave_autocast()
        optimizer.step()
        optimizer.zero_grad()
    return watched.read().rows(FP8)[10]["ScaledLinear"], model


def test_amax_beyond_the_scale_of_earlier_steps_is_saturated(watch):
    row, _ = scaled_run(watch, passes=1)
    # Input and gradient grew; the weight did not; the others were not cast.
    assert (row["scaled_tensors"], row["saturated_tensors"]) == (3.0, 2.0)
    assert row["range_used_max"] == pytest.approx(100.0, rel=1e-6)
    assert row["range_used_min"] == pytest.approx(1.0, rel=1e-6)
    assert row["amax_max"] == 300.0
    assert row["scale_max"] == pytest.approx(E5M2_MAX, rel=1e-6)
    assert row["scale_min"] == pytest.approx(448.0 / 3.0, rel=1e-6)
    assert "input_elements" not in row


def test_gradients_are_not_judged_where_micro_batches_follow(watch):
    row, _ = scaled_run(watch, passes=2)
    assert (row["scaled_tensors"], row["saturated_tensors"]) == (2.0, 1.0)
