"""Several backwards per step: which of them are the step's, and which are not."""

from math import isnan

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.utils import clip_grad_norm_

from mp_agent.records.columns import GRADIENT_POSITIONS
from tests.agent.probe.rings import read_ring
from tests.agent.probe.small_model import make_loss, make_model, sum_squares


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as it is usually written: two backwards, the second uphill."""

    def __init__(self, params, rho: float = 0.5) -> None:
        super().__init__(params, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        trained = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        for p in trained:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad * (0.5 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["before"])
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class TestSharpnessAware:
    @pytest.mark.parametrize("clips", [False, True])
    @pytest.mark.parametrize("closure", [False, True])
    def test_shows_loss_and_gradients_of_the_first_pass(self, watch, closure, clips):
        watched, model = watch(), make_model()
        optimizer = SAM(model.parameters())
        squares, losses = [], []

        def backward() -> None:
            make_loss(model, seed).backward()
            if clips:
                clip_grad_norm_(model.parameters(), 1e-2)

        for seed in range(4):
            loss = make_loss(model, seed)
            loss.backward()
            squares.append(sum_squares(model))
            losses.append(loss.item())
            if clips:
                clip_grad_norm_(model.parameters(), 1e-2)
            if closure:
                optimizer.step(backward)
            else:
                optimizer.first_step()
                backward()
                optimizer.second_step()
        contents = watched.read()
        assert len(contents.records) == 4
        seen = [
            record.gradients[0, GRADIENT_POSITIONS["sum_squares"]] for record in contents.records
        ]
        # Before the first step nothing has shown the optimizer but a closure that it is given.
        known = slice(0 if closure and not clips else 1, None)
        assert seen[known] == pytest.approx(squares[known], rel=1e-6)
        assert contents.column("loss")[known] == pytest.approx(losses[known])
        if clips:
            norms = contents.column("clip_norm")
            assert norms[1:] == pytest.approx([value**0.5 for value in squares[1:]], rel=1e-5)


class TestGradientsThatAreThrownAway:
    @pytest.mark.parametrize("by_model", [False, True])
    def test_take_their_loss_with_them(self, watch, by_model):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expected, losses = [], []
        for seed in range(3):
            (1000 * make_loss(model, seed)).backward()
            (model if by_model else optimizer).zero_grad()
            loss = make_loss(model, seed)
            loss.backward()
            expected.append(sum_squares(model))
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        contents = watched.read()
        seen = [
            record.gradients[0, GRADIENT_POSITIONS["sum_squares"]] for record in contents.records
        ]
        assert seen == pytest.approx(expected)
        assert contents.column("loss")[1:] == pytest.approx(losses[1:])

    def test_of_another_model_are_no_concern(self, watch):
        watched, model, other = watch(), make_model(), make_model(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            first, second = make_loss(model, seed), make_loss(other, seed)
            first.backward()
            second.backward()
            other.zero_grad()
            third = make_loss(model, seed)
            third.backward()
            expected = sum_squares(model)
            optimizer.step()
            optimizer.zero_grad()
        contents = watched.read()
        assert contents.gradients(2)["sum_squares"] == pytest.approx(expected)
        assert "loss" not in contents.values(2)  # the second may be what the first goes on from

    def test_by_an_optimizer_that_frees_them_as_it_goes_are_no_first_pass(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
        losses = []
        for seed in range(3):
            loss = make_loss(model, seed)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
        assert watched.read().column("loss") == pytest.approx(losses)


class TestLossOf:
    def train(self, watch, backward) -> float:
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model)
        optimizer.step()
        return float(watched.read().values(0)["loss"])

    def test_several_roots_is_their_sum(self, watch):
        def backward(model: nn.Module) -> None:
            torch.autograd.backward([make_loss(model, 0), make_loss(model, 1)])

        model = make_model()
        expected = make_loss(model, 0).item() + make_loss(model, 1).item()
        assert self.train(watch, backward) == pytest.approx(expected)

    def test_a_weighted_root_is_weighted(self, watch):
        def backward(model: nn.Module) -> None:
            make_loss(model, 0).backward(torch.tensor(-1.0))
            make_loss(model, 1).backward(gradient=torch.tensor(0.25))

        model = make_model()
        expected = 0.25 * make_loss(model, 1).item() - make_loss(model, 0).item()
        assert self.train(watch, backward) == pytest.approx(expected)

    def test_scaled_losses_that_are_summed_is_the_sum_before_scaling(self, watch):
        def backward(model: nn.Module) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            first, second = scaler.scale([make_loss(model, 0), make_loss(model, 1)])
            (first + second).backward()

        model = make_model()
        expected = make_loss(model, 0).item() + make_loss(model, 1).item()
        assert self.train(watch, backward) == pytest.approx(expected)

    def test_a_scaled_loss_whose_gradient_is_penalized_counts_once(self, watch):
        def backward(model: nn.Module) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaled = scaler.scale(make_loss(model, 0))
            torch.autograd.grad(scaled, list(model.parameters()), create_graph=True)
            scaler.scale(make_loss(model, 0)).backward()

        assert self.train(watch, backward) == pytest.approx(make_loss(make_model(), 0).item())

    def test_an_attack_on_the_inputs_is_no_loss_of_the_step(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(2):
            inputs = torch.ones(3, 4, requires_grad=True)
            optimizer.zero_grad()
            (1000 * model(inputs).pow(2).mean()).backward(inputs=[inputs])
            loss = make_loss(model, seed)
            loss.backward()
            expected = sum_squares(model)
            optimizer.step()
        contents = watched.read()
        assert contents.values(1)["loss"] == pytest.approx(loss.item())
        assert contents.gradients(1)["sum_squares"] == pytest.approx(expected)


class TestDistributedCheckpoint:
    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
    def test_makes_no_step_of_training(self, watch, kind):
        watched, model = watch(), make_model()
        optimizer = kind(model.parameters(), lr=0.1)
        models, optimizers = get_state_dict(model, optimizer)
        squares = []
        for seed in range(3):
            make_loss(model, seed).backward()
            squares.append(sum_squares(model))
            optimizer.step()
            optimizer.zero_grad()
            models, optimizers = get_state_dict(model, optimizer)
        set_state_dict(model, optimizer, model_state_dict=models, optim_state_dict=optimizers)
        contents = watched.read()
        assert watched.steps_reported == 3
        seen = [
            record.gradients[0, GRADIENT_POSITIONS["sum_squares"]] for record in contents.records
        ]
        assert seen == pytest.approx(squares)
        assert not any(isnan(value) for value in contents.column("loss"))


def test_the_loss_of_a_gan_is_what_the_discriminator_steps_on(watch):
    """Real and fake batches are two backwards; the generator's is another optimizer's."""
    watched, generator, discriminator = watch(), nn.Linear(4, 4), make_model()
    ahead = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
    behind = torch.optim.Adam(generator.parameters(), lr=1e-3)
    losses = []
    for seed in range(4):
        torch.manual_seed(seed)
        noise, real = torch.randn(3, 4), torch.randn(3, 4)
        discriminator.zero_grad()
        for_real = (discriminator(real) - 1).pow(2).mean()
        for_real.backward()
        fake = generator(noise)
        for_fake = discriminator(fake.detach()).pow(2).mean()
        for_fake.backward()
        losses.append(for_real.item() + for_fake.item())
        ahead.step()
        generator.zero_grad()
        (discriminator(fake) - 1).pow(2).mean().backward()
        behind.step()
    watched.probe.flush()
    contents = read_ring(watched.writer.path, one_schema=False)
    assert contents.column("loss") == pytest.approx(losses)
