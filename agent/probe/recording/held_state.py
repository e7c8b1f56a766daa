"""Bits of what a checkpoint would hold besides what optimizers step: frozen parameters, buffers."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from mp_agent.probe import accelerator
from mp_agent.probe.optimizers.layer_slots import local_of
from mp_agent.probe.optimizers.lookup.parameter_names import strip_wrappers
from mp_agent.probe.optimizers.measurement import Measurement
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import STATE
from mp_agent.ring.interruptions import pass_on

TENSORS_AT_MOST = 4096
ELEMENTS_AT_MOST = 16 * 1024
"""Looked at per tensor and step; of a larger one another part each time, the same on all ranks."""

_LOCAL_CLASSES = ("Observer", "FakeQuant")
_EVIDENCE, _COPIED, _LOCAL = 0.0, 1.0, -1.0


class _Held(NamedTuple):
    """One tensor: where it is found, and what is known of it on other ranks."""

    module: nn.Module
    key: str
    copied: float

    def tensor(self) -> torch.Tensor | None:
        """Return this rank's part of it, as it is now."""
        own = self.module._buffers.get(self.key)
        own = self.module._parameters.get(self.key) if own is None else own
        if own is None or own.device.type == "meta":
            return None
        local = local_of(own.detach())
        plain = type(local) in (torch.Tensor, nn.Parameter) and local.layout == torch.strided
        return local if plain and local.is_contiguous() else None


class HeldState:
    """Adds them to the steps on which replicas are compared. Keeps the newest model alive."""

    def __init__(self, measurement: Measurement, note_unsupported: Callable[[str], None]) -> None:
        self._measurement = measurement
        self._note_unsupported = note_unsupported
        self._made_of: tuple[int, ...] = ()
        self._held: dict[str, _Held] = {}

    def names(self, root: nn.Module | None, plans: Sequence[MeasurementPlan]) -> tuple[str, ...]:
        """Return the names of the tensors that `root` holds and that no optimizer steps."""
        made_of = (id(root), *(id(plan.layers) for plan in plans))
        if made_of != self._made_of:
            stepped = {identity for plan in plans for identity in plan.identities}
            self._made_of = made_of
            self._held = {} if root is None else _find(root, stepped)
        return tuple(self._held)

    def add(self, step: OpenStep) -> None:
        """Add the rows [M, C] of the tensors, in the order of their names."""
        if not self._held or STATE.name in step.own_rows:
            return
        tensors = [held.tensor() for held in self._held.values()]
        device = next((each.device for each in tensors if each is not None), torch.device("cpu"))
        if not accelerator.is_supported(device):
            return
        parts = [_part(each, step.sequence, device) for each in tensors]
        try:
            with torch.no_grad():
                columns = {
                    "bits": self._measurement.digests(device, parts),
                    "varied": torch.stack([_varied(part) for part in parts]).double(),
                    "copied": _sent([held.copied for held in self._held.values()], device),
                }
        except (TypeError, RuntimeError) as error:
            pass_on(error)
            if accelerator.is_sticky_error(error) or isinstance(error, torch.OutOfMemoryError):
                return  # no fault of the tensors
            self._note_unsupported("digests of buffers of this kind")
            self._held = {}
            return
        step.own_rows[STATE.name] = torch.stack([columns[name] for name in STATE.names], dim=1)


def _find(root: nn.Module, stepped: Collection[int]) -> dict[str, _Held]:
    """Return what is held by name, each tensor once, in module order."""
    found: dict[str, _Held] = {}
    seen: set[int] = set(stepped)
    wrappers = [each for each in root.modules() if isinstance(each, DistributedDataParallel)]
    known: Mapping[int, float] = {
        id(tensor): copied for wrapper in wrappers for tensor, copied in _wrapped(wrapper)
    }
    for path, module in nn.Module.named_modules(root):
        kept = {**module._parameters, **module._buffers}
        for key, tensor in kept.items():
            if tensor is None or id(tensor) in seen or key in module._non_persistent_buffers_set:
                continue
            seen.add(id(tensor))
            copied = known.get(id(tensor), _EVIDENCE)
            if key in module._buffers and _is_local(module, key):
                copied = _LOCAL
            name = strip_wrappers(f"{path}.{key}" if path else key)
            found.setdefault(name, _Held(module, key, copied))
            if len(found) == TENSORS_AT_MOST:
                return found
    return found


def _wrapped(wrapper: DistributedDataParallel) -> Iterator[tuple[torch.Tensor, float]]:
    """Yield what a wrapper made equal, and whether it leaves it to the script from then on.

    Buffers that it sends from rank 0 before each forward pass differ after it where the pass
    changes them, and are equal again before the next one.
    """
    ignored = wrapper.parameters_to_ignore
    for name, parameter in nn.Module.named_parameters(wrapper.module):
        if name not in ignored:
            yield parameter, _COPIED
    for name, buffer in nn.Module.named_buffers(wrapper.module):
        if name not in ignored:
            yield buffer, _LOCAL if wrapper.broadcast_buffers else _COPIED


def _is_local(module: nn.Module, key: str) -> bool:
    """Return whether a buffer is local by design: statistics of its own data, random state."""
    if isinstance(module, _NormBase):
        return not isinstance(module, nn.SyncBatchNorm)
    if any(word in type(module).__name__ for word in _LOCAL_CLASSES):
        return True
    return key == "num_batches_tracked" or "rng" in key.lower().split("_")


def _part(tensor: torch.Tensor | None, sequence: int, device: torch.device) -> torch.Tensor:
    """Return the elements to look at in step `sequence`; none of a tensor that lies elsewhere."""
    if tensor is None or tensor.device != device:
        return torch.empty(0, device=device)
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
    parts = -(-flat.numel() // ELEMENTS_AT_MOST) or 1
    start = sequence % parts * ELEMENTS_AT_MOST
    return flat[start : start + ELEMENTS_AT_MOST]


def _varied(part: torch.Tensor) -> torch.Tensor:
    if part.numel() < 2:
        return torch.zeros((), device=part.device)
    return (part != part[0]).any().float()


def _sent(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return accelerator.sent(torch.tensor(values, dtype=torch.float64, device="cpu"), device)
