"""The layers of an optimizer: whole parameters, or parts of a flat one."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from mp_agent.probe.optimizers.lookup.parameter_names import NamedParameter, strip_wrappers

PARTIAL_GRADIENT = "gradients with a partial placement"

_FLAT_NAME = "_flat_param"


@dataclass(frozen=True, slots=True)
class LayerSlot:
    """One layer: a parameter, or the part of FSDP1's flat parameter that is one's local shard."""

    name: str
    parameter: torch.Tensor
    part: slice | None = None

    @property
    def elements(self) -> int:
        """Elements on this rank."""
        if self.part is not None:
            return int(self.part.stop - self.part.start)
        return local_of(self.parameter.detach()).numel()

    def gradient(self) -> torch.Tensor | None:
        """Return this rank's gradient as it is now, of the part alone."""
        gradient = self.parameter.grad
        if gradient is None or self.part is None:
            return gradient
        return gradient[self.part] if self.part.stop > self.part.start else None


def slots_of(named: NamedParameter) -> Iterator[LayerSlot]:
    """Yield the layers of a parameter: several if it is flat, without the padding between them.

    A flat parameter says of each of its tensors where its local shard lies (`_ShardParamInfo`).
    """
    parameter = named.parameter
    if not getattr(parameter, "_is_flat_param", False):
        yield LayerSlot(named.name, parameter)
        return
    flat: torch.Tensor = parameter
    prefix = named.name.removesuffix(_FLAT_NAME)
    if prefix == named.name:
        prefix = f"{named.name}."
    for name, shard in zip(flat._fqns, flat._shard_param_infos, strict=True):  # type: ignore[attr-defined]
        start = shard.offset_in_shard if shard.in_shard else 0
        length = shard.numel_in_shard if shard.in_shard else 0
        yield LayerSlot(strip_wrappers(f"{prefix}{name}"), parameter, slice(start, start + length))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; called without autograd, so `to_local` is a look-up."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def lies_like(gradient: DTensor, parameter: torch.Tensor) -> bool:
    """Return whether a gradient is laid out as its parameter: then it is shared out alike.

    Not so a gradient that autograd left partial, as those of replicated norms under sequence
    parallelism: its sum over ranks has not been taken, and no statistic of a part means much.
    """
    return isinstance(parameter, DTensor) and gradient.placements == parameter.placements
