"""A step as it stands on its way to the ring, and the record that it becomes."""

import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan

import numpy as np
import torch

from mp_agent.probe.accelerator import DeviceTimer
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENTS
from mp_agent.records.scalars import step_values
from mp_agent.records.steps import FloatArray, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRows:
    """How many rows of a schema are of one optimizer: per share, and per layer."""

    label: str
    shares: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadScale:
    """1 / the factor by which statistics on the host are multiplied, itself on a device.

    totals_rows, layer_rows: which rows of `totals_GC` and `rows_LC` are.
    """

    inverse_scale: torch.Tensor
    totals_rows: slice
    layer_rows: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """A step as far as it was seen, on its way to the ring; scalars may still be on a device.

    totals_GC, rows_LC: of all optimizers, NaN for those that were not measured.
    sampled: the same pairs of other families, by name.
    only_if_nonfinite: the step will not end, and is recorded only if its loss is not finite.
    """

    sequence: int
    step: int
    time_unix_ns: int
    scalars: Mapping[str, Scalar]
    shares: int
    totals_GC: torch.Tensor | None
    rows_LC: torch.Tensor | None
    sampled: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    own_rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By family that is not of parameters, the rows [M, C] of its own layers."""
    unread_scales: Sequence[UnreadScale] = ()
    streams: Collection[Hashable] = ()
    timers: Sequence[DeviceTimer] = ()
    only_if_nonfinite: bool = False


def observed_step(
    step: OpenStep,
    trainer_lead: int,
    optimizers: Sequence[OptimizerRows],
    *,
    only_if_nonfinite: bool = False,
) -> ObservedStep:
    """Return the step as it stands now, `trainer_lead` ahead in the trainer's own count.

    Its rows stand in the order of the optimizers.
    """
    shares = {each.label: each.shares for each in optimizers}
    layers = {each.label: each.layers for each in optimizers}
    return ObservedStep(
        sequence=step.sequence,
        step=step.sequence + trainer_lead,
        time_unix_ns=time.time_ns(),
        scalars=dict(step.scalars),
        shares=sum(shares.values()),
        totals_GC=_joined(step.totals, shares),
        rows_LC=_joined(step.rows, layers),
        sampled=_sampled(step, shares, layers),
        own_rows=dict(step.own_rows),
        unread_scales=[
            UnreadScale(
                inverse_scale=step.unread_scales[label],
                totals_rows=_range_of(label, shares),
                layer_rows=_range_of(label, layers),
            )
            for label in shares
            if label in step.unread_scales
        ],
        streams=tuple(step.streams),
        timers=tuple(step.timers),
        only_if_nonfinite=only_if_nonfinite,
    )


def _sampled(
    step: OpenStep, shares: Mapping[str, int], layers: Mapping[str, int]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the totals and the rows of each family that has both."""
    found = {}
    for name, sampled in step.sampled.items():
        totals_GC, rows_LC = _joined(sampled.totals, shares), _joined(sampled.rows, layers)
        if totals_GC is not None and rows_LC is not None:
            found[name] = totals_GC, rows_LC
    return found


def _range_of(label: str, rows: Mapping[str, int]) -> slice:
    """Return where the rows of `label` stand among those of all."""
    begin = 0
    for other, count in rows.items():
        if other == label:
            return slice(begin, begin + count)
        begin += count
    return slice(0, 0)


def _joined(parts: Mapping[str, torch.Tensor], rows: Mapping[str, int]) -> torch.Tensor | None:
    """Return the parts below each other, each with its number of `rows`; None when there is none.

    A part of another size is of parameters that have changed since, and left out.
    """
    if not parts:
        return None
    usable = {label: parts[label] for label in rows if label in parts}
    usable = {label: part for label, part in usable.items() if part.shape[0] == rows[label]}
    if not usable:
        return None
    if len(rows) == 1:
        return next(iter(usable.values()))
    like = next(iter(usable.values()))
    return torch.cat(
        [
            usable[label] if label in usable else like.new_full((count, like.shape[1]), nan)
            for label, count in rows.items()
        ]
    )


def record_of(
    step: ObservedStep,
    scalars: Mapping[str, float],
    totals_GC: FloatArray | None,
    sampled: Mapping[str, FloatArray] | None = None,
    *,
    columns: Sequence[str],
) -> StepRecord:
    """Return the record of `step`, given its scalars and totals on the host.

    sampled: the totals of other families, by name. columns: the step columns of the schema.
    """
    if totals_GC is None:
        totals_GC = np.full((step.shares, len(GRADIENT_COLUMN_NAMES)), nan)
    return StepRecord(
        sequence=step.sequence,
        step=step.step,
        time_unix_ns=step.time_unix_ns,
        values=step_values(scalars, columns),
        families={GRADIENTS.name: totals_GC, **(sampled or {})},
    )
