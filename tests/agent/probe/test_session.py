"""A probe in this process: what it makes of the many ways to write a training loop."""

import gc
import weakref
from math import inf, isnan, nan

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_
from torch.utils.checkpoint import checkpoint

from mp_agent.records.steps import Phase
from mp_agent.ring.reader import RingReader


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def make_loss(model: nn.Module, seed: int = 0) -> torch.Tensor:
    return model(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).pow(2).mean()


def sum_squares(model: nn.Module) -> float:
    gradients = (parameter.grad for parameter in model.parameters())
    return sum(float(grad.double().pow(2).sum()) for grad in gradients if grad is not None)


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

    def test_is_the_mean_over_micro_batches(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        losses = [make_loss(model, seed) for seed in range(3)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        expected = sum(loss.item() for loss in losses) / 3
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

        model[0].weight.register_hook(hook)
        loss = make_loss(model)
        loss.backward()
        optimizer.step()
        assert watched.read().values(0)["loss"] == pytest.approx(loss.item())


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
        assert max(float(p.grad.abs().max()) for p in model.parameters()) <= 1.001e-6
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

    def test_a_closure_counts_the_step_without_gradients(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = make_loss(model)
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.step(closure=closure)
        contents = watched.read()
        assert len(contents.records) == 2
        assert all(isnan(value) for value in contents.gradients(1).values())
        assert "optimizer step with a closure" in contents.state.unsupported

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


class TestStep:
    def test_column_is_absent_on_the_first_and_positive_afterwards(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            make_loss(model).backward()
            optimizer.step()
        seconds = watched.read().column("step_seconds")
        assert isnan(seconds[0])
        assert seconds[1] > 0 < seconds[2]

    def test_number_of_the_trainer_is_kept_and_counted_on(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            make_loss(model).backward()
            optimizer.step()
            if watched.steps_told == 1:
                watched.probe.observe(step=1000)
        records = watched.read().records
        assert [record.sequence for record in records] == [1, 2, 3]
        assert [record.step for record in records] == [1, 1000, 1001]

    def test_tells_on_step_after_each(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            make_loss(model).backward()
            optimizer.step()
        assert watched.steps_told == 4

    def test_takes_learning_rate_and_tokens(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25))
        watched.probe.observe(tokens=100)
        watched.probe.observe(tokens=28)
        make_loss(model).backward()
        optimizer.step()
        watched.probe.observe(lr=0.125)
        make_loss(model).backward()
        optimizer.step()
        contents = watched.read()
        assert contents.values(0)["learning_rate"] == 0.25
        assert contents.values(0)["tokens"] == 128
        assert contents.values(1)["learning_rate"] == 0.125
        assert "tokens" not in contents.values(1)

    def test_that_raised_leaves_an_open_record_and_is_done_again(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        handle = optimizer.register_step_post_hook(_fail)
        make_loss(model).backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        contents = watched.read()
        assert contents.records == []
        assert contents.open_record.sequence == 1
        assert contents.open_record.gradients[0, 0] == pytest.approx(sum_squares(model), rel=1e-6)
        handle.remove()
        make_loss(model).backward()
        optimizer.step()
        contents = watched.read()
        assert [record.sequence for record in contents.records] == [1]
        assert contents.open_record is None

    def test_of_an_optimizer_within_an_optimizer_counts_once(self, watch):
        watched, model = watch(), make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = _Outer(inner)
        make_loss(model).backward()
        outer.step()
        contents = watched.read()
        assert len(contents.records) == 1
        assert contents.state.unsupported == ()

    def test_of_the_next_optimizer_counts_once_the_first_is_gone(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        make_loss(model).backward()
        optimizer.step()
        gone = [weakref.ref(each) for each in (optimizer, model, model[0].weight)]
        del optimizer, model
        gc.collect()
        assert [reference() for reference in gone] == [None] * 3, "the probe keeps them alive"
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters())
        make_loss(model).backward()
        optimizer.step()
        assert watched.steps_told == 2
        assert watched.read().state.committed_sequence == 2

    def test_of_a_grown_optimizer_is_measured_whole(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model[0].parameters())
        make_loss(model).backward()
        optimizer.step()
        optimizer.add_param_group({"params": list(model[2].parameters())})
        make_loss(model).backward()
        optimizer.step()
        reader = RingReader.open(watched.writer.path)
        schemas, elements = [], []
        for _ in range(2):
            schemas.append(reader.schema)
            records, _ = reader.steps_after(len(elements))
            elements += [record.gradients[0, 5] for record in records]
        reader.close()
        assert [len(schema.layers) for schema in schemas] == [2, 4]
        assert elements == [40, 58]


class TestLayers:
    def test_are_looked_at_by_plan(self, watch):
        watched, model = watch(layer_interval=1000), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(30):
            make_loss(model).backward()
            optimizer.step()
        assert [table.sequence for table in watched.read().layers] == [1, 10, 20, 30]

    def test_are_looked_at_when_a_gradient_is_not_finite(self, watch):
        watched, model = watch(layer_interval=1000), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(1, 9):
            optimizer.zero_grad()
            make_loss(model).backward()
            if step == 5:
                model[2].bias.grad[0] = nan
            optimizer.step()
            model[2].bias.data.nan_to_num_()
        layers = watched.read().layers
        assert [table.sequence for table in layers] == [1, 5]
        assert layers[1].rows[:, 3].tolist() == [0, 0, 0, 1]

    def test_are_looked_at_when_the_norm_is_high(self, watch):
        watched, model = watch(layer_interval=1000), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(1, 6):
            optimizer.zero_grad()
            (make_loss(model) * (1e6 if step == 3 else 1.0)).backward()
            optimizer.step()
        assert [table.sequence for table in watched.read().layers] == [1, 3]

    def test_of_a_step_that_never_ended_are_flushed(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.register_step_post_hook(_fail)
        make_loss(model).backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        watched.probe.flush()
        assert [table.sequence for table in watched.read().layers] == [1]


class TestFlush:
    def test_tells_nothing_of_micro_batches_left_over(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        make_loss(model).backward()
        optimizer.step()
        make_loss(model).backward()
        watched.probe.flush()
        assert watched.read().open_record is None

    def test_tells_of_a_loss_that_is_not_finite_and_never_reached_the_optimizer(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        make_loss(model).backward()
        optimizer.step()
        (make_loss(model) * nan).backward()
        watched.probe.flush()
        record = watched.read().open_record
        assert record.sequence == 2
        assert record.values[1] == 1.0
        assert all(isnan(value) for value in record.gradients[0])

    def test_before_any_step_does_nothing(self, watch):
        watched = watch()
        watched.probe.connect()
        watched.probe.flush()
        assert watched.state().probe_errors == 0


class TestPhase:
    def test_follows_training(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        seen = []
        model[0].weight.register_hook(lambda _: seen.append(watched.state().phase))
        loss = make_loss(model)
        loss.backward()
        seen.append(watched.state().phase)
        optimizer.register_step_post_hook(lambda *_: seen.append(watched.state().phase))
        optimizer.step()
        seen.append(watched.state().phase)
        assert seen == [Phase.BACKWARD, Phase.FORWARD, Phase.OPTIMIZER, Phase.FORWARD]

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("eval", (Phase.EVAL, "eval")),
            ("checkpoint", (Phase.CHECKPOINT, "checkpoint")),
            ("warm-up", (Phase.OTHER, "warm-up")),
        ],
    )
    def test_is_as_the_user_says_until_left(self, watch, name, expected):
        watched = watch()
        watched.probe.connect()
        with watched.probe.phase("outer"):
            with watched.probe.phase(name):
                state = watched.state()
                assert (state.phase, state.phase_name) == expected
            assert watched.state().phase_name == "outer"
        assert watched.state().phase is Phase.STARTING

    def test_lets_exceptions_of_the_user_through(self, watch):
        with pytest.raises(KeyError), watch().probe.phase("eval"):
            raise KeyError


def _fail(*_: object) -> None:
    raise ZeroDivisionError


class _Outer(torch.optim.Optimizer):
    """A wrapper that is itself an optimizer, as some libraries have it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)
