"""Copies of a model that share its weights, so that the model itself is never run."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from mp_agent.errors import CompareError

DtypeOf = Callable[[str], "torch.dtype"]
"""From a module's name to the dtype of its floating-point parameters and buffers."""

_COMPILED = "OptimizedModule"
_SHARDED = ("FullyShardedDataParallel", "DTensor", "DeepSpeedEngine")
_WRAPPERS = ("DistributedDataParallel", "DataParallel")


def unwrapped(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model within wrappers that change no numbers, and notes on what was omitted.

    Raises CompareError for a model whose parameters are sharded or not there.
    """
    notes = []
    while (kind := type(model).__name__) in (*_WRAPPERS, _COMPILED):
        if kind == _COMPILED:
            notes.append("the model is compiled; it was compared uncompiled")
        model = getattr(model, "_orig_mod" if kind == _COMPILED else "module")
    for name, module in model.named_modules():
        if type(module).__name__ in _SHARDED:
            raise CompareError(
                f"model: {name or 'it'} is a {type(module).__name__}, whose "
                "parameters are sharded; compare the model before it is wrapped"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CompareError(f"model: {name or 'it'} is a ScriptModule, which cannot be traced")
        if type(module).__name__ == _COMPILED or module._compiled_call_impl is not None:
            notes.append(f"{name or 'the model'} is compiled; it was compared uncompiled")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor).__name__ in _SHARDED:
            raise CompareError(f"model: {name} is a {type(tensor).__name__}, which is sharded")
        if torch.nn.parameter.is_lazy(tensor):
            raise CompareError(f"model: {name} is not initialized; call the model once before")
        if tensor.is_meta:
            raise CompareError(f"model: {name} is on the meta device and has no values")
    return model, tuple(notes)


def copy_of(model: nn.Module, dtype_of: DtypeOf) -> nn.Module:
    """Return a copy with its own gradients, buffers, hooks and mode; weights share storage.

    A weight is copied only where `dtype_of` asks for another dtype. One that several modules share
    gets the widest dtype that one of them asks for. Raises CompareError for a model that Python
    cannot copy.
    """
    memo: dict[int, Any] = {}
    dtypes = _dtypes(model, dtype_of)
    for parameter in model.parameters():
        made = nn.Parameter(_cast(parameter, dtypes), parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = made
    for buffer in model.buffers():
        cast = _cast(buffer, dtypes)
        memo[id(buffer)] = cast.clone() if cast.data_ptr() == buffer.data_ptr() else cast
    try:
        for module in reversed(list(model.modules())):
            if type(module).__name__ == _COMPILED:
                memo[id(module)] = deepcopy(module._orig_mod, memo)
        copied = deepcopy(model, memo)
    except Exception as error:
        raise CompareError(f"model: {type(model).__name__} cannot be copied: {error}") from error
    for module in copied.modules():
        module._compiled_call_impl = None
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            # A cache of keys and values grows while it is used; training needs none.
            config.use_cache = False
    return copied


def _dtypes(model: nn.Module, dtype_of: DtypeOf) -> dict[int, torch.dtype]:
    """Return the dtype of each floating-point parameter and buffer, by identity."""
    found: dict[int, torch.dtype] = {}
    for name, module in model.named_modules():
        wanted = dtype_of(name)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                found[id(tensor)] = torch.promote_types(wanted, found.get(id(tensor), wanted))
    return found


def _cast(tensor: Tensor, dtypes: dict[int, torch.dtype]) -> Tensor:
    dtype = dtypes.get(id(tensor))
    return tensor.detach() if dtype is None else tensor.detach().to(dtype)
