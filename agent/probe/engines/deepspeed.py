"""Reads DeepSpeed's engines as they step, or says which are not measured.

Where DeepSpeed's optimizers keep the gradients that this rank is about to step with: each keeper
gives the part of every trained parameter that lies in this rank's partition, without the padding
that fills partitions up. A part may be empty: then other ranks hold the parameter.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mp_agent.probe.optimizers.engine import (
    LAYOUT_ERRORS,
    EngineLayer,
    EnginePlan,
    EngineResult,
    EngineStep,
    Found,
    make_engine_plan,
)
from mp_agent.probe.optimizers.parameter_names import name_parameters
from mp_agent.probe.placement import Reducers, this_rank
from mp_agent.probe.placement.axes import Grid, PlacementAxis, Spread
from mp_agent.probe.scalars import Scalar, scalar_of, snapshot_of
from mp_agent.records.schema import Share


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

    return Keeper(True, _linked_parts(optimizer, optimizer.bit16_groups), gradients)


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

    return Keeper(True, _linked_parts(optimizer, optimizer.bf16_groups), gradients)


def _linked_parts(optimizer: Any, groups: Iterable[Iterable[torch.Tensor]]) -> tuple[Part, ...]:
    """Return the part of each parameter that is linked to this rank's master weights."""
    return tuple(
        Part(parameter, _linked_elements(parameter), optimizer.real_dp_process_group[index])
        for index, group in enumerate(groups)
        for parameter in group
    )


def _linked_elements(parameter: Any) -> int:
    """Return how many elements of a parameter are linked to this rank's master weights."""
    linked = parameter._hp_mapping
    return 0 if linked is None else int(linked.lp_fragment_address.numel)


def _partition_elements(parameter: Any, group: dist.ProcessGroup | None) -> int:
    """Return how many of a ZeRO-3 partition's elements are the parameter's, not padding."""
    size = int(parameter.ds_tensor.ds_numel)
    start = size * dist.get_rank(group)
    return max(0, min(size, int(parameter.ds_numel) - start))


def unsupported_by(engine: Any) -> str:
    """Return why an engine's gradients are left out; empty when they are measured."""
    optimizer = engine.optimizer
    reasons = {
        "DeepSpeed's pipeline parallelism": _has(engine, "pipeline_parallelism"),
        "DeepSpeed's experts": _has(engine, "has_moe_layers"),
        "DeepSpeed with model parallelism": _splits_tensors(engine),
        "DeepSpeed's ZenFlow": _has(engine, "zenflow") or _has(optimizer, "zenflow"),
        "DeepSpeed's SuperOffload": "SuperOffload" in type(optimizer).__name__,
        "DeepSpeed's MiCS": "MiCS" in type(optimizer).__name__,
        "DeepSpeed's offload of gradients to NVMe": _has(optimizer, "swap_optimizer"),
        "DeepSpeed's offload of gradients from an accelerator": _offloads_from_accelerator(engine),
        "DeepSpeed's Muon": _updates_in_place_of_gradients(optimizer),
        "DeepSpeed's DeepCompile": _calls(engine, "is_deepcompile_active"),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _has(owner: Any, name: str) -> bool:
    return bool(getattr(owner, name, False))


def _calls(owner: Any, name: str) -> bool:
    method = getattr(owner, name, None)
    return bool(method()) if callable(method) else False


def _splits_tensors(engine: Any) -> bool:
    """Return whether ranks hold parts of tensors besides ZeRO's: by AutoTP, or a user's `mpu`."""
    sizes = [getattr(engine, "autotp_size", None)]
    sizes.append(getattr(getattr(engine, "mpu", None), "get_model_parallel_world_size", None))
    return any(int(size()) > 1 for size in sizes if callable(size))


def _offloads_from_accelerator(engine: Any) -> bool:
    """Return whether gradients are still on their way to the host when a step begins."""
    optimizer = engine.optimizer
    offloads = _has(optimizer, "cpu_offload") or _has(optimizer, "offload_optimizer")
    return offloads and str(engine.device).split(":")[0] != "cpu"


def _updates_in_place_of_gradients(optimizer: Any) -> bool:
    """Return whether ZeRO puts Muon's orthogonal updates where gradients are kept.

    The optimizer of BF16 weights at stage 1 makes them later.
    """
    basic = getattr(optimizer, "optimizer", None)
    uses = "muon" in type(basic).__name__.lower()
    return uses and not hasattr(optimizer, "fp32_groups_has_gradients")


UNKNOWN_LAYOUT = "gradients as this version of DeepSpeed keeps them"

_NOTHING = Keeper(split=False, parts=(), gradients=lambda optimizer: {})


class EngineReducers(Reducers):
    """Whether an engine averages gradients: some optimizers exchange compressed momenta instead."""

    def __init__(self, engine: Any, keeper: Keeper) -> None:
        super().__init__((), ())
        self.any = not keeper.split and bool(keeper.parts)
        self._engine = weakref.ref(engine)

    def reduced(self) -> bool | None:
        """Return whether replicas step with the same gradients; None where there are none."""
        if not self.any:
            return None
        return bool(getattr(self._engine(), "enable_backward_allreduce", True))


def make_plan(engine: Any, label: str) -> EnginePlan:
    """Return what to measure; no layers, but the reason, where that is not known to be right."""
    stage = int(engine.zero_optimization_stage())
    reason = unsupported_by(engine)
    keeper, shares = _NOTHING, []
    if not reason:
        try:
            keeper = keeper_of(engine.optimizer, engine)
            shares = [_share(part, stage, split=keeper.split) for part in keeper.parts]
        except LAYOUT_ERRORS:
            keeper, shares, reason = _NOTHING, [], UNKNOWN_LAYOUT
    held = {id(p.parameter): (p, share) for p, share in zip(keeper.parts, shares, strict=True)}
    named = name_parameters((part.parameter for part in keeper.parts), engine.module, {})
    parts = [(each, *held[id(each.parameter)]) for each in named]
    return make_engine_plan(
        [EngineLayer(each, part.elements, share) for each, part, share in parts],
        label=label,
        owner=engine.optimizer,
        find=keeper.gradients,
        whole=_gathered if keeper.split else trained_by,
        identities=set(map(id, nn.Module.parameters(engine.module))),
        device=_device(engine),
        compute_dtype=_compute_dtype(engine.module),
        strategy=f"deepspeed_zero{stage}",
        reducers=EngineReducers(engine, keeper),
        data_ranks=_data_ranks(engine),
        unsupported=reason,
        unknown_layout=UNKNOWN_LAYOUT,
        root=None if reason else engine.module,
    )


def _data_ranks(engine: Any) -> Sequence[int]:
    """Return the ranks that train on data of their own; those that split sequences get the same.

    None where that is not known: the group may be one of the user's own.
    """
    group = getattr(engine, "data_parallel_group", None)
    try:
        return () if group is None else dist.get_process_group_ranks(group)
    except LAYOUT_ERRORS:
        return ()


def _gathered(optimizer: Any) -> Iterable[torch.Tensor]:
    """Return no parameter: ZeRO gathers its own again after each step."""
    return ()


def _share(part: Part, stage: int, *, split: bool) -> Share:
    ranks = tuple(dist.get_process_group_ranks(part.group or dist.group.WORLD))
    spread = Spread.SPLIT if split else Spread.COPIED
    return (
        Grid(this_rank()).crossed_by(PlacementAxis(spread, ranks, f"deepspeed_zero{stage}")).share()
    )


def _device(engine: Any) -> torch.device:
    """Return where the gradients are: with the weights, unless they are offloaded."""
    optimizer = engine.optimizer
    offloaded = getattr(optimizer, "cpu_offload", False) or getattr(
        optimizer, "offload_optimizer", False
    )
    return torch.device("cpu") if offloaded else torch.device(engine.device)


def _compute_dtype(module: nn.Module) -> torch.dtype:
    elements: Counter[torch.dtype] = Counter()
    for parameter in nn.Module.parameters(module):
        elements[parameter.dtype] += int(getattr(parameter, "ds_numel", parameter.numel()))
    return elements.most_common(1)[0][0] if elements else torch.float32


class EngineReader:
    """Implements `optimizers.engine.OwningEngine` for a `DeepSpeedEngine`, held weakly."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._scale_before: Scalar | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that steps the master weights."""
        basic = getattr(self._engine(), "basic_optimizer", None)
        return basic if isinstance(basic, Optimizer) else None

    @property
    def scaler_name(self) -> str:
        """DeepSpeed's own loss scaler, or torch's under its autocast; empty without FP16."""
        if (scaler := autocast_scaler(self._engine())) is not None:
            return type(scaler).__name__
        optimizer = _optimizer(self._engine())
        if _own_scale(optimizer) is None:
            return ""
        scaler = getattr(optimizer, "loss_scaler", None)
        if scaler is not None:
            return type(scaler).__name__
        dynamic = getattr(optimizer.loss_scale_config, "dynamic_loss_scale", False)
        return "DynamicLossScaler" if dynamic else "LossScaler"

    def make_plan(self, label: str) -> EnginePlan:
        """Return what to measure of the engine's model."""
        return make_plan(self._engine(), label)

    def begin(self) -> EngineStep:
        """Return the loss scale in force, and the engine's count of steps."""
        engine = self._engine()
        scaler = autocast_scaler(engine)
        if scaler is not None:
            self._scale_before = snapshot_of(scaler._get_scale_async())
        else:
            self._scale_before = _own_scale(_optimizer(engine))
        completed = getattr(engine, "global_steps", None)
        return EngineStep(
            loss_scale=self._scale_before,
            gradient_scale=self._scale_before if _scales_loss(engine) else None,
            completed=completed if isinstance(completed, int) else None,
        )

    def end(self) -> EngineResult:
        """Return whether the step was skipped, and the clipping that it did."""
        engine: Any = self._engine()
        optimizer = _optimizer(engine)
        overflow = getattr(optimizer, "overflow", False)
        by_scaler = autocast_scaler(engine) is not None
        limit = engine.gradient_clipping()
        return EngineResult(
            skipped=None if by_scaler and not overflow else bool(overflow),
            clip_max_norm=float(limit) if limit and limit > 0 else None,
            norm=self._norm(optimizer),
        )

    def _norm(self, optimizer: Any) -> Scalar | None:
        """Return the norm that a ZeRO optimizer has gathered from all ranks."""
        if not hasattr(optimizer, "backward_prologue"):
            return None
        norm = scalar_of(getattr(optimizer, "_global_grad_norm", None))
        if norm is None:
            return None
        if isinstance(norm, torch.Tensor):
            return norm.masked_fill(norm < 0, torch.nan)  # -1 stands for a norm that is no number
        scale, before = _own_scale(optimizer), self._scale_before
        if hasattr(optimizer, "fp16_partitioned_groups_flat") and scale and before:
            norm *= float(scale) / float(before)  # stage 3 divides by the scale of the next step
        return norm if isfinite(norm) and norm >= 0 else torch.nan


def autocast_scaler(engine: Any) -> Any:
    """Return torch's GradScaler where DeepSpeed scales losses by it."""
    return getattr(engine, "torch_autocast_z0_gradscaler", None) or getattr(
        _optimizer(engine), "torch_autocast_gradscaler", None
    )


def _scales_loss(engine: Any) -> bool:
    """Return whether the loss is scaled before backward.

    DeepSpeed 0.19 does so for ZeRO's optimizers alone; its others divide gradients by a scale that
    nothing has multiplied them with.
    """
    by_optimizer = not hasattr(type(engine), "scale")  # before 0.18, by a method of any optimizer
    scales = by_optimizer or hasattr(_optimizer(engine), "scale_if_loss")
    return scales or autocast_scaler(engine) is not None


def _optimizer(engine: Any) -> Any:
    return getattr(engine, "optimizer", None)


def _own_scale(optimizer: Any) -> Scalar | None:
    """Return the scale of an optimizer of FP16 weights; None for other types."""
    config = getattr(optimizer, "loss_scale_config", None)
    if config is not None:
        if not getattr(config, "use_grad_scaling", True):
            return None
    elif getattr(optimizer, "dtype", None) is not torch.float16:
        return None
    return scalar_of(getattr(optimizer, "loss_scale", None))
