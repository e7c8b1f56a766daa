"""Local gradients of one process: what is measured, at the edges too, and what stays untouched."""

import copy
import io
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mp_agent.records.columns import by_name
from tests.agent.probe.rings import read_ring
from tests.agent.probe.small_model import make_loss, make_model, sum_squares

NORM, NONFINITE, FIRST = (
    "local_grad_norm",
    "local_grad_nonfinite_elements",
    "local_grad_nonfinite_backward",
)


def last_of(watching, *, one_schema: bool = True) -> dict[str, float]:
    contents = read_ring(watching.writer.path, one_schema=one_schema)
    return by_name(contents.schema.step_columns, contents.records[-1].values)


def hooks_of(model: nn.Module) -> int:
    return sum(len(each._post_accumulate_grad_hooks or ()) for each in model.parameters())


class Gradients(torch.autograd.Function):
    """Multiplies nothing: its backward returns the gradients that the test wants."""

    @staticmethod
    def forward(ctx, wanted, parameter):
        ctx.save_for_backward(wanted)
        return parameter.sum() * 0.0 if not parameter.is_complex() else parameter.real.sum() * 0.0

    @staticmethod
    def backward(ctx, gradient):
        (wanted,) = ctx.saved_tensors
        return None, wanted


EDGES = {
    "huge and tiny": [1e20, -1e-24, 3.0],
    "zeros of either sign": [0.0, -0.0],
    "subnormal": [1e-42, -3e-43],
    "one element": [-7.0],
    "nothing": [],
    "NaN and Inf": [np.nan, 2.0, np.inf, -np.inf],
    "all NaN": [np.nan, np.nan],
}


@pytest.mark.parametrize("values", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_the_norm_is_over_finite_elements_and_the_others_are_counted(values, dtype, watch):
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    other = nn.Parameter(torch.zeros(3))
    watching = watch(measure_local_gradients=True)
    optimizer = torch.optim.SGD([parameter, other], lr=0.0)
    wanted = torch.tensor(values, dtype=dtype)
    for _ in range(2):
        optimizer.zero_grad()
        (Gradients.apply(wanted, parameter) + other.sum()).backward()
        optimizer.step()
    stored = torch.view_as_real(wanted) if dtype.is_complex else wanted
    numbers = np.append(stored.double().numpy().ravel(), [1.0, 1.0, 1.0])
    finite = np.isfinite(numbers)
    found = last_of(watching)
    assert found[NORM] == pytest.approx(np.sqrt(np.sum(np.square(numbers[finite]))), rel=1e-6)
    assert found[NONFINITE] == np.sum(~finite)
    assert found.get(FIRST) == (None if finite.all() else 1.0)


def test_a_sparse_gradient_counts_as_it_is_stored(watch):
    embedding = nn.Embedding(10, 4, sparse=True)
    watching = watch(measure_local_gradients=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        embedding(torch.tensor([1, 3, 3])).pow(2).sum().backward()
        gradient = embedding.weight.grad
        assert gradient is not None
        expected = gradient.to_dense().double().norm().item()
        optimizer.step()
    assert last_of(watching)[NORM] == pytest.approx(expected, rel=1e-6)


def test_micro_batches_add_up_and_discarded_ones_do_not(watch):
    model = make_model()
    watching = watch(measure_local_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        make_loss(model, 99).backward()
        optimizer.zero_grad()  # left over at the end of an epoch
        for part in range(2):
            make_loss(model, 10 * step + part).backward()
        expected = sum_squares(model) ** 0.5
        optimizer.step()
        optimizer.zero_grad()
    assert last_of(watching)[NORM] == pytest.approx(expected, rel=1e-6)


def test_a_parameter_that_only_the_first_micro_batch_reaches_still_counts(watch):
    first, second = nn.Linear(3, 1), nn.Linear(3, 1)
    watching = watch(measure_local_gradients=True)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        first(torch.ones(2, 3)).sum().backward()
        second(torch.ones(2, 3)).sum().backward()
        (first(torch.ones(2, 3)) + second(torch.ones(2, 3))).sum().backward()
        second(torch.ones(2, 3)).sum().backward()
        squares = sum_squares(first) + sum_squares(second)
        optimizer.step()
    assert last_of(watching)[NORM] == pytest.approx(squares**0.5, rel=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_and_tied_weights_count_once(reentrant, watch):
    layer = nn.Linear(4, 4)
    watching = watch(measure_local_gradients=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        hidden = checkpoint(layer, torch.ones(2, 4, requires_grad=True), use_reentrant=reentrant)
        layer(hidden).pow(2).sum().backward()
        optimizer.step()
    expected = sum_squares(layer) ** 0.5
    assert last_of(watching)[NORM] == pytest.approx(expected, rel=1e-6)


def test_what_is_unfrozen_later_counts_from_then_on(watch):
    model = make_model()
    model[0].requires_grad_(False)
    watching = watch(measure_local_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(4):
        model[0].requires_grad_(step >= 2)
        optimizer.zero_grad()
        make_loss(model).backward()
        optimizer.step()
    assert last_of(watching, one_schema=False)[NORM] == pytest.approx(
        sum_squares(model) ** 0.5, rel=1e-6
    )


def test_the_first_step_counts_where_the_optimizer_was_given(watch):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = watch(measure_local_gradients=True, optimizer=optimizer)
    make_loss(model).backward()
    expected = sum_squares(model) ** 0.5
    optimizer.step()
    assert len(watching.read().records) == 1
    assert last_of(watching)[NORM] == pytest.approx(expected, rel=1e-6)


def test_of_two_passes_the_first_counts_as_for_the_gradients(watch):
    model = make_model()
    watching = watch(measure_local_gradients=True, measure_step_parts=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(3):
        make_loss(model, step).backward()
        norms.append(sum_squares(model) ** 0.5)
        with torch.no_grad():
            for each in model.parameters():
                if each.grad is not None:
                    each.add_(each.grad, alpha=0.5)
        optimizer.zero_grad()
        make_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert last_of(watching)[NORM] == pytest.approx(norms[-1], rel=1e-6)


@pytest.mark.parametrize("settings", [{}, {"measure_local_gradients": True}])
def test_hooks_are_there_only_if_asked_for_and_only_while_attached(settings, watch):
    model = make_model()
    watching = watch(**settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        make_loss(model).backward()
        optimizer.step()
    assert hooks_of(model) == (4 if settings else 0)
    assert hooks_of(copy.deepcopy(model)) == 0
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    assert hooks_of(torch.load(saved, weights_only=False)) == 0
    watching.close()
    assert hooks_of(model) == 0


def test_compiled_models_are_measured_as_others_are(watch):
    model = make_model()
    compiled = cast(nn.Module, torch.compile(model, backend="aot_eager"))
    watching = watch(measure_local_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch._dynamo.utils.counters.clear()
    for step in range(3):
        optimizer.zero_grad()
        make_loss(compiled, step).backward()
        squares = sum_squares(model)
        optimizer.step()
    assert last_of(watching)[NORM] == pytest.approx(squares**0.5, rel=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Poisoned(torch.autograd.Function):
    """Makes NaN in backward."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, torch.nan)


@pytest.mark.parametrize("scale", [0.0, 256.0])
def test_numbers_on_a_device_are_not_read_before_they_have_come(scale, watch, device):
    model = make_model()
    watching = watch(measure_local_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale > 0)
    expected = []
    for step in range(4):
        for part in range(2):
            loss = make_loss(model, step)
            if step == 2 and part == 1:
                loss = Poisoned.apply(loss)
            scaler.scale(loss).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        values = np.concatenate([each.double().numpy().ravel() for each in gradients])
        values /= scaler.get_scale() if scale else 1.0
        finite = np.isfinite(values)
        expected.append((np.sqrt(np.sum(np.square(values[finite]))), np.sum(~finite)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            for each in model.parameters():
                each.nan_to_num_(nan=0.1)
    device.run()
    watching.probe.flush()
    contents = watching.read()
    for step in range(1, 4):
        found = by_name(contents.schema.step_columns, contents.records[step].values)
        norm, nonfinite = expected[step]
        assert found[NORM] == pytest.approx(norm, rel=1e-6), step
        assert found[NONFINITE] == nonfinite
        assert found.get(FIRST) == (2.0 if step == 2 else None)
