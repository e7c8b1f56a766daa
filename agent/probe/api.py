"""Implements the public functions: attaches the probe to this process, and detaches it."""

import logging
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, optim

from mp_agent.errors import SettingError
from mp_agent.probe.attachment import Attachment
from mp_agent.probe.instruments.tensors import tensor_collections
from mp_agent.probe.placement import declarations
from mp_agent.probe.processes.callbacks import CheckpointCallback, ConditionCallback
from mp_agent.probe.processes.launchers import group_of, members_of
from mp_agent.records.global_statistics import GlobalStatistics
from mp_agent.ring.interruptions import pass_on
from mp_agent.settings import load_settings, shown_value

log = logging.getLogger("mp_agent")

T = TypeVar("T")

_attachment: Attachment | None = None
_callbacks: list[ConditionCallback] = []
_checkpoint_callbacks: list[CheckpointCallback] = []
_beginning = threading.RLock()
"""Held by the thread that attaches: of several that call `init()` together one does it."""


def _start_over_in_child() -> None:
    """Forget a thread that was attaching when this process was forked: it is not here."""
    global _beginning
    _beginning = threading.RLock()


os.register_at_fork(after_in_child=_start_over_in_child)


def init(
    model: nn.Module | None,
    optimizer: optim.Optimizer | None,
    process_group: object,
    arguments: dict[str, Any],
) -> None:
    """See `mp_agent.init`."""
    with _beginning:
        _init(model, optimizer, process_group, arguments)


def _init(
    model: nn.Module | None,
    optimizer: optim.Optimizer | None,
    process_group: object,
    arguments: dict[str, Any],
) -> None:
    global _attachment
    settings, ignored = load_settings(**arguments)
    members = None
    if process_group is not None and settings.enabled:
        members = members_of(process_group, named=bool(arguments.get("run")))
        if members is None:
            return
    if settings.enabled and not isinstance(model, nn.Module | None):
        raise SettingError(f"model has value {shown_value('model', model)}: must be a module")
    if not settings.enabled or not _make_way(arguments):
        return
    agrees = settings.guard or settings.reduction == "process_group"
    group = group_of(process_group) if agrees else None
    attachment = Attachment(
        settings,
        setting_errors=ignored,
        callbacks=_callbacks,
        checkpoint_callbacks=_checkpoint_callbacks,
        members=members,
        group=group,
    )
    try:
        attachment.begin(model, optimizer)
    except BaseException:
        attachment.abandon()
        raise
    _attachment = attachment


def attach(*, with_optimizer: bool) -> None:
    """Watch this process, if it trains, because `MP_AGENT_ATTACH` is set.

    with_optimizer: one is being made; without one, a backward alone does not make it training. A
    call of `init()` takes its place as long as there is no ring.
    """
    global _attachment
    settings, ignored = load_settings()
    if _attachment is not None or not settings.enabled:
        return
    attachment = Attachment(
        settings,
        setting_errors=ignored,
        callbacks=_callbacks,
        checkpoint_callbacks=_checkpoint_callbacks,
        asked_for=False,
        awaits_optimizer=not with_optimizer,
    )
    attachment.begin(None, None)
    _attachment = attachment


def _make_way(arguments: dict[str, Any]) -> bool:
    """Return whether `init()` is to attach; what the environment attached gives way to it."""
    global _attachment
    if _attachment is None:
        return True
    if _attachment.by_environment and not _attachment.connected:
        _attachment.withdraw()
        _attachment = None
        return True
    if _attachment.by_environment and arguments:
        log.warning("init() comes after the first backward: its arguments change nothing any more")
    return False


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


def observe_logprobs(trainer: object, sampler: object, mask: object) -> None:
    """See `mp_agent.observe_logprobs`."""
    if _attachment is not None:
        _attachment.probe.observe_logprobs(trainer, sampler, mask)


def watch_tensor(name: object, tensor: object, dim: object, reduction: object) -> None:
    """See `mp_agent.watch_tensor`."""
    if torch.compiler.is_compiling():
        return
    if _attachment is not None:
        _attachment.probe.watch_tensor(name, tensor, dim, reduction)


def phase(name: str) -> AbstractContextManager[None]:
    """See `mp_agent.phase`."""
    return nullcontext() if _attachment is None else _attachment.probe.phase(name)


def on_condition(callback: ConditionCallback) -> None:
    """See `mp_agent.on_condition`."""
    _register("on_condition", callback, _callbacks)


def on_checkpoint_request(callback: CheckpointCallback) -> None:
    """See `mp_agent.on_checkpoint_request`."""
    _register("on_checkpoint_request", callback, _checkpoint_callbacks)


def _register(name: str, callback: T, callbacks: list[T]) -> None:
    """Add a callback once; what cannot be called is logged and ignored."""
    if not callable(callback):
        log.warning("%s: %r cannot be called; it is ignored", name, callback)
    elif not any(callback is known or _same(callback, known) for known in callbacks):
        callbacks.append(callback)


def _same(one: object, other: object) -> bool:
    """Return whether two callbacks are equal, as bound methods of one object are."""
    try:
        return bool(one == other)
    except Exception as error:
        pass_on(error)
        return False


def global_statistics() -> GlobalStatistics | None:
    """See `mp_agent.global_statistics`."""
    return None if _attachment is None else _attachment.probe.global_statistics


def checkpoint_requested() -> bool:
    """See `mp_agent.checkpoint_requested`."""
    requests = None if _attachment is None else _attachment.probe.requests
    return requests is not None and requests.take_checkpoint()


def stop_requested() -> bool:
    """See `mp_agent.stop_requested`."""
    requests = None if _attachment is None else _attachment.probe.requests
    return requests is not None and requests.stop


def declare(target: object, *, shard: object, replicate: object, counted: object) -> None:
    """See `mp_agent.declare`."""
    declarations.add(target, shard, replicate, counted)


def collection(name: object, include: object) -> None:
    """See `mp_agent.collection`."""
    tensor_collections.define(name, include)


def shutdown() -> None:
    """See `mp_agent.shutdown`."""
    global _attachment
    attachment, _attachment = _attachment, None
    if attachment is not None:
        attachment.shutdown()


def status_url() -> str | None:
    """Return the address of the node agent that watches this process; None while there is none."""
    return None if _attachment is None else _attachment.status_url
