"""Whether gradients were reduced over their replicas before the optimizer steps with them.

Local SGD and its relatives (DiLoCo, post-local SGD, model averaging) step with each rank's own
gradients and average the weights now and then. Until then ranks differ on purpose.
"""

import weakref
from collections.abc import Callable, Collection, Iterable

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

_HOOKS_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks."


class Reducers:
    """The wrappers that reduce the gradients of some parameters. Keeps none of them alive."""

    def __init__(self, modules: Iterable[nn.Module], parameters: Collection[int]) -> None:
        """Find them among `modules`; `parameters` are given by `id`."""
        self._wrappers = tuple(
            weakref.ref(module)
            for module in modules
            if isinstance(module, (DistributedDataParallel, FSDPModule))
            and any(id(parameter) in parameters for parameter in nn.Module.parameters(module))
        )

    def reduced(self) -> bool | None:
        """Return whether the last backward reduced gradients over all replicas.

        None where no wrapper reduces any. False also where that is not known: of a communication
        hook that is not torch's own.
        """
        wrappers = self._alive()
        return all(map(_has_reduced, wrappers)) if wrappers else None

    @property
    def shard(self) -> bool:
        """Whether a wrapper splits parameters, and reduces gradients of copies that it made."""
        return bool(self.sharding)

    @property
    def sharding(self) -> list[FSDPModule]:
        """The modules whose parameters FSDP2 splits."""
        return [wrapper for wrapper in self._alive() if isinstance(wrapper, FSDPModule)]

    @property
    def replace_late(self) -> bool | None:
        """Whether local gradients stay in place until backward ends; None without a wrapper.

        With `gradient_as_bucket_view` they are reduced where they are, as soon as they can be.
        """
        wrappers = self._alive()
        if not wrappers:
            return None
        return all(getattr(each, "gradient_as_bucket_view", True) is False for each in wrappers)

    def _alive(self) -> list[nn.Module]:
        return [wrapper for ref in self._wrappers if (wrapper := ref()) is not None]


def _has_reduced(wrapper: nn.Module) -> bool:
    if isinstance(wrapper, DistributedDataParallel):
        # Of the last forward: `no_sync()` has restored the other flag by the time of the step.
        if not getattr(wrapper, "require_forward_param_sync", True):
            return False
        return all(_hook_reduces(*pair) for pair in getattr(wrapper, "_comm_hooks", ()))
    state = getattr(wrapper, "_get_fsdp_state", lambda: None)()
    group = getattr(state, "_fsdp_param_group", None)
    return bool(getattr(group, "reduce_grads", True) and getattr(group, "all_reduce_grads", True))


def _hook_reduces(hook: Callable[..., object], state: object) -> bool:
    start = getattr(state, "start_localSGD_iter", None)
    if start is not None:  # PostLocalSGDState, which stops counting at `start`
        return bool(getattr(state, "iter", start) < start)
    return hook is not noop_hook and (hook.__module__ or "").startswith(_HOOKS_OF_TORCH)
