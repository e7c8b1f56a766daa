"""Hooks on torch, DeepSpeed, Megatron-Core, fastai and Keras: a module per point, all reversible.

All hooks sit on classes, modules and closures rather than on instances, so that objects made and
names imported before `init()` are covered. `torch.compile` finds the same graphs and the same
breaks as without them; clipping that it traces is not observed, a step that it traces is.
"""

from mp_agent.probe.hooks import (
    autocast,
    deepspeed,
    evaluation,
    fastai,
    graphs,
    keras,
    loss,
    megatron,
    pipelining,
    saving,
    scripting,
    teardown,
)
from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.optimization import (
    clearing,
    clipping,
    grad_scaler,
    optimizer,
    scheduler,
    state_dict,
)
from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.isolation.guard import Guard

__all__ = ["Events", "Patches", "install", "teardown"]

_POINTS = (
    autocast,
    loss,
    clearing,
    grad_scaler,
    clipping,
    optimizer,
    scheduler,
    state_dict,
    deepspeed,
    megatron,
    fastai,
    keras,
    pipelining,
    evaluation,
    saving,
    graphs,
    scripting,
    teardown,
)


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Install all hooks that observe; `patches.restore()` removes them again."""
    for module in _POINTS:
        module.install(patches, events, guard)
