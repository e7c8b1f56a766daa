"""Where DeepSpeed's optimizers keep the gradients that this rank is about to step with.

Each keeper gives the part of every trained parameter that lies in this rank's partition, without
the padding that fills partitions up. A part may be empty: then other ranks hold the parameter.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mp_agent.probe.optimizers.engine import Found


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a parameter that this rank's optimizer steps."""

    parameter: torch.Tensor
    elements: int
    group: dist.ProcessGroup | None
    """Group over which the parameter is split, or copied; None for the default group."""


@dataclass(frozen=True, slots=True)
class Keeper:
    """The gradients of one kind of optimizer.

    split: whether each rank holds its own part, rather than all of them the same.
    gradients: those that an optimizer has now; keeps neither it nor its parameters alive.
    """

    split: bool
    parts: tuple[Part, ...]
    gradients: Callable[[Any], Found]


def keeper_of(optimizer: Any, engine: Any) -> Keeper:
    """Return the keeper of an engine's optimizer. Raises AttributeError where it is not known."""
    if hasattr(optimizer, "params_in_partition"):
        return _stages_1_and_2(optimizer)
    if hasattr(optimizer, "fp16_partitioned_groups_flat"):
        return _stage_3(optimizer)
    if hasattr(optimizer, "bf16_groups"):
        return _bf16(optimizer)
    return _whole(optimizer, engine.seq_data_parallel_group)


def trained_by(optimizer: Any) -> list[torch.Tensor]:
    """Return the model's parameters that an optimizer without ZeRO steps, or has copies of."""
    groups = getattr(optimizer, "fp16_groups", None)
    if groups is None:
        groups = [group["params"] for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group]


def _whole(optimizer: Any, group: dist.ProcessGroup | None) -> Keeper:
    """Without ZeRO every rank has the averaged gradient of the whole model."""

    def gradients(optimizer: Any) -> Found:
        return {id(p): p.grad for p in trained_by(optimizer) if p.grad is not None}

    parts = [Part(each, each.numel(), group) for each in trained_by(optimizer)]
    return Keeper(False, tuple(parts), gradients)


def _stages_1_and_2(optimizer: Any) -> Keeper:
    def gradients(optimizer: Any) -> Found:
        if optimizer.cpu_offload:
            return dict(_offloaded_1_and_2(optimizer))
        found: dict[int, torch.Tensor] = {}
        for index, parameters in enumerate(optimizer.params_in_partition):
            kept = optimizer.averaged_gradients.get(index) or ()
            real = [each for each in kept if not getattr(each, "_zero_padding", False)]
            found.update((id(p), g) for p, g in zip(parameters, real, strict=False))
        return found

    parts = [
        Part(parameter, _linked_elements(parameter), optimizer.real_dp_process_group[index])
        for index, group in enumerate(optimizer.bit16_groups)
        for parameter in group
    ]
    return Keeper(True, tuple(parts), gradients)


def _offloaded_1_and_2(optimizer: Any) -> Iterator[tuple[int, torch.Tensor]]:
    for index, parameters in enumerate(optimizer.params_in_partition):
        flat = optimizer.single_partition_of_fp32_groups[index].grad
        for parameter in parameters if flat is not None else ():
            position = optimizer.grad_position[optimizer.get_param_id(parameter)]
            yield id(parameter), flat.view(-1).narrow(0, position[2], position[3])


def _stage_3(optimizer: Any) -> Keeper:
    parts = [
        Part(parameter, _partition_elements(parameter, group), group)
        for parameters in optimizer.fp16_groups
        for parameter in parameters
        for group in (getattr(parameter, "ds_process_group", optimizer.dp_process_group),)
    ]
    elements = {id(part.parameter): part.elements for part in parts}

    def gradients(optimizer: Any) -> Found:
        found: dict[int, torch.Tensor] = {}
        for index, parameters in enumerate(optimizer.fp16_groups):
            if optimizer.offload_optimizer:
                kept = list(_offloaded_3(optimizer, index, parameters))
            else:
                kept = list(optimizer.averaged_gradients.get(index) or ())
            for parameter, gradient in zip(parameters, kept, strict=False):
                own = gradient.view(-1).narrow(0, 0, elements[id(parameter)])
                found[id(parameter)] = own
        return found

    return Keeper(True, tuple(parts), gradients)


def _offloaded_3(
    optimizer: Any, index: int, parameters: list[torch.Tensor]
) -> Iterator[torch.Tensor]:
    flat = optimizer.fp32_partitioned_groups_flat[index].grad
    for parameter in parameters if flat is not None else ():
        _, offset, elements = optimizer.grad_position[optimizer.get_param_id(parameter)]
        yield flat.narrow(0, offset, elements)


def _bf16(optimizer: Any) -> Keeper:
    """Whole gradients are averaged in a wider type; the partition of them is stepped."""

    def gradients(optimizer: Any) -> Found:
        found: dict[int, torch.Tensor] = {}
        for index, group in enumerate(optimizer.bf16_groups):
            for place, parameter in enumerate(group):
                linked = parameter._hp_mapping
                if linked is None or not optimizer.fp32_groups_has_gradients[index][place]:
                    continue
                part = linked.lp_fragment_address
                whole = optimizer.fp32_groups_gradients[index][place].view(-1)
                found[id(parameter)] = whole.narrow(0, part.start, part.numel)
        return found

    parts = [
        Part(parameter, _linked_elements(parameter), optimizer.real_dp_process_group[index])
        for index, group in enumerate(optimizer.bf16_groups)
        for parameter in group
    ]
    return Keeper(True, tuple(parts), gradients)


def _linked_elements(parameter: Any) -> int:
    """Return how many elements of a parameter are linked to this rank's master weights."""
    linked = parameter._hp_mapping
    return 0 if linked is None else int(linked.lp_fragment_address.numel)


def _partition_elements(parameter: Any, group: dist.ProcessGroup | None) -> int:
    """Return how many of a ZeRO-3 partition's elements are the parameter's, not padding."""
    size = int(parameter.ds_tensor.ds_numel)
    start = size * dist.get_rank(group)
    return max(0, min(size, int(parameter.ds_numel) - start))
