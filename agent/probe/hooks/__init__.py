"""Hooks on torch, DeepSpeed, Megatron-Core, fastai and Keras: a module per point, all reversible.

All hooks sit on classes, modules and closures rather than on instances, so that objects made and
names imported before `init()` are covered. `torch.compile` finds the same graphs and the same
breaks as without them; clipping that it traces is not observed, a step that it traces is.
"""

from mp_agent.probe.hooks import deepspeed, megatron
from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.libraries import install_accelerate, install_fastai, install_keras
from mp_agent.probe.hooks.loss import install_loss, install_pipelining
from mp_agent.probe.hooks.optimization import (
    install_clearing,
    install_clipping,
    install_grad_scaler,
    install_optimizer,
    install_scheduler,
    install_state_dict,
)
from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.hooks.phases import (
    install_autocast,
    install_evaluation,
    install_graphs,
    install_loading,
    install_random_numbers,
    install_saving,
    install_scripting,
    install_teardown,
)
from mp_agent.probe.isolation import Shield

__all__ = ["Events", "Patches", "install"]

_INSTALL = (
    install_autocast,
    install_loss,
    install_clearing,
    install_grad_scaler,
    install_clipping,
    install_optimizer,
    install_scheduler,
    install_state_dict,
    deepspeed.install,
    megatron.install,
    install_accelerate,
    install_fastai,
    install_keras,
    install_pipelining,
    install_evaluation,
    install_random_numbers,
    install_saving,
    install_loading,
    install_graphs,
    install_scripting,
    install_teardown,
)


def install(patches: Patches, events: Events, shield: Shield) -> None:
    """Install all hooks that observe; `patches.restore()` removes them again."""
    for install_each in _INSTALL:
        install_each(patches, events, shield)
