"""Bits of weights, of frozen parameters and of buffers, by which ranks are compared."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from mp_agent.probe import accelerator
from mp_agent.probe.instruments.instrument import Instrument
from mp_agent.probe.optimizers.parameter_names import strip_wrappers
from mp_agent.probe.optimizers.plan import LayerSlot, MeasurementPlan, few_elements, local_of
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.placement import may_begin_alike
from mp_agent.probe.scalars import scalar_of
from mp_agent.probe.statistics.pieces import send
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.measurement import Measurement
from mp_agent.probe.step.open_step import OpenStep, SampledRows
from mp_agent.records.columns import FEW_WEIGHTS, STATE, WEIGHTS, ColumnFamily
from mp_agent.records.schema import Layer, Share
from mp_agent.ring.interruptions import pass_on

log = logging.getLogger("mp_agent")

_TENSORS_SAMPLED = 8
_ELEMENTS_SAMPLED = 256
_TENSORS_COMPARED = 16
"""Per share, of which a few elements are compared at once."""
_LOOKED_AT = 1024
"""Elements of a tensor that show whether it is constant."""


class ReplicaEvidence(Instrument):
    """Adds what replicas are compared by to the steps of which several ranks train one model."""

    subject = "bits of replicas"
    begins = "with ranks"

    def __init__(
        self, measurement: Measurement, registry: OptimizerRegistry, schedule: LayerSchedule
    ) -> None:
        self._registry = registry
        self._schedule = schedule
        self._changes = PlanChanges()
        self._weights = WeightBits(measurement, registry.note_unsupported)
        self._state = HeldState(measurement, registry.note_unsupported)

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the tensors that no optimizer steps."""
        if self._registry.ranks_in_run() == 1:
            return {}
        names = self._state.names(model, self._registry.plans())
        return {STATE.name: names} if names else {}

    def gradients_measured(self, step: OpenStep, plans: Sequence[MeasurementPlan]) -> None:
        """Add the bits, unless another thread may be changing them meanwhile."""
        if self._registry.ranks_in_run() == 1:
            return
        if self._registry.trains_in_several_threads():
            self._registry.note_unsupported("digests of weights that several threads train")
            return
        reduced = step.scalars.get("gradients_reduced") == 1.0
        if step.weights_moved and not reduced:
            return  # by gradients of this rank's own
        if not reduced:
            self._weights.add_sample(step, plans)
        if self._changes.are_recent(step.sequence, plans) or self._schedule.compares(step.sequence):
            self._weights.add(step, plans)
            self._state.add(step)
        elif (number := self._schedule.compares_few(step.sequence)) is not None:
            self._weights.add_few(step, plans, number)

    def gradients_left_out(self, step: OpenStep, plans: Sequence[MeasurementPlan]) -> None:
        """Add the sample of weights: an averaging before this step would not be seen later."""
        if self._registry.ranks_in_run() == 1 or self._registry.trains_in_several_threads():
            return
        if step.weights_moved or _reduce(plans):
            return
        self._weights.add_sample(step, plans)
        for device in {plan.device for plan in plans}:
            if not accelerator.is_on_host(device):
                step.streams.add(accelerator.current_stream(device))


def _reduce(plans: Sequence[MeasurementPlan]) -> bool:
    """Return whether wrappers reduced the gradients of these plans, as far as there are any."""
    known = [found for plan in plans if (found := plan.reducers.reduced_present()) is not None]
    return bool(known) and all(known)


_CHANGES_APART_STEPS = 16


class PlanChanges:
    """Says whether what optimizers hold has changed, as where layers are unfrozen or added.

    What is wrong with it then shows after the next update: so that step is compared as well.
    """

    def __init__(self) -> None:
        self._layers: dict[str, Sequence[Layer]] = {}
        self._last = 0

    def are_recent(self, sequence: int, plans: Sequence[MeasurementPlan]) -> bool:
        """Return whether the plans have changed before this step or before the last one.

        Changes that come soon after another are left to the schedule: some scripts never stop.
        """
        for plan in plans:
            if plan.layers is not self._layers.get(plan.label):
                self._layers[plan.label] = plan.layers
                if not self._last or sequence - self._last > _CHANGES_APART_STEPS:
                    self._last = sequence
        return sequence - self._last <= 1


class WeightBits:
    """Adds them to a step, until weights are found of which there are none.

    They are taken before the update: what the loop does between two steps, such as averaging or
    broadcasting weights, is then done.
    """

    def __init__(self, measurement: Measurement, note_unsupported: Callable[[str], None]) -> None:
        self._measurement = measurement
        self._note_unsupported = note_unsupported
        self._possible = True

    def add(self, step: OpenStep, plans: Sequence[MeasurementPlan]) -> None:
        """Add the bits of every layer of the optimizers that are about to step."""
        sampled = step.sampled.setdefault(WEIGHTS.name, SampledRows())
        for plan in plans:
            if plan.label not in sampled.rows:
                self._contain(partial(self._add, sampled, plan))

    def add_few(self, step: OpenStep, plans: Sequence[MeasurementPlan], number: int) -> None:
        """Add the bits of a few elements of some layers, other ones for each `number`."""
        sampled = step.sampled.setdefault(FEW_WEIGHTS.name, SampledRows())
        for plan in plans:
            if plan.label not in sampled.rows:
                self._contain(partial(self._add_few, sampled, plan, number))

    def add_sample(self, step: OpenStep, plans: Sequence[MeasurementPlan]) -> None:
        """Add the bits of a few weights that other ranks may hold, where none may be reduced."""
        for plan in plans:
            if plan.of_run and "weight_sample" not in step.scalars:
                self._contain(partial(self._add_sample, step, plan))

    def _add(self, sampled: SampledRows, plan: MeasurementPlan) -> None:
        """Add one optimizer's rows [L, C], and their totals [G, C]."""
        weights = plan.weights()
        if not plan.slots:
            if len(plan.shares) != 1 or not weights:
                return
            rows_LC = _rows(self._measurement.digests(plan.device, weights).sum()[None], [weights])
            sampled.totals[plan.label] = rows_LC
            missing = rows_LC.new_full((len(plan.layers), rows_LC.shape[1]), torch.nan)
            sampled.rows[plan.label] = missing
            return
        nothing = torch.empty(0, device=plan.device)
        parts = [nothing if (part := _part_weights(slot)) is None else part for slot in plan.slots]
        rows_LC = _rows(self._measurement.digests(plan.device, parts), [[part] for part in parts])
        shows = [_shows_copies(plan.shares[layer.share]) for layer in plan.layers]
        if any(shows):
            unknown = torch.full((), torch.nan, device=plan.device)
            varied = [
                _varied_weights(part) if wanted else unknown
                for part, wanted in zip(parts, shows, strict=True)
            ]
            rows_LC[:, WEIGHTS.names.index("varied")] = torch.stack(varied).double()
        sampled.rows[plan.label] = rows_LC
        sampled.totals[plan.label] = self._measurement.totals_of_layers(plan, rows_LC, WEIGHTS)

    def _add_few(self, sampled: SampledRows, plan: MeasurementPlan, number: int) -> None:
        parts = {
            row: part
            for share, rows in zip(plan.shares, plan.rows_of_share, strict=True)
            for row in (_some(rows, number) if _may_be_copied(share) and plan.slots else ())
            if (part := few_elements(plan.slots[row].parameter.detach(), plan.slots[row].part))
            is not None
            and part.device == plan.device
        }
        if not parts:
            return
        digests_N = self._measurement.digests(plan.device, [*parts.values()])
        found_NC = _rows(digests_N, [[part] for part in parts.values()], FEW_WEIGHTS)
        rows_LC = found_NC.new_full((len(plan.layers), len(FEW_WEIGHTS.names)), torch.nan)
        places_N = torch.tensor([*parts], device="cpu")
        rows_LC[accelerator.sent(places_N, plan.device)] = found_NC
        sampled.rows[plan.label] = rows_LC
        sampled.totals[plan.label] = self._measurement.totals_of_layers(plan, rows_LC, FEW_WEIGHTS)

    def _add_sample(self, step: OpenStep, plan: MeasurementPlan) -> None:
        if not plan.slots:
            return
        places = [
            row
            for share, rows in zip(plan.shares, plan.rows_of_share, strict=True)
            if _may_be_copied(share)
            for row in rows
        ]
        apart = max(1, len(places) // _TENSORS_SAMPLED)
        chosen = [
            _middle(part)
            for row in places[::apart][:_TENSORS_SAMPLED]
            if (part := _part_weights(plan.slots[row])) is not None
        ]
        if chosen:
            digest = scalar_of(self._measurement.digests(plan.device, _joined(chosen)).sum())
            if digest is not None:
                step.scalars["weight_sample"] = digest

    def _contain(self, look: Callable[[], None]) -> None:
        """Leave it out where weights are no ordinary tensors."""
        if not self._possible:
            return
        try:
            with torch.no_grad():
                look()
        except (TypeError, RuntimeError) as error:
            pass_on(error)
            if accelerator.is_sticky_error(error) or isinstance(error, torch.OutOfMemoryError):
                return  # no fault of the weights
            self._possible = False
            self._note_unsupported("digests of weights of this kind")
            log.debug("the weights have no digest", exc_info=True)


def _rows(
    digests_N: torch.Tensor,
    parts: Sequence[Sequence[torch.Tensor]],
    family: ColumnFamily = WEIGHTS,
) -> torch.Tensor:
    """Return rows [N, C] of tensors that a wrapper shows to be copies, or not."""
    elements = np.array([sum(part.numel() for part in own) for own in parts], dtype=np.float64)
    columns = {
        "bits": digests_N,
        "varied": torch.full_like(digests_N, torch.nan),
        "elements": send(elements, digests_N.device),
    }
    return torch.stack([columns[name] for name in family.names], dim=1)


def _some(rows: Sequence[int], number: int) -> Sequence[int]:
    """Return some layers of a share: the same ones on ranks whose other layers are not the same."""
    apart = -(-len(rows) // _TENSORS_COMPARED) or 1
    return rows[number % apart :: apart]


def _part_weights(slot: LayerSlot) -> torch.Tensor | None:
    """Return this rank's part of a layer's weights; None where it has none."""
    local = local_of(slot.parameter.detach())
    if slot.part is None:
        return local
    return local[slot.part] if slot.part.stop <= local.numel() else None


def _may_be_copied(share: Share) -> bool:
    return share.assumed or share.replica_count > 1


def _shows_copies(share: Share) -> bool:
    """Return whether equal bits on two ranks would show that they hold a copy of a tensor."""
    return share.assumed and not may_begin_alike(share) and dist.is_initialized()


def _varied_weights(part: torch.Tensor) -> torch.Tensor:
    """Return 1 if some elements of a tensor differ from each other, else 0, on its device."""
    if part.numel() < 2:
        return torch.zeros((), device=part.device)
    first = part.reshape(-1)[:: max(1, part.numel() // _LOOKED_AT)]
    return (first != first[0]).any().float()


def _joined(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return small parts as one tensor where they are of one kind: one digest is cheaper."""
    plain = all(type(part) is torch.Tensor for part in parts)
    kinds = {(part.dtype, part.device) for part in parts}
    return [torch.cat([*parts])] if plain and len(kinds) == 1 else parts


def _middle(part: torch.Tensor) -> torch.Tensor:
    """Return a few elements from the middle of a tensor, as they lie in memory."""
    flat = part.view(-1) if part.is_contiguous() else part.flatten()
    start = max(0, (flat.numel() - _ELEMENTS_SAMPLED) // 2)
    return flat[start : start + _ELEMENTS_SAMPLED]


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
        parts = [_part_state(each, step.sequence, device) for each in tensors]
        try:
            with torch.no_grad():
                columns = {
                    "bits": self._measurement.digests(device, parts),
                    "varied": torch.stack([_varied_state(part) for part in parts]).double(),
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


def _part_state(tensor: torch.Tensor | None, sequence: int, device: torch.device) -> torch.Tensor:
    """Return the elements to look at in step `sequence`; none of a tensor that lies elsewhere."""
    if tensor is None or tensor.device != device:
        return torch.empty(0, device=device)
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
    parts = -(-flat.numel() // ELEMENTS_AT_MOST) or 1
    start = sequence % parts * ELEMENTS_AT_MOST
    return flat[start : start + ELEMENTS_AT_MOST]


def _varied_state(part: torch.Tensor) -> torch.Tensor:
    if part.numel() < 2:
        return torch.zeros((), device=part.device)
    return (part != part[0]).any().float()


def _sent(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return accelerator.sent(torch.tensor(values, dtype=torch.float64, device="cpu"), device)
