"""What `init()` sets up in a process, and takes down again."""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn, optim

from mp_agent.probe.attachment import Attachment
from mp_agent.settings import load_settings

log = logging.getLogger("mp_agent")

_attachment: Attachment | None = None


def init(
    model: nn.Module | None, optimizer: optim.Optimizer | None, arguments: dict[str, Any]
) -> None:
    """See `mp_agent.init`."""
    global _attachment
    settings, ignored = load_settings(**arguments)
    if _attachment is not None or not settings.enabled:
        return
    attachment = Attachment(settings, setting_errors=ignored)
    try:
        attachment.begin(model, optimizer)
    except Exception:
        log.exception("mp_agent could not attach; training goes on unwatched")
        return
    _attachment = attachment


def observe(
    *,
    loss: Tensor | float | None,
    step: int | None,
    lr: float | None,
    tokens: int | None,
) -> None:
    """See `mp_agent.observe`."""
    if _attachment is not None:
        _attachment.probe.observe(loss=loss, step=step, lr=lr, tokens=tokens)


def phase(name: str) -> AbstractContextManager[None]:
    """See `mp_agent.phase`."""
    return nullcontext() if _attachment is None else _attachment.probe.phase(name)


def shutdown() -> None:
    """See `mp_agent.shutdown`."""
    global _attachment
    attachment, _attachment = _attachment, None
    if attachment is not None:
        attachment.shutdown()
