"""Replicas that drift on purpose are not said to diverge; those that are corrupted are."""

from pathlib import Path

import pytest

from tests.agent.probe.rings import RingContents, merge_rings, read_ring
from tests.frameworks.torchrun import WORLD, torchrun

STEPS, FLIPPED_STEP = 12, 7

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def trained(framework, tmp_path_factory) -> Path:
    framework("accelerate")
    directory: Path = tmp_path_factory.mktemp("drift")
    torchrun("tests.frameworks.drift_job", str(directory))
    return directory


def rings_of(directory: Path) -> dict[int, RingContents]:
    return {
        rank: read_ring(directory / f"rank{rank}.ring", one_schema=False) for rank in range(WORLD)
    }


@pytest.mark.parametrize(
    "name",
    [
        "accelerate_local_sgd",
        "no_sync_and_an_outer_loop",
        "plain_models_and_an_outer_loop",
        "plain_models_averaged_after_a_warm_up",
        "post_local_sgd",
        "a_hook_that_keeps_gradients_local",
    ],
)
def test_replicas_that_synchronise_now_and_then_are_not_said_to_diverge(trained, name):
    merged = merge_rings(rings_of(trained / name))
    assert len(merged) == STEPS
    assert all(found.agree for step in merged for found in step.replicas.values())


@pytest.mark.parametrize(
    "name",
    ["plain_models_averaged_after_a_warm_up", "post_local_sgd", "one_step_without_a_reduction"],
)
def test_replicas_are_compared_as_long_as_they_reduce_their_gradients(trained, name):
    merged = merge_rings(rings_of(trained / name))
    assert any("weights" in step.replicas for step in merged[:4])


@pytest.mark.parametrize(
    "name",
    [
        "flipped_under_ddp",
        "flipped_under_a_hook_of_ones_own",
        "flipped_in_plain_models",
        "one_step_without_a_reduction",
    ],
)
def test_weights_that_differ_though_gradients_were_reduced_are_found(trained, name):
    merged = merge_rings(rings_of(trained / name))
    compared = {
        step.sequence: step.replicas["weights"] for step in merged if "weights" in step.replicas
    }
    assert {sequence for sequence, found in compared.items() if not found.agree} == {
        sequence for sequence in compared if sequence > FLIPPED_STEP
    }
    assert max(compared) == STEPS
