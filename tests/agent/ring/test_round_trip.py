"""What goes into a ring comes out of it, bit for bit."""

import math
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_agent.records.schema import FamilyColumns, Layer, RankIdentity, Schema, Share
from mp_agent.records.steps import LayerTable, StepRecord
from mp_agent.ring.reader import RingReader
from mp_agent.ring.writer import RingWriter
from tests.agent.ring.samples import identity, same_layers, same_step, schema

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)  # 5 × 160 bytes fit the head
_SURROGATES: tuple[Literal["Cs"]] = ("Cs",)
LEGIBLE_TEXT = st.text(st.characters(exclude_categories=_SURROGATES), max_size=40)
"""Without lone surrogates, which readers replace."""
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=64, allow_nan=True, allow_infinity=True)

identities = st.builds(
    RankIdentity,
    run=LEGIBLE_TEXT,
    attempt=st.integers(0, 1000),
    launch=LEGIBLE_TEXT,
    rank=st.integers(0, 2**19 - 1),
    world_size=st.integers(2**19, 2**20),
    local_rank=st.integers(0, 100),
    local_world_size=st.integers(1, 100),
    node_rank=st.integers(0, 2**20 - 1),
    host=LEGIBLE_TEXT,
    pid=st.integers(1, 2**22),
    created_unix_ns=INT64,
    torch_version=LEGIBLE_TEXT,
    version=LEGIBLE_TEXT,
)
shares = st.builds(
    Share,
    group=ANY_TEXT,
    shard_index=st.integers(0, 2**31),
    shard_count=st.integers(1, 2**31),
    replica_index=st.integers(0, 2**31),
    replica_count=st.integers(1, 2**31),
    assumed=st.booleans(),
)
layers = st.builds(Layer, name=ANY_TEXT, share=st.integers(0, 3), elements=st.integers(0, 2**62))
families = st.builds(FamilyColumns, ANY_TEXT, st.lists(ANY_TEXT, max_size=4).map(tuple))
schemas = st.builds(
    Schema,
    step_columns=st.lists(ANY_TEXT, max_size=4).map(tuple),
    families=st.lists(families, max_size=3, unique_by=lambda family: family.name).map(tuple),
    shares=st.lists(shares, max_size=3).map(tuple),
    layers=st.lists(layers, max_size=6).map(tuple),
    facts=st.lists(st.tuples(ANY_TEXT, ANY_TEXT), max_size=3).map(tuple),
)


def floats(draw: st.DrawFn, *shape: int) -> np.ndarray:
    count = math.prod(shape)
    numbers = draw(st.lists(FLOATS, min_size=count, max_size=count))
    return np.array(numbers, dtype=np.float64).reshape(shape)


def measured(draw: st.DrawFn, schema: Schema, rows: int) -> dict[str, np.ndarray]:
    """Draw rows of some of the families."""
    return {
        family.name: floats(draw, rows, len(family.columns))
        for family in schema.families
        if draw(st.booleans())
    }


@st.composite
def schemas_with_records(
    draw: st.DrawFn,
) -> tuple[Schema, list[StepRecord], list[LayerTable]]:
    schema = draw(schemas)
    sequences = sorted(draw(st.sets(st.integers(1, 2**62), max_size=4)))
    steps = [
        StepRecord(
            sequence=sequence,
            step=draw(INT64),
            time_unix_ns=draw(INT64),
            values=floats(draw, len(schema.step_columns)),
            families=measured(draw, schema, len(schema.shares)),
        )
        for sequence in sequences
    ]
    tables = [
        LayerTable(sequence=sequence, families=measured(draw, schema, len(schema.layers)))
        for sequence in sequences
    ]
    return schema, steps, tables


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(identity=identities, written=schemas_with_records())
def test_records_schema_and_identity_survive_the_file(
    identity: RankIdentity, written: tuple[Schema, list[StepRecord], list[LayerTable]]
) -> None:
    schema, steps, tables = written
    with tempfile.TemporaryDirectory() as directory:
        writer = RingWriter.create(Path(directory, "rank0.ring"), identity)
        writer.write_schema(schema)
        for step in steps:
            writer.write_step(step)
        for table in tables:
            writer.write_layers(table)
        reader = RingReader.open(writer.path)
        assert reader.identity == identity
        assert reader.schema == schema
        found, lost = reader.steps_after(0)
        found_tables = reader.layers_after(0)
        reader.close()
        writer.close()
    assert lost == 0
    assert len(found) == len(steps) and all(map(same_step, found, steps))
    assert len(found_tables) == len(tables) and all(map(same_layers, found_tables, tables))


def test_layer_names_of_any_length_and_script_survive(tmp_path: Path) -> None:
    names = ("x" * 10_000, 'quote"\\', "line\nbreak", "層\u2028\ud800", "")
    wanted = Schema(
        step_columns=("a",),
        families=(FamilyColumns("gradients", ("b",)),),
        shares=(),
        layers=tuple(Layer(name=name, share=0, elements=1) for name in names),
    )
    writer = RingWriter.create(tmp_path / "rank0.ring", identity())
    writer.write_schema(wanted)
    reader = RingReader.open(writer.path)
    assert reader.schema == wanted
    reader.close()
    writer.close()


def test_arrays_of_other_types_and_layouts_are_written_as_float64(tmp_path: Path) -> None:
    wanted = schema(shares=2, columns=3)
    writer = RingWriter.create(tmp_path / "rank0.ring", identity())
    writer.write_schema(wanted)
    integers: Any = np.arange(6)[::2]
    transposed: Any = np.arange(6, dtype=np.float32).reshape(3, 2).T
    record = StepRecord(
        sequence=1,
        step=1,
        time_unix_ns=1,
        values=integers,
        families={"gradients": transposed},
    )
    writer.write_step(record)
    reader = RingReader.open(writer.path)
    assert reader.schema == wanted
    ((found,), _) = reader.steps_after(0)
    np.testing.assert_array_equal(found.values, [0.0, 2.0, 4.0])
    np.testing.assert_array_equal(found.gradients, [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]])
    reader.close()
    writer.close()
