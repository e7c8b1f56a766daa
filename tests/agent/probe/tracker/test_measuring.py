"""When in a step the gradients are measured: before clipping, and once."""

from math import inf, isnan, nan

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

from tests.agent.probe.small_model import make_loss, make_model, sum_squares


class TestMeasuringPoint:
    @pytest.mark.parametrize("as_generator", [True, False])
    def test_norm_clipping_is_looked_behind(self, watch, as_generator):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        make_loss(model).backward()
        expected = sum_squares(model)
        parameters = model.parameters() if as_generator else list(model.parameters())
        clip_grad_norm_(parameters, 1e-3)
        assert sum_squares(model) < 1e-5 < expected
        optimizer.step()
        contents = watched.read()
        assert contents.gradients(0)["sum_squares"] == pytest.approx(expected, rel=1e-6)
        assert contents.schema.fact("measuring_point") == "clip"

    def test_value_clipping_of_a_generator_still_clips(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        make_loss(model).backward()
        expected = sum_squares(model)
        clip_grad_value_(model.parameters(), 1e-6)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert max(float(gradient.abs().max()) for gradient in gradients) <= 1.001e-6
        optimizer.step()
        assert watched.read().gradients(0)["sum_squares"] == pytest.approx(expected, rel=1e-6)

    def test_scaling_down_to_a_norm_of_the_users_own_is_looked_behind(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        make_loss(model).backward()
        expected = sum_squares(model)
        clip_grads_with_norm_(model.parameters(), 0.001, torch.tensor(expected**0.5))
        optimizer.step()
        contents = watched.read()
        assert contents.gradients(0)["sum_squares"] == pytest.approx(expected, rel=1e-6)
        assert contents.values(0)["clip_max_norm"] == 0.001

    def test_gradients_that_grew_after_a_look_are_looked_at_again(self, watch):
        """Clipping to infinity on every micro-batch is how some trainers log the norm."""
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        for seed in range(2):
            make_loss(model, seed).backward()
            clip_grad_norm_(model.parameters(), inf)
        expected = sum_squares(model)
        optimizer.step()
        contents = watched.read()
        assert contents.gradients(0)["sum_squares"] == pytest.approx(expected, rel=1e-6)
        assert "clip_max_norm" not in contents.values(0)

    def test_clipping_that_raises_has_been_looked_behind(self, watch):
        watched, model = watch(), make_model()
        torch.optim.SGD(model.parameters())
        optimizer = torch.optim.SGD(model.parameters())
        (make_loss(model) * nan).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        watched.probe.flush()
        contents = watched.read()
        assert contents.records == []
        assert contents.open_record.gradients[0, 3] == 58
        del optimizer

    def test_clipping_of_other_parameters_is_not_ours(self, watch):
        watched, model, other = watch(), make_model(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        make_loss(model).backward()
        optimizer.step()
        make_loss(other).backward()
        clip_grad_norm_(other.parameters(), 1.0)
        make_loss(model).backward()
        optimizer.step()
        assert "clip_norm" not in watched.read().values(1)

    def test_a_step_without_any_gradient_has_no_statistics(self, watch):
        watched, model = watch(), make_model()
        torch.optim.SGD(model.parameters()).step()
        assert all(isnan(value) for value in watched.read().gradients(0).values())

    def test_a_frozen_layer_counts_no_elements_of_its_own(self, watch):
        watched, model = watch(), make_model()
        model[0].weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters())
        make_loss(model).backward()
        optimizer.step()
        assert watched.read().gradients(0)["elements"] == 8 + 16 + 2
