"""DeepSpeed's numbers are those of one process in float64, and those that it gives itself."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from mp_agent.probe.tracker.optimizer_steps import ENGINE_BYPASSED
from mp_agent.records.columns import (
    ACTIVATIONS,
    BACKWARDS_DISCARDED,
    BATCH_INTERVAL_STEPS,
    GRADIENTS_ADD_UP,
    STEP_REPEATED,
    UNHELD_PARAMETERS,
)
from mp_agent.records.steps import NEVER_STEPPED
from mp_agent.ring.reader import RingReader
from tests.agent.probe.rings import (
    RingContents,
    merge_layer_tables,
    merge_rings,
    read_ring,
    read_rings,
    rows_by_name,
)
from tests.frameworks.deepspeed_variants import (
    CLIP,
    MICRO_BATCHES,
    POISONED_STEP,
    RESUMED_STEPS,
    STEPS,
    VARIANTS,
    Variant,
    reference_of,
)
from tests.frameworks.torchrun import WORLD, torchrun
from tests.subtests import each

RELATIVE_ERROR = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3}
"""Of the norm, against float64; that of a layer may be three times as large."""
OF_DEEPSPEED = 1e-5

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.long]

TRAINED_RATIO = "0.9979"
"""One of 487 elements is frozen."""

MEASURED = [name for name, variant in VARIANTS.items() if not variant.muon]


@pytest.fixture(scope="module")
def trained(framework, tmp_path_factory) -> Path:
    framework("deepspeed")
    directory: Path = tmp_path_factory.mktemp("deepspeed")
    torchrun("tests.frameworks.deepspeed_job", str(directory))
    return directory


@pytest.fixture
def rings(trained, name):
    return rings_of(trained, name)


def rings_of(trained: Path, name: str) -> dict[int, RingContents]:
    return {
        rank: read_ring(trained / name / f"rank{rank}.ring", one_schema=False)
        for rank in range(WORLD)
    }


@pytest.fixture
def seen(trained, name) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((trained / name / "seen.json").read_text())
    return found


def references(trained: Path, name: str):
    """Step, rows of the layers, loss; without the poisoned step."""
    variant = VARIANTS[name]
    for step in range(1, STEPS + 1):
        if not (variant.poisoned and step == POISONED_STEP):
            weights = trained / name / f"weights{step}.pt"
            yield step, *reference_of(weights, step, variant.dtype, WORLD)


def norm_of(rows) -> float:
    return float(np.sqrt(sum(row[0] for row in rows.values())))


@pytest.mark.parametrize("name", MEASURED)
class TestEveryStage:
    def test_norm_and_loss_are_those_of_one_process(self, trained, rings, name):
        merged = merge_rings(rings)
        assert [step.sequence for step in merged] == list(range(1, STEPS + 1))
        tolerance = RELATIVE_ERROR[VARIANTS[name].dtype]
        for step, rows, loss in references(trained, name):
            found = merged[step - 1]
            assert found.gradients_complete
            assert np.sqrt(found.get("sum_squares")) == pytest.approx(norm_of(rows), rel=tolerance)
            assert found.get("loss") == pytest.approx(loss, rel=tolerance)
            assert found.get("elements") == sum(row[5] for row in rows.values())
            assert found.get("abs_max") == pytest.approx(
                max(row[1] for row in rows.values()), rel=3 * tolerance
            )
            assert found.get("zero_elements") <= (5 if VARIANTS[name].dtype != "fp32" else 0)
            assert found.get("nan_elements") == found.get("inf_elements") == 0

    def test_norm_clipping_and_skips_are_those_of_deepspeed(self, rings, seen, name):
        variant = VARIANTS[name]
        for step, recorded in zip(merge_rings(rings), seen, strict=True):
            assert step.get("skipped") == recorded["skipped"]
            assert step.step == recorded["step"]
            norm = step.grad_norm
            assert norm is not None
            if recorded["norm"] is not None and not recorded["skipped"]:
                # At a step at which the scale grows, stage 3 divides by the scale of the next.
                grown = variant.stage == 3 and recorded["norm"] == pytest.approx(norm / 2, rel=1e-2)
                assert recorded["norm"] * (1 + grown) == pytest.approx(norm, rel=OF_DEEPSPEED)
            if variant.clips and not recorded["skipped"]:
                assert step.get("clip_max_norm") == CLIP
                assert step.get("clip_norm") == pytest.approx(norm, rel=OF_DEEPSPEED)
            else:
                assert step.get("clip_norm") is None
            assert step.get("learning_rate") == 1e-3

    def test_layers_bear_their_names_and_are_those_of_one_process(self, trained, rings, name):
        tables = merge_layer_tables(rings)
        assert set(tables) >= {1, 2, 4}
        tolerance = 3 * RELATIVE_ERROR[VARIANTS[name].dtype]
        for step, rows, _ in references(trained, name):
            if step in tables:
                found = rows_by_name(tables[step])
                assert list(found) == list(rows)
                for layer, row in rows.items():
                    assert np.sqrt(found[layer][0]) == pytest.approx(np.sqrt(row[0]), rel=tolerance)
                    assert found[layer][5] == row[5]

    def test_the_facts_are_right_and_nothing_failed(self, rings, name):
        variant = VARIANTS[name]
        for ring in rings.values():
            assert ring.schema.fact("strategy") == f"deepspeed_zero{variant.stage}"
            for mistake in (GRADIENTS_ADD_UP, BACKWARDS_DISCARDED, STEP_REPEATED):
                assert not any(value > 0.0 for value in ring.column(mistake))
            assert ring.schema.fact("precision") == variant.dtype
            assert ring.schema.fact("scaler") == (
                "DynamicLossScaler" if variant.dtype == "fp16" else ""
            )
            assert ring.schema.fact("measuring_point") == "engine_step"
            assert ring.schema.fact("data_ranks") == "0-1"
            assert ring.schema.fact("trained_ratio") == TRAINED_RATIO
            assert ring.state.probe_errors == 0
            assert ring.state.unsupported == ()

    def test_the_loss_scale_is_that_of_deepspeed(self, rings, seen, name):
        for step, recorded in zip(merge_rings(rings), seen, strict=True):
            expected = recorded["scale"] if VARIANTS[name].dtype == "fp16" else None
            assert step.get("loss_scale") == expected

    def test_no_replicas_are_said_to_diverge(self, rings, name):
        merged = merge_rings(rings)
        assert all(found.agree for step in merged for found in step.replicas.values())
        compared = {kind for step in merged for kind in step.replicas}
        assert compared == ({"gradients", "weights"} if VARIANTS[name].stage == 0 else set())

    def test_the_engine_can_be_freed_while_it_is_watched(self, trained, name):
        if VARIANTS[name].stage == 3:
            return  # DeepSpeed itself never lets go of it
        assert [(trained / name / f"freed{rank}").read_text() for rank in range(WORLD)] == [
            "True"
        ] * WORLD


@pytest.mark.parametrize("name", [name for name, each in VARIANTS.items() if each.poisoned])
def test_gradients_that_are_not_finite_are_counted_and_the_step_is_skipped(rings, name):
    poisoned = merge_rings(rings)[POISONED_STEP - 1]
    assert poisoned.get("nan_elements") == poisoned.get("elements")
    assert poisoned.get("skipped") == 1.0
    assert poisoned.nonfinite_loss_ranks == (1,)


@each("stage", [0, 1, 2, 3])
def test_a_layer_that_the_optimizer_does_not_get_is_named(trained, stage):
    rings = read_rings(trained / f"left out {stage}", WORLD, one_schema=False)
    assert merge_rings(rings)[9].get(UNHELD_PARAMETERS) == 2.0
    for ring in rings.values():
        assert ring.schema.fact("unheld_parameters") == "head.weight, head.bias"
        assert ring.state.probe_errors == 0


@each("stage", [0, 2])
def test_an_optimizer_that_is_stepped_in_place_of_the_engine_is_named(trained, stage):
    for rank in range(WORLD):
        with closing(RingReader.open(trained / f"bypassed {stage}" / f"rank{rank}.ring")) as ring:
            assert ring.state.unsupported == (ENGINE_BYPASSED,)
            assert ring.state.committed_sequence == ring.state.probe_errors == 0


@each("stage", [0, 2, 3])
def test_an_engine_that_is_never_stepped_is_named(trained, stage):
    for rank in range(WORLD):
        place = trained / f"never stepped {stage}" / f"rank{rank}.ring"
        with closing(RingReader.open(place)) as ring:
            assert ring.state.unsupported == (NEVER_STEPPED,)
            assert ring.state.never_steps
            assert ring.state.probe_errors == 0


@each("name", MEASURED)
def test_no_layer_is_named_where_the_optimizer_has_all(trained, name):
    steps = merge_rings(rings_of(trained, name))
    assert {step.get(UNHELD_PARAMETERS) for step in steps} <= {0.0, None}


@each("stage", [2, 3])
def test_batches_and_outputs_of_modules_are_looked_at(trained, stage):
    place = trained / f"one batch {stage}"
    rings = read_rings(place, WORLD, one_schema=False)
    last = merge_rings(rings)[-1]
    assert last.sequence == BATCH_INTERVAL_STEPS + 1
    ((group, batches),) = last.batches.items()
    assert (group, list(map(sorted, batches.values()))) == ("0-1", [[0, 1]])

    largest = json.loads((place / "largest0.json").read_text())
    tables = merge_layer_tables(rings, family=ACTIVATIONS.name)
    assert tables
    for sequence, table in tables.items():
        found = rows_by_name(table)["head"][ACTIVATIONS.names.index("abs_max")]
        of_step = largest[MICRO_BATCHES * (sequence - 1) : MICRO_BATCHES * sequence]
        assert found in [pytest.approx(each, rel=1e-6) for each in of_step]


@pytest.mark.parametrize("name", [Variant(2, resumed=True).name])
def test_steps_go_on_from_the_checkpoint(rings, name):
    assert [step.step for step in merge_rings(rings)] == [
        RESUMED_STEPS + step for step in range(1, STEPS + 1)
    ]


@pytest.mark.parametrize("name", [Variant(2, "bf16", muon=True).name])
def test_what_would_be_wrong_is_named_and_left_out(rings, name):
    for ring in rings.values():
        assert ring.state.unsupported == ("DeepSpeed's Muon",)
        assert ring.schema.fact("strategy") == "deepspeed_zero2"
        assert ring.schema.layers == ()
    for step in merge_rings(rings):
        assert step.get("gradients_measured") == 0.0, "a run without gradients is another mistake"
        assert step.get("sum_squares") is None
        assert step.get("clip_norm") is None
        loss = step.get("loss")
        assert loss is not None and loss > 0


@pytest.fixture(scope="module")
def trainers(framework, tmp_path_factory) -> Path:
    framework("deepspeed")
    framework("transformers")
    directory: Path = tmp_path_factory.mktemp("trainer")
    torchrun("tests.frameworks.deepspeed_trainer_job", str(directory))
    return directory


@each("stage", [2, 3])
def test_under_transformers_the_numbers_are_those_that_the_trainer_logs(trainers, stage):
    place = trainers / f"zero{stage}"
    rings = {rank: read_ring(place / f"rank{rank}.ring", one_schema=False) for rank in range(WORLD)}
    history = json.loads((place / "history.json").read_text())
    assert len(history) == STEPS
    for step, logged in zip(merge_rings(rings), history, strict=True):
        assert step.step == logged["step"]
        assert step.get("loss") == pytest.approx(logged["loss"], rel=1e-4)
        assert step.grad_norm == pytest.approx(logged["grad_norm"], rel=1e-4)
        assert step.get("learning_rate") == pytest.approx(logged["learning_rate"])
        clip_norm, clip_max_norm = step.get("clip_norm"), step.get("clip_max_norm")
        assert clip_norm is not None and clip_max_norm is not None
        assert clip_norm > clip_max_norm == pytest.approx(0.3)
    for ring in rings.values():
        assert ring.schema.fact("strategy") == f"deepspeed_zero{stage}"
        assert ring.schema.fact("precision") == "bf16"
        assert "model.layers.0.self_attn.q_proj.weight" in [
            each.name for each in ring.schema.layers
        ]
        assert ring.state.unsupported == ()
        assert ring.state.probe_errors == 0
