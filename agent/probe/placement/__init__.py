"""Which share of a tensor this rank holds: shard and replica, by what is known of its placement.

Every source of knowledge gives *axes*: ranks along which a tensor is split or copied. One module
per source: `data_parallel` (DDP, FSDP1), `dtensor` (FSDP2, HSDP, tensor parallel), `megatron`
(attributes), `declared` (the user's word); `survey` asks them all. `reduction` says whether
replicas shared their gradients before a step. Nothing enters a collective.
"""

from mp_agent.probe.identity.world import this_rank, world_size
from mp_agent.probe.placement.declared import declarations
from mp_agent.probe.placement.reduction import Reducers
from mp_agent.probe.placement.survey import ParameterPlacement, Survey, may_begin_alike

__all__ = [
    "ParameterPlacement",
    "Reducers",
    "Survey",
    "declarations",
    "may_begin_alike",
    "this_rank",
    "world_size",
]
