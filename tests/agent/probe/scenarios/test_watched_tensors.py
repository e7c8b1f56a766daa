"""Tensors that the script watches: on sampled steps, by name, and without harm to training."""

from collections.abc import Callable
from math import nan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mp_agent
from mp_agent.probe import api
from mp_agent.probe.instruments.tensors import CALLS_AT_MOST, NAMES_AT_MOST
from mp_agent.records.columns import GRADIENTS, TENSORS
from tests.agent.probe.instruments import tensor_reference as reference
from tests.agent.probe.rings import RingContents


def train(watched: Any, steps: int, watch: Callable[[int, torch.Tensor], object]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        outputs = model(torch.randn(5, 4))
        watch(step, outputs)
        outputs.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def unmeasured(contents: RingContents) -> float:
    place = contents.schema.step_columns.index("unmeasured_tensors")
    return float(np.nansum([record.values[place] for record in contents.records]))


def test_rows_are_those_of_the_tensors_of_sampled_steps(watch):
    watched, seen = watch(), {}

    def look(step: int, outputs: torch.Tensor) -> None:
        watched.probe.watch_tensor("outputs", outputs, None, False)
        watched.probe.watch_tensor("losses", outputs.square(), None, True)
        seen[step] = outputs.detach().clone()

    train(watched, 12, look)
    contents = watched.read()
    found = contents.rows(TENSORS)
    assert sorted(found) == [1, 2, 10]
    for step, rows in found.items():
        expected = {
            "outputs": reference.row(seen[step]),
            "losses": reference.row(seen[step].square(), reduction=True),
        }
        for name, row in rows.items():
            assert row == pytest.approx(expected[name], rel=1e-6)
    assert len(contents.records) == 12
    gradients = [t.sequence for t in contents.layers if GRADIENTS.name in t.families]
    assert gradients == [1, 10], "on schedule; tensors in the second step as well"
    assert contents.state.probe_errors == 0
    assert unmeasured(contents) == 0.0


def test_the_tensors_of_micro_batches_become_one(watch):
    watched = watch()
    parts = torch.randn(3, 2, 4)

    def look(step: int, outputs: torch.Tensor) -> None:
        for part in parts:
            watched.probe.watch_tensor("part", part, None, False)

    train(watched, 1, look)
    row = watched.read().rows(TENSORS)[1]["part"]
    whole = reference.row(parts)
    assert row["sum_squares"] == pytest.approx(whole["sum_squares"])
    assert (row["elements"], row["abs_max"]) == (24.0, whole["abs_max"])


def test_nothing_is_measured_in_evaluation_or_in_what_backward_recomputes(watch):
    watched = watch()

    def look(step: int, outputs: torch.Tensor) -> None:
        outputs.register_hook(
            lambda gradient: watched.probe.watch_tensor("in backward", gradient, None, False)
        )
        with watched.probe.phase("evaluation"):
            watched.probe.watch_tensor("in evaluation", outputs, None, False)
        watched.probe.watch_tensor("in training", outputs, None, False)

    train(watched, 2, look)
    assert [*watched.read().rows(TENSORS)[2]] == ["in training"]


def test_a_name_that_is_new_after_clipping_is_measured_from_the_next_sample_on(watch):
    watched = watch()
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.ones(5, 4)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        watched.probe.watch_tensor("late", loss, None, False)
        optimizer.step()
        optimizer.zero_grad()

    contents = watched.read(one_schema=False)
    assert sorted(contents.rows(TENSORS)) == [2]
    assert [table.sequence for table in contents.layers] == [1, 2], "none is written twice"
    assert [record.sequence for record in contents.records] == [1, 2, 3]
    assert unmeasured(contents) == 1.0


def freed() -> torch.Tensor:
    tensor = torch.ones(64, 64)
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_in_part() -> torch.Tensor:
    tensor = torch.ones(64, 64)[1:]
    tensor.untyped_storage().resize_(64)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


ODD: dict[str, Callable[[], object]] = {
    "None": lambda: None,
    "a list": lambda: [1.0, 2.0],
    "an array": lambda: np.ones(3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.ones(3, device="meta"),
    "bits": lambda: torch.ones(3, dtype=torch.uint8).view(torch.bits8),
    "fake": fake,
    "masked": lambda: torch.masked.masked_tensor(torch.ones(3), torch.ones(3) > 0),
    "without memory": freed,
    "with too little memory": freed_in_part,
}


@pytest.mark.filterwarnings(
    "ignore:.*(Sparse CSR|quantize_per_tensor|nested tensors|MaskedTensors):UserWarning"
)
@pytest.mark.parametrize("kind", ODD)
def test_what_has_no_numbers_is_counted_and_said_once(kind, watch, caplog):
    watched, odd = watch(), ODD[kind]()
    train(watched, 2, lambda step, outputs: watched.probe.watch_tensor("odd", odd, None, False))

    contents = watched.read()
    assert unmeasured(contents) == 2.0
    assert caplog.text.count("mp_agent does not measure this: watch_tensor") == 1
    assert (len(contents.records), contents.state.probe_errors) == (2, 0)
    assert len(contents.state.unsupported) == 1


@pytest.mark.parametrize("name", [None, "", 7, "x" * 129, ["list"]])
def test_a_name_that_is_none_is_counted(name, watch):
    watched = watch()
    train(watched, 1, lambda step, outputs: watched.probe.watch_tensor(name, outputs, None, False))

    assert unmeasured(watched.read()) == 1.0


@pytest.mark.parametrize("dim", [2, -3, "rows", 1.0, True, [0]])
def test_a_dimension_that_is_none_leaves_the_rest_of_the_row(dim, watch):
    watched = watch()
    train(watched, 1, lambda step, outputs: watched.probe.watch_tensor("x", outputs, dim, False))

    contents = watched.read()
    row = contents.rows(TENSORS)[1]["x"]
    assert row["elements"] == 15.0
    assert "range_ratio" not in row
    assert len(contents.state.unsupported) == 1


def test_an_empty_tensor_has_no_row(watch):
    watched = watch()
    train(
        watched,
        1,
        lambda step, outputs: watched.probe.watch_tensor("x", torch.empty(0, 3), 1, False),
    )

    contents = watched.read()
    assert not contents.rows(TENSORS)
    assert (unmeasured(contents), contents.state.probe_errors) == (0.0, 0)


def test_names_and_calls_are_bounded_and_what_is_beyond_is_counted(watch):
    watched = watch()

    def look(step: int, outputs: torch.Tensor) -> None:
        for number in range(NAMES_AT_MOST + 3):
            watched.probe.watch_tensor(f"tensor {number}", outputs, None, False)
        for _ in range(CALLS_AT_MOST):
            watched.probe.watch_tensor("tensor 0", outputs, None, False)

    train(watched, 1, look)
    contents = watched.read()
    rows = contents.rows(TENSORS)[1]
    assert len(rows) == NAMES_AT_MOST
    assert rows["tensor 0"]["elements"] == 15.0 * CALLS_AT_MOST
    assert unmeasured(contents) == 3.0 + 1.0


def test_a_script_that_never_steps_keeps_a_bounded_number_of_rows(watch):
    watched = watch()
    for _ in range(2 * CALLS_AT_MOST):
        watched.probe.watch_tensor("x", torch.ones(2), None, False)

    assert len(watched.probe._tensors._rows["x"]) == CALLS_AT_MOST


def test_the_setting_switches_it_off(watch):
    watched = watch(measure_tensors=False)
    train(watched, 2, lambda step, outputs: watched.probe.watch_tensor("x", outputs, None, False))

    contents = watched.read()
    assert not contents.rows(TENSORS)
    assert not contents.schema.columns(TENSORS.name)


def test_gradients_flow_through_what_is_watched(watch):
    watched = watch()
    parameter = nn.Parameter(torch.tensor([1.0, nan, 3.0]))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    product = parameter * 2.0
    watched.probe.watch_tensor("product", product, 0, True)
    product.sum().backward()
    optimizer.step()

    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]
    assert (product.requires_grad, product.grad_fn is not None) == (True, True)


def test_a_compiled_function_that_watches_is_one_graph_and_measures_nothing(watch, monkeypatch):
    watched = watch()
    monkeypatch.setattr(api, "_attachment", SimpleNamespace(probe=watched.probe))

    @torch.compile(backend="eager", fullgraph=True)
    def double(inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs * 2.0
        mp_agent.watch_tensor("outputs", outputs, dim=0)
        return outputs

    train(watched, 1, lambda step, outputs: assert_(double(outputs).shape == outputs.shape))
    contents = watched.read()
    assert not contents.rows(TENSORS)
    assert contents.state.probe_errors == 0


def assert_(condition: bool) -> None:
    assert condition


@pytest.mark.parametrize("attached", [False, True])
def test_the_public_call_raises_for_nothing(attached, watch, monkeypatch):
    if attached:
        monkeypatch.setattr(api, "_attachment", SimpleNamespace(probe=watch().probe))
    for odd in (None, [1.0], np.ones(2), "text", object(), torch.ones(0), torch.ones(())):
        for dim in (None, 0, 5, "x"):
            mp_agent.watch_tensor("x", odd, dim=dim)  # type: ignore[arg-type] # wrong on purpose
    mp_agent.watch_tensor(object(), torch.ones(2))  # type: ignore[arg-type] # wrong on purpose
