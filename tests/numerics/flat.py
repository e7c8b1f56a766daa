"""FSDP1 on the CPU, where torch does not run it: its own flat parameters, gradients by hand."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy


class Unit(nn.Module):
    """What FullyShardedDataParallel makes of a module, as far as placement goes."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        across: dist.ProcessGroup | None,
        *,
        original: bool,
    ) -> None:
        super().__init__()
        taken = {id(p) for unit in module.modules() if isinstance(unit, Unit) for p in unit.held}
        parameters = [p for p in module.parameters() if id(p) not in taken]
        self._handle = FlatParamHandle(
            parameters,
            module,
            torch.device("cpu"),
            HandleShardingStrategy.FULL_SHARD,
            False,
            None,
            None,
            False,
            group,
            original,
        )
        self._inter_node_pg = across
        self.starts = [start for start, _ in self._handle._get_flat_param_offsets()]
        self.shapes = [tuple(shape) for shape in self._handle.flat_param._shapes]
        self._unsharded = self._handle.flat_param.numel()
        self._handle.shard()
        if original:
            self._handle._use_sharded_views()
        else:
            for name, owner, _ in self._handle.flat_param._param_infos:
                delattr(owner, name)
            module.register_parameter("_flat_param", self._handle.flat_param)
        self._fsdp_wrapped_module = module

    @property
    def held(self) -> list[torch.Tensor]:
        return [self._handle.flat_param, *(self._handle.flat_param._params or ())]

    @property
    def names(self) -> list[str]:
        return list(self._handle.flat_param._fqns)

    def set_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Leave this rank's shard of the gradients where FSDP's backward leaves it."""
        flat, handle = self._handle.flat_param, self._handle
        whole = torch.zeros(self._unsharded, dtype=flat.dtype)
        for start, gradient in zip(self.starts, gradients, strict=True):
            whole[start : start + gradient.numel()] = gradient.flatten()
        shard, padding = FlatParamHandle._get_shard(whole, handle.rank, handle.world_size)
        flat.grad = F.pad(shard, (0, padding))[: flat.numel()].clone()
        if flat._params is not None:
            handle._use_sharded_grad_views()
