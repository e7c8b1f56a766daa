"""Optimizers that compute the gradients themselves, through a closure."""

from math import isnan

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from tests.agent.probe.small_model import make_loss, make_model, sum_squares


class Loop:
    """A model whose optimizer is given a closure; notes what each call of it computed."""

    def __init__(self, optimizer_class, *, clips: bool = False, raises_at: int = 0, **options):
        self.model = make_model()
        self.optimizer = optimizer_class(self.model.parameters(), **options)
        self.squares: list[float] = []
        self.losses: list[float] = []
        self._clips, self.raises_at = clips, raises_at

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = make_loss(self.model)
        loss.backward()
        self.squares.append(sum_squares(self.model))
        self.losses.append(loss.item())
        if len(self.losses) == self.raises_at:
            raise ZeroDivisionError
        if self._clips:
            clip_grad_norm_(self.model.parameters(), 1e-3)
        return loss

    def step(self, *, by_name: bool = False) -> int:
        """Return the index of the first call of the closure within this step."""
        first = len(self.losses)
        loss = (
            self.optimizer.step(closure=self.closure)
            if by_name
            else self.optimizer.step(self.closure)
        )
        assert loss.item() == pytest.approx(self.losses[first])
        return first


class TestGradientsAndLoss:
    @pytest.mark.parametrize("by_name", [False, True])
    @pytest.mark.parametrize("clips", [False, True])
    def test_are_those_that_the_closure_computed(self, watch, by_name, clips, caplog):
        watched, loop = watch(), Loop(torch.optim.SGD, lr=0.1, clips=clips)
        for _ in range(3):
            loop.step(by_name=by_name)
        contents = watched.read()
        assert [row.gradients[0, 0] for row in contents.records] == pytest.approx(loop.squares)
        assert contents.column("loss") == pytest.approx(loop.losses)
        assert next(layer.name for layer in contents.schema.layers) == "0.weight"
        assert contents.layers, "no layers were looked at"
        assert contents.state.unsupported == ()
        assert not [record for record in caplog.records if "does not measure" in record.message]

    def test_are_those_of_the_first_of_several_calls(self, watch):
        watched, loop = watch(), Loop(torch.optim.LBFGS, max_iter=4, lr=0.01)
        firsts = [loop.step() for _ in range(3)]
        assert len(loop.losses) > 3, "the closure was called once per step"
        contents = watched.read()
        expected = [loop.squares[first] for first in firsts]
        assert [row.gradients[0, 0] for row in contents.records] == pytest.approx(expected)
        expected = [loop.losses[first] for first in firsts]
        assert contents.column("loss") == pytest.approx(expected)
        assert contents.column("step_seconds")[1] > 0

    def test_go_on_after_a_closure_that_raised(self, watch):
        watched, loop = watch(), Loop(torch.optim.LBFGS, max_iter=4, lr=0.01)
        loop.step()
        loop.raises_at = len(loop.losses) + 2
        with pytest.raises(ZeroDivisionError):
            loop.step()
        first = loop.step()
        contents = watched.read()
        assert [record.sequence for record in contents.records] == [1, 2]
        assert contents.gradients(1)["sum_squares"] == pytest.approx(loop.squares[first])
        assert contents.values(1)["loss"] == pytest.approx(loop.losses[first])

    def test_of_another_optimizer_go_on_after_a_closure_that_raised(self, watch):
        watched, loop = watch(), Loop(torch.optim.LBFGS, max_iter=4, raises_at=2)
        with pytest.raises(ZeroDivisionError):
            loop.step()
        optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
        squares, losses = [], []
        for seed in range(4):
            optimizer.zero_grad()
            loss = make_loss(loop.model, seed)
            loss.backward()
            squares.append(sum_squares(loop.model))
            losses.append(loss.item())
            optimizer.step()
        contents = watched.read()
        assert [row.gradients[0, 0] for row in contents.records] == pytest.approx(squares)
        assert contents.column("loss") == pytest.approx(losses)
        assert watched.steps_reported == 4

    def test_are_found_though_the_closure_is_never_called(self, watch):
        class Deaf(torch.optim.SGD):
            def step(self, closure=None):
                return super().step()

        watched, model = watch(), make_model()
        optimizer = Deaf(model.parameters(), lr=0.1)
        make_loss(model).backward()
        expected = sum_squares(model)
        optimizer.step(lambda: None)
        contents = watched.read()
        assert contents.gradients(0)["sum_squares"] == pytest.approx(expected)
        assert len(contents.records) == 1


class TestClosure:
    def test_is_called_with_what_it_is_called_with_and_keeps_its_name(self, watch):
        seen = []

        class Calling(torch.optim.SGD):
            def step(self, closure=None):
                seen.append((closure.__name__, closure(1, key=2)))

        watched, model = watch(), make_model()

        def evaluate(*args, **kwargs):
            return args, kwargs

        Calling(model.parameters(), lr=0.1).step(evaluate)
        assert seen == [("evaluate", ((1,), {"key": 2}))]
        assert all(isnan(value) for value in watched.read().gradients(0).values())

    def test_that_is_none_at_all_is_passed_on_as_it_is(self, watch):
        class Weighted(torch.optim.SGD):
            def step(self, weight=1.0):
                self.weight = weight
                return super().step()

        watched, model = watch(), make_model()
        optimizer = Weighted(model.parameters(), lr=0.1)
        make_loss(model).backward()
        expected = sum_squares(model)
        optimizer.step(0.5)
        assert optimizer.weight == 0.5
        assert watched.read().gradients(0)["sum_squares"] == pytest.approx(expected)

    def test_is_refused_by_a_scaler_as_ever_and_training_goes_on(self, watch):
        watched, model = watch(), make_model()
        optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
        scaler.scale(make_loss(model)).backward()
        with pytest.raises(RuntimeError, match="Closure"):
            scaler.step(optimizer, closure=lambda: None)
        for _ in range(2):
            optimizer.zero_grad()
            loss = make_loss(model)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        contents = watched.read()
        assert len(contents.records) == 2
        assert contents.values(1)["loss"] == pytest.approx(loss.item())
        assert contents.state.probe_errors == 0
