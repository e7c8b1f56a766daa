"""FSDP1, which torch runs on GPUs alone: merged numbers are those of one process."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing
from torch.multiprocessing.spawn import spawn

from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENT_COLUMNS
from tests.agent.gradient_reference import reference_total
from tests.agent.probe.rings import merge_layer_tables, merge_rings, read_ring, rows_by_name
from tests.gpu import fsdp_job
from tests.gpu.fsdp_job import VARIANTS, WORLD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

RELATIVE_ERROR = 1e-6


@pytest.fixture(scope="module")
def trained() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        directory = Path(name)
        spawn(fsdp_job.run, args=(directory,), nprocs=WORLD)
        yield directory


@pytest.fixture
def rings(trained, name):
    return {rank: read_ring(trained / name / f"rank{rank}.ring") for rank in range(WORLD)}


@pytest.fixture
def reference(trained, name):
    return torch.load(trained / name / "reference.pt", weights_only=False)


def _total(rows) -> np.ndarray:
    columns = zip(GRADIENT_COLUMNS, np.stack(list(rows.values())).T, strict=True)
    return np.array([column.algebra.merged(values.tolist()) for column, values in columns])


@pytest.mark.parametrize("name", [*VARIANTS, "scaled", "scaled_flat"])
class TestFsdp1:
    def test_global_statistics_equal_those_of_one_process(self, rings, reference):
        merged = merge_rings(rings)
        assert len(merged) == len(reference)
        for step, expected in zip(merged, reference, strict=True):
            assert step.gradients_complete
            observed = [step.gradients.get(column, np.nan) for column in GRADIENT_COLUMN_NAMES]
            total = reference_total(_total(expected[""]))
            np.testing.assert_allclose(observed, total, rtol=RELATIVE_ERROR)

    def test_layers_equal_those_of_one_process(self, rings, reference):
        merged = merge_layer_tables(rings)
        assert {1, 2, 4} <= set(merged)
        for sequence, layers in merged.items():
            expected = reference[sequence - 1][""]
            assert set(layers.names) == set(expected)
            for layer, row in rows_by_name(layers).items():
                np.testing.assert_allclose(row, expected[layer], rtol=RELATIVE_ERROR)

    def test_the_strategy_is_named_and_nothing_failed(self, rings, name):
        for ring in rings.values():
            assert ring.schema.fact("strategy") == "fsdp1"
            assert ring.state.probe_errors == 0
            assert ring.state.unsupported == ()
            expected = "unscale" if name.startswith("scaled") else "optimizer_step"
            assert ring.schema.fact("measuring_point") == expected


@pytest.mark.parametrize("name", ["scaled", "scaled_flat"])
def test_the_scaler_imported_late_and_fsdps_own_clipping_are_seen(rings):
    for ring in rings.values():
        assert ring.schema.fact("scaler") == "ShardedGradScaler"
        assert ring.column("loss_scale")[:2] == [2.0**8, 2.0**8]
        assert ring.column("clip_max_norm") == [1e-2] * len(ring.records)
        assert all(np.isfinite(ring.column("clip_norm")))
