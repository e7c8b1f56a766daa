"""Operands of linear layers are measured in sampled steps, in one forward and backward pass."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mp_agent.records.columns import FP8
from tests.agent.probe.instruments.fp8_reference import by_cast
from tests.agent.probe.instruments.fp8_scaled_layers import E5M2_MAX, ScaledLinear
from tests.agent.probe.rings import RingContents

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


def train(
    model: nn.Module,
    steps: int,
    *,
    passes: int = 1,
    between: Callable[[int], None] = lambda step: None,
) -> None:
    """Train without changing the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(1, steps + 1):
        for _ in range(passes):
            model(inputs_of(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        between(step)


def tables(contents: RingContents) -> dict[int, dict[str, dict[str, float]]]:
    """The rows by step, layer and column; without what was not observed."""
    names = [layer.name for layer in contents.schema.layers]
    found: dict[int, dict[str, dict[str, float]]] = {}
    for table in contents.layers:
        if FP8.name not in table.families:
            continue
        rows = {
            name: {column: x for column, x in zip(FP8.names, row, strict=True) if x == x}
            for name, row in zip(names, table.families[FP8.name].tolist(), strict=True)
        }
        found[table.sequence] = {name: row for name, row in rows.items() if row}
    return found


def hooks_on(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def expected(operand: str, tensor: torch.Tensor) -> dict[str, float]:
    _, nonzero, flushed = by_cast(tensor, operand)
    return {f"{operand}_elements": nonzero, f"{operand}_flushed_elements": flushed}


def test_nothing_is_measured_unless_asked(watch):
    watched = watch()
    train(Model(), 2)
    assert not watched.read().schema.columns(FP8.name), "they would take room in every record"


def test_the_row_of_a_layer_is_that_of_its_operands(watch):
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        model.first.weight[0, :4] = 1e-9
    watched = watch(measure_fp8=True)
    train(model, 20)
    found = tables(watched.read())
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


def test_layers_have_no_hooks_between_samples(watch):
    model = Model()
    watch(measure_fp8=True)
    hooks = []
    train(model, 12, between=lambda step: hooks.append(hooks_on(model)))
    assert hooks == [2 if step in (1, 9) else 0 for step in range(1, 13)]


def test_of_several_backward_passes_the_first_is_measured(watch):
    model = Model()
    watched = watch(measure_fp8=True)
    train(model, 10, passes=3)
    assert tables(watched.read())[10]["first"]["tensors"] == 3.0


def test_an_evaluation_is_left_out(watch):
    model = Model()
    watched = watch(measure_fp8=True)

    def evaluate(step: int) -> None:
        if step == 9:
            with watched.probe.phase("evaluation"):
                model(inputs_of(0))

    train(model, 10, between=evaluate)
    assert tables(watched.read())[10]["first"]["tensors"] == 3.0


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
    row = tables(watched.read())[10]["first"]
    assert row["nonfinite_elements"] >= 3.0
    assert row.items() >= expected("input", inputs).items()


def test_with_checkpointing_the_gradients_of_outputs_are_seen_where_the_graph_has_them(watch):
    class Checkpointed(Model):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = checkpoint(super().forward, inputs, use_reentrant=False)
            return found

    model = Checkpointed()
    watched = watch(measure_fp8=True)
    train(model, 10)
    row = tables(watched.read())[10]["first"]
    assert row.items() >= expected("input", inputs_of(10)).items()
    assert row["tensors"] == 3.0


def test_a_copy_of_a_hooked_model_works_without_the_probe(watch):
    model = nn.Sequential(nn.Linear(SIZE, 1))
    watch(measure_fp8=True)
    copies: list[nn.Module] = []

    def copy_hooked(step: int) -> None:
        if step == 9:
            assert hooks_on(model) == 1
            copies.extend((copy.deepcopy(model), pickle.loads(pickle.dumps(model))))

    train(model, 10, between=copy_hooked)
    for copied in copies:
        assert torch.equal(copied(inputs_of(1)), model(inputs_of(1)))


def test_training_is_the_same_to_the_bit(watch):
    def weights() -> torch.Tensor:
        torch.manual_seed(3)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for step in range(1, 12):
            model(inputs_of(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.first.weight.isfinite().all()
        return model.first.weight.detach()

    plain = weights()
    watch(measure_fp8=True)
    assert torch.equal(weights(), plain)


def scaled_run(watch: Callable[..., object], passes: int) -> tuple[dict[str, float], ScaledLinear]:
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
    return tables(watched.read())[10]["ScaledLinear"], model  # type: ignore[attr-defined]


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


def test_a_model_that_is_gone_is_not_kept(watch):
    model = nn.Sequential(nn.Linear(SIZE, 1))
    reference = weakref.ref(model[0])
    watch(measure_fp8=True)
    train(model, 9)  # the next step would be sampled
    assert hooks_on(model) == 1
    del model
    gc.collect()
    assert reference() is None
