"""The way from a device for rows of families other than the gradients."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.delivery.own_shares import CADENCES, OwnRows, OwnShares
from mp_agent.probe.delivery.ring_memory import STEP_SLOTS
from mp_agent.probe.delivery.transfers import DeviceTransfers, TransferSlots
from mp_agent.probe.step.observed_step import ObservedStep
from mp_agent.records.columns import Tier
from mp_agent.records.schema import Schema
from mp_agent.records.steps import FloatArray
from mp_agent.ring.writer import RingWriter

LAYER_SLOTS = 4
LAYER_HISTORY_STEPS = 8
"""For how many steps rows of layers may still be asked for."""
_SAMPLED_SLOTS = 2
_OWN_SLOTS = {Tier.EVERY_STEP: STEP_SLOTS, Tier.SAMPLED: LAYER_SLOTS}
"""Of families that are not of parameters, as many as there are records on their way."""

Rows = Mapping[str, tuple[FloatArray, FloatArray]]
"""By family of parameters, the rows of shares [G, C] and of layers [L, C]."""


class OtherFamilies:
    """Sends such rows ahead of the step that they belong to, and keeps them until that arrives.

    What finds no slot is dropped and counted.
    """

    def __init__(
        self,
        schema: Schema,
        own: OwnShares,
        transfers: DeviceTransfers,
        device: torch.device,
        writer: RingWriter,
        *,
        of_parameters: bool,
    ) -> None:
        """of_parameters: whether rows of parameters' families are on the device, too."""
        self._own = own
        self._transfers = transfers
        self._device = device
        self._writer = writer
        self._of_parameters = of_parameters
        rows = own.parameter_shares + own.parameter_layers
        numbers = rows * sum(len(family.columns) for family in schema.families[1:])
        slots = _SAMPLED_SLOTS if of_parameters else 0
        self._slots = TransferSlots.pinned(slots, numbers, device)
        self._own_slots = {
            cadence: TransferSlots.pinned(slots, numbers, device)
            for cadence, slots in _OWN_SLOTS.items()
            if (numbers := own.numbers(cadence))
        }
        self._rows: dict[int, Rows] = {}
        self._own_rows: dict[int, OwnRows] = {}

    def send(self, step: ObservedStep) -> None:
        """Send what was measured of them in a step."""
        if step.sampled and self._of_parameters:
            self._send_rows(step.sequence, step.sampled)
        fitting = self._own.fitting(step.own_rows)
        for cadence, slots in self._own_slots.items():
            rows = {name: own for name, own in fitting.items() if CADENCES[name] is cadence}
            if rows:
                self._send_own_rows(step.sequence, rows, slots)

    def rows(self, sequence: int) -> Rows:
        """Return what has arrived of a step's families of parameters."""
        return self._rows.get(sequence, {})

    def own_rows(self, sequence: int) -> OwnRows:
        """Return what has arrived of a step's families that are not of parameters."""
        return self._own_rows.get(sequence, {})

    def forget(self, sequence: int) -> None:
        """Let go of the rows of a step's parameters, which has arrived itself."""
        self._rows.pop(sequence, None)

    def _send_rows(
        self, sequence: int, sampled: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        parts = [part for pair in sampled.values() for part in pair]

        def keep(values_N: FloatArray) -> None:
            shares_and_layers = iter(_split(values_N, [part.shape for part in parts]))
            found = {name: (next(shares_and_layers), next(shares_and_layers)) for name in sampled}
            oldest = sequence - LAYER_HISTORY_STEPS
            kept = {each: rows for each, rows in self._rows.items() if each > oldest}
            self._rows = {**kept, sequence: found}

        payload_N = torch.cat([part.reshape(-1) for part in parts])
        if not self._transfers.send(self._slots, payload_N, keep, self._lose):
            self._lose()

    def _send_own_rows(
        self, sequence: int, rows: Mapping[str, torch.Tensor], slots: TransferSlots
    ) -> None:
        def keep(values_N: FloatArray) -> None:
            for outdated in [each for each in self._own_rows if each < sequence]:
                del self._own_rows[outdated]
            known = self._own_rows.get(sequence, {})
            self._own_rows[sequence] = {**known, **self._own.split(values_N, iter(rows))}

        parts = [accelerator.sent(own, self._device).reshape(-1) for own in rows.values()]
        if not self._transfers.send(slots, torch.cat(parts), keep, self._lose):
            self._lose()

    def _lose(self) -> None:
        self._writer.count(records_dropped=1)


def _split(values_N: FloatArray, shapes: Sequence[torch.Size]) -> list[FloatArray]:
    """Return arrays of these shapes, which `values_N` has one after the other."""
    ends = accumulate(map(prod, shapes), initial=0)
    return [
        values_N[start:end].reshape(shape)
        for (start, end), shape in zip(pairwise(ends), shapes, strict=True)
    ]
