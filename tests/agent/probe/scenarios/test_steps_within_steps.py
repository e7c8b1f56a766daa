"""Backwards and whole steps within an optimizer's step, by its own hooks or of its own accord."""

from math import sqrt

import pytest
import torch

from mp_agent.records.columns import GRADIENT_POSITIONS, OPTIMIZER
from tests.agent.probe.rings import read_ring
from tests.agent.probe.small_model import make_loss, make_model, sum_squares

STEPS = 5


def register(optimizer, hook: str, function) -> None:
    getattr(optimizer, f"register_step_{hook}_hook")(lambda *_: function())


def contents_of(watched):
    watched.probe.flush()
    return read_ring(watched.writer.path, one_schema=False)


@pytest.mark.parametrize("hook", ["pre", "post"])
class TestAnotherModelIsTrainedInAHook:
    @pytest.mark.slow
    @pytest.mark.parametrize("scaled", [False, True])
    def test_and_each_step_is_seen_with_its_own_loss_and_gradients(self, watch, hook, scaled):
        watched, outer, inner = watch(), make_model(1), make_model(2)
        optimizer = torch.optim.SGD(outer.parameters(), lr=1e-3)
        within = torch.optim.SGD(inner.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=8.0)
        squares, inner_squares, losses = [], [], []

        def train_inner() -> None:
            within.zero_grad()
            make_loss(inner, 50).backward()
            inner_squares.append(sum_squares(inner))
            within.step()

        register(optimizer, hook, train_inner)
        for seed in range(STEPS):
            optimizer.zero_grad()
            loss = make_loss(outer, seed)
            losses.append(loss.item())
            scaler.scale(loss).backward()
            squares.append(sum_squares(outer) / (64 if scaled else 1))
            scaler.step(optimizer)
            scaler.update()
        contents = contents_of(watched)
        assert watched.steps_reported == len(contents.records) == STEPS
        assert [
            record.gradients[0, GRADIENT_POSITIONS["sum_squares"]] for record in contents.records
        ] == pytest.approx(squares)
        assert contents.column("loss") == pytest.approx(losses)
        assert contents.column("skipped") == [0.0] * STEPS
        own = [
            record.gradients[1, GRADIENT_POSITIONS["sum_squares"]]
            for record in contents.records[1:-1]
        ]
        assert own == pytest.approx(inner_squares[1:-1])
        assert contents.state.records_dropped == 0
        assert watched.state().probe_errors == 0


class TestItsOwnModelIsDifferentiatedInAHook:
    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["backward", "grad"])
    @pytest.mark.parametrize("hook", ["pre", "post"])
    def test_and_the_step_counts_with_the_gradients_that_it_began_with(self, watch, hook, how):
        watched, model = watch(), make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        squares, losses = [], []

        def look_at_curvature() -> None:
            loss = make_loss(model, 60)
            if how == "grad":
                torch.autograd.grad(loss, list(model.parameters()))
            else:
                loss.backward()

        register(optimizer, hook, look_at_curvature)
        for seed in range(STEPS):
            optimizer.zero_grad()
            loss = make_loss(model, seed)
            losses.append(loss.item())
            loss.backward()
            squares.append(sum_squares(model))
            optimizer.step()
        contents = contents_of(watched)
        assert watched.steps_reported == len(contents.records) == STEPS
        assert [
            record.gradients[0, GRADIENT_POSITIONS["sum_squares"]] for record in contents.records
        ] == pytest.approx(squares)
        assert contents.column("loss") == pytest.approx(losses)
        assert contents.state.records_dropped == 0


class _SecondPass(torch.optim.Optimizer):
    """Takes a second pass by itself; hands the update to the optimizer that it wraps."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base = base

    def step(self, closure=None, *, compute_loss):  # type: ignore[override] # as such classes do
        self.base.zero_grad()
        compute_loss().backward()
        self.base.step()


def test_a_second_pass_within_the_step_makes_no_step_of_its_own(watch):
    watched, model = watch(), make_model()
    optimizer = _SecondPass(torch.optim.SGD(model.parameters(), lr=1e-3))
    squares, losses = [], []
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = make_loss(model, seed)
        losses.append(loss.item())
        loss.backward()
        squares.append(sum_squares(model))
        optimizer.step(compute_loss=lambda: make_loss(model, 70))
    contents = contents_of(watched)
    assert watched.steps_reported == len(contents.records) == STEPS
    assert [
        record.gradients[0, GRADIENT_POSITIONS["sum_squares"]] for record in contents.records
    ] == pytest.approx(squares)
    assert contents.column("loss") == pytest.approx(losses)
    assert contents.state.records_dropped == 0


def test_a_step_that_raised_after_a_step_within_it_is_followed_by_others(watch):
    watched, outer, inner = watch(), make_model(1), make_model(2)
    optimizer = torch.optim.SGD(outer.parameters(), lr=1e-3)
    within = torch.optim.SGD(inner.parameters(), lr=1e-3)
    norms: list[float] = []

    def train_inner_and_fail_once() -> None:
        make_loss(inner).backward()
        within.step()
        if len(norms) == 2:
            raise ZeroDivisionError

    register(optimizer, "post", train_inner_and_fail_once)
    for seed in range(STEPS):
        optimizer.zero_grad()
        make_loss(outer, seed).backward()
        norms.append(sqrt(sum_squares(outer)))
        try:
            optimizer.step()
        except ZeroDivisionError:
            assert len(norms) == 2
    contents = contents_of(watched)
    assert watched.steps_reported == len(contents.records) == STEPS
    seen = [
        sqrt(record.gradients[0, GRADIENT_POSITIONS["sum_squares"]]) for record in contents.records
    ]
    assert seen == pytest.approx(norms)


class TestAStepThatCallsThatOfItsBaseClass:
    """torch puts its hooks around both, once there is an optimizer of the base class, too."""

    @pytest.fixture(params=[False, True], ids=["plain", "closure"])
    def contents(self, request, watch):
        class Careful(torch.optim.SGD):
            def step(self, closure=None):
                loss = super().step(closure)
                with torch.no_grad():
                    for parameter in self.param_groups[0]["params"]:
                        parameter.add_(1e-3)
                return loss

        watched, model = watch(measure_updates=True, layer_interval=1), make_model()
        torch.optim.SGD(make_model(2).parameters(), lr=0.1)
        optimizer = Careful(model.parameters(), lr=0.1)
        self.squares: list[float] = []
        self.updates: list[float] = []
        for seed in range(STEPS):
            before = [each.detach().clone() for each in model.parameters()]

            def evaluate(seed=seed) -> torch.Tensor:
                optimizer.zero_grad()
                loss = make_loss(model, seed)
                loss.backward()
                self.squares.append(sum_squares(model))
                return loss

            if request.param:
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
            changes = [a.detach() - b for a, b in zip(model.parameters(), before, strict=True)]
            self.updates.append(sum(float(each.double().square().sum()) for each in changes))
        return contents_of(watched)

    def test_is_one_step_with_the_gradients_that_it_began_with(self, contents):
        assert len(contents.records) == STEPS
        assert [row.gradients[0, 0] for row in contents.records] == pytest.approx(self.squares)

    def test_its_update_is_that_of_both(self, contents):
        measured = {
            sequence: sum(row["update_sum_squares"] for row in layers.values())
            for sequence, layers in contents.rows(OPTIMIZER).items()
        }
        assert measured
        for sequence, found in measured.items():
            assert found == pytest.approx(self.updates[sequence - 1])

    def test_and_none_is_counted_as_lost(self, contents):
        assert contents.state.records_dropped == 0
        assert contents.state.probe_errors == 0
