"""The trainer's own number of a step, where no one gives it: after a resume, or a late start."""

import copy

import pytest
import torch

from mp_agent.probe.tracker.context import STEP_TOO_LARGE
from tests.agent.probe.small_model import make_loss, make_model


def train(model, optimizer, steps: int, scheduler=None) -> None:
    for seed in range(steps):
        optimizer.zero_grad()
        make_loss(model, seed).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def steps_of(watched) -> list[int]:
    return [record.step for record in watched.read().records]


KINDS = [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam]


class TestFromTheOptimizer:
    @pytest.mark.slow
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_resumed_run_goes_on_where_the_checkpoint_stood(self, watch, kind):
        model = make_model()
        optimizer = kind(model.parameters(), lr=1e-3)
        train(model, optimizer, 40)
        saved = copy.deepcopy(optimizer.state_dict())
        watched, model = watch(), make_model()
        optimizer = kind(model.parameters(), lr=1e-3)
        optimizer.load_state_dict(saved)
        train(model, optimizer, 3)
        assert steps_of(watched) == [41, 42, 43]

    def test_a_checkpoint_that_is_loaded_later_counts_from_then_on(self, watch):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, optimizer, 40)
        saved = copy.deepcopy(optimizer.state_dict())
        watched, model = watch(), make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, optimizer, 2)
        optimizer.load_state_dict(saved)
        train(model, optimizer, 2)
        assert steps_of(watched) == [1, 2, 41, 42]

    def test_a_new_run_begins_with_one_and_a_successor_goes_on(self, watch):
        watched, model = watch(), make_model()
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 3)
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 2)
        assert steps_of(watched) == [1, 2, 3, 4, 5]

    def test_a_new_optimizer_that_counts_from_1_on_has_made_no_step(self, watch):
        """As Prodigy of pytorch_optimizer, in its groups."""
        watched, model = watch(), make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.param_groups[0]["step"] = 1
        train(model, optimizer, 2)
        assert steps_of(watched) == [1, 2]

    def test_what_the_trainer_says_is_believed_instead(self, watch):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, optimizer, 5)
        watched = watch()
        watched.probe.observe(step=1000)
        train(model, optimizer, 2)
        assert steps_of(watched) == [1000, 1001]

    def test_a_number_that_no_record_can_hold_costs_itself_alone(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        watched.probe.observe(step=10**30)
        train(model, optimizer, 2)
        watched.probe.observe(step=1000)
        train(model, optimizer, 1)
        assert steps_of(watched) == [1, 2, 1000]
        assert watched.state().unsupported == (STEP_TOO_LARGE,)
        assert watched.state().probe_errors == 0


class TestFromTheScheduler:
    def test_one_that_is_stepped_with_the_optimizer_is_believed_after_two_steps(self, watch):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        train(model, optimizer, 40, scheduler)
        saved = scheduler.state_dict()
        watched = watch()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        scheduler.load_state_dict(saved)
        train(model, optimizer, 4, scheduler)
        assert steps_of(watched)[2:] == [43, 44]

    def test_one_that_is_stepped_per_epoch_is_not(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        scheduler.last_epoch = 17
        for _ in range(3):
            train(model, optimizer, 3)
            scheduler.step()
        assert steps_of(watched) == list(range(1, 10))

    def test_one_that_is_stepped_per_process_is_not(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        for _ in range(4):
            train(model, optimizer, 1, scheduler)
            scheduler.step()
        assert steps_of(watched) == [1, 2, 3, 4]
