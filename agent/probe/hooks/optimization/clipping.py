"""Hooks on gradient clipping: the gradients before it, its limit, and the norm that it found.

`clip_grad_norm_` is imported by name long before `init()`. All of torch's clipping functions share
a `no_grad` decorator, in whose closure the function proper is replaced; every import leads there.
"""

import functools
from collections.abc import Callable
from types import GeneratorType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import clip_grad

from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.isolation.guard import Guard


def install(patches: Patches, events: Events, guard: Guard) -> None:
    """Wrap `clip_grad_norm_`, `clip_grads_with_norm_`, `clip_grad_value_`, and FSDP1's own."""

    def note_compiled() -> None:
        guard.run("clipping", events.clipping_compiled)

    # The compiler calls it while it traces, and leaves nothing of it in the graph.
    compiled = torch.compiler.assume_constant_result(note_compiled)  # type: ignore[no-untyped-call]

    def wrap_clip(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                compiled()
                return original(parameters, *args, **kwargs)
            parameters = _reusable(parameters)
            guard.run("clipping", events.clipping, _as_list(parameters))
            return original(parameters, *args, **kwargs)

        return clip

    def wrap_scaling_down(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                compiled()
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            parameters = _reusable(parameters)
            guard.run("clipping", events.clipping, _as_list(parameters))
            guard.run("clipping", events.clipping_to, max_norm, total_norm)
            return original(parameters, max_norm, total_norm, *args, **kwargs)

        return clip

    def wrap_fsdp(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(model: FullyShardedDataParallel, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            guard.run("clipping", _report_model, events, model)
            total_norm = original(model, max_norm, *args, **kwargs)
            guard.run("clipping", events.clipping_to, max_norm, total_norm)
            return total_norm

        return clip

    _replace(patches, "clip_grad_norm_", wrap_clip)
    _replace(patches, "clip_grad_value_", wrap_clip)
    _replace(patches, "_clip_grads_with_norm_", wrap_scaling_down)
    patches.replace(FullyShardedDataParallel, "clip_grad_norm_", wrap_fsdp)


def _report_model(events: Events, model: nn.Module) -> None:
    events.clipping(list(nn.Module.parameters(model)))


def _replace(
    patches: Patches, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    function = getattr(clip_grad, name, None)
    if function is not None and not patches.replace_inside(function, wrap):
        patches.replace(clip_grad, name, wrap)


def _reusable(parameters: Any) -> Any:
    """Return `parameters` so that they can be gone through twice.

    An empty generator stays one, since torch warns about it.
    """
    if isinstance(parameters, torch.Tensor):
        return parameters
    listed = list(parameters)
    if not listed and isinstance(parameters, GeneratorType):
        return parameters
    return listed


def _as_list(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
