"""Families other than the gradients: their rows in the schema, and their way from a device."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import accumulate, pairwise
from math import nan, prod
from typing import TypeVar

import numpy as np
import torch

from mp_agent.probe import accelerator
from mp_agent.probe.delivery.transfers import STEP_SLOTS, DeviceTransfers, TransferSlots
from mp_agent.probe.step.open_step import ObservedStep
from mp_agent.records.columns import FAMILIES, Tier
from mp_agent.records.schema import Schema
from mp_agent.records.steps import FloatArray, LayerTable, StepRecord
from mp_agent.ring.writer import RingWriter

_FAMILIES = {family.name: family for family in FAMILIES}

CADENCES = {family.name: family.cadence for family in FAMILIES}
"""How often a family has rows, by its name."""

T = TypeVar("T", bound=Sized)

OwnRows = Mapping[str, FloatArray]
"""Rows [M, C] by family, one of each of the family's own layers; one where it has none."""


class OwnShares:
    """Completes records of parameters by the rows of families that are not of parameters.

    The shares and layers of those families come last in a schema, one share of each family. Of a
    family without layers there is one row, that of its share.
    """

    def __init__(self, schema: Schema) -> None:
        self._shares = len(schema.shares)
        self._layers = len(schema.layers)
        self._places = {
            share.family: (
                index,
                [row for row, layer in enumerate(schema.layers) if layer.share == index],
            )
            for index, share in enumerate(schema.shares)
            if share.family
        }
        self.parameter_shares = self._shares - len(self._places)
        self.parameter_layers = self._layers - sum(len(rows) for _, rows in self._places.values())

    def numbers(self, cadence: Tier) -> int:
        """Return how many float64 all rows of the families of a cadence have together."""
        return sum(
            self._height(name) * len(_FAMILIES[name].names)
            for name in self._places
            if _FAMILIES[name].cadence is cadence
        )

    def fitting(self, rows: Mapping[str, T]) -> dict[str, T]:
        """Return the rows that this schema has a place for."""
        return {
            name: found
            for name, found in rows.items()
            if name in self._places and len(found) == self._height(name)
        }

    def step(self, record: StepRecord, own: OwnRows) -> StepRecord:
        """Return a record of parameters' shares with rows of all shares of the schema.

        A share's row is that of its layers, united by the columns' algebra.
        """
        if not self._places:
            return record
        families = {name: _padded(rows, self._shares) for name, rows in record.families.items()}
        for name, rows_MC in self.fitting(own).items():
            index, _ = self._places[name]
            families[name] = np.full((self._shares, rows_MC.shape[1]), nan)
            families[name][index] = list(_united(name, rows_MC))
        return replace(record, families=families)

    def table(
        self, sequence: int, parameters: Mapping[str, FloatArray], own: OwnRows
    ) -> LayerTable | None:
        """Return the layers of a step; None where nothing of them was measured.

        parameters: rows [L, C] of the parameters' layers, by family.
        """
        families = {name: _padded(rows_LC, self._layers) for name, rows_LC in parameters.items()}
        for name, rows_MC in self.fitting(own).items():
            _, layers = self._places[name]
            if layers:
                table_LC = families[name] = np.full((self._layers, rows_MC.shape[1]), nan)
                table_LC[layers] = rows_MC
        return LayerTable(sequence=sequence, families=families) if families else None

    def split(self, values_N: FloatArray, names: Iterator[str]) -> OwnRows:
        """Return the rows of some families that `values_N` has one after the other."""
        found, start = {}, 0
        for name in names:
            rows, columns = self._height(name), len(_FAMILIES[name].names)
            part: FloatArray = values_N[start : start + rows * columns]
            found[name] = part.reshape(rows, columns)
            start += rows * columns
        return found

    def _height(self, name: str) -> int:
        return max(1, len(self._places[name][1]))


def _padded(rows_NC: FloatArray, count: int) -> FloatArray:
    """Return the rows, followed by absent ones."""
    missing = count - len(rows_NC)
    if not missing:
        return rows_NC
    return np.concatenate((rows_NC, np.full((missing, rows_NC.shape[1]), nan)))


def _united(family: str, rows_MC: FloatArray) -> Iterator[float]:
    """Yield each column of a share's row."""
    for place, column in enumerate(_FAMILIES[family].columns):
        yield float(column.algebra.merged(rows_MC[:, place].tolist()))


LAYER_SLOTS = 4
LAYER_HISTORY_STEPS = 8
"""Steps for which rows of layers may still be asked for."""
_SAMPLED_SLOTS = 2
_OWN_SLOTS = {Tier.EVERY_STEP: STEP_SLOTS, Tier.SAMPLED: LAYER_SLOTS}
"""Of families that are not of parameters, as many as there are records on their way."""

Rows = Mapping[str, tuple[FloatArray, FloatArray]]
"""Rows of shares [G, C] and of layers [L, C], by family of parameters."""


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
