"""The probe's numbers against an independent float64 reference, for all ways of training."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mp_agent.catalog.metrics.run import STEP_PARTS
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES
from tests.agent.gradient_reference import reference_total, reference_union
from tests.agent.probe.fully_shard import skipped_where_it_fails, strategies
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import (
    merge_layer_tables,
    merge_rings,
    read_rings,
    rows_by_name,
)
from tests.agent.probe.scenarios import job
from tests.agent.probe.scenarios.variants import POISONED_STEP, variants_of
from tests.subtests import each

JOBS = {
    "single": ("single", 1),
    "ddp2": ("ddp", 2),
    "ddp4": ("ddp", 4),
    "fsdp2x2": ("fsdp2", 2),
    "fsdp2x4": ("fsdp2", 4),
}
RELATIVE_ERROR = 1e-6

Trained = Callable[[str], Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train all variants of a job, once, and say where the rings are."""
    directories: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name not in directories:
            directories[name] = tmp_path_factory.mktemp(name)
            strategy, world_size = JOBS[name]
            run_ranks(job.run, world_size, strategy, directories[name], ranks=world_size)
        return directories[name]

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=skipped_where_it_fails(own)) for name, (own, _) in JOBS.items()],
)
@each("variant", lambda name: variants_of(JOBS[name][0]))
class TestEveryWayOfTraining:
    def test_global_statistics_equal_the_reference(self, trained, name, variant):
        directory, world_size = trained(name) / variant.name, JOBS[name][1]
        reference = np.load(directory / "reference0.npz")

        merged = merge_rings(read_rings(directory, world_size))

        assert len(merged) == variant.steps
        for step, rows_LC in zip(merged, reference["rows"], strict=True):
            assert step.gradients_complete
            observed = [step.gradients.get(column, np.nan) for column in GRADIENT_COLUMN_NAMES]
            expected = reference_total(reference_union(rows_LC))
            np.testing.assert_allclose(observed, expected, rtol=RELATIVE_ERROR)

    def test_layers_equal_the_reference_under_their_plain_names(self, trained, name, variant):
        directory, world_size = trained(name) / variant.name, JOBS[name][1]
        reference = np.load(directory / "reference0.npz")

        merged = merge_layer_tables(read_rings(directory, world_size))

        assert {2, 4} <= set(merged)
        for sequence, layers in merged.items():
            expected = dict(zip(reference["names"], reference["rows"][sequence - 1], strict=True))
            assert list(layers.names) == list(expected)
            for layer, row in rows_by_name(layers).items():
                np.testing.assert_allclose(row, expected[layer], rtol=RELATIVE_ERROR)

    def test_each_rank_reports_its_own_loss(self, trained, name, variant):
        directory, world_size = trained(name) / variant.name, JOBS[name][1]
        for rank, ring in read_rings(directory, world_size).items():
            losses = np.load(directory / f"reference{rank}.npz")["losses"]
            finite = np.isfinite(losses)
            assert ring.column("loss_nonfinite") == list(map(float, ~finite))
            observed = np.array(ring.column("loss"))
            np.testing.assert_allclose(observed[finite], losses[finite], rtol=RELATIVE_ERROR)
            assert np.isnan(observed[~finite]).all()

    def test_skipped_steps_and_loss_scales_are_recognised(self, trained, name, variant):
        directory, world_size = trained(name) / variant.name, JOBS[name][1]
        for rank, ring in read_rings(directory, world_size).items():
            reference = np.load(directory / f"reference{rank}.npz")
            if variant.scale:
                assert ring.column("skipped") == list(map(float, reference["skipped"]))
                assert ring.column("loss_scale") == list(reference["scales"])
            else:
                assert ring.column("skipped") == [0.0] * variant.steps
                assert np.isnan(ring.column("loss_scale")).all()

    def test_clipping_is_reported_along_with_the_values_before_it(self, trained, name, variant):
        directory, world_size = trained(name) / variant.name, JOBS[name][1]
        for step in merge_rings(read_rings(directory, world_size)):
            if not variant.clip_norm:
                assert step.get("clip_norm") is None
                continue
            assert step.get("clip_max_norm") == variant.clip_norm
            still_scaled = step.columns.get("loss_scale", 1.0)
            scale = 1.0 if variant.explicit_unscale else still_scaled
            assert step.grad_norm is not None
            assert step.get("clip_norm") == pytest.approx(step.grad_norm * scale, rel=1e-4)
            assert step.grad_norm > variant.clip_norm

    def test_facts_name_the_way_of_training(self, trained, name, variant):
        strategy, world_size = JOBS[name]
        ring = read_rings(trained(name) / variant.name, world_size)[0]
        assert ring.schema.fact("strategy") == {"single": "none"}.get(strategy, strategy)
        short = {"": "fp32", "bfloat16": "bf16", "float16": "fp16"}[variant.autocast]
        assert ring.schema.fact("precision") == short
        assert ring.schema.fact("scaler") == ("GradScaler" if variant.scale else "")
        assert ring.schema.fact("measuring_point") == _expected_measuring_point(variant)
        assert ring.schema.fact("device") == "cpu"
        assert ring.state.probe_errors == 0
        assert ring.state.unsupported == ()

    def test_time_before_the_first_collective_is_reported_where_it_is_known(
        self, trained, name, variant
    ):
        strategy, world_size = JOBS[name]
        for ring in read_rings(trained(name) / variant.name, world_size).values():
            compute, step = ring.column("compute_seconds"), ring.column("step_seconds")
            if strategy == "fsdp2":
                assert np.isnan(compute).all()
            else:
                assert all(
                    0 < own < whole for own, whole in zip(compute[1:], step[1:], strict=True)
                )

    def test_the_parts_of_a_step_are_all_seen_and_add_up_to_it(self, trained, name, variant):
        for ring in read_rings(trained(name) / variant.name, JOBS[name][1]).values():
            for index in range(1, len(ring.records)):
                values = ring.values(index)
                parts = [values[f"{part}_seconds"] for part in STEP_PARTS]
                assert min(parts[:3]) > 0 <= min(parts[3:])
                assert sum(parts) == pytest.approx(values["step_seconds"], rel=1e-9)


def _expected_measuring_point(variant) -> str:
    if variant.scale and (variant.explicit_unscale or not (variant.fused or variant.clip_norm)):
        return "unscale"
    return "clip" if variant.clip_norm or variant.clip_value else "optimizer_step"


@pytest.mark.slow
class TestPoisonOnOneRankOfFour:
    @pytest.mark.parametrize("name", strategies(["ddp4", "fsdp2x4"]))
    @pytest.mark.parametrize("variant", ["input_nan", "input_inf", "input_nan_fp16"])
    def test_in_its_input_names_the_rank_and_counts_elements(self, trained, name, variant):
        merged = merge_rings(read_rings(trained(name) / variant, 4))[POISONED_STEP - 1]
        assert merged.nonfinite_loss_ranks == (3,)
        assert merged.gradient_nonfinite_elements > 0
        assert all(
            np.isfinite(value) for value in (*merged.columns.values(), *merged.gradients.values())
        )
        assert merged.skipped == (variant == "input_nan_fp16")

    @pytest.mark.parametrize("name", strategies(["ddp4", "fsdp2x4"]))
    def test_born_in_backward_names_no_rank(self, trained, name):
        merged = merge_rings(read_rings(trained(name) / "backward_nan", 4))[POISONED_STEP - 1]
        assert merged.nonfinite_loss_ranks == ()
        assert merged.gradient_nonfinite_elements > 0
        assert not merged.skipped

    def test_born_in_backward_is_nearest_to_where_it_arose(self, trained):
        layers = merge_layer_tables(read_rings(trained("ddp4") / "backward_nan", 4))[POISONED_STEP]
        assert layers.nonfinite_nearest_output() == "body.2.bias"

    def test_loss_of_the_others_is_their_own(self, trained):
        rings = read_rings(trained("ddp4") / "input_nan", 4)
        flags = [ring.column("loss_nonfinite")[POISONED_STEP - 1] for ring in rings.values()]
        assert flags == [0.0, 0.0, 0.0, 1.0]
