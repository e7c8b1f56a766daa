"""mp_agent watches the numbers inside distributed PyTorch training and exports them.

Importing it starts no thread, opens no socket and does not import torch.
"""

from typing import Any

from mp_agent.api.planning import check, compare_precision, evaluate_plan, recommend
from mp_agent.api.training import (
    checkpoint_requested,
    collection,
    declare,
    global_statistics,
    init,
    observe,
    observe_logprobs,
    on_checkpoint_request,
    on_condition,
    phase,
    shutdown,
    stop_requested,
    watch_tensor,
)
from mp_agent.records.conditions import ConditionEvent
from mp_agent.records.global_statistics import GlobalStatistics
from mp_agent.version import __version__

__all__ = [
    "ConditionEvent",
    "GlobalStatistics",
    "__version__",
    "check",
    "checkpoint_requested",
    "collection",
    "compare_precision",
    "declare",
    "evaluate_plan",
    "global_statistics",
    "init",
    "observe",
    "observe_logprobs",
    "on_checkpoint_request",
    "on_condition",
    "phase",
    "recommend",
    "shutdown",
    "stop_requested",
    "watch_tensor",
]


def load_ipython_extension(ipython: Any) -> None:
    """Attach to a notebook's kernel, for `%load_ext mp_agent`; `%unload_ext mp_agent` detaches.

    The address of the status page is printed after the cell in which training begins.
    """
    from mp_agent.integrations.ipython import load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Detach from a notebook's kernel."""
    from mp_agent.integrations.ipython import unload

    unload(ipython)
