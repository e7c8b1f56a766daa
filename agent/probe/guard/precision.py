"""Lets modules compute in a wider format than the autocast around them, for a while."""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._pytree import tree_map

from mp_agent.catalog.guard import Values
from mp_agent.probe.guard.switched_module import switched
from mp_agent.probe.guard.trouble import ObservedUpdate, TroubleTrigger
from mp_agent.probe.optimizers.plan import fsdp_dtype

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names under which wrappers hold the module, which names of modules leave out."""


class PrecisionSwitch:
    """Switches modules when trouble repeats, and back after `hold_steps` without any."""

    def __init__(self, values: Values, *, dry_run: bool) -> None:
        self.trigger = TroubleTrigger(values)
        self._patterns = str(values["modules"]).split()
        self._wide = _in_bf16 if values["dtype"] == "bf16" else _in_fp32
        self._hold_steps = int(values["hold_steps"])
        self._dry_run = dry_run
        self._quiet_steps = 0
        self._is_switched = False
        self._restore: list[Callable[[], None]] = []

    def observe(self, update: ObservedUpdate, model: nn.Module | None) -> bool:
        """Add an update; return whether modules are switched from now on."""
        if self._is_switched:
            self._quiet_steps = 0 if update.is_trouble else self._quiet_steps + update.begins_step
            if self._quiet_steps >= self._hold_steps:
                self.switch_back()
            return False
        if model is None or not self.trigger.observe(update):
            return False
        if not (found := list(self._found_in(model))):
            return False
        self._is_switched, self._quiet_steps = True, 0
        if not self._dry_run:
            for module in found:
                self._restore.append(switched(module, self._wide))
        return True

    def switch_back(self) -> None:
        """Let all modules compute as before."""
        self._is_switched = False
        while self._restore:
            self._restore.pop()()

    def _found_in(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the outermost modules of which the name matches; none where FSDP sets the dtype.

        Nor scripted ones, which torch does not let compute in another way.
        """
        if _is_mixed_by_fsdp(model) or isinstance(model, torch.jit.ScriptModule):
            return
        if "*" in self._patterns:
            yield model
            return
        found: list[str] = []
        for name, module in model.named_modules():
            plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
            is_within = any(name.startswith(outer + ".") for outer in found)
            if plain and not is_within and any(fnmatchcase(plain, p) for p in self._patterns):
                found.append(name)
                yield module


def _is_mixed_by_fsdp(model: nn.Module) -> bool:
    """Return whether weights are narrower while modules compute than they are in between."""
    modules = list(model.modules())
    if fsdp_dtype(modules) not in (None, torch.float32):
        return True
    wrapped = [module for module in modules if isinstance(module, FullyShardedDataParallel)]
    return any(module.mixed_precision.param_dtype is not None for module in wrapped)


def _in_fp32(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute without autocast on inputs in FP32; as before where the weights are narrower."""
    weights = [each for each in module.parameters() if each.is_floating_point()]
    if any(each.dtype != torch.float32 for each in weights):
        return forward(*args, **kwargs)
    device = weights[0].device.type if weights else "cpu"
    with torch.autocast(device, enabled=False):
        return forward(*tree_map(_widened, args), **tree_map(_widened, kwargs))


def _in_bf16(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute with autocast to BF16 in place of the one that is on; as before where none is."""
    weights = [each for each in module.parameters() if each.is_floating_point()]
    device = weights[0].device.type if weights else "cpu"
    if not torch.is_autocast_enabled(device):
        return forward(*args, **kwargs)
    with torch.autocast(device, dtype=torch.bfloat16):
        return forward(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value
