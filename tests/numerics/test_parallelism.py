"""Merged numbers are those of one process in float64, whatever way the model is split."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mp_agent.records.columns import (
    GRADIENT_COLUMN_NAMES,
    GRADIENT_COLUMNS,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
)
from tests.agent.gradient_reference import reference_row, reference_total
from tests.agent.probe.rings import (
    RingContents,
    merge_layer_tables,
    merge_rings,
    read_ring,
    rows_by_name,
)
from tests.numerics.models import Model, seeded
from tests.numerics.training import STEPS, WORLD, Reference, updates_of
from tests.numerics.variants import VARIANTS
from tests.subtests import each

RELATIVE_ERROR = 1e-6
ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the rings and references of all variants are."""
    directory = tmp_path_factory.mktemp("numerics")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*torchrun, f"--nproc-per-node={WORLD}", "-m", "tests.numerics.job", str(directory)],
        check=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / '.editable'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
        },
    )
    return directory


@pytest.fixture(scope="session")
def rings(trained):
    read: dict[str, dict[int, RingContents]] = {}

    def rings_of(name: str) -> dict[int, RingContents]:
        if name not in read:
            read[name] = {
                rank: read_ring(trained / name / f"rank{rank}.ring", one_schema=False)
                for rank in range(WORLD)
            }
        return read[name]

    return rings_of


@pytest.fixture
def reference(trained) -> Callable[[str], Reference]:
    def of(name: str) -> Reference:
        found: Reference = torch.load(trained / name / "reference.pt", weights_only=False)
        return found

    return of


NO_ELEMENTS = reference_row(np.empty(0))


def _total(rows) -> np.ndarray:
    rows_LC = np.stack(list(rows.values()))
    columns = zip(GRADIENT_COLUMNS, rows_LC.T.tolist(), strict=True)
    return reference_total(np.array([own.algebra.merged(values) for own, values in columns]))


def _columns(values) -> list[float]:
    return [values.get(column, np.nan) for column in GRADIENT_COLUMN_NAMES]


@each("name", VARIANTS)
class TestEverySplit:
    @pytest.mark.parametrize("nodes", [1, 2])
    def test_global_statistics_equal_those_of_one_process(self, rings, reference, name, nodes):
        merged = merge_rings(rings(name), nodes=nodes)
        assert [step.sequence for step in merged] == list(range(1, STEPS + 1))
        for step, expected in zip(merged, reference(name), strict=True):
            assert step.gradients_complete
            np.testing.assert_allclose(
                _columns(step.gradients), _total(expected.pop("")), rtol=RELATIVE_ERROR
            )
            for label, rows in expected.items():
                assert GRADIENTS.name in step.optimizers[label].complete
                np.testing.assert_allclose(
                    _columns(step.optimizers[label].gradients), _total(rows), rtol=RELATIVE_ERROR
                )
            assert set(step.optimizers) == set(expected)

    def test_layers_equal_those_of_one_process(self, rings, reference, name):
        merged, expected_steps = merge_layer_tables(rings(name), nodes=2), reference(name)
        assert set(merged) == {1, 2, 4}
        for sequence, layers in merged.items():
            expected = {
                layer: row
                for rows in expected_steps[sequence - 1].values()
                for layer, row in rows.items()
            }
            found = rows_by_name(layers)
            assert layers.complete
            assert set(expected) <= set(found)
            for layer, row in found.items():
                np.testing.assert_allclose(
                    row, expected.get(layer, NO_ELEMENTS), rtol=RELATIVE_ERROR, err_msg=layer
                )

    def test_no_replica_is_said_to_diverge(self, rings, name):
        merged = merge_rings(rings(name), nodes=2)
        compared = {kind for step in merged for kind in step.replicas}
        assert all(found.agree for step in merged for found in step.replicas.values())
        if VARIANTS[name].strategy in ("ddp", "hsdp", "dp+tp", "declared"):
            assert compared - {"state"} == {"gradients", "weights"}

    def test_ranks_that_hold_the_same_have_equal_bits_of_their_weights(self, rings, name):
        place = WEIGHTS.names.index("bits")
        bits: dict[tuple[int, str, str, int], set[float]] = {}
        for ring in rings(name).values():
            for schema, record in zip(ring.record_schemas, ring.records, strict=True):
                rows = record.families.get(WEIGHTS.name)
                assert (rows is None) == (record.sequence == 3)
                pairs = zip(schema.shares, [] if rows is None else rows.tolist(), strict=False)
                for share, row in pairs:
                    key = (record.sequence, share.optimizer, share.group, share.shard_index)
                    if not share.assumed and not share.family and share.replica_count > 1:
                        bits.setdefault(key, set()).add(row[place])
        for found in bits.values():
            assert len(found) == 1
            assert found.pop() >= 0

    def test_the_strategy_is_named_and_nothing_failed(self, rings, name):
        for ring in rings(name).values():
            assert ring.schema.fact("strategy") == VARIANTS[name].strategy
            assert ring.state.probe_errors == 0
            assert ring.state.unsupported == VARIANTS[name].unsupported


_UPDATED = {
    "ddp": WORLD,
    "fsdp2": WORLD,
    "fsdp2_without_resharding": WORLD,
    "fsdp2_offloaded": WORLD,
    "hsdp": WORLD,
    "tensor_parallel": 1,
    "fsdp2_tensor_parallel": 2,
}
"""Variants that train the plain model, and on how many shares of the data."""


@each("name", _UPDATED)
def test_updates_of_weights_equal_those_of_one_process(rings, name):
    expected = updates_of(seeded(Model), range(_UPDATED[name]))
    layers = merge_layer_tables(rings(name), nodes=2, family=OPTIMIZER.name)
    steps = {step.sequence: step for step in merge_rings(rings(name), nodes=2)}
    assert set(layers) == {1, 2, 4}
    for sequence, table in layers.items():
        rows = expected[sequence - 1]
        assert table.complete
        assert steps[sequence].counts(OPTIMIZER)
        found = {
            layer: dict(zip(OPTIMIZER.names, row, strict=True))
            for layer, row in rows_by_name(table).items()
        }
        assert set(found) == set(rows)
        for column in next(iter(rows.values())):
            total = sum(row[column] for row in rows.values())
            merged = steps[sequence].families[OPTIMIZER.name][column]
            assert merged == pytest.approx(total, rel=RELATIVE_ERROR)
            for layer, row in rows.items():
                assert found[layer][column] == pytest.approx(row[column], rel=RELATIVE_ERROR), layer
