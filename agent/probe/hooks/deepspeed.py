"""Hooks on DeepSpeed's engine, which scales, reduces, clips and steps itself.

Its class is hooked when the user imports it, be it before or after `init()`; nothing is imported
here. Each class derives from `nn.Module`, which notices a new subclass.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from mp_agent.probe.engines.deepspeed import EngineReader, autocast_scaler
from mp_agent.probe.hooks.events import Events
from mp_agent.probe.hooks.patches import Patches, Wrapper
from mp_agent.probe.isolation import Shield
from mp_agent.probe.scalars import scalar_of
from mp_agent.records.steps import UNUSED_GRADIENTS_AT_MOST

_MODULE, _CLASS = "deepspeed.runtime.engine", "DeepSpeedEngine"


def install(patches: Patches, events: Events, shield: Shield) -> None:
    """Wrap the engine's constructor, `backward`, `scale`, and what takes a step of the model."""
    wrappers: dict[str, Wrapper] = {
        "__init__": functools.partial(_constructor, events, shield),
        "backward": functools.partial(_backward, events, shield),
        "scale": functools.partial(_scale, events, shield),
        "_backward_prologue": functools.partial(_prologue, events, shield, WeakKeyDictionary()),
        "_take_model_step": functools.partial(_step, events, shield),
    }

    def wrap_methods(owner: type) -> None:
        for name, wrap in wrappers.items():
            if name in vars(owner):
                patches.replace(owner, name, wrap)

    def wrap_if_engine(owner: type) -> None:
        if owner.__name__ == _CLASS and owner.__module__ == _MODULE:
            wrap_methods(owner)

    known = vars(sys.modules.get(_MODULE, object)).get(_CLASS)
    if isinstance(known, type):
        wrap_methods(known)
    patches.on_new_subclass(
        nn.Module, lambda owner: shield.run("new engine", wrap_if_engine, owner)
    )


def _constructor(
    events: Events, shield: Shield, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap it: DeepSpeed steps its optimizer with zeros there, to make its state."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        shield.run("DeepSpeed", events.not_training, True)
        try:
            original(self, *args, **kwargs)
        finally:
            shield.run("DeepSpeed", events.not_training, False)
        shield.run("DeepSpeed", events.engine_made, EngineReader(self))

    return __init__


def _backward(events: Events, shield: Shield, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        shield.run("DeepSpeed", _announce_loss, events, self, loss, args, kwargs)
        return original(self, loss, *args, **kwargs)

    return backward


def _scale(events: Events, shield: Shield, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = original(self, loss, *args, **kwargs)
        shield.run("DeepSpeed", _announce_scaled, events, self, loss, scaled)
        return scaled

    return scale


def _prologue(
    events: Events,
    shield: Shield,
    backwards: WeakKeyDictionary[Any, int],
    original: Callable[..., Any],
) -> Callable[..., Any]:
    """Wrap what precedes each backward. backwards: by engine, since it was made."""

    @functools.wraps(original)
    def _backward_prologue(self: Any, *args: Any, **kwargs: Any) -> Any:
        shield.run("DeepSpeed", _announce_division, events, self)
        shield.run("DeepSpeed", _count_backward, events, self, backwards)
        return original(self, *args, **kwargs)

    return _backward_prologue


def _step(events: Events, shield: Shield, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        reader = EngineReader(self)
        shield.run("DeepSpeed", events.engine_step_begins, reader)
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            shield.run("DeepSpeed", events.engine_step_raised)
            raise
        shield.run("DeepSpeed", events.engine_step_ended, reader)
        return result

    return _take_model_step


def _announce_loss(
    events: Events, engine: Any, loss: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if autocast_scaler(engine) is None and (value := scalar_of(loss)) is not None:
        divides = kwargs.get("scale_wrt_gas", args[-1] if len(args) > 1 else True)
        parts = engine.gradient_accumulation_steps() if divides else 1
        events.engine_backward_begins(value / parts)


def _announce_scaled(events: Events, engine: Any, loss: Any, scaled: Any) -> None:
    if autocast_scaler(engine) is None and (value := scalar_of(loss)) is not None:
        events.engine_scaled(value / engine.gradient_accumulation_steps(), scaled)


def _count_backward(events: Events, engine: Any, backwards: WeakKeyDictionary[Any, int]) -> None:
    backwards[engine] = count = backwards.get(engine, 0) + 1
    unused = count == UNUSED_GRADIENTS_AT_MOST * engine.gradient_accumulation_steps()
    if unused and engine.global_steps == 0:
        events.engine_never_steps()


def _announce_division(events: Events, engine: Any) -> None:
    """Announce that the gradients of a backward that the engine does not run are divided."""
    known = autocast_scaler(engine) is None and getattr(engine, "_manual_backward_expected", False)
    if not known and not getattr(engine, "_running_engine_backward", True):
        events.loss_divided(engine.gradient_accumulation_steps())
