"""What there is to measure: an optimizer's parameters, their shares and their gradients."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mp_agent.probe import discovery, placement
from mp_agent.probe.discovery import LiveObjects, NamedParameter
from mp_agent.records.columns import GRADIENT_COLUMNS, Algebra
from mp_agent.records.schema import Layer, Share

_MAX_COLUMNS = tuple(
    index for index, column in enumerate(GRADIENT_COLUMNS) if column.algebra is Algebra.MAX
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The layers of one optimizer on this rank. Made once, and anew when its groups change.

    identities: `id` of each parameter; they live as long as the plan.
    parameters: [L], in the order of `layers`.
    rows_of_share: per share the rows [N] of its layers; `row_index_of_share` the same on device.
    """

    signature: tuple[tuple[int, int], ...]
    identities: frozenset[int]
    parameters: tuple[torch.Tensor, ...]
    layers: tuple[Layer, ...]
    shares: tuple[Share, ...]
    rows_of_share: tuple[tuple[int, ...], ...]
    row_index_of_share: tuple[torch.Tensor, ...]
    device: torch.device
    compute_dtype: torch.dtype
    """Of FSDP2's policy, else of most parameters; autocast may override it."""
    unsupported: tuple[str, ...]

    @property
    def first_collective_in_backward(self) -> bool:
        """Whether ranks first wait for each other in backward; sharded ones do so in forward."""
        return not any(isinstance(parameter, DTensor) for parameter in self.parameters)

    def fits(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer's groups are still those that the plan was made of."""
        return self.signature == _signature(optimizer)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether `parameter` is one of the plan's."""
        return id(parameter) in self.identities

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the local gradients [L] as they are now; None where there is none."""
        return [_local(parameter.grad) for parameter in self.parameters]

    def by_share(self, gradients: Sequence[torch.Tensor | None]) -> list[list[torch.Tensor]]:
        """Return gradients [L] as one list per share, absent ones left out."""
        return [
            [gradient for row in rows if (gradient := gradients[row]) is not None]
            for rows in self.rows_of_share
        ]

    def totals(self, rows_LC: torch.Tensor) -> torch.Tensor:
        """Return [G, C]: the columns' algebra applied to the layers of each share, on device."""
        if len(self.shares) == 1:
            return _reduce(rows_LC)[None]
        return torch.stack(
            [_reduce(rows_LC.index_select(0, index)) for index in self.row_index_of_share]
        )


def make_plan(
    optimizer: Optimizer, live: LiveObjects, root: nn.Module | None, ranks_in_run: int
) -> Plan:
    """Return what to measure of `optimizer`. Enters no collective."""
    wrappers = discovery.data_parallel_wrappers(live.modules)
    device = next(discovery.optimizer_parameters(optimizer)).device
    measured: list[tuple[NamedParameter, Share]] = []
    unsupported: dict[str, None] = {}
    for named in discovery.named_parameters(optimizer, root):
        wrapper = wrappers.get(id(named.parameter))
        share = placement.share_of(named.parameter, wrapper, ranks_in_run)
        if share is None:
            unsupported["parameters with a partial placement"] = None
        elif named.parameter.device != device:
            unsupported["parameters on several devices"] = None
        else:
            measured.append((named, share))
    shares = tuple(dict.fromkeys(share for _, share in measured))
    rows_of_share = tuple(
        tuple(row for row, (_, own) in enumerate(measured) if own == share) for share in shares
    )
    return Plan(
        signature=_signature(optimizer),
        identities=frozenset(id(named.parameter) for named, _ in measured),
        parameters=tuple(named.parameter for named, _ in measured),
        layers=tuple(_layer(named, shares.index(share)) for named, share in measured),
        shares=shares,
        rows_of_share=rows_of_share,
        row_index_of_share=tuple(torch.tensor(rows, device=device) for rows in rows_of_share),
        device=device,
        compute_dtype=_fsdp_dtype(live.modules) or _most_common_dtype(measured),
        unsupported=tuple(unsupported),
    )


def _fsdp_dtype(modules: Iterable[nn.Module]) -> torch.dtype | None:
    """Return the dtype in which FSDP2 computes, as far as its internals tell."""
    for module in modules:
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        dtype = getattr(getattr(state, "_mp_policy", None), "param_dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return None


def _most_common_dtype(measured: Iterable[tuple[NamedParameter, Share]]) -> torch.dtype:
    elements: Counter[torch.dtype] = Counter()
    for named, _ in measured:
        elements[named.parameter.dtype] += named.parameter.numel()
    return elements.most_common(1)[0][0]


def _layer(named: NamedParameter, share: int) -> Layer:
    local = _local(named.parameter.detach())
    return Layer(name=named.name, share=share, elements=0 if local is None else local.numel())


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return this rank's part of a tensor; called without autograd, so `to_local` is a look-up."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _signature(optimizer: Optimizer) -> tuple[tuple[int, int], ...]:
    return tuple((id(group["params"]), len(group["params"])) for group in optimizer.param_groups)


def _reduce(rows_NC: torch.Tensor) -> torch.Tensor:
    """Return [C]: N rows as one, in a fixed order, with no constant to send to the device."""
    total_C = rows_NC.sum(dim=0)
    for column in _MAX_COLUMNS:
        total_C[column] = rows_NC[:, column].amax()
    return total_C
