"""Stands in for functions of `torch.nn.functional`, to see their calls during one forward pass."""

import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import update_wrapper
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import has_torch_function

Seen = Callable[[FrameType, Sequence[Any], Mapping[str, Any]], None]
"""Called after a call, with the frame of the caller and the arguments."""

_Place = tuple[dict[str, Any], str, Any, Any]
"""A namespace, a key in it, the function that was there, and what stands in for it."""

_RUN_OF_MODULE: CodeType = nn.Module._call_impl.__code__


class _Call:
    """A function that reports its calls; equal to it, and a copy, pickled or deep, is it itself."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        seen: Seen,
        restored: Callable[["_Call"], AbstractContextManager[None]],
    ) -> None:
        """restored: a context in which the function is in its places again."""
        update_wrapper(self, function)
        self._name, self._function, self._seen, self._restored = name, function, seen, restored

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return self._function(*args, **kwargs)
        if has_torch_function((*args, *kwargs.values())):
            # A `__torch_function__` finds out by identity which function it is called for.
            with self._restored(self):
                result = self._function(*args, **kwargs)
        else:
            result = self._function(*args, **kwargs)
        self._seen(sys._getframe(1), args, kwargs)
        return result

    def __eq__(self, other: object) -> bool:
        return self is other or self._function is other

    def __hash__(self) -> int:
        return hash(self._function)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the standard library alone: what is saved must load where mp_agent is not installed.
        return pkgutil.resolve_name, (f"torch.nn.functional:{self._name}",)


class FunctionCalls:
    """Reports calls of some functions of `torch.nn.functional` between `begin` and `end`.

    Reaches callers who imported a function by name before: in any module under its own name, and
    under any name where the forward of a model's module looks it up. Not a function that is kept
    elsewhere, such as in an attribute.
    """

    def __init__(self) -> None:
        self._replaced: list[_Place] = []

    def begin(self, seen: Mapping[str, Seen], model: nn.Module) -> None:
        """Replace the functions; `seen` says by name what is called after each call."""
        self.end()
        functions = {name: vars(F)[name] for name in seen}
        calls = {name: _Call(name, functions[name], seen[name], self._restored) for name in seen}
        for namespace in _namespaces():
            for name, function in functions.items():
                if namespace.get(name) is function:
                    self._replace(namespace, name, function, calls[name])
        for namespace in _namespaces_of_forwards(model):
            for key, value in tuple(namespace.items()):
                for name, function in functions.items():
                    if value is function:
                        self._replace(namespace, key, function, calls[name])

    def end(self) -> None:
        """Restore the functions, except where other code has replaced them since."""
        while self._replaced:
            namespace, key, function, call = self._replaced[-1]
            if namespace.get(key) is call:
                namespace[key] = function
            self._replaced.pop()  # last: a signal handler may raise in between

    @property
    def begun(self) -> bool:
        """Whether functions are replaced."""
        return bool(self._replaced)

    @contextmanager
    def _restored(self, call: _Call) -> Iterator[None]:
        """Put the function of one call back for a while."""
        places = [each for each in self._replaced if each[3] is call]
        for namespace, key, function, _ in places:
            if namespace.get(key) is call:
                namespace[key] = function
        try:
            yield
        finally:
            kept = {id(each) for each in self._replaced}
            for place in places:
                namespace, key, function, _ = place
                if id(place) in kept and namespace.get(key) is function:
                    namespace[key] = call

    def _replace(self, namespace: dict[str, Any], key: str, function: Any, call: Any) -> None:
        self._replaced.append((namespace, key, function, call))
        namespace[key] = call


def caller_among(frame: FrameType | None, places: Mapping[int, int]) -> int | None:
    """Return the place of the innermost module, by `id`, whose forward a frame runs in."""
    while frame is not None:
        if frame.f_code is _RUN_OF_MODULE:
            place = places.get(id(frame.f_locals.get("self")))
            if place is not None:
                return place
        frame = frame.f_back
    return None


def has_compiled() -> bool:
    """Return whether `torch.compile` has compiled anything in this process.

    It would compile what calls a function once more while that is replaced.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return False
    frames = dynamo.counters.get("frames", {})
    return bool(frames.get("total", 0))


def _namespaces() -> Iterable[dict[str, Any]]:
    """Return what modules define; of torch only the module that the functions are of."""
    return [vars(F)] + [
        vars(module)
        for name, module in tuple(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] != "torch"
    ]


def _namespaces_of_forwards(model: nn.Module) -> Iterable[dict[str, Any]]:
    found = {}
    for kind in {type(module) for module in model.modules()}:
        namespace = getattr(kind.forward, "__globals__", None)
        if isinstance(namespace, dict) and not kind.__module__.startswith("torch."):
            found[id(namespace)] = namespace
    return found.values()
