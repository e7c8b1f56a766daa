"""mp_agent's callbacks in real trainers: steps, tokens and numbers are those that they log."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mp_agent.ring import locations
from tests.agent.probe.rings import RingContents, merge_rings, read_ring
from tests.frameworks.torchrun import WORLD, torchrun

STEPS, SAVED_STEP = 6, 3
CONDITION = "MpAgentGradientExplosion"

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.long]

Trained = Callable[[str], Path]


@pytest.fixture(scope="module")
def trained(framework, tmp_path_factory) -> Trained:
    directories: dict[str, Path] = {}

    def train(name: str) -> Path:
        framework(name)
        if name not in directories:
            directories[name] = tmp_path_factory.mktemp(name)
            torchrun("tests.frameworks.integrations_job", name, str(directories[name]))
        return directories[name]

    return train


def rings_of(directory: Path, run: str) -> dict[int, RingContents]:
    paths = locations.find_rings(locations.run_directory(directory, run))
    assert len(paths) == WORLD
    return {rank: read_ring(path, one_schema=False) for rank, path in enumerate(sorted(paths))}


def steps_of(directory: Path, run: str) -> list[int]:
    return [step.step for step in merge_rings(rings_of(directory, run))]


def tokens_of(directory: Path, run: str) -> float:
    rings = rings_of(directory, run).values()
    return sum(
        ring.values(index).get("tokens", 0.0) for ring in rings for index in range(SAVED_STEP)
    )


@pytest.mark.parametrize("name", ["transformers", "lightning", "accelerate"])
def test_steps_go_on_from_the_checkpoint(trained, name):
    directory = trained(name)
    last = STEPS if name == "transformers" else SAVED_STEP
    assert steps_of(directory, "begun") == list(range(1, last + 1))
    assert steps_of(directory, "resumed") == list(range(SAVED_STEP + 1, STEPS + 1))


class TestTransformers:
    @pytest.fixture
    def history(self, trained) -> list[dict[str, Any]]:
        state = json.loads((trained("transformers") / "trainer/trainer_state.json").read_text())
        history: list[dict[str, Any]] = state["log_history"]
        return history

    def test_loss_norm_and_learning_rate_are_those_in_its_log(self, trained, history):
        merged = merge_rings(rings_of(trained("transformers"), "begun"))
        logged = [entry for entry in history if "loss" in entry]
        assert [entry["step"] for entry in logged] == list(range(1, STEPS + 1))
        for step, entry in zip(merged, logged, strict=True):
            assert step.get("loss") == pytest.approx(entry["loss"], abs=1e-4)
            assert step.grad_norm == pytest.approx(entry["grad_norm"], rel=1e-4)
            assert step.get("learning_rate") == pytest.approx(entry["learning_rate"])

    def test_tokens_are_those_that_it_counted(self, trained, history):
        (seen,) = {
            entry["num_input_tokens_seen"]
            for entry in history
            if entry.get("step") == SAVED_STEP and "loss" in entry
        }
        assert tokens_of(trained("transformers"), "begun") == seen > 0
        assert tokens_of(trained("transformers"), "resumed") == seen  # as many steps again

    def test_a_condition_stands_in_its_history(self, history):
        (found,) = [entry for entry in history if "mp_agent" in entry]
        assert found["mp_agent"]["name"] == CONDITION


class TestLightning:
    def test_loss_and_norm_are_those_that_the_module_saw(self, trained):
        directory = trained("lightning")
        for rank, ring in rings_of(directory, "begun").items():
            seen = json.loads((directory / f"seen{rank}.json").read_text())
            assert ring.column("loss") == pytest.approx(seen["losses"], rel=1e-6)
            norms = [step.grad_norm for step in merge_rings(rings_of(directory, "begun"))]
            assert norms == pytest.approx(seen["norms"], rel=1e-6)

    def test_validation_is_no_stall(self, trained):
        phases = json.loads((trained("lightning") / "seen0.json").read_text())["phases"]
        assert "EVAL" in phases
        assert phases[-1] != "EVAL"

    def test_a_condition_stands_in_its_log(self, trained):
        with (trained("lightning") / "begun/version_0/metrics.csv").open() as log:
            rows = list(csv.DictReader(log))
        assert [row["step"] for row in rows if row[f"mp_agent/{CONDITION}"] == "1.0"] == ["2"]


class TestAccelerate:
    @pytest.fixture
    def lines(self, trained) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = json.loads((trained("accelerate") / "begun.json").read_text())
        return lines

    def test_loss_norm_and_tokens_are_those_that_are_logged(self, trained, lines):
        merged = merge_rings(rings_of(trained("accelerate"), "begun"))
        logged = [line for line in lines if "loss" in line]
        assert [step.get("loss") for step in merged] == pytest.approx(
            [line["loss"] for line in logged]
        )
        assert [step.grad_norm for step in merged] == pytest.approx(
            [line["norm"] for line in logged], rel=1e-6
        )
        # What is logged after a step counts for the next one: the last step's is still to come.
        assert tokens_of(trained("accelerate"), "begun") == (SAVED_STEP - 1) * 8 * WORLD

    def test_a_condition_reaches_the_other_trackers_once(self, lines):
        (found,) = [line for line in lines if f"mp_agent/{CONDITION}" in line]
        assert found[f"mp_agent/{CONDITION}"] == 1.0
