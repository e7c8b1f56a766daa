"""Each column of the optimizer's family against plain Python, at the edges of the formats."""

from math import inf, nan

import pytest
import torch

from mp_agent.probe.recording import weight_updates
from mp_agent.probe.recording.weight_updates import LayerTensors, UpdateRule, update_row
from mp_agent.records.columns import OPTIMIZER
from tests.agent.update_reference import update_reference
from tests.subtests import each

_FORMATS = [torch.float32, torch.bfloat16, torch.float16]


def row_of(tensors: LayerTensors, rule: UpdateRule) -> dict[str, float]:
    return dict(zip(OPTIMIZER.names, update_row(tensors, rule).tolist(), strict=True))


def expect(tensors: LayerTensors, rule: UpdateRule) -> None:
    """Compare a row with the reference, of the same tensors in float64."""

    def numbers(tensor: torch.Tensor | None) -> list[float] | None:
        if tensor is None:
            return None
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        return [float(value) for value in tensor.double().flatten()]

    moment = tensors.second_moment
    expected = update_reference(
        numbers(tensors.weight) or [],
        numbers(tensors.before),
        numbers(tensors.gradient),
        numbers(tensors.momentum),
        numbers(moment),
        numbers(tensors.divisor),
        weight_bytes=tensors.weight.element_size(),
        moment_format="float32" if moment is None else str(moment.dtype).removeprefix("torch."),
        learning_rate=None if rule.learning_rate is None else float(rule.learning_rate),
        correction=float(rule.correction),
        epsilon=rule.epsilon,
    )
    assert row_of(tensors, rule) == pytest.approx(expected, rel=1e-12, abs=0.0, nan_ok=True)


def random_layer(dtype: torch.dtype, shape: tuple[int, ...]) -> LayerTensors:
    torch.manual_seed(3)
    before = torch.randn(shape, dtype=dtype)
    gradient = torch.randn(shape, dtype=dtype) * 1e-3
    gradient[..., ::3] = 0.0
    return LayerTensors(
        weight=before - torch.rand(shape).to(dtype) * 1e-3,
        before=before,
        gradient=gradient,
        momentum=torch.randn(shape, dtype=dtype) * 1e-4 * (gradient != 0),
        second_moment=(gradient * gradient * 0.5).abs(),
    )


@each("dtype", _FORMATS)
@each("shape", [(1,), (5, 7), (0,), (3, 1, 2)])
def test_every_column_equals_the_reference(dtype, shape):
    rule = UpdateRule(learning_rate=1e-3, correction=0.25, epsilon=1e-5)
    expect(random_layer(dtype, shape), rule)


def test_pieces_add_up_to_the_layer(monkeypatch):
    monkeypatch.setattr(weight_updates, "_PIECE_ELEMENTS_HOST", 16)
    expect(random_layer(torch.bfloat16, (9, 11)), UpdateRule(learning_rate=1e-3, epsilon=1e-5))


@pytest.mark.parametrize("dtype", _FORMATS)
def test_values_at_the_edges_are_counted_and_never_become_nan(dtype):
    tiny = torch.finfo(dtype).tiny
    values = [0.0, -0.0, nan, inf, -inf, tiny / 2, -tiny, torch.finfo(dtype).max, 1.0]
    edges = torch.tensor(values, dtype=dtype)
    for shift in range(len(values)):
        tensors = LayerTensors(
            weight=edges.roll(shift),
            before=edges,
            gradient=edges.roll(2 * shift),
            momentum=edges.roll(3 * shift),
            second_moment=edges.abs().roll(5 * shift),
        )
        expect(tensors, UpdateRule(learning_rate=1e-3, epsilon=1e-8))


def test_all_nan_weights_have_no_norm_and_count():
    weight = torch.full((4,), nan)
    row = row_of(LayerTensors(weight=weight, before=weight), UpdateRule())
    assert row["nonfinite_weights"] == 4.0
    assert row["weight_sum_squares"] == row["compared_elements"] == row["update_sum_squares"] == 0.0
    assert not OPTIMIZER.counts({name: value for name, value in row.items() if value == value})


def test_updates_below_half_the_spacing_of_bfloat16_are_lost():
    before = torch.ones(4, dtype=torch.bfloat16)
    step = torch.tensor([2.0**-9, 2.0**-10, 2.0**-7, 0.0])
    after = (before.float() + step).to(torch.bfloat16)
    gradient = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.bfloat16)
    tensors = LayerTensors(weight=after, before=before, gradient=gradient)
    row = row_of(tensors, UpdateRule(learning_rate=1e-3))
    assert (row["rounded_elements"], row["lost_updates"]) == (3.0, 2.0)


def test_no_update_is_lost_while_the_learning_rate_is_zero():
    weight = torch.ones(4, dtype=torch.bfloat16)
    tensors = LayerTensors(weight=weight, before=weight, gradient=weight)
    for rate in (0.0, torch.tensor(0.0)):
        assert row_of(tensors, UpdateRule(learning_rate=rate))["rounded_elements"] == 0.0


def test_no_update_of_wide_weights_counts_as_rounded():
    weight = torch.ones(4)
    tensors = LayerTensors(weight=weight, before=weight, gradient=weight)
    row = row_of(tensors, UpdateRule(learning_rate=1e-12))
    assert row["rounded_elements"] != row["rounded_elements"]


@each(
    ("dtype", "epsilon", "lost"),
    [
        (torch.float16, 1e-8, 8.0),
        (torch.float16, 2.0**-24, 0.0),
        (torch.float16, 1e-7, 0.0),
        (torch.bfloat16, 1e-8, 0.0),
        (torch.float32, 1e-8, 0.0),
        (torch.float16, 0.0, 0.0),
    ],
)
def test_an_epsilon_below_the_smallest_number_of_the_state_is_reported(dtype, epsilon, lost):
    ones = torch.ones(8, dtype=dtype)
    row = row_of(LayerTensors(weight=ones, second_moment=ones), UpdateRule(epsilon=epsilon))
    assert row["lost_epsilon_elements"] == lost


def test_amsgrad_compares_epsilon_with_the_moment_that_it_divides_by():
    tensors = LayerTensors(
        weight=torch.ones(2),
        gradient=torch.ones(2),
        second_moment=torch.tensor([1e-20, 1e-20]),
        divisor=torch.tensor([1.0, 1e-20]),
    )
    expect(tensors, UpdateRule(epsilon=1e-8))
    assert row_of(tensors, UpdateRule(epsilon=1e-8))["below_epsilon_elements"] == 1.0


def test_strided_and_complex_layers_are_paired_element_by_element():
    torch.manual_seed(5)
    before = torch.randn(6, 4).t()
    expect(
        LayerTensors(weight=before.contiguous() + 1, before=before, gradient=torch.randn(4, 6)),
        UpdateRule(learning_rate=0.1),
    )
    before = torch.randn(3, 2, dtype=torch.complex64)
    expect(
        LayerTensors(weight=before * 1.5, before=before, gradient=before.conj()),
        UpdateRule(learning_rate=0.1),
    )
