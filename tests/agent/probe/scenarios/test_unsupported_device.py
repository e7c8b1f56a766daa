"""A model on an accelerator that is not supported, for which the CPU stands."""

import logging

import torch

from mp_agent.probe import accelerator
from tests.agent.probe.rings import read_ring
from tests.agent.probe.watching import watched

STEPS = 30


def test_steps_are_counted_gradients_named_as_missing_once_and_nothing_fails(
    tmp_path, caplog, monkeypatch
):
    caplog.set_level(logging.INFO, logger="mp_agent")
    monkeypatch.setattr(accelerator, "SUPPORTED", ("cuda",))
    monkeypatch.setattr(accelerator, "is_on_host", lambda device: False)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(tmp_path, 0, 1):
        for _ in range(STEPS):
            model(torch.ones(1, 2)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    ring = read_ring(tmp_path / "rank0.ring")
    assert ring.state.committed_sequence == STEPS
    assert ring.state.probe_errors == 0
    assert ring.state.unsupported == ("gradients on devices of type cpu",)
    said = [record for record in caplog.records if "devices of type cpu" in record.getMessage()]
    assert len(said) == 1
    assert ring.column("learning_rate") == [0.1] * STEPS
