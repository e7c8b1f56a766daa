"""The loss of a step, from backward, from scaling and from the user."""

from math import inf, nan

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.agent.probe.small_model import make_loss, make_model


class TestLoss:
    def test_is_taken_once_although_scaler_and_backward_both_see_it(self, watch):
        watched, model = watch(), make_model()
        optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
        loss = make_loss(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        assert watched.read().values(0)["loss"] == pytest.approx(loss.item())

    def test_of_a_disabled_scaler_is_taken_from_backward(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        loss = make_loss(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        contents = watched.read()
        assert contents.values(0)["loss"] == pytest.approx(loss.item())
        assert "loss_scale" not in contents.values(0)

    def test_is_the_sum_over_the_micro_batches_of_a_loop_that_divides(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        losses = [make_loss(model, seed) / 3 for seed in range(3)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        expected = sum(loss.item() for loss in losses)
        assert watched.read().values(0)["loss"] == pytest.approx(expected)

    def test_observed_wins_over_the_one_in_backward(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        watched.probe.observe(loss=torch.tensor(7.5))
        make_loss(model).backward()
        optimizer.step()
        assert watched.read().values(0)["loss"] == 7.5

    @pytest.mark.parametrize("value", [nan, inf, -inf])
    def test_that_is_not_finite_sets_the_flag_and_leaves_no_value(self, watch, value):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        (make_loss(model) * value).backward()
        optimizer.step()
        values = watched.read().values(0)
        assert values["loss_nonfinite"] == 1.0
        assert "loss" not in values

    def test_of_no_single_number_is_absent(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        outputs = model(torch.ones(3, 4))
        outputs.backward(torch.ones_like(outputs))
        optimizer.step()
        assert "loss" not in watched.read().values(0)

    def test_of_a_reentrant_checkpoint_counts_once(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        inputs = torch.ones(3, 4, requires_grad=True)
        loss = checkpoint(model, inputs, use_reentrant=True).sum()
        loss.backward()
        optimizer.step()
        assert watched.read().values(0)["loss"] == pytest.approx(loss.item())

    def test_of_a_backward_within_backward_is_no_loss_of_the_step(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        aside = nn.Parameter(torch.tensor(1e6))

        def hook(_: torch.Tensor) -> None:
            with torch.enable_grad():
                (aside * 1.0).backward()

        next(model.parameters()).register_hook(hook)
        loss = make_loss(model)
        loss.backward()
        optimizer.step()
        assert watched.read().values(0)["loss"] == pytest.approx(loss.item())
