"""What becomes of gradients between backward and the step, by a few of their elements."""

from collections.abc import Callable
from math import inf, isnan, nan

import pytest
import torch
from torch import nn

from mp_agent.probe.optimizers.live_objects import LiveObjects
from mp_agent.probe.optimizers.plan import MeasurementPlan, make_plan
from mp_agent.probe.step.thread_progress import GradientTrace
from tests.agent.probe.small_model import make_model
from tests.subtests import each


def planned(model: nn.Module) -> MeasurementPlan:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = LiveObjects(modules=tuple(model.modules()), optimizers=())
    return make_plan(optimizer, live, model, 1, "")


def changes(
    change: Callable[[torch.Tensor], torch.Tensor],
    fill: float = 0.5,
    *,
    sequence: int = 4,
    dtype: torch.dtype = torch.float32,
) -> tuple[float, float] | None:
    """Return what the trace sees of a change of all gradients, which are `fill` at first."""
    model = make_model().to(dtype)
    plan, trace = planned(model), GradientTrace()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, fill)
    trace.backward_ended(plan, sequence, made_any=True)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.copy_(change(parameter.grad))
    found = trace.changes(plan, sequence)
    return None if found is None else (float(found[0]), float(found[1]))


@each("fill", [0.5, -3.0, 1e-40, 1e38, -0.1])
@each("dtype", [torch.float32, torch.float64])
def test_what_nothing_changes_has_the_factor_1_exactly(fill, dtype):
    assert changes(lambda gradient: gradient, fill, dtype=dtype) == (1.0, 0.0)


@pytest.mark.parametrize("factor", [0.5, 2.0**-16, 3.7, 1e-6])
def test_a_product_has_its_factor(factor):
    found = changes(lambda gradient: gradient * factor)

    assert found is not None
    assert found[0] == pytest.approx(factor, rel=1e-6) and found[1] == 0.0


def test_gradients_that_are_clipped_one_by_one_share_no_factor():
    limits = iter([1.0, 1e-3, 0.1, 1e-4, 1.0, 1e-2, 1e-3, 1.0])  # as adaptive clipping has them

    found = changes(lambda gradient: gradient * next(limits))

    assert found == (0.0, 0.0), "no factor of a loss scale"


@pytest.mark.parametrize("fill", [nan, inf, -inf])
def test_what_is_not_finite_and_is_replaced_has_no_factor_but_is_seen(fill):
    found = changes(lambda gradient: torch.nan_to_num(gradient, 0.0, 0.0, 0.0), fill)

    assert found is not None
    assert not found[0] > 0.0, "no factor that any record would keep as one"
    assert found[1] == 1.0


@pytest.mark.parametrize("fill", [nan, inf])
def test_what_stays_so_is_not_replaced(fill):
    found = changes(lambda gradient: gradient, fill)

    assert found is not None
    assert isnan(found[0]) and found[1] == 0.0


def test_of_zeros_there_is_no_factor():
    found = changes(lambda gradient: gradient, 0.0)

    assert found is not None and isnan(found[0])


@pytest.mark.parametrize(("sequence", "seen"), [(1, False), (4, True), (130, False), (160, True)])
def test_only_some_steps_are_looked_at(sequence, seen):
    assert (changes(lambda gradient: gradient, sequence=sequence) is not None) is seen


def test_without_gradients_or_with_others_nothing_is_known():
    model = make_model()
    plan, trace = planned(model), GradientTrace()
    trace.backward_ended(plan, 4, made_any=True)
    assert trace.changes(plan, 4) is None
    trace.backward_ended(plan, 4, made_any=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert trace.changes(plan, 4) is None
    trace.backward_ended(plan, 4, made_any=False)
    assert trace.changes(plan, 4) is None


def test_the_factor_of_the_loss_is_looked_at_where_backward_makes_other_gradients():
    model = make_model()
    plan, trace = planned(model), GradientTrace()
    loss = model(torch.ones(2, 4)).mean()
    trace.backward_begins(loss * 1024.0, 4)
    assert trace.loss_factor is None, "it is not known yet whose gradients it makes"
    trace.backward_ended(plan, 4, made_any=False)
    for root, factor in (
        (loss * 1024.0, 1024.0),
        (torch.tensor(256.0) * loss, 256.0),
        (loss * loss, None),
        (loss / 2.0, None),
        ([loss * 8.0], 8.0),
        (None, None),
    ):
        trace.backward_begins(root, 8)
        assert trace.loss_factor == factor
    trace.backward_begins(loss * 1024.0, 9)
    assert trace.loss_factor is None


def test_a_transposed_gradient_is_looked_at_as_it_lies():
    model = nn.Linear(4, 300, bias=False)
    plan, trace = planned(model), GradientTrace()
    model.weight.grad = torch.arange(1200.0).reshape(4, 300).t()
    trace.backward_ended(plan, 4, made_any=True)
    model.weight.grad.mul_(0.25)
    assert trace.changes(plan, 4) == (0.25, 0.0)


def test_gradients_that_cannot_be_compared_are_left_alone(monkeypatch):
    model = make_model()
    plan, trace = planned(model), GradientTrace()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trace.backward_ended(plan, 4, made_any=True)

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("not implemented")

    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "vector_norm", fail)
        assert trace.changes(plan, 4) is None
    trace.backward_ended(plan, 8, made_any=True)
    assert trace.changes(plan, 8) is None, "it is not tried again"
