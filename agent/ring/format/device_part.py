"""The part of a body that a device itself writes to, and what makes it readable.

The device copies a step's numbers, and the rows of its layers, straight into the ring, as
`transfers`. What only the host knows of the step is written at once, into an ordinary slot. Usually
the rank reads the transfers itself and writes ordinary records. When it has died before it could,
both together still give the records.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mp_agent.records.columns import GRADIENTS
from mp_agent.records.schema import Schema
from mp_agent.records.steps import FloatArray, LayerTable, StepRecord, step_values
from mp_agent.ring.format.layout import BodyLayout
from mp_agent.ring.format.slots import EXTRA_WORDS, SlotReader, SlotWriter, Words, whole_values

_FIXED = struct.Struct("=5q")
"""Sequence, step, Unix nanoseconds, float64 in the transfer, where in it the totals begin or -1."""
_ABSENT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPart:
    """What the host knows of a step whose other numbers a device brings.

    scalars: by step column. places: by step column, where in the transfer the device brings it.
    totals_place: where in the transfer the totals [G, C] begin; None where there are none.
    """

    sequence: int
    step: int
    time_unix_ns: int
    scalars: Mapping[str, float]
    places: Mapping[str, int]
    numbers: int
    totals_place: int | None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The slots of transfers in a mapped body, int64 [slots, words], and all that is mapped."""

    steps_SW: Words
    layers_SW: Words
    mapped: memoryview


class DevicePart:
    """The device's part of the body that is written."""

    def __init__(self, memory: memoryview, layout: BodyLayout, schema: Schema) -> None:
        if layout.device is None:
            raise ValueError("this body has no part for a device")
        self._columns = schema.step_columns
        self._hosts = SlotWriter(memory, layout.device.hosts)
        self.memory = DeviceMemory(
            _words(memory, layout.device.steps_offset, layout.device.steps_shape),
            _words(memory, layout.device.layers_offset, layout.device.layers_shape),
            memory,
        )

    def write(self, number: int, part: HostPart) -> None:
        """Write what the host knows of the step in transfer `number`."""
        fixed = _FIXED.pack(
            part.sequence,
            part.step,
            part.time_unix_ns,
            part.numbers,
            _ABSENT if part.totals_place is None else part.totals_place,
        )
        known = [part.scalars.get(name, np.nan) for name in self._columns]
        flags = [name in part.scalars for name in self._columns]
        places = [part.places.get(name, _ABSENT) for name in self._columns]
        table = np.array([flags, places], dtype=np.int64)
        self._hosts.write(
            number, fixed + np.array(known, dtype=np.float64).tobytes() + table.tobytes()
        )


class DevicePartReader:
    """Reads what a device has brought of the steps that its rank has not written."""

    def __init__(
        self, read: Callable[[int, int], bytes], offset: int, layout: BodyLayout, schema: Schema
    ) -> None:
        self._read = read
        self._offset = offset
        self._area = layout.device
        self._schema = schema

    def steps_after(self, sequence: int) -> list[StepRecord]:
        """Return the whole steps with a greater sequence number, ascending."""
        if self._area is None:
            return []
        hosts = SlotReader(self._read, self._area.hosts.shifted(self._offset))
        newest = hosts.newest()
        if newest is None:
            return []
        found: dict[int, StepRecord] = {}
        for number in range(max(1, newest[0] - hosts.count + 1), newest[0] + 1):
            payload = hosts.payload(number)
            record = None if payload is None else self._record(number, payload)
            if record is not None and record.sequence > sequence:
                found[record.sequence] = record
        return [found[each] for each in sorted(found)]

    def layers_after(self, sequence: int) -> list[LayerTable]:
        """Return the whole layer tables with a greater sequence number, ascending."""
        if self._area is None:
            return []
        slots, words = self._area.layers_shape
        tables = []
        for slot in range(slots):
            words_W = self._transfer(self._area.layers_offset, slot, words, words)
            number = int(words_W[0])
            values_N = whole_values(words_W, number) if number > sequence else None
            if values_N is not None:
                rows_LC = _padded(
                    values_N.reshape(self._schema.parameter_layers, -1), len(self._schema.layers)
                )
                tables.append(LayerTable(sequence=number, families={GRADIENTS.name: rows_LC}))
        return sorted(tables, key=lambda table: table.sequence)

    def _record(self, number: int, payload: bytes) -> StepRecord | None:
        """Return the record of a step; None while the device has not brought all of it."""
        assert self._area is not None
        sequence, step, time_unix_ns, numbers, totals = _FIXED.unpack_from(payload)
        columns, schema = len(self._schema.step_columns), self._schema
        slots, words = self._area.steps_shape
        if not 0 <= numbers <= words - EXTRA_WORDS:
            return None
        words_W = self._transfer(
            self._area.steps_offset, number % slots, words, numbers + EXTRA_WORDS
        )
        values_N = whole_values(words_W, number)
        if values_N is None:
            return None
        known_S = np.frombuffer(payload, np.float64, columns, _FIXED.size)
        table = np.frombuffer(payload, np.int64, 2 * columns, _FIXED.size + known_S.nbytes)
        scalars: dict[str, float] = {}
        for name, value, flag, place in zip(
            schema.step_columns, known_S.tolist(), *table.reshape(2, -1).tolist(), strict=True
        ):
            if flag:
                scalars[name] = value
            elif 0 <= place < numbers:
                scalars[name] = float(values_N[place])
        shape = (schema.parameter_shares, len(schema.columns(GRADIENTS.name)))
        gradients_GC = np.full(shape, np.nan)
        if 0 <= totals <= numbers - gradients_GC.size:
            part: FloatArray = values_N[totals : totals + gradients_GC.size]
            gradients_GC = part.reshape(gradients_GC.shape)
        return StepRecord(
            sequence=sequence,
            step=step,
            time_unix_ns=time_unix_ns,
            values=step_values(scalars, schema.step_columns),
            families={GRADIENTS.name: _padded(gradients_GC, len(schema.shares))},
        )

    def _transfer(self, origin: int, slot: int, words: int, used: int) -> Words:
        data = self._read(self._offset + origin + 8 * slot * words, 8 * used)
        return np.frombuffer(data, np.int64)


def _padded(rows_NC: FloatArray, count: int) -> FloatArray:
    """Return rows of parameters, followed by absent ones of what else the schema has."""
    missing = count - len(rows_NC)
    return np.pad(rows_NC, ((0, missing), (0, 0)), constant_values=np.nan) if missing else rows_NC


def _words(memory: memoryview, offset: int, shape: tuple[int, int]) -> Words:
    count = shape[0] * shape[1]
    return np.frombuffer(memory, np.int64, count, offset).reshape(shape)
