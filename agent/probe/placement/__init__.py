"""Which share of a tensor this rank holds: shard and replica, by what is known of its placement.

Every source of knowledge gives *axes*: ranks along which a tensor is split or copied. A module
per source: `axes` (DDP, FSDP1, and what the script declares), `megatron` (its attributes);
`survey` asks them all, reads DTensors (FSDP2, HSDP, tensor parallel), and says whether replicas
reduced their gradients before a step. Nothing enters a collective.
"""

from mp_agent.probe.placement.axes import declarations
from mp_agent.probe.placement.survey import ParameterPlacement, Reducers, Survey, may_begin_alike
from mp_agent.probe.processes.launchers import this_rank, world_size

__all__ = [
    "ParameterPlacement",
    "Reducers",
    "Survey",
    "declarations",
    "may_begin_alike",
    "this_rank",
    "world_size",
]
