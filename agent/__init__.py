"""mp_agent watches the numbers inside distributed PyTorch training and exports them.

Importing it starts no thread, opens no socket and does not import torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mp_agent.version import __version__

if TYPE_CHECKING:
    from torch import Tensor, nn, optim
    from torch.amp import GradScaler

__all__ = ["__version__", "init", "observe", "phase", "shutdown"]


def init(
    model: nn.Module | None = None,
    *,
    optimizer: optim.Optimizer | None = None,
    scaler: GradScaler | None = None,
    **settings: Any,
) -> None:
    """Begin to watch this process; call it on every rank, before or after `init_process_group`.

    Needs no arguments: optimizers, GradScalers, clipping, the module tree and the loss are found
    by themselves. `model` and `optimizer` settle which ones count where a process has several;
    `scaler` is accepted for symmetry and needs no help. `settings` are the fields of
    `mp_agent.settings.Settings` (`run="llama-7b"`, `layer_interval=50`, …). A second call is
    harmless and changes nothing.

    Raises SettingError, naming field and value, when a setting given here is wrong. Everything
    else that fails is logged and counted, and training goes on unwatched.
    """
    from mp_agent.probe import api

    api.init(model, optimizer, settings)


def observe(
    *,
    loss: Tensor | float | None = None,
    step: int | None = None,
    lr: float | None = None,
    tokens: int | None = None,
) -> None:
    """Tell what the hooks cannot know of the step under way; optional, on any rank.

    Call it before the optimizer's step; after it, what is told counts for the next step.
    `loss` (0-dim, stays on its device) replaces the loss seen in backward; `step` is the trainer's
    own count; `lr` the learning rate; `tokens` are added up over ranks. Never raises.
    """
    from mp_agent.probe import api

    api.observe(loss=loss, step=step, lr=lr, tokens=tokens)


def phase(name: str) -> AbstractContextManager[None]:
    """Mark a stretch that is not training, such as `with mp_agent.phase("eval"):`.

    Evaluation and checkpointing are then not taken for a stall. Never raises by itself.
    """
    from mp_agent.probe import api

    return api.phase(name)


def shutdown() -> None:
    """Write what is still open, mark this rank as completed and remove all hooks.

    Optional: a normal exit does the same. Harmless when `init()` was never called.
    """
    from mp_agent.probe import api

    api.shutdown()
