"""Tensors within the values that modules take and return."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

_PLAIN = (str, bytes, int, float, complex, bool, type(None), Enum, torch.dtype, torch.device, type)


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in tuples, lists, mappings and dataclasses, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_of(item, f"{path}.{key}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from tensors_of(item, f"{path}.{index}")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name, None), f"{path}.{field.name}")


def floating(value: Any) -> dict[str, Tensor]:
    """Return the floating-point tensors of a value by path."""
    return {path: one for path, one in tensors_of(value) if one.is_floating_point()}


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the value with each tensor changed; containers are new, everything else the same."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, Mapping):
        made = copy(value)
        if hasattr(made, "__setitem__"):
            for key, item in value.items():
                made[key] = mapped(item, change)
        return made
    if is_dataclass(value) and not isinstance(value, type):
        return _mapped_fields(value, change)
    return value


def _mapped_fields(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    made = copy(value)
    for field in fields(value):
        if hasattr(value, field.name):
            # Not by its own setter: a frozen one has none.
            object.__setattr__(made, field.name, mapped(getattr(value, field.name), change))
    return made


def opaque_type(value: Any) -> str:
    """Return the name of a type within a value that may change while it is used; "" for none."""
    if isinstance(value, (Tensor, *_PLAIN)):
        return ""
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, tuple | list):
        parts = list(value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in fields(value)]
    elif callable(value):
        return ""
    else:
        return type(value).__name__
    return next((name for part in parts if (name := opaque_type(part))), "")
