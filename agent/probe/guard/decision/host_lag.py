"""By how many updates the host learns late what was decided."""

import torch

from mp_agent.probe import accelerator

_DEVICE_LAG_STEPS = 2


def host_lag_steps(device: torch.device) -> int:
    """Return by how many updates decisions made on a device come late to the host, on every rank.

    Ranks that took what has arrived would not act on the same step. The host waits only where it
    is further ahead of the device than that.
    """
    return 0 if accelerator.is_on_host(device) else _DEVICE_LAG_STEPS
