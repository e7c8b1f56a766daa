"""Where backward adds a parameter's gradient: to the parameter itself, or to FSDP2's copy of it."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mp_agent.probe.optimizers.layer_slots import lies_like
from mp_agent.probe.optimizers.plan import MeasurementPlan


class GradientSource:
    """The tensor that autograd adds the gradient of one parameter to. Keeps nothing alive."""

    __slots__ = ("_copied_from", "_tensor")

    def __init__(self, tensor: torch.Tensor | None, copied_from: Any = None) -> None:
        """copied_from: the `FSDPParam` whose whole, gathered parameter `tensor` is.

        FSDP2 makes that tensor at the first all-gather, and frees and fills its storage from then
        on; None before.
        """
        self._tensor = None if tensor is None else weakref.ref(tensor)
        self._copied_from = None if copied_from is None else weakref.ref(copied_from)

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor; None where there is none, yet or any more."""
        return None if self._tensor is None else self._tensor()

    @property
    def trained(self) -> bool:
        """Whether autograd adds to its gradient."""
        tensor = self.tensor
        return tensor is not None and tensor.requires_grad and tensor.is_leaf

    @property
    def is_current(self) -> bool:
        """Whether the wrapper still computes with this tensor."""
        if self._copied_from is None:
            return self.tensor is not None
        return self.tensor is getattr(self._copied_from(), "_unsharded_param", None)

    @property
    def was_taken(self) -> bool:
        """Whether FSDP2 has taken the gradient away, to reduce it."""
        return self._copied_from is not None and not self._addends()

    def gradient(self) -> torch.Tensor | None:
        """Return the rank's gradient, as far as it is there; its local part if it is a DTensor.

        Of micro-batches that are reduced in another dtype than they are computed in, FSDP2 keeps
        the sum apart. Raises ValueError where autograd left a gradient partial.
        """
        locals_of = [self._local(each) for each in self._addends()]
        if len(locals_of) == 2:
            return locals_of[0] + locals_of[1]
        return locals_of[0] if locals_of else None

    def _addends(self) -> list[torch.Tensor]:
        gradient = getattr(self.tensor, "grad", None)
        kept = getattr(self._copied_from(), _KEPT_SUM, None) if self._copied_from else None
        # From torch 2.15 on, the sum is the gradient itself.
        found = [gradient] if kept is gradient else [kept, gradient]
        return [each for each in found if each is not None]

    def _local(self, gradient: torch.Tensor) -> torch.Tensor:
        if not isinstance(gradient, DTensor):
            return gradient
        tensor = self.tensor
        if tensor is None or not lies_like(gradient, tensor):
            raise ValueError("the gradient has a partial placement")
        return gradient.to_local()


_KEPT_SUM = "unsharded_accumulated_grad"


def sources_of(plan: MeasurementPlan) -> list[GradientSource] | None:
    """Return the source of each parameter of a plan; None where they are not known.

    That is so of flat parameters, of parameters that are offloaded to another device than that on
    which they are used, and of a release of torch in which FSDP2 has another structure.
    """
    if any(slot.part is not None for slot in plan.slots):
        return None
    parameters = [slot.parameter for slot in plan.slots]
    sharding = plan.reducers.sharding
    if not sharding:
        return [GradientSource(parameter) for parameter in parameters]
    copied = {id(each.sharded_param): each for each in _fsdp_params(sharding)}
    return _sources_under_fsdp(parameters, copied, plan.device)


def _sources_under_fsdp(
    parameters: Iterable[torch.Tensor], copied: Mapping[int, Any], device: torch.device
) -> list[GradientSource] | None:
    found: list[GradientSource] = []
    for parameter in parameters:
        fsdp_param = copied.get(id(parameter))
        if fsdp_param is None and not isinstance(parameter, DTensor):
            found.append(GradientSource(parameter))  # one of `ignored_params`
            continue
        if not all(hasattr(fsdp_param, name) for name in (_KEPT_SUM, "__weakref__")):
            return None
        tensor = getattr(fsdp_param, "_unsharded_param", None)
        if tensor is not None and tensor.device != device:
            return None
        found.append(GradientSource(tensor, fsdp_param))
    return found


def _fsdp_params(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    """Yield the `FSDPParam` of each parameter, as far as FSDP2's internals show them."""
    for module in modules:
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None)  # not in earlier releases
        if groups is None:
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for fsdp_param in getattr(group, "fsdp_params", ()):
                if hasattr(fsdp_param, "sharded_param"):
                    yield fsdp_param
