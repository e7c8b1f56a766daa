"""Step records and layer tables, to the bytes of a slot and back."""

from collections.abc import Mapping

import numpy as np

from mp_agent.records.schema import Schema
from mp_agent.records.steps import FloatArray, LayerTable, StepRecord
from mp_agent.ring.format.layout import LAYER_HEADER, STEP_HEADER

_FLOAT_BYTES = 8


def encode_step(record: StepRecord, schema: Schema) -> bytes:
    """Return a step slot's payload. Raises ValueError for arrays of another shape."""
    values_S = np.asarray(record.values, dtype=np.float64)
    if values_S.shape != (len(schema.step_columns),):
        raise ValueError(f"values of step {record.sequence} have shape {values_S.shape}")
    measured, rows = _encode_families(
        record.families, schema, len(schema.shares), f"step {record.sequence}"
    )
    fixed = STEP_HEADER.pack(record.sequence, record.step, record.time_unix_ns, measured)
    return fixed + values_S.tobytes() + rows


def decode_step(payload: bytes, schema: Schema) -> StepRecord:
    """Return the record in a step slot's payload; its arrays are read-only."""
    sequence, step, time_unix_ns, measured = STEP_HEADER.unpack_from(payload)
    numbers = np.frombuffer(payload, dtype=np.float64, offset=STEP_HEADER.size)
    columns = len(schema.step_columns)
    return StepRecord(
        sequence=sequence,
        step=step,
        time_unix_ns=time_unix_ns,
        values=numbers[:columns],
        families=_decode_families(numbers[columns:], measured, schema, len(schema.shares)),
    )


def encode_layers(table: LayerTable, schema: Schema) -> bytes:
    """Return a layer slot's payload. Raises ValueError for rows of another shape."""
    measured, rows = _encode_families(
        table.families, schema, len(schema.layers), f"layers of step {table.sequence}"
    )
    return LAYER_HEADER.pack(table.sequence, measured) + rows


def decode_layers(payload: bytes, schema: Schema) -> LayerTable:
    """Return the table in a layer slot's payload; its array is read-only."""
    sequence, measured = LAYER_HEADER.unpack_from(payload)
    numbers = np.frombuffer(payload, dtype=np.float64, offset=LAYER_HEADER.size)
    families = _decode_families(numbers, measured, schema, len(schema.layers))
    return LayerTable(sequence=sequence, families=families)


def _encode_families(
    families: Mapping[str, FloatArray], schema: Schema, rows: int, what: str
) -> tuple[int, bytes]:
    """Return which families of the schema were measured, as bits, and the rows of all."""
    if unknown := families.keys() - {family.name for family in schema.families}:
        raise ValueError(f"{what}: {', '.join(sorted(unknown))} is not in the schema")
    measured, parts = 0, []
    for place, family in enumerate(schema.families):
        shape = (rows, len(family.columns))
        if family.name not in families:
            parts.append(bytes(rows * len(family.columns) * _FLOAT_BYTES))
            continue
        rows_NC = np.asarray(families[family.name], dtype=np.float64)
        if rows_NC.shape != shape:
            raise ValueError(f"{family.name} of {what} have shape {rows_NC.shape}, not {shape}")
        measured |= 1 << place
        parts.append(rows_NC.tobytes())
    return measured, parts[0] if len(parts) == 1 else b"".join(parts)


def _decode_families(
    numbers: FloatArray, measured: int, schema: Schema, rows: int
) -> dict[str, FloatArray]:
    found, start = {}, 0
    for place, family in enumerate(schema.families):
        size = rows * len(family.columns)
        if measured >> place & 1:
            found[family.name] = numbers[start : start + size].reshape(rows, len(family.columns))
        start += size
    return found
