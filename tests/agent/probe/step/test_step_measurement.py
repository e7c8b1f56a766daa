"""Where the loss scale is when gradients are measured."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.measurement import StepMeasurement
from mp_agent.probe.step.open_step import OpenStep


class Measures:
    """Keeps the scale that it is asked to measure with."""

    def __init__(self) -> None:
        self.inverse_scale: object = None
        self.loss_scale: object = None

    def layers(self, plan, gradients, inverse_scale):
        self.inverse_scale = inverse_scale
        return torch.zeros(1, 8)

    def totals(self, plan, gradients, inverse_scale):
        return torch.zeros(1, 8)

    def distribution(self, plan, gradients, inverse_scale, loss_scale):
        self.loss_scale = loss_scale
        return torch.zeros(1, 28)

    def totals_of_layers(self, plan, rows_LC, family=None):
        return rows_LC


@pytest.fixture
def measured():
    """Measure gradients on one device with a scale that is on another."""

    def measure(gradients: str, scale: str) -> tuple[object, OpenStep]:
        measures, step = Measures(), OpenStep(sequence=1, begun_seconds=0.0)
        plan = SimpleNamespace(
            label="",
            device=torch.device(gradients),
            gradients=lambda note: [torch.zeros(4, device=gradients)],
        )
        schedule = LayerSchedule(1, DEFAULTS)
        stand_in: Any = measures
        measurement = StepMeasurement(stand_in, schedule, lambda feature: None, distribution=False)
        planned: Any = plan
        inverse_scale = torch.zeros((), device=scale, dtype=torch.float64)
        measurement.fill_in(step, [(planned, inverse_scale)], at_all_layers=True)
        return measures.inverse_scale, step

    with FakeTensorMode():
        yield measure


def test_a_scale_on_another_device_is_brought_to_the_gradients(measured, monkeypatch):
    monkeypatch.setattr("mp_agent.probe.accelerator.current_stream", lambda device: "stream")
    used, step = measured("cuda:0", "cuda:1")
    assert used.device == torch.device("cuda:0")
    assert step.unread_scales == {}
    assert step.streams == {"stream"}


def test_gradients_on_the_host_are_measured_scaled_and_the_scale_is_left_unread(measured):
    used, step = measured("cpu", "cuda:0")
    assert used == 1.0
    assert step.unread_scales[""].device == torch.device("cuda:0")
    assert step.streams == set()


@pytest.mark.parametrize(
    ("gradients", "loss_scale", "read"),
    [("cuda:0", "cuda:1", True), ("cpu", "cuda:0", False), ("cpu", None, True)],
)
def test_the_distribution_gets_a_loss_scale_unless_reading_it_would_wait(
    monkeypatch, gradients, loss_scale, read
):
    monkeypatch.setattr("mp_agent.probe.accelerator.current_stream", lambda device: "stream")
    measures, step = Measures(), OpenStep(sequence=1, begun_seconds=0.0)
    stand_in: Any = measures
    with FakeTensorMode():
        plan: Any = SimpleNamespace(
            label="",
            device=torch.device(gradients),
            gradients=lambda note: [torch.zeros(4, device=gradients)],
        )
        scale = 8.0 if loss_scale is None else torch.zeros((), device=loss_scale)
        step.scalars["loss_scale"] = scale
        measurement = StepMeasurement(stand_in, LayerSchedule(1, DEFAULTS), lambda feature: None)
        measurement.fill_in(step, [(plan, 1.0)], at_all_layers=False)
    assert measures.loss_scale is (scale if read else None)
    assert step.sampled["distribution"].rows.keys() == {""}
