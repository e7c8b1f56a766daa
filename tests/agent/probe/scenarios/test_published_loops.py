"""Loops as they are in public training scripts, each against what the script itself computes."""

import weakref

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from mp_agent.records.columns import GRADIENT_POSITIONS, STEP_COLUMN_NAMES
from mp_agent.records.steps import OTHER_GRADIENTS
from tests.agent.probe.rings import read_ring
from tests.agent.probe.small_model import gradient_of, make_loss, make_model, sum_squares

_RATE = STEP_COLUMN_NAMES.index("learning_rate")
_CHANGED = "gradients before the script itself changed them"


def _squares(contents) -> list[float]:
    return [
        float(record.gradients[0, GRADIENT_POSITIONS["sum_squares"]]) for record in contents.records
    ]


def _squares_of_first(contents) -> list[float]:
    """Those of the run's own optimizer; others join in later schemas."""
    return [
        float(record.gradients[[share.optimizer for share in schema.shares].index(""), 0])
        for record, schema in zip(contents.records, contents.record_schemas, strict=True)
    ]


class TestOuterOptimizer:
    """DiLoCo: an outer optimizer steps the same parameters every few steps, without a backward."""

    def test_only_the_inner_steps_are_steps_of_the_run(self, watch):
        watched, model = watch(), make_model()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        synchronised = [parameter.detach().clone() for parameter in model.parameters()]
        squares, losses = [], []
        for step in range(9):
            inner.zero_grad()
            loss = make_loss(model, step)
            loss.backward()
            squares.append(sum_squares(model))
            losses.append(loss.item())
            inner.step()
            if step % 3 == 2:
                for before, parameter in zip(synchronised, model.parameters(), strict=True):
                    parameter.grad = before - parameter.data
                    parameter.data.copy_(before)
                outer.step()
                outer.zero_grad()
                synchronised = [parameter.detach().clone() for parameter in model.parameters()]
        contents = watched.read()
        assert _squares(contents) == pytest.approx(squares, rel=1e-6)
        assert contents.column("loss") == pytest.approx(losses)
        assert contents.column("learning_rate") == [1e-3] * 9

    @pytest.mark.parametrize("trained", ["all", "a part"])
    @pytest.mark.parametrize("first", ["inner", "outer"])
    def test_clipping_before_any_step_makes_the_run_s_the_one_that_steps(
        self, watch, first, trained
    ):
        """The probe attaches when both exist, and clipping shows gradients that both hold."""
        model, rates = make_model(), {"inner": 1e-3, "outer": 0.7}
        parameters = list(model.parameters())
        held = {"inner": parameters if trained == "all" else parameters[1:], "outer": parameters}
        parameters[0].requires_grad_(trained == "all")
        made = {
            name: torch.optim.SGD(held[name], lr=rates[name])
            for name in sorted(rates, reverse=first == "outer")
        }
        watched = watch()
        squares = []
        for step in range(10):
            model.zero_grad()
            make_loss(model, step).backward()
            squares.append(sum_squares(model))
            clip_grad_norm_(model.parameters(), 0.1)
            made["inner"].step()
            if step % 5 == 4:
                for parameter in held["inner"]:
                    parameter.grad = torch.ones_like(parameter)
                made["outer"].step()
        contents = read_ring(watched.writer.path, one_schema=False)
        assert _squares(contents) == pytest.approx(squares, rel=1e-6)
        assert contents.column("learning_rate") == pytest.approx([1e-3] * 10)

    def test_a_new_optimizer_for_the_same_parameters_makes_steps(self, watch):
        watched, model, squares = watch(), make_model(), []
        optimizers = []
        for stage in range(3):
            optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(2):
                model.zero_grad()
                make_loss(model, 2 * stage + step).backward()
                squares.append(sum_squares(model))
                optimizers[-1].step()
        assert _squares(watched.read()) == pytest.approx(squares, rel=1e-6)


@pytest.mark.parametrize("replaced", [(0, 1, 2), (1,)], ids=["all", "middle"])
@pytest.mark.parametrize("grouped", [True, False], ids=["groups", "group"])
def test_parameters_that_take_the_place_of_others_are_measured(watch, replaced, grouped):
    """Gaussian splatting: every so many steps each group's parameter is one of other rows."""
    held = [torch.nn.Parameter(torch.randn(4, width)) for width in (3, 2, 1)]
    groups = [{"params": [each]} for each in held] if grouped else [{"params": list(held)}]
    optimizer = torch.optim.Adam(groups, lr=0.01)
    gone = [weakref.ref(held[place]) for place in replaced]
    watched, squares = watch(), []
    for step in range(12):
        if step == 5:
            for place in replaced:
                old = held[place]
                held[place] = torch.nn.Parameter(torch.cat([old.detach(), old.detach()]))
                params = optimizer.param_groups[place if grouped else 0]["params"]
                params[0 if grouped else place] = held[place]
                optimizer.state.pop(old)
                del old
        optimizer.zero_grad()
        torch.cat([each.flatten() for each in held]).square().sum().backward()
        squares.append(sum(gradient_of(each).square().sum().item() for each in held))
        optimizer.step()
    watched.probe.flush()
    assert _squares(watched.read(one_schema=False)) == pytest.approx(squares, rel=1e-5)
    assert not any(each() is not None for each in gone)


def _clip_by_hand(model: torch.nn.Module, limit: float) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(limit / (norm + 1e-6))


def _clip_adaptively(model: torch.nn.Module, limit: float) -> None:
    for parameter in model.parameters():
        largest = parameter.detach().norm().clamp(min=1e-3) * limit
        assert parameter.grad is not None
        gradient = parameter.grad.detach()
        gradient.copy_(gradient * (largest / gradient.norm().clamp(min=1e-6)).clamp(max=1.0))


class TestGradientsChangedByTheScript:
    @pytest.mark.parametrize("clip", [_clip_by_hand, _clip_adaptively])
    def test_what_is_shown_is_named(self, watch, clip):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        squares = []
        for step in range(3):
            optimizer.zero_grad()
            make_loss(model, step).backward()
            clip(model, 1e-3)
            squares.append(sum_squares(model))
            optimizer.step()
        contents = watched.read()
        assert contents.state.unsupported == (_CHANGED,)
        assert _squares(contents) == pytest.approx(squares, rel=1e-6)

    @pytest.mark.parametrize("set_to_none", [False, True])
    def test_nothing_is_said_of_what_the_hooks_see(self, watch, set_to_none):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(4):
            for micro in range(2):
                scaler.scale(make_loss(model, 2 * step + micro) / 2).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1e-2)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
        assert watched.read().state.unsupported == ()

    def test_nothing_is_said_of_master_weights(self, watch):
        watched, model = watch(), make_model().bfloat16()
        masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        for master in masters:
            master.grad = torch.zeros_like(master)
        optimizer = torch.optim.SGD(masters, lr=0.1)
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(3, 4).bfloat16()).pow(2).mean().backward()
            for parameter, master in zip(model.parameters(), masters, strict=True):
                assert master.grad is not None and parameter.grad is not None
                master.grad.copy_(parameter.grad)
            optimizer.step()
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.data.copy_(master.data)
        assert watched.read().state.unsupported == ()


class TestGradientsThatTheScriptPutsTogether:
    """The loss is unknown where the gradients are not those of the backwards that were seen."""

    UNKNOWN = (OTHER_GRADIENTS,)

    @pytest.mark.parametrize("sets", ["another tensor", "in place"])
    def test_projected_gradients_of_several_tasks_have_no_loss(self, watch, sets):
        """PCGrad: a backward per task, the gradients cleared in between."""
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        squares = []
        for step in range(3):
            of_tasks = []
            for task in range(3):
                optimizer.zero_grad()
                make_loss(model, 3 * step + task).backward()
                of_tasks.append([gradient_of(one).clone() for one in model.parameters()])
            for place, parameter in enumerate(model.parameters()):
                projected = torch.stack([gradients[place] for gradients in of_tasks]).sum(0)
                if sets == "in place":
                    gradient_of(parameter).copy_(projected)
                else:
                    parameter.grad = projected
            squares.append(sum_squares(model))
            optimizer.step()
        contents = watched.read()
        assert _squares(contents) == pytest.approx(squares, rel=1e-6)
        # In the first step that of the last task is left: whose gradients are cleared is unknown.
        assert all("loss" not in contents.values(step) for step in (1, 2))
        assert set(self.UNKNOWN) <= set(watched.state().unsupported)

    @pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
    def test_non_finite_losses_of_micro_batches_are_kept(self, watch, bad):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            for micro_batch in range(4):
                (make_loss(model, micro_batch) * bad).backward()
            optimizer.step()
        contents = watched.read()
        assert [contents.values(step)["loss_nonfinite"] for step in range(3)] == [1.0] * 3
        assert not set(self.UNKNOWN) & set(watched.state().unsupported)

    def test_a_non_finite_loss_is_kept_where_a_finite_one_is_unknown(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            of_tasks = []
            for task in range(2):
                optimizer.zero_grad()
                (make_loss(model, task) * (float("nan") if task else 1.0)).backward()
                of_tasks.append([gradient_of(one).clone() for one in model.parameters()])
            for parameter, gradient in zip(model.parameters(), of_tasks[0], strict=True):
                parameter.grad = gradient
            optimizer.step()
        contents = watched.read()
        assert [contents.values(step)["loss_nonfinite"] for step in range(3)] == [1.0] * 3

    def test_the_loss_of_chunks_that_their_sum_continues_is_unknown(self, watch):
        """A backward per chunk for the head, and one of their sum for the rest of the model."""
        watched, body, head = watch(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            hidden = body(torch.randn(6, 4))
            chunks = [part.detach().requires_grad_() for part in hidden.chunk(3)]
            total = torch.zeros(())
            for chunk in chunks:
                loss = head(chunk).pow(2).sum()
                loss.backward()
                total = total + loss.detach()
            gradients = torch.cat([gradient_of(chunk) for chunk in chunks])
            surrogate = (hidden * gradients).sum()
            (surrogate + (total - surrogate.detach())).backward()
            optimizer.step()
        contents = watched.read()
        assert all("loss" not in contents.values(step) for step in range(3))
        assert set(self.UNKNOWN) <= set(watched.state().unsupported)

    def test_gradients_of_a_batch_that_is_given_up_leave_the_next_one_s_loss(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            for attempt in range(2):
                optimizer.zero_grad()
                loss = make_loss(model, 2 * step + attempt)
                loss.backward()
            losses.append(loss.item())
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        assert watched.read().column("loss") == pytest.approx(losses)
        assert watched.state().unsupported == ()

    @pytest.mark.parametrize("seeded", [False, True])
    def test_a_loss_of_outputs_alone_is_not_added_to_its_surrogates(self, watch, seeded):
        """GradCache: the loss of all outputs first, then a backward through each part of them."""
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(step)
            parts = torch.randn(2, 3, 4)
            with torch.no_grad():
                outputs = torch.cat([model(part) for part in parts])
            outputs.requires_grad_()
            loss = outputs.pow(2).mean()
            loss.backward()
            losses.append(loss.item())
            for part, cached in zip(parts, gradient_of(outputs).chunk(2), strict=True):
                if seeded:
                    model(part).backward(cached)
                else:
                    (model(part) * cached).sum().backward()
            optimizer.step()
        contents = watched.read()
        if seeded:
            assert contents.column("loss") == pytest.approx(losses)
            assert watched.state().unsupported == ()
        else:  # which parameters the run has is known from its first step on
            assert all("loss" not in contents.values(step) for step in (1, 2))
            assert watched.state().unsupported == self.UNKNOWN

    def test_losses_of_parts_of_a_model_add_up(self, watch):
        watched = watch()
        model = torch.nn.ModuleList([make_model(seed) for seed in range(6)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            parts = [make_loss(part, step) for part in model]
            for part in parts:
                part.backward()
            losses.append(sum(part.item() for part in parts))
            optimizer.step()
        assert watched.read().column("loss") == pytest.approx(losses)
        assert watched.state().unsupported == ()


def test_the_first_step_of_two_passes_has_loss_and_gradients_of_the_same_pass(watch):
    """Sharpness-aware minimization, before it is known which optimizer will step."""
    watched, model = watch(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_loss(model, 0).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=0.5)
    optimizer.zero_grad()
    loss = make_loss(model, 0)
    loss.backward()
    squares = sum_squares(model)
    optimizer.step()
    contents = watched.read()
    assert _squares(contents) == pytest.approx([squares], rel=1e-6)
    assert contents.column("loss") == pytest.approx([loss.item()])


class TestActorAndCritic:
    """Models that are trained in turns: the run is what the first of their optimizers trains."""

    def test_an_actor_that_steps_twice_after_two_critic_steps_is_no_successor(self, watch):
        """CleanRL's SAC: delayed policy updates, with their own temperature."""
        watched, critic, actor = watch(), make_model(0), torch.nn.Linear(4, 4)
        temperature = torch.zeros(1, requires_grad=True)
        critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
        actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
        temperature_optimizer = torch.optim.Adam([temperature], lr=1e-3)
        squares = []
        for step in range(1, 9):
            critic_optimizer.zero_grad()
            make_loss(critic, step).backward()
            squares.append(sum_squares(critic))
            critic_optimizer.step()
            for _ in range(0 if step % 2 else 2):
                actor_optimizer.zero_grad()
                critic(actor(torch.randn(3, 4))).mean().backward()
                actor_optimizer.step()
                temperature_optimizer.zero_grad()
                (temperature.exp() * 0.3).mean().backward()
                temperature_optimizer.step()
        contents = read_ring(watched.writer.path, one_schema=False)
        assert _squares_of_first(contents) == pytest.approx(squares, rel=1e-6)
        assert {record.values[_RATE] for record in contents.records} == {1e-3}

    def test_a_world_model_that_steps_twice_after_the_actor_is_no_successor(self, watch):
        """Neither of its backwards passes through the critic, but the actor's does."""
        watched, critic, actor, world = watch(), make_model(0), torch.nn.Linear(4, 4), make_model(1)
        optimizers = [torch.optim.Adam(each.parameters()) for each in (critic, actor, world)]
        for step in range(8):
            losses = [lambda: make_loss(critic), lambda: critic(actor(torch.ones(3, 4))).mean()]
            for number in (0,) if step < 4 else (0, 1, 2, 2):
                optimizers[number].zero_grad()
                (losses[number]() if number < 2 else make_loss(world)).backward()
                optimizers[number].step()
        assert watched.steps_reported == 8

    @pytest.mark.slow
    def test_the_first_model_is_the_runs_again_when_its_turn_comes(self, watch):
        """Spinning Up's PPO: many steps of the policy, then many of the value function."""
        watched, models = watch(), [make_model(0), make_model(1)]
        optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
        squares, turns, steps = [], 4, 20
        for turn in range(turns):
            for model, optimizer in zip(models, optimizers, strict=True):
                for step in range(steps):
                    optimizer.zero_grad()
                    make_loss(model, steps * turn + step).backward()
                    if model is models[0]:
                        squares.append(sum_squares(model))
                    optimizer.step()
        seen = _squares_of_first(read_ring(watched.writer.path, one_schema=False))
        assert len(seen) <= (turns + 1) * steps  # the other's first turn may be taken for the run's
        assert seen[-steps * (turns - 1) :] == pytest.approx(squares[steps:], rel=1e-6)


def test_a_loop_that_updates_weights_by_hand_is_warned_that_nothing_is_measured(watch):
    """PyTorch's own word_language_model and regression examples."""
    watched, model = watch(), make_model()
    for step in range(80):
        model.zero_grad()
        make_loss(model, step).backward()
        clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)
    assert watched.state().unsupported == ("training without an optimizer that mp_agent knows",)


def test_nor_is_the_optimizer_that_only_clears_expected_to_step(watch):
    watched, model = watch(), make_model()
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(70):
        optimizer.zero_grad()
        make_loss(model, step).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)
    assert watched.state().unsupported == ("training without an optimizer that mp_agent knows",)


class FusedIntoBackward(torch.optim.Optimizer):
    """Updates weights in hooks of backward and never steps, as AdaLOMO of pytorch_optimizer.

    The hook of a parameter updates those whose gradients exist by then, so that one waits for the
    next backward.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        for parameter in model.parameters():
            parameter.register_hook(self._update)

    @torch.no_grad()
    def _update(self, gradient: torch.Tensor) -> torch.Tensor:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
        return gradient


def test_an_optimizer_that_updates_in_backward_alone_is_said_not_to_be_known(watch):
    watched, model = watch(), make_model()
    optimizer = FusedIntoBackward(model)
    before = [each.detach().clone() for each in model.parameters()]
    for step in range(2100):
        make_loss(model, step).backward()
        if step == 70:
            seen = watched.state().unsupported
    changed = [
        not each.equal(was)
        for each, was in zip(optimizer.param_groups[0]["params"], before, strict=True)
    ]
    assert all(changed)
    assert watched.state().unsupported == seen
    assert seen == ("training without an optimizer that mp_agent knows",)


_NEVER_STEPPED = ("gradients of an optimizer that has not stepped in 64 backwards",)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("clears", ["optimizer", "model"])
def test_a_loop_whose_optimizer_never_steps_is_warned_after_64_backwards(watch, clears, clips):
    watched, model = watch(), make_model()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(70):
        (model if clears == "model" else optimizer).zero_grad()
        make_loss(model, step).backward()
        if clips:
            clip_grad_norm_(model.parameters(), 1.0)
    assert watched.state().unsupported == _NEVER_STEPPED


@pytest.mark.parametrize(("backwards", "seen"), [(1024, ()), (2100, _NEVER_STEPPED)])
def test_gradients_may_add_up_for_a_thousand_backwards_before_the_first_step(
    watch, backwards, seen
):
    watched, model = watch(), make_model()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(backwards):
        make_loss(model, step).backward()
    optimizer.step()
    assert watched.state().unsupported == seen


def test_gradients_of_inputs_alone_are_no_training(watch):
    """Attribution, with a model that is frozen."""
    watched, model = watch(), make_model().requires_grad_(False)
    for _ in range(80):
        inputs = torch.randn(3, 4, requires_grad=True)
        model(inputs).sum().backward()
    watch_state = watched.state()
    assert (watch_state.unsupported, watch_state.probe_errors) == ((), 0)
