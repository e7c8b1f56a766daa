"""Gradients of a device are looked at without reading one; whole trainings: scenarios."""

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.instruments.activations import OutputGradients


def test_nothing_is_read_back_from_a_device(monkeypatch):
    """On the meta device, where numbers do not exist, reading one would raise."""
    monkeypatch.setattr(accelerator, "is_supported", lambda device: True)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: None)
    weights = torch.ones(4, 4, device="meta", requires_grad=True)
    inputs = weights * 1
    hidden = inputs @ weights
    outputs = hidden @ weights
    gradients = OutputGradients(lambda kind, function, *arguments: function(*arguments))
    gradients.begin()
    gradients.watch(0, inputs, hidden)
    gradients.watch(1, (hidden,), {"outputs": outputs})
    outputs.sum().backward()

    found_M2 = gradients.take(3)
    assert found_M2 is not None
    assert (found_M2.device.type, found_M2.shape) == ("meta", (3, 2))
    assert gradients.take(3) is None, "it was taken"
