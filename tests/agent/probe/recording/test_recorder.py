"""What of a step gets into the ring: layers, and steps that do not end."""

import resource
from math import isnan, nan

import pytest
import torch
from torch import nn

from mp_agent.probe.recording import ring_schema
from mp_agent.records.columns import GRADIENT_POSITIONS
from tests.agent.probe.small_model import fail, make_loss, make_model


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
        bias = dict(model.named_parameters())["2.bias"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(1, 9):
            optimizer.zero_grad()
            make_loss(model).backward()
            if step == 5:
                assert bias.grad is not None
                bias.grad[0] = nan
            optimizer.step()
            bias.data.nan_to_num_()
        layers = watched.read().layers
        assert [table.sequence for table in layers] == [1, 5]
        assert layers[1].gradients[:, GRADIENT_POSITIONS["nan_elements"]].tolist() == [0, 0, 0, 1]

    def test_are_looked_at_when_the_norm_is_high(self, watch):
        watched, model = watch(layer_interval=1000), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(1, 6):
            optimizer.zero_grad()
            (make_loss(model) * (1e6 if step == 3 else 1.0)).backward()
            optimizer.step()
        assert [table.sequence for table in watched.read().layers] == [1, 3]

    def test_change_no_bit_of_the_totals_by_being_looked_at(self, watch):
        """Ranks look at them on steps of their own, and copies are compared by their totals."""
        watched = watch(layer_interval=1000)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        for _ in range(10):
            optimizer.zero_grad()
            model(inputs).pow(2).mean().backward()
            optimizer.step()
        contents = watched.read()
        assert [table.sequence for table in contents.layers] == [1, 10]
        assert len({repr(record.gradients.tolist()) for record in contents.records}) == 1

    def test_of_a_step_that_never_ended_are_flushed(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.register_step_post_hook(fail)
        make_loss(model).backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        watched.probe.flush()
        assert [table.sequence for table in watched.read().layers] == [1]


class TestFlush:
    def test_reports_nothing_of_micro_batches_left_over(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        make_loss(model).backward()
        optimizer.step()
        make_loss(model).backward()
        watched.probe.flush()
        assert watched.read().open_record is None

    def test_reports_a_loss_that_is_not_finite_and_never_reached_the_optimizer(self, watch):
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


def test_a_limit_on_file_sizes_is_one_line_and_tried_again_later(watch, caplog, monkeypatch):
    monkeypatch.setattr(ring_schema, "RETRY_SECONDS", 0.0)
    watched, model = watch(), make_model()
    optimizer = torch.optim.SGD(model.parameters())
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, usual[1]))
    try:
        for _ in range(30):
            make_loss(model).backward()
            optimizer.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    (line,) = caplog.records
    assert line.exc_info is None
    assert "a file may grow to 8 KiB (ulimit -f)" in line.message
    make_loss(model).backward()
    optimizer.step()
    assert [record.sequence for record in watched.read().records] == [31]
