"""A model on a device that is not supported, for which torch's `meta` device stands."""

import logging

import torch

from tests.agent.probe.rings import read_ring
from tests.agent.probe.watching import watched

STEPS = 30


def test_steps_are_counted_gradients_named_as_missing_and_nothing_fails(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="mp_agent")
    model = torch.nn.Linear(2, 1, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(tmp_path, 0, 1):
        for _ in range(STEPS):
            model(torch.ones(1, 2, device="meta")).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
    ring = read_ring(tmp_path / "rank0.ring")
    assert ring.state.committed_sequence == STEPS
    assert ring.state.probe_errors == 0
    assert ring.state.unsupported == ("gradients on devices of type meta",)
    said = [record for record in caplog.records if "devices of type meta" in record.getMessage()]
    assert len(said) == 1
