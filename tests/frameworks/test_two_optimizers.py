"""Muon and AdamW over one model: the run's numbers are over both, in every framework."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agent.probe.rings import RingContents, merge_rings, read_ring
from tests.frameworks.torchrun import WORLD, torchrun

STEPS, POISONED_STEP, LIMIT = 6, 5, 0.05

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.long]

SEEN_AS_TWO = ["transformers_without_hooks", "accelerate", "lightning", "lightning_clipped_apart"]
WAYS = ["transformers", *SEEN_AS_TWO]


@pytest.fixture(scope="module")
def trained(framework, tmp_path_factory) -> Path:
    for name in ("transformers", "accelerate", "lightning"):
        framework(name)
    directory: Path = tmp_path_factory.mktemp("two_optimizers")
    torchrun("tests.frameworks.two_optimizers_job", str(directory))
    return directory


def rings_of(directory: Path) -> dict[int, RingContents]:
    return {
        rank: read_ring(directory / f"rank{rank}.ring", one_schema=False) for rank in range(WORLD)
    }


def reference(directory: Path, name: str) -> list[Any]:
    """What the job computed for the steps before the one with NaN."""
    found: list[Any] = json.loads((directory / "reference0.json").read_text())[name]
    assert len(found) == STEPS
    return found[: POISONED_STEP - 1]


@pytest.mark.parametrize("way", WAYS)
class TestRun:
    def test_norm_is_over_both_parts_before_clipping(self, trained, way):
        rings = rings_of(trained / way)
        merged = merge_rings(rings)
        assert len(merged) == STEPS
        expected = reference(trained / way, "norms")
        assert min(expected) > LIMIT, "nothing was clipped"
        norms = [step.grad_norm for step in merged[: POISONED_STEP - 1]]
        assert norms == pytest.approx(expected, rel=1e-6)
        assert rings[0].state.unsupported == ()
        assert rings[0].state.probe_errors == 0

    def test_limit_and_coefficient_are_those_of_the_clipping(self, trained, way):
        merged = merge_rings(rings_of(trained / way))[: POISONED_STEP - 1]
        norms = reference(trained / way, "norms")
        if way == "lightning_clipped_apart":
            norms = [max(parts) for parts in reference(trained / way, "parts")]
        assert [step.get("clip_max_norm") for step in merged] == pytest.approx(
            [LIMIT] * len(merged)
        )
        assert [step.clip_coefficient for step in merged] == pytest.approx(
            [LIMIT / (norm + 1e-6) for norm in norms], rel=1e-4
        )

    def test_nan_in_the_second_part_is_found_at_its_step(self, trained, way):
        merged = merge_rings(rings_of(trained / way))
        found = [step.gradient_nonfinite_elements for step in merged]
        assert found[:POISONED_STEP] == [0.0] * (POISONED_STEP - 1) + [2.0]
        assert not merged[POISONED_STEP - 1].flag("loss_nonfinite")


@pytest.mark.parametrize("way", SEEN_AS_TWO)
def test_each_part_has_a_norm_of_its_own(trained, way):
    merged = merge_rings(rings_of(trained / way))[: POISONED_STEP - 1]
    seen = [[step.optimizers[name].grad_norm for name in ("0", "1")] for step in merged]
    for own, expected in zip(seen, reference(trained / way, "parts"), strict=True):
        assert sorted(norm for norm in own if norm is not None) == pytest.approx(
            sorted(expected), rel=1e-6
        )
