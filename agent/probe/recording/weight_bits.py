"""Bits of the weights before a step, layer by layer, by which the node agents compare replicas."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from mp_agent.probe import accelerator
from mp_agent.probe.optimizers.layer_slots import LayerSlot, local_of
from mp_agent.probe.optimizers.measurement import Measurement
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.placement import may_begin_alike
from mp_agent.probe.scalars import scalar_of
from mp_agent.probe.statistics.sending import send
from mp_agent.probe.step.open_step import OpenStep, SampledRows
from mp_agent.records.columns import WEIGHTS
from mp_agent.records.schema import Share
from mp_agent.ring.interruptions import pass_on

log = logging.getLogger("mp_agent")

_TENSORS_SAMPLED = 8
_ELEMENTS_SAMPLED = 256
_LOOKED_AT = 1024
"""Elements of a tensor that show whether it is constant."""


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
        parts = [nothing if (part := _part(slot)) is None else part for slot in plan.slots]
        rows_LC = _rows(self._measurement.digests(plan.device, parts), [[part] for part in parts])
        shows = [_shows_copies(plan.shares[layer.share]) for layer in plan.layers]
        if any(shows):
            unknown = torch.full((), torch.nan, device=plan.device)
            varied = [
                _varied(part) if wanted else unknown
                for part, wanted in zip(parts, shows, strict=True)
            ]
            rows_LC[:, WEIGHTS.names.index("varied")] = torch.stack(varied).double()
        sampled.rows[plan.label] = rows_LC
        sampled.totals[plan.label] = self._measurement.totals_of_layers(plan, rows_LC, WEIGHTS)

    def _add_sample(self, step: OpenStep, plan: MeasurementPlan) -> None:
        held = [
            part
            for slot, layer in zip(plan.slots, plan.layers, strict=False)
            if _may_be_copied(plan.shares[layer.share]) and (part := _part(slot)) is not None
        ]
        apart = max(1, len(held) // _TENSORS_SAMPLED)
        chosen = [_middle(part) for part in held[::apart][:_TENSORS_SAMPLED]]
        if chosen:
            digest = scalar_of(self._measurement.digests(plan.device, chosen).sum())
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


def _rows(digests_N: torch.Tensor, parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Return rows [N, C] of tensors that a wrapper shows to be copies, or not."""
    elements = np.array([sum(part.numel() for part in own) for own in parts], dtype=np.float64)
    columns = {
        "bits": digests_N,
        "varied": torch.full_like(digests_N, torch.nan),
        "elements": send(elements, digests_N.device),
    }
    return torch.stack([columns[name] for name in WEIGHTS.names], dim=1)


def _part(slot: LayerSlot) -> torch.Tensor | None:
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


def _varied(part: torch.Tensor) -> torch.Tensor:
    """Return 1 if some elements of a tensor differ from each other, else 0, on its device."""
    if part.numel() < 2:
        return torch.zeros((), device=part.device)
    first = part.reshape(-1)[:: max(1, part.numel() // _LOOKED_AT)]
    return (first != first[0]).any().float()


def _middle(part: torch.Tensor) -> torch.Tensor:
    """Return a few elements from the middle of a tensor, as they lie in memory."""
    flat = part.view(-1) if part.is_contiguous() else part.flatten()
    start = max(0, (flat.numel() - _ELEMENTS_SAMPLED) // 2)
    return flat[start : start + _ELEMENTS_SAMPLED]
