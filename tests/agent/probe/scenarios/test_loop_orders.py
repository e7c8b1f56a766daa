"""What the probe records of the order of loops, wrong ones and healthy ones that look like them."""

from collections.abc import Callable
from math import isnan
from pathlib import Path

import pytest
import torch

from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.records.columns import (
    ACCUMULATION_BYPASSED,
    AUTOCAST_FP32_SHARE,
    BACKWARDS_DISCARDED,
    BATCH_NORM_MOMENTUM,
    BETAS_SWAPPED,
    CLIPPED_APART,
    CLIPPED_BY_SHARD,
    CLIPS_NOTHING,
    EVALUATED_IN_TRAINING,
    FP16_WITHOUT_LOSS_SCALE,
    GRADIENTS_ADD_UP,
    LATE_CLIPPING,
    LEFT_IN_EVALUATION,
    LOSS_IN_16_BITS,
    LOSS_INPUT_MISMATCH,
    OPTIMIZER_NEVER_STEPS,
    PADDING_IN_TARGETS,
    STEP_REPEATED,
    STEP_SCALED,
    TARGETS_BROADCAST,
    TARGETS_MISALIGNED,
    TARGETS_SEEN,
)
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import RingContents, read_ring
from tests.agent.probe.scenarios.loop_losses import HEALTHY, WRONG
from tests.agent.probe.scenarios.loop_orders import (
    OF_RANKS,
    RANKS,
    STEPS,
    classifier,
    loss_of,
    sgd,
    train_ranks,
)

_STREAKS = (
    ACCUMULATION_BYPASSED,
    GRADIENTS_ADD_UP,
    BACKWARDS_DISCARDED,
    LATE_CLIPPING,
    LEFT_IN_EVALUATION,
    OPTIMIZER_NEVER_STEPS,
    STEP_REPEATED,
    STEP_SCALED,
    CLIPPED_APART,
    CLIPPED_BY_SHARD,
    CLIPS_NOTHING,
    EVALUATED_IN_TRAINING,
    FP16_WITHOUT_LOSS_SCALE,
    LOSS_IN_16_BITS,
    LOSS_INPUT_MISMATCH,
    PADDING_IN_TARGETS,
    TARGETS_BROADCAST,
    TARGETS_MISALIGNED,
    TARGETS_SEEN,
    BATCH_NORM_MOMENTUM,
    BETAS_SWAPPED,
)
_STEPS, _SAMPLES = int(DEFAULTS["loop_mistake_steps"]), int(DEFAULTS["autocast_fp32_samples"])

pytestmark = pytest.mark.slow


@pytest.fixture
def recorded(watch) -> Callable[[Callable[[], object]], set[str]]:
    """Run a loop, and return the columns that show a mistake for as long as alerts require."""

    def run(loop: Callable[[], object]) -> set[str]:
        torch.manual_seed(0)
        watched = watch()
        loop()
        watched.probe.flush()
        return mistakes_in(watched.read(one_schema=False))

    return run


def mistakes_in(ring: RingContents) -> set[str]:
    """Return the columns that show a mistake in a ring for as long as alerts require."""
    assert ring.state.probe_errors == 0
    rows = [
        dict(zip(schema.step_columns, record.values.tolist(), strict=True))
        for record, schema in zip(ring.records, ring.record_schemas, strict=True)
    ]
    shares = [row[AUTOCAST_FP32_SHARE] for row in rows if not isnan(row[AUTOCAST_FP32_SHARE])]
    found = {name for name in _STREAKS if longest([row[name] for row in rows]) >= _STEPS}
    idle = len(shares) >= _SAMPLES and min(shares) > DEFAULTS["autocast_fp32_share"]
    return found | ({AUTOCAST_FP32_SHARE} if idle else set())


def longest(values: list[float]) -> int:
    """Return the number of consecutive steps with a value above 0."""
    best = count = 0
    for value in values:
        count = count + 1 if value > 0.0 else 0
        best = max(best, count)
    return best


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_loop_is_recorded_as_what_it_is(recorded, name):
    loop, column = WRONG[name]
    assert recorded(loop) == {column}


@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_a_healthy_loop_shows_no_mistake(recorded, name):
    assert recorded(HEALTHY[name]) == set()


def test_micro_batches_whose_gradients_an_engine_adds_up_are_not_discarded(watch):
    """Keras clears those of each, and keeps their sum in variables of its optimizer."""
    watched, model = watch(), classifier()
    optimizer = sgd(model)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step % 2:
            optimizer.step()
        else:
            watched.probe._tracker.gradients_kept()
    assert mistakes_in(watched.read()) == set()


def test_ranks_show_each_what_is_wrong_with_their_loop_and_no_more(tmp_path: Path):
    run_ranks(train_ranks, tmp_path, ranks=RANKS)
    for rank in range(RANKS):
        rings = {kind: tmp_path / f"{kind}{rank}.ring" for kind in OF_RANKS}
        found = {
            kind: mistakes_in(read_ring(path, one_schema=False)) for kind, path in rings.items()
        }
        assert found == OF_RANKS
