"""Several optimizers in one process: each measured at its own step, in the record of the first."""

from math import isnan, nan
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.agent.probe.rings import RingContents, read_ring
from tests.agent.probe.small_model import make_loss, make_model, sum_squares


class Seen:
    """Sums of squares of each record, by the label of the optimizer."""

    def __init__(self, watched) -> None:
        self.contents: RingContents = read_ring(watched.writer.path, one_schema=False)

    def of(self, label: str) -> list[float]:
        return [
            next((row[0] for share, row in rows if share.optimizer == label), nan)
            for rows in self._rows()
        ]

    def _rows(self):
        for schema, record in zip(self.contents.record_schemas, self.contents.records, strict=True):
            yield list(zip(schema.shares, record.gradients.tolist(), strict=True))


def two(kind=torch.optim.SGD, **options):
    models = make_model(1), make_model(2)
    return models, [kind(model.parameters(), lr=1e-3, **options) for model in models]


def train_two_that_are_gone_then(last) -> list[float]:
    """Return the sums of squares of the first one's steps; the fourth has no second one.

    last: returns the fourth step's loss; no optimizer steps after one that is not finite.
    """
    (first, second), (one, other) = two()
    expected = []
    for seed in range(4):
        one.zero_grad()
        loss = make_loss(first, seed) if seed < 3 else last(first, seed)
        loss.backward()
        if loss.isnan():
            break
        expected.append(sum_squares(first))
        one.step()
        if seed < 3:
            other.zero_grad()
            make_loss(second, seed).backward()
            other.step()
    return expected


class TestOneAfterTheOther:
    def test_each_is_measured_at_its_own_step(self, watch):
        watched, ((first, second), (one, other)) = watch(), two()
        expected: dict[str, list[float]] = {"": [], "1": []}
        for seed in range(4):
            for label, model, optimizer in (("", first, one), ("1", second, other)):
                optimizer.zero_grad()
                make_loss(model, seed).backward()
                expected[label].append(sum_squares(model))
                optimizer.step()
        seen = Seen(watched)
        assert seen.of("") == pytest.approx(expected[""], rel=1e-6)
        assert isnan(seen.of("1")[0]), "that there would be another one was not known yet"
        assert seen.of("1")[1:] == pytest.approx(expected["1"][1:], rel=1e-6)
        assert watched.steps_reported == 4
        assert seen.contents.state.unsupported == ()

    def test_the_loss_is_that_of_the_first(self, watch):
        watched, ((first, second), (one, other)) = watch(), two()
        expected = []
        for seed in range(3):
            loss = make_loss(first, seed)
            expected.append(loss.item())
            loss.backward()
            one.step()
            (1000.0 * make_loss(second, seed)).backward()
            other.step()
        watched.probe.flush()
        seen = read_ring(watched.writer.path, one_schema=False)
        assert seen.column("loss") == pytest.approx(expected)

    def test_the_loss_is_that_of_the_first_though_it_steps_last(self, watch):
        (first, second), (one, other) = two()
        watched = watch(optimizer=one)
        expected = []
        for seed in range(3):
            (1000.0 * make_loss(second, seed)).backward()
            other.step()
            loss = make_loss(first, seed)
            expected.append(loss.item())
            loss.backward()
            one.step()
        seen = Seen(watched)
        assert seen.contents.column("loss") == pytest.approx(expected)
        assert not any(map(isnan, seen.of("1")))

    @pytest.mark.parametrize("in_a_module", [False, True])
    def test_a_temperature_that_steps_first_is_not_the_run(self, watch, in_a_module):
        """Soft actor-critic of Stable-Baselines3, and of d3rlpy, which puts it in a module."""
        watched, ((critic, _), (one, _)) = watch(), two()
        holder, log_alpha = nn.Module(), nn.Parameter(torch.ones(1).log())
        if in_a_module:
            holder.number = log_alpha
        temperature = torch.optim.SGD([log_alpha], lr=1e-3)
        losses, norms = [], []
        for seed in range(4):
            temperature.zero_grad()
            (3.0 * log_alpha).sum().backward()
            temperature.step()
            one.zero_grad()
            loss = make_loss(critic, seed)
            loss.backward()
            losses.append(loss.item())
            norms.append(sum_squares(critic))
            one.step()
        watched.probe.flush()
        seen = Seen(watched)
        assert seen.contents.column("loss") == pytest.approx(losses)
        assert seen.of("") == pytest.approx(norms, rel=1e-6)
        assert seen.of("1")[1:] == pytest.approx([9.0] * 3)

    def test_a_temperature_that_is_passed_to_init_is_the_run(self, watch):
        (critic, _), (one, _) = two()
        log_alpha = torch.ones(1).requires_grad_()
        temperature = torch.optim.SGD([log_alpha], lr=1e-3)
        watched = watch(optimizer=temperature)
        for seed in range(3):
            for optimizer, loss in ((temperature, (3.0 * log_alpha).sum()), (one, None)):
                optimizer.zero_grad()
                (make_loss(critic, seed) if loss is None else loss).backward()
                optimizer.step()
        assert Seen(watched).of("") == pytest.approx([9.0] * 3)

    def test_a_number_that_is_trained_alone_is_the_run(self, watch):
        watched, (_, _others) = watch(), two()
        number = torch.ones(1).requires_grad_()
        only = torch.optim.SGD([number], lr=1e-3)
        for _ in range(4):
            only.zero_grad()
            (3.0 * number).sum().backward()
            only.step()
        assert Seen(watched).of("")[-3:] == pytest.approx([9.0] * 3)

    def test_one_that_steps_seldom_has_no_row_in_between(self, watch):
        watched, ((first, second), (one, other)) = watch(), two()
        for number in range(8):
            make_loss(first, number).backward()
            one.step()
            if number % 3 == 2:
                make_loss(second, number).backward()
                other.step()
        watched.probe.flush()
        seen = Seen(watched)
        assert len(seen.of("")) == 8
        assert 0 < sum(map(isnan, seen.of("1"))) < 8

    def test_one_that_never_steps_again_delays_records_no_longer(self, watch):
        watched, ((first, second), (one, other)) = watch(), two()
        for number in range(6):
            make_loss(first, number).backward()
            one.step()
            if number < 2:
                make_loss(second, number).backward()
                other.step()
        assert len(Seen(watched).of("")) == 6

    @pytest.mark.slow
    def test_the_next_one_takes_over_when_the_first_is_gone(self, watch):
        watched, ((first, second), optimizers) = watch(), two()
        for number in range(4):
            if number == 2:
                optimizers[0] = None
            for model, optimizer in zip((first, second), optimizers, strict=True):
                if optimizer is not None:
                    make_loss(model, number).backward()
                    optimizer.step()
        seen = Seen(watched)
        assert watched.steps_reported == 4
        assert {share.optimizer for share in seen.contents.schema.shares} == {""}

    def test_the_last_step_is_recorded_although_all_end_before_the_one_that_it_awaits(self, watch):
        watched = watch()
        expected = train_two_that_are_gone_then(last=make_loss)
        watched.probe.flush()
        assert Seen(watched).of("") == pytest.approx(expected, rel=1e-6)
        assert watched.steps_reported == len(expected)

    def test_the_last_step_on_a_device_is_recorded_although_all_are_gone(self, watch, device):
        watched = watch()
        expected = train_two_that_are_gone_then(last=make_loss)
        device.run()
        watched.probe.flush()
        assert Seen(watched).of("") == pytest.approx(expected, rel=1e-6)

    def test_the_last_step_of_a_fold_keeps_its_numbers_when_the_next_fold_begins(self, watch):
        watched = watch()
        expected = train_two_that_are_gone_then(last=make_loss)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for seed in range(2):
            optimizer.zero_grad()
            make_loss(model, seed).backward()
            expected.append(sum_squares(model))
            optimizer.step()
        watched.probe.flush()
        seen = Seen(watched)
        assert seen.of("") == pytest.approx(expected, rel=1e-6)
        own = [
            sum(not schema.shares[layer.share].optimizer for layer in schema.layers)
            for schema in seen.contents.record_schemas
        ]
        assert own == [4, 4, 4, 4, 2, 2], "a step's layers are those of its own model"

    def test_a_successors_first_step_has_the_layers_of_its_own_model(self, watch):
        watched = watch(layer_interval=1)
        models = nn.ModuleDict({"old": nn.Linear(4, 2)}), nn.ModuleDict({"new": nn.Linear(4, 2)})
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
        expected = []
        for model, name, optimizer in zip(models, ("old", "new"), optimizers, strict=True):
            for seed in range(4):
                optimizer.zero_grad()
                make_loss(model[name], seed).backward()
                gradients = (parameter.grad for parameter in model.parameters())
                expected.append(
                    [float(each.pow(2).sum()) for each in gradients if each is not None]
                )
                optimizer.step()
        watched.probe.flush()
        contents = read_ring(watched.writer.path, one_schema=False)
        names = [
            {layer.name.split(".")[0] for layer in schema.layers}
            for schema in contents.layer_schemas
        ]
        assert names == [{"old"}] * 4 + [{"new"}] * 4
        seen = [table.gradients[:, 0].tolist() for table in contents.layers]
        assert seen == [pytest.approx(each, rel=1e-6) for each in expected]

    def test_a_loss_that_ended_the_loop_is_recorded_although_they_are_gone(self, watch):
        watched = watch()
        train_two_that_are_gone_then(last=lambda model, seed: make_loss(model, seed) * nan)
        watched.probe.flush()
        contents = read_ring(watched.writer.path, one_schema=False)
        assert contents.open_record is not None
        assert contents.open_record.sequence == 4
        assert contents.open_record.values[1] == 1.0

    @pytest.mark.slow
    def test_a_ninth_one_is_reported_as_left_out(self, watch):
        watched = watch()
        models = [make_model(seed) for seed in range(9)]
        optimizers = [torch.optim.SGD(model.parameters()) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            make_loss(model).backward()
            optimizer.step()
        watched.probe.flush()
        assert watched.state().unsupported == ("more than 8 optimizers",)


class TestOfOneModel:
    @pytest.mark.slow
    @pytest.mark.parametrize("clips", [False, True])
    def test_all_stand_in_the_record_of_their_iteration_from_the_first_on(self, watch, clips):
        watched, model = watch(), make_model()
        optimizers = [torch.optim.SGD(model[i].parameters(), lr=1e-3) for i in (0, 2)]
        expected: dict[str, list[float]] = {"": [], "1": []}
        for seed in range(3):
            model.zero_grad()
            make_loss(model, seed).backward()
            expected[""].append(sum_squares(model[0]))
            expected["1"].append(sum_squares(model[2]))
            if clips:
                clip_grad_norm_(model.parameters(), 1e-4)
            for optimizer in optimizers:
                optimizer.step()
        seen = Seen(watched)
        assert seen.of("") == pytest.approx(expected[""], rel=1e-6)
        assert seen.of("1") == pytest.approx(expected["1"], rel=1e-6)
        assert all(seen.contents.column("loss"))

    def test_a_wrapper_of_equal_parameters_is_no_second_one(self, watch):
        watched, model = watch(), make_model()
        replaced = torch.optim.SGD(model.parameters(), lr=1e-3)
        make_loss(model).backward()
        replaced.step()
        successor = torch.optim.AdamW(model.parameters(), lr=1e-3)
        make_loss(model).backward()
        successor.step()
        contents = watched.read()
        assert len(contents.records) == 2
        assert len(contents.schema.shares) == 1

    def test_one_with_more_parameters_takes_the_place_of_the_first(self, watch):
        watched, model = watch(), make_model()
        warm_up = torch.optim.SGD(model[2].parameters(), lr=1e-3)
        make_loss(model).backward()
        warm_up.step()
        whole = torch.optim.SGD(model.parameters(), lr=1e-3)
        make_loss(model).backward()
        whole.step()
        seen = Seen(watched)
        assert len(seen.of("")) == 2
        assert seen.of("")[1] == pytest.approx(sum_squares(model), rel=1e-6)

    def test_clipping_with_a_frozen_parameter_first_is_looked_behind(self, watch):
        watched, model = watch(), make_model()
        model[0].weight.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            make_loss(model).backward()
            expected = sum_squares(model)
            clip_grad_norm_(model.parameters(), 1e-4)
            optimizer.step()
        assert Seen(watched).of("")[1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("explicit", [False, True])
class TestUnderOneScaler:
    @pytest.mark.slow
    def test_all_values_are_unscaled(self, watch, fused, explicit):
        watched, ((first, second), (one, other)) = watch(), two(torch.optim.AdamW, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        expected: dict[str, list[float]] = {"": [], "1": []}
        for seed in range(4):
            scale = scaler.get_scale()
            for label, model, optimizer in (("", first, one), ("1", second, other)):
                optimizer.zero_grad()
                scaler.scale(make_loss(model, seed)).backward()
                expected[label].append(sum_squares(model) / scale**2)
                if explicit:
                    scaler.unscale_(optimizer)
                    clip_grad_norm_(model.parameters(), 1e-3)
                scaler.step(optimizer)
            scaler.update()
        seen = Seen(watched)
        assert seen.of("") == pytest.approx(expected[""], rel=1e-6)
        assert seen.of("1")[1:] == pytest.approx(expected["1"][1:], rel=1e-6)
        assert seen.contents.column("skipped") == [0.0] * 4

    @pytest.mark.slow
    def test_an_overflow_of_another_is_no_step_of_it_and_no_skip_of_the_first(
        self, watch, fused, explicit
    ):
        watched, ((first, second), (one, other)) = watch(), two(torch.optim.AdamW, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for seed in range(4):
            for model, optimizer in ((first, one), (second, other)):
                optimizer.zero_grad()
                poison = torch.inf if model is second and seed == 2 else 1.0
                scaler.scale(make_loss(model, seed) * poison).backward()
                if explicit:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()
        seen = Seen(watched)
        assert seen.contents.column("skipped") == [0.0] * 4
        assert [isnan(value) for value in seen.of("1")] == [True, False, True, False]
        assert seen.contents.state.probe_errors == 0


def test_one_that_does_without_the_scaler_of_the_other_is_not_taken_for_scaled(watch):
    watched, ((first, second), (one, other)) = watch(), two()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected: dict[str, list[float]] = {"": [], "1": []}
    for seed in range(4):
        one.zero_grad()
        scaler.scale(make_loss(first, seed)).backward()
        expected[""].append(sum_squares(first) / 1024.0**2)
        clip_grad_norm_(first.parameters(), 1e6)  # before it is unscaled
        scaler.step(one)
        scaler.update()
        other.zero_grad()
        make_loss(second, seed).backward()
        expected["1"].append(sum_squares(second))
        clip_grad_norm_(second.parameters(), 1e-3)
        other.step()
    seen = Seen(watched)
    assert seen.of("") == pytest.approx(expected[""], rel=1e-6)
    assert seen.of("1")[1:] == pytest.approx(expected["1"][1:], rel=1e-6)


class TestWithinBackward:
    """Each parameter is stepped as soon as its gradient is there."""

    @staticmethod
    def train(model: nn.Module, steps: int) -> list[float]:
        optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}

        def step(parameter: Any) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        losses = []
        for seed in range(steps):
            loss = make_loss(model, seed)
            losses.append(loss.item())
            loss.backward()
        return losses

    def test_a_step_that_a_loop_makes_all_the_same_is_none(self, watch):
        """Libraries that step in backward leave the loop as it was (optimi)."""
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(parameter: Any) -> None:
            optimizer.step()
            optimizer.zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        losses = []
        for seed in range(3):
            loss = make_loss(model, seed)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert watched.read().column("loss") == pytest.approx(losses)

    def test_a_backward_is_a_step_with_its_loss(self, watch):
        watched, model = watch(), make_model()
        losses = self.train(model, 3)
        contents = watched.read()
        assert contents.column("loss") == pytest.approx(losses)
        assert contents.column("learning_rate") == [1e-3] * 3
        assert all(isnan(value) for value in contents.gradients(2).values())
        assert watched.steps_reported == 3
        assert contents.state.probe_errors == 0

    def test_gradients_that_were_not_looked_at_are_not_missing(self, watch):
        watched, model = watch(), make_model()
        self.train(model, 3)
        assert watched.read().column("gradients_measured") == [0.0] * 3

    def test_is_reported_as_unsupported_and_warned_of_once(self, watch, caplog):
        watched, model = watch(), make_model()
        with caplog.at_level("WARNING", "mp_agent"):
            self.train(model, 3)
        assert watched.state().unsupported == ("optimizer step within backward",)
        assert [r.message for r in caplog.records] == [
            "mp_agent does not measure this: optimizer step within backward; the rest of it goes on"
        ]
