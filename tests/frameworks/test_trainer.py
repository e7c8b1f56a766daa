"""transformers' Trainer and accelerate: loss, norm, step and phase are those that they log."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agent.probe.rings import RingContents, merge_rings, read_ring
from tests.frameworks.torchrun import WORLD, torchrun

STEPS, SAVED_STEP = 6, 3

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def trained(framework, tmp_path_factory) -> Path:
    framework("transformers")
    framework("accelerate")
    directory: Path = tmp_path_factory.mktemp("trainer")
    torchrun("tests.frameworks.trainer_job", str(directory))
    return directory


def rings_of(directory: Path) -> dict[int, RingContents]:
    return {rank: read_ring(directory / f"rank{rank}.ring") for rank in range(WORLD)}


def logged(directory: Path, name: str) -> list[float]:
    state = json.loads((directory / "trainer_state.json").read_text())
    return [entry[name] for entry in state["log_history"] if name in entry and "loss" in entry]


def seen(directory: Path, name: str) -> list[Any]:
    found: list[Any] = json.loads((directory / "seen.json").read_text())[name]
    return found


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
class TestTrainer:
    def test_loss_under_accumulation_is_the_one_it_logs(self, trained, optimizer):
        merged = merge_rings(rings_of(trained / optimizer / "ring"))
        assert [step.get("loss") for step in merged] == pytest.approx(
            logged(trained / optimizer, "loss"), abs=1e-4
        )

    def test_norm_is_that_before_clipping(self, trained, optimizer):
        merged = merge_rings(rings_of(trained / optimizer / "ring"))
        norms = [step.grad_norm for step in merged]
        assert norms == pytest.approx(seen(trained / optimizer, "norms"), rel=1e-6)
        assert norms == pytest.approx(logged(trained / optimizer, "grad_norm"), rel=1e-4)

    def test_step_is_the_one_it_logs(self, trained, optimizer):
        records = rings_of(trained / optimizer / "ring")[0].records
        assert [record.step for record in records] == logged(trained / optimizer, "step")

    def test_step_goes_on_from_the_checkpoint_after_a_resume(self, trained, optimizer):
        for ring in rings_of(trained / optimizer / "resumed").values():
            steps = [record.step for record in ring.records]
            assert steps == list(range(SAVED_STEP + 1, STEPS + 1))

    def test_saving_is_no_stall(self, trained, optimizer):
        assert seen(trained / optimizer, "phases").count("CHECKPOINT") >= STEPS // SAVED_STEP


def test_steps_of_a_second_trainer_of_the_same_process_are_the_ones_it_logs(trained):
    for rank in range(WORLD):
        ring = read_ring(trained / "successive" / "ring" / f"rank{rank}.ring", one_schema=False)
        steps = [record.step for record in ring.records]
        assert steps == [*range(1, STEPS + 1), *range(SAVED_STEP + 1, STEPS + 1)]


def test_evaluation_of_the_trainer_is_no_stall(trained):
    phases = seen(trained / "adam", "phases")
    assert phases.count("EVAL") >= STEPS // 2
    after = [phases[index + 1] for index, phase in enumerate(phases[:-1]) if phase == "EVAL"]
    assert set(after) <= {"FORWARD", "CHECKPOINT"}


def test_loss_under_accumulation_of_accelerate_is_the_mean_of_its_losses(trained):
    rings = rings_of(trained / "accelerate")
    for rank, ring in rings.items():
        expected = json.loads((trained / "accelerate" / f"losses{rank}.json").read_text())
        assert len(expected) > 3
        assert ring.column("loss")[: len(expected)] == pytest.approx(expected, rel=1e-5)
