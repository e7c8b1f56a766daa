"""Lightning, whose optimizers get a closure at every step: nothing is missing, nothing is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agent.probe.rings import RingContents, merge_rings, read_ring
from tests.frameworks.torchrun import WORLD, torchrun

STEPS, ACCUMULATED = 4, 3

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def trained(framework, tmp_path_factory) -> Path:
    framework("lightning")
    directory: Path = tmp_path_factory.mktemp("lightning")
    torchrun("tests.frameworks.lightning_job", str(directory))
    return directory


def rings_of(directory: Path) -> dict[int, RingContents]:
    return {
        rank: read_ring(directory / f"rank{rank}.ring", one_schema=False) for rank in range(WORLD)
    }


def seen(directory: Path, rank: int, name: str) -> list[Any]:
    found: list[Any] = json.loads((directory / f"seen{rank}.json").read_text())[name]
    return found


class TestAutomatic:
    @pytest.mark.parametrize("name", ["default", "accumulated"])
    def test_gradients_and_layers_are_there_with_or_without_clipping(self, trained, name):
        rings = rings_of(trained / name)
        assert [step.grad_norm for step in merge_rings(rings)] == pytest.approx(
            seen(trained / name, 0, "norms"), rel=1e-6
        )
        assert rings[0].layers, "no layers were looked at"
        assert next(layer.name for layer in rings[0].schema.layers) == "model.0.weight"
        assert rings[0].schema.fact("strategy") == "ddp"

    @pytest.mark.parametrize("name", ["default", "accumulated"])
    def test_loss_is_the_mean_over_what_was_accumulated(self, trained, name):
        batches = 1 if name == "default" else ACCUMULATED
        for rank, ring in rings_of(trained / name).items():
            losses = seen(trained / name, rank, "losses")
            chunks = [losses[at : at + batches] for at in range(0, STEPS * batches, batches)]
            expected = [sum(chunk) / batches for chunk in chunks]
            assert ring.column("loss") == pytest.approx(expected, rel=1e-6)

    def test_nothing_is_said_not_to_be_measured(self, trained):
        for name in ("default", "accumulated", "by_hand"):
            assert not [m for m in seen(trained / name, 0, "messages") if "does not measure" in m]
            assert rings_of(trained / name)[0].state.unsupported == ()
            assert rings_of(trained / name)[0].state.probe_errors == 0

    def test_step_is_the_trainers_after_a_resume(self, trained):
        for name, first in (("default", 0), ("resumed", STEPS)):
            records = rings_of(trained / name)[0].records
            assert [record.step for record in records] == list(range(first + 1, first + STEPS + 1))
        assert seen(trained / "resumed", 0, "steps")[-1] == 2 * STEPS

    def test_validation_is_no_stall(self, trained):
        phases = seen(trained / "default", 0, "phases")
        assert phases.count("EVAL") >= STEPS // 2


def test_a_gan_stepped_by_hand_shows_the_first_optimizers_loss_and_norm(trained):
    rings = rings_of(trained / "by_hand")
    for rank, ring in rings.items():
        losses = seen(trained / "by_hand", rank, "losses")
        assert ring.column("loss") == pytest.approx(losses, rel=1e-6)
    norms = [step.grad_norm for step in merge_rings(rings)]
    assert norms == pytest.approx(seen(trained / "by_hand", 0, "norms"), rel=1e-5)


def test_fabric_shows_the_loss_that_its_user_divided_and_the_norm_before_clipping(trained):
    rings = rings_of(trained / "fabric")
    for rank, ring in rings.items():
        assert ring.column("loss") == pytest.approx(seen(trained / "fabric", rank, "losses"))
    norms = [step.grad_norm for step in merge_rings(rings)]
    assert norms == pytest.approx(seen(trained / "fabric", 0, "norms"), rel=1e-5)
    assert [layer.name for layer in rings[0].schema.layers] == ["weight", "bias"]
