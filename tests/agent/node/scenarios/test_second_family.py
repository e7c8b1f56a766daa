"""A family of columns that only this test declares goes the whole way, next to the gradients.

Four ranks on two nodes hold a model of two layers, in two shards of two replicas each. Every number
is compared with one that is computed from the whole tensors, in plain Python.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import fsum, inf, isfinite, isnan, nan

import numpy as np
import pytest

from mp_agent.errors import ReportError
from mp_agent.flight.record.archive import read_archive, write_archive
from mp_agent.node.cluster.root import MergedTable, RootMerger
from mp_agent.node.merge.node_layers import RankLayers
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.records.columns import FAMILIES, GRADIENTS, Column, ColumnFamily, Tier
from mp_agent.records.columns.column import Algebra
from mp_agent.records.flight import RankLog, Segment
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import Layer, Schema, Share, family_columns
from mp_agent.records.steps import LayerTable, StepRecord
from mp_agent.ring.reader import RingReader
from mp_agent.ring.writer import RingWriter
from tests.agent.flight.builders import make_log, make_node_record
from tests.agent.gradient_reference import reference_row
from tests.agent.node.builders import make_identity, make_record
from tests.agent.node.fleet import SimNode, make_root, push


def _sampled(name: str, algebra: Algebra, *, signed: bool = False) -> Column:
    return Column(name, algebra, name, Tier.SAMPLED, signed=signed)


WEIGHTS = ColumnFamily(
    name="made_up",
    row="elements of parameters",
    columns=(
        _sampled("elements", Algebra.SUM),
        _sampled("sum", Algebra.SUM, signed=True),
        _sampled("smallest", Algebra.MIN, signed=True),
        _sampled("abs_max", Algebra.MAX),
        _sampled("nan_elements", Algebra.SUM),
    ),
    key="sum",
    required=("sum", "abs_max"),
    size="elements",
    nonfinite=("nan_elements",),
)
BOTH = (*FAMILIES, WEIGHTS)

SAMPLED = 2
"""The step on which weights and layers are measured."""

LAYERS = {
    "embedding": [-3.0, -0.0, 0.5, 1e-300, 5e-324, 7.25, 1e150, -2.0],
    "head": [0.25, -0.25, 4.0, 0.0],
}
GRADIENTS_OF = {"embedding": [1.0, 2.0, 0.0, nan, inf, 3.0, 4.0, 5.0], "head": [1.0, 1.0, 2.0, 0.0]}


def weights_row(elements: list[float]) -> list[float]:
    """Return the columns of weights, written as plainly as can be."""
    finite = [value for value in elements if isfinite(value)]
    return [
        float(len(elements)),
        fsum(finite) if finite else nan,
        min(finite, default=nan),
        max(map(abs, finite), default=nan),
        float(sum(map(isnan, elements))),
    ]


def part(elements: list[float], shard: int) -> list[float]:
    """Return the half of a tensor that a shard holds."""
    half = len(elements) // 2
    return elements[half * shard : half * (shard + 1)]


def schema_of(rank: int) -> Schema:
    share = Share(
        group="hsdp", shard_index=rank % 2, shard_count=2, replica_index=rank // 2, replica_count=2
    )
    return Schema(
        step_columns=("loss",),
        families=family_columns(BOTH),
        shares=(share,),
        layers=tuple(
            Layer(name=name, share=0, elements=len(part(elements, 0)))
            for name, elements in LAYERS.items()
        ),
    )


SCHEMAS = {rank: schema_of(rank) for rank in range(4)}


def record_of(rank: int, sequence: int, layers: Mapping[str, list[float]]) -> StepRecord:
    shard = rank % 2
    gradients = [g for name in layers for g in part(GRADIENTS_OF[name], shard)]
    families = {GRADIENTS.name: reference_row(np.array(gradients))[None]}
    if sequence == SAMPLED:
        weights = [w for elements in layers.values() for w in part(elements, shard)]
        families[WEIGHTS.name] = np.array([weights_row(weights)])
    record = make_record(sequence)
    return replace(record, values=np.array([2.0 + rank]), families=families)


def table_of(rank: int, layers: Mapping[str, list[float]]) -> LayerTable:
    shard = rank % 2
    rows = [weights_row(part(elements, shard)) for elements in layers.values()]
    gradients = [reference_row(np.array(part(GRADIENTS_OF[name], shard))) for name in layers]
    families = {GRADIENTS.name: np.stack(gradients), WEIGHTS.name: np.array(rows)}
    return LayerTable(sequence=SAMPLED, families=families)


def merged_by(
    root: RootMerger, layers: Mapping[str, list[float]] = LAYERS, without: tuple[int, ...] = ()
) -> Iterator[MergedStep | MergedTable]:
    """Yield what the root makes of three steps: rows reduced by node, reported, and merged."""
    for number in range(2):
        ranks = [2 * number, 2 * number + 1]
        node = SimNode(
            number,
            ranks,
            4,
            lambda rank, sequence: RankStep(rank, SCHEMAS[rank], record_of(rank, sequence, layers)),
            families=BOTH,
        )
        for _ in range(3):
            node.write(without=without)
        tables = [
            RankLayers(rank, SCHEMAS[rank], table_of(rank, layers).families)
            for rank in ranks
            if rank not in without
        ]
        node.write_layers(SAMPLED, tables)
        push(root, node)
    yield from root.close_all()


def steps_and_table(
    items: Iterator[MergedStep | MergedTable],
) -> tuple[dict[int, MergedStep], MergedTable]:
    found = list(items)
    (table,) = [item for item in found if isinstance(item, MergedTable)]
    return {item.sequence: item for item in found if isinstance(item, MergedStep)}, table


def reference(elements: list[float]) -> dict[str, float]:
    return dict(zip(WEIGHTS.names, weights_row(elements), strict=True))


def test_its_rows_become_a_mapping_of_the_merged_step():
    steps, _ = steps_and_table(merged_by(make_root(4, families=BOTH)))

    everything = [value for elements in LAYERS.values() for value in elements]
    assert steps[SAMPLED].families[WEIGHTS.name] == pytest.approx(reference(everything), rel=1e-15)
    assert steps[SAMPLED].complete == {GRADIENTS.name, WEIGHTS.name}
    assert steps[SAMPLED].counts(WEIGHTS)
    assert not steps[SAMPLED].counts(GRADIENTS), "a gradient is NaN, another one Inf"


def test_it_is_absent_from_the_steps_on_which_it_is_not_measured():
    steps, _ = steps_and_table(merged_by(make_root(4, families=BOTH)))

    assert sorted(steps) == [1, 2, 3]
    assert [sequence for sequence, step in steps.items() if WEIGHTS.name in step.families] == [2]
    assert not steps[1].counts(WEIGHTS)
    assert WEIGHTS.cadence is Tier.SAMPLED
    assert GRADIENTS.cadence is Tier.EVERY_STEP


def test_columns_of_equal_names_in_two_families_are_kept_apart():
    steps, _ = steps_and_table(merged_by(make_root(4, families=BOTH)))

    assert steps[SAMPLED].families[WEIGHTS.name]["abs_max"] == 1e150
    assert steps[SAMPLED].get("abs_max") == steps[SAMPLED].gradients["abs_max"] == 5.0
    assert steps[SAMPLED].gradients["nan_elements"] == 1.0
    assert steps[SAMPLED].families[WEIGHTS.name]["nan_elements"] == 0.0


def test_a_missing_shard_leaves_both_families_incomplete():
    steps, table = steps_and_table(merged_by(make_root(4, families=BOTH), without=(1, 3)))

    half = [value for elements in LAYERS.values() for value in part(elements, 0)]
    assert steps[SAMPLED].families[WEIGHTS.name] == pytest.approx(reference(half), rel=1e-15)
    assert steps[SAMPLED].complete == frozenset()
    assert not table.families[WEIGHTS.name].complete


def test_its_layers_become_a_table_of_their_own():
    _, table = steps_and_table(merged_by(make_root(4, families=BOTH)))

    views = table.families[WEIGHTS.name].views(step_judged=True)
    assert [view.name for view in views] == list(LAYERS)
    for view, elements in zip(views, LAYERS.values(), strict=True):
        assert view.family == WEIGHTS.name
        assert view.judged
        assert view.values == pytest.approx(reference(elements), rel=1e-15)


def test_layers_without_a_finite_weight_do_not_count():
    layers = {"embedding": [nan] * 8, "head": LAYERS["head"]}
    steps, table = steps_and_table(merged_by(make_root(4, families=BOTH), layers))

    assert [v.judged for v in table.families[WEIGHTS.name].views(step_judged=True)] == [False, True]
    assert not steps[SAMPLED].counts(WEIGHTS)


def test_a_root_that_does_not_know_it_merges_the_others_as_before():
    known, known_table = steps_and_table(merged_by(make_root(4, families=BOTH)))
    steps, table = steps_and_table(merged_by(make_root(4)))

    assert {s: step.gradients for s, step in steps.items()} == {
        s: step.gradients for s, step in known.items()
    }
    assert all(step.families.keys() == {GRADIENTS.name} for step in steps.values())
    assert table.families.keys() == {GRADIENTS.name}
    np.testing.assert_array_equal(
        table.families[GRADIENTS.name].values, known_table.families[GRADIENTS.name].values
    )


def test_its_rows_go_through_a_ring_and_a_flight_record_unchanged(tmp_path):
    writer = RingWriter.create(tmp_path / "rank0.ring", make_identity(world_size=4))
    writer.write_schema(SCHEMAS[0])
    for sequence in (1, 2, 3):
        writer.write_step(record_of(0, sequence, LAYERS))
    writer.write_layers(table_of(0, LAYERS))
    reader = RingReader.open(writer.path)
    assert reader.schema == SCHEMAS[0]
    steps, _ = reader.steps_after(0)
    segment = Segment(schema=SCHEMAS[0], steps=tuple(steps), tables=tuple(reader.layers_after(0)))
    reader.close()
    writer.close()

    record = make_node_record(make_log(segments=(segment,), world_size=4))
    path = tmp_path / "node0.npz"
    with path.open("wb") as file:
        write_archive(file, record)
    (read,) = read_archive(path).ranks

    written = [record_of(0, sequence, LAYERS) for sequence in (1, 2, 3)]
    assert rows_of(read) == in_bytes([*written, table_of(0, LAYERS)])


def rows_of(log: RankLog) -> list[list[tuple[str, bytes]]]:
    (segment,) = log.segments
    return in_bytes([*segment.steps, *segment.tables])


def in_bytes(records: Sequence[StepRecord | LayerTable]) -> list[list[tuple[str, bytes]]]:
    return [[(name, rows.tobytes()) for name, rows in one.families.items()] for one in records]


OUTPUT_STATISTICS = ColumnFamily(
    name="outputs",
    row="elements of the outputs of modules",
    columns=(_sampled("elements", Algebra.SUM), _sampled("abs_max", Algebra.MAX)),
    key="abs_max",
    required=("abs_max",),
    size="elements",
)
"""Of modules, not of parameters; each rank has those of its own part of the batch."""

OUTPUTS = {rank: [0.5 * rank, -3.0 + rank, 1.0] for rank in range(4)}


def with_activations(rank: int) -> RankStep:
    schema, record = SCHEMAS[rank], record_of(rank, 1, LAYERS)
    batch = Share(group="batch", shard_index=rank, shard_count=4, family=OUTPUT_STATISTICS.name)
    rows = {name: np.vstack([own, np.full_like(own, nan)]) for name, own in record.families.items()}
    outputs = OUTPUTS[rank]
    rows[OUTPUT_STATISTICS.name] = np.array([[nan, nan], [len(outputs), max(map(abs, outputs))]])
    return RankStep(
        rank,
        replace(
            schema,
            families=(*schema.families, *family_columns([OUTPUT_STATISTICS])),
            shares=(*schema.shares, batch),
            layers=(*schema.layers, Layer(name="blocks.0", share=1, elements=3)),
        ),
        replace(record, families=rows),
    )


@pytest.mark.parametrize("without", [(), (3,)])
def test_a_family_that_is_not_of_parameters_has_shares_of_its_own(without):
    ranks = [with_activations(rank) for rank in range(4)]
    root = make_root(4, families=(*FAMILIES, OUTPUT_STATISTICS))
    for number in range(2):
        here = [2 * number, 2 * number + 1]
        node = SimNode(
            number,
            here,
            4,
            lambda rank, sequence: ranks[rank],
            families=(*FAMILIES, OUTPUT_STATISTICS),
        )
        node.write(without=without)
        tables = [_activation_table(ranks[rank]) for rank in here if rank not in without]
        node.write_layers(1, tables)
        push(root, node)
    steps, table = steps_and_table(root.close_all())

    seen = [abs(v) for rank, outputs in OUTPUTS.items() if rank not in without for v in outputs]
    expected = {"elements": float(len(seen)), "abs_max": max(seen)}
    assert steps[1].families[OUTPUT_STATISTICS.name] == expected
    assert steps[1].gradients_complete, "rank 3 has a replica of the parameters"
    assert (OUTPUT_STATISTICS.name in steps[1].complete) is (not without)
    (view,) = table.families[OUTPUT_STATISTICS.name].views(step_judged=True)
    assert (view.name, view.values) == ("blocks.0", expected)
    assert view.judged is (not without)
    assert table.families[GRADIENTS.name].names == tuple(LAYERS)
    assert table.families[GRADIENTS.name].complete


def _activation_table(rank: RankStep) -> RankLayers:
    outputs = rank.record.families[OUTPUT_STATISTICS.name][1]
    gradients = table_of(rank.rank, LAYERS).families[GRADIENTS.name]
    absent = np.full((1, gradients.shape[1]), nan)
    families = {
        GRADIENTS.name: np.vstack([gradients, absent]),
        OUTPUT_STATISTICS.name: np.vstack([np.full((2, 2), nan), outputs]),
    }
    return RankLayers(rank.rank, rank.schema, families)


def test_a_negative_value_is_refused_only_where_a_column_has_none(monkeypatch):
    monkeypatch.setattr("mp_agent.records.reports.FAMILIES", BOTH)
    steps, _ = steps_and_table(merged_by(make_root(4, families=BOTH)))
    assert steps[SAMPLED].families[WEIGHTS.name]["smallest"] == -3.0

    unsigned = tuple(replace(column, signed=False) for column in WEIGHTS.columns)
    strict = (GRADIENTS, replace(WEIGHTS, columns=unsigned))
    monkeypatch.setattr("mp_agent.records.reports.FAMILIES", strict)
    with pytest.raises(ReportError, match="negative"):
        list(merged_by(make_root(4, families=BOTH)))
