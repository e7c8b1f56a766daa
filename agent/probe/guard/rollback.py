"""Puts an optimizer's parameters and state back to what they were before a step."""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch.optim import Optimizer


class Rollback:
    """Copies of an optimizer's parameters and of their state: as much memory as these, until then.

    Also of those of optimizers that it wraps, and of what the groups hold but learning rates.
    Tensors are put back in place, as other objects may hold them. Other attributes of an optimizer
    are not put back.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        wrapped = list(_wrapped_by(optimizer))
        optimizers = [optimizer, *wrapped]
        own = {p for p in _parameters_of(optimizer) if p.grad is not None}
        # Those of another optimizer, such as copies in FP32, may get gradients only in the step.
        others = {parameter for each in wrapped for parameter in _parameters_of(each)}
        others.difference_update(_parameters_of(optimizer))
        self._parameters = {each: each.detach().clone() for each in own | others}
        states = [each.state for each in optimizers]
        self._entries = [(state, dict(state)) for state in states]
        groups = [group for each in optimizers for group in each.param_groups]
        tables = [table for state in states for table in map(state.get, list(state))]
        self._tables = [_Table(table) for table in (*tables, *groups) if isinstance(table, dict)]

    def restore(self) -> None:
        """Put everything back."""
        for parameter, values in self._parameters.items():
            parameter.detach().copy_(values)
        for state, before in self._entries:
            state.clear()
            state.update(before)
        for table in self._tables:
            table.restore()


def _wrapped_by(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers that it holds, itself or in a collection, and what they hold."""
    seen = {id(optimizer)}
    waiting: list[object] = [optimizer]
    while waiting:
        holder = waiting.pop()
        for value in vars(holder).values():
            parts: Iterable[object] = (value,)
            if isinstance(value, list | tuple):
                parts = value
            elif isinstance(value, dict):
                parts = value.values()
            for part in parts:
                if isinstance(part, Optimizer) and id(part) not in seen:
                    seen.add(id(part))
                    waiting.append(part)
                    yield part


def _parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


class _Table:
    """The state of one parameter, or a group, and copies of its values."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._table = table
        self._values = {
            name: (value, _copied(value))
            for name, value in table.items()
            if name not in ("params", "lr")
        }

    def restore(self) -> None:
        for name in set(self._table) - set(self._values) - {"params", "lr"}:
            del self._table[name]
        for name, (value, copied) in self._values.items():
            if isinstance(value, torch.Tensor):
                value.detach().copy_(copied)
            self._table[name] = value if isinstance(value, torch.Tensor) else copied


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)
