"""What a step is put together of when the rank that made it is gone."""

import torch

from mp_agent.probe.delivery.device import host_part, packed
from tests.agent.probe.seen_steps import CPU, step


def test_totals_that_the_device_brings_are_behind_its_scalars():
    seen = step(5, loss=torch.tensor(6.0), learning_rate=0.5, gradients_measured=1.0)
    payload_N, names = packed(seen, CPU, with_totals=True)
    part = host_part(seen, names, payload_N.numel())
    assert (part.places, part.totals_place) == ({"loss": 0}, 1)
    assert part.scalars == {"learning_rate": 0.5, "gradients_measured": 1.0}


def test_totals_on_the_host_go_with_the_process_and_do_not_count_as_measured():
    seen = step(5, loss=torch.tensor(6.0), gradients_measured=1.0)
    payload_N, names = packed(seen, CPU, with_totals=False)
    part = host_part(seen, names, payload_N.numel())
    assert part.totals_place is None
    assert part.scalars == {"gradients_measured": 0.0}
