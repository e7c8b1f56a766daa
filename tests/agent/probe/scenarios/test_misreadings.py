"""What a script does by means that call no hook: seen by the numbers, named, and judged no longer.

Each loop trains on this process with a probe, and a node agent's run reads its ring. Loops in good
health, of the same looks, bring nothing.
"""

import copy
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from mp_agent.node.accounting.latest import UNSEEN_LOSS
from mp_agent.node.accounting.loss_scale import CLIPPED, SCALED, WINDOW_STEPS
from mp_agent.node.conditions import tracker
from mp_agent.node.run.run import Run
from mp_agent.records.steps import OTHER_GRADIENTS
from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests.agent.node.shown import shown
from tests.agent.probe.rings import make_identity
from tests.agent.probe.small_model import gradient_of

STEPS = WINDOW_STEPS + 16
_OWN_CHANGE = "gradients before the script itself changed them"
_WITHOUT = "MpAgentLayersWithoutGradient"

Loop = Callable[[], None]
Judge = Callable[[Loop], dict[str, float]]


@pytest.fixture
def judge(watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Train by a loop, and return what a node agent exports of it."""
    monkeypatch.setattr(tracker, "PROCESSOR_SHARE", 1.0)

    def judged(loop: Loop) -> dict[str, float]:
        watched = watch()
        loop()
        watched.probe.flush()
        run_dir = locations.run_directory(tmp_path / "shm", "test")
        ring = locations.ring_path(run_dir, make_identity())
        ring.parent.mkdir(parents=True)
        shutil.copy(watched.writer.path, ring)
        run = Run(run_dir, Settings(dir=tmp_path / "shm", flight_dir=tmp_path / "flight"))
        try:
            run.poll(0.0)
            return shown(run)
        finally:
            run.close()

    return judged


def unsupported(values: dict[str, float]) -> set[str]:
    """Return the features that are named, but for what a single rank is known to do in place."""
    start = "unsupported_info{0,"
    found = {name.removeprefix(start)[:-1] for name in values if name.startswith(start)}
    return found - {_OWN_CHANGE}


def conditions(values: dict[str, float]) -> set[str]:
    start = "condition_active{"
    return {name.removeprefix(start)[:-1] for name in values if name.startswith(start)} - {
        name.removeprefix(start)[:-1]
        for name, value in values.items()
        if name.startswith(start) and value == 0.0
    }


def make_model(seed: int = 0, width: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))


def batch(step: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(size, 8, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[:, :1].sin()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    inputs, targets = batch(step)
    loss: torch.Tensor = (model(inputs).float() - targets).square().mean()
    return loss


def norm_of(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(gradient_of(parameter)) for parameter in parameters]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def hand_made(
    change: Callable[[list[nn.Parameter], int], None],
    scale: Callable[[int], float | torch.Tensor] = lambda step: 1.0,
    steps: int = STEPS,
) -> Loop:
    """Return a loop that changes gradients between backward and step."""

    def loop() -> None:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(steps):
            optimizer.zero_grad()
            (loss_of(model, step) * scale(step)).backward()
            change(list(model.parameters()), step)
            optimizer.step()

    return loop


def _clip(parameters: list[nn.Parameter], limit: float = 0.02) -> float:
    return min(1.0, limit / (norm_of(parameters).item() + 1e-6))


def clips_data(parameters: list[nn.Parameter], step: int) -> None:
    coefficient = _clip(parameters)
    for parameter in parameters:
        gradient_of(parameter).data.mul_(coefficient)


def clips_in_place(parameters: list[nn.Parameter], step: int) -> None:
    coefficient = _clip(parameters)
    torch._foreach_mul_([gradient_of(parameter) for parameter in parameters], coefficient)


def clips_by_new_tensors(parameters: list[nn.Parameter], step: int) -> None:
    coefficient = _clip(parameters)
    for parameter in parameters:
        parameter.grad = gradient_of(parameter) * coefficient


def clips_most(parameters: list[nn.Parameter], step: int) -> None:
    """One batch in five has a norm below the limit."""
    coefficient = _clip(parameters) * (0.5 if step % 5 == 0 else 1.0)
    for parameter in parameters:
        gradient_of(parameter).data.mul_(coefficient)


class TestAClippingThatNoHookSees:
    @pytest.mark.parametrize(
        "change", [clips_data, clips_in_place, clips_by_new_tensors, clips_most]
    )
    def test_is_named_and_the_norm_is_not_judged(self, judge, change):
        values = judge(hand_made(change))

        assert unsupported(values) == {CLIPPED}
        assert not any(name.startswith("grad_norm_usual") for name in values)
        assert not conditions(values)

    def test_far_below_the_norms_is_no_loss_scale(self, judge):
        assert unsupported(judge(hand_made(clips_data, lambda step: 1000.0))) == {CLIPPED}

    def test_is_not_there_before_enough_steps_have_shown_it(self, judge):
        assert unsupported(judge(hand_made(clips_data, steps=WINDOW_STEPS - 1))) == set()

    def test_to_a_limit_that_would_be_vanishing_gradients_is_no_condition(self, judge):
        def clips_to_almost_nothing(parameters: list[nn.Parameter], step: int) -> None:
            coefficient = _clip(parameters, 1e-9)
            for parameter in parameters:
                gradient_of(parameter).data.mul_(coefficient)

        values = judge(hand_made(clips_to_almost_nothing))
        assert CLIPPED in unsupported(values)
        assert not any("GradientVanishing" in name for name in conditions(values))


def _divides(scale: Callable[[int], float]) -> Callable[[list[nn.Parameter], int], None]:
    def divides(parameters: list[nn.Parameter], step: int) -> None:
        for parameter in parameters:
            gradient_of(parameter).data.div_(scale(step))

    return divides


def _dynamic(step: int) -> float:
    return 2.0 ** (16 - step // 20)


def masters(dtype: torch.dtype, *, flat: bool, steps: int = STEPS) -> Loop:
    """FP32 copies of a 16-bit model, and a loss scale 2 ** lg that grows by 0.001 in each step."""

    def loop() -> None:
        model = make_model().to(dtype)
        parameters = list(model.parameters())
        copies = [nn.Parameter(each.detach().float()) for each in parameters]
        if flat:
            copies = [nn.Parameter(torch.cat([each.detach().flatten() for each in copies]))]
        optimizer = torch.optim.AdamW(copies, lr=1e-3)
        for step in range(steps):
            scale = 2.0 ** (10 + 0.001 * step)
            model.zero_grad()
            inputs, targets = batch(step)
            loss = (model(inputs.to(dtype)).float() - targets).square().mean()
            (loss * scale).backward()
            gradients = [gradient_of(each).float() / scale for each in parameters]
            if flat:
                gradients = [torch.cat([each.flatten() for each in gradients])]
            for each, gradient in zip(copies, gradients, strict=True):
                each.grad = gradient
            optimizer.step()
            parts = copies[0].split([p.numel() for p in parameters]) if flat else copies
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.data.copy_(part.detach().view_as(parameter))

    return loop


class TestALossScaleThatNoHookSees:
    @pytest.mark.parametrize("scale", [lambda step: 1024.0, _dynamic], ids=["static", "dynamic"])
    def test_is_named_and_the_loss_is_neither_shown_nor_judged(self, judge, scale):
        values = judge(hand_made(_divides(scale), scale))

        assert unsupported(values) == {SCALED}
        assert "loss" not in values and "loss_median" not in values
        assert not conditions(values)

    def test_is_seen_through_a_clipping_that_is_not_seen_either(self, judge):
        def unscales_and_clips(parameters: list[nn.Parameter], step: int) -> None:
            _divides(_dynamic)(parameters, step)
            clips_data(parameters, step)

        assert unsupported(judge(hand_made(unscales_and_clips, _dynamic))) >= {CLIPPED}

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("flat", [False, True])
    def test_of_masters_is_named_and_the_precision_is_that_of_the_model(self, judge, dtype, flat):
        values = judge(masters(dtype, flat=flat))

        assert unsupported(values) == {SCALED}
        (info,) = (name for name in values if name.startswith("run_info{"))
        assert ("bf16" if dtype is torch.bfloat16 else "fp16") in info
        layers = {name for name in values if name.startswith("layer_grad_norm{")}
        assert flat or "layer_grad_norm{0.weight}" in layers
        assert not conditions(values)

    def test_of_masters_of_a_part_is_named_and_layers_have_the_names_of_the_model(self, judge):
        """Norms stay in FP32, and the optimizer steps them as they are."""

        def loop() -> None:
            torch.manual_seed(0)
            wide = nn.Linear(8, 64).bfloat16()
            model = nn.ModuleDict(
                {"wide": wide, "norm": nn.LayerNorm(64), "head": nn.Linear(64, 1)}
            )
            copies = [nn.Parameter(each.detach().float()) for each in wide.parameters()]
            own = [*model["norm"].parameters(), *model["head"].parameters()]
            optimizer = torch.optim.AdamW([*copies, *own], lr=1e-3)
            for step in range(STEPS):
                model.zero_grad()
                inputs, targets = batch(step)
                hidden = model["norm"](wide(inputs.bfloat16()).float())
                ((model["head"](hidden) - targets).square().mean() * 65536.0).backward()
                for each, parameter in zip(copies, wide.parameters(), strict=True):
                    each.grad = gradient_of(parameter).float() / 65536.0
                for each in own:
                    gradient_of(each).data.div_(65536.0)
                optimizer.step()

        values = judge(loop)
        assert unsupported(values) == {SCALED}
        assert any("bf16" in name for name in values if name.startswith("run_info{"))
        assert "layer_grad_norm{wide.weight}" in values

    def test_of_masters_whose_tensors_cannot_be_matched_is_seen_in_the_loss(self, judge):
        """As slices of flat buffers, of which a rank holds a part."""

        def loop() -> None:
            model = make_model().bfloat16()
            weight = next(model.parameters())
            copy_of_half = nn.Parameter(weight.detach().flatten()[:64].float())
            optimizer = torch.optim.AdamW([copy_of_half], lr=1e-3)
            scale = torch.tensor(65536.0)
            for step in range(STEPS):
                model.zero_grad()
                inputs, targets = batch(step)
                loss = (model(inputs.bfloat16()).float() - targets).square().mean()
                (loss * scale).backward()
                copy_of_half.grad = gradient_of(weight).flatten()[:64].float() / scale
                optimizer.step()

        values = judge(loop)
        assert unsupported(values) == {SCALED}
        assert any("bf16" in name for name in values if name.startswith("run_info{"))


def distance() -> None:
    """The gradient of a distance has the norm 1 by nature."""
    point = nn.Linear(8, 1, bias=False)
    optimizer = torch.optim.SGD(point.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        (point.weight - batch(step, 1)[0]).norm().backward()
        optimizer.step()


def constant_gradient() -> None:
    """A linear loss, of which the gradient is the same in each step."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = batch(0)[0]
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()


def clipped_by_torch() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        clip_grad_norm_(model.parameters(), 0.02)
        optimizer.step()


def scaled_by_torch() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=20)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.02)
        scaler.step(optimizer)
        scaler.update()


def accumulating() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(4):
            (loss_of(model, 4 * step + part) / 4).backward()
        optimizer.step()


def curriculum() -> None:
    """The task's weight, and with it loss and norm, doubles again and again."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model, step) * 2.0 ** (step // 16)).backward()
        optimizer.step()


def learns_by_halves() -> None:
    """The loss halves every few steps by learning alone."""
    weight = nn.Linear(8, 1, bias=False)
    nn.init.constant_(weight.weight, 8.0)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0733)
    for _ in range(STEPS):
        optimizer.zero_grad()
        weight.weight.square().sum().mul(0.5).backward()
        optimizer.step()


def large_constant_factor() -> None:
    """A loss that is 1024 times a mean, and is trained as such."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model, step) * 1024.0).backward()
        optimizer.step()


def adversarial() -> None:
    generator, critic = make_model(1), nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    one = torch.optim.Adam(generator.parameters(), lr=1e-3)
    other = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for step in range(STEPS):
        inputs, targets = batch(step)
        if step >= 24:
            other.zero_grad()
            (critic(generator(inputs).detach()) - critic(targets)).mean().backward()
            other.step()
        one.zero_grad()
        (-critic(generator(inputs)).mean()).backward()
        one.step()


def policy_gradient() -> None:
    """The loss lies around 0, with both signs."""
    policy = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for step in range(STEPS):
        inputs = batch(step)[0]
        chosen = torch.distributions.Categorical(logits=policy(inputs))
        actions = torch.multinomial(
            chosen.probs.detach(), 1, generator=torch.Generator().manual_seed(step)
        )[:, 0]
        rewards = inputs[:, 0] - inputs[:, 0].mean()
        optimizer.zero_grad()
        (-(chosen.log_prob(actions) * rewards)).mean().backward()
        optimizer.step()


def with_average_of_weights() -> None:
    """An average of the weights is a copy of the model that gets no gradient."""
    model = make_model()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        with torch.no_grad():
            for own, other in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(other, 0.1)


def frozen_backbone() -> None:
    model = nn.Sequential(make_model(width=32), nn.Linear(1, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 1) for _ in range(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.experts[0](self.body(inputs))
        return found


def idle_experts() -> None:
    model = _Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "loop",
    [
        distance,
        constant_gradient,
        clipped_by_torch,
        scaled_by_torch,
        accumulating,
        curriculum,
        learns_by_halves,
        large_constant_factor,
        adversarial,
        policy_gradient,
        with_average_of_weights,
        frozen_backbone,
        idle_experts,
        masters(torch.bfloat16, flat=False, steps=8),
    ],
    ids=lambda loop: loop.__name__,
)
def test_a_loop_in_good_health_is_not_named(judge, loop):
    values = judge(loop)

    assert unsupported(values) == set()
    assert not any(_WITHOUT in name for name in conditions(values))


class TestLayersWithoutGradient:
    def test_behind_reentrant_checkpointing_are_named(self, judge):
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base = nn.Linear(8, 8).requires_grad_(False)
                self.adapter = nn.Linear(8, 8, bias=False)

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return inputs + torch.tanh(self.base(inputs) + self.adapter(inputs))

        def loop() -> None:
            blocks, head = nn.Sequential(Block(), Block()), nn.Linear(8, 1)
            model = nn.ModuleDict({"blocks": blocks, "head": head})
            trained = [each for each in model.parameters() if each.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-3)
            for step in range(STEPS):
                inputs, targets = batch(step)
                for block in blocks:
                    inputs = checkpoint(block, inputs, use_reentrant=True)
                optimizer.zero_grad()
                (head(inputs) - targets).square().mean().backward()
                optimizer.step()

        with pytest.warns(UserWarning, match="requires_grad"):
            values = judge(loop)
        assert values["layers_without_gradient_ratio"] == 0.5
        assert {name for name in values if name.startswith("layer_without_gradient")} == {
            "layer_without_gradient_info{blocks.0.adapter.weight}",
            "layer_without_gradient_info{blocks.1.adapter.weight}",
        }

    def test_of_an_optimizer_of_a_copy_are_all_and_what_has_gradients_is_named(self, judge):
        def loop() -> None:
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            model = copy.deepcopy(model)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()

        values = judge(loop)
        assert f"{_WITHOUT},warning" in conditions(values)
        assert values["layers_without_gradient_ratio"] == 1.0
        assert "unheld_parameters_info{0.weight, 0.bias, 2.weight, 2.bias}" in values

    def test_are_none_of_those_that_are_frozen(self, judge):
        values = judge(frozen_backbone)

        assert values["layers_without_gradient_ratio"] == 0.0
        assert {name for name in values if name.startswith("layer_grad_norm{")} == {
            "layer_grad_norm{1.weight}",
            "layer_grad_norm{1.bias}",
        }

    def test_that_are_unfrozen_later_are_layers_from_then_on(self, judge):
        def loop() -> None:
            model = make_model()
            model[0].requires_grad_(False)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for step in range(STEPS):
                if step == 30:
                    model[0].requires_grad_(True)
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()

        values = judge(loop)
        assert "layer_grad_norm{0.weight}" in values
        assert values["layers_without_gradient_ratio"] == 0.0


class TestReplacedGradients:
    def test_are_found_by_a_few_elements(self, judge):
        """The loss is finite: what is multiplied is not part of it."""

        def loop() -> None:
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for step in range(STEPS):
                inputs, targets = batch(step)
                hidden = model[0](inputs)
                if step >= 40:
                    hidden = hidden + 0 * (hidden * 0).abs().sqrt()
                optimizer.zero_grad()
                (model[2](hidden) - targets).square().mean().backward()
                for parameter in model.parameters():
                    torch.nan_to_num_(gradient_of(parameter), nan=0.0)
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

        values = judge(loop)
        assert "MpAgentGradientNonFinite,warning" in conditions(values)
        assert "first_nonfinite_info{44,,,backward}" in values
        assert values["grad_nonfinite_replaced_steps_total"] >= 3


class TestALossThatIsNotThatOfTheGradients:
    @pytest.mark.parametrize("mode", [True, False])
    def test_is_not_shown_once_it_is_named(self, judge, mode):
        """A surrogate model makes adversarial inputs; the loss of step 1 has its own in it."""

        def loop() -> None:
            model, surrogate = make_model(), make_model(1).train(mode)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for step in range(4):
                optimizer.zero_grad()
                inputs, targets = batch(step)
                inputs.requires_grad_()
                (1000.0 * surrogate(inputs).square().mean()).backward()
                moved = inputs.detach() + 0.01 * gradient_of(inputs).sign()
                (model(moved) - targets).square().mean().backward()
                optimizer.step()

        values = judge(loop)
        assert unsupported(values) == {OTHER_GRADIENTS}
        assert "loss" not in values

    def test_is_shown_again_where_a_later_step_has_one(self, judge):
        def loop() -> None:
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for step in range(4):
                for _ in range(2 if step < 3 else 1):
                    optimizer.zero_grad()
                    loss_of(model, step).backward()
                for parameter in model.parameters() if step < 3 else ():
                    parameter.grad = 2.0 * gradient_of(parameter)
                optimizer.step()

        values = judge(loop)
        assert unsupported(values) == {OTHER_GRADIENTS}
        assert values["loss"] > 0.0


class TestALossThatIsNeverSeen:
    @staticmethod
    def of_several_numbers(model: nn.Module, step: int) -> None:
        losses = (model(batch(step)[0]) - batch(step)[1]).square()
        losses.backward(torch.full_like(losses, 1.0 / losses.numel()))

    @staticmethod
    def without_backward(model: nn.Module, step: int) -> None:
        parameters = list(model.parameters())
        found = torch.autograd.grad(loss_of(model, step), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient

    @pytest.mark.parametrize("steps", [63, 64])
    @pytest.mark.parametrize("make", [of_several_numbers, without_backward])
    def test_is_named_after_64_steps(self, judge, make, steps):
        def loop() -> None:
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for step in range(steps):
                optimizer.zero_grad()
                make(model, step)
                optimizer.step()

        values = judge(loop)
        assert "loss" not in values
        assert (UNSEEN_LOSS in unsupported(values)) == (steps == 64)
