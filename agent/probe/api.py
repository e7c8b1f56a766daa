"""What `init()` sets up in a process, and takes down again."""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn, optim

from mp_agent.probe.attachment import Attachment
from mp_agent.probe.conditions import ConditionCallback
from mp_agent.probe.members import members_of
from mp_agent.probe.placement import declarations
from mp_agent.settings import load_settings

log = logging.getLogger("mp_agent")

_attachment: Attachment | None = None
_callbacks: list[ConditionCallback] = []


def init(
    model: nn.Module | None,
    optimizer: optim.Optimizer | None,
    process_group: object,
    arguments: dict[str, Any],
) -> None:
    """See `mp_agent.init`."""
    global _attachment
    settings, ignored = load_settings(**arguments)
    members = None
    if process_group is not None and settings.enabled:
        members = members_of(process_group, named=bool(arguments.get("run")))
        if members is None:
            return
    if _attachment is not None or not settings.enabled:
        return
    attachment = Attachment(settings, setting_errors=ignored, callbacks=_callbacks, members=members)
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


def on_condition(callback: ConditionCallback) -> None:
    """See `mp_agent.on_condition`."""
    if not callable(callback):
        log.warning("on_condition: %r cannot be called; it is ignored", callback)
    elif callback not in _callbacks:
        _callbacks.append(callback)


def declare(target: object, *, shard: object, replicate: object, counted: object) -> None:
    """See `mp_agent.declare`."""
    declarations.add(target, shard, replicate, counted)


def shutdown() -> None:
    """See `mp_agent.shutdown`."""
    global _attachment
    attachment, _attachment = _attachment, None
    if attachment is not None:
        attachment.shutdown()
