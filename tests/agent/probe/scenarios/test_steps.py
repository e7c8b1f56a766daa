"""Which steps there are, and what belongs to each."""

import gc
import weakref
from math import inf, isnan

import pytest
import torch

from mp_agent.records.schema import Schema
from mp_agent.ring.reader import RingReader
from tests.agent.probe.small_model import fail, make_loss, make_model, sum_squares


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
            if watched.steps_reported == 1:
                watched.probe.observe(step=1000)
        records = watched.read().records
        assert [record.sequence for record in records] == [1, 2, 3]
        assert [record.step for record in records] == [1, 1000, 1001]

    def test_calls_on_step_after_each(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            make_loss(model).backward()
            optimizer.step()
        assert watched.steps_reported == 4

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

    def test_learning_rate_is_the_one_that_the_optimizer_steps_with(self, watch):
        """Some scripts set it between clipping and the step, as build-nanogpt does."""
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for rate in (0.5, 0.25):
            make_loss(model).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        watched.probe.observe(lr=0.0625)
        make_loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.125
        optimizer.step()
        assert watched.read().column("learning_rate") == [0.5, 0.25, 0.0625]

    def test_learning_rate_set_after_unscaling_is_that_of_the_step_done_or_skipped(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu")
        for rate, factor in ((0.5, 1.0), (0.25, inf)):
            scaler.scale(make_loss(model) * factor).backward()
            scaler.unscale_(optimizer)
            optimizer.param_groups[0]["lr"] = rate
            scaler.step(optimizer)
            scaler.update()
        contents = watched.read()
        assert contents.column("learning_rate") == [0.5, 0.25]
        assert contents.column("skipped") == [0.0, 1.0]

    def test_learning_rate_is_not_that_of_a_schedule_ahead_of_a_second_optimizer(self, watch):
        watched, model = watch(), make_model()
        halves = [torch.optim.SGD([one], lr=0.5) for one in model.parameters()]
        schedule = torch.optim.lr_scheduler.ExponentialLR(halves[0], 0.5)
        for _ in range(3):
            make_loss(model).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            halves[0].step()
            schedule.step()
            for later in halves[1:]:
                later.step()
        assert watched.read().column("learning_rate") == [0.5, 0.25, 0.125]

    def test_that_raised_leaves_an_open_record_and_is_done_again(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        handle = optimizer.register_step_post_hook(fail)
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

    @pytest.mark.slow
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
        assert watched.steps_reported == 2
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
        schemas: list[Schema | None] = []
        elements: list[float] = []
        for _ in range(2):
            schemas.append(reader.schema)
            records, _ = reader.steps_after(len(elements))
            elements += [record.gradients[0, 5] for record in records]
        reader.close()
        assert [len(schema.layers) for schema in schemas if schema is not None] == [2, 4]
        assert elements == [40, 58]


class _Outer(torch.optim.Optimizer):
    """A wrapper that is itself an optimizer, as some libraries have it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)
