"""What ranks hold, copies or parts, is judged tensor by tensor, as users train them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mp_agent.records.merged import MergedStep
from tests.agent.probe.rings import merge_rings, read_ring
from tests.e2e.replicas_job import LONG_STEPS, STEPS
from tests.frameworks.torchrun import WORLD, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("replicas")
    torchrun("tests.e2e.replicas_job", str(directory))
    return directory


@pytest.fixture
def merged(trained) -> Callable[[str], list[MergedStep]]:
    def steps_of(name: str) -> list[MergedStep]:
        rings = {
            rank: read_ring(trained / name / f"rank{rank}.ring", one_schema=False)
            for rank in range(WORLD)
        }
        assert all(ring.state.probe_errors == 0 for ring in rings.values())
        return merge_rings(rings)

    return steps_of


@pytest.mark.parametrize(
    "name",
    [
        "gradients_reduced_within_step",
        "inner_steps_of_diloco",
        "one_router_is_not_reduced",
        "ddp_ignores_two_norms",
        "the_last_micro_batch_under_no_sync",
        "the_wrapper_is_bypassed",
        "an_ensemble",
        "experts_from_one_seed",
        "one_rank_clips_the_norms",
    ],
)
def test_the_norm_counts_copies_once(merged, trained, name):
    norms = torch.load(trained / name / "norms.pt")
    assert [step.grad_norm for step in merged(name)] == pytest.approx(norms, rel=1e-6)
